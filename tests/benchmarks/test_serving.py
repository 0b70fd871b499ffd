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
