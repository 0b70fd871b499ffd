"""The MLP speculator: a chain of small MLPs, each conditioned on one more sampled token (arXiv 2404.19124).

A head of N steps starts from the target's hidden state h_t (after its final norm, which its lm_head reads). Step i
reads token x_{t+1+i} and drafts x_{t+2+i}; the target itself sampled the token of step 0 from h_t:

    s_0 = h_t                                         or rms(h_t) / sqrt(2) with scale_input
    s_{i+1} = gelu(norm_i(proj_i(s_i) + alpha * emb_i(x_{t+1+i})))
    logits_i = head_i(s_{i+1})

`norm` is an RMS norm with weight and bias. alpha = sqrt((1 - w^2) I/2) / w with w = 0.5^(0.5/N) weights a token's
embedding relative to the state, so that h_t contributes half of the state's variance at the last step. It depends on
n_predict: a checkpoint is valid for its own N.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from speculator.decoding.draft import gather_at
from speculator.decoding.drafter import Sequences
from speculator.errors import UserError
from speculator.heads.drafting import LastHiddenSource
from speculator.heads.unrolled import UnrolledConfig, UnrolledHead

if TYPE_CHECKING:
    from typing_extensions import Self

_EPS = 1e-6
_NOISE = 0.3


class MLPSpeculatorConfig(UnrolledConfig):
    """Shape of an `MLPSpeculator`.

    Args:
        tie_weights: all steps share one embedding, norm and output matrix; steps 1 and up share one projection.
        scale_input: normalise the hidden state before the first step.
        own_embedding: the head trains and stores an embedding; else it reads the target's, see `TargetEmbedding`.
    """

    model_type = "mlp_speculator"
    tie_weights: bool = True
    scale_input: bool = True
    own_embedding: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.tie_weights and self.n_predict == 1:
            raise ValueError("tie_weights needs n_predict of at least 2: there is nothing to tie")

    def starts_from_target(self, requested: bool) -> bool:
        if requested and self.inner_dim != self.emb_dim:
            raise UserError("speculator.initialise target needs speculator.inner_dim 0, which takes the target's size")
        return requested

    def describe(self) -> str:
        tied, scaled = "" if self.tie_weights else "not ", "" if self.scale_input else "not "
        embedding = "" if self.own_embedding else ", the target's embedding"
        return f"{self.n_predict} heads, {tied}tied, input {scaled}scaled{embedding}"


class TargetEmbedding(nn.Module):
    """The target's embedding e, frozen and not stored, with a norm and a trained projection: proj(rms(e(x))) / sqrt(D).

    New weights give the result the variance 1/I, as a new embedding of the head's own has.
    """

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__()
        self.proj = nn.Linear(config.emb_dim, config.inner_dim, bias=False)
        self.shared: list[Tensor] = []  # a list, so that it is not one of this module's weights

    def forward(self, tokens: Tensor) -> Tensor:  # [...] -> [..., I]
        if not self.shared:
            raise UserError(
                "the head reads its target's embedding, and was given none: call bind(head, target) of "
                "speculator.checkpoints.loading"
            )
        if self.shared[0].device != tokens.device:  # the target is spread over several GPUs
            self.shared = [self.shared[0].to(tokens.device)]
        embedded = nn.functional.embedding(tokens, self.shared[0]).to(self.proj.weight.dtype)
        size = embedded.shape[-1]
        return self.proj(nn.functional.rms_norm(embedded, (size,), eps=_EPS)) / math.sqrt(size)


class BiasedRMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias


class MLPSpeculator(UnrolledHead):
    """A chain of N MLPs that draft one token each; training and drafting both call `advance`."""

    config_class = MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__(config)
        # Each step keeps w^2 of the variance that h_t contributes, so after N steps w^(2N) = 1/2 is left.
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.alpha = math.sqrt((1 - state_weight**2) * config.inner_dim / 2) / state_weight
        n, inner = config.n_predict, config.inner_dim
        # Tied weights are stored once, under the name that published tied checkpoints use.
        count = 1 if config.tie_weights else n
        self.emb = nn.ModuleList(
            nn.Embedding(config.vocab_size, inner) if config.own_embedding else TargetEmbedding(config)
            for _ in range(count)
        )
        # Untied, every step has its own. Tied, there are two: of step 0 and of the rest.
        self.proj = nn.ModuleList(
            nn.Linear(config.emb_dim if i == 0 else inner, inner, bias=False)
            for i in range(2 if config.tie_weights else n)
        )
        self.ln = nn.ModuleList(BiasedRMSNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(inner, config.output_size, bias=False) for _ in range(count))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.inner_dim**-0.5)
        elif isinstance(module, BiasedRMSNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    # --- a step; tied steps share the last of each list

    def embedding(self, index: int) -> nn.Embedding | TargetEmbedding:  # V -> I
        return cast("nn.Embedding | TargetEmbedding", self.emb[min(index, len(self.emb) - 1)])

    def projection(self, index: int) -> nn.Linear:  # I -> I, of step 0 D -> I
        return cast(nn.Linear, self.proj[min(index, len(self.proj) - 1)])

    def output(self, index: int) -> nn.Linear:
        return cast(nn.Linear, self.head[min(index, len(self.head) - 1)])

    def start(
        self,
        hidden: Tensor,  # [..., D] the target's, after its final norm
    ) -> Tensor:  # [..., D]
        """Compute the state that step 0 reads: the hidden state, or rms(h) / sqrt(2) with `scale_input`."""
        if not self.config.scale_input:
            return hidden
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / math.sqrt(2)

    def advance(
        self,
        index: int,
        state: Tensor,  # [..., D] from `start` for step 0, else [..., I] from the step before
        token: Tensor,  # [..., I] embedding of the token after the one that `state` ends with
    ) -> Tensor:  # [..., I]
        """Compute the state after step `index`, which the output matrix reads and the next step starts from."""
        ln = self.ln[min(index, len(self.ln) - 1)]
        return nn.functional.gelu(ln(self.projection(index)(state) + self.alpha * token))

    def step(
        self,
        index: int,
        state: Tensor,  # [..., D or I]
        tokens: Tensor,  # [...]
    ) -> tuple[Tensor, Tensor]:  # [..., I], [..., V]
        """Run step `index` on `tokens`; return the next state and the logits of the token after each."""
        state = self.advance(index, state, self.embedding(index)(tokens))
        return state, self.to_full_vocabulary(self.output(index)(state))

    # --- training

    def unrolled(
        self, states: Tensor, tokens: Tensor, documents: Tensor | None = None, loss_mask: Tensor | None = None
    ) -> list[Tensor]:
        """See `UnrolledHead`. Positions are independent, so `documents` and `loss_mask` are not used."""
        length = states.shape[1]
        tables = [self.embedding(i) for i in range(self.n_predict)]
        # Steps that share a table look it up together: every lookup has a gradient as large as the table.
        embedded = {table: table(tokens) for table in dict.fromkeys(tables)}
        state, features = self.start(states), []
        for i, table in enumerate(tables):
            # Step i of position t reads x[t+1+i], and `tokens` begins with x[1]: index t + i.
            state = self.advance(i, state, embedded[table][:, i : i + length])
            features.append(state)
        return features

    def weights_per_token(self, length: int) -> int:
        matrices = [matrix for i in range(self.n_predict) for matrix in (self.projection(i), self.output(i))]
        matrices += [table.proj for table in self.target_embeddings()]  # steps that share a table look it up together
        return sum(matrix.weight.numel() for matrix in matrices)

    # --- drafting, and files

    def drafting_source(self) -> MLPSource:
        return MLPSource(self)

    def aliases(self) -> dict[str, str]:
        if not self.config.tie_weights:
            return {}
        embedding = "emb.{}.weight" if self.config.own_embedding else "emb.{}.proj.weight"
        shared = (embedding, "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
        later = range(1, self.n_predict)
        names = {name.format(i): name.format(0) for name in shared for i in later}
        return names | {f"proj.{i}.weight": "proj.1.weight" for i in later[1:]}

    # --- what it shares with its target

    def target_embeddings(self) -> Iterator[TargetEmbedding]:
        """Return the parts that read the target's embedding; none if the head has an embedding of its own."""
        return (module for module in self.modules() if isinstance(module, TargetEmbedding))

    def bind(self, target: PreTrainedConfig, embedding: Tensor, output: nn.Linear) -> None:
        if not self.config.own_embedding:
            self.check_width(embedding)
        self.share_embedding(embedding)

    def share_embedding(
        self,
        weight: Tensor,  # [V, D] the target's; neither copied nor saved
    ) -> None:
        for module in self.target_embeddings():
            module.shared = [weight.detach()]

    @torch.no_grad()
    def with_own_embedding(
        self,
        weight: Tensor,  # [V, D] the target's embedding
    ) -> Self:
        """Return a head that drafts the same and has an embedding of its own; this one shares `weight` from now on."""
        self.share_embedding(weight)
        config: Any = copy.deepcopy(self.config)
        config.own_embedding = True
        with torch.device("meta"):
            made = type(self)(config)
        tokens = torch.arange(config.vocab_size, device=self.device)
        tensors = self.state_dict()
        for name, module in self.named_modules():
            if isinstance(module, TargetEmbedding):
                del tensors[f"{name}.proj.weight"]
                tensors[f"{name}.weight"] = module(tokens)
        made.load_state_dict(tensors, assign=True)
        return made.eval()

    def probe(self) -> tuple[Tensor, ...]:
        """Return hidden states [1, 4, D], tokens [1, 3 + N], and a matrix [V, D] for the target's, if it is read."""
        return super().probe() if self.config.own_embedding else (*super().probe(), self.probe_matrix())

    def logits(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
        embedding: Tensor | None = None,  # [V, D] in place of the target's
    ) -> Tensor:  # [N, B, S, V]
        shared = [module.shared for module in self.target_embeddings()]
        if embedding is not None:
            self.share_embedding(embedding)
        try:
            return super().logits(hidden, tokens)
        finally:
            for module, before in zip(self.target_embeddings(), shared, strict=True):
                module.shared = before

    @torch.no_grad()
    def initialise_from(self, embedding: Tensor, output: Tensor) -> None:
        """Copy the target's matrices at the scale of the head's own initialisation.

        The first projection, and those of the target's embedding, start near the identity, so that step 0 sees the
        hidden state in the basis that the output matrix reads.
        """
        inner = self.config.inner_dim

        def rescaled(weight: Tensor) -> Tensor:
            return weight / weight.std() * inner**-0.5

        # The target's matrices have scales of their own; the head's have the variance 1/I, as it is initialised.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(rescaled(embedding))
        for i in range(self.n_predict):
            self.output(i).weight.copy_(rescaled(self.draft_rows(output)))
        for matrix in (self.projection(0), *(module.proj for module in self.target_embeddings())):
            matrix.weight.mul_(_NOISE).add_(torch.eye(inner))


class MLPSource(LastHiddenSource):
    """Drafts from the target's last hidden state, with one state per token of the newest level."""

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        # [B, 1, ...]: the first level has one token, the pending one.
        state = self.head.start(self.hidden[: len(pending)])[:, None]
        self._states, logits = self.head.step(0, state, pending[:, None])
        return logits

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        # Each token continues the state of its parent: with the parents [0, 0, 1] the first two share a state.
        self._states, logits = self.head.step(level, gather_at(self._states, parents), tokens)
        return logits
