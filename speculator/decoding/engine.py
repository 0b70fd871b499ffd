"""The engine: requests in, tokens out.

`Engine.step` is the loop of every caller: admit, prefill, schedule, forward, process. It runs one verification step
over the rows that decode (`speculator.decoding.rows`). Plain decoding is the same engine without a drafter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speculator.decoding import prefill
from speculator.decoding.draft import Computed, ComputedRagged, Draft
from speculator.decoding.drafter import Drafter
from speculator.decoding.logprobs import TokenLogprobs, token_logprobs
from speculator.decoding.request import EndSettings, Generation, Request, as_text, check_prompts, new_requests
from speculator.decoding.rows import Batch, Rows
from speculator.decoding.sampling import Noise, Sampling, draw
from speculator.decoding.scheduler import DECODING, PREFILLING, Scheduler
from speculator.decoding.verify import MATCH, REJECTION_RULES, RULES, match
from speculator.device import is_out_of_memory
from speculator.errors import UserError
from speculator.target.cache.kv_cache import KVCache
from speculator.target.model import Target
from speculator.target.probe import not_finite

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)
PREFILL_CHUNK = 512
"""Prompt tokens of a row per prefill pass."""
FAR_BEYOND = 4
"""Multiple of a drafter's trained length from which prompts are logged: there heads accept much less."""
_MIN_STEPS_TO_CAPTURE = 64
"""Steps from which `generate` captures CUDA graphs. A graph costs about ten eager steps, and is used for 256 tokens."""


@dataclass
class Verified:
    """Result of a verification step.

    Attributes:
        tokens: [R, G+1] the pending token and the accepted path; later columns are arbitrary.
        hidden: [R, G+1, D] hidden states of `tokens`, or the auxiliary hidden states that the drafter reads.
        accepted: [R] number of accepted draft tokens.
        counts: [R] number of `tokens` to keep: the pending one and the accepted; 0 for idle rows.
        next_token: [R] token after the accepted path.
        report: [R, G+4] for the host: the G drafted columns of `tokens`, the depth of the row's draft, `accepted`,
            `next_token`, and 1 if the logits and the states of all tokens are finite.
        kept: [R, G+1, V] the target's logits after `tokens`. Of a captured step, whose result stays in memory, it is
            [R, G+1, D] the states that give these logits. None unless a request asks for log-probabilities.
    """

    tokens: Tensor
    hidden: Tensor
    accepted: Tensor
    counts: Tensor
    next_token: Tensor
    report: Tensor
    kept: Tensor | None = None


