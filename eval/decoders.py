"""The decoders that a report compares, and the measurement of a suite with all of them in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from transformers import CompileConfig, PreTrainedModel

from eval.suites import Suite
from eval.timing import Decoded, Engines, Timed, time_ours, time_transformers
from speculator.decoding.sampling import Sampling
from speculator.device import has_accelerator
from speculator.drafters import Drafter, DraftModelDrafter, HeadDrafter, NgramDrafter
from speculator.drafters.costs import CostEntry
from speculator.drafters.measure import measure_costs, paired_steps
from speculator.drafters.price import LONGEST_PATH
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.heads import Speculator
from speculator.kernels.fused_norms import fuse_norms
from speculator.kernels.linear import pack_linears
from speculator.target.gguf.file import load_model
from speculator.target.loading import auto_class
from speculator.target.model import Target
from speculator.terminal import Progress, working

_ONE_PROMPT = ("hf_prompt_lookup", "hf_assisted")  # transformers supports these at batch size 1 only
_COST_BATCHES = 16  # batches, evenly spread over the suite, after which the costs of a step are measured
_COST_STEPS = 64  # steps to measure per drafter and suite


@dataclass
class Decoder:
    """One way to decode.

    Attributes:
        key: "none", "head", "head 2", "ngram", "draft_model", "adaptive" or a baseline's name.
        run: decodes one batch and appends the result to a `Timed`; its arguments are the token ids of each prompt, the
            sampling, the most new tokens of a prompt, the `Timed`, and the tokens that end a completion ([]: none).
        drafter: drafter of the built-in engine; None for plain decoding and for transformers.
        ours: True for the built-in engine.
        rule: accept rule above temperature 0; None for the drafter's default.
    """

    key: str
    run: Callable[[list[list[int]], Sampling, int, Timed, Sequence[int]], None]
    drafter: Drafter | None = None
    ours: bool = True
    rule: str | None = None


def decoders(
    target: Target,
    head: Speculator | None,
    lengths: Sequence[int],
    draft_model: Target | None,
    baselines: Collection[str],
    batch_size: int,
    engines: Engines | None = None,
    rule: str | None = None,
) -> tuple[list[Decoder], dict[str, str]]:
    """Return the decoders to compare (plain decoding first), and {key: reason} of the baselines that can't run.

    Args:
        lengths: numbers of speculative tokens of the head's chains; a draft model uses the first, and lookup copies as
            many tokens as it may in adaptive drafting.
        baselines: names from `speculator.tables.OPTIONAL`.
        batch_size: prompts decoded together; some baselines can't run above 1.
        engines: engines that other decoders share, to which new ones are added.
        rule: accept rule of every drafter that supports it (default: each drafter's own).
    """
    length = lengths[0]
    drafters: dict[str, Drafter | None] = {"none": None}
    if head is not None:
        drafters |= {
            f"head {each}" if number else "head": HeadDrafter(head, each) for number, each in enumerate(lengths)
        }
    drafters["ngram"] = NgramDrafter(LONGEST_PATH)
    if draft_model is not None:
        drafters["draft_model"] = DraftModelDrafter(draft_model, target, length)
    engines = {} if engines is None else engines
    table = [decoder_of(target, key, drafter, engines, rule) for key, drafter in drafters.items()]

    options: dict[str, dict] = {
        "hf_generate": {},
        "hf_compiled": {"cache_implementation": "static", "compile_config": _compile_config()},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": LONGEST_PATH, "max_matching_ngram_size": 3},
    }
    not_run: dict[str, str] = {}
    if "hf_assisted" in baselines and draft_model is None:
        not_run["hf_assisted"] = "it needs a draft model"
    elif draft_model is not None and "hf_assisted" in baselines:
        options["hf_assisted"] = assisted_settings(length)
        if batch_size == 1:
            options["hf_assisted"]["assistant_model"] = _assistant(draft_model, length)
    for key, kwargs in options.items():
        if key != "hf_generate" and key not in baselines:
            continue
        if batch_size > 1 and key in _ONE_PROMPT:
            not_run[key] = "transformers supports it at batch size 1 only"
        else:
            table.append(_transformers_decoder(target, key, kwargs))
    return table, not_run


def decoder_of(target: Target, key: str, drafter: Drafter | None, engines: Engines, rule: str | None = None) -> Decoder:
    """Return a decoder of the built-in engine, plain without a drafter, under `rule` if the drafter supports it.

    New engines are added to `engines`, which other decoders share.
    """
    rule = rule if drafter and rule in drafter.rules else None

    def run(prompts, sampling, count, out, stop_at) -> None:
        time_ours(target, drafter, prompts, sampling, count, out, engines=engines, rule=rule, stop_at=stop_at)

    return Decoder(key, run, drafter, rule=rule)


def _transformers_decoder(target: Target, key: str, kwargs: dict) -> Decoder:
    def run(prompts, sampling, count, out, stop_at) -> None:
        time_transformers(target, prompts, sampling, count, out, stop_at, **kwargs)

    return Decoder(key, run, ours=False)


def _compile_config() -> CompileConfig:
    """Return a config with which `generate` compiles on every device; by default it does on accelerators only."""
    config = CompileConfig()
    if not has_accelerator():
        config.mode = "default"  # the other modes are about CUDA graphs
        config._compile_all_devices = True  # type: ignore[assignment]
    return config


def assisted_settings(length: int) -> JsonObject:
    """Return the settings of assisted generation that are not transformers' own: `length` tokens in every draft."""
    return {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _assistant(draft_model: Target, length: int) -> PreTrainedModel:
    """Load a draft model again, with its own attention, for assisted generation with drafts of `length` tokens."""
    kind = auto_class(draft_model.model.config)
    trusted = type(draft_model.model).__module__.startswith("transformers_modules")  # it runs code of its own already
    assistant = load_model(kind, draft_model.name, dtype=draft_model.dtype, trust_remote_code=trusted)
    assistant = assistant.to(draft_model.device)
    # As the target and our draft model, see `InProcessTarget`.
    if draft_model.device.type == "cuda":
        fuse_norms(assistant)
    pack_linears(assistant)
    assistant.generation_config.update(**assisted_settings(length))
    return assistant


@dataclass
class Measured:
    """Measurements of one suite at one temperature and batch size.

    Attributes:
        timed: timings by decoder key; all decoders ran the same batches in the same order.
        conversations: number of each batch's conversation; its turns share the number.
        steps: seconds of plain steps and of the drafted steps after them, by decoder key.
        verification: what the target pays for the tokens that it verifies; None if nothing drafts.
        not_run: why baselines could not run, by decoder key.
        turns_left_out: number of turns whose conversation had outgrown the context.
    """

    timed: dict[str, Timed]
    categories: list[str] = field(default_factory=list)
    conversations: list[int] = field(default_factory=list)
    steps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    verification: CostEntry | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    turns_left_out: int = 0

    def drop(self, decoder: Decoder, error: Exception) -> None:
        """Note why a baseline can't run, and forget its timings; raise the error if the decoder is ours."""
        if decoder.ours or isinstance(error, UserError):
            raise error
        self.not_run[decoder.key] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.timed.pop(decoder.key, None)

    def of_category(self, category: str) -> Measured:
        """Return the measurements of one category; `steps` stays empty, because it is not split by category."""
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
    """Decode all prompts of a suite with every decoder, and return the timings.

    Every decoder decodes a batch before the next batch, in rotating order, so that a machine whose speed drifts slows
    all equally. Later turns of a conversation follow the answers of plain decoding, so all get the same prompts.

    Args:
        table: plain decoding first; a transformers baseline that fails is dropped with the reason.
        sampling: its seed is that of the first batch; every batch and turn has another.
        repeats: timings per batch, of which the median counts.
    """
    stop_at = sorted(target.eos_token_ids)
    parts = batches(suite, batch_size)
    measured = Measured({})
    name = f"{suite.name}, temperature {sampling.temperature:g}" + (f", batch {batch_size}" if batch_size > 1 else "")
    with working(f"{name}: warming up"):
        table = _warm_up(target, table, suite, parts, sampling, max_new_tokens, stop_at, measured)
    measured.timed = {decoder.key: Timed() for decoder in table}
    measured.steps = {decoder.key: [] for decoder in table if decoder.drafter}
    cost_batches = _cost_batches(parts)
    order = list(table)
    progress = Progress(parts, title=name, unit="prompts" if batch_size == 1 else "batches")
    for number, batch in enumerate(progress):
        prompts = [suite.prompts[i] for i in batch]
        answers: list[list[int]] = []
        chats = [suite.conversations[i] for i in batch] if suite.conversations else []
        turns = 1 + _later_turns(suite, batch[0])
        for turn in range(turns):
            if turn:
                chats = [chat.after(target.tokenizer, answer) for chat, answer in zip(chats, answers, strict=True)]
                prompts = [chat.ids for chat in chats]
                if max(map(len, prompts)) + max_new_tokens > target.context_length:
                    measured.turns_left_out += len(batch) * (turns - turn)
                    break
            # By the prompt and the turn, so that a text does not depend on what was decoded before.
            seeded = replace(sampling, seed=sampling.seed + batch[0] + turn * len(suite.prompts))
            tries: dict[str, Timed] = {decoder.key: Timed() for decoder in table}
            for _ in range(repeats):
                # Each decoder is first, second, ... equally often.
                order = order[1:] + order[:1]
                for decoder in [each for each in order if each.key not in measured.not_run]:
                    try:
                        decoder.run(prompts, seeded, max_new_tokens, tries[decoder.key], stop_at)
                    except Exception as error:  # of a baseline, such as too little memory for longer prompts
                        measured.drop(decoder, error)
            table = [decoder for decoder in table if decoder.key not in measured.not_run]
            for decoder in table:
                measured.timed[decoder.key].batches.append(_median(tries[decoder.key].batches))
            measured.categories.append(suite.categories[batch[0]])
            measured.conversations.append(number)
            plain = measured.timed["none"].batches[-1].tokens
            answers = [answer[:-1] if answer[-1] in stop_at else answer for answer in plain]
            if number in cost_batches and not turn:
                # Costs at the middle of the answers: they grow with the context.
                halfway = list(map(target.text, prompts))
                for text, answer in zip(halfway, plain, strict=True):
                    text += answer[: len(answer) // 2]
                count = -(-_COST_STEPS // len(cost_batches))
                for decoder in table:
                    if decoder.drafter:
                        timed = paired_steps(target, decoder.drafter, halfway, seeded, count, decoder.rule)
                        measured.steps[decoder.key] += timed
    if measured.steps:
        rows = max(map(len, parts))
        (measured.verification,) = measure_costs(target, None, (), [(rows, sampling.greedy)], math.inf)
    return measured


def _cost_batches(parts: Sequence[Sequence[int]]) -> set[int]:
    """Return the numbers of the batches at which costs are measured: full ones, since fewer rows cost less."""
    # Spread evenly over the full batches: 2 of 5 are the first and the third.
    most = max(map(len, parts))
    full = [number for number, part in enumerate(parts) if len(part) == most]
    count = min(_COST_BATCHES, len(full))
    return {full[len(full) * i // count] for i in range(count)}


def batches(suite: Suite, size: int) -> list[list[int]]:
    """Return batches of at most `size` prompts of one category and number of turns: indices in the suite, in order."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i, category in enumerate(suite.categories):
        groups.setdefault((category, _later_turns(suite, i)), []).append(i)
    parts = [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]
    return sorted(parts)


def count_batches(suite: Suite, size: int) -> int:
    """Return the number of batches that are decoded, the later turns of conversations included."""
    return sum(1 + _later_turns(suite, part[0]) for part in batches(suite, size))


def check_batches(suites: Sequence[Suite], sizes: Sequence[int]) -> None:
    """Raise a UserError if no batch of a suite reaches a batch size."""
    for suite, size in product(suites, sizes):
        most = max(map(len, batches(suite, size)))
        few = f"--batch_size {size}: {suite.name} has at most {most} prompts of one category and number of turns"
        refuse((most < size, f"{few}; raise --max_prompts"))


def _later_turns(suite: Suite, index: int) -> int:
    return len(suite.conversations[index].later) if suite.conversations else 0


def _warm_up(
    target: Target,
    table: list[Decoder],
    suite: Suite,
    parts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_new_tokens: int,
    stop_at: Sequence[int],
    measured: Measured,
) -> list[Decoder]:
    """Run every decoder once, untimed; return those that ran, and note in `measured` why a baseline failed.

    A compiled baseline runs the longest prompts of each batch size at full length, so that nothing is compiled later.
    """
    ready = []
    for decoder in table:
        compiled = decoder.key == "hf_compiled"
        try:
            warming = [[suite.prompts[i] for i in parts[0]]]
            if compiled:
                warming = 2 * _longest_batches(target, suite, parts, max_new_tokens)
            for prompts in warming:
                decoder.run(prompts, sampling, max_new_tokens if compiled else min(8, max_new_tokens), Timed(), stop_at)
        except Exception as error:  # a missing compiler, a model that transformers can't run this way, ...
            measured.drop(decoder, error)
        else:
            ready.append(decoder)
    return ready


def _longest_batches(
    target: Target, suite: Suite, parts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[list[int]]]:
    """Return the longest prompts that batches of each size can have in their last turn, the longest batch first."""
    by_size: dict[int, list[list[int]]] = {}

    def longest(prompts: list[list[int]]) -> int:
        return max(map(len, prompts))

    for part in parts:
        prompts, later = [suite.prompts[i] for i in part], _later_turns(suite, part[0])
        chats = [suite.conversations[i] for i in part] if later else []
        for _ in range(later):
            chats = [chat.after(target.tokenizer, []) for chat in chats]
        if later:  # the longest answers, at the end because only the length counts; no turn outgrows the context
            answers, room = later * max_new_tokens, target.context_length - max_new_tokens
            prompts = [(chat.ids + chat.ids[-1:] * answers)[:room] for chat in chats]
        by_size[len(part)] = max(prompts, by_size.get(len(part), prompts), key=longest)
    return sorted(by_size.values(), key=longest, reverse=True)


def _median(tries: list[Decoded]) -> Decoded:
    """Return the first of several runs of a batch, with the median of their seconds and the largest peak memory."""
    return replace(
        tries[0],
        prefill_seconds=statistics.median(run.prefill_seconds for run in tries),
        decode_seconds=statistics.median(run.decode_seconds for run in tries),
        peak_memory=max(run.peak_memory for run in tries),
    )
