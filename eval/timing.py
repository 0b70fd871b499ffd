"""Time and peak memory of batches of prompts, decoded by the engine or by transformers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from speculator.decoding.engine import Engine, generate
from speculator.decoding.request import Generation, Step
from speculator.decoding.sampling import Sampling
from speculator.device import synchronize
from speculator.drafters import Drafter
from speculator.drafters.measure import without_captures
from speculator.kernels.cuda_graphs import capturable
from speculator.target.attention.attention import using_attention
from speculator.target.model import Target

Engines = dict[tuple[int, Drafter | None, str | None], Engine]
"""Engines that keep their CUDA graphs, by batch size, drafter and rule."""


@dataclass
class Decoded:
    """One batch, decoded by one decoder.

    Attributes:
        prefill_seconds: time to the first token.
        decode_seconds: time of all other tokens.
        prompt_lengths: in tokens.
        steps: steps of each prompt; empty for transformers.
        peak_memory: in bytes, see `peak_memory`.
    """

    tokens: list[list[int]]
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prompt_lengths: list[int] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def decoded(self) -> int:
        """Number of new tokens without those of the prefill."""
        return sum(map(len, self.tokens)) - self.prefill_tokens

    def counted(self, whole: bool) -> tuple[int, float]:
        """Return new tokens and seconds: of the `whole` answers, or without the prefill and its tokens."""
        if whole:
            return self.decoded + self.prefill_tokens, self.prefill_seconds + self.decode_seconds
        return self.decoded, self.decode_seconds


@dataclass
class Timed:
    """A suite, decoded by one decoder, batch by batch."""

    batches: list[Decoded] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """New tokens of each prompt of all batches."""
        return [row for batch in self.batches for row in batch.tokens]

    @property
    def steps(self) -> list[Step]:
        """Steps of all prompts; empty for transformers."""
        return [step for batch in self.batches for row in batch.steps for step in row]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without the prefill and its token; 0 if there are no other tokens."""
        return self._speed(whole=False)

    @property
    def end_to_end_tokens_per_second(self) -> float:
        """New tokens per second, with the prefill and its token."""
        return self._speed(whole=True)

    def _speed(self, whole: bool) -> float:
        tokens, seconds = map(sum, zip(*(batch.counted(whole) for batch in self.batches), strict=True))
        return tokens / seconds if seconds else 0.0


def time_ours(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    out: Timed,
    engines: Engines,
    rule: str | None = None,
    stop_at: Sequence[int] = (),
) -> None:
    """Decode one batch of prompts with the engine, and append the result to `out`.

    A run that captured a graph is repeated, see `without_captures`.

    Args:
        count: the most new tokens of a prompt.
        engines: engines with CUDA graphs, kept for the next batches; a new one with graphs is added.
        rule: accept rule (default: the drafter's own).
        stop_at: tokens that end a completion.
    """
    capture, key = capturable(target, drafter), (len(prompts), drafter, rule)
    engine = engines.get(key) or Engine(target, drafter, slots=len(prompts), rule=rule, capture=capture)
    if capture:
        engines[key] = engine

    def decode() -> Generation:
        engine.forget()  # prefixes of the run before would be shared, and the prefill would be free
        reset_peak_memory(target.device)
        synchronize()
        return engine.generate(prompts, sampling, max_new_tokens=count, eos_token_ids=stop_at).check()

    # The first run of a shape captures graphs, which takes seconds: it is decoded again from the beginning.
    generation = without_captures(decode)
    out.batches.append(
        Decoded(
            tokens=generation.tokens,
            prefill_tokens=len(prompts),
            prefill_seconds=generation.prefill_seconds,
            decode_seconds=generation.decode_seconds,
            prompt_lengths=[len(target.text(prompt)) for prompt in prompts],
            steps=generation.steps,
            peak_memory=peak_memory(target.device),
        )
    )


class _FirstToken(BaseStreamer):
    """Records the time and number of the first new tokens; transformers streams the prompt before them."""

    def __init__(self):
        self.calls, self.at, self.count = 0, 0.0, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        # The first call brings the prompt, and the second one the prefill's token: what follows is decoding.
        if self.calls == 2:
            self.at, self.count = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass


@contextmanager
def as_loaded(target: Target) -> Iterator[None]:
    """Run the model with transformers' own attention and without its generation config."""
    settings = target.model.generation_config
    try:
        with using_attention(target.model, target.original_attention):
            target.model.generation_config = GenerationConfig()
            yield
    finally:
        target.model.generation_config = settings


def time_transformers(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    out: Timed,
    stop_at: Sequence[int] = (),
    **kwargs: Any,
) -> None:
    """Decode one batch of prompts with transformers' generate, and append the result to `out`.

    Args:
        count: the most new tokens of a prompt.
        stop_at: tokens that end a completion.
        kwargs: further arguments of `generate`, such as an assistant model.
    """
    given = target.generate_inputs(prompts)
    width = given.get("decoder_input_ids", given["input_ids"]).shape[1]
    if "cache_implementation" in kwargs:
        given.pop("past_key_values", None)
    how: dict[str, bool | float | list[int]] = {"do_sample": False}
    if not sampling.greedy:
        how = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
        if sampling.min_p:
            how["min_p"] = sampling.min_p
    if stop_at:
        how["eos_token_id"] = list(stop_at)
    streamer = _FirstToken()
    torch.manual_seed(sampling.seed)
    reset_peak_memory(target.device)
    with as_loaded(target):
        synchronize()
        started = time.perf_counter()
        output = target.model.generate(
            max_new_tokens=count,
            use_cache=True,
            pad_token_id=0,
            streamer=streamer,
            **how,
            **given,
            **kwargs,
        )
        synchronize()
        ended = time.perf_counter()
    tokens = [_up_to(row, stop_at) for row in output[:, width:].tolist()]
    out.batches.append(
        Decoded(
            tokens=tokens,
            prefill_tokens=streamer.count,
            prefill_seconds=streamer.at - started,
            decode_seconds=ended - streamer.at,
            prompt_lengths=[len(prompt) for prompt in prompts],
            peak_memory=peak_memory(target.device),
        )
    )


def step_seconds(target: Target, prompt: list[int], rows: int) -> float:
    """Return the seconds of a step of plain decoding with `rows` rows that all continue `prompt`."""
    made = [generate(target, None, [prompt] * rows, max_new_tokens=4, eos_token_ids=()).check() for _ in range(2)]
    return made[-1].decode_seconds / 3  # the prefill gives the first of four tokens


def _up_to(tokens: list[int], stop_at: Sequence[int]) -> list[int]:
    """Return a row up to and with its first token in `stop_at`, without the padding that follows."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_at), len(tokens))
    return tokens[:end]


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_kind(device: torch.device) -> str | None:
    """Return in words what memory `peak_memory` measures on this machine; None if it can't be measured per batch."""
    if device.type == "cuda":
        return "allocated on the device"
    return "resident memory of the process" if _reset_resident() else None


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_resident()


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes since `reset_peak_memory`: allocated on a GPU, else of the process (Linux; 0 elsewhere)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def _reset_resident() -> bool:
    """Reset the process's peak resident memory; return whether the system can (Linux)."""
    with suppress(OSError):
        _CLEAR.write_text("5")  # resets the peak resident memory
        return True
    return False
