"""The MLP speculator: a chain of small MLPs, each conditioned on one more sampled token (arXiv 2404.19124).

From the target's hidden state h_t (after its final norm, so what its lm_head reads) and the token x_{t+1} that the
target sampled from it, head 0 drafts x_{t+2}; head i drafts x_{t+2+i} from the state of head i-1 and token x_{t+1+i}:

    s_0 = h_t                                         or rms(h_t) / sqrt(2) with scale_input
    s_i = gelu(norm_i(proj_i(s_{i-1}) + alpha * emb_i(x_{t+1+i})))
    logits_i = head_i(s_i)

`norm` is an RMS norm with weight and bias. alpha = sqrt((1 - w^2) I/2) / w with w = 0.5^(0.5/N) keeps half of the
state's variance from h_t at the last head; it depends on n_predict, so a checkpoint is only itself at its own N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

_EPS = 1e-6


class MLPSpeculatorConfig(PreTrainedConfig):
    """Shape of an `MLPSpeculator`.

    Args:
        vocab_size: V, the target's `config.vocab_size`.
        emb_dim: D, the target's hidden size.
        inner_dim: I, the heads' width; 0 means `emb_dim`.
        n_predict: N, the number of heads.
        tie_weights: one embedding, norm and output matrix for all heads, one projection for heads 1 and up.
        scale_input: normalise the hidden state before the first head.
        base_model_name_or_path: the target that the head was trained for.
        trained_length: the longest context, in tokens, that it was trained on.
        training_data: the sources that it was trained on.

    Raises:
        ValueError: `n_predict` < 1, or tied weights with a single head.
    """

    model_type = "mlp_speculator"
    attribute_map = {"hidden_size": "emb_dim"}  # noqa: RUF012 (transformers reads it so)

    vocab_size: int = 32000
    emb_dim: int = 4096
    inner_dim: int = 0
    n_predict: int = 3
    tie_weights: bool = True
    scale_input: bool = True
    base_model_name_or_path: str | None = None
    trained_length: int | None = None
    training_data: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.inner_dim = self.inner_dim or self.emb_dim
        if self.n_predict < 1:
            raise ValueError(f"n_predict must be at least 1, not {self.n_predict}")
        if self.tie_weights and self.n_predict == 1:
            raise ValueError("tie_weights needs n_predict of at least 2: there is nothing to tie")
        super().__post_init__(**kwargs)


class BiasedRMSNorm(nn.Module):
    """RMS norm (no mean subtraction) with weight and bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias


class MLPSpeculator(PreTrainedModel):
    """N heads that draft one token each. `step` is the one piece of maths: training and drafting both call it."""

    config_class = MLPSpeculatorConfig
    base_model_prefix = "speculator"
    main_input_name = "hidden"

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__(config)
        n, inner = config.n_predict, config.inner_dim
        # A tied part is stored once, under the name that published tied checkpoints use; `step` clamps the index.
        count = 1 if config.tie_weights else n
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(config.emb_dim if i == 0 else inner, inner, bias=False)
            for i in range(2 if config.tie_weights else n)
        )
        self.ln = nn.ModuleList(BiasedRMSNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(inner, config.vocab_size, bias=False) for _ in range(count))
        state_weight = 0.5 ** (0.5 / n)
        self.alpha = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.inner_dim**-0.5)
        elif isinstance(module, BiasedRMSNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    @property
    def n_predict(self) -> int:
        return self.config.n_predict

    def start(
        self,
        hidden: Tensor,  # [..., D] the target's, after its final norm
    ) -> Tensor:  # [..., D]
        """The state that head 0 reads."""
        return (
            nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / math.sqrt(2)
            if self.config.scale_input
            else hidden
        )

    def step(
        self,
        index: int,
        state: Tensor,  # [..., D] for head 0, [..., I] after it
        tokens: Tensor,  # [...] the token that came after the one that `state` ends with
    ) -> tuple[Tensor, Tensor]:  # [..., I], [..., V]
        """One head: the next state, and the logits of the token after `tokens`."""
        emb, proj, ln, head = (part[min(index, len(part) - 1)] for part in (self.emb, self.proj, self.ln, self.head))
        state = nn.functional.gelu(ln(proj(state) + self.alpha * emb(tokens)))
        return state, head(state)

    def unroll(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1] head i reads columns i..i+S-1
    ) -> Iterator[Tensor]:  # N times [B, S, V]
        """Each head's logits in turn, teacher-forced."""
        length = hidden.shape[1]
        state = self.start(hidden)
        for i in range(self.n_predict):
            state, logits = self.step(i, state, tokens[:, i : i + length])
            yield logits

    def forward(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
        measure: Callable[[int, Tensor], dict[str, Tensor]],
    ) -> dict[str, Tensor]:  # each [N]
        """What a trainer wraps: `measure(i, logits_i [B, S, V])` gives sums (of a loss, of hits), stacked over heads.

        The measuring happens in here, so that a data-parallel wrapper sees the losses as this module's output.
        """
        measured = [measure(i, logits) for i, logits in enumerate(self.unroll(hidden, tokens))]
        return {name: torch.stack([sums[name] for sums in measured]) for name in measured[0]}

    def logits(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
    ) -> Tensor:  # [N, B, S, V]
        """Every head's logits, for tests and exporters: all of them in memory at once."""
        return torch.stack(list(self.unroll(hidden, tokens)))


AutoConfig.register(MLPSpeculatorConfig.model_type, MLPSpeculatorConfig)
AutoModel.register(MLPSpeculatorConfig, MLPSpeculator)
