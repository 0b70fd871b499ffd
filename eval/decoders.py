"""The ways to decode that a report compares, and a suite through all of them, batch by batch, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, CompileConfig

from eval.suites import Suite
from eval.timing import Decoded, Engines, Timed, time_ours, time_transformers
from speculator.decoding.sampling import Sampling
from speculator.drafters import Drafter, DraftModelDrafter, EarlyExitDrafter, HeadDrafter, HybridDrafter, NgramDrafter
from speculator.drafters.corpus import Corpus
from speculator.drafters.costs import StepSeconds, measure
from speculator.errors import UserError, refuse
from speculator.heads import Speculator
from speculator.tables import BASELINES
from speculator.target.gguf import located
from speculator.target.model import Target

OPTIONAL = tuple(BASELINES)[2:]
_LONE = ("hf_prompt_lookup", "hf_assisted")  # transformers does these for one prompt at a time


@dataclass
class Decoder:
    """One way to decode.

    Attributes:
        key: "none", "head", "head 2", "hybrid", "ngram", "ngram_corpus", "model", "early_exit" or a baseline's name.
        run: (prompts, sampling, new tokens, where to note it, tokens that end a text).
        drafter: who drafts in the built-in loop.
        ours: it is the built-in loop.
        rule: the accept rule above temperature 0; None: the drafter's own.
    """

    key: str
    run: Callable[[list[list[int]], Sampling, int, Timed, Sequence[int]], None]
    drafter: Drafter | None = None
    ours: bool = True
    rule: str | None = None


def decoders(
    target: Target,
    head: Speculator | None,
    draft_lengths: Sequence[int],
    model: Target | None,
    baselines: Collection[str],
    batch_size: int,
    engines: Engines | None = None,
    rule: str | None = None,
    early_exit: int | None = None,
    corpus: Corpus | None = None,
    mixed: bool = False,
) -> tuple[list[Decoder], dict[str, str]]:
    """What runs, and why what was asked for does not: the plain loop first, then drafters, then transformers.

    Args:
        head: left out where there is none.
        draft_lengths: of the head's chains; the first is the one that is called "head".
        model: a draft model.
        baselines: of `OPTIONAL`.
        batch_size: some can only do one prompt at a time.
        engines: see `time_ours`; given where other decoders of the built-in loop are compared with these.
        rule: the accept rule of every drafter; None: each has its own.
        early_exit: how many of the target's first layers draft as well.
        corpus: texts for a second n-gram lookup.
        mixed: the head's first chain and n-gram lookup, in the corpus where there is one, draft in one tree as well.
    """
    length = draft_lengths[0]
    drafters: dict[str, Drafter | None] = {"none": None}
    for number, each in enumerate(draft_lengths if head else []):
        assert head is not None
        drafters[f"head {each}" if number else "head"] = HeadDrafter(head, each)
    drafters["ngram"] = NgramDrafter(length)
    if corpus is not None:
        drafters["ngram_corpus"] = NgramDrafter(length, corpus=corpus)
    if mixed and head:
        drafters["hybrid"] = HybridDrafter(HeadDrafter(head, length), NgramDrafter(length, corpus=corpus))
    if model is not None:
        drafters["model"] = DraftModelDrafter(model, target, length)
    if early_exit is not None:
        drafters["early_exit"] = EarlyExitDrafter(target, early_exit, length)
    engines = {} if engines is None else engines
    table = [decoder_of(target, key, drafter, engines, rule) for key, drafter in drafters.items()]

    settings: dict[str, dict] = {
        "hf_generate": {},
        "hf_compiled": {"cache_implementation": "static", "compile_config": _compile_config()},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 3},
    }
    skipped: dict[str, str] = {}
    if "hf_assisted" in baselines and model is not None:
        settings["hf_assisted"] = _assistant(model, length)
    elif "hf_assisted" in baselines:
        skipped["hf_assisted"] = "it needs a draft model"
    for key, how in settings.items():
        if key != "hf_generate" and key not in baselines:
            continue
        if target.group is not None and target.group.count > 1 and target.group.parallel == "fsdp":
            skipped[key] = "transformers would wait for processes that hold other copies of the target"
            continue
        if batch_size > 1 and key in _LONE:
            skipped[key] = "transformers does this for one prompt at a time"
            continue
        table.append(_theirs(target, key, how))
    return table, skipped


def decoder_of(target: Target, key: str, drafter: Drafter | None, engines: Engines, rule: str | None = None) -> Decoder:
    """The built-in loop with a drafter, or without; `engines`: see `time_ours`, the same for all that are compared."""

    rule = rule if drafter and rule in drafter.rules else None

    def run(prompts, sampling, count, out, stop_at) -> None:
        time_ours(target, drafter, prompts, sampling, count, out, engines=engines, rule=rule, stop_at=stop_at)

    return Decoder(key, run, drafter, rule=rule)


def _theirs(target: Target, key: str, how: dict) -> Decoder:
    def run(prompts, sampling, count, out, stop_at) -> None:
        time_transformers(target, prompts, sampling, count, out, stop_at, **how)

    return Decoder(key, run, ours=False)


def _compile_config() -> CompileConfig:
    """transformers compiles on accelerators alone, unless it is asked to elsewhere."""
    config = CompileConfig()
    if not torch.accelerator.is_available():
        config.mode = "default"  # the other modes are about CUDA graphs
        config._compile_all_devices = True
    return config


def _assistant(model: Target, length: int) -> dict:
    """A fixed draft length, as ours is: no confidence threshold, no schedule. A copy, which attends in its own way."""
    assistant = AutoModelForCausalLM.from_pretrained(**located(model.name), dtype=model.dtype, trust_remote_code=False)
    assistant = assistant.to(model.device)
    fixed = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**fixed, assistant_confidence_threshold=0.0)
    return {"assistant_model": assistant, **fixed}


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
    costs: dict[str, StepSeconds] = field(default_factory=dict)
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
    parts = batches(suite, batch_size)
    measured = Measured({})
    table = _warmed_up(table, suite, parts, sampling, max_new_tokens, stop_at, measured)
    measured.timed = {decoder.key: Timed() for decoder in table}
    measured.costs = {decoder.key: StepSeconds() for decoder in table if decoder.drafter}
    most = max(map(len, parts))
    full = [number for number, part in enumerate(parts) if len(part) == most]  # others cost what fewer rows do
    count = min(_COST_BATCHES, len(full))
    costed = {full[len(full) * i // count] for i in range(count)}
    order = list(table)
    name = f"{suite.name}, temperature {sampling.temperature:g}" + (f", batch {batch_size}" if batch_size > 1 else "")
    progress = tqdm(parts, desc=name, unit="prompt" if batch_size == 1 else "batch")
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


def batches(suite: Suite, size: int) -> list[list[int]]:
    """Prompts that are decoded together: neighbours of the same category and as many turns."""
    alike: dict[tuple[str, int], list[int]] = {}
    for i, category in enumerate(suite.categories):
        alike.setdefault((category, _later(suite, i)), []).append(i)
    parts = [group[start : start + size] for group in alike.values() for start in range(0, len(group), size)]
    return sorted(parts)


def check_batches(suites: Sequence[Suite], sizes: Sequence[int]) -> None:
    """Refuse a batch size that no batch of a suite reaches: its figures would be those of fewer rows.

    Raises:
        UserError: too few prompts of one category with as many turns.
    """
    for suite, size in product(suites, sizes):
        most = max(map(len, batches(suite, size)))
        few = f"--batch_size {size}: of {suite.name} at most {most} prompts of one category and as many turns are taken"
        refuse((most < size, f"{few}: raise --max_prompts"))


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
