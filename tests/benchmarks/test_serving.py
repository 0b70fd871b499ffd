"""The comparison of servers runs a server end to end."""

import json

import pytest
from conftest import exit_code

from benchmarks import serving


def test_a_server_command_names_its_port(target_folder, tmp_path):
    command = ["--target", str(target_folder), "--output", str(tmp_path), "--server", "ours=serve --port 8000"]
    assert exit_code(serving.main, command) == 2


@pytest.mark.soak
def test_a_server_answers_every_request(target_folder, tmp_path):
    command = ["--target", str(target_folder), "--output", str(tmp_path), "--max_new_tokens", "8", "--max_prompts", "4"]
    command += ["--seconds", "2", "--clients", "1", "2"]
    server = f"ours=python -m speculator serve --target {target_folder} --port {{port}}"
    assert serving.main([*command, "--server", server]) == 0
    rows = json.loads((tmp_path / "serving.json").read_text())["servers"]["ours"]
    assert [row["clients"] for row in rows] == [1, 2]
    assert all(row["requests"] and not row["failed"] for row in rows)


def test_a_chart_comes_with_what_makes_it_invalid(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    good = {"clients": 1, "requests": 9, "failed": 0, "failures": [], "short": 0, "tokens_per_second": 40.0}
    good["user_tokens_per_second"] = 45.0
    bad = good | {"clients": 8, "failed": 2, "failures": ["ConnectError: refused"], "short": 3}
    general = len(serving.doubts({"ours": [good]}, 9))
    lines = serving.doubts({"ours": [good, bad]}, 9)[general:]
    assert [line.partition(": ")[0] for line in lines] == ["ours, 8 clients"] * 3 + ["ours"]
    for part, line in zip(("refused", "3 of 9", "9 requests only", "18 requests for 9 prompts"), lines, strict=True):
        assert part in line
    monkeypatch.setattr("os.getloadavg", lambda: (900.0, 0.5, 0.5))
    assert any("900 processes" in line for line in serving.doubts({"ours": [good]}, 9))
    serving.draw({"ours": [good, bad]}, "a CPU", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"
