"""Losslessness, measured: the text of drafting is the target's own, on this machine and with these weights.

At temperature 0 texts are compared token by token, with plain decoding and with transformers. A forward pass over
several tokens rounds otherwise than one over a single token, so two texts may part where the target's two best logits
are closer than that: how close is measured on transformers' own passes, which nothing of this library takes part in.
Above temperature 0 many short continuations of a prompt are drawn with drafts and without; a chi-square test compares
the two samples.

Longer than other files: both tests stand with the words that explain their verdict.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data.sources import PYTHON_SOURCES
from eval.chi_square import sampled_twice
from eval.metrics import drafted_share
from eval.suites import add_flags, check_flags, check_lengths, suite_of
from eval.timing import as_loaded
from speculator import Drafter, Target, generate
from speculator.cli import drafting
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Shape
from speculator.decoding.scheduler import common_prefix
from speculator.decoding.verify import RULES
from speculator.device import dtype_name
from speculator.drafters import HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.tuned import automatic
from speculator.errors import OneLineParser, refuse_below
from speculator.files import check_file, write_json
from speculator.tables import markdown_table


@dataclass
class Check:
    """One line of the table.

    Attributes:
        name: what was compared with what.
        temperature: of both.
        sample: how much was compared.
        statistic: what was measured, and `result` what it says, in words; `figures` has both as numbers.
    """

    name: str
    temperature: float
    sample: str
    statistic: str
    result: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)


class Recorder(Drafter):
    """A drafter that notes the logits behind each new token of a single row; None within decodes plainly."""

    name = "recorder"

    def __init__(self, target: Target, drafter: Drafter | None):
        self.target, self.drafter = target, drafter
        self._describe()
        if drafter and drafter.aux_layers:  # beside them the last state, which the logits are made of
            self.aux_layers, self.overlap = (*drafter.aux_layers, len(target.aux_layers.layers)), drafter.overlap

    def _describe(self):
        drafter = self.drafter
        self.num_speculative_tokens = drafter.num_speculative_tokens if drafter else 0
        self.nodes = drafter.nodes if drafter else 0
        self.rules = drafter.rules if drafter else tuple(RULES)
        self.scratch_positions = drafter.scratch_positions if drafter else 0
        self.shape = drafter.shape if drafter else None

    @property
    def max_nodes(self):
        return self.drafter.max_nodes if self.drafter else 0

    def choose(self, requests):
        return self.drafter.choose(requests) if self.drafter else None

    def reshape(self, shape):
        self.drafter.reshape(shape)
        self._describe()

    def open(self, slots, capacity):
        self.drafter = self.drafter and self.drafter.open(slots, capacity)
        return self

    def attach_cache(self, cache):
        if self.drafter:
            self.drafter.attach_cache(cache)

    def grow(self, capacity):
        if self.drafter:
            self.drafter.grow(capacity)

    def prefill(self, start, texts, begins, hidden, counts):
        read, last = self._parts(hidden)
        self.parts = [self.target.logits(last)[0, counts[0] - 1 :]]
        if self.drafter:
            self.drafter.prefill(start, texts, begins, read, counts)

    def propose(self, pending, sampling, u, texts):
        return self.drafter.propose(pending, sampling, u, texts) if self.drafter else Draft.none(pending)

    def commit(self, tokens, hidden, counts):
        read, last = self._parts(hidden)
        self.parts.append(self.target.logits(last)[0, : counts[0]])
        if self.drafter:
            self.drafter.commit(tokens, read, counts)

    def _parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the drafter reads, and the last state."""
        size = self.target.hidden_size
        return (hidden[..., :-size], hidden[..., -size:]) if self.aux_layers else (hidden, hidden)

    @property
    def logits(self) -> Tensor:  # [S, V], row i decided new token i
        return torch.cat(self.parts)


@torch.no_grad()
def transformers_text(
    target: Target, prompt: list[int], max_new_tokens: int, width: int
) -> tuple[list[int], Tensor, float]:
    """Greedy text of transformers' own generate and how far its logits move when `width` tokens share a pass.

    Gives (new tokens, their logits [S, V], the largest difference); the same text goes through the model once more,
    `width` tokens at a time, for the difference.
    """
    ids = torch.tensor([prompt], device=target.device)
    eos = sorted(target.eos_token_ids) or None  # of the settings that `as_loaded` puts aside
    with as_loaded(target):
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=eos,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(output.logits)
        text = output.sequences[:, :-1]
        given = target.model(ids, use_cache=True)
        again = [given.logits[0, -1:]]
        for start in range(len(prompt), text.shape[1], width):
            given = target.model(text[:, start : start + width], past_key_values=given.past_key_values, use_cache=True)
            again.append(given.logits[0])
    difference = (torch.cat(again).double() - logits.double()).abs().max().item()
    return output.sequences[0, len(prompt) :].tolist(), logits, difference


