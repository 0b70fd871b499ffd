"""Commands write bars and colours to terminals only, and plain lines to files and pipes."""

import io
import sys
import time

import pytest

from speculator import terminal
from speculator.terminal import Progress, colours, log, phase, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "expected"), [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)]
)
def test_only_a_terminal_without_no_color_has_colours(monkeypatch, stream, no_color, expected):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", stream())
    assert colours(sys.stderr) is expected
    phase(2, 6, "preparing data")
    assert ("\x1b" in sys.stderr.getvalue()) is expected
    assert "2/6 preparing data" in sys.stderr.getvalue()


def test_a_bar_in_a_pipe_is_a_line_from_time_to_time(monkeypatch):
    monkeypatch.setattr(terminal, "_SECONDS", 1e-9)
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    for _ in Progress(range(3), title="outer", unit="steps"):
        for _ in Progress(range(2), title="inner", unit="rows"):
            log("a line")
    lines = pipe.getvalue()
    assert "outer: 2 of 3 steps" in lines
    assert "left" in lines
    assert not set("\r\x1b") & set(lines)
    assert all(line.startswith(("outer: ", "inner: ", "a line")) for line in lines.splitlines())


def test_silent_work_prints_its_duration(monkeypatch):
    monkeypatch.setattr(terminal, "_SECONDS", 0.02)
    monkeypatch.setattr(terminal._Heartbeat, "_thread", None)  # that of another test may sleep for half a minute
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with working("eval"):
        while "eval: 0:00:00 elapsed" not in pipe.getvalue():
            time.sleep(0.01)
        with Progress(title="stuck", unit="rows") as bar:
            bar.reset(3)  # the total is known by now
            bar.update(2)
            while "stuck: 2 of 3 rows" not in pipe.getvalue():
                time.sleep(0.01)
    time.sleep(0.1)  # a line may be in flight
    before = pipe.getvalue()
    time.sleep(0.1)
    assert pipe.getvalue() == before


def test_a_short_progress_bar_in_a_pipe_prints_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    assert list(Progress(range(3), title="short", unit="rows")) == [0, 1, 2]
    assert not pipe.getvalue()


def test_a_bar_on_a_terminal_shows_the_time_left_and_lines_stay_above_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Progress(title="work", unit="rows", total=2, mininterval=0) as bar:
        bar.update(1)
        log("a line")
    assert "work:" in screen.getvalue()
    assert "left" in screen.getvalue()
    assert "a line\n" in screen.getvalue()


def test_only_the_first_process_writes(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    log("a line")
    phase(1, 2, "a phase")
    assert list(Progress(range(3), title="work", unit="rows")) == [0, 1, 2]
    assert not screen.getvalue()
    for name in ("MASTER_ADDR", "WORLD_SIZE"):  # a shell left the others over
        monkeypatch.delenv(name)
        log("a line")
    assert screen.getvalue() == "a line\n" * 2
