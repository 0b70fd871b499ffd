"""The engine: requests in, tokens out.

A slot is a row of the KV cache. Between two steps finished requests leave their slots, waiting requests are admitted,
and a chunk of their prompts is prefilled. Decoding rows come first in the cache, so a step runs over those alone.
Plain decoding is the same engine without a drafter.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from speculator.decoding import cuda_graphs, prefill
from speculator.decoding.cuda_graphs import Captured
from speculator.decoding.draft import Draft, gather_at
from speculator.decoding.drafter import Drafter, Sequences, Shape
from speculator.decoding.logprobs import TokenLogprobs, token_logprobs
from speculator.decoding.request import (
    Generation,
    Request,
    StopStrings,
    as_token_set,
    check_max_new_tokens,
    check_prompts,
    held_back,
    max_logprobs,
    sampling_per_row,
)
from speculator.decoding.sampling import Noise, RowSampling, Sampling, draw, without_held_back
from speculator.decoding.scheduler import DECODING, PREFILLING, Scheduler
from speculator.decoding.verify import MATCH, REJECTION_RULES, RULES, match
from speculator.device import is_out_of_memory
from speculator.errors import UserError, refuse
from speculator.target.kv_cache import KVCache
from speculator.target.model import Target
from speculator.target.probe import not_finite

_log = logging.getLogger(__name__)
PREFILL_CHUNK = 512
"""Prompt tokens of a row per prefill pass."""
RESERVED_NEW_TOKENS = 1024
"""New tokens for which a slot has room at admission; the cache grows if a request needs more."""
FAR_BEYOND = 4
"""Multiple of a drafter's trained length from which prompts are logged: there heads accept much less."""
_MIN_STEPS_TO_CAPTURE = 64
"""Steps from which `generate` captures CUDA graphs. A graph costs about ten eager steps, and is used for 256 tokens."""


@dataclass
class Verified:
    """Result of a verify step.

    Attributes:
        tokens: [R, G+1] the pending token and the accepted path; later columns are arbitrary.
        hidden: [R, G+1, D] hidden states of `tokens`, or the auxiliary hidden states that the drafter reads.
        accepted: [R] number of accepted draft tokens.
        next_token: [R] token after the accepted path.
        report: [R, G+4] for the host: the path, the draft's depth, `accepted`, 1 if the logits are finite,
            `next_token`.
    """

    tokens: Tensor
    hidden: Tensor
    accepted: Tensor
    next_token: Tensor
    report: Tensor