def gaps(logits: Tensor) -> list[float]:  # [S, V] -> S
    """Between the two best logits of each position."""
    best = logits.double().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def compare_texts(
    name: str, texts: list[list[int]], references: list[list[int]], closeness: list[list[float]], tolerance: float
) -> Check:
    """Are the greedy texts the same, but for ties that rounding may break?

    Args:
        name: of the check.
        texts: new tokens of each prompt.
        references: the same, plainly decoded.
        closeness: the gap between the two best logits behind each of a reference's tokens.
        tolerance: the largest gap that rounding may turn over. Only the first difference counts: after it the two
            runs continue different texts. A text that ends elsewhere but agrees until there has no such excuse.
    """
    parted: list[float] = []
    for text, reference, gap in zip(texts, references, closeness, strict=True):
        if text != reference:
            at = common_prefix(text, reference)
            parted.append(gap[at] if at < min(len(text), len(reference)) else math.inf)
    above = sum(not gap <= tolerance for gap in parted)
    same = len(texts) - len(parted)
    return Check(
        name,
        0.0,
        f"{len(texts)} texts",
        f"{above} parted at gaps above {tolerance:.1e}",
        f"{same} of {len(texts)} identical",
        above == 0,
        {"identical": same, "of": len(texts), "above_tolerance": above, "tolerance": tolerance},
    )


def greedy_checks(
    target: Target, drafter: Drafter, prompts: list[list[int]], max_new_tokens: int, rule: str | None = None
) -> list[Check]:
    """Greedy texts with drafts, each prompt alone and all in one batch, against plain decoding and transformers.

    The tolerance is four times the largest difference between logits of one token a pass and of a verify pass's
    width, both by transformers; at the least four times the precision of the largest logit.

    Raises:
        UserError: the rule does not fit the drafter.
    """
    drafted, plain, theirs = [], [], []
    plain_gaps, their_gaps = [], []
    rounding = moved = 0.0
    positions = 0
    generations = []
    for prompt in tqdm(prompts, desc="temperature 0", unit="prompt"):
        ours, alone = Recorder(target, drafter), Recorder(target, None)
        generations.append(generate(target, ours, [prompt], rule=rule, max_new_tokens=max_new_tokens))
        drafted += generations[-1].tokens
        plain += generate(target, alone, [prompt], max_new_tokens=max_new_tokens).tokens
        text, logits, difference = transformers_text(target, prompt, max_new_tokens, drafter.nodes + 1)
        theirs.append(text)
        plain_gaps.append(gaps(alone.logits))
        their_gaps.append(gaps(logits))
        precision = torch.finfo(target.dtype).eps * logits.abs().max().item()
        rounding = max(rounding, difference, precision)
        # Where the texts agree so far, both runs computed the same logits: the first difference is still one of them.
        shared = min(common_prefix(drafted[-1], plain[-1]) + 1, len(drafted[-1]), len(plain[-1]))
        apart = (ours.logits[:shared].double() - alone.logits[:shared].double()).abs().max().item()
        moved = max(moved, apart) if apart == apart else math.inf
        positions += shared
    together = generate(target, drafter, prompts, rule=rule, max_new_tokens=max_new_tokens)
    tolerance = 4 * rounding
    logits_check = Check(
        "logits against plain decoding",
        0.0,
        f"{positions} positions",
        f"at most {moved:.1e} apart",
        f"{tolerance:.1e} allowed",
        moved <= tolerance,
        {"positions": positions, "largest_difference": moved, "tolerance": tolerance},
    )
    checks = [
        logits_check,
        compare_texts("text against plain decoding", drafted, plain, plain_gaps, tolerance),
        compare_texts("text in a batch against plain decoding", together.tokens, plain, plain_gaps, tolerance),
        compare_texts("text against transformers", drafted, theirs, their_gaps, tolerance),
    ]
    for check in checks:
        check.figures["drafted_share"] = drafted_share(generations, skip=0)
    return checks


def sampled_checks(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    temperatures: list[float],
    samples: int,
    rule: str | None = None,
    seed: int = 0,
) -> list[Check]:
    """A chi-square test per temperature and prompt; arguments and errors are those of `sampled_twice`."""
    return [
        Check(
            f"distribution after prompt {number + 1}",
            temperature,
            f"2 x {samples} rows",
            f"chi-square {figures['chi_square']:.1f}, {figures['degrees_of_freedom']} df",
            f"p = {figures['p']:.2g}",
            figures["p"] >= figures["alpha"],
            figures,
        )
        for temperature, number, figures in sampled_twice(target, drafter, prompts, temperatures, samples, rule, seed)
    ]


