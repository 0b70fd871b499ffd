"""`speculator eval gate`: see `eval.flags.gate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from eval.as_server import default_lengths
from eval.metrics import paired_bootstrap
from eval.suites import Suite, check_flags, first_turns, sampling_of
from eval.timing import Engines, Timed, time_ours
from speculator import HeadDrafter, Sampling, Target, generate, load_head
from speculator.checkpoints import head_folder
from speculator.checkpoints.loading import load_drafter
from speculator.cli import model_flags
from speculator.decoding.request import acceptance_length
from speculator.drafters import Chain
from speculator.errors import refuse, show
from speculator.files import check_output_file, write_json
from speculator.heads import Speculator
from speculator.report import Gate, Guard, HeadsCompared, Interval
from speculator.tables import shown
from speculator.terminal import Progress

_GUARD_LOSS = 0.05
_GAIN = 0.05  # of speed, for which the power is printed


def run(arguments: argparse.Namespace) -> int:
    """Run `speculator eval gate`: measure both heads, print the verdict, and return 0 if NEW is accepted, else 1."""
    check_flags(argparse.Namespace(**{**vars(arguments), "temperature": [arguments.temperature]}))
    check_output_file("--output", arguments.output)
    refuse(
        (arguments.guard == "", "--guard is empty: give a suite"),
        (arguments.guard_head is not None and arguments.guard is None, "--guard_head needs --guard"),
        (arguments.num_speculative_tokens and arguments.server == "ours", "--num_speculative_tokens needs --as"),
    )
    target, sampling = model_flags.load_target(arguments), sampling_of(arguments, arguments.temperature)
    folders = head_folder(arguments.old, arguments.speculator_revision), head_folder(arguments.new)
    heads = [load_head(folder, target) for folder in folders]
    suite = first_turns(arguments, arguments.suite, target)
    guard = first_turns(arguments, arguments.guard, target) if arguments.guard else None
    first = load_head(head_folder(arguments.guard_head), target) if arguments.guard_head else heads[0]
    drafters: list[HeadDrafter]
    if arguments.server == "ours":
        drafters = [load_drafter(folder, target, temperatures=[arguments.temperature]) for folder in folders]
    else:
        asked = [arguments.num_speculative_tokens] if arguments.num_speculative_tokens else []
        lengths = [(asked or default_lengths(arguments.server, head, target) or [head.n_predict])[0] for head in heads]
        drafters = [HeadDrafter(*row) for row in zip(heads, (Chain(n, sampled=False) for n in lengths), strict=True)]
    count = arguments.max_new_tokens
    result: Gate = {"suite": compare(target, drafters, suite, sampling, count), "guard": None}
    if guard:
        result["guard"] = compare_on_guard(target, [first, heads[1]], guard, sampling, count, _GUARD_LOSS)
    result["accepted"] = accepted(result)
    result["line"] = line(result)
    if arguments.output:
        write_json(arguments.output, result)
    show(result["line"])
    return 0 if result["accepted"] else 1


def compare(
    target: Target, drafters: Sequence[HeadDrafter], suite: Suite, sampling: Sampling, max_new_tokens: int
) -> HeadsCompared:
    """Decode each prompt with the old and the new drafter, which take turns in coming first: a machine may slow down.

    Returns "tokens_per_second" and "acceptance_length", [old, new] each, "difference", the new speed less the old as
    {"value", "low", "high"}, "prompts", their number, and "name", the suite's.
    """
    timed, engines = (Timed(), Timed()), Engines()
    stop = sorted(target.eos_token_ids) if suite.chat else []
    for drafter in drafters:  # the first pass allocates
        time_ours(target, drafter, suite.prompts[:1], sampling, min(8, max_new_tokens), Timed(), engines, stop_at=stop)
    for number, prompt in enumerate(Progress(suite.prompts, title=f"old and new head, {suite.name}", unit="prompts")):
        own = replace(sampling, seed=sampling.seed + number)
        for which in (0, 1) if number % 2 else (1, 0):
            time_ours(target, drafters[which], [prompt], own, max_new_tokens, timed[which], engines, stop_at=stop)
    samples = [
        (old.decoded, old.decode_seconds, new.decoded, new.decode_seconds)
        for old, new in zip(timed[0].batches, timed[1].batches, strict=True)
        if old.decoded and new.decoded
    ]
    refuse((not samples, f"{suite.name}: every answer has one token, so there is no decoding to time"))
    return {
        "name": suite.name,
        "prompts": len(samples),
        "tokens_per_second": [each.tokens_per_second for each in timed],
        "difference": paired_bootstrap(samples, _difference),
        "acceptance_length": [acceptance_length(each.steps) for each in timed],
    }


def _difference(samples: Sequence[tuple[int, float, int, float]]) -> float:
    """Return the new head's tokens per second minus the old one's; rates are total tokens over total seconds.

    A sample is one prompt's (old tokens, old seconds, new tokens, new seconds).
    """
    old, old_seconds, new, new_seconds = (math.fsum(column) for column in zip(*samples, strict=True))
    return new / new_seconds - old / old_seconds


def compare_on_guard(
    target: Target, heads: Sequence[Speculator], suite: Suite, sampling: Sampling, max_new_tokens: int, share: float
) -> Guard:
    """Compare the acceptance lengths of an old and a new head on a suite, with chains of `n_predict` tokens as drafts.

    Unlike those of adaptive drafts, they do not depend on timings.

    Args:
        share: of the old head's acceptance length that the new one may lose.
    """
    eos = None if suite.chat else ()
    counts = []
    for head in heads:
        made = generate(
            target,
            HeadDrafter(head),
            suite.prompts,
            sampling,
            max_new_tokens=max_new_tokens,
            max_batch_size=8,
            eos_token_ids=eos,
        ).check()
        whole = [[step.accepted + 1 for step in row if not step.cut] for row in made.steps]
        counts.append([(sum(row), len(row)) for row in whole])
    samples = [(*old, *new) for old, new in zip(*counts, strict=True) if old[1] and new[1]]
    refuse((not samples, f"{suite.name}: every answer ends in its first step, so there is nothing to compare"))
    change = paired_bootstrap(samples, _change)
    old_length, new_length = (sum(row[i] for row in samples) / sum(row[i + 1] for row in samples) for i in (0, 2))
    return {"name": suite.name, "old": old_length, "new": new_length, "change": change, "allowed": -share}


def _change(samples: Sequence[tuple[int, int, int, int]]) -> float:
    """Return the change of the acceptance length as a share; a sample is (old tokens, old steps, new tokens, steps)."""
    old, old_steps, new, new_steps = map(sum, zip(*samples, strict=True))
    return (new / new_steps) / (old / old_steps) - 1


def power(difference: Interval, speed: float, gain: float = _GAIN) -> float | None:
    """Return the chance that these prompts show a head that is faster by `gain`; None with a single prompt.

    Args:
        difference: interval of the measured difference, whose width is that of any other head's.
        speed: of the old head, in tokens per second.
    """
    if difference["high"] is None:
        return None
    reach = difference["high"] - difference["value"]  # about two standard errors, which the estimate must exceed
    return NormalDist().cdf(2 * (gain * speed / reach - 1)) if reach else 1.0


def accepted(result: Gate) -> bool:
    """Return whether the new head replaces the old one.

    It must decode the suite faster (lower bound of the difference above 0), and the acceptance length on the guard
    suite, if there is one, must not fall by more than 5% (lower bound of its change).

    Args:
        result: "suite": what `compare` returns; "guard": None, or what `compare_on_guard` returns.
    """
    bounds = [(result["suite"]["difference"]["low"], 0.0)]
    if guard := result["guard"]:
        # At the least that is allowed the guard accepts: two equal heads differ by exactly 0.
        bounds.append((guard["change"]["low"], math.nextafter(guard["allowed"], -1)))
    return all(low is not None and low > least for low, least in bounds)


def line(result: Gate) -> str:
    """Return the line that `run` prints: the verdict, `result["accepted"]`, and the figures that it rests on."""
    suite, guard = result["suite"], result["guard"]
    (old, new), lengths = suite["tokens_per_second"], suite["acceptance_length"]
    words = f"{'accepted' if result['accepted'] else 'rejected'}: {old:.1f} -> {new:.1f} tokens/s on {suite['name']}, "
    words += f"{shown(suite['difference'], '+.1f')}; acceptance length {lengths[0]:.2f} -> {lengths[1]:.2f}"
    if guard:
        words += f"; on {guard['name']} {guard['old']:.2f} -> {guard['new']:.2f}, {shown(guard['change'], '+.1%')}"
        words += f" (at least {guard['allowed']:+.1%})"
    if (chance := power(suite["difference"], old)) is not None:
        words += f"; {suite['prompts']} prompts show a head that is {_GAIN:.0%} faster in {chance:.0%} of cases"
    return words
