"""The losses of a run, computed in chunks of tokens; `train.loop` divides the sums.

A head with a draft vocabulary has V_d of the V logits. The target's distribution p is normalised over all V and then
restricted to the V_d; q is 0 elsewhere, so a sum over tokens is a sum over these. A label outside the draft vocabulary
has no cross-entropy, but it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speculator.device import compute_dtype, exact, send
from speculator.heads.training import IGNORE, Drafts, Metric, Term, TokenLosses, forecast_error
from speculator.kernels.compiled import Compiled, can_compile
from speculator.kernels.linear import product
from train.options.config import LossConfig
from train.options.loss_table import TargetProbs, Tokens, cross_entropy, overlap

_CHUNK = {"cpu": 2**25}
_CHUNK_ON_GPU = 2**26
"""Logits in memory at a time, over the whole vocabulary: 128 MiB and 256 MiB in float32."""
_OUTER_ROWS = 8192
_TILE = 256
_COMPILED_ON_CPU = 2**15
"""Smallest vocabulary whose losses are compiled on a CPU, which takes seconds."""
_LENGTHS = {
    "prefix_accuracy": "teacher_forced_acceptance_length",
    "walked": "walked_acceptance_length",
    "prefix_overlap": "forecast_acceptance_length_sampled",
}
"""Figures that are 1 + the sum of a metric over the draft positions."""


def target_probs(
    logits: Tensor,  # [C, V], or with `normalisers` [C, V_d]
    draft_tokens: Tensor | None = None,
    normalisers: Tensor | None = None,
) -> TargetProbs:
    """Return the distribution of the target's logits, restricted to the draft vocabulary [V_d] (None: all tokens).

    With `normalisers` [C], the logsumexp over all V, the logits are those of the draft vocabulary alone.
    """
    # Normalised over all V before the cut: tokens that the head can't draft have probability too.
    log_p = exact(logits).log_softmax(-1) if normalisers is None else exact(logits) - normalisers[:, None]
    if draft_tokens is not None:
        log_p = log_p[:, draft_tokens]
    p = log_p.exp()
    return TargetProbs(p, -(p * log_p).sum(-1))


def has_rows(output: nn.Module | None, device: torch.device) -> bool:
    """Return whether `rows_of` can take rows of a target's `output_matrix`: not if quantised, or on another device."""
    return isinstance(output, nn.Linear) and output.weight.is_floating_point() and output.weight.device == device


def rows_of(output: nn.Module | None, tokens: Tensor) -> nn.Linear:
    """Return a layer with the rows of an output matrix that have the logits of some tokens [V_d]."""
    assert isinstance(output, nn.Linear)
    part = nn.Linear(output.in_features, len(tokens), bias=output.bias is not None, device="meta")
    part.weight = nn.Parameter(output.weight[tokens], requires_grad=False)
    if output.bias is not None:
        part.bias = nn.Parameter(output.bias[tokens], requires_grad=False)
    return part


def label_probs(z: Tensor, labels: Tensor) -> Tensor:  # [C, V_d], [C] -> [C]
    """Return the probability of each label; 1 where it is outside the draft vocabulary."""
    return cross_entropy(Tokens(log_q=exact(z).log_softmax(-1), labels=labels)).neg().exp()


def loss_per_token(
    z: Tensor, labels: Tensor, target: TargetProbs | None, weights: LossConfig
) -> tuple[Tensor, Tensor | None]:  # [C, V_d] -> [C] twice
    """Return the configured mix of losses of each token, and its `overlap` if a loss needs that, else None.

    Args:
        z: the head's logits.
        labels: index in 0..V_d - 1 of each label; negative where it is outside the draft vocabulary, IGNORE where there
            is no label.
        target: the target's distribution; None if no loss needs it.
    """
    log_q, used = z.log_softmax(-1), weights.used()
    accepted = None
    if target is not None and any(each.needs_overlap for each in used.values()):
        accepted = overlap(log_q, target.p)
    loss, tokens = z.new_zeros(len(z)), Tokens(log_q=log_q, labels=labels, target=target, overlap=accepted)
    for name, each in used.items():
        loss = loss + getattr(weights, name) * each.per_token(tokens)
    return loss, accepted


