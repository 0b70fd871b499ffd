"""`make gpu`, rehearsed on a make-believe GPU: every part gives its figures, and no part can spoil the others."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from chat_targets import PLAIN, tiny_llama, tokenizer_of
from conftest import tiny_head
from make_believe_gpu import gpu as make_believe
from torch.nn import functional

from benchmarks import gpu, recipe, shapes, variants
from eval import in_server
from speculator.__main__ import main as speculator
from speculator.cli import serve
from speculator.kernels import cuda_graphs
from train.command_line import parse

__all__ = ["make_believe"]
RECIPE = """
speculator: {{architecture: {architecture}, n_predict: 3, inner_dim: 16, initialise: random, options: {options}}}
data: {{seq_length: 64}}
stage1: {{per_device_train_batch_size: 2, bf16: true}}
"""
OPTIONS = {"mlp": "{}", "eagle3": "{aux_layers: [0, 1]}", "dspark": "{aux_layers: [0, 1], anchors: 8}"}
IN_THIS_PROCESS = ("steps", "mlp", "eagle3", "real", "plain_step", "prefill", "variants", "dspark")


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small shapes; environment variables are put back."""
    changes = {"_PRESET": "tiny", "_ROWS": (1,), "_CONTEXT": 40, "_BLOCKS": 1, "_MICRO_BATCHES": 2}
    changes |= {"_PROMPTS": ((2, 24),), "_NEW_TOKENS": 3, "_HEAD": str(tmp_path / "head")}
    for name, value in changes.items():
        monkeypatch.setattr(gpu, name, value)
    for name in gpu._OFFLINE:
        monkeypatch.setenv(name, os.environ.get(name, "0"))


