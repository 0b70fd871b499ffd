"""At temperature 0: are completions with drafts identical to plain decoding and to transformers' generate?

A forward pass over several tokens rounds differently from one over a single token. Two completions may therefore differ
where the two largest logits are closer than the rounding error, which is measured with transformers alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eval.checks import Check
from eval.metrics import drafted_share
from eval.recording import RecordingEngine
from eval.timing import as_loaded
from speculator import Drafter, Target, generate
from speculator.decoding.request import Generation
from speculator.decoding.scheduler import common_prefix
from speculator.terminal import Progress


@torch.no_grad()
def transformers_greedy(
    target: Target, prompt: list[int], max_new_tokens: int, width: int
) -> tuple[list[int], Tensor, float]:
    """Decode greedily with transformers' own generate, and measure the rounding error of passes of `width` tokens.

    Returns the S new tokens, the logits [S, V] from which they were chosen, and the rounding error: the largest
    difference to the logits of the same sequence processed `width` tokens at a time, at least the precision of the
    largest logit.
    """
    given = target.generate_inputs([prompt])
    # If the prompt is a source, transformers continues the decoder's start tokens.
    name, source = "input_ids", {}
    if not target.continues:
        name, source = "decoder_input_ids", {"input_ids": given["input_ids"]}
    start = given[name]
    eos = sorted(target.eos_token_ids) or None  # `as_loaded` drops the generation config
    with as_loaded(target):
        output = target.model.generate(
            **given,
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
        read = target.model(**source, **{name: start}, use_cache=True)
        # The new tokens again, `width` at a time as a verification reads them: only the rounding can differ.
        again = [read.logits[0, -1:]]
        for begin in range(start.shape[1], text.shape[1], width):
            cache = {target.cache_name: read[target.cache_name], name: text[:, begin : begin + width]}
            read = target.model(**source, use_cache=True, **cache)
            again.append(read.logits[0])
    difference = (torch.cat(again).double() - logits.double()).abs().max().item()
    precision = torch.finfo(target.dtype).eps * logits.abs().max().item()
    return output.sequences[0, start.shape[1] :].tolist(), logits, max(difference, precision)


def gaps(logits: Tensor) -> list[float]:  # [S, V] -> S
    """Return the difference of the two largest logits at each position."""
    best = logits.double().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def compare_completions(
    name: str,
    completions: list[list[int]],
    references: list[list[int]],
    reference_gaps: list[list[float]],
    tolerance: float,
    temperature: float = 0.0,
) -> Check:
    """Check that completions are identical, except after ties that rounding may break.

    Args:
        completions, references: tokens of each completion, and of what it should be.
        reference_gaps: difference of the two largest logits at each token of a reference; above temperature 0 of the
            two best scores (`Noise.scores`).
        tolerance: largest gap that rounding can reverse. Only the first difference counts, because different
            sequences follow it. A completion that is a prefix of the other has no such excuse.
    """
    gaps_at_difference: list[float] = []
    for completion, reference, gap in zip(completions, references, reference_gaps, strict=True):
        if completion != reference:
            at = common_prefix(completion, reference)
            gaps_at_difference.append(gap[at] if at < min(len(completion), len(reference)) else math.inf)
    above = sum(not gap <= tolerance for gap in gaps_at_difference)  # a NaN fails too
    same = len(completions) - len(gaps_at_difference)
    return Check(
        name=name,
        temperature=temperature,
        sample=f"{len(completions)} completions",
        statistic=f"{above} differ at gaps above {tolerance:.1e}",
        result=f"{same} of {len(completions)} identical",
        passed=above == 0,
        figures={"identical": same, "of": len(completions), "above_tolerance": above, "tolerance": tolerance},
    )


def greedy_checks(
    target: Target, drafter: Drafter, prompts: list[list[int]], max_new_tokens: int, rule: str | None = None
) -> list[Check]:
    """Compare greedy completions with drafts, alone and in one batch, with plain decoding and with transformers.

    The tolerance is four times the rounding error, measured with transformers alone (`transformers_greedy`).
    """
    drafted, plain, theirs = [], [], []
    plain_gaps, their_gaps = [], []
    rounding = moved = 0.0
    positions = 0
    generations = []
    for prompt in Progress(prompts, title="temperature 0", unit="prompts"):
        ours, alone = RecordingEngine(target, drafter, rule), RecordingEngine(target, None)
        request = ours.decode(prompt, max_new_tokens=max_new_tokens)
        generations.append(Generation([request.tokens], [request.steps]))
        drafted.append(request.tokens)
        plain.append(alone.decode(prompt, max_new_tokens=max_new_tokens).tokens)
        text, logits, error = transformers_greedy(target, prompt, max_new_tokens, drafter.nodes + 1)
        theirs.append(text)
        plain_gaps.append(gaps(alone.logits))
        their_gaps.append(gaps(logits))
        rounding = max(rounding, error)
        # Both runs process the same tokens up to their first difference, whose logits are still comparable.
        shared = min(common_prefix(drafted[-1], plain[-1]) + 1, len(drafted[-1]), len(plain[-1]))
        apart = (ours.logits[:shared].double() - alone.logits[:shared].double()).abs().max().item()
        moved = max(moved, apart) if apart == apart else math.inf  # a NaN would be lost in `max`
        positions += shared
    together = generate(target, drafter, prompts, rule=rule, max_new_tokens=max_new_tokens).check()
    tolerance = 4 * rounding
    logits_check = Check(
        name="logits against plain decoding",
        temperature=0.0,
        sample=f"{positions} positions",
        statistic=f"differ by at most {moved:.1e}",
        result=f"{tolerance:.1e} allowed",
        passed=moved <= tolerance,
        figures={"positions": positions, "largest_difference": moved, "tolerance": tolerance},
    )
    checks = [
        logits_check,
        compare_completions("completion against plain decoding", drafted, plain, plain_gaps, tolerance),
        compare_completions(
            "completion in a batch against plain decoding", together.tokens, plain, plain_gaps, tolerance
        ),
        compare_completions("completion against transformers", drafted, theirs, their_gaps, tolerance),
    ]
    for check in checks:
        check.figures["drafted_share"] = drafted_share(generations, skip=0)
    return checks
