"""`python -m speculator adapt` against a real server, killed while it learns, gates and swaps."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import httpx
import pytest
import yaml
from soak.running import finish, kill, start

SETTINGS = {
    "data": {"seq_length": 64},
    "stage1": {
        **{"max_steps": 60, "learning_rate": 1e-2, "warmup_steps": 2, "eval_steps": 10, "save_steps": 10},
        **{"per_device_train_batch_size": 4},
    },
    "stage2": {"max_steps": 0},
    "eval": {"validation_rows": 2, "validation_prompts": 3, "max_prompts": 2, "max_new_tokens": 30, "tune_prompts": 2},
    "report_to": "none",
}
BODY = {"prompt": [9, 6, 7], "max_tokens": 40, "temperature": 0, "return_token_ids": True}
HEADERS = {"Authorization": "Bearer secret"}
MOMENTS = (
    "traffic",
    "run/config.yaml",
    "run/stage1/checkpoint-10",
    "run/speculator",
    "run/eval/report.md",
    "gate.json",
    "round.json",
)


@pytest.fixture
def server(inputs, cache, tmp_path):
    """URL of a server that recorded 300 answers to the folder `traffic`."""
    argv = ["-m", "speculator", "serve", "--target", str(inputs["TARGET"]), "--speculator", str(inputs["MLP"])]
    argv += ["--port", "0", "--record", str(tmp_path / "traffic"), "--record_share", "1"]
    process = start([*argv, "--allow_load", "--api_key", "secret"], cache)
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())):
        assert process.poll() is None
    url = found.group()
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:
        for number in range(300):
            client.post("/v1/completions", json={**BODY, "prompt": [number % 250, 6, 7]}).raise_for_status()
        yield client
    kill(process)


@pytest.mark.parametrize("with_children", [True, False])
def test_adapt_killed_at_any_moment_is_resumed_or_refused_in_a_line(with_children, server, inputs, cache, tmp_path):
    out, config = tmp_path / "out", tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    text = lambda: server.post("/v1/completions", json=BODY).json()["choices"][0]["token_ids"]  # noqa: E731
    before = text()
    argv = ["-m", "speculator", "adapt", "--server", str(server.base_url), "--record", str(tmp_path / "traffic")]
    argv += ["--speculator", str(inputs["MLP"]), "--output", str(out), "--config", str(config), "--api_key", "secret"]
    argv += ["--every_tokens", "1000", "--rounds", "1", "--gate_flags", "--max_new_tokens 40 --max_prompts 8"]
    logs = (tmp_path / f"log-{number}" for number in count())
    for moment in MOMENTS:
        while not (out / "round-001" / moment).exists():
            log = next(logs)  # a command that is left behind goes on writing to the last one
            with log.open("w") as stream:
                process = start(argv, cache, stderr=stream, start_new_session=True)
            while process.poll() is None and not (out / "round-001" / moment).exists():
                time.sleep(0.01)
            if process.poll() is not None:
                assert process.returncode == 2
                assert not with_children, log.read_text()
                assert len(log.read_text().splitlines()) == 1, log.read_text()
                time.sleep(1)
                continue
            if with_children:
                os.killpg(process.pid, signal.SIGKILL)
            kill(process)
            if moment != "round.json":  # which is written when the server has the new head
                assert Path(os.readlink(out / "speculator")) == inputs["MLP"].resolve()
        assert text() == before
        if moment == "gate.json":  # so that there is a swap, whatever drafting is worth with a tiny target
            gate = out / "round-001" / moment
            gate.write_text(json.dumps({**json.loads(gate.read_text()), "accepted": True}))
    finish(argv, cache)
    outcome = json.loads((out / "round-001" / "round.json").read_text())
    assert outcome["outcome"] == "in use", outcome
    assert (out / "speculator").resolve() == Path(outcome["new"])
    assert text() == before
