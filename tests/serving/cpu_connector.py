"""vLLM's file connector of hidden states without CUDA streams and pinned memory, so that it runs on a CPU."""

import os
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as theirs


class CpuHiddenStatesConnector(theirs.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending):
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        states = theirs.extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