def build_parser() -> OneLineParser:
    """The flags of `lossless`."""
    parser = OneLineParser(prog="python -m eval lossless", description=__doc__)
    add_flags(parser, max_prompts=32)
    drafting.add_flags(parser)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--suite", default=PYTHON_SOURCES, help="as in `python -m eval`; default: python-sources")
    parser.add_argument("--sampled_prompts", type=int, default=4, help="of these, how many are sampled from")
    parser.add_argument("--samples", type=int, default=4000, help="rows per sampled prompt, with drafts and without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the checks as .json too")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table and the verdict; gives exit code 0 where every check passed, 1 where one did not.

    Raises:
        UserError: wrong input.
    """
    arguments.temperature = arguments.temperature or [0.0, 1.0]
    check_flags(arguments)
    refuse_below(arguments, samples=100, sampled_prompts=1, max_new_tokens=3 if max(arguments.temperature) > 0 else 2)
    drafting.check(arguments, required=True)
    check_file("--output", arguments.output)
    target = drafting.load_target(arguments)
    check_lengths(target, arguments.prompt_tokens, arguments.max_new_tokens)
    drafter = drafting.drafter(arguments, target)
    auto = _chosen_as_it_goes(arguments, target, drafter)
    suite = suite_of(arguments, arguments.suite, target)
    temperatures, rule = arguments.temperature, arguments.rule
    warm = [temperature for temperature in temperatures if temperature > 0]
    sampled = suite.prompts[: arguments.sampled_prompts]
    checks: list[Check] = []
    for who, prefix in ((drafter, ""), (auto, "auto: ")):
        own: list[Check] = []
        if who and 0.0 in temperatures:
            own += greedy_checks(target, who, suite.prompts, arguments.max_new_tokens, rule)
        if who and warm:
            own += sampled_checks(target, who, sampled, warm, arguments.samples, rule, arguments.seed)
        checks += [replace(check, name=prefix + check.name) for check in own]
    failed = [f"{check.name} at temperature {check.temperature:g}" for check in checks if not check.passed]
    verdict = f"NOT LOSSLESS: {'; '.join(failed)}" if failed else "LOSSLESS"
    rule = rule or drafter.rules[0]
    dtype = dtype_name(target.dtype)
    print(f"{target.name} in {dtype}, {suite.name}, {drafter.name} drafts {drafter.nodes} tokens, rule {rule}\n")
    print(table(checks))
    if warm:
        tests = [check.figures for check in checks if "detectable" in check.figures]
        alpha, off = tests[0]["alpha"], max(figures["detectable"] for figures in tests)
        print(f"\nA p-value fails below {alpha:.1e}. One that is {off:.2g} off in total variation, over the cells")
        print("of its test, would fail 99 times in 100.")
    print(f"\n{verdict}")
    if arguments.output:
        settings = {name: value for name, value in vars(arguments).items() if name != "output"}
        report = {"schema": 1, "lossless": not failed, "rule": rule, "dtype": dtype, "settings": settings}
        write_json(arguments.output, {**report, "checks": [asdict(check) for check in checks]})
    return int(bool(failed))


def _chosen_as_it_goes(
    arguments: argparse.Namespace, target: Target, drafter: Drafter | None
) -> AdaptiveDrafter | None:
    """What decodes where no flag says how, if the head was tuned: it chooses as for a row alone, so that it drafts."""
    if not isinstance(drafter, HeadDrafter) or drafting.shaped(arguments):
        return None
    auto = automatic(arguments.speculator, target, drafter.head, arguments.temperature, 1)
    if auto is None:
        return None

    def alone(what: Shape | int, greedy: bool, rows: int, longest: int) -> float:
        return auto.cost(what, greedy, 1, longest)

    return AdaptiveDrafter(auto.head, auto.choices, auto.lookup, alone, auto.alone)


def table(checks: list[Check]) -> str:
    """A line each; `drafted` is the share of the tokens that drafts gave: what was never drafted proves little."""
    header = ("temperature", "check", "sample", "drafted", "statistic", "result", "verdict")
    rows = []
    for c in checks:
        drafted, verdict = f"{c.figures['drafted_share']:.0%}", "pass" if c.passed else "FAIL"
        rows.append((f"{c.temperature:g}", c.name, c.sample, drafted, c.statistic, c.result, verdict))
    return markdown_table(header, rows)
