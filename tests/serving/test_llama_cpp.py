"""llama.cpp serves the GGUF files that we export, which are its converter's: text and drafted tokens are ours."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import DFLASH, DFLASH2
from serving.processes import process_group
from serving.shared import fitted, own_steps
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from speculator import Target
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.decoding.engine import Engine
from speculator.heads import (
    DSparkSpeculator,
    DSparkSpeculatorConfig,
    Eagle3Speculator,
    Eagle3SpeculatorConfig,
)
from speculator.target.gguf.file import is_gguf, read_tokenizer

DRAFTED, NEW = 4, 40
BLOCK = {"num_hidden_layers": 2, "markov_rank": 16, "mask_token_id": 4}
FLAGS = {"fc_norm": False, "norm_output": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "dspark": (DSparkSpeculatorConfig, "dspark", BLOCK),
    "fill-in dspark": (DSparkSpeculatorConfig, "dspark", {**BLOCK, "sample_from_anchor": False}),
    "causal dspark": (DSparkSpeculatorConfig, "dspark", {**BLOCK, "is_causal": True}),
    "dspark, window": (DSparkSpeculatorConfig, "dspark", {**BLOCK, "sliding_window": 8}),
    "dspark, draft vocabulary": (DSparkSpeculatorConfig, "dspark", {**BLOCK, "draft_vocab_size": 2000}),
    "dflash": (DSparkSpeculatorConfig, "dflash", {**BLOCK, **DFLASH}),
    "dflash 2": (DSparkSpeculatorConfig, "dflash2", {**BLOCK, **DFLASH2}),
    "eagle3": (Eagle3SpeculatorConfig, "eagle3", FLAGS),
    "eagle3, norms": (
        Eagle3SpeculatorConfig,
        "eagle3",
        {**FLAGS, "norm_before_fc": True, "norm_before_residual": True},
    ),
    "eagle3, llama3 rope": (Eagle3SpeculatorConfig, "eagle3", {**FLAGS, "rope_parameters": LLAMA3}),
}


@pytest.fixture(scope="module")
def llama_cpp(requested) -> Path:
    """Environment with llama.cpp's sources and its server."""
    folder = Path(os.environ["SPECULATOR_SERVING"]).resolve() / "llama_cpp"
    if not (folder / "server").exists():
        pytest.skip(f"{folder} is missing or incomplete: `make serving` builds it from PyPI")
    return folder


@pytest.fixture(scope="module")
def base(llama_cpp, tmp_path_factory) -> Path:
    """A small random Llama with SmolLM2's tokenizer, one of those that llama.cpp's converter knows."""
    name = os.environ["REFERENCE_TARGET"]
    try:
        folder, file = (str(Path(name).parent), Path(name).name) if is_gguf(name) else (name, None)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    except OSError:
        pytest.skip(f"{name} is not on this machine")
    made = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **shape))
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    convert(llama_cpp, made, made / "target.gguf")
    return made


def convert(llama_cpp: Path, folder: Path, output: Path, *more: object) -> None:
    sources = llama_cpp / "source" / "vendor" / "llama.cpp"
    command = [llama_cpp / "bin" / "python", sources / "convert_hf_to_gguf.py", folder, *more]
    command += ["--outtype", "f32", "--outfile", output]
    environment = {**os.environ, "PYTHONPATH": str(sources / "gguf-py")}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafted_token_is_ours(kind, llama_cpp, base, tmp_path, report):
    target = Target.load(str(base), dtype="float32")
    prompt = target.tokenizer("The quick brown fox jumps over the lazy dog.")["input_ids"]
    config_class, layout, changes = KINDS[kind]
    torch.manual_seed(1)
    about = {"base_model_name_or_path": str(base), "aux_layers": [2, 4, 5], "n_predict": DRAFTED}
    config = config_class.for_target(target.config, **about, **changes)
    head = bind(
        {DSparkSpeculatorConfig: DSparkSpeculator, Eagle3SpeculatorConfig: Eagle3Speculator}[config_class](config),
        target,
    )
    if head.draft_tokens is not None:
        text = set(Engine(target).generate([prompt], max_new_tokens=NEW).tokens[0])
        others = [token for token in range(target.vocab_size) if token not in text]
        head.draft_tokens.copy_(torch.tensor(sorted([*text, *others[: len(head.draft_tokens) - len(text)]])))
        head = bind(head, target)
    for name, weight in head.named_parameters():
        if weight.ndim == 1 and "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0, std=0.2)
    # The server logs no token of a selector's draft, only how many were accepted, so many have to be.
    logged = layout != "dflash2"
    head = fitted(head, target, [prompt], NEW, steps=8 if logged else 16)
    save(head, tmp_path / "head", layout_of(layout, head))
    convert(llama_cpp, tmp_path / "head", tmp_path / "theirs.gguf", "--target-model-dir", base)
    head.config.base_model_name_or_path = str(base / "target.gguf")
    save(head, tmp_path / "gguf", layout_of("gguf", head))
    compared = compare(tmp_path / "gguf" / "head.gguf", tmp_path / "theirs.gguf")

    drafts, accepted, text = own_steps(target, head, DRAFTED, prompt, NEW)
    found = served(
        llama_cpp,
        base / "target.gguf",
        tmp_path / "gguf" / "head.gguf",
        layout.removesuffix("2"),
        prompt,
        tmp_path / "log",
    )
    assert found["tokens"] == text
    theirs, sizes, counts = drafts_of(tmp_path / "log")
    whole = [i for i, size in enumerate(sizes) if size == DRAFTED]  # the last ones are cut to what is asked for
    assert len(whole) >= 5
    report(f"{kind}: {compared} tensors and all keys are the converter's")
    report(f"{kind}: {sum(counts)} of {sum(sizes)} tokens accepted")
    assert [counts[i] for i in whole] == accepted[: len(whole)]
    if logged:
        equal = sum(theirs[i] == drafts[i] for i in whole)
        report(f"{kind}: {equal} of {len(whole)} drafts are ours")
        assert equal == len(whole)
    else:
        assert len({counts[i] for i in whole}) >= 3, "steps too alike to tell drafts apart"