class Engine:
    """Decodes requests: `submit` some, then `run`, or `step` by step.

    A completion does not depend on the other requests of its batch, up to near-ties of rounded logits: random numbers
    are a function of the request's seed, the sequence length and an index. Under rules other than `match`, a sampled
    completion also depends on the shapes of its drafts. Requests are admitted in the order submitted.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes tokens; None: plain decoding.
        slots: requests that are decoded at a time.
        rule: accept rule (`speculator.decoding.verify.RULES`); default: the drafter's first. At temperature 0
            every rule is `match`.
        chunk: prompt tokens of a row per prefill pass. While other rows decode, it limits the tokens of all rows. While
            none does, a pass on a GPU may be longer.
        capacity: tokens for which a slot has room from the start; it grows with the requests.
        capture: on a CUDA device, replay steps as CUDA graphs if target and drafter allow it.

    Attributes:
        num_prefilled_tokens: prompt tokens processed so far.
        prefill_seconds, decode_seconds: wall-clock time spent so far.
    """

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
        self.target, self.chunk, self._rule = target, chunk, rule
        self.rows = Rows(target, drafter, slots, capacity, capture, type(self).decode_batch)
        self.waiting: deque[Request] = deque()
        self.num_prefilled_tokens, self.prefill_seconds, self.decode_seconds = 0, 0.0, 0.0

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; from the first admission on this engine's copy, with memory of its rows."""
        return self.rows.drafter

    @property
    def scheduler(self) -> Scheduler:
        return self.rows.scheduler

    @property
    def cache(self) -> KVCache:
        return self.rows.cache

    # ---- requests in

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None, **settings: Any) -> Request:
        """Make a request, queue it and return it; see `request`."""
        return self.enqueue(self.request(prompt, sampling, **settings))

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        on_step: Callable[[list[int], int], None] | None = None,
        **settings: Any,
    ) -> Request:
        """Return a request for `enqueue`.

        Args:
            prompt: token ids; a text of `speculator.decoding.request.check_prompts` is not checked again.
            settings: `max_new_tokens`, `stop_strings` and `eos_token_ids`, see the function `generate`; `logprobs` and
                `min_tokens`, see `speculator.decoding.request.new_requests`.
            on_step: called with (new tokens, how many of them were drafted) after every step, prefill included.
        """
        (made,) = new_requests(self.target, [as_text(self.target, prompt)], sampling, **settings)
        made.on_step = on_step
        return made

    def enqueue(self, request: Request) -> Request:
        """Queue a request made by `request`, and return it; it is admitted in a later `step`."""
        self.rows.expect(request)
        trained = self.drafter.trained_length if self.drafter else None
        if trained and len(request.prompt) > FAR_BEYOND * trained:
            _warn_of_length(trained)
        self.waiting.append(request)
        return request

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        **settings: Any,
    ) -> Generation:
        """Decode all prompts and return the completions; see the function `generate`, and `request` for settings."""
        return self.complete(new_requests(self.target, check_prompts(self.target, prompts), sampling, **settings))

    @torch.inference_mode()
    def complete(self, requests: Sequence[Request]) -> Generation:
        """Decode new requests to their ends, and return the completions."""
        prefill_before, decode_before = self.prefill_seconds, self.decode_seconds
        try:
            for request in requests:
                self.enqueue(request)
            self.run()
        finally:  # an interrupt leaves no request behind
            for request in requests:
                request.cancel()
        failed = [f"text {n} first: {each.failure}" for n, each in enumerate(requests, start=1) if each.failure]
        if failed:  # which a caller that doesn't `check` may miss
            _log.warning("%d of %d texts failed, %s", len(failed), len(requests), failed[0])
        return Generation(
            tokens=[request.tokens for request in requests],
            steps=[request.steps for request in requests],
            prefill_seconds=self.prefill_seconds - prefill_before,
            decode_seconds=self.decode_seconds - decode_before,
            finish_reasons=[request.finish_reason for request in requests],
            failures=[request.failure for request in requests],
            token_logprobs=[request.token_logprobs for request in requests],
        )

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(slot.request for slot in self.scheduler.slots)

    def run(self) -> None:
        while self.step():
            pass

    @torch.inference_mode()
    def forget(self) -> None:
        """Drop the sequences of free slots and the drafter's history, as if nothing had been decoded.

        Raises a RuntimeError while a request is unfinished.
        """
        self.rows.release()
        for request in [each for each in self.waiting if each.finish_reason]:  # cancelled
            self.waiting.remove(request)
        if self.busy:
            raise RuntimeError("requests are in flight")
        self.rows.forget()

    @torch.inference_mode()
    def replace_drafter(self, drafter: Drafter | None) -> None:
        """Draft with another drafter from the next step on, or with none; after an error, the old one stays.

        Requests in flight are preempted: prompts and completions are prefilled again, for the new drafter's state.
        Under the rule `match` texts stay the same, up to near-ties of rounded logits.
        """
        _check_drafter(self.target, drafter, self._rule)
        self.rows.replace_drafter(drafter)

    # ---- one step

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit waiting requests, prefill one chunk, and advance every decoding row by one verification step.

        Returns whether anything is left to do. After an exception, the next step continues the texts as they are.
        Engines of one target may step in different threads: one waits for the other.
        """
        with self.target.lock:
            try:
                started = time.perf_counter()
                self.admit()
                if self.prefill():  # else all of this step is decoding
                    prefilled = time.perf_counter()
                    self.prefill_seconds += prefilled - started
                    started = prefilled
                if batch := self.schedule():
                    report, kept = self.forward(batch)
                    self.process(batch, report, kept)
                    seconds = time.perf_counter() - started
                    self.decode_seconds += seconds
                    if self.drafter:
                        self.drafter.observe(seconds)
            except BaseException:  # an interrupt, or an error in `on_step`: the device may be ahead of the texts
                self.rows.read_again()
                raise
        return self.busy

    def admit(self) -> None:
        """Give the slots of finished requests to waiting ones, and the caches room for all of them."""
        self.rows.admit(self.waiting)
        self.rows.grow(self.waiting)

    def prefill(self) -> bool:
        """Process one chunk of prompts; sample a first token after complete ones. False: all are in the cache."""
        chunk = self.rows.next_chunk(self.chunk)
        if chunk is None:
            return False
        try:
            hidden = prefill.process(chunk, self.target, self.cache, self.drafter)  # [R, D] of each row's last token
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("a prefill pass of %d tokens ran out of memory: smaller ones follow", sum(chunk.counts))
            self.rows.lack_memory(chunk)
            return True
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
            self.start_decoding({chunk.start + i: request for i, request in complete.items()}, hidden[list(complete)])
        return True

    def schedule(self) -> Batch | None:
        """Return the rows that decode in this step, and choose the shape of their draft; None if no row decodes."""
        requests = self.rows.decoding()
        if not requests:
            return None
        if self.drafter:  # an adaptive one prices its drafts now, see `speculator.drafters.price`
            self.rows.reshape(self.drafter.choose(requests))
        return self.rows.batch(requests)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:  # `Verified.report` and `kept`
        """Run the step on the device: `decode_batch`, or a CUDA graph of it."""
        made = self.rows.run(self, batch)
        if self.drafter:
            self.drafter.prepare()  # a GPU runs the step meanwhile
        return made

    def process(self, batch: Batch, report: Tensor, kept: Tensor | None = None) -> None:
        """Append a step's tokens to the requests, some of which may finish; see `Verified` for `report` and `kept`."""
        rows = report.tolist()  # the step's one copy to the host
        logprobs = {} if kept is None else self._logprobs(batch, rows, kept)
        # Not strict: decoding rows are the first slots, and a captured step reports idle rows after them.
        for i, (slot, request, row) in enumerate(zip(self.scheduler.slots, batch.requests, rows, strict=False)):
            *path, drafted, accepted, next_token, finite = row
            # Computed in this step: the pending token and the accepted ones. `next_token` is pending now.
            slot.num_computed_tokens += 1 + accepted
            if finite and not request.finish_reason:  # an `on_step` of this step may have cancelled it
                request.append([*path[:accepted], next_token], drafted, logprobs.get(i))
            elif drafted and not finite:
                # A drafted token may have done it, even one that would be rejected: attention adds -inf to its scores,
                # and NaN remains. The prefill of the text as it is shows whether the text itself is at fault.
                self.rows.erase(i)
                slot.phase = PREFILLING
            elif not finite:
                self._fail(i, request)

    # ---- its device work, which a CUDA graph can replay

    def decode_batch(self, batch: Batch) -> tuple[Tensor, Tensor | None]:  # `Verified.report` and `kept`
        """Run one step's device work (draft, verify, accept, commit) for a batch; return what the host needs.

        x_0 is the pending token, x_1 .. x_G are the draft. p[j] is the target's distribution after x_j, so p[j] tests
        x_{j+1}, and q is the distribution that x_{j+1} was drawn from (2211.17192). `speculator.reference` is the same
        step for one row, in plain PyTorch.
        """
        # x_1 .. x_G ~ q.
        draft, noise = self.draft(batch)
        # One forward pass over x_0 .. x_G gives p[0] .. p[G]. The accept rule keeps a prefix or path x_1 .. x_n and
        # samples the next token, so that the output has exactly the target's distribution: the target's own token under
        # `match`, else one from what the rule leaves of p[n].
        verified = self.verify(batch, draft, noise)
        # x_0 .. x_n stay in the cache. The next token is pending now.
        self.commit(batch, verified)
        return verified.report, verified.kept

    @property
    def rule(self) -> str:
        """Accept rule of the next step; plain decoding is `match` without a draft."""
        return MATCH if self.drafter is None else self._rule or self.drafter.rules[0]

    def draft(self, batch: Batch) -> tuple[Draft, Noise]:
        """Return the draft [R, n] of a step (empty without a drafter) and the step's random numbers."""
        depth = self.drafter.num_speculative_tokens if self.drafter else 0
        # Random numbers depend on the seed and the position: + 1, because the pending token is not in the cache yet.
        positions = self.cache.selected + 1
        noise = Noise(batch.sampling, positions, self.target.vocab_size, depth, coupled=self.rule == MATCH)
        if self.drafter is None:
            return Draft.none(batch.pending), noise
        return self.drafter.propose(batch.pending, noise, batch.sequences), noise

    def verify(self, batch: Batch, draft: Draft, noise: Noise) -> Verified:
        """Run the target over x_0 .. x_n (the pending token and the draft), accept a path, and return the result.

        x_j has verify position j. The path ends at position `last`, and the target's p[last] gives the next token.
        `noise` holds the step's random numbers.
        """
        tokens = torch.cat([batch.pending[:, None], draft.tokens], dim=1)  # [R, n + 1]
        computed = self.computed(batch, draft, noise)  # all of them, or those that exist
        # One forward pass. Its hidden state j gives p[j]: n drafted tokens have n + 1 of them, the last for the bonus
        # token.
        with self.target.aux_layers.recorded(self.drafter.aux_layers if self.drafter else ()) as states:
            hidden = self.target.extend(self.cache, tokens, draft.tree, counts=computed.widths)
        logits = self.target.logits(computed.of(hidden))  # [R, n + 1, V], or [T, V]
        last, next_token, finite = self.accept(batch, logits, draft, noise, computed)
        # The accepted path is x_0 .. x_last of a chain. That of a tree moves to the front, in the cache and in what the
        # drafter reads: the states of its auxiliary layers, or `hidden` if it names none.
        path = draft.accepted(last)
        path.move(self.cache)
        tokens, read = path.of(tokens), path.of(states(hidden))
        # x_0 counts: it was read in this step. The next token does not, it is read in the next one. Idle rows commit
        # too, because a graph has a fixed number of rows; they commit nothing.
        counts = (path.accepted + 1) * batch.active
        # The largest number of a row, which NaN is too: `isfinite` takes eight operations.
        finite = finite & (torch.linalg.vector_norm(hidden, inf, (1, 2)) < inf)
        columns = (draft.longest, path.accepted, next_token, finite)
        report = torch.cat([tokens[:, 1:], *(column[:, None] for column in columns)], 1)
        kept = None if batch.num_logprobs is None else path.of(hidden if self.rows.capturing else logits)
        return Verified(
            tokens=tokens,
            hidden=read,
            accepted=path.accepted,
            counts=counts,
            next_token=next_token,
            report=report,
            kept=kept,
        )

    def computed(self, batch: Batch, draft: Draft, noise: Noise) -> Computed:
        """Choose the tokens that a verification computes: under `match` on a CPU no padding, else n + 1 in every row.

        With padding, one row's long draft would cost as much as one in every row, most of it logits and noise over the
        whole vocabulary.
        """
        # Reading the lengths costs nothing on a CPU. Only `match` takes logits of single tokens: the other rules index
        # them by row and verify position, as log-probabilities and `min_tokens` do.
        packs = noise.coupled and self.target.device.type == "cpu" and not self.rows.capturing
        unpadded = draft.unpadded if packs else None
        if unpadded is None:
            return Computed()
        by_row = draft.tree is None and not self.cache.recurrent
        widths = (draft.lengths + 1).tolist() if by_row else None
        special = batch.num_logprobs is not None or batch.suppressed
        return Computed(widths) if special else ComputedRagged(draft, unpadded, widths)

    def accept(
        self,
        batch: Batch,
        logits: Tensor,  # [R, n + 1, V], or [T, V]
        draft: Draft,
        noise: Noise,
        computed: Computed,  # which tokens the logits are for
    ) -> tuple[Tensor, Tensor, Tensor]:  # [R] each
        """Return the verify position where each row's path ends, the next token, and if the logits there are finite."""
        if batch.suppressed:
            logits = batch.suppressed.removed(logits, draft.depths)
        if noise.coupled:
            last, next_token = match(noise.samples(logits, draft, computed.unpadded), draft)
            finite: Tensor | None = None
        else:  # n random numbers drew the draft, n more test it, another one samples
            assert self.drafter is not None
            nodes = self.drafter.nodes
            # With 3 nodes: columns 0..2 drew the draft, 3..5 test it, and 6 draws the next token. A rule that tested
            # with the numbers that drew would not keep the distribution.
            u = noise.uniforms(2 * nodes + 1)
            last, residual = REJECTION_RULES[self.rule](batch.sampling.probs(logits), draft, u[:, nodes:])
            next_token = draw(residual, u[:, -1])
            # One bad logit makes all probabilities NaN, and `draw` takes any token.
            finite = residual.sum(-1).isfinite()
        # A logit that is not finite is the largest of its row, or all are NaN: the chosen token's shows both.
        chosen = logits[(*computed.index(last), next_token)].abs() < inf
        return last, next_token, chosen if finite is None else chosen & finite

    def commit(self, batch: Batch, verified: Verified) -> None:
        """Keep the pending token and the accepted tokens in cache and memory; the step's next token becomes pending."""
        self.cache.commit(verified.counts)  # rejected positions become free; nothing is copied
        batch.pending.copy_(verified.next_token)
        self.rows.memory.commit(verified.tokens, verified.hidden, verified.counts)

    # ---- host work of a step

    def start_decoding(self, requests: dict[int, Request], hidden: Tensor) -> None:
        """Sample the first new token of requests, by row, whose prompts are complete, and mark the rows as decoding.

        `hidden` [R, D] holds the hidden state of each prompt's last token, in the order of `requests`.
        """
        first, finite, logprobs = prefill.first_tokens(self.target, list(requests.values()), hidden)
        self.rows.pending[list(requests)] = first
        for i, ((row, request), token) in enumerate(zip(requests.items(), first.tolist(), strict=True)):
            self.scheduler.slots[row].phase = DECODING
            if not finite[i]:
                self._fail(row, request)
            elif not request.finish_reason:
                drafted = 0 if request.num_new else None  # a preempted request's token counts as a step without a draft
                request.append([token], drafted, logprobs.get(i))

    def _logprobs(self, batch: Batch, report: list[list[int]], kept: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probabilities of a step's new tokens, by the rows that want them."""
        assert batch.num_logprobs is not None
        rows = [row for row, request in enumerate(batch.requests) if request.logprobs is not None]
        new = [[*report[row][: report[row][-3]], report[row][-2]] for row in rows]
        width = max(map(len, new))
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in new], device=kept.device)
        own = kept[rows, :width]
        found = token_logprobs(self.target.logits(own) if self.rows.capturing else own, tokens, batch.num_logprobs)
        return {row: each[: len(tokens)] for row, each, tokens in zip(rows, found, new, strict=True)}

    def _fail(self, row: int, request: Request) -> None:
        self.rows.erase(row)
        if not request.finish_reason:
            request.fail("not_finite", not_finite(self.target))


