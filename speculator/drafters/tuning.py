"""Figures that adaptive drafting starts from: `decoding.json` in a head's folder, written by `speculator eval tune`.

A head that was never tuned starts from typical acceptance rates. Step costs of another machine or dtype are measured
again when decoding starts, within six seconds, and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from speculator.about import processor
from speculator.decoding.drafter import Shape
from speculator.device import dtype_name, hardware
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostEntry, CostTable, entries_from_json
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.measure import measure_costs, packs_rows
from speculator.drafters.price import Choice
from speculator.drafters.shapes import Chain
from speculator.errors import UserError
from speculator.files import cached_object, read_json
from speculator.heads import Speculator
from speculator.kernels import cuda_graphs
from speculator.target.model import Target
from speculator.terminal import log

TUNED = "decoding.json"
PROMPT_HASHES = "prompt_hashes"
"""Key of its list of the prompts that the head was tuned on, see `eval.suites.Suite.prompt_hashes`."""
SECONDS = 6.0
"""Time limit of measuring costs when decoding starts."""
_LONGEST_CHAIN, _WHOLE_CHAIN = 12, 0.05
"""Limits of chains deeper than the head was trained for: tokens, and the chance that all of them are accepted."""
_TYPICAL = CostEntry(1, True, head=0.0, path=0.0, level=0.1, token=0.02)
"""Assumed costs, for a target that is too slow to be measured in time."""
_NOT_SHAPE = ("base_model", "trained_length", "training_data", "dtype", "transformers_version", "architectures")
"""Beginnings of the names in a head's config that step costs do not depend on."""

Ranks = Sequence[Sequence[float]]
"""a[d][r]: acceptance rate of the child of rank r, given that its parent at depth d was accepted (0: the root)."""


@dataclass
class Tuning:
    """Measurements of a head, by "greedy" and "sampled".

    Attributes:
        ranks: acceptance by depth and rank.
        trees: trees worth drafting, each as the `paths` of a `FixedTree`.
        lookup: acceptance rates of a looked-up token after a match of 1, 2, ... tokens.
        costs: step costs, as measured on `machine`.
        machine: see `measured_on`.
    """

    ranks: dict[str, Ranks]
    trees: dict[str, list[list[tuple[int, ...]]]] = field(default_factory=dict)
    lookup: dict[str, Sequence[float]] = field(
        default_factory=lambda: {"greedy": (0.2, 0.4, 0.6), "sampled": (0.1, 0.3, 0.5)}
    )
    costs: list[CostEntry] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)


def untuned(head: Speculator) -> Tuning:
    """Return typical figures, for a head that was never tuned."""
    return Tuning({kind: [[0.6]] * head.n_predict for kind in ("greedy", "sampled")})


def read_tuning(folder: str | Path, head: Speculator) -> Tuning | None:
    """Read the `decoding.json` of a head's folder; None if there is none. Raises a UserError if it does not fit."""
    file = Path(folder) / TUNED
    if not file.is_file():
        return None
    try:
        read = read_json(file)
        costs = entries_from_json(read["costs"])
        tuning = Tuning(
            ranks=read["acceptance"],
            trees=read["trees"],
            lookup={kind: list(map(float, read["lookup"][kind])) for kind in ("greedy", "sampled")},
            costs=costs,
            machine={name: read[name] for name in ("processor", "dtype")},
        )
        choices_of(head, tuning)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UserError):
        raise UserError(f"{file} was not written by this version's `eval tune`: tune again, or delete it") from None
    if {len(ranks) for ranks in tuning.ranks.values()} != {head.n_predict}:
        raise UserError(f"{file} was written for a head of another depth: tune again, or delete it")
    return tuning


def tuned_prompts(folder: str | Path | None) -> set[str]:
    """Return the hashes of the prompts that the head in a folder was tuned on; empty if its file names none."""
    file = Path(folder or "", TUNED)
    return set(read_json(file).get(PROMPT_HASHES, ())) if folder and file.is_file() else set()


def measured_on(target: Target) -> dict[str, str]:
    """Return "processor" and "dtype", on which step costs depend; a change of the number of threads goes unnoticed."""
    device = hardware(target.device) if target.device.type == "cuda" else processor()
    return {"processor": device, "dtype": dtype_name(target.dtype)}