def measure(
    z: Tensor, labels: Tensor, target: TargetProbs | None, weights: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [C, V_d], [C] -> [C] each
    """Return the loss, the hits, the overlap and the label's probability of each token.

    A hit is 1 where the likeliest token is the label, else 0. Loss and overlap are 0 where there is no label (IGNORE).
    The overlap is 0 without a target, the label's probability 0 without D-PACE.
    """
    z = exact(z)
    loss, accepted = loss_per_token(z, labels, target, weights)
    if accepted is None:
        accepted = torch.zeros_like(loss) if target is None else overlap(z.log_softmax(-1), target.p)
    counted = labels != IGNORE
    return loss * counted, (z.argmax(-1) == labels).long(), accepted * counted, _paced(z, labels, weights)


def _paced(z: Tensor, labels: Tensor, weights: LossConfig) -> Tensor:  # [C, V_d], [C] -> [C]
    return label_probs(z, labels) if weights.d_pace < 1 else torch.zeros_like(z[:, 0])


def replace_by_gradient(
    logits: Tensor, labels: Tensor, token_weights: Tensor, target: TargetProbs | None, weights: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [C, V_d], [C] twice -> [C] each
    """Return loss, hits, overlap and label probability of each token, as `measure` does.

    The logits are overwritten with the gradient of the sum of loss times `token_weights`. The overlap is computed only
    if a loss needs it; otherwise it is 0.
    """
    counted = labels != IGNORE

    def total(z: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        loss, accepted = loss_per_token(z, labels, target, weights)
        loss = loss * counted
        accepted = torch.zeros_like(loss) if accepted is None else accepted * counted
        return (loss * token_weights).sum(), (loss, accepted, _paced(z, labels, weights))

    z = exact(logits)
    hits = (z.argmax(-1) == labels).long()
    gradient, (loss, accepted, q) = torch.func.grad(total, has_aux=True)(z)
    logits.copy_(gradient)
    return loss, hits, accepted, q


def d_pace(q: Tensor, live: Tensor, alpha: float) -> Tensor:  # [N, ...] twice -> [N, ...]
    """Return each step's weight: its share in the draft's expected length (2605.18810); 0 where it has no label.

    P_m = prod_{i <= m} ((1 - alpha) q_i + alpha) over the live steps, which come first, and w_j = sum_{m >= j} P_m.

    Args:
        q: the head's probability of each step's label; the N steps of a draft are the first dimension.
        live: 1 where a step has a label.
        alpha: the least factor that a step contributes, in 0..1.
    """
    # The sums run from the end: w_j adds P_m for all m >= j, the lengths that position j is part of. With P = 0.9, 0.5,
    # 0.2 the weights are 1.6, 0.7, 0.2.
    reached = ((1 - alpha) * q + alpha).cumprod(0) * live
    return reached.flip(0).cumsum(0).flip(0)


def compiling_pays(device: torch.device, vocab_size: int) -> bool:
    """Return whether a run should compile its loss: on a CPU a small vocabulary gains less than compiling takes."""
    return can_compile(device) and (device.type != "cpu" or vocab_size >= _COMPILED_ON_CPU)


def chunk_tokens(device: str, vocab_size: int) -> int:
    """Return the number of tokens whose logits are in memory at a time; `device` is a kind such as "cpu" or "cuda"."""
    # 2^25 logits are 261 tokens of a vocabulary of 128,256.
    chunk = max(1, _CHUNK.get(device, _CHUNK_ON_GPU) // vocab_size)
    # 523 rows, for a vocabulary of 128,256, would leave a fifth of a product's last tiles on a GPU empty.
    return chunk if device in _CHUNK or chunk < _TILE else chunk // _TILE * _TILE


class ChunkedLoss:
    """The mix of losses that a run's config weighs, as a `speculator.heads.training.TokenLoss`.

    Logits exist for one chunk of tokens at a time, and for the steps that share their matrices; with D-PACE for all
    steps. The forward pass computes the gradients too, so that the backward pass needs no logits.

    Args:
        logits: the target's lm_head, [C, D] -> [C, V]; called only if a loss needs the target's distribution.
        vocab_size: V, by which the default chunk is chosen.
        chunk: tokens at a time; None: as many as a fixed budget of logits allows, see `chunk_tokens`.
        compiled: compile what follows the matrix products, in the first batch.
        output_matrix: the target's lm_head, whose rows of the draft vocabulary are enough with `normalisers`.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        weights: LossConfig,
        vocab_size: int,
        chunk: int | None = None,
        compiled: bool = False,
        output_matrix: nn.Module | None = None,
    ):
        self.output_matrix = output_matrix
        self._drafted: nn.Linear | None = None
        self.target_probs: Callable[..., TargetProbs] = target_probs
        self.replace_by_gradient: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = replace_by_gradient
        self.label_probs: Callable[..., Tensor] = label_probs
        if compiled:
            self.label_probs = Compiled(label_probs, "the weights of D-PACE")
            self.target_probs = Compiled(target_probs, "the target's distribution")
            self.replace_by_gradient = Compiled(replace_by_gradient, "the loss")
        self.logits, self.weights, self.vocab_size, self.chunk = logits, weights, vocab_size, chunk

    @torch.no_grad()
    def drafted_logits(self, hidden: Tensor, draft_tokens: Tensor) -> Tensor:  # [C, D] -> [C, V_d]
        """Compute the target's logits of the draft vocabulary alone, which is the same in every call."""
        if self._drafted is None:
            self._drafted = rows_of(self.output_matrix, draft_tokens)
        logits = product(hidden, self._drafted.weight)
        return logits if self._drafted.bias is None else logits + self._drafted.bias

    def step_weights(self, steps: int) -> Tensor:  # [N]
        """Return the weight in the objective of each of N draft positions: 1, `head_decay`, `head_decay`^2, ..."""
        return torch.tensor([self.weights.head_decay**i for i in range(steps)])

    def pace(
        self,
        q: Tensor,  # [N, K] probability of each label
        labels: Tensor,  # [N, K]
        slots: Tensor,  # [N, K] index of each label in `shape`, flattened
        shape: tuple[int, ...],  # drafts, tokens of a draft
    ) -> Tensor:  # [N, K]
        """Return each label's weight by `d_pace`, its share in its draft's expected length; 0 for IGNORE."""
        counted = labels != IGNORE
        # Labels of one draft lie in different columns, because `labels` is arranged by what predicts them. `slots` says
        # to which token of which draft a label belongs: scatter them there, weigh each draft, and gather them back.
        size = shape[0] * shape[1]
        places = torch.where(counted, slots, size).flatten()  # labels to ignore share a place after the others
        by_slot = q.new_zeros(size + 1).index_copy(0, places, (q * (labels >= 0)).flatten())
        live = counted.new_zeros(size + 1).index_copy(0, places, counted.flatten())
        # Without the last place, which the ignored labels share: [drafts, tokens] each, transposed for `d_pace`.
        by_slot, live = (x[:-1].view(shape).T for x in (by_slot, live))
        weights = d_pace(by_slot, live, self.weights.d_pace).T.flatten()
        return torch.where(counted, weights[slots], 0)

    def __call__(
        self,
        logits: Sequence[Sequence[Term]],
        labels: Tensor,
        hidden: Tensor,
        weights: Tensor,
        draft_tokens: Tensor | None = None,
        predictors: Tensor | None = None,
        drafts: Drafts | None = None,
        normalisers: Tensor | None = None,
    ) -> TokenLosses:
        features = [[x.contiguous() for x, _ in terms] for terms in logits]  # products of strided views are slow
        # Steps often share one matrix: it is passed, cast and differentiated once.
        matrices = list({id(matrix): matrix for terms in logits for _, matrix in terms}.values())
        order = {id(matrix): j for j, matrix in enumerate(matrices)}
        call = _Call(
            loss=self,
            hidden=hidden,
            labels=labels,
            weights=weights.to(labels.device).expand(labels.shape),
            draft_tokens=draft_tokens,
            predictors=predictors,
            drafts=drafts if self.weights.d_pace < 1 else None,
            normalisers=normalisers,
            matrix_of=[[order[id(matrix)] for _, matrix in terms] for terms in logits],
            train=torch.is_grad_enabled(),
        )
        objective, loss, hits, overlap = _Chunked.apply(call, *(x for xs in features for x in xs), *matrices)
        overlaps = any(each.needs_overlap for each in self.weights.used().values())
        known = self.weights.needs_target and (not call.train or overlaps)
        return TokenLosses(objective=objective, loss=loss, hits=hits, overlap=overlap if known else None)


class _Call(NamedTuple):
    """Arguments of `_Chunked` that have no gradient.

    Attributes:
        hidden: target states that predict the labels.
        predictors: row of `hidden` that predicts each label, equal ones next to each other; None: row k for label k.
        matrix_of: for each step, the index of the matrix of each of its terms.
        train: gradients are needed.
    """

    loss: ChunkedLoss
    hidden: Tensor  # [K or fewer, D]
    labels: Tensor  # [N, K]
    weights: Tensor  # [N, K]
    draft_tokens: Tensor | None  # [V_d]
    predictors: Tensor | None  # [K] on the CPU
    drafts: Drafts | None  # None without D-PACE
    normalisers: Tensor | None  # [K or fewer], with a draft vocabulary only
    matrix_of: list[list[int]]
    train: bool


class _Chunked(torch.autograd.Function):
    """Computes losses and their gradients chunk by chunk, so that no chunk's logits outlive it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor):
        """Return the objective [], and loss, hits and overlap [N, K].

        `tensors` are the features of all terms, step after step, and then the matrices.
        """
        labels, options, train = call.labels, call.loss.weights, call.train
        steps, kept = labels.shape
        # Logits of a step are a sum of features times a matrix, and steps may share a matrix. Two steps of an MLP head
        # have matrix_of [[0], [1]], or [[0], [0]] with tied weights; a step that adds two products has [[0, 1]].
        # `tensors` are the features in this order, then the matrices.
        # Autograd sees flat arguments only: [features of step 0, .., features of step N - 1, matrices].
        count = sum(map(len, call.matrix_of))
        inputs, matrices = iter(tensors[:count]), tensors[count:]
        features = [[next(inputs) for _ in which] for which in call.matrix_of]
        # The first argument is `call`, so the matrices begin at 1 + count.
        needed = ctx.needs_input_grad[1 + count :]
        device = labels.device
        # Cast here, once per call: every chunk multiplies by the same matrices.
        dtype = compute_dtype(matrices[0])
        cast = [matrix.to(dtype) for matrix in matrices]
        d_features = [[torch.zeros_like(x) for x in xs] if train else [] for xs in features]
        # A frozen matrix gets no gradient: that buffer would be as large as the vocabulary is.
        d_matrices = [torch.zeros_like(x) if train and need else None for x, need in zip(matrices, needed, strict=True)]
        kept_in = torch.promote_types(matrices[0].dtype, torch.float32)  # a target's matrix may be bfloat16
        loss, accepted, q = (torch.zeros(steps, kept, device=device, dtype=kept_in) for _ in range(3))
        hits = torch.zeros(steps, kept, dtype=torch.long, device=device)
        weights, drafts = call.weights, call.drafts
        paces = torch.ones_like(q)
        chunk = call.loss.chunk or chunk_tokens(device.type, call.loss.vocab_size)
        # Steps with the same matrices are multiplied together. Products of many rows are faster, and a matrix's
        # gradient, which is as large as the vocabulary, is read and written once per chunk and not once per step.
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, which in enumerate(call.matrix_of):
            groups.setdefault(tuple(which), []).append(i)

        def logits_of(shared: tuple[int, ...], members: list[int], span: slice) -> tuple[list[Tensor], Tensor]:
            # For each of the matrices, the features of all steps of the group, end to end: [n C, I], and [n C, V_d].
            xs = [torch.cat([features[i][k][span] for i in members]).to(dtype) for k in range(len(shared))]
            return xs, _logits(xs, [cast[j] for j in shared])

        def add_gradients(
            shared: tuple[int, ...], members: list[int], span: slice, xs: list[Tensor], z: Tensor
        ) -> None:
            # z holds d loss / d logits now: [C, V] times the matrix [V, I] gives the features' gradient [C, I].
            # A label's pace multiplies its row; that of x [C, I] is cheaper than that of z [C, V].
            pace = None if drafts is None else torch.cat([paces[i, span] for i in members])[:, None]
            for k, (x, j) in enumerate(zip(xs, shared, strict=True)):
                d_x = product(z, cast[j].T)
                d_x, x = (d_x, x) if pace is None else (d_x * pace, (x * pace).to(dtype))
                for i, part in zip(members, d_x.chunk(len(members)), strict=True):
                    d_features[i][k][span] = part
                if (d_matrix := d_matrices[j]) is not None:
                    _add_outer(d_matrix, z, x)

        for start in range(0, kept, chunk):
            span = slice(start, min(start + chunk, kept))
            target = None
            if call.loss.weights.needs_target:
                target = _target(call, span)
            made = []  # with D-PACE the gradients of all groups wait for their weights
            for shared, members in groups.items():
                xs, z = logits_of(shared, members, span)
                for i, own in zip(members, z.chunk(len(members)), strict=True):
                    # The gradient is computed in the forward pass, while the chunk's logits exist, and overwrites them.
                    # The backward pass then only multiplies by the gradient of the objective: no logits are kept or
                    # computed twice.
                    if train:
                        given = labels[i, span], call.weights[i, span], target, options
                        found = call.loss.replace_by_gradient(own, *given)
                    else:
                        found = measure(own, labels[i, span], target, options)
                    loss[i, span], hits[i, span], accepted[i, span], q[i, span] = found
                if drafts is None and train:
                    add_gradients(shared, members, span, xs, z)
                elif train:
                    made.append((shared, members, span, xs, z))
                del xs, z, own  # before the next ones are allocated
            if drafts is not None and train:
                # A draft that begins in this chunk may end in the next one, whose first columns tell the rest.
                ahead = slice(span.stop, min(span.stop + drafts.reach, kept))
                for shared, members in groups.items() if ahead.start < ahead.stop else ():
                    _, z = logits_of(shared, members, ahead)
                    for i, own in zip(members, z.chunk(len(members)), strict=True):
                        q[i, ahead] = call.loss.label_probs(own, labels[i, ahead])
                    del z, own
                near = slice(max(0, start - drafts.reach), ahead.stop)
                pace = call.loss.pace(q[:, near], labels[:, near], drafts.slots[:, near], drafts.shape)
                paces[:, span] = pace[:, start - near.start :][:, : span.stop - start]
                while made:
                    add_gradients(*made.pop())
        if drafts is not None:
            weights = weights * (paces if train else call.loss.pace(q, labels, drafts.slots, drafts.shape))
        ctx.missing = [d_matrix is None for d_matrix in d_matrices]
        ctx.save_for_backward(*(x for xs in d_features for x in xs), *(x for x in d_matrices if x is not None))
        ctx.mark_non_differentiable(loss, hits, accepted)
        return (loss * weights).sum(1).sum(), loss, hits, accepted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_objective: Tensor, *_: Tensor):
        # In place: the saved gradients are used once, and are as large as the matrices.
        gradients = [gradient.mul_(d_objective) for gradient in ctx.saved_tensors]
        # The last gradients are those of the matrices that have one; the others were not saved.
        count = len(gradients) - ctx.missing.count(False)
        d_matrices = iter(gradients[count:])
        return None, *gradients[:count], *(None if missing else next(d_matrices) for missing in ctx.missing)


def _logits(
    features: Sequence[Tensor],  # [C, I] each
    matrices: Sequence[Tensor],  # [V, I] each
) -> Tensor:  # [C, V]
    z = product(features[0], matrices[0])
    for x, matrix in zip(features[1:], matrices[1:], strict=True):
        z += product(x, matrix)
    return z


def _target(call: _Call, span: slice) -> TargetProbs:
    """Return the target's distribution for the labels in columns `span` of `call.labels`.

    A hidden state that predicts several labels goes through the lm_head once.
    """

    def probs(at: slice | Tensor) -> TargetProbs:
        hidden = call.hidden[at]
        # The head's autocast would round them to bfloat16: a float16 target has eight times its precision when served.
        with torch.autocast(hidden.device.type, enabled=False):
            if call.normalisers is None or call.draft_tokens is None:
                return call.loss.target_probs(call.loss.logits(hidden), call.draft_tokens)
            logits = call.loss.drafted_logits(hidden, call.draft_tokens)
            return call.loss.target_probs(logits, None, call.normalisers[at])

    if call.predictors is None:
        return probs(span)
    # On the CPU, so that nothing waits for a GPU to count the distinct ones.
    # Equal predictors are neighbours: 7 7 8 9 9 gives the distinct 7 8 9, and 0 0 1 2 2 of the labels.
    distinct, of_label = call.predictors[span].unique_consecutive(return_inverse=True)
    distinct, of_label = (send(x, call.hidden.device) for x in (distinct, of_label))
    p, entropy = probs(distinct)
    return TargetProbs(p[of_label], entropy[of_label])


def _add_outer(total: Tensor, d_z: Tensor, x: Tensor) -> None:  # [V, I] += [C, V]^T [C, I]
    """Add d_z^T x to `total`, in one kernel if the device has one, else in blocks of the vocabulary's rows.

    Blocks keep memory small: the whole product is as large as `total`.
    """
    if total.dtype == x.dtype and not total.is_cpu:
        total.addmm_(d_z.T, x)
        return
    if total.dtype == torch.float32 and _adds_in_float32(x.device, x.dtype):
        torch.ops.aten.addmm.dtype_out(total, d_z.T, x, torch.float32, out=total)
        return
    for start in range(0, len(total), _OUTER_ROWS):
        span = slice(start, start + _OUTER_ROWS)
        total[span] += product(d_z[:, span].T, x.T)


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds products of a narrower dtype to a float32 matrix in one kernel."""
    ones, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except RuntimeError:  # not on a CPU, and not in every build
        return False
    return bool((total == 17).all())


def summarise(sums: dict[str, Metric]) -> dict[str, float]:
    """Divide sums, added up over batches and processes, by their counts: "position{i}/NAME" for each draft position.

    The "objective", a scalar, becomes "loss". `plain_loss` is the same without weights: those of positions, tokens and
    D-PACE.

    `teacher_forced_acceptance_length` is 1 + the sum of the prefix accuracies: what greedy decoding would accept if the
    text were the target's own, averaged over positions. `walked_acceptance_length` averages over the steps of decoding,
    for heads that train on every position. `forecast_acceptance_length_sampled` is 1 + the sum of the prefix overlaps:
    the first one at temperature 1. `forecast_acceptance_length` is the mean of both, and `forecast_error` its standard
    error. Real decoding measures `acceptance_length`.
    """
    figures: dict[str, float] = {}
    for name, (total, count) in sums.items():
        if name == "rows":
            error = forecast_error(total.tolist())
            figures |= {} if error is None else {"forecast_error": error}
            continue
        means: Any = (total / count.clamp_min(1)).tolist()
        if name == "objective":
            figures["loss"] = means
            continue
        figures |= {f"position{i}/{name}": mean for i, mean in enumerate(means)}
        if name == "loss":
            figures["plain_loss"] = len(means) * (total.sum() / count.sum().clamp_min(1)).item()
        if name in _LENGTHS:
            figures[_LENGTHS[name]] = 1 + sum(means)
    both = [figures[_LENGTHS[name]] for name in ("prefix_accuracy", "prefix_overlap") if _LENGTHS[name] in figures]
    return figures | ({"forecast_acceptance_length": sum(both) / len(both)} if both else {})
