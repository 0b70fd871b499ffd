"""The engine: requests in a fixed number of slots, decoded together, step by step.

A slot is a row of the KV cache. Between steps a finished request leaves its slot and a waiting one joins, in the free
slot whose text it goes on with, or in another; prompts are prefilled in chunks, and what a prompt begins with is copied
where another row has read it. The rows that decode are the first ones, so a step costs what they cost. Plain decoding
is the same engine without a drafter, so a measured speedup compares like with like.

Longer than other files: a step, and all that happens between two of them on the device, is read here in one piece.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from speculator.decoding import cuda_graphs
from speculator.decoding.cuda_graphs import Captured
from speculator.decoding.draft import Draft, gather_at, take_at
from speculator.decoding.drafter import Drafter, Sequences
from speculator.decoding.request import (
    Generation,
    Request,
    Scores,
    StopStrings,
    check_count,
    check_prompts,
    check_tokens,
    each_sampling,
)
from speculator.decoding.sampling import RowSampling, Sampling, draw, uniforms
from speculator.decoding.scheduler import DECODING, JOINING, Slots
from speculator.decoding.verify import RULES, greedy, match
from speculator.drafters.shapes import Shape
from speculator.errors import UserError, refuse
from speculator.target.kv_cache import KVCache, bucketed
from speculator.target.model import Target

CHUNK = 512
"""Tokens of a prompt that are prefilled at a time."""
AHEAD = 1024
"""New tokens of a request that its slot has room for when it joins; more only when it has come to so many."""


@dataclass
class Verified:
    """A verify pass: what went through the target on the accepted path, and what follows it."""

    tokens: Tensor  # [R, depth + 1] the pending token and the path
    hidden: Tensor  # [R, depth + 1, D] or the taps that the drafter reads
    accepted: Tensor  # [R] of the path's tokens
    following: Tensor  # [R] the token after them
    report: Tensor  # [R, depth + 4] for the host: the path, drafted (the draft's depth), accepted, copied (of these,
    # from the lookup's path of a mixed draft), following


class Engine:
    """Decodes requests: `submit` some, then `run`, or `step` by step.

    A request's text does not depend on its batch-mates nor on when it joined, up to near-ties of rounded numbers: its
    uniforms are a function of (its seed, its length, their place in the step). A sampled one does where a drafter
    chooses its drafts for all rows together (`AdaptiveDrafter`). Requests join in the order submitted.

    Args:
        target: the model that decides.
        drafter: who proposes; None decodes plainly.
        slots: requests that are decoded at a time.
        rule: a name from `speculator.decoding.verify.RULES` that fits the drafter; by default the drafter's own. At temperature
            0 all are the greedy rule.
        chunk: tokens of each prompt that are prefilled at a time; beside decoding rows, tokens of all together.
        capacity: tokens that a slot has room for from the start; it grows where a request needs more.
        capture: on a CUDA device, run steps as graphs where target and drafter can be captured.

    Raises:
        UserError: the rule is unknown, or does not fit the drafter; no slots, or no tokens in a chunk.

    Attributes:
        processed: tokens that went through prefills so far.
        prefill_seconds, decode_seconds: so far.
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
        chunk: int = CHUNK,
        capacity: int = 0,
        capture: bool = True,
    ):
        refuse((slots < 1, f"{slots} slots"), (chunk < 1, f"chunks of {chunk} tokens"))
        self._rule, self._capture = rule, capture
        fitting = drafter.rules if drafter else tuple(RULES)
        if rule is not None and rule not in RULES:
            raise UserError(f"no accept rule {rule!r}: there are {', '.join(RULES)}")
        if rule is not None and rule not in fitting:
            fit = f"these do: {', '.join(fitting)}" if fitting else "it picks a rule for each draft"
            raise UserError(f"the rule {rule!r} does not fit all drafts of this drafter; {fit}")
        rule = rule or (fitting or tuple(RULES))[0]
        if target.group is not None and drafter and drafter.shape and not drafter.shape.capturable:
            raise UserError("min_confidence: the processes of a target in shards could end a draft at different tokens")
        self.target, self.drafter, self.accept, self.chunk = target, drafter, RULES[rule], chunk
        self.slots = Slots(slots)
        self.waiting: deque[Request] = deque()
        self.processed, self.prefill_seconds, self.decode_seconds = 0, 0.0, 0.0
        self.pending = torch.zeros(slots, dtype=torch.long, device=target.device)
        """[slots] the newest token of each decoding row: sampled, not yet processed by the target."""
        self.alive = torch.ones(slots, dtype=torch.bool, device=target.device)
        """[slots] whether a row decodes; in captured steps others go along."""
        self._capacity = capacity and capacity + self._slack
        self._decoding: list[Request] = []
        self.selected_pending, self.selected_alive = self.pending[:0], self.alive[:0]  # views: of the selected rows
        self._samplings: dict[Hashable, RowSampling] = {}
        self.capturing = capture and cuda_graphs.capturable(target, drafter)
        self._most_logprobs: int | None = None
        self._scores: list[list[Scores]] | None = None
        self._pool = cuda_graphs.new_pool(target.device)
        self._stepping = self.capturable_method("_step")

    # ---- requests

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        **how: Any,
    ) -> Request:
        """Let a request wait for a slot; see `request`."""
        return self.enqueue(self.request(prompt, sampling, **how))

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 128,
        stop_strings: Sequence[str] = (),
        eos_token_ids: int | Collection[int] | None = None,
        logprobs: int | None = None,
        on_step: Callable[[list[int], int], None] | None = None,
    ) -> Request:
        """A request for `enqueue`; see `generate` for what it takes and raises, `Request` for what it gives."""
        (tokens,) = check_prompts(self.target, [prompt])
        room = self.target.context_length - len(tokens)
        limit, at_limit = min((check_count(max_new_tokens), "length"), (room, "context"), key=itemgetter(0))
        eos = self.target.eos_token_ids if eos_token_ids is None else check_tokens(eos_token_ids)
        stop = StopStrings(stop_strings, self.target.tokenizer) if stop_strings else None
        if stop is not None:
            eos = {*eos, *stop.tokens}
        return Request(tokens, sampling or Sampling(), limit, at_limit, eos, stop, on_step, logprobs)

    def enqueue(self, request: Request) -> Request:
        """Let a request wait that is known to be right."""
        self._capacity = max(self._capacity, len(request.prompt) + min(request.limit, AHEAD) + self._slack)
        self.waiting.append(request)
        return request

    @property
    def _width(self) -> int:
        """Tokens of a row in a step at most: the pending one and the draft."""
        return 1 + (self.drafter.widest if self.drafter else 0)

    @property
    def _slack(self) -> int:
        """Positions behind a text's end: a captured step also writes, and commits, behind rows that have ended."""
        return max(2 * self._width, self.drafter.room if self.drafter else 0)

    def reshape(self, shape: Shape) -> None:
        """Let the head draft another shape from the next step on.

        A greedy text stays as it is. A sampled one is drawn by other uniforms from then on.
        """
        assert self.drafter is not None
        self.accept = RULES[self._rule or (shape or self.drafter).rules[0]]
        if shape is self.drafter.shape:
            return
        before = self._slack
        self.drafter.reshape(shape)
        self._capacity += max(0, self._slack - before)
        capturing = self._capture and cuda_graphs.capturable(self.target, self.drafter)
        if capturing != self.capturing:
            self.capturing, self._decoding = capturing, []  # other tensors hold the settings

    def forget(self) -> None:
        """Forget the sequences of free slots: what follows does not depend on what was decoded before.

        Raises:
            RuntimeError: some request has not ended.
        """
        self.slots.release()
        if self.busy:
            raise RuntimeError("requests are in flight")
        self.slots = Slots(len(self.slots.rows))
        if self.drafter:
            self.drafter.forget()

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
        """Submit all and run; see the function `generate`."""
        prompts = check_prompts(self.target, prompts)
        settings = each_sampling(sampling or Sampling(), len(prompts))
        counts = max_new_tokens if isinstance(max_new_tokens, list | tuple) else [max_new_tokens] * len(prompts)
        limits = [check_count(count) for count in counts]
        if len(limits) != len(prompts):
            raise UserError(f"{len(limits)} numbers of new tokens for {len(prompts)} prompts")
        began = self.prefill_seconds, self.decode_seconds
        requests: list[Request] = []
        try:
            for row, (prompt, own, count) in enumerate(zip(prompts, settings, limits, strict=True)):
                how = {"max_new_tokens": count, "stop_strings": stop_strings, "eos_token_ids": eos_token_ids}
                callback = None if on_step is None else (lambda new, drafted, row=row: on_step(row, new, drafted))
                requests.append(self.submit(prompt, own, on_step=callback, **how))  # type: ignore[arg-type]
            self.run()
        finally:  # if this was interrupted
            for request in requests:
                request.cancel()
        return Generation(
            [request.tokens for request in requests],
            [request.steps for request in requests],
            self.prefill_seconds - began[0],
            self.decode_seconds - began[1],
            [request.finish_reason for request in requests],
        )

    @property
    def busy(self) -> bool:
        """Whether some request has not left its slot, or waits for one."""
        return bool(self.waiting) or any(slot.request for slot in self.slots.rows)

    def run(self) -> None:
        """Go on until every request has ended."""
        while self.step():
            pass

    @torch.inference_mode()
    def step(self) -> bool:
        """Let waiting requests join, prefill a chunk, and take one step; tells whether anything is left to do."""
        started = time.perf_counter()
        self.slots.release()
        self.admit()
        self.grow()
        self.prefill()
        decoding = time.perf_counter()
        self.prefill_seconds += decoding - started
        sequences = self.ready()
        if sequences:
            # The step's one copy to the host.
            self.tell(self._stepping(sequences).tolist(), self._scores)
            self.decode_seconds += time.perf_counter() - decoding
        return self.busy

    # ---- between steps

    def admit(self) -> None:
        """Give waiting requests the free slots."""
        if any(request.finish_reason for request in self.waiting):  # cancelled
            self.waiting = deque(request for request in self.waiting if not request.finish_reason)
        if not self.waiting:
            return
        slots = len(self.slots.rows)
        if not hasattr(self, "cache"):
            self.cache = self.target.cache(slots, self._capacity)
            if self.drafter:
                self.drafter = self.drafter.open(slots, self.cache.capacity)
                self.drafter.lend(self.cache)
        self.slots.admit(self.waiting, self._overlap)

    def grow(self) -> None:
        """Have room for the sequences in the slots: they may be longer than was foreseen when they joined."""
        sequences = [slot.text for slot in self.slots.rows if slot.request]
        if not sequences:
            return
        longest = max(map(len, sequences)) + self._slack
        if longest > self._capacity:
            self._capacity = longest + AHEAD
        if self.cache.grow(self._capacity):
            if self.drafter:
                self.drafter.grow(self.cache.capacity)
            # torch captures nothing into a pool whose graphs were all freed.
            self._pool = cuda_graphs.new_pool(self.target.device)
            self._stepping = self.capturable_method("_step")

    def _arrange(self) -> None:
        source, to = self.slots.arrange()
        if to:
            longest = max(len(self.slots.rows[row].text) for row in to)
            self._move(source, to, longest)
            self.pending[to] = self.pending[source]

    def _move(self, source: list[int], to: list[int], longest: int) -> None:
        """Rows go to others, or their first `longest` tokens do."""
        self.cache.move(source, to, longest)
        if self.drafter:
            self.drafter.move(source, to, longest)

    def _follow(self) -> None:
        """Give prompts the beginnings that other rows have read."""
        source, to, longest = self.slots.follow(self._overlap)
        if to:
            self._move(source, to, longest)

    @property
    def _overlap(self) -> int:
        return self.drafter.overlap if self.drafter else 0

    def prefill(self) -> None:
        """Process a chunk of the prompts that are not in the cache yet, and draw the first token of those that end.

        Beside decoding rows at most max(chunk, decoding rows x tokens of a row in a step) tokens in all.
        """
        self._follow()
        rows = self.slots.of(JOINING)
        if not rows:
            return
        if rows[-1] - rows[0] >= len(rows):
            self._arrange()
            rows = self.slots.of(JOINING)
        decoding = self.slots.count(DECODING)
        budget = max(self.chunk, decoding * self._width) if decoding else None
        rows, width = self.slots.next_chunk(rows, self.chunk, budget)
        part = [self.slots.rows[row] for row in rows]
        sequences, begins = [slot.text for slot in part], [slot.known for slot in part]
        # Rows are padded to the widest: behind the longest of them that still has to fit the cache.
        width = min(width, self.cache.capacity - bucketed(max(begins), self.target.device))
        chunks = [list(text[begin : begin + width]) for text, begin in zip(sequences, begins, strict=True)]
        counts = [len(chunk) for chunk in chunks]
        device = self.target.device
        tokens = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=device)
        lasts = torch.tensor(counts, device=device) - 1
        self.cache.select(rows[0], rows[-1] + 1, max(begins))
        self.cache.truncate(torch.tensor(begins))
        with self.target.aux_layers.recorded(self._aux_layers) as states:
            hidden = self.target.extend(self.cache, tokens)
        self.cache.commit(lasts + 1)
        if self.drafter:
            self.drafter.prefill(rows[0], sequences, begins, states(hidden), counts)
        for slot, count in zip(part, counts, strict=True):
            slot.known += count
        self.processed += sum(counts)
        ended = {row: slot.request for row, slot in zip(rows, part, strict=True) if slot.known == len(slot.text)}
        if ended:
            self._begin(ended, take_at(hidden, lasts)[[row - rows[0] for row in ended]])

    def _begin(self, requests: dict[int, Any], hidden: Tensor) -> None:
        """Draw the first new token of rows from their prompts' last states [R, D]."""
        sampling = RowSampling([request.sampling for request in requests.values()], hidden.device)
        logits = self.target.logits(hidden)
        if sampling.greedy:
            first = logits.argmax(-1)
        else:
            first = draw(sampling.probs(logits), uniforms(sampling.seeds, torch.zeros_like(sampling.seeds), 1)[:, 0])
        (first,) = self.target.broadcast(first)
        self.pending[list(requests)] = first
        most = most_logprobs(requests.values())
        scores = None if most is None else score(logits[:, None], first[:, None], most)
        for place, ((row, request), token) in enumerate(zip(requests.items(), first.tolist(), strict=True)):
            self.slots.rows[row].phase = DECODING
            if not request.finish_reason:
                request.take([token], scores=None if scores is None else scores[place])

    def ready(self) -> list[Sequence[int]]:
        """Select the rows that decode, for a step; gives their sequences. Nothing to do: none."""
        self.slots.release()
        count = self.slots.count(DECODING)
        if not count:
            return []
        if any(slot.phase != DECODING for slot in self.slots.rows[:count]):
            self._arrange()
        part = self.slots.rows[:count]
        sequences = [slot.text for slot in part]
        requests = [slot.request for slot in part if slot.request]
        if self.drafter:
            self.reshape(self.drafter.choose(requests))
        # A power of two, so that few graphs are captured; the rows beyond `count` are computed and left out.
        rows = min(len(self.slots.rows), 1 << (count - 1).bit_length()) if self.capturing else count
        self.cache.select(0, rows, max(map(len, sequences)) - 1)
        self._scores = None  # here, as a captured step is not called
        if requests != self._decoding or rows != len(self.selected_pending):
            self._decoding = requests
            self.selected_pending, self.selected_alive = self.pending[:rows], self.alive[:rows]
            sampling = [request.sampling for request in requests]
            self.sampling = RowSampling(sampling + sampling[:1] * (rows - count), self.target.device)
            self._most_logprobs = most_logprobs(requests)
            if self.capturing:  # graphs read the settings where they were
                same = self._samplings.setdefault((rows, *self.sampling.kind), self.sampling)
                same.copy_(self.sampling)
                self.sampling = same
                self.selected_alive.copy_(torch.arange(rows) < count)
        return [*sequences, *[[] for _ in range(rows - count)]]

    # ---- one step of the selected rows: draft, verify, keep, tell

    def _step(self, sequences: Sequences) -> Tensor:  # [R, depth + 4], see `Verified.report`
        draft, u = self.draft(sequences)
        verified = self.verify(draft, u)
        self.keep(verified)
        return verified.report

    def draft(self, sequences: Sequences) -> tuple[Draft, Tensor]:
        """What the drafter proposes, and the uniforms [R, n + 1] for `verify`.

        A row's uniforms at this length are numbered: 0..n-1 draw the draft's n tokens, n..2n-1 test them, 2n draws the
        token after them. A walk takes number 0 at this length and at those that follow, as plain steps do.
        """
        nodes = self.drafter.nodes if self.drafter else 0
        if self.sampling.greedy:
            u = self.sampling.temperature.new_zeros(len(self.selected_pending), 2 * nodes + 1)  # nobody draws
        elif self.accept is match:
            places = self.cache.selected[:, None] + torch.arange(nodes + 1, device=self.target.device)
            seeds = self.sampling.seeds[:, None].expand_as(places)
            own = uniforms(seeds.flatten(), places.flatten(), 1).view_as(places)
            u = torch.cat([own[:, :nodes], own], 1)  # a walk's draft draws nothing
        else:
            u = uniforms(self.sampling.seeds, self.cache.selected, 2 * nodes + 1)
        if self.drafter is None:
            return Draft.none(self.selected_pending), u
        return self.drafter.propose(self.selected_pending, self.sampling, u[:, :nodes], sequences), u[:, nodes:]

    def verify(self, draft: Draft, u: Tensor) -> Verified:
        """One forward pass over the pending token and its draft, whose accepted path comes to lie first in the cache.

        The logits at position j (0: the pending token, i + 1: draft token i) give p[j], the target's distribution of
        the token after it. The rule accepts a path that ends at position `last`, and the next token is drawn from what
        it leaves of p[last]: p itself behind a whole draft, norm((p - q)_+) after a refusal.
        """
        form = self.target.broadcast(draft.tokens, draft.parents, draft.lengths)
        draft.tokens, draft.parents, draft.lengths = form
        tokens = torch.cat([self.selected_pending[:, None], draft.tokens], dim=1)
        with self.target.aux_layers.recorded(self._aux_layers) as states:
            hidden = self.target.extend(self.cache, tokens, None if draft.parents is None else draft)
        logits, hidden = self.target.logits(hidden), states(hidden)
        if self.sampling.greedy:
            last, following = greedy(logits.argmax(-1), draft)
        elif not draft.tokens.shape[1]:  # every rule leaves p
            own = u[:, 0 if self.accept is match else -1]
            last, following = draft.lengths, draw(self.sampling.probs(logits)[:, 0], own)
        else:
            last, rest = self.accept(self.sampling.probs(logits), draft, u)
            following = draw(rest, u[:, -1])
        last, following = self.target.broadcast(last, following)
        drafted, accepted, copied = draft.lengths, last, torch.zeros_like(last)
        if draft.parents is not None:
            path = draft.path(last)
            self.cache.gather(path)
            tokens = tokens.gather(1, path)
            hidden = gather_at(hidden, path)
            drafted, accepted = draft.longest, draft.depths.gather(1, last[:, None])[:, 0]
            if draft.own is not None:
                copied = (path > draft.own.lengths[:, None]).sum(-1)
            if self._most_logprobs is not None:
                logits = gather_at(logits, path)
        if self._most_logprobs is not None:  # such a step is not captured
            given = tokens.roll(-1, 1).scatter(1, accepted[:, None], following[:, None])
            self._scores = score(logits, given, self._most_logprobs)
        columns = (drafted, accepted, copied, following)
        report = torch.cat([tokens[:, 1:], *(column[:, None] for column in columns)], 1)
        return Verified(tokens, hidden, accepted, following, report)

    def keep(self, verified: Verified) -> None:
        """The pending token and the accepted ones are part of the text: the cache and the drafter learn of it."""
        counts = verified.accepted + 1
        if self.capturing:
            counts = counts * self.selected_alive
        self.cache.commit(counts)
        self.selected_pending.copy_(verified.following)
        if self.drafter:
            self.drafter.commit(verified.tokens, verified.hidden, counts)

    def tell(self, report: list[list[int]], scores: list[list[Scores]] | None = None) -> None:
        """The host's part: sequences grow, and may end."""
        for place, (request, row) in enumerate(zip(self._decoding, report, strict=False)):
            *path, drafted, accepted, copied, following = row
            if not request.finish_reason:  # another's `on_step` may have cancelled it
                own = None if scores is None else scores[place]
                request.take([*path[:accepted], following], drafted, own, copied)

    @property
    def _aux_layers(self) -> Sequence[int]:
        return self.drafter.aux_layers if self.drafter else ()

    def capturable_method(self, method: str) -> Callable[..., Any]:
        """One of this class's methods as steps run it: as a graph where they are captured."""
        work, own = Captured(getattr(type(self), method), self._pool), weakref.ref(self)

        def run(*given: Any) -> Any:
            engine = own()
            assert engine is not None
            if not engine.capturing or engine._most_logprobs is not None:
                return work.work(engine, *given)
            state = [engine.cache.lengths, engine.pending, *(engine.drafter.buffers if engine.drafter else ())]
            with cuda_graphs.on(engine.target.device):
                drafting = engine.drafter and (engine.drafter.shape, engine.drafter.version)
                key = (len(engine.selected_pending), engine.cache.longest, engine.sampling.kind, drafting)
                return work(key, state, engine, *given)

        return run


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
    """Continue prompts. Whatever drafts, the text's distribution is the target's own.

    Args:
        target: the model that decides.
        drafter: who proposes; None decodes plainly.
        prompts: token ids, one list or 1-D tensor a row, none empty.
        sampling: temperature and its kin, greedy by default: one for each prompt, or one for all, of which prompt r
            then draws from the stream `seed + r`.
        rule: see `Engine`.
        max_new_tokens: the most new tokens, one number for all prompts or one for each; a text also ends at the
            target's context length.
        max_batch_size: rows at a time; default: all.
        stop_strings: a text ends with the token that completes one of them.
        eos_token_ids: tokens that end a text, by default the target's own; none for measurements of equal length.
        on_step: called with (row, new tokens, how many of them were drafted) as they come, the prefill's first.

    Raises:
        UserError: no prompt, an empty prompt, one that fills the target's context or holds what is no token of it; a
            rule that is unknown or does not fit the drafter; not one setting for each prompt; no new token asked for.
    """
    if max_batch_size is not None and max_batch_size < 1:
        raise UserError(f"max_batch_size {max_batch_size} is not at least 1")
    prompts = check_prompts(target, prompts)
    slots = min(len(prompts), max_batch_size or len(prompts))
    # A single call is over before captures pay.
    engine = Engine(target, drafter, slots=slots, rule=rule, capture=False)
    return engine.generate(
        prompts,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_strings=stop_strings,
        eos_token_ids=eos_token_ids,
        on_step=on_step,
    )


def most_logprobs(requests: Iterable[Request]) -> int | None:
    """The most alternatives that one of them asks for beside its tokens' log-probabilities; None where none does."""
    return max((request.logprobs for request in requests if request.logprobs is not None), default=None)


def score(
    logits: Tensor,  # [R, T, V]
    tokens: Tensor,  # [R, T]
    most: int,
) -> list[list[Scores]]:
    """Of each token its log-probability under the target at temperature 1, and the likeliest alternatives."""
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, :, None])[:, :, 0].tolist()
    best = logprobs.topk(min(most, logits.shape[-1]))
    columns = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [Scores(value, list(zip(ids, values, strict=True))) for value, ids, values in zip(*row, strict=True)]
        for row in columns
    ]
