"""`decoding.json` beside a head: what `python -m eval tune` found, where, and what a drafter makes of it here."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch

from speculator.checkpoints.loading import load_head
from speculator.decoding.drafter import Shape
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name, hardware
from speculator.drafters.adaptive import AdaptiveDrafter, Copied
from speculator.drafters.controller import Choice, fastest_shape
from speculator.drafters.costs import CostEntry, CostTable, measure_table
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.head import HeadDrafter
from speculator.drafters.hybrid import Hybrid
from speculator.drafters.shapes import Chain
from speculator.errors import UserError
from speculator.files import cached_object, read_json
from speculator.heads import Speculator
from speculator.target.model import Target

TUNED = "decoding.json"
SIZES = (1, 8, 32, 4, 2, 16)
"""Rows in flight for which costs are measured, the most telling first."""
_CONTEXTS = (64, 1024)
LONGEST_CHAIN = 8
_BESIDE = 4  # tokens of the path in the mixed draft whose cost is measured
_SECONDS = 6.0  # that may go into measuring costs when decoding starts
_log = logging.getLogger(__name__)


def measured_on(target: Target, batch_size: int) -> dict[str, Any]:
    """What a tuned shape depends on beside the head: the machine and its threads, the dtype, the batch size."""
    where = target.broadcast_object(hardware(target.device))
    return {"hardware": where, "dtype": dtype_name(target.dtype), "batch_size": batch_size}


def tuned_drafter(
    folder: str | Path,
    target: Target,
    temperature: float = 0.0,
    batch_size: int = 1,
    head: Speculator | None = None,
    auto: bool = True,
) -> HeadDrafter:
    """The head of a folder, drafting what is the fastest before each step, see `AdaptiveDrafter`.

    Tuned on this machine and in this dtype: by the costs in `decoding.json`. Tuned elsewhere: costs are measured here,
    once, in seconds, which a line on stderr says. Tuned by an older version, which did not note how much is accepted:
    the one shape that was the fastest, on the machine that it was tuned on; elsewhere the whole chain, and a line says
    how to tune. Never tuned: the whole chain.

    Args:
        head: what `load_head` gave for the folder, where that was called before.
        auto: False: the same draft at each step, the fastest on the text that it was tuned on. Then a text that is
            drawn by a seed does not depend on what else is decoded.

    Raises:
        UserError: as `load_head`, or a `decoding.json` that is not what `tune` writes, or for another head.
    """
    head = load_head(folder, target) if head is None else head
    chosen = automatic(folder, target, head, [temperature], batch_size) if auto else None
    return chosen or HeadDrafter(head, tuned_shapes(folder, target, head, [temperature], batch_size)[temperature])


def automatic(
    folder: str | Path,
    target: Target,
    head: Speculator,
    temperatures: Sequence[float],
    batch_size: int,
    memory: int = 0,
) -> AdaptiveDrafter | None:
    """The head of a folder drafting what is the fastest for up to `batch_size` rows at these temperatures: greedy ones
    as tuned, others as tuned at the nearest of them. None where that was not tuned. Of the lookup's `memory` see
    `NgramDrafter`.

    Raises:
        UserError: a file that is not what `tune` writes, or that is for another head.
    """
    file = Path(folder) / TUNED
    found = _read(file, head) if file.is_file() else None
    if found is None or not found.choices(temperatures):
        return None
    table, warmest = found.table(file, target, head, temperatures, batch_size), max(temperatures)
    alone = _shapes(found, file, target, head, [warmest], 1)[warmest] or Chain(head.n_predict)
    return AdaptiveDrafter(head, found.choices(temperatures), found.lookup, table.cost, alone, memory)


def tuned_shapes(
    folder: str | Path, target: Target, head: Speculator, temperatures: Iterable[float], batch_size: int = 1
) -> dict[float, Shape | None]:
    """The shape for each temperature: tuned greedily for 0, for the nearest tuned one above it. None where none was, or
    not in this place by a version that did not note how much is accepted, which a line on stderr says.

    Raises:
        UserError: a file that is not what `tune` writes, or that is for another head.
    """
    file, temperatures = Path(folder) / TUNED, list(temperatures)
    if not file.is_file():
        return dict.fromkeys(temperatures)
    return _shapes(_read(file, head), file, target, head, temperatures, batch_size)


def _shapes(
    found: _Tuned, file: Path, target: Target, head: Speculator, temperatures: Sequence[float], batch_size: int
) -> dict[float, Shape | None]:
    here = measured_on(target, batch_size)
    there = found.place | {"batch_size": batch_size if batch_size in found.settings else min(found.settings)}
    shapes = {each: _shape(found.settings[there["batch_size"]], each) for each in temperatures}
    if there == here or not any(shapes.values()):
        return shapes
    if found.measured:
        table = found.table(file, target, head, temperatures, batch_size)
        kinds = {each: Sampling(each).greedy for each in temperatures}
        return {
            each: fastest_shape(found.choices([each]), table.cost, kinds[each], batch_size) for each in temperatures
        }
    _log.warning(
        f"{file} was measured {_named(there)}, and this is {_named(here)}: the head drafts a chain of "
        f"{head.n_predict}. To measure here: python -m eval tune --target {target.name} --speculator {file.parent} "
        f"--batch_size {batch_size} --suite TEXT"
    )
    return dict.fromkeys(temperatures)


@dataclass
class _Tuned:
    """What `decoding.json` says: where it was measured, and the settings of each batch size.

    Attributes:
        measured: what was decoded: temperature, shape, and how often a token of each depth was accepted.
        lookup: how often a copied token was, after a match of 1, 2, ... tokens.
        entries: what steps cost there.
    """

    place: dict[str, Any]
    settings: dict[int, list[dict[str, Any]]]
    measured: list[tuple[float, Shape, list[float]]]
    lookup: list[float]
    entries: list[CostEntry]

    def choices(self, temperatures: Sequence[float]) -> list[Choice]:
        """What is known at temperature 0, and at the one nearest to the others. Of two kinds one that was not tuned is
        taken for the other, which has chains alone; none where neither was.
        """
        chosen: dict[Any, tuple[Shape, dict[bool, Sequence[float]]]] = {}
        wanted, tuned = max(temperatures), {each for each, *_ in self.measured}
        kinds = {Sampling(each).greedy for each in temperatures}
        if kinds.isdisjoint(Sampling(each).greedy for each in tuned):
            return []
        for greedy in kinds:
            known = {each for each in tuned if Sampling(each).greedy == greedy}
            nearest = min(known or tuned, key=lambda each: abs(each - wanted))
            own = [
                (shape, acceptance)
                for temperature, shape, acceptance in self.measured
                if temperature == nearest and (known or not isinstance(shape, FixedTree))
            ]
            of_chains = _together([acceptance for shape, acceptance in own if not isinstance(shape, FixedTree)])
            for shape, acceptance in own:
                tree = isinstance(shape, FixedTree)
                key = shape.paths if isinstance(shape, FixedTree) else shape.depth
                chosen.setdefault(key, (shape, {}))[1][greedy] = acceptance if tree else of_chains[: shape.depth]
        return [Choice(shape, acceptance) for shape, acceptance in chosen.values()]

    def table(
        self, file: Path, target: Target, head: Speculator, temperatures: Sequence[float], rows: int
    ) -> CostTable:
        """What steps cost here: as the file says, if it was written here, otherwise measured now, and kept."""
        here = measured_on(target, rows)
        if self.entries and all(here[name] == value for name, value in self.place.items()):
            return CostTable(self.entries)
        kinds = sorted({Sampling(each).greedy for each in temperatures})
        sizes = [size for size in sorted(SIZES, reverse=True) if size < 2 * rows]
        short, *longer = contexts(target)
        wanted = [(size, short, kind) for size in sizes for kind in kinds]
        wanted += [(1, context, kind) for context in longer for kind in kinds if rows == 1]
        shapes = shapes_to_measure(head, [choice.shape for choice in self.choices(temperatures)])
        facts = f"{target.fingerprint.partition(':')[0]} {type(head).__name__} {head.config.to_json_string()}"
        facts += json.dumps([shape_to_json(shape) for shape in shapes])
        name = f"{here['hardware']} {here['dtype']} torch {torch.__version__} "
        name += hashlib.sha256(facts.encode()).hexdigest()[:16]
        storing: AbstractContextManager[dict[str, Any]] = cached_object("steps", name)
        if target.group is not None and not target.group.leads:  # it would wait for the first one's lock
            storing = nullcontext({})
        with storing as stored:
            entries, asked = [], []
            with suppress(KeyError, TypeError, ValueError, UserError):  # damaged, or of another version: made again
                entries = [entry_from_json(each) for each in stored["entries"]]
                asked = [tuple(each) for each in stored["asked"]]
            known = [(entry.rows, entry.context, entry.greedy) for entry in entries]
            # What there was no time for is not asked for again, unless it is what is wanted most.
            enough = set(wanted) <= set(asked) and wanted[0] in known
            missing = [] if enough else [size for size in wanted if size not in known]
            missing = [tuple(size) for size in target.broadcast_object(missing)]
            if missing:
                _log.warning(f"{file}: costs of steps are measured on this machine, once")
                entries += measure_table(target, head, shapes, missing, _SECONDS)
                stored.update(asked=[*asked, *missing], entries=[entry_to_json(entry) for entry in entries])
        return CostTable(
            [entry_from_json(each) for each in target.broadcast_object([entry_to_json(entry) for entry in entries])]
        )


def _together(chains: Sequence[Sequence[float]]) -> list[float]:
    """How often a token of each depth is accepted, from chains of several lengths that decoded as many tokens each.

    The drafts of one are the beginnings of another's; each alone was seen in few steps.
    """
    longest = max(map(len, chains), default=0)
    hits, tried = [0.0] * longest, [0.0] * longest
    for chain in chains:
        reached = list(accumulate(chain, mul, initial=1.0))  # of a step
        for depth, chance in enumerate(chain):
            hits[depth] += chance * reached[depth] / sum(reached)
            tried[depth] += reached[depth] / sum(reached)
    return [hit / max(count, 1e-9) for hit, count in zip(hits, tried, strict=True)]


def _read(file: Path, head: Speculator) -> _Tuned:
    try:
        read = read_json(file)
        if type(read["settings"]) is not list:
            raise TypeError(read["settings"])
        batch_size: Any = read.get("batch_size")
        settings: dict[Any, list[dict[str, Any]]] = {}
        for each in read["settings"]:
            settings.setdefault(each.get("batch_size", batch_size), []).append(each)
        shapes = [_shape(own, each["temperature"]) for own in settings.values() for each in own]
        if not all(type(size) is int for size in settings) and set(settings) != {None}:
            raise TypeError(settings)
        measured = [
            (
                float(each["temperature"]),
                shape_from_json(each),
                [float(chance) for chance in each["acceptance_by_position"]],
            )
            for each in read.get("measured", [])
            if "acceptance_by_position" in each and each["batch_size"] == read["measured"][0]["batch_size"]
        ]
        if not all(0 < len(own) <= shape.depth and all(0 <= each <= 1 for each in own) for _, shape, own in measured):
            raise ValueError(measured)
        lookup = [float(chance) for chance in read.get("lookup", [])]
        entries = [entry_from_json(each) for each in read.get("costs", [])]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, UserError):
        raise UserError(f"{file} is not what `python -m eval tune` writes: make it anew, or delete it") from None
    for shape in [*shapes, *(shape for _, shape, _ in measured)]:
        deepest = head.config.max_speculative_tokens
        if shape is not None and deepest is not None and shape.depth > deepest:
            raise UserError(f"{file} is for a head of {shape.depth} tokens: tune this one anew")
    there = {name: read.get(name) for name in ("hardware", "dtype")}
    return _Tuned(there, settings or {batch_size: []}, measured, lookup, entries)


def contexts(target: Target) -> list[int]:
    """Return the sequence lengths to measure costs at: a short one, and longer ones up to half the context."""
    half = target.context_length // 2
    short, *longer = _CONTEXTS
    return [min(short, half), *(length for length in longer if length <= half)]


def shapes_to_measure(head: Speculator, shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes to measure so that the costs of all others follow: chains of one, two and the most tokens, the trees
    among `shapes`, copied paths, and a draft with a path beside it."""
    longest = min(head.n_predict, LONGEST_CHAIN)
    lengths = sorted({1, min(2, longest), longest})  # the second token may cost more than a later one
    chains: list[Shape] = [Copied(0), *map(Chain, lengths)]
    trees = {shape.paths: shape for shape in shapes if isinstance(shape, FixedTree)}
    return [*chains, *trees.values(), Hybrid(Chain(longest), _BESIDE)]