class Engine:
    """Decodes requests: `submit` some, then `run`, or `step` by step.

    A completion does not depend on the other requests of its batch, up to near-ties of rounded logits: random numbers
    are a function of the request's seed, the sequence length and an index. A sampled completion does depend on them if
    the drafter picks one shape for all rows (`AdaptiveDrafter`). Requests are admitted in the order submitted.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes tokens; None: plain decoding.
        slots: requests that are decoded at a time.
        rule: accept rule (`speculator.decoding.verify.RULES`); default: the drafter's first. At temperature 0
            every rule is `match`.
        chunk: prompt tokens of a row per prefill pass. While other rows decode, it limits the tokens of all rows.
        capacity: tokens for which a slot has room from the start; it grows with the requests.
        capture: on a CUDA device, replay steps as CUDA graphs if target and drafter allow it.

    Attributes:
        num_prefilled_tokens: prompt tokens processed so far.
        prefill_seconds, decode_seconds: wall-clock time spent so far.
    """

    cache: KVCache
    sampling: RowSampling  # of the selected rows

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 8,
        rule: str | None = None,
        chunk: int = PREFILL_CHUNK,
        capacity: int = 0,
        capture: bool = True,
    ):
        if slots < 1 or chunk < 1:
            raise UserError(f"slots and chunk must be integers >= 1, got {slots} and {chunk}")
        _check_drafter(target, drafter, rule)
        self.target, self.drafter, self.chunk = target, drafter, chunk
        self._rule, self._capture = rule, capture
        self.scheduler = Scheduler(slots, target.recurrent)
        self.waiting: deque[Request] = deque()
        self.num_prefilled_tokens, self.prefill_seconds, self.decode_seconds = 0, 0.0, 0.0
        self.pending = torch.zeros(slots, dtype=torch.long, device=target.device)
        """[slots] newest token of each decoding row: sampled, not yet processed by the target."""
        self.active = torch.ones(slots, dtype=torch.bool, device=target.device)
        """[slots] False for idle rows, which take part in captured steps."""
        self._max_tokens = capacity
        """Tokens of a sequence for which every slot has room."""
        self._capacity = 0
        """Positions that every slot has in the caches of target and drafter."""
        self._decoding: list[Request] = []
        self.selected_pending, self.selected_active = self.pending[:0], self.active[:0]  # views: the selected rows
        self._captured_samplings: dict[Hashable, RowSampling] = {}
        self.capturing = capture and cuda_graphs.capturable(target, drafter)
        self._num_logprobs: int | None = None
        self._held_back: list[tuple[int, int, list[int]]] = []
        self._token_logprobs: list[list[TokenLogprobs]] | None = None
        self._pool = cuda_graphs.new_pool(target.device)
        self._decode = self.capturable_method("decode_rows")

    # ---- requests in

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, **settings: Any) -> Request:
        """Make a request and queue it; see `request` for the settings."""
        return self.enqueue(self.request(prompt, sampling, **settings))

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        eos_token_ids: int | Collection[int] | None = None,
        logprobs: int | None = None,
        min_tokens: int = 0,
        on_step: Callable[[list[int], int], None] | None = None,
    ) -> Request:
        """Validate the settings (see `generate`) and make a `Request` for `enqueue`.

        Args:
            min_tokens: tokens before the completion may end; until then, no EOS token is sampled, and stop strings
                do not count.
        """
        (tokens,) = check_prompts(self.target, [prompt])
        room = self.target.context_length - len(tokens)
        requested = check_max_new_tokens(max_new_tokens)
        limit, limit_reason = min((requested, "length"), (room, "context"), key=itemgetter(0))
        eos = self.target.eos_token_ids if eos_token_ids is None else as_token_set(eos_token_ids)
        stop = StopStrings(stop_strings, self.target.tokenizer) if stop_strings else None
        if stop is not None:
            eos = {*eos, *stop.tokens}
        early = {*self.target.eos_token_ids, *eos} if min_tokens else ()
        ends = (limit, limit_reason, eos, stop)
        return Request(tokens, sampling or Sampling(), *ends, on_step, logprobs, min_tokens, early)

    def enqueue(self, request: Request) -> Request:
        """Queue a request made by `request`."""
        self._max_tokens = max(self._max_tokens, _room(request))
        trained = self.drafter.trained_length if self.drafter else None
        if trained and len(request.prompt) > FAR_BEYOND * trained:
            _warn_of_length(trained)
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        stop_strings: Sequence[str] = (),
        eos_token_ids: int | Collection[int] | None = None,
        on_step: Callable[[int, list[int], int], None] | None = None,
    ) -> Generation:
        """Submit all prompts and run; see the function `generate`."""
        prompts = check_prompts(self.target, prompts)
        samplings = sampling_per_row(sampling or Sampling(), len(prompts))
        limits = list(max_new_tokens) if isinstance(max_new_tokens, list | tuple) else [max_new_tokens] * len(prompts)
        if len(limits) != len(prompts):
            raise UserError(f"max_new_tokens: got {len(limits)} numbers for {len(prompts)} prompts")
        prefill_before, decode_before = self.prefill_seconds, self.decode_seconds
        requests = []
        for row, (prompt, row_sampling, limit) in enumerate(zip(prompts, samplings, limits, strict=True)):
            callback = None if on_step is None else (lambda new, drafted, row=row: on_step(row, new, drafted))
            settings = {"max_new_tokens": limit, "stop_strings": stop_strings, "eos_token_ids": eos_token_ids}
            requests.append(self.request(prompt, row_sampling, on_step=callback, **settings))  # type: ignore[arg-type]
        try:
            for request in requests:
                self.enqueue(request)
            self.run()
            for request in requests:
                request.check_memory()
        finally:  # an interrupt leaves no request behind
            for request in requests:
                request.cancel()
        return Generation(
            [request.tokens for request in requests],
            [request.steps for request in requests],
            self.prefill_seconds - prefill_before,
            self.decode_seconds - decode_before,
            [request.finish_reason for request in requests],
        )

    @property
    def busy(self) -> bool:
        """True while a request waits or is in a slot."""
        return bool(self.waiting) or any(slot.request for slot in self.scheduler.slots)

    def run(self) -> None:
        """Step until all requests have finished."""
        while self.step():
            pass

    def forget(self) -> None:
        """Drop the sequences of free slots and the drafter's history, as if nothing had been decoded."""
        self.scheduler.release()
        if self.busy:
            raise RuntimeError("requests are in flight")
        self.scheduler = Scheduler(len(self.scheduler.slots), self.target.recurrent)
        if self.drafter:
            self.drafter.forget()

    @torch.inference_mode()
    def replace_drafter(self, drafter: Drafter) -> None:
        """Draft with another drafter from the next step on; after an error, the old one stays.

        Requests in flight are preempted: prompts and completions are prefilled again, for the new drafter's state.
        Under the rule `match` texts stay the same, up to near-ties of rounded logits.
        """
        _check_drafter(self.target, drafter, self._rule)
        if hasattr(self, "cache"):
            drafter = drafter.open(len(self.scheduler.slots), self.cache.capacity)
            drafter.attach_cache(self.cache)
        self.scheduler.preempt()
        self.drafter, self._decoding = drafter, []
        self.capturing = self._capture and cuda_graphs.capturable(self.target, drafter)
        self._new_graphs()

    # ---- one step

    @torch.inference_mode()
    def step(self) -> bool:
        """Advance every decoding row by one verification step. Returns whether anything is left to do.

        Host work is here; `decode_rows` is the device's part, which CUDA graphs can replay.
        """
        started = time.perf_counter()
        self.scheduler.release()  # slots of finished requests become free
        self.admit()  # and go to waiting requests
        self.grow()  # the cache has room for all of them
        self.prefill()  # one chunk of the prompts that are not in the cache yet
        prefilled = time.perf_counter()
        self.prefill_seconds += prefilled - started
        sequences = self.select_decoding_rows()
        if sequences:
            report = self._decode(sequences)
            self.append_tokens(report.tolist(), self._token_logprobs)  # the step's one copy to the host
            seconds = time.perf_counter() - prefilled
            self.decode_seconds += seconds
            if self.drafter:
                self.drafter.observe(seconds)
        return self.busy

    def decode_rows(self, sequences: Sequences) -> Tensor:  # [R, G+4], see `Verified.report`
        """Draft, verify, accept and commit for the selected rows: device work only.

        With p the target's distribution and q the draft's (2211.17192):
            draft    x_1 .. x_G ~ q
            verify   one forward pass gives p_1 .. p_{G+1}
            accept   a prefix or path x_1 .. x_n by the accept rule, so that the output distribution is exactly p
            sample   the next token: the target's own under `match`, else from what the rule leaves of p_{n+1}
            commit   the pending token and x_1 .. x_n; the next token becomes the pending one
        """
        draft, noise = self.draft(sequences)
        verified = self.verify(draft, noise)
        self.commit(verified)
        self.update_drafter(verified)
        return verified.report

    @property
    def rule(self) -> str:
        """Accept rule of the next step; plain decoding is `match` without a draft."""
        return MATCH if self.drafter is None else self._rule or self.drafter.rules[0]

    def draft(self, sequences: Sequences) -> tuple[Draft, Noise]:
        """Return the draft and the random numbers of the step."""
        depth = self.drafter.num_speculative_tokens if self.drafter else 0
        noise = Noise(self.sampling, self.cache.selected + 1, self.target.vocab_size, depth, coupled=self.rule == MATCH)
        if self.drafter is None:
            return Draft.none(self.selected_pending), noise
        return self.drafter.propose(self.selected_pending, noise, sequences), noise

    def verify(self, draft: Draft, noise: Noise) -> Verified:
        """Run the target over the pending token and the draft, and accept a path.

        Logits at verify position j (0: the pending token, i+1: draft token i) give p[j], the distribution of the token
        after it. The accepted path ends at position `last`; its keys and values move to the front of the draft's.
        """
        tokens = torch.cat([self.selected_pending[:, None], draft.tokens], dim=1)
        # On a CPU, where reading the lengths costs nothing, only tokens that exist are computed: one row's long draft
        # would otherwise cost as much as one in every row, most of it logits and noise over the whole vocabulary.
        packs = noise.coupled and self.target.device.type == "cpu" and not self.capturing
        present = draft.present if packs else None
        counts = (draft.lengths + 1).tolist() if present and draft.parents is None else None
        with self.target.aux_layers.recorded(self._aux_layers) as states:
            tree = None if draft.parents is None else draft
            # One forward pass for the pending token and the draft: hidden state j gives the distribution of the token
            # after verify position j, so G drafted tokens have G + 1 of them, the last for the bonus token.
            hidden = self.target.extend(self.cache, tokens, tree, counts=None if self.cache.recurrent else counts)
        if self._num_logprobs is not None or self._held_back:
            present = None
        logits = self.target.logits(hidden if present is None else hidden[present])
        allowed = logits
        if self._held_back:  # such a step is not captured
            depths = torch.arange(tokens.shape[1], device=logits.device).expand(len(tokens), -1)
            allowed = without_held_back(logits, self._held_back, depths if draft.parents is None else draft.depths)
        if noise.coupled:
            last, next_token = match(noise.samples(allowed, draft, present), draft)
        else:  # n random numbers drew the draft, n more test it, another one samples
            assert self.drafter is not None
            nodes = self.drafter.nodes
            # Columns 0..n-1 drew the draft. A rule that tested it with the same numbers would not keep the
            # distribution.
            u = noise.uniforms(2 * nodes + 1)
            last, residual = REJECTION_RULES[self.rule](self.sampling.probs(allowed), draft, u[:, nodes:])
            next_token = draw(residual, u[:, -1])
        # A logit that is not finite is the largest of its row, or all are NaN: the chosen token's shows both.
        if present is None:
            finite = allowed[torch.arange(len(last), device=last.device), last, next_token].isfinite()
        else:  # the rows follow each other, each with its pending token first
            finite = allowed[(draft.lengths + 1).cumsum(0) - draft.lengths - 1 + last, next_token].isfinite()

        hidden = states(hidden)
        drafted, accepted = draft.lengths, last
        if draft.parents is not None:  # a tree: gather the accepted path
            path = draft.path(last)
            self.cache.gather(path)
            tokens, hidden = tokens.gather(1, path), gather_at(hidden, path)
            drafted, accepted = draft.longest, draft.depths.gather(1, last[:, None])[:, 0]
            if self._num_logprobs is not None:
                logits = gather_at(logits, path)
        if self._num_logprobs is not None:  # such a step is not captured
            new_tokens = tokens.roll(-1, 1).scatter(1, accepted[:, None], next_token[:, None])
            self._token_logprobs = token_logprobs(logits, new_tokens, self._num_logprobs)
        columns = (drafted, accepted, finite, next_token)
        report = torch.cat([tokens[:, 1:], *(column[:, None] for column in columns)], 1)
        return Verified(tokens, hidden, accepted, next_token, report)

    def commit(self, verified: Verified) -> None:
        """Keep the pending token and the accepted ones in the cache."""
        self.cache.commit(self._counts(verified))  # rejected positions become free; nothing is copied
        self.selected_pending.copy_(verified.next_token)

    def update_drafter(self, verified: Verified) -> None:
        """Keep the same tokens in the drafter."""
        if self.drafter:
            self.drafter.commit(verified.tokens, verified.hidden, self._counts(verified))

    def _counts(self, verified: Verified) -> Tensor:
        # The pending token counts: it was read in this step. The next token does not, it is read in the next one.
        counts = verified.accepted + 1
        # Idle rows commit too, because a graph has a fixed number of rows; their counts are 0.
        return counts * self.selected_active if self.capturing else counts

    # ---- host work around a step

    def admit(self) -> None:
        """Give free slots to waiting requests."""
        if not self.waiting:
            return
        if not hasattr(self, "cache"):
            self._allocate(self._open)
        self.scheduler.admit(self.waiting, self._overlap)

    def _open(self) -> None:
        slots = len(self.scheduler.slots)
        # The spare positions hold a draft that begins at the last token of the longest text.
        cache = self.target.cache(slots, self._max_tokens + self._spare_positions)
        if self.drafter:
            self.drafter = self.drafter.open(slots, cache.capacity)
            self.drafter.attach_cache(cache)
        self.cache, self._capacity = cache, cache.capacity

    def grow(self) -> None:
        """Make room for the sequences in the slots and for the current shape of the drafts."""
        longest = max((len(slot.sequence) for slot in self.scheduler.slots if slot.request), default=0)
        if longest > self._max_tokens:
            self._max_tokens = longest + RESERVED_NEW_TOKENS
        if longest:
            self._allocate(self._grow)

    def _grow(self) -> None:
        needed = self._max_tokens + self._spare_positions
        if self.cache.room_for(needed) > self._capacity:
            self._new_graphs()  # first: there may be too little memory for the drafter's buffers, not for the cache's
            self.cache.grow(needed)
            if self.drafter:
                self.drafter.grow(self.cache.capacity)
            self._capacity = self.cache.capacity

    def _allocate(self, allocate: Callable[[], None]) -> None:
        """Allocate room for all requests. While there is too little memory, the request that needs most fails alone."""
        while True:
            try:
                return allocate()
            except (MemoryError, RuntimeError) as error:
                running = [slot.request for slot in self.scheduler.slots if slot.request]
                requests = [each for each in [*self.waiting, *running] if not each.finish_reason]
                if not requests or not is_out_of_memory(error):
                    raise
            *others, largest = sorted(requests, key=_room)
            largest.fail()
            self.scheduler.release()
            present = self._capacity - self.cache.bucket + 1 - self._spare_positions if self._capacity else 0
            self._max_tokens = max([present, *map(_room, others)])

    def _new_graphs(self) -> None:
        """Drop the graphs, which read old buffers, and their pool: torch captures nothing into one without graphs."""
        self._pool = cuda_graphs.new_pool(self.target.device)
        self._decode = self.capturable_method("decode_rows")

    def prefill(self) -> None:
        """Process a chunk of the prompts that are not in the cache yet, and sample the first token of complete ones.

        While other rows decode, a chunk has at most max(chunk, tokens of the decoding rows in a step) tokens.
        """
        source, destination, longest = self.scheduler.share_prefixes()
        if destination:
            self._move(source, destination, longest)
        rows = self.scheduler.rows_in(PREFILLING)
        if not rows:
            return
        if rows[-1] - rows[0] >= len(rows):
            self._sort_rows()
            rows = self.scheduler.rows_in(PREFILLING)
        decoding = self.scheduler.count(DECODING)
        budget = max(self.chunk, decoding * self._tokens_per_step) if decoding else None
        chunk = prefill.next_chunk(self.scheduler, rows, self.chunk, budget, self.cache)
        hidden = prefill.process(chunk, self.target, self.cache, self.drafter)
        self.num_prefilled_tokens += sum(chunk.counts)
        complete = {}
        for i, count in enumerate(chunk.counts):
            slot = self.scheduler.slots[chunk.start + i]
            slot.num_computed_tokens += count
            # Of a preempted request the completion is read again too, so it is complete at the end of the whole
            # sequence.
            if slot.request and slot.num_computed_tokens == len(slot.sequence):
                complete[i] = slot.request
        if complete:
            self._start_decoding({chunk.start + i: request for i, request in complete.items()}, hidden[list(complete)])

    def _start_decoding(self, requests: dict[int, Request], hidden: Tensor) -> None:
        """Sample each row's next token from its last hidden state [R, D], and decode the row from now on."""
        first, logprobs = prefill.first_tokens(self.target, list(requests.values()), hidden)
        self.pending[list(requests)] = first
        for i, ((row, request), token) in enumerate(zip(requests.items(), first.tolist(), strict=True)):
            self.scheduler.slots[row].phase = DECODING
            if not request.finish_reason:
                drafted = 0 if request.tokens else None  # a preempted request's token counts as a step without a draft
                request.append([token], drafted, None if logprobs is None else logprobs[i])

    def select_decoding_rows(self) -> list[Sequence[int]]:
        """Select the decoding rows for the next step and return their sequences (an empty list if idle)."""
        self.scheduler.release()
        count = self.scheduler.count(DECODING)
        if not count:
            return []
        if any(slot.phase != DECODING for slot in self.scheduler.slots[:count]):
            self._sort_rows()
        slots = self.scheduler.slots[:count]
        sequences = [slot.sequence for slot in slots]
        requests = [slot.request for slot in slots if slot.request]
        if self.drafter:
            self.reshape(self.drafter.choose(requests))
        # Captured steps have a power of two rows, so that graphs are few; the rows from `count` on are idle.
        rows = min(len(self.scheduler.slots), 1 << (count - 1).bit_length()) if self.capturing else count
        # Less one: the newest token of each row is pending, and not in the cache yet.
        self.cache.select(0, rows, max(map(len, sequences)) - 1)
        self._token_logprobs, self._held_back = None, held_back(requests)
        # The same requests as in the step before: settings and views are still right, and nothing is sent to the
        # device.
        if requests != self._decoding or rows != len(self.selected_pending):
            self._decoding = requests
            # Views of the first rows. A captured step reads the same memory in every replay, so they are written in
            # place.
            self.selected_pending, self.selected_active = self.pending[:rows], self.active[:rows]
            samplings = [request.sampling for request in requests]
            self.sampling = RowSampling(samplings + samplings[:1] * (rows - count), self.target.device)
            self._num_logprobs = max_logprobs(requests)
            if self.capturing:  # graphs read the settings from tensors that stay in place
                in_place = self._captured_samplings.setdefault((rows, *self.sampling.kind), self.sampling)
                in_place.copy_(self.sampling)
                self.sampling = in_place
                self.selected_active.copy_(torch.arange(rows) < count)
        return [*sequences, *[[] for _ in range(rows - count)]]

    def append_tokens(self, report: list[list[int]], logprobs: list[list[TokenLogprobs]] | None = None) -> None:
        """Append a step's tokens to the requests; a request may finish."""
        for i, (slot, request, row) in enumerate(zip(self.scheduler.slots, self._decoding, report, strict=False)):
            *path, drafted, accepted, finite, next_token = row
            # Computed in this step: the pending token and the accepted ones. `next_token` is pending now.
            slot.num_computed_tokens += 1 + accepted
            if not request.finish_reason:  # an `on_step` of this step may have cancelled it
                refuse((not finite, not_finite(self.target)))
                row_logprobs = None if logprobs is None else logprobs[i]
                request.append([*path[:accepted], next_token], drafted, row_logprobs)

    def reshape(self, shape: Shape) -> None:
        """Draft in another shape from the next step on.

        Completions do not change, except of sampled rows under a rule other than `match`.
        """
        assert self.drafter is not None
        if shape is self.drafter.shape:
            return
        self.drafter.reshape(shape)
        capturing = self._capture and cuda_graphs.capturable(self.target, self.drafter)
        if capturing != self.capturing:
            self.capturing, self._decoding = capturing, []  # select the rows again: other tensors hold the settings

    def capturable_method(self, method: str) -> Callable[..., Any]:
        """Return a method of this class that is replayed as a CUDA graph if steps are captured."""
        work, engine_reference = Captured(getattr(type(self), method), self._pool), weakref.ref(self)

        def run(*arguments: Any) -> Any:
            engine = engine_reference()
            assert engine is not None
            if not engine.capturing or engine._num_logprobs is not None or engine._held_back:
                return work.work(engine, *arguments)
            state = [*engine.cache.state, engine.pending, *(engine.drafter.buffers if engine.drafter else ())]
            with cuda_graphs.on(engine.target.device):
                drafting = engine.drafter and (engine.drafter.shape, engine.drafter.version)
                # Whatever changes shapes or code of a step must be in the key; whatever changes only values must be in
                # a buffer.
                key = (len(engine.selected_pending), engine.cache.longest, engine.sampling.kind, drafting)
                return work(key, state, engine, *arguments)

        return run

    def _sort_rows(self) -> None:
        source, destination = self.scheduler.sort_by_phase()
        if destination:
            self._move(source, destination, max(len(self.scheduler.slots[row].sequence) for row in destination))
            self.pending[destination] = self.pending[source]

    def _move(self, source: list[int], destination: list[int], longest: int) -> None:
        """Copy the first `longest` tokens of rows to other rows."""
        self.cache.move(source, destination, longest)
        if self.drafter:
            self.drafter.move(source, destination, longest)

    @property
    def _tokens_per_step(self) -> int:
        """The most tokens of a row in a verification: the pending one and the draft."""
        return 1 + (self.drafter.max_nodes if self.drafter else 0)

    @property
    def _spare_positions(self) -> int:
        """Positions after a sequence that a step may write. A captured step also commits tokens of idle rows."""
        return max(2 * self._tokens_per_step, self.drafter.scratch_positions if self.drafter else 0)

    @property
    def _overlap(self) -> int:
        return self.drafter.overlap if self.drafter else 0

    @property
    def _aux_layers(self) -> Sequence[int]:
        return self.drafter.aux_layers if self.drafter else ()


