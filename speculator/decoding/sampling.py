"""Sampling: logits to distribution, distribution to token, with counter-based random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.errors import UserError, refuse
from speculator.kernels.compiled import Compiled, can_compile

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30  # beyond them, float32 logits over- or underflow
_TOP_P_CANDIDATES = 2048  # on a CPU, top-p sorts the whole vocabulary only if it needs more tokens
_VALUES = 2**18  # scores that a CPU computes at a time (at least one token's), so that they stay in its cache

_TENSORS = ("seeds", "temperature", "top_k", "top_p", "min_p", "at_zero")


@dataclass(frozen=True)
class Sampling:
    """Settings of one request. They shape both the target's distribution p and the draft's q.

    Attributes:
        temperature: 0 (or below 1e-30): greedy decoding.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with this total probability.
        min_p: keep tokens with at least this fraction of the likeliest token's probability.
        seed: seed of the request's random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        kinds = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
                raise UserError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r:.40}")
        refuse(
            (
                not 0 <= self.temperature <= _MAX_TEMPERATURE,
                f"temperature must be in 0..{_MAX_TEMPERATURE:g}, got {self.temperature}",
            ),
            (self.top_k < 0, f"top_k must not be negative, got {self.top_k}"),
            (not 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (not 0 <= self.min_p < 1, f"min_p must be in [0, 1), got {self.min_p}"),
            (not -(2**63) <= self.seed < 2**63, f"seed must be of 64 bits, got {self.seed}"),
        )
        for name, kind in kinds.items():  # numpy's numbers lack what Python's have
            object.__setattr__(self, name, kind(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        return self.temperature < _MIN_TEMPERATURE

    def probs(self, logits: Tensor) -> Tensor:  # [..., V] -> [..., V]
        """Return the distribution of the next token, in float32 or wider; one-hot at temperature 0."""
        return RowSampling([self], logits.device).probs(logits.view(1, -1, logits.shape[-1])).view(logits.shape)


class RowSampling:
    """Settings of all rows of a batch, as tensors.

    Attributes:
        greedy: every row is at temperature 0, so the likeliest token is taken and no distribution is computed.
        kind: what the host branches on, such as whether any row has top-p. Settings of one kind run the same kernels
            and differ in their tensors only.
    """

    def __init__(self, rows: Sequence[Sampling], device: torch.device):
        self.rows = list(rows)
        rows = [Sampling(seed=row.seed) if row.greedy else row for row in rows]  # without filters
        self.greedy = all(row.greedy for row in rows)
        self.some_greedy = any(row.greedy for row in rows)
        # The host knows for all rows what has to be computed at all. Which row has which number is in the tensors, so
        # one CUDA graph serves every batch of a kind.
        most = max(row.top_k for row in rows)
        self._most = most and 1 << (most - 1).bit_length()  # rounded up, so that CUDA graphs are few
        self._top_p, self._min_p = any(row.top_p < 1 for row in rows), any(row.min_p > 0 for row in rows)
        self.kind = (self.greedy, self.some_greedy, self._most, self._top_p, self._min_p)

        def column(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device=device)[:, None, None]

        self.seeds = torch.tensor([row.seed for row in rows], device=device)
        self.temperature = column(1.0 if row.greedy else row.temperature for row in rows)
        # A row without top-k has a k beyond any vocabulary.
        self.top_k = column(min(row.top_k or 2**31, 2**31) for row in rows).long()
        self.top_p = column(row.top_p for row in rows)
        self.min_p = column(row.min_p for row in rows)
        self.at_zero = column(row.greedy for row in rows).bool()

    def copy_(self, other: RowSampling) -> None:
        """Copy settings of the same kind and number of rows into these tensors, whose addresses CUDA graphs hold."""
        self.rows = other.rows
        for name in _TENSORS:
            getattr(self, name).copy_(getattr(other, name))

    def of_tokens(self, rows: Tensor | slice) -> RowSampling:  # [T]
        """Return the settings of T tokens as a batch of T rows, given the row that each token belongs to."""
        chosen = copy(self)
        for name in _TENSORS:
            setattr(chosen, name, getattr(self, name)[rows])
        return chosen

    def scaled(self, logits: Tensor) -> Tensor:  # [B, T, V] -> [B, T, V]
        """Return the logits divided by the temperature, with -inf for tokens that top-k, top-p or min-p remove.

        The filters run in transformers' order, in float32 or wider. Rows at temperature 0 keep their logits.
        """
        logits = logits / self.temperature.to(torch.promote_types(logits.dtype, torch.float32))
        size = logits.shape[-1]
        if self._most:
            # [B, T, largest k], descending: the k-th value of each row is at index k - 1.
            ordered = logits.topk(min(self._most, size)).values
            rank = self.top_k.clamp(max=ordered.shape[-1]) - 1
            least = ordered.gather(-1, rank.expand(*ordered.shape[:2], 1))
            # Rows may have different k: the k-th largest logit of each row is its threshold, and a row without top-k
            # has k = 2^31.
            logits = logits.masked_fill((logits < least) & (self.top_k < size), -torch.inf)
        if self._top_p:
            logits = logits.masked_fill(_removed_by_top_p(logits.softmax(-1), self.top_p), -torch.inf)
        if self._min_p:
            # p >= min_p * max p, in logits: log p - max log p >= log min_p.
            least = logits.amax(-1, keepdim=True) + self.min_p.log().to(logits.dtype)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits

    def probs(self, logits: Tensor) -> Tensor:  # [B, V] or [B, T, V] -> the same shape
        """Return the distribution of each row's next token; one-hot for a row at temperature 0."""
        if logits.dim() == 2:
            return self.probs(logits[:, None])[:, 0]
        probs = self.scaled(logits).softmax(-1)
        if self.some_greedy:
            best = torch.zeros_like(probs).scatter_(-1, most_likely(logits)[..., None], 1)
            probs = torch.where(self.at_zero, best, probs)
        return probs


class Noise:
    """The random numbers of one step, functions of (seed, position): no draft and no batch-mate changes them.

    Args:
        positions: [B] position of the next token in each sequence.
        size: V, size of the vocabulary.
        depth: length of the longest path that is drafted.
        coupled: the step's rule is `match`, for which drafts are made of the same noise as the target's own samples.

    Attributes:
        coupled: also true at temperature 0, where there is no noise.
    """

    def __init__(self, sampling: RowSampling, positions: Tensor, size: int, depth: int, coupled: bool):
        self.sampling, self.positions, self._seeds, self._size = sampling, positions, sampling.seeds, size
        self.coupled = coupled or sampling.greedy
        self._noisy = coupled and not sampling.greedy
        self._block = max(1, _VALUES // size)  # tokens that a CPU samples at a time
        self._levels: dict[int, Tensor] = {}  # [B, V] by depth, made on first use
        self._gumbel: Tensor | None = None  # [B, depth + 1, V] on a GPU, where fewer kernels matter more
        if self._noisy and positions.device.type != "cpu":
            # Level d of a draft is d positions after the next token: [B, depth + 1].
            levels = positions[:, None] + torch.arange(depth + 1, device=positions.device)
            self._gumbel = _noise_of(self._seeds, levels, size).masked_fill_(sampling.at_zero, 0.0)

    @property
    def _blocks(self) -> list[slice]:
        """All rows, in blocks. Slices, because an index takes three times as long, and is needed for eight tensors."""
        return [slice(row, row + self._block) for row in range(0, len(self.positions), self._block)]

    def _level(self, depth: int) -> Tensor:  # [B, V]
        """Return the Gumbel noise of all rows for the token `depth` after the next one; 0 in rows at temperature 0."""
        if self._gumbel is not None:
            return self._gumbel[:, depth]
        if depth not in self._levels:
            self._levels[depth] = torch.cat([self._of_rows(own, depth) for own in self._blocks])
        return self._levels[depth]

    def _of_rows(self, rows: Tensor | slice, depth: int) -> Tensor:  # [b] -> [b, V]
        """Return the Gumbel noise of some rows for the token `depth` after the next one, made now or by the draft."""
        if depth in self._levels:
            return self._levels[depth][rows]
        noise = gumbel(self._seeds[rows], self.positions[rows] + depth, self._size)
        return noise.masked_fill_(self.sampling.at_zero[rows, 0], 0.0) if self.sampling.some_greedy else noise

    def scores(
        self,
        logits: Tensor,  # [B, f, V] of tokens at one depth
        depth: int,  # 0: the next token
    ) -> Tensor:  # [B, f, V]
        """Return the logits plus their position's Gumbel noise: the argmax is a sample, the top k are k candidates.

        The logits come back unchanged if all rows are at temperature 0, or if the rule is not `match`.
        """
        return self.sampling.scaled(logits).add_(self._level(depth)[:, None]) if self._noisy else logits

    def samples(
        self,
        logits: Tensor,  # [B, n+1, V] the target's after the pending token and each token of the draft; or [T, V]
        draft: Draft,
        unpadded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # [B, n+1]
        """Return the target's own token at every verify position.

        Args:
            unpadded: rows and verify positions [T] of the given logits (see `Draft.unpadded`); all other positions get
                token 0.
        """
        if unpadded is not None:
            rows, depths = unpadded[0], draft.depths[unpadded]
            tokens = torch.zeros(len(draft.tokens), draft.tokens.shape[1] + 1, dtype=torch.long, device=logits.device)
            tokens[unpadded] = self._samples_of(logits, rows, depths) if self._noisy else most_likely(logits)
            return tokens
        if not self._noisy:
            return most_likely(logits)
        if draft.parents is None and self._gumbel is None:
            return torch.stack([self._samples_at(logits[:, at], self._blocks, at) for at in range(draft.depth + 1)], 1)
        if self._gumbel is None:
            noise = torch.stack([self._level(depth) for depth in range(draft.depth + 1)], 1)
        else:
            noise = self._gumbel[:, : draft.depth + 1]
        if draft.parents is not None:
            # Noise belongs to a position of the sequence: cousins in a tree have the same depth and share it.
            noise = noise[torch.arange(len(logits), device=logits.device)[:, None], draft.depths]
        return most_likely(self.sampling.scaled(logits).add_(noise))

    def _samples_of(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:  # [T, V], [T], [T] -> [T]
        """Return the target's own tokens as `_samples_at` does, for positions of several depths."""
        tokens = torch.empty_like(rows)
        for depth in depths.unique().tolist():
            own = depths == depth
            tokens[own] = self._samples_at(logits[own], rows[own].split(self._block), depth)
        return tokens

    def _samples_at(self, logits: Tensor, blocks: Sequence[Tensor | slice], depth: int) -> Tensor:  # [T, V] -> [T]
        """Return the target's own token for each row at one depth, in blocks that fit the cache of a CPU.

        Args:
            logits: the target's, one position per row of `blocks`.
            depth: the position's distance from the pending token; 0 samples the token after it.
        """
        tokens = []
        for own, of in zip(logits.split(self._block), blocks, strict=True):
            scores = self.sampling.of_tokens(of).scaled(own[:, None])[:, 0]
            tokens.append(most_likely(scores.add_(self._of_rows(of, depth))))
        return torch.cat(tokens)

    def uniforms(self, count: int) -> Tensor:  # [B, count]
        """Return `count` random numbers in [0, 1) per row, for drafts and rules that are not coupled."""
        return uniforms(self.sampling.seeds, self.positions, count)


class Suppressed:
    """Tokens that may not be sampled yet, in tensors that captured steps read in place.

    Args:
        size: V, size of the vocabulary.
    """

    def __init__(self, rows: int, size: int, device: torch.device):
        self._missing = torch.zeros(rows, dtype=torch.long, device=device)
        self._tokens = torch.zeros(rows, size, dtype=torch.bool, device=device)

    def put(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        """Set what may not be sampled, see `speculator.decoding.request.suppressed`; other rows may sample all."""
        missing = [0] * len(self._missing)
        for row, count, _ in entries:
            missing[row] = count
        self._missing.copy_(torch.tensor(missing))
        places = [(row, token) for row, _, tokens in entries for token in tokens]
        rows, tokens = torch.tensor(places, dtype=torch.long, device=self._tokens.device).view(-1, 2).T
        self._tokens.zero_()[rows, tokens] = True

    def removed(
        self,
        logits: Tensor,  # [B, T, V]
        depths: Tensor,  # [B, T] 0: the next token
    ) -> Tensor:  # [B, T, V]
        """Return the logits with -inf for the tokens that may not be sampled yet at their row and depth."""
        rows = len(logits)
        # Depth 0 is the next token: with 2 tokens missing, those at depths 0 and 1 are too early.
        early = depths < self._missing[:rows, None]
        return logits.masked_fill(early[:, :, None] & self._tokens[:rows, None], -torch.inf)


def most_likely(scores: Tensor) -> Tensor:  # [..., V] -> [...]
    """Return the index of the largest score, the first of equal ones."""
    return scores.max(-1).indices  # on a CPU argmax takes five times as long in bfloat16


def _removed_by_top_p(
    probs: Tensor,  # [..., V]
    top_p: Tensor,  # [..., 1]
    first: int | None = None,
) -> Tensor:  # [..., V] bool
    """Return a mask of the tokens that top-p removes; `top_p` 1 removes none.

    Args:
        first: number of likeliest tokens that are sorted at first; if these don't reach `top_p`, the whole vocabulary
            is. None: 2,048 on a CPU, where sorting is slow; all elsewhere, since testing makes the host wait.
    """
    size = probs.shape[-1]
    first = first or (_TOP_P_CANDIDATES if probs.device.type == "cpu" else size)
    # A token stays if those before it have less than `top_p` together. With 0.5 0.3 0.2 and top_p 0.7 these sums are 0,
    # 0.5 and 0.8, so two tokens stay.
    ordered, index = probs.topk(first) if first < size else probs.sort(descending=True)
    beyond = (ordered.cumsum(-1) - ordered) >= top_p
    outside = torch.ones_like(probs, dtype=torch.bool).scatter_(-1, index, beyond) & (top_p < 1)
    if first < size:
        # Rows whose candidates have less than `top_p` together: their set of tokens may go on beyond the candidates.
        short = (ordered.sum(-1) < top_p[..., 0]) & (top_p[..., 0] < 1)
        if short.any():
            outside[short] = _removed_by_top_p(probs[short], top_p.expand(*short.shape, 1)[short], size)
    return outside


_GUMBEL = 0x3C6EF372FE94F82B  # sets the keys of `gumbel` apart from those of `uniforms`
_GAMMA = -7046029254386353131  # splitmix64's increment: the finaliser alone maps 0 to 0


def _shr(x: Tensor, bits: int) -> Tensor:
    """Return integers shifted right with zeros shifted in: torch copies the sign bit, so x and ~x would hash alike."""
    return (x >> bits).bitwise_and_((1 << (8 * x.itemsize - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return a hash of each int64, by the finaliser of splitmix64: every input bit affects every output bit."""
    # The multipliers are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, written as int64. Products wrap around modulo 2^64.
    x = (x ^ _shr(x, 30)) * -4658895280553007687
    x = (x ^ _shr(x, 27)) * -7723592293110705685
    return x ^ _shr(x, 31)


def uniforms(
    seeds: Tensor,  # [B]
    positions: Tensor,  # [B] sequence lengths at the start of the step
    count: int,
) -> Tensor:  # [B, count] float64 in [0, 1)
    """Return random numbers that depend on seed, position and index only, so other rows do not affect them."""
    index = torch.arange(count, device=seeds.device)
    # Nested, not added: seed 1 at position 2 must not have the numbers of seed 2 at position 1.
    bits = _mix(_mix(_mix(seeds + _GAMMA)[:, None] + positions[:, None] + _GAMMA) + index + _GAMMA)
    # A float64 holds 53 bits exactly, so the numbers are multiples of 2^-53, and below 1.
    return _shr(bits, 11).double() * 2.0**-53


def gumbel(
    seeds: Tensor,  # [...]
    positions: Tensor,  # [...] position of the token to be sampled in its sequence
    size: int,  # V
) -> Tensor:  # [..., V] float32
    """Return standard Gumbel numbers by seed, position and token; the argmax of log p + gumbel is a sample from p."""
    return _gumbel_of(random_bits(seeds, positions, size))


def random_bits(
    seeds: Tensor,  # [...]
    positions: Tensor,  # [...]
    size: int,  # V
) -> Tensor:  # [..., V] int32, 0 to 2^31 - 1
    """Return 31 random bits for every token: a 32-bit hash of the token takes two 32-bit keys of its row.

    CPUs multiply eight 32-bit integers at a time. Every round is one to one, so over all keys a token gets every number
    equally often.
    """
    key = _mix(_mix(seeds + _GUMBEL) + positions * _GAMMA)[..., None]
    first, second = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = torch.arange(size, dtype=torch.int32, device=seeds.device) * -1640531527 + first
    # In place: on a CPU new tensors of this size take twice as long.
    x.bitwise_xor_(_shr(x, 16)).mul_(2146121005).add_(second)
    x.bitwise_xor_(_shr(x, 15)).mul_(-2073254261)
    x.bitwise_xor_(_shr(x, 16)).mul_(739982445)
    # Without the sign bit, which torch's shift copies: each number comes of two, one with and one without that bit.
    return x.bitwise_xor_(x >> 15).bitwise_and_(0x7FFFFFFF)


def _noise_of(seeds: Tensor, levels: Tensor, size: int) -> Tensor:  # [B], [B, n] -> [B, n, V]
    """Return the Gumbel noise of each row at its sequence positions `levels`, one compilation for all numbers of them.

    torch compiles again for a dimension of size 1, and a step would wait: `gumbel` gets one dimension, of 2 or more.
    """
    count = levels.numel()
    given = seeds[:, None].expand_as(levels).reshape(-1).contiguous(), levels.reshape(-1)
    if count == 1:
        given = given[0].repeat(2), given[1].repeat(2)
    return _gumbel_on(levels.device.type)(*given, size)[:count].view(*levels.shape, size)


@cache
def _gumbel_on(kind: str) -> Callable[..., Tensor]:
    """Return `gumbel` for a device type: on CUDA compiled to one kernel in place of 25, if compiling is possible."""
    pays = kind == "cuda" and can_compile(torch.device(kind))
    return Compiled(gumbel, "the noise") if pays else gumbel


def _gumbel_of(bits: Tensor) -> Tensor:  # [...] 0 to 2^31 - 1 -> [...] float32
    """Return finite Gumbel numbers of 31 random bits; large ones, which decide on rare tokens, have fine steps."""
    # Halfway between the grid's points, so never 0, and below 1 in float32: log(0) would give an infinite score.
    uniform = (bits.float() + 0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw(
    probs: Tensor,  # [B, V] need not be normalised
    uniform: Tensor,  # [B]
) -> Tensor:  # [B]
    """Sample one token per row: the first whose cumulative probability exceeds `uniform` times the total."""
    # With the probabilities 1 0 3 and 0.25 the threshold is 1, which the sums 1 1 4 exceed at token 2.
    cumulative = probs.double().cumsum(-1)
    total = cumulative[:, -1]
    # Rounding can make the product equal to the total, which no cumulative value exceeds.
    threshold = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp(max=cumulative.shape[-1] - 1)