def shape_from_json(read: dict[str, Any]) -> Shape:
    """What `shape_to_json` gave."""
    if read.get("beside"):
        return Hybrid(shape_from_json({**read, "beside": None}), read["beside"])
    if read.get("tree"):
        return FixedTree(read["tree"])
    return Chain(read["num_speculative_tokens"]) if read["num_speculative_tokens"] else Copied(0)


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """A shape as `decoding.json` has it."""
    if isinstance(shape, Hybrid):
        return {**shape_to_json(shape.inner), "beside": shape.length}
    if isinstance(shape, FixedTree):
        return {"tree": [list(path) for path in shape.paths]}
    return {"num_speculative_tokens": shape.depth}


def entry_from_json(read: dict[str, Any]) -> CostEntry:
    """What `entry_to_json` gave.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    shapes = [(shape_from_json(each), float(each["draft"]), float(each["verify"])) for each in read["steps"]]
    numbers = read["rows"], read["context"]
    if not all(type(number) is int for number in numbers) or type(read["greedy"]) is not bool or not shapes:
        raise TypeError(read)
    seconds = float(read["seconds"])
    if min(numbers) < 1 or not seconds > 0:
        raise ValueError(read)
    return CostEntry(*numbers, read["greedy"], seconds, shapes)


def entry_to_json(entry: CostEntry) -> dict[str, Any]:
    """An entry as `decoding.json` has it."""
    steps = [{**shape_to_json(shape), "draft": draft, "verify": verify} for shape, draft, verify in entry.shapes]
    return {
        "rows": entry.rows,
        "context": entry.context,
        "greedy": entry.greedy,
        "seconds": entry.seconds,
        "steps": steps,
    }


def _shape(settings: list[dict[str, Any]], temperature: float) -> Shape | None:
    fitting = [each for each in settings if Sampling(each["temperature"]).greedy == (temperature == 0)]
    if not fitting:
        return None
    best = min(fitting, key=lambda each: abs(each["temperature"] - temperature))
    return FixedTree(best["tree"]) if "tree" in best else Chain(best["num_speculative_tokens"])


def _named(place: dict[str, Any]) -> str:
    if None in place.values():
        return "it does not say where"
    return f"{place['hardware']}, {place['dtype']}, batch size {place['batch_size']}"


def described(shape: Shape) -> str:
    """A shape in words."""
    if isinstance(shape, FixedTree):
        return f"a tree of {shape.nodes} tokens, {shape.depth} deep"
    return f"{shape.depth} token{'s' * (shape.depth > 1)}"
