"""Training steps of the `speculators` library (0.9.0), in that library's environment; `benchmarks.peer` starts this.

    python -m benchmarks.speculators_step FOLDER

FOLDER holds the head in the library's layout, `inputs.safetensors`, and the arguments of the model's forward pass as
`call.json`. The first line of the output describes the steps; every line of the input then runs one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config

from benchmarks.stepping import Stepper


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is no answer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    call = json.loads((folder / "call.json").read_text())
    dtype = getattr(torch, call.pop("dtype"))
    config = SpeculatorModelConfig.from_pretrained(folder)
    on_cpu = device.type == "cpu"  # the defaults, flex attention and fused losses, need triton
    config.transformer_layer_config._attn_implementation = "sdpa" if on_cpu else "simple_flex_attention"
    implementation = "eager" if on_cpu else "fused"
    call["loss_config"] = resolve_loss_config(call.pop("loss"), implementation)
    if "max_anchors" in call:
        call["tv_loss_fn"] = resolve_loss_config("tv", implementation)["tv"][0]
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).to(device).train()
    given = {
        name: x.to(device, dtype if x.is_floating_point() else x.dtype)
        for name, x in load_file(folder / "inputs.safetensors").items()
    }

    def objective() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return model(**given, **call)[1]

    stepper = Stepper(model.parameters(), objective, fused=False)

    def step() -> float:
        started = time.perf_counter()
        stepper.step()
        if not on_cpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    step()
    loss = stepper.loss.item()
    step()
    answer(loss=loss, bytes=stepper.peak(), version=version("speculators"), torch=torch.__version__)
    for _ in sys.stdin:
        answer(seconds=step())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