def _check_drafter(target: Target, drafter: Drafter | None, rule: str | None) -> None:
    """Raise a UserError if a drafter does not fit the accept rule."""
    refuse((target.encoder is not None, f"{target.name}: encoder-decoder models can't be decoded yet"))
    allowed = drafter.rules if drafter else RULES
    if rule is not None and rule not in RULES:
        raise UserError(f"unknown accept rule {rule!r}: choose one of {', '.join(RULES)}")
    if rule is not None and rule not in allowed:
        raise UserError(f"the rule {rule!r} does not fit all drafts of this drafter: choose {', '.join(allowed)}")


@cache  # once in a process
def _warn_of_length(trained: int) -> None:
    _log.warning(
        "a prompt has more than %d times the %d tokens that the draft head was trained on: it may accept little there; "
        "train it on longer rows (data.seq_length)",
        FAR_BEYOND,
        trained,
    )


def _room(request: Request) -> int:
    """Tokens for which a request needs room."""
    return max(len(request.sequence), len(request.prompt) + min(request.max_new_tokens, RESERVED_NEW_TOKENS))


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    rule: str | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    max_batch_size: int | None = None,
    stop_strings: Sequence[str] = (),
    eos_token_ids: int | Collection[int] | None = None,
    on_step: Callable[[int, list[int], int], None] | None = None,
) -> Generation:
    """Generate completions whose distribution is exactly the target's, with any drafter.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes tokens; None: plain decoding.
        prompts: token ids, one non-empty list or 1-D tensor per prompt.
        sampling: temperature and filters, one for each prompt or one for all (default: greedy). With one for all,
            prompt r uses the seed `seed + r`.
        rule: accept rule; see `Engine`.
        max_new_tokens: the most new tokens, one number for all prompts or one for each. The target's context length
            also ends a completion.
        max_batch_size: prompts that are decoded at a time; default: all.
        stop_strings: a completion ends with the token that completes one of them.
        eos_token_ids: tokens that end a completion; default: the target's own.
        on_step: called with (row, new tokens, how many of them were drafted) after every step, prefill included.
    """
    if max_batch_size is not None and max_batch_size < 1:
        raise UserError(f"max_batch_size must be an integer >= 1, got {max_batch_size}")
    prompts = check_prompts(target, prompts)
    slots = min(len(prompts), max_batch_size or len(prompts))
    limits = max_new_tokens if isinstance(max_new_tokens, list | tuple) else [max_new_tokens] * len(prompts)
    # At worst every draft is accepted as a whole.
    steps = sum(map(check_max_new_tokens, limits)) / slots / (1 + (drafter.num_speculative_tokens if drafter else 0))
    engine = Engine(target, drafter, slots=slots, rule=rule, capture=steps >= _MIN_STEPS_TO_CAPTURE)
    return engine.generate(
        prompts,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_strings=stop_strings,
        eos_token_ids=eos_token_ids,
        on_step=on_step,
    )
