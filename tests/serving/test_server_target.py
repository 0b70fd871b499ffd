"""Training with a target in vLLM 0.32, from hidden states to the counters of the exported head's server."""

import gc
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from server_training import apart, trained
from serving.shared import ENVIRONMENT

from data.mixture import PYTHON_SOURCES
from eval.suites import held_out
from speculator import Target
from speculator.checkpoints.loading import bind
from speculator.heads import ARCHITECTURES
from speculator.target.remote.server_target import ServerTarget
from train import server_command

SOURCES = ("train", "data", "eval")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LENGTH = 64
SHAPES = {
    "mlp": {"inner_dim": 128},
    "eagle3": {"inner_dim": 256, "draft_vocab_size": 4096},
    "dspark": {"inner_dim": 256, "num_hidden_layers": 1, "mask_token_id": 3},
}
RUN = {
    "speculator.architecture": "eagle3",
    "speculator.n_predict": 3,
    "speculator.draft_vocab_size": 4096,
    "data.sources": "[python-sources]",
    "data.seq_length": 128,
    "data.max_tokens": 40_000,
    "eval.validation_rows": 4,
    "eval.validation_prompts": 2,
    "eval.max_prompts": 2,
    "eval.max_new_tokens": 16,
    "stage1.max_steps": 60,
    "stage1.learning_rate": 1e-3,
    "stage1.per_device_train_batch_size": 2,
    "stage1.warmup_steps": 6,
    "stage1.eval_steps": 30,
    "stage1.save_steps": 30,
    "stage2.max_steps": 10,
    "stage2.per_device_train_batch_size": 2,
    "stage2.warmup_steps": 2,
    "stage2.eval_steps": 10,
    "stage2.save_steps": 10,
    "stage2.generate.max_rows": 20,
    "stage2.generate.max_new_tokens": 32,
    "report_to": "none",
}


@pytest.fixture
def vllm(start_in):
    """`vllm(words)` starts the server of a `vllm serve` line, with the connector for CPUs; returns it and its URL."""

    def start(words: list[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [word.replace("ExampleHiddenStatesConnector", "CpuHiddenStatesConnector") for word in words[3:]]
        for at, (flag, value) in enumerate(pairwise(words)):
            if flag == "--kv-transfer-config":
                words[at + 1] = json.dumps({**json.loads(value), "kv_connector_module_path": "cpu_connector"})
        server = ["-m", "vllm.entrypoints.openai.api_server", "--port", port, "--enforce-eager", "--max-num-seqs", 8]
        process, log = start_in("vllm", *server, *words, **ENVIRONMENT, PYTHONPATH=str(HERE))
        end = time.monotonic() + 600
        while time.monotonic() < end:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            except OSError:
                time.sleep(1)
            else:
                return process, f"http://127.0.0.1:{port}/v1"
        raise AssertionError(f"not healthy after ten minutes: {log.read_text()[-2000:]}")

    return start


@pytest.fixture
def storage():
    """A folder on a RAM disk, which must be empty at the end."""
    made = Path("/dev/shm") / f"speculator-test-{os.getpid()}"
    yield made
    left = [file for file in made.rglob("*") if file.is_file()]
    shutil.rmtree(made, ignore_errors=True)
    assert not left


def line_of(folder: Path, layers: list[int], longest: int, storage: Path, capsys) -> list[str]:
    """Words of the line that `speculator server-command` prints for a run."""
    flags = {**RUN, "config": ROOT / "tests/plain.yaml", "target.name_or_path": folder, "target.dtype": "float32"}
    if len(layers) == 1:
        flags |= {"speculator.architecture": "mlp"}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert server_command.main([*argv, "--storage", str(storage)]) == 0
    words = shlex.split(capsys.readouterr().out)
    hf_config = json.loads(dict(pairwise(words))["--speculative-config"])["draft_model_config"]["hf_config"]
    assert hf_config == {"eagle_aux_hidden_state_layer_ids": layers}
    return [*words[:3], "--model", *words[2:]]


@pytest.mark.parametrize("kinds", [("mlp",), ("eagle3",), ("dspark",)], ids=" ".join)
def test_ten_steps_are_those_of_the_target_here(kinds, smollm2, vllm, storage, tmp_path, report, capsys):
    local = Target.load(str(smollm2), dtype="float32")
    texts = held_out(PYTHON_SOURCES, local.tokenizer, LENGTH, 16).prompts
    rows = [{"input_ids": text, "document_ids": [0] * (20 + i) + [1] * (44 - i)} for i, text in enumerate(texts)]
    layers = [30] if kinds == ("mlp",) else [2, 15, 27, 30]
    _, url = vllm(line_of(smollm2, layers, LENGTH, storage, capsys))
    target = ServerTarget.connect(str(smollm2), [url], dtype="float32")
    target.check(layers[:-1], LENGTH)
    for kind in kinds:
        found = {}
        for name, where in (("here", local), ("server", target)):
            torch.manual_seed(0)
            head_class = ARCHITECTURES[kind]
            head = head_class(head_class.config_class.for_target(where.config, n_predict=3, **SHAPES[kind]))
            began = time.perf_counter()
            found[name] = *trained(where, bind(head, where), rows, tmp_path / kind / name), time.perf_counter() - began
            del head
            gc.collect()  # a trainer and its callbacks hold each other
        (expected, gradients, _, seconds), (losses, ours, log, longer) = found["here"], found["server"]
        loss = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        far = apart(ours, gradients)
        waited = [entry["waiting_for_servers"] for entry in log if "waiting_for_servers" in entry]
        report(
            f"{kind}: losses within {loss:.1e}, gradients within {far:.1e}; {longer / seconds:.2f} times the seconds, "
            f"waiting {sum(waited) / len(waited):.0%}"
        )
        assert loss < 1e-4
        assert far < 1e-3
    target.close()


def test_a_head_trained_with_a_server_accepts_in_vllm_what_its_counters_say(
    smollm2, vllm, storage, tmp_path, report, capsys
):
    process, url = vllm(line_of(smollm2, [2, 15, 27, 30], 160, storage, capsys))
    flags = {**RUN, "config": "tests/plain.yaml", "target.name_or_path": smollm2, "target.dtype": "float32"}
    flags |= {"target.server": url, "output_dir": tmp_path / "run"}
    command = [sys.executable, "train.py", *(w for name, value in flags.items() for w in (f"--{name}", str(value)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    process.terminate()
    process.wait(60)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    export = shlex.split(said["export"].strip())
    subprocess.run([sys.executable, *export[1:]], cwd=ROOT, check=True)
    words = shlex.split(said["serve"].strip())
    served = [
        "vllm",
        "serve",
        words[2],
        "--model",
        words[2],
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        *words[3:],
    ]
    _, url = vllm(served)
    measure = shlex.split(said["measure"].strip())
    measure[measure.index("--server") + 1] = url
    small = ["--max_prompts", "8", "--max_new_tokens", "48", "--temperature", "0"]
    subprocess.run([sys.executable, *measure[1:], *small], cwd=ROOT, check=True)
    result = json.loads(Path(measure[measure.index("--output") + 1], "served.json").read_text())
    (row,), forecast = result["suites"], result["forecast"]
    report(
        f"vLLM: {row['steps']} drafts, accepted per position {row['accepted_per_position']}, acceptance length "
        f"{1 + row['accepted_tokens'] / row['steps']:.2f}; forecast {forecast['acceptance_length']:.2f}"
    )
    assert row["steps"] > 0
    assert len(row["accepted_per_position"]) == 3
    assert 0 <= row["accepted_tokens"] <= 3 * row["steps"]
