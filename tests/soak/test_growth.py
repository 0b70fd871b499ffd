"""Memory and open files do not grow in 2,000 steps of training and of generation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import mean

import matplotlib
import psutil
import pytest
from soak.running import ROOT, start, train_argv

STEPS = 2000
GROWTH_MIB, GROWTH_FILES = 32, 2  # from the second quarter to the last
PICTURES = ROOT / "docs" / "reliability"


def watch(argv: list[str], cache: Path, working: Path) -> list[tuple[float, float, int]]:
    """Sample (seconds, MiB of memory, open files) of a command from the moment that `working` exists."""
    log = cache.with_suffix(".log")  # a pipe that nobody reads would fill up
    with log.open("w") as stream:
        process = start(argv, cache, stderr=stream)
    seen, began = psutil.Process(process.pid), time.monotonic()
    samples = []
    while process.poll() is None:
        if working.exists():
            try:
                samples.append((time.monotonic() - began, seen.memory_info().rss / 2**20, seen.num_fds()))
            except psutil.Error:
                break
        time.sleep(0.1)
    assert process.wait() == 0, log.read_text()[-2000:]
    return samples


def draw(name: str, samples: list[tuple[float, float, int]]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    PICTURES.mkdir(exist_ok=True)
    seconds, memory, files = zip(*samples, strict=True)
    figure, above = pyplot.subplots(figsize=(7, 3), layout="constrained")
    above.plot(seconds, memory, color="tab:blue")
    what = {"training": "steps of training", "generation": "rows of generation"}[name]
    title = f"{STEPS:,} {what}: memory (blue), open files (orange)"
    above.set(xlabel="seconds", ylabel="MiB", ylim=(0, 1.1 * max(memory)), title=title)
    below = above.twinx()
    below.plot(seconds, files, color="tab:orange")
    below.set(ylabel="open files", ylim=(0, 1.1 * max(files)))
    figure.savefig(PICTURES / f"{name}.png", dpi=100)
    pyplot.close(figure)


@pytest.mark.parametrize("name", ["training", "generation"])
def test_neither_memory_nor_files_grow(name, inputs, cache, tmp_path):
    if name == "training":
        sizes = {"stage1.max_steps": STEPS, "stage2.max_steps": 0, "stage1.eval_steps": 500, "stage1.save_steps": 500}
        argv = ["train.py", *train_argv(inputs, tmp_path / "run", **sizes)]
        working = tmp_path / "run" / "stage1"
    else:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(STEPS)))
        flags = ["--target", str(inputs["TARGET"]), "--speculator", str(inputs["MLP"]), "--prompts", str(prompts)]
        flags += ["--max_new_tokens", "16", "--batch_size", "4", "--output", str(tmp_path / "run")]
        argv, working = ["-m", "data", "generate", *flags], tmp_path / "run"
    samples = watch(argv, cache, working)
    draw(name, samples)
    quarter = len(samples) // 4
    assert quarter > 10
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    memory = [mean(each[1] for each in part) for part in (second, last)]
    files = [max(each[2] for each in part) for part in (second, last)]
    print(
        f"{name}: {memory[0]:.0f} -> {memory[1]:.0f} MiB, {files[0]} -> {files[1]} open files, {len(samples)} samples"
    )
    assert memory[1] < memory[0] + GROWTH_MIB
    assert files[1] <= files[0] + GROWTH_FILES
