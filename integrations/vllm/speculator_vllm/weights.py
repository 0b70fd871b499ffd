"""Weights of a running server's drafter from a folder, for `python -m speculator adapt --layout`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FolderInfo(WeightTransferUpdateInfo):
    """Folder with model.safetensors, on the server's machine."""

    folder: str


class FolderEngine(WeightTransferEngine[WeightTransferInitInfo, FolderInfo]):
    """Reads the drafter's weights from a folder; each worker reads them itself."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, FolderInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.target = model

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """There is no connection."""

    def start_weight_update(self) -> None:
        """The update begins with its folder, so that a wrong one changes nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # nothing is left to wait for

    def receive_weights(self, update_info: FolderInfo) -> None:
        with safe_open(Path(update_info.folder) / "model.safetensors", "pt") as file:
            weights = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
        # vLLM shares the target's output matrix with a drafter whose matrix was equal when it was loaded. Loading
        # another one would overwrite the target's, and change its texts.
        owned = set(self.target.modules())
        shared = {name.rpartition(".")[2] for name, module in self.model.named_modules() if module in owned}
        for name, _ in weights:
            if name.rpartition(".")[0].rpartition(".")[2] in shared:  # the prefixes of a file differ from vLLM's
                raise ValueError(f"{name}: the drafter shares it with the target: restart the server with this head")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is no connection."""