def adaptive_drafter(
    head: Speculator,
    target: Target,
    tuning: Tuning | None = None,
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    batch_size: int = 1,
    memory: int = 0,
) -> AdaptiveDrafter:
    """Make an adaptive drafter for a head, measuring step costs if they are not known for this machine.

    Args:
        tuning: measured figures, see `read_tuning`; None: typical ones.
        batch_size: the most rows that decode at a time.
        memory: number of tokens of other sequences that n-gram lookup searches, see `NgramDrafter`.
    """
    tuning = tuning or untuned(head)
    choices, entries = choices_of(head, tuning), tuning.costs
    # Every shape is a CUDA graph of its own, for each number of rows and kind of sampling: keep to few.
    if head.device.type in cuda_graphs.DEVICES:
        choices = [choice for choice in choices if choice.shape.nodes in (1, 2, head.n_predict) or _is_tree(choice)]
    if not entries or tuning.machine != measured_on(target):
        shapes = shapes_to_measure(head, choices)
        entries = _costs_here(head, target, shapes, temperatures, batch_size) or entries or [_TYPICAL]
    table = CostTable(entries)
    lookup = {kind == "greedy": chances for kind, chances in tuning.lookup.items()}
    return AdaptiveDrafter(head, choices, lookup, table, memory, packs_rows(target))


def choices_of(head: Speculator, tuning: Tuning) -> list[Choice]:
    """Return chains of every length and the tuned trees, with their measured acceptance rates by depth."""
    chances = {kind == "greedy": [level[0] for level in ranks] for kind, ranks in tuning.ranks.items()}
    if head.config.max_speculative_tokens is None:
        for own in chances.values():
            # Deeper than measured, the last rate is assumed to hold: 0.8 0.7 goes on with 0.7 while the product, the
            # chance that the whole chain is accepted, is at least 0.05.
            while len(own) < _LONGEST_CHAIN and prod(own) * own[-1] >= _WHOLE_CHAIN:
                own.append(own[-1])
    longest = max(map(len, chances.values()))
    choices = []
    for length in range(1, longest + 1):
        by_kind: dict[bool, Sequence[float]] = {
            kind: (own + own[-1:] * longest)[:length] for kind, own in chances.items()
        }
        choices.append(Choice(Chain(length), by_kind))
    for kind, trees in tuning.trees.items():
        for paths in trees:
            tree = FixedTree(paths)
            choices.append(Choice(tree, {kind == "greedy": rates_by_depth(tree, tuning.ranks[kind])}))
    return choices


def rates_by_depth(tree: FixedTree, ranks: Ranks) -> list[float]:
    """Return the acceptance rate of each level of a tree, given that a node of the level before was accepted."""
    # reached[d]: the chance that a node at depth d is accepted. It is a sum, since at most one node of a level can be.
    reached = [1.0] + [0.0] * tree.depth
    for path in tree.paths:
        reached[len(path)] += prod(ranks[depth][rank] for depth, rank in enumerate(path))
    return [own / max(before, 1e-9) for before, own in pairwise(reached)]


def shapes_to_measure(head: Speculator, choices: Sequence[Choice]) -> list[Shape]:
    """Return the drafts to time, the most important first; the costs of other drafts follow from theirs."""
    longest = max(choice.shape.nodes for choice in choices if not _is_tree(choice))
    lengths = dict.fromkeys((head.n_predict, 1, min(2, longest), longest))
    return [*map(Chain, lengths), *(choice.shape for choice in choices if _is_tree(choice))]


def _is_tree(choice: Choice) -> bool:
    return isinstance(choice.shape, FixedTree)


def _costs_here(
    head: Speculator, target: Target, shapes: Sequence[Shape], temperatures: Sequence[float], batch_size: int
) -> list[CostEntry]:
    """Return step costs, measured now or by an earlier process of the same code here; maybe not all sizes."""
    kinds = sorted({temperature == 0 for temperature in temperatures})
    # The most important numbers of rows first: the time may end.
    sizes = [(rows, greedy) for rows in dict.fromkeys([batch_size, 1, min(4, batch_size)]) for greedy in kinds]
    machine = measured_on(target)
    shape = {name: value for name, value in sorted(head.config.to_dict().items()) if not name.startswith(_NOT_SHAPE)}
    facts = f"{target.fingerprint.partition(':')[0]} {type(head).__name__} {shape} {sizes}"
    sizes_of = [(shape.levels, shape.nodes) for shape in shapes]
    facts += f"{torch.__version__} {version('transformers')} {code_digest(Path(__file__).parents[1])} {sizes_of}"
    name = f"{machine['processor']} {machine['dtype']} {hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    with cached_object("costs", name) as stored:
        with suppress(KeyError, TypeError, ValueError, UserError):  # damaged
            return entries_from_json(stored["entries"])
        log(f"measuring which drafts are fastest on this machine: {SECONDS:g} s at most, and only once")
        entries = measure_costs(target, head, shapes, sizes, SECONDS)
        if entries:  # else the machine was too busy, and the next process tries again
            stored["entries"] = [asdict(entry) for entry in entries]
        return entries


def code_digest(folder: Path) -> str:
    """Return a digest of all Python files of a folder: costs measured by other code may be wrong."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))).hexdigest()
