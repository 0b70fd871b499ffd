"""A target that vLLM servers run: it gives training its hidden states, and holds only what is outside its layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from speculator.device import resolve_device
from speculator.errors import refuse
from speculator.kernels.linear import pack_linears
from speculator.target.attention.attention import avoid_cudnn
from speculator.target.aux_layers import check_layers
from speculator.target.fingerprint import fingerprint
from speculator.target.in_process import ModelHere
from speculator.target.probe import context_length
from speculator.target.remote.outside_layers import read_outside_layers

if TYPE_CHECKING:
    from speculator.clients.hidden_states import HiddenStateServers

_TOLERANCE = 0.25
"""Largest difference of a log-probability, in nats. Rounding of 16 bits stays below it, another model does not."""
_PROBED = 16  # tokens of the text that every server reads before training


class ServerTarget(ModelHere):
    """The training half of a target whose layers run elsewhere. It can't decode.

    Args:
        tokenizer, model, norm: see `read_outside_layers`.

    Attributes:
        servers: the connection, from `check` to `close`; else None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: Any, norm: nn.Module, urls: Sequence[str]):
        self.tokenizer, self.model, self.norm, self.urls = tokenizer, model, norm, list(urls)
        self.config: PreTrainedConfig = model.config
        self.name = model.config.name_or_path
        avoid_cudnn(self.device)  # heads attend with masks too
        # A server generates a token after each text, so a text is one shorter than the context.
        self.context_length = context_length(self.config, self.name) - 1
        self.fingerprint = fingerprint(model)
        pack_linears(model)
        self._prepare_logits()
        output = model.get_output_embeddings()
        hidden = torch.linspace(-1, 1, 4 * self.hidden_size, device=self.device, dtype=self.dtype).view(4, -1)
        if torch.equal(output(hidden), self.logits(hidden)):
            self.output_matrix = output
        self.servers: HiddenStateServers | None = None

    @classmethod
    def connect(
        cls,
        name: str,
        urls: Sequence[str],
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
    ) -> ServerTarget:
        """Return the target of a hub id or folder without its layers; no server is asked before `check`."""
        parts = read_outside_layers(name, revision, dtype, resolve_device(device), trust_remote_code)
        return cls(*parts, urls)

    def check(self, aux_layers: Sequence[int], longest: int, processes: int = 1) -> None:
        """Connect to the servers, and check the hidden states that each gives for a short document.

        Args:
            aux_layers: auxiliary layers of the head.
            longest: tokens of the longest document that will be sent.
            processes: training processes that ask the servers.

        Raises:
            UserError: a server is not there, can't give hidden states, or serves another model, layers or dtype.
        """
        from speculator.clients.hidden_states import Expected, HiddenStateServers  # imports openai, for a second

        self.close()
        layers = (*aux_layers, self.config.num_hidden_layers)
        expected = Expected(layers, self.hidden_size, self.dtype)
        self.servers = HiddenStateServers(self.urls, self.name, expected, processes)
        document = [7 * i % self.vocab_size for i in range(1, _PROBED + 1)]
        for url, state, token, theirs in self.servers.check(document, longest):
            ours = self.logits(self.norm(state.to(self.device)[None])).float().log_softmax(-1)[0, token].item()
            other = f"its likeliest next token has log-probability {theirs:.2f}, and {ours:.2f} by its hidden states"
            why = f"{url}: {other} and the output matrix of {self.name}: it serves another model, or other layers"
            refuse((not abs(ours - theirs) < _TOLERANCE, why))

    def check_aux_layers(self, wanted: Sequence[int]) -> None:
        check_layers(wanted, self.config.num_hidden_layers, self.name)

    def training_states(
        self, tokens: Tensor, documents: Tensor, aux_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # [B, S, D], [B, S, nD]
        """See `TrainingTarget`. Padding is sent too; `begin` takes rows without it, and does not wait."""
        rows = [split(*pair) for pair in zip(tokens.tolist(), documents.tolist(), strict=True)]
        return self.begin(rows, tokens.shape[1]).result()

    def begin(
        self,
        rows: Sequence[Sequence[list[int]]],  # the documents of each row
        length: int,
    ) -> PendingStates:
        """Request the hidden states of a batch without waiting; `result` gives them, padded to `length`."""
        assert self.servers is not None, "`check` comes first"
        kind = self.servers.expected
        shape = (len(rows), length, len(kind.layers), kind.hidden_size)
        # Pinned, so that the copy to a GPU does not wait for it; zeros, because padding takes part in products.
        states = torch.zeros(shape, dtype=kind.dtype, pin_memory=self.device.type == "cuda")
        futures = []
        # Each answer is copied into its slice of the batch: documents of 3 and 5 tokens fill 0..2 and 3..7 of the row.
        for row, documents in zip(states, rows, strict=True):
            begin = 0
            for document in documents:
                futures.append(self.servers.submit(document, row[begin : begin + len(document)]))
                begin += len(document)
        return PendingStates(self, states, futures)

    def close(self) -> None:
        """Disconnect from the servers, and delete the files of requests in flight."""
        if self.servers is not None:
            self.servers.close()
            self.servers = None


def split(tokens: list[int], documents: list[int]) -> list[list[int]]:
    """Return the documents of a row: the tokens 5 6 7 8 of the documents 0 0 1 1 are [5, 6] and [7, 8]."""
    pairs = groupby(zip(documents, tokens, strict=True), key=lambda pair: pair[0])
    return [[token for _, token in group] for _, group in pairs]


class PendingStates:
    """The hidden states of a batch that the servers are computing.

    Args:
        target: the target, whose final norm and device `result` uses.
        states: [B, S, n + 1, D] zeros, into which the answers are copied: n auxiliary states, and the last layer's.
        futures: one for each document, done when its states are copied.
    """

    def __init__(self, target: ServerTarget, states: Tensor, futures: list[Future]):
        self._target, self._states, self._futures = target, states, futures
        self._began = self._ended = time.perf_counter()
        for future in futures:
            future.add_done_callback(self._note)

    def _note(self, _: Future) -> None:
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds from the requests to the latest answer so far."""
        return self._ended - self._began

    @torch.no_grad()
    def result(self) -> tuple[Tensor, Tensor]:  # [B, S, D], [B, S, nD]
        """Wait for the servers, and return what `TrainingTarget.training_states` does."""
        for future in self._futures:
            future.result()
        states = self._states.to(self._target.device, non_blocking=True)
        # Servers give the last layer's states as they leave it, before the final norm.
        hidden = self._target.norm(states[..., -1, :])
        return hidden, states[..., :-1, :].flatten(-2) if states.shape[-2] > 1 else hidden
