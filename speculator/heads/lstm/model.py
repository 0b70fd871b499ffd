"""The LSTM speculator: a recurrence with a cell state (Snowflake's Arctic speculator, `sum_lstm`).

Step i, with its token's embedding e = emb(x_{t+1+i}):

    s_0 = h_t                                         or rms(h_t) / sqrt(2) with scale_input
    c_0 = 0
    z_g = proj_{g,i}(s_i) + alpha * e                 for g of forget, input, output, cell
    c_{i+1} = sigmoid(z_forget) * c_i + sigmoid(z_input) * gelu(norm_cell(z_cell))
    s_{i+1} = sigmoid(z_output) * gelu(norm_state(c_{i+1}))
    logits_i = head(s_{i+1})

All steps share all weights except the projections of step 0, which read the hidden state. The four gates share one
embedding. Arctic serves tied heads only. Modules are named as in Arctic's checkpoints.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from speculator.heads.lstm.config import LSTMSpeculatorConfig
from speculator.heads.rnn import BiasedRMSNorm, RNNHead, TargetEmbedding


class LSTMSpeculator(RNNHead):
    """One LSTM that drafts N tokens in turn. Its state is [s, c]; the output matrix reads s."""

    config_class = LSTMSpeculatorConfig

    def __init__(self, config: LSTMSpeculatorConfig):
        super().__init__(config)
        inner = config.inner_dim
        self.forget_emb = nn.ModuleList([self.new_embedding(config)])

        def projections() -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(size, inner, bias=False) for size in (config.emb_dim, inner))

        self.forget_proj, self.input_proj, self.output_proj, self.cell_proj = (projections() for _ in range(4))
        self.cell_ln = nn.ModuleList([BiasedRMSNorm(inner)])
        self.state_ln = nn.ModuleList([BiasedRMSNorm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, config.output_size, bias=False)])
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            projects_tokens = any(module is table.proj for table in self.target_embeddings())
            size = self.config.inner_dim if projects_tokens else min(module.weight.shape)
            nn.init.normal_(module.weight, std=size**-0.5)
        elif isinstance(module, BiasedRMSNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def start(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., D+I]
        state = super().start(hidden)
        # [h_t, c_0]: a cell of zeros after the hidden state.
        return torch.cat([state, state.new_zeros(*state.shape[:-1], self.config.inner_dim)], dim=-1)

    def embedding(self, index: int) -> nn.Embedding | TargetEmbedding:
        return cast("nn.Embedding | TargetEmbedding", self.forget_emb[0])

    def projections(self, index: int) -> list[nn.Linear]:
        # Before the cell the state has h_t [D] at step 0 and s [I] later, so step 0 has projections of its own.
        gates = (self.forget_proj, self.input_proj, self.output_proj, self.cell_proj)
        return [cast(nn.Linear, proj[min(index, 1)]) for proj in gates]

    def advance(self, index: int, state: Tensor, token: Tensor) -> Tensor:  # [..., D+I or 2I], [..., I] -> [..., 2I]
        # The cell is the last I of the state.
        inner = self.config.inner_dim
        state, cell = state[..., :-inner], state[..., -inner:]
        token = self.alpha * token
        forget, take, give, candidate = (proj(state) + token for proj in self.projections(index))
        new = nn.functional.gelu(self.cell_ln[0](candidate))
        cell = forget.sigmoid() * cell + take.sigmoid() * new
        state = give.sigmoid() * nn.functional.gelu(self.state_ln[0](cell))
        return torch.cat([state, cell], dim=-1)

    def features(self, index: int, state: Tensor) -> Tensor:  # [..., 2I] -> [..., I]
        return state[..., : self.config.inner_dim]

    def output(self, index: int) -> nn.Linear:
        return cast(nn.Linear, self.head[0])

    @property
    def entry(self) -> nn.Linear:
        return cast(nn.Linear, self.cell_proj[0])

    def aliases(self) -> dict[str, str]:
        heads = {f"head.{i}.weight": "head.0.weight" for i in range(1, self.n_predict)}
        if not self.config.own_embedding:
            return heads
        return heads | {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in ("input", "output", "cell")}
