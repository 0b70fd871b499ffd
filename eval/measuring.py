"""A suite through every decoder, batch by batch, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from eval.costs import Costs, measure
from eval.decoders import Decoder
from eval.speed import Decoded, Timed
from eval.suites import Suite
from speculator.errors import UserError
from speculator.sampling import Sampling
from speculator.target import Target

_COST_BATCHES = 16  # behind so many of them, evenly spread, costs are measured:
_COST_BLOCKS = 16  # so many of every drafter


@dataclass
class Measured:
    """What a suite at one temperature and batch size came to.

    Attributes:
        timed: by the decoder's key; all of them went through the same batches in the same order.
        categories: of each batch.
        conversations: of each batch, which it was: the turns of one share a number.
        costs: of every drafter's steps, by the decoder's key.
        skipped: decoders that can't run here, and why.
        turns_left_out: of conversations that had grown out of the context.
    """

    timed: dict[str, Timed]
    categories: list[str] = field(default_factory=list)
    conversations: list[int] = field(default_factory=list)
    costs: dict[str, Costs] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    turns_left_out: int = 0

    def of_category(self, category: str) -> Measured:
        """The part that is of one category; costs and what was skipped are the whole's."""
        at = [i for i, name in enumerate(self.categories) if name == category]
        timed = {key: Timed([part.batches[i] for i in at]) for key, part in self.timed.items()}
        return Measured(timed, [category] * len(at), [self.conversations[i] for i in at])


def measure_suite(
    target: Target,
    table: list[Decoder],
    suite: Suite,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int = 1,
    repeats: int = 1,
) -> Measured:
    """Every batch goes through every decoder before the next one comes, in an order that rotates.

    So a machine whose speed drifts slows all of them alike. The later turns of a conversation follow the plain loop's
    answers, whoever decodes: all decoders answer the same questions behind the same text.

    Args:
        table: the plain loop first; a decoder of transformers that fails its warm-up is dropped, with the reason.
        suite: answers of a chat end where the target ends them; texts to continue are all equally long.
        repeats: each batch is timed so often, and the median counts.

    Raises:
        UserError: a prompt that the target can't take.
    """
    stop_at = sorted(target.eos_token_ids) if suite.chat else []
    batches = _batches(suite, batch_size)
    measured = Measured({})
    table = _warmed_up(table, suite, batches, sampling, max_new_tokens, stop_at, measured)
    measured.timed = {decoder.key: Timed() for decoder in table}
    measured.costs = {decoder.key: Costs() for decoder in table if decoder.drafter}
    count = min(_COST_BATCHES, len(batches))
    costed = {len(batches) * i // count for i in range(count)}
    order = list(table)
    name = f"{suite.name}, temperature {sampling.temperature:g}" + (f", batch {batch_size}" if batch_size > 1 else "")
    progress = tqdm(batches, desc=name, unit="prompt" if batch_size == 1 else "batch")
    for number, batch in enumerate(progress):
        prompts = [suite.prompts[i] for i in batch]
        answers: list[list[list[int]]] = [[] for _ in batch]
        for turn in range(1 + _later(suite, batch[0])):
            if turn:
                prompts = [
                    suite.conversations[i].following(target.tokenizer, turn, prompt, given)
                    for i, prompt, given in zip(batch, prompts, answers, strict=True)
                ]
                if max(map(len, prompts)) + max_new_tokens > target.context_length:
                    measured.turns_left_out += len(batch) * (1 + _later(suite, batch[0]) - turn)
                    break
            own = replace(sampling, seed=sampling.seed + batch[0] + turn * len(suite.prompts))
            tries: dict[str, Timed] = {decoder.key: Timed() for decoder in table}
            for _ in range(repeats):
                order = order[1:] + order[:1]
                for decoder in order:
                    decoder.run(prompts, own, max_new_tokens, tries[decoder.key], stop_at)
            for decoder in table:
                measured.timed[decoder.key].batches.append(_median(tries[decoder.key].batches))
            measured.categories.append(suite.categories[batch[0]])
            measured.conversations.append(number)
            plain = measured.timed["none"].batches[-1].tokens
            for given, answer in zip(answers, plain, strict=True):
                given.append(answer[:-1] if answer[-1] in stop_at else answer)
            if number in costed and not turn:
                halfway = [p + answer[: len(answer) // 2] for p, answer in zip(prompts, plain, strict=True)]
                blocks = -(-_COST_BLOCKS // count)
                for decoder in table:
                    if decoder.drafter:
                        costs = measured.costs[decoder.key]
                        measure(target, decoder.drafter, halfway, own, blocks, costs, decoder.rule)
    return measured


def _batches(suite: Suite, size: int) -> list[list[int]]:
    """Prompts that are decoded together: neighbours of the same category and as many turns."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i, category in enumerate(suite.categories):
        alike.setdefault((category, _later(suite, i)), []).append(i)
    parts = [group[start : start + size] for group in alike.values() for start in range(0, len(group), size)]
    return sorted(parts)


def _later(suite: Suite, index: int) -> int:
    return len(suite.conversations[index].later) if suite.conversations else 0


def _warmed_up(
    table: list[Decoder],
    suite: Suite,
    batches: Sequence[Sequence[int]],
    sampling: Sampling,
    max_new_tokens: int,
    stop_at: Sequence[int],
    measured: Measured,
) -> list[Decoder]:
    """Those that ran. What is compiled needs its longest text and all its shapes beforehand, so it has a whole run."""
    ready = []
    longest = max(batches, key=lambda batch: max(len(suite.prompts[i]) for i in batch))
    for decoder in table:
        compiled = decoder.key == "hf_compiled"
        prompts = [suite.prompts[i] for i in (longest if compiled else batches[0])]
        try:
            for _ in range(2 if compiled else 1):
                decoder.run(prompts, sampling, max_new_tokens if compiled else min(8, max_new_tokens), Timed(), stop_at)
        except Exception as error:
            if decoder.ours or isinstance(error, UserError):
                raise
            # Of any kind: a compiler that is not there, a model that transformers can't run so.
            measured.skipped[decoder.key] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            ready.append(decoder)
    return ready


def _median(tries: list[Decoded]) -> Decoded:
    """One of equal runs, with the medians of their seconds."""
    return replace(
        tries[0],
        prefill_seconds=statistics.median(run.prefill_seconds for run in tries),
        decode_seconds=statistics.median(run.decode_seconds for run in tries),
        peak_memory=max(run.peak_memory for run in tries),
    )
