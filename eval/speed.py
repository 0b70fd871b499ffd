"""Wall clock: the same prompts through each decoder in turn, and the cost of a step's parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from speculator.decoding.cache import ATTENTION
from speculator.decoding.draft import Draft
from speculator.decoding.generate import Step, generate, verify
from speculator.decoding.rules import RULES
from speculator.decoding.sampling import RowSampling, Sampling, uniforms
from speculator.decoding.session import Session
from speculator.drafters import Drafter
from speculator.target import Target


@dataclass
class Timed:
    """One decoder over a suite, batch by batch.

    Attributes:
        tokens: the new tokens of every prompt.
        decoded: tokens that decoding gave each batch; the prefill's are left out.
        prefill_seconds, decode_seconds: of each batch.
    """

    tokens: list[list[int]] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone: the prefill and the token that it gives are left out."""
        return sum(self.decoded) / sum(self.decode_seconds)

    @property
    def end_to_end_tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / (sum(self.prefill_seconds) + sum(self.decode_seconds))


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def time_ours(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    out: Timed,
    rule: str | None = None,
) -> None:
    """Decode one batch of prompts with the built-in loop."""
    synchronize()
    generation = generate(target, drafter, prompts, sampling, rule=rule, max_new_tokens=count, eos_token_ids=())
    out.tokens += generation.tokens
    out.decoded.append(sum(len(row) - 1 for row in generation.tokens))
    out.steps += [step for row in generation.steps for step in row]
    out.prefill_seconds.append(generation.prefill_seconds)
    out.decode_seconds.append(generation.decode_seconds)


class _FirstToken(BaseStreamer):
    """Notes when the first new tokens came, and how many: transformers hands over the prompt, then step by step."""

    def __init__(self):
        self.calls, self.at, self.count = 0, 0.0, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at, self.count = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass


@contextmanager
def as_loaded(target: Target) -> Iterator[None]:
    """The model as transformers would run it: its default attention, and no settings of a generation config."""
    settings = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    target.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        target.model.generation_config = settings
        target.model.set_attn_implementation(ATTENTION)


def time_transformers(
    target: Target, prompt: list[int], sampling: Sampling, count: int, out: Timed, **kwargs: Any
) -> None:
    """Decode one prompt with transformers' own generate and its dynamic cache; `kwargs` are generate's."""
    ids = torch.tensor([prompt], device=target.device)
    how = (
        {"do_sample": False}
        if sampling.greedy
        else {"do_sample": True, "temperature": sampling.temperature, "top_k": 0}
    )
    streamer = _FirstToken()
    torch.manual_seed(sampling.seed)
    with as_loaded(target):
        synchronize()
        started = time.perf_counter()
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            use_cache=True,
            pad_token_id=0,
            streamer=streamer,
            **how,
            **kwargs,
        )
        synchronize()
        ended = time.perf_counter()
    out.tokens.append(output[0, len(prompt) :].tolist())
    out.decoded.append(len(out.tokens[-1]) - streamer.count)
    out.prefill_seconds.append(streamer.at - started)
    out.decode_seconds.append(ended - streamer.at)


@torch.inference_mode()
def step_costs(target: Target, drafter: Drafter, prompt: list[int], sampling: Sampling, repeats: int = 40) -> dict:
    """c and v, measured apart from any generation: one drafted token, and one verify pass, over one plain step.

    A plain step and a verify pass do all that the loop does in them (forward, law, rule, next token) behind the same
    prompt; the pass is over a whole draft. They take turns, and the medians are compared.
    """
    session, laws = Session(target), RowSampling([sampling], target.device)
    hidden, length = session.prefill([prompt], room=drafter.nodes + 1)
    drafter.start([prompt], hidden, length)
    pending = target.logits(hidden[:, -1]).argmax(-1)
    text = [[*prompt, pending.item()]]
    count = drafter.nodes
    u = uniforms(laws.seeds, length, 2 * count + 1)
    rule = RULES[drafter.rules[0]]
    nothing = Draft.none(pending)
    draft = drafter.propose(pending, laws, u[:, :count], text)
    if draft.tokens.shape[1] < count:  # a lookup that found nothing: any tokens cost the same to verify
        draft = Draft(pending[:, None].expand(-1, count), torch.full_like(pending, count))

    def clock(work: Callable[[], object]) -> float:
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"draft": [], "verify": [], "decode": []}
    for _ in range(repeats):
        seconds["decode"].append(clock(lambda: verify(target, session.cache, pending, nothing, laws, rule, u[:, -1:])))
        seconds["draft"].append(clock(lambda: drafter.propose(pending, laws, u[:, :count], text)))
        seconds["verify"].append(clock(lambda: verify(target, session.cache, pending, draft, laws, rule, u[:, count:])))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "draft_over_decode": median["draft"] / drafter.draft_length / median["decode"],
        "verify_over_decode": median["verify"] / median["decode"],
    }
