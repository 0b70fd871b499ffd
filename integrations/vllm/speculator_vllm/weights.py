"""Weights of a running server's drafter from a folder, for `python -m speculator adapt --layout`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from speculator_vllm.model import MLPHead


@dataclass
class FolderInfo(WeightTransferUpdateInfo):
    """Folder with model.safetensors, on the server's machine."""

    folder: str


class FolderEngine(WeightTransferEngine[WeightTransferInitInfo, FolderInfo]):
    """Reads the drafter's weights from a folder on the server's machine; each worker process reads them itself."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, FolderInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module):
        super().__init__(config, vllm_config, device, model)
        self.target, self.first = model, Path(vllm_config.speculative_config.model)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: the update begins when its folder is known, so that a wrong one changes nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # nothing is left to wait for

    def receive_weights(self, update_info: FolderInfo) -> None:
        """Load a folder's weights; raise a ValueError if they don't fit the drafter or would overwrite the target's."""
        weights = read(Path(update_info.folder))
        # Loading replaces the weights one by one, so a tensor that does not fit is found before.
        self.check({name: tuple(weight.shape) for name, weight in weights})
        # vLLM shares the target's output matrix with a drafter whose matrix was equal when it was loaded. Loading
        # another one would overwrite the target's, and change its texts.
        owned = set(self.target.modules())
        shared = {name.rpartition(".")[2] for name, module in self.model.named_modules() if module in owned}
        for name, _ in weights:
            if name.rpartition(".")[0].rpartition(".")[2] in shared:  # the prefixes of a file differ from vLLM's
                raise ValueError(f"{name}: the drafter shares it with the target: restart the server with this head")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)

    def check(self, found: dict[str, tuple[int, ...]]) -> None:
        """Raise a ValueError unless `found` has the names and shapes of the head that the server began with.

        Nothing is checked if that is neither one of this plugin's heads nor in a local folder.
        """
        if isinstance(self.model, MLPHead):
            wanted = {name: tuple(place.shape) for name, place in self.model.names().items()}
        elif self.first.is_dir():
            with safe_open(self.first / "model.safetensors", "pt") as file:  # a large head is not read for its shapes
                wanted = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        else:
            return
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                shapes = (list(each[name]) if name in each else "not there" for each in (found, wanted))
                raise ValueError("{}: {}; in the head of this server {}".format(name, *shapes))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


def read(folder: Path) -> list[tuple[str, Tensor]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  not a dict
