"""`speculator dequantise`: write the model of a GGUF file as a folder of safetensors, for servers that read no GGUF."""

from __future__ import annotations

import argparse

import torch

from speculator.checkpoints.files import make_readable
from speculator.errors import refuse
from speculator.files import check_new_folder, new_folder
from speculator.target.gguf.file import is_gguf
from speculator.target.loading import read_target


def run(arguments: argparse.Namespace) -> None:
    """Write the folder `--output`, which appears when it is complete."""
    refuse((not is_gguf(arguments.target), f"--target {arguments.target}: not a GGUF file"))
    check_new_folder(arguments.output)
    with new_folder(arguments.output) as scratch:
        tokenizer, model = read_target(arguments.target, None, arguments.dtype, torch.device("cpu"))
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in scratch.glob("*.safetensors"):
            make_readable(file)
    print(f"{arguments.output}: the weights of {arguments.target} in {arguments.dtype}")