def _check_drafter(target: Target, drafter: Drafter | None, rule: str | None) -> None:
    allowed = drafter.rules if drafter else RULES
    if rule is not None and rule not in RULES:
        raise UserError(f"unknown accept rule {rule!r}: choose one of {', '.join(RULES)}")
    if rule is not None and rule not in allowed:
        raise UserError(f"the rule {rule!r} does not fit all drafts of this drafter: choose {', '.join(allowed)}")


@cache  # once in a process
def _warn_of_length(trained: int) -> None:
    """Warn once that a prompt is far longer than `trained`, the tokens of the longest context in training."""
    _log.warning(
        "a prompt has more than %d times the %d tokens that the draft head was trained on: it may accept little there; "
        "train it on longer rows (data.seq_length)",
        FAR_BEYOND,
        trained,
    )


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
    **ends: Unpack[EndSettings],
) -> Generation:
    """Return completions whose distribution is exactly the target's, with any drafter.

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
        ends: what ends a completion, and a callback for its tokens: `stop_strings`, `eos_token_ids` and `on_step`.
        stop_strings: a completion ends with the token that completes one of them.
        eos_token_ids: tokens that end a completion; default: the target's own.
        on_step: called with (row, new tokens, how many of them were drafted) after every step, prefill included.

    A completion that lacks memory, or whose logits are not finite, fails alone. `Generation.check` raises a UserError
    then; a caller that wants the others reads `Generation.failures`.
    """
    if max_batch_size is not None and max_batch_size < 1:
        raise UserError(f"max_batch_size must be an integer >= 1, got {max_batch_size}")
    requests = new_requests(target, check_prompts(target, prompts), sampling, max_new_tokens=max_new_tokens, **ends)
    slots = min(len(requests), max_batch_size or len(requests))
    # At worst every draft is accepted as a whole.
    steps = (
        sum(request.max_new_tokens for request in requests)
        / slots
        / (1 + (drafter.num_speculative_tokens if drafter else 0))
    )
    engine = Engine(target, drafter, slots=slots, rule=rule, capture=steps >= _MIN_STEPS_TO_CAPTURE)
    return engine.complete(requests)