def test_all_parts_of_this_process_give_their_figures(make_believe, small, monkeypatch, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "target")
    tokenizer_of(PLAIN).save_pretrained(tmp_path / "target")
    tiny_head(vocab_size=282).save_pretrained(tmp_path / "head")
    for name, options in OPTIONS.items():
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(architecture=name, options=options))
        monkeypatch.setitem(gpu._CONFIGS, name, str(tmp_path / f"{name}.yaml"))
    monkeypatch.setattr(recipe, "_LOGGED", 1)
    monkeypatch.setattr(shapes, "bandwidth", lambda: 3e12)  # two copies of 4 GiB
    monkeypatch.setattr(shapes, "matrix_rate", lambda: 7e14)
    monkeypatch.setattr(gpu, "kernels", lambda session, part, work: work())  # there are none
    monkeypatch.setattr(cuda_graphs, "enabled", False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    only = [word for name in IN_THIS_PROCESS for word in ("--only", name)]
    output = tmp_path / "out"
    assert gpu.main(["--output", str(output), "--target", str(tmp_path / "target"), *only]) == 0
    found = lines(output)
    states = {line["part"]: line["state"] for line in found if "state" in line}
    assert states == dict.fromkeys(("machine", *IN_THIS_PROCESS), "finished"), (output / "errors.txt").read_text()
    assert [(line["rows"], line.get("variant")) for line in found if "plain_ms" in line] == [
        (1, None),
        (1, "compiled"),
        (1, "compiled, merged"),
    ]
    assert all(line["mfu"] > 0 and line["planned_gb"] >= 0 for line in found if "mfu" in line)
    assert {line["identical_texts"] for line in found if "identical_texts" in line} == {"4 of 4"}
    assert capsys.readouterr().out.splitlines() == (output / "results.jsonl").read_text().splitlines()


def test_variants_of_a_targets_layers_give_its_logits_with_fewer_products(monkeypatch):
    model, linear, called = tiny_llama(), functional.linear, []

    def noting(function, **_):
        return lambda *given, **named: called.append(function.__name__) or function(*given, **named)

    def logits() -> torch.Tensor:
        called.clear()
        with torch.no_grad():
            return model(torch.tensor([[1, 2, 3, 4]])).logits

    monkeypatch.setattr(torch, "compile", noting)
    monkeypatch.setattr(functional, "linear", noting(linear))
    expected, before, layers = logits(), Counter(called), model.config.num_hidden_layers
    with variants.compiled(model), variants.merged(model):
        torch.testing.assert_close(logits(), expected)
    changes = {"linear": -2 * layers, "forward": layers, "apply_rotary_pos_emb": layers}
    assert {name: Counter(called)[name] - before[name] for name in changes} == changes
    logits()
    assert Counter(called) == before, "all is as it was"


def test_a_part_that_fails_or_hangs_does_not_end_the_others_and_finished_ones_are_kept(small, tmp_path, monkeypatch):
    ran = []

    def works(session):
        ran.append("works")
        session.say("works", figure=1)

    def fails(session):
        ran.append("fails")
        raise RuntimeError("no such kernel\nmore")

    def hangs(session):
        while True:
            with contextlib.suppress(Exception):  # as torch does with errors of its compiler
                time.sleep(0.01)

    limits = {"machine": 9, "hangs": 0.05}
    parts = {work.__name__: gpu.Part(work, limits.get(work.__name__, 9)) for work in (fails, hangs, works)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "machine", lambda session: None)
    for _ in range(2):
        assert gpu.main(["--output", str(tmp_path)]) == 0
    assert ran == ["fails", "works", "fails"]
    states = {line["part"]: line["state"] for line in lines(tmp_path) if "state" in line}
    assert states["fails"] == "failed: RuntimeError: no such kernel"
    assert states["hangs"].startswith("failed: OutOfTime")
    assert {"part": "works", "figure": 1} in [{k: v for k, v in line.items() if k != "at"} for line in lines(tmp_path)]
    assert "no such kernel" in (tmp_path / "errors.txt").read_text()
    assert gpu.main(["--output", str(tmp_path), "--target", "another"]) == 0
    assert ran == ["fails", "works", "fails", "fails", "works"]
    monkeypatch.setattr(gpu, "_CODE", ("benchmarks",))  # other code than that of the results
    monkeypatch.setattr(gpu, "_SECONDS", 1)
    assert gpu.main(["--output", str(tmp_path)]) == 0
    assert ran == ["fails", "works", "fails", "fails", "works"]
    assert [line.get("state") for line in lines(tmp_path)[-4:]] == ["not begun: no time is left"] * 4


def test_a_child_ends_with_its_descendants_that_have_sessions_of_their_own(tmp_path):
    """Such as a server that a benchmark starts."""
    starts = "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    code = f"import subprocess, time; {starts}; time.sleep(600)"
    session, children = gpu.Session(tmp_path, ""), []

    def waits() -> None:
        with gpu.at_most(60), session.child("child", [sys.executable, "-c", code]) as process:
            children.append(process)
            while not (tmp_path / "child.log").read_text():
                time.sleep(0.02)
            signal.raise_signal(signal.SIGALRM)

    with pytest.raises(gpu.OutOfTime):
        waits()
    assert children[0].returncode == -signal.SIGKILL
    server = int((tmp_path / "child.log").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie where nothing waits for orphans
        while psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_make_gpu_installs_nothing_and_its_commands_are_valid(tmp_path):
    (tmp_path / "Makefile").write_text(Path("Makefile").read_text())
    make = ["make", "--no-print-directory", "-n", "gpu", "PYTHON=py"]  # "make test" runs this with flags of its own
    shown = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["py", "-m", "benchmarks.gpu"]
    config = parse(gpu._training(tmp_path / "run", ["--deterministic", "true"])[2:])
    assert config.report_to == "none"
    for path in gpu._CONFIGS.values():
        assert parse(["--config", path]).stage1.bf16
    marked = {str(file) for file in Path("tests").rglob("test_*.py") if "mark.gpu" in file.read_text()}
    assert marked - {str(Path(__file__).relative_to(Path.cwd()))} == set(gpu._TESTS)


def test_the_command_of_the_server_part_and_its_server_are_valid(tmp_path, monkeypatch):
    loads, servers = [], []
    monkeypatch.setattr(in_server, "run", loads.append)
    monkeypatch.setattr(serve, "run", servers.append)
    for command in gpu._serving("M", tmp_path, 8000):
        assert speculator(command[3:]) == 0
    assert (loads[0].clients, loads[0].server_url) == ([8, 128], "http://127.0.0.1:8000")
    assert loads[0].max_prompts == 4 * 128, "the least for 128 clients"
    assert (servers[0].port, servers[0].max_num_seqs) == (8000, 128)


LACKING = ["datasets", "dill", "multiprocess", "openai", "fastapi", "starlette", "uvicorn", "prometheus_client", "gguf"]


def test_steps_and_the_gpu_tests_need_no_other_packages_than_documented():
    """The module's docstring lists the packages, by part."""
    assert set(LACKING) <= set(re.findall(r"\w+", gpu.__doc__))
    code = f"""
import sys
sys.modules |= dict.fromkeys({LACKING})
import benchmarks.gpu, benchmarks.step, benchmarks.variants
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", *{gpu._TESTS}]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_weights_of_two_runs_are_compared(tmp_path):
    for name, change in (("a", 0.0), ("b", 0.25)):
        head = tiny_head()
        with torch.no_grad():
            next(head.parameters()).view(-1)[3] += change
        head.save_pretrained(tmp_path / name / "speculator")
    assert gpu.largest_difference(tmp_path / "a", tmp_path / "b") == pytest.approx(0.25, abs=1e-6)
