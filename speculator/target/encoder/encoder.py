"""Encoder-decoder targets: the encoder belongs to the request, and the decoder is decoded as any other target.

A source, the input of the encoder, becomes keys and values of cross attention when its request is admitted
(`speculator.target.cache.cross_memory`). From then on a row is a decoder's row, whose prompt is the decoder's start
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from speculator.errors import refuse
from speculator.target.attention.attention import using_attention
from speculator.target.text import Encoded, Source


@dataclass
class StatesOnly(BaseModelOutput):
    """Stands in for the output of a part that was not run: fields that were not given are None."""

    def __getattr__(self, name: str) -> None:
        return None


class Encoder:
    """The encoder of a model, run by the model's own code and attention.

    Args:
        model: an encoder-decoder model of text.
        attention: the attention implementation that the model came with.
        name: the target's name, for messages.
        longest: the longest source, in tokens.

    Attributes:
        prefix: tokens with which every text of the decoder starts: its start token, and a forced BOS token.

    Raises:
        UserError: the model's configs name no start token of the decoder.
    """

    def __init__(self, model: PreTrainedModel, attention: Any, name: str, longest: int):
        self._model, self._attention, self.longest = model, attention, longest
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        defaults: Any = model.generation_config or model.config
        start = defaults.decoder_start_token_id
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        start = defaults.bos_token_id if start is None else start
        refuse((start is None, f"{name}: neither its config nor its generation config has a decoder_start_token_id"))
        forced = getattr(defaults, "forced_bos_token_id", None)
        self.prefix = [start] if forced is None else [start, forced]

    @property
    def dummy(self) -> Tensor:  # [1, 1, D]
        """Zeros to pass as encoder states if cross attention has its keys and values already: nothing reads them."""
        width = self._decoder.config
        size = getattr(width, "cross_attention_hidden_size", None) or self._encoder.config.hidden_size
        return torch.zeros(1, 1, size, dtype=self._model.dtype, device=self._model.device)

    @torch.no_grad()
    def encode(self, sources: Sequence[Source]) -> Tensor:  # [n, S, D]
        """Return the states of sources of equal length: padding would change them, and so a text, by rounding."""
        if known := [source.states for source in sources if isinstance(source, Encoded)]:
            return torch.stack(known)
        tokens = torch.tensor(sources, device=self._model.device)
        with using_attention(self._model, self._attention):
            output = self._encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        return output.last_hidden_state

    @torch.no_grad()
    def keys_and_values(self, states: Tensor) -> list[Any]:  # [n, S, D] -> layers with keys and values [n, H, S, d]
        """Return each layer's keys and values of cross attention, computed by the decoder's own code."""
        start = torch.full((len(states), 1), self.prefix[0], device=states.device)
        with using_attention(self._model, self._attention):
            output = self._decoder(input_ids=start, encoder_hidden_states=states, use_cache=True)
        return output.past_key_values.cross_attention_cache.layers

    def arguments(
        self,
        tokens: Tensor,  # [B, T]
        sources: Sequence[Sequence[int]],
    ) -> dict[str, Tensor]:
        """Return the arguments of the decoder's own forward pass over whole texts [B, T], given their B sources."""
        lengths = torch.tensor([len(source) for source in sources], device=tokens.device)
        # One at a time: padding in the encoder would change the states, see `encode`. The decoder's mask hides it.
        rows = [self.encode([tuple(source)])[0] for source in sources]
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        seen = torch.arange(states.shape[1], device=tokens.device) < lengths[:, None]
        masks = {"attention_mask": torch.ones_like(tokens), "encoder_attention_mask": seen.long()}
        return {"input_ids": tokens, "encoder_hidden_states": states, **masks}