def compare(ours: Path, theirs: Path) -> int:
    """Compare an exported file with the converter's and return the number of tensors; the model's names may differ."""
    read = [gguf.GGUFReader(file) for file in (ours, theirs)]
    mine, other = ({each.name: each for each in reader.tensors} for reader in read)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        same = mine[name].tensor_type == tensor.tensor_type and (mine[name].shape == tensor.shape).all()
        # transformers computes the factors of a rope in another order
        near = name == "rope_freqs.weight" and np.allclose(mine[name].data, tensor.data, rtol=1e-6)
        assert same, name
        assert near or mine[name].data.tobytes() == tensor.data.tobytes(), name
    names = ("GGUF.", "general.name", "general.size_label", "general.tags")
    keys, its = ({k: f.contents() for k, f in reader.fields.items() if not k.startswith(names)} for reader in read)
    assert keys == its
    return len(mine)


@contextmanager
def running(llama_cpp: Path, target: Path, log: Path, *flags: object) -> Iterator[str]:
    """Run llama-server with a target, and give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    binary = llama_cpp / "source" / "build" / "bin" / "llama-server"
    command = [binary, "-m", target, "--port", port, "-t", 1, "-np", 1, "-c", 512, *flags]
    with log.open("wb") as file, process_group(list(map(str, command)), stdout=file, stderr=file) as server:
        address = f"http://127.0.0.1:{port}"
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:
                assert server.poll() is None, log.read_text(errors="replace")[-3000:]
                time.sleep(0.5)
        yield address


def answer_of(address: str, asked: dict) -> dict:
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def served(llama_cpp: Path, target: Path, head: Path, kind: str, prompt: list[int], log: Path) -> dict:
    """Serve a target with a head, and return the answer to a greedy request."""
    flags = f"--spec-type draft-{kind} --spec-draft-n-max {DRAFTED} -tb 1 -td 1 -tbd 1 -lv 5 -fa off"
    caches = "-ctk f32 -ctv f32 -ctkd f32 -ctvd f32"
    with running(llama_cpp, target, log, "-md", head, *flags.split(), *caches.split()) as address:
        asked = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        return answer_of(f"{address}/completion", asked)


def drafts_of(log: Path) -> tuple[list[list[int]], list[int], list[int]]:
    """Read the drafts, where they are logged, their lengths and the numbers of accepted tokens from a server's log."""
    drafts: list[list[int]] = []
    sizes: list[int] = []
    counts: list[int] = []
    draft: dict[int, int] = {}
    for line in log.read_text(errors="replace").splitlines():
        if found := re.search(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+)", line):
            draft[int(found[1])] = int(found[2])
        elif found := re.search(r"accepted\s+(\d+)/\s*(\d+) draft tokens", line):
            drafts.append([draft[place] for place in sorted(draft)][: int(found[2])])
            sizes.append(int(found[2]))
            counts.append(int(found[1]))
            draft = {}
    return drafts, sizes, counts


ODD = [
    *(" a", "  a", "   a\t b\n\n\n c  ", "\r\n x\r", "12345.01 1 23 456,789", "    42\n  37.8", "don't I'LL we've"),
    *(
        "na\u00efve caf\u00e9 e\u0301 \u200b\ufeff \u00a0x",
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002",
        "\U0001f642 \u00bd \u00b2 \u2460",
    ),
    *("def f(x):\n\treturn x**2  # 4 spaces    end\n", "A_b-c/d\\e|f x=1;y=2", "\n" * 9, " " * 17, "a" * 200),
    *("<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|> <|im_x|> <|im_start"),
]


def test_odd_text_has_the_tokens_of_llama_cpp(llama_cpp, base, tmp_path, report):
    """Also 60 files of Python's library; by the file that REFERENCE_TARGET names, if it is one."""
    name = os.environ["REFERENCE_TARGET"]
    file = Path(name) if is_gguf(name) else base / "target.gguf"
    tokenizer = read_tokenizer(str(file))
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    texts = [*ODD, *(each.read_text(errors="replace")[:3000] for each in library)]
    with running(llama_cpp, file, tmp_path / "log") as address:
        for text in texts:
            asked = {"content": text, "add_special": False, "parse_special": True}
            theirs = answer_of(f"{address}/tokenize", asked)["tokens"]
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == theirs, text[:200]
    report(f"{file.name}: {len(texts)} texts have llama.cpp's tokens")
