"""`speculator eval gate`: see `eval.flags.gate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from eval.as_server import default_lengths
from eval.intervals import length, paired_bootstrap
from eval.suites import Suite, check_flags, first_turns, sampling_of
from eval.timing import Engines, Timed, time_ours
from speculator import HeadDrafter, Sampling, Target, generate, load_head
from speculator.acceptance import Acceptance
from speculator.checkpoints import head_folder
from speculator.checkpoints.loading import load_drafter
from speculator.cli import model_flags
from speculator.drafters import Chain
from speculator.errors import refuse, show
from speculator.files import check_output_file
from speculator.heads import Speculator
from speculator.report import Gate, Guard, HeadsCompared, Interval, write_record
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
    compared = compare(target, drafters, suite, sampling, count)
    guarded = compare_on_guard(target, [first, heads[1]], guard, sampling, count, _GUARD_LOSS) if guard else None
    verdict = accepted(compared, guarded)
    result = Gate(compared, guarded, accepted=verdict, line=line(compared, guarded, verdict))
    if arguments.output:
        write_record(arguments.output, result)
    show(result.line)
    return 0 if verdict else 1


def compare(
    target: Target, drafters: Sequence[HeadDrafter], suite: Suite, sampling: Sampling, max_new_tokens: int
) -> HeadsCompared:
    """Decode each prompt with both drafters, which take turns in coming first, since a machine may slow down."""
    timed, engines = (Timed(), Timed()), Engines()
    stop = sorted(target.eos_token_ids)
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
    return HeadsCompared(
        name=suite.name,
        prompts=len(samples),
        tokens_per_second=[each.tokens_per_second for each in timed],
        difference=paired_bootstrap(samples, _difference),
        acceptance_length=[Acceptance.of(each.steps).length for each in timed],
    )


def _difference(samples: Sequence[tuple[int, float, int, float]]) -> float:
    """Return the new head's tokens/s less the old one's; a sample has old tokens, old seconds, then the new ones."""
    old, old_seconds, new, new_seconds = (math.fsum(column) for column in zip(*samples, strict=True))
    return new / new_seconds - old / old_seconds


def compare_on_guard(
    target: Target, heads: Sequence[Speculator], suite: Suite, sampling: Sampling, max_new_tokens: int, share: float
) -> Guard:
    """Compare the acceptance lengths of an old and a new head on a suite, with chains of `n_predict` tokens as drafts.

    Unlike those of adaptive drafts, they do not depend on timings. `share`: what the new one may lose of the old one.
    """
    counts = []
    for head in heads:
        made = generate(
            target, HeadDrafter(head), suite.prompts, sampling, max_new_tokens=max_new_tokens, max_batch_size=8
        ).check()
        counts.append([(each.accepted, each.steps) for each in map(Acceptance.of, made.steps)])
    samples = [(old, new) for old, new in zip(*counts, strict=True) if old[1] and new[1]]
    refuse((not samples, f"{suite.name}: every answer ends in its first step, so there is nothing to compare"))
    old, new = map(length, zip(*samples, strict=True))
    change = paired_bootstrap(samples, lambda chosen: length(y for _, y in chosen) / length(x for x, _ in chosen) - 1)
    return Guard(name=suite.name, old=old, new=new, change=change, allowed=-share)


def power(difference: Interval, speed: float, gain: float = _GAIN) -> float | None:
    """Return the chance that these prompts show a head that is faster by `gain`; None with a single prompt.

    The interval of the measured `difference` is as wide as any other head's; `speed` is the old head's, in tokens/s.
    """
    if difference.high is None:
        return None
    reach = difference.high - difference.value  # about two standard errors, which the estimate must exceed
    return NormalDist().cdf(2 * (gain * speed / reach - 1)) if reach else 1.0


def accepted(suite: HeadsCompared, guard: Guard | None) -> bool:
    """Return whether the new head replaces the old one.

    It must decode the suite faster (lower bound of the difference above 0), and the acceptance length on the guard
    suite, if there is one, must not fall by more than 5% (lower bound of its change).
    """
    bounds = [(suite.difference.low, 0.0)]
    if guard:
        # At the least that is allowed the guard accepts: two equal heads differ by exactly 0.
        bounds.append((guard.change.low, math.nextafter(guard.allowed, -1)))
    return all(low is not None and low > least for low, least in bounds)


def line(suite: HeadsCompared, guard: Guard | None, verdict: bool) -> str:
    """Return the line that `run` prints: the verdict, and the figures that it rests on."""
    (old, new), lengths = suite.tokens_per_second, suite.acceptance_length
    words = f"{'accepted' if verdict else 'rejected'}: {old:.1f} -> {new:.1f} tokens/s on {suite.name}, "
    words += f"{shown(suite.difference, '+.1f')}; acceptance length {lengths[0]:.2f} -> {lengths[1]:.2f}"
    if guard:
        words += f"; on {guard.name} {guard.old:.2f} -> {guard.new:.2f}, {shown(guard.change, '+.1%')}"
        words += f" (at least {guard.allowed:+.1%})"
    if (chance := power(suite.difference, old)) is not None:
        words += f"; {suite.prompts} prompts show a head that is {_GAIN:.0%} faster in {chance:.0%} of cases"
    return words
