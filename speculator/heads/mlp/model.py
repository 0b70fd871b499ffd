"""The MLP speculator: a chain of small MLPs, each conditioned on one more sampled token (arXiv 2404.19124).

Step 0 drafts x_{t+2} from the target's hidden state h_t and the token x_{t+1} that the target sampled from it. Step i
drafts x_{t+2+i} from the state of step i-1 and token x_{t+1+i}:

    s_0 = h_t                                         or rms(h_t) / sqrt(2) with scale_input
    s_{i+1} = gelu(norm_i(proj_i(s_i) + alpha * emb_i(x_{t+1+i})))
    logits_i = head_i(s_{i+1})

`norm` is an RMS norm with weight and bias; `speculator.heads.rnn` explains alpha.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from speculator.heads.mlp.config import MLPSpeculatorConfig
from speculator.heads.rnn import BiasedRMSNorm, RNNHead, TargetEmbedding


class MLPSpeculator(RNNHead):
    """A chain of N MLPs that draft one token each; the output matrix reads the whole state (the LSTM's: half of it)."""

    config_class = MLPSpeculatorConfig

    def __init__(self, config: MLPSpeculatorConfig):
        super().__init__(config)
        n, inner = config.n_predict, config.inner_dim
        # Tied weights are stored once, under the name that published tied checkpoints use.
        count = 1 if config.tie_weights else n
        self.emb = nn.ModuleList(self.new_embedding(config) for _ in range(count))
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

    def embedding(self, index: int) -> nn.Embedding | TargetEmbedding:
        return cast("nn.Embedding | TargetEmbedding", self.emb[min(index, len(self.emb) - 1)])

    def projections(self, index: int) -> list[nn.Linear]:
        # Untied, every step has its own. Tied, there are two: of step 0 and of the rest.
        return [cast(nn.Linear, self.proj[min(index, len(self.proj) - 1)])]

    def advance(self, index: int, state: Tensor, token: Tensor) -> Tensor:
        (proj,), ln = self.projections(index), self.ln[min(index, len(self.ln) - 1)]
        return nn.functional.gelu(ln(proj(state) + self.alpha * token))

    def features(self, index: int, state: Tensor) -> Tensor:
        return state

    def output(self, index: int) -> nn.Linear:
        return cast(nn.Linear, self.head[min(index, len(self.head) - 1)])

    @property
    def entry(self) -> nn.Linear:
        return cast(nn.Linear, self.proj[0])

    def aliases(self) -> dict[str, str]:
        if not self.config.tie_weights:
            return {}
        embedding = "emb.{}.weight" if self.config.own_embedding else "emb.{}.proj.weight"
        shared = (embedding, "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
        later = range(1, self.n_predict)
        names = {name.format(i): name.format(0) for name in shared for i in later}
        return names | {f"proj.{i}.weight": "proj.1.weight" for i in later[1:]}
