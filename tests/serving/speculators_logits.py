"""Logits of a head in the `speculators` library; runs in that library's environment.

Usage: speculators_logits.py HEAD INPUTS OUTPUT. INPUTS holds aux_hidden [1, S, nD], tokens [1, S] and documents [1, S].
The script writes the logits of each step, and the head as the library saves it, to OUTPUT.
"""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def main(head: str, inputs: str, output: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    logits = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out))
    with torch.no_grad():
        model(given["aux_hidden"], given["tokens"], given["documents"], ttt_steps=int(given["steps"]))
    model.save_pretrained(Path(output) / "saved")
    save_file({"logits": torch.stack(logits)}, Path(output) / "logits.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
