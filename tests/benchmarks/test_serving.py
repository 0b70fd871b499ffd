"""The comparison of servers runs a server end to end."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from conftest import exit_code

from benchmarks import serving
from speculator.errors import UserError


def test_a_server_command_names_its_port(target_folder, tmp_path):
    command = ["--target", str(target_folder), "--output", str(tmp_path), "--server", "ours=serve --port 8000"]
    assert exit_code(serving.main, command) == 2


@pytest.mark.soak
def test_a_server_answers_every_request(target_folder, tmp_path):
    command = ["--target", str(target_folder), "--output", str(tmp_path), "--max_new_tokens", "8", "--max_prompts", "4"]
    command += ["--seconds", "2", "--clients", "1", "2"]
    server = f"ours={sys.executable} -m speculator serve --target {target_folder} --port {{port}}"
    assert serving.main([*command, "--server", server]) == 0
    rows = json.loads((tmp_path / "serving.json").read_text())["servers"]["ours"]
    assert [row["clients"] for row in rows] == [1, 2]
    assert all(row["requests"] and not row["failed"] for row in rows)


def test_a_chart_comes_with_what_makes_it_invalid(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    good = {
        "clients": 1,
        "requests": 9,
        "failed": 0,
        "failures": [],
        "short": 0,
        "repeated": 0,
        "tokens_per_second": 40.0,
    }
    good["user_tokens_per_second"] = 45.0
    bad = good | {"clients": 8, "failed": 2, "failures": ["ConnectError: refused"], "short": 3, "repeated": 7}
    general = len(serving.doubts({"ours": [good]}))
    lines = serving.doubts({"ours": [good, bad]})[general:]
    assert [line.partition(": ")[0] for line in lines] == ["ours, 8 clients"] * 4
    for part, line in zip(("refused", "3 of 9", "7 of 9 requests repeated", "9 requests only"), lines, strict=True):
        assert part in line
    monkeypatch.setattr("os.getloadavg", lambda: (900.0, 0.5, 0.5))
    assert any("900 processes" in line for line in serving.doubts({"ours": [good]}))
    serving.draw({"ours": [good, bad]}, "a CPU", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:4] == b"\x89PNG"


class Server:
    """A server's client that answers at once."""

    def __init__(self, sent: list[str]):
        self.sent, self.completions = sent, self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def create(self, *, prompt, **_):
        async def events():
            yield SimpleNamespace(choices=[SimpleNamespace(text="a")], usage=SimpleNamespace(completion_tokens=2))

        self.sent.append(prompt)
        return events()


def test_a_server_gets_each_prompt_once_and_repeats_are_counted(monkeypatch):
    """Over the warm-up and all loads: a server may copy from what it answered in an earlier one."""
    sent, now = [], iter(range(10**6))

    @contextmanager
    def started(command):
        yield "http://127.0.0.1:1", psutil.Process()

    monkeypatch.setattr(serving, "started", started)
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: next(now)))  # a second per reading
    monkeypatch.setattr(serving.openai, "AsyncOpenAI", lambda **_: Server(sent))
    prompts = [str(number) for number in range(9)]
    rows = serving.measure("", "M", prompts, [1, 2], 20.0, 2)
    requests = [row["requests"] for row in rows]
    assert sum(requests) < len(sent), "the warm-up sent some"
    assert sum(requests[:1]) < 9 < len(sent)
    assert sent == [prompts[number % 9] for number in range(len(sent))]
    assert [row["repeated"] for row in rows] == [0, len(sent) - 9]


def test_a_server_that_fails_leaves_the_results_of_those_before(tmp_path, monkeypatch, capsys):
    def measure(command, *_):
        if "bad" in command:
            raise UserError("the server ended")
        return [{"clients": 1}]

    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), device=SimpleNamespace(type="cpu"))
    monkeypatch.setattr(serving.model_flags, "load_target", lambda _: target)
    monkeypatch.setattr(serving, "suite_of", lambda *_: SimpleNamespace(prompts=[[1]]))
    monkeypatch.setattr(serving, "measure", measure)
    command = ["--target", "T", "--output", str(tmp_path / "out")]
    for name in ("good", "bad"):
        command += ["--server", f"{name}={name} --port {{port}}"]
    assert exit_code(serving.main, command) == 2
    assert "the server ended" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "serving.json").read_text())["servers"] == {"good": [{"clients": 1}]}


def test_processes_that_end_or_are_another_users_are_left_out_of_a_servers_size():
    def fails(error: psutil.Error):
        def raising(**_):
            raise error

        return raising

    own = {"memory_info": lambda: SimpleNamespace(rss=2**21), "num_fds": lambda: 3}
    children = [SimpleNamespace(memory_info=fails(psutil.NoSuchProcess(1))), SimpleNamespace(**own)]
    children.append(SimpleNamespace(memory_info=fails(psutil.AccessDenied(1))))
    assert serving.size_of(SimpleNamespace(**own, children=lambda recursive: children)) == (4.0, 6)
    assert serving.size_of(SimpleNamespace(**own, children=fails(psutil.NoSuchProcess(1)))) == (2.0, 3)
