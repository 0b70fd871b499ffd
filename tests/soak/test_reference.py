"""The reference run resumes where it was killed and gives the same text and heads."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from soak.running import finish, rows_of, sha, start

from benchmarks.reference_chat import HEADS

KILLS = 4


def outcome(folder: Path) -> dict[str, str]:
    """Checksums of text and heads; reports are left out, because adaptive drafting depends on timings."""
    heads = {head: sha(folder / head / "speculator" / "model.safetensors") for head in HEADS}
    return {"text": rows_of(folder / "text" / "rows"), **heads}


def test_a_killed_reference_run_gives_the_same_text_and_heads(tmp_path):
    suite, cache = tmp_path / "spec.jsonl", tmp_path / "cache"
    rows = [{"category": name, "turns": ["Who are you?", "Why?"]} for name in ("writing", "math")]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def argv(name: str) -> list[str]:
        flags = ["--recipe", "chat", "--rehearse", "--suite", str(suite), "--output", str(tmp_path / name)]
        return ["-m", "benchmarks.reference", *flags]

    began = time.monotonic()
    finish(argv("whole"), cache, timeout=1200)
    length, draw, killed = time.monotonic() - began, random.Random(0), 0
    for _ in range(KILLS):
        process = start(argv("cut"), cache, start_new_session=True)
        wait = draw.uniform(0.08, 0.3) * length
        time.sleep(wait)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
        print(
            f"killed after {wait:.0f} s of {length:.0f}: {sorted(path.name for path in (tmp_path / 'cut').iterdir())}"
        )
    assert killed >= 2
    finish(argv("cut"), cache, timeout=1200)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
    assert len(json.loads((tmp_path / "cut" / "run.json").read_text())) == 2 + 2 * len(HEADS)
