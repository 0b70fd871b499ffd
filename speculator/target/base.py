"""What training needs of a target: hidden states and logits, from wherever they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from speculator.chat import end_token
from speculator.target.encoder.encoder import Encoder
from speculator.target.fingerprint import digest_of_files


class PromptTarget:
    """A target as far as prompts are concerned.

    Attributes:
        name: hub id or folder, with the revision and adapter, for messages and records.
        tokenizer: its tokenizer; None in tests.
        context_length: longest row, in tokens.
        encoder: the encoder of an encoder-decoder model, which reads its prompts; else None.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    encoder: Encoder | None = None

    @property
    def continues(self) -> bool:
        """Whether an answer continues the text of its prompt; False if the prompt is an encoder's source."""
        return self.encoder is None

    @property
    def start(self) -> list[int]:
        """Tokens before every answer if prompts are sources: the decoder's start tokens; else []."""
        return self.encoder.prefix if self.encoder else []

    def room(self, new_tokens: int) -> tuple[int, int]:
        """Return the context that a prompt must fit, and how many of its tokens an answer of `new_tokens` takes."""
        return (self.encoder.longest, 0) if self.encoder else (self.context_length, new_tokens)


class TrainingTarget(PromptTarget, ABC):
    """A frozen causal LM that a head is trained for. The trainer, the losses and `--plan` know no other members.

    Symbols: B rows, S tokens of a row, D hidden size, V vocabulary, n auxiliary layers.

    Attributes:
        config: the model's text config.
        fingerprint: string that identifies the model's weights, see `speculator.target.fingerprint`.
        output_matrix: the lm_head, if its output is the logits, bit for bit; None if the model changes it further, or
            if that is unknown.
    """

    config: PreTrainedConfig
    fingerprint: str
    output_matrix: nn.Module | None = None

    @cached_property
    def digest(self) -> str | None:
        """Hash of the weights' files, unlike `fingerprint` different for each fine-tune; None if they are not local."""
        return digest_of_files(self.name)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the hidden states and logits."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states and logits."""

    @property
    @abstractmethod
    def generation_config(self) -> GenerationConfig | None:
        """The model's generation config, which names its EOS tokens."""

    @abstractmethod
    def training_states(
        self,
        tokens: Tensor,  # [B, S]
        documents: Tensor,  # [B, S] the same number throughout a document, see `speculator.target.packed`
        aux_layers: Sequence[int],  # ascending
    ) -> tuple[Tensor, Tensor]:  # [B, S, D], [B, S, nD]
        """Return the hidden states after the final norm, and those of the n auxiliary layers, concatenated.

        No document sees another one. Without `aux_layers` both results are the states after the final norm.
        """

    def check(self, aux_layers: Sequence[int], longest: int, processes: int = 1) -> None:
        """Raise a UserError if `training_states` will fail for documents of `longest` tokens, asked by `processes`."""

    def close(self) -> None:
        """Let go of servers."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., V]
        """Compute the model's own logits of hidden states after the final norm."""

    @abstractmethod
    def embedding_matrix(self) -> Tensor:  # [V, D]
        """Return the whole input embedding; every process of a sharded target must call this."""

    @abstractmethod
    def output_layer(self) -> nn.Linear:
        """Return the lm_head, whose `weight` is [V, D]."""

    @abstractmethod
    def check_aux_layers(self, wanted: Sequence[int]) -> None:
        """Raise a UserError if the target lacks one of the wanted layers."""

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output matrix; the tokenizer may use fewer."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """D, the size of the hidden states."""
        return self.config.hidden_size

    @property
    def eos_token_ids(self) -> set[int]:
        """Ids that end a generation, by tokenizer, chat template and generation config (often the base model's)."""
        return self._configured_ends | self._written_ends

    @property
    def _configured_ends(self) -> set[int]:
        ids = self.generation_config.eos_token_id if self.generation_config else None
        return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}

    @cached_property
    def _written_ends(self) -> set[int]:
        """EOS token ids of the tokenizer and the chat template, as far as the model's vocabulary has them."""
        if self.tokenizer is None:
            return set()
        ends = {self.tokenizer.eos_token_id, end_token(self.tokenizer)} - {None}
        return {token for token in ends if token < self.vocab_size}
