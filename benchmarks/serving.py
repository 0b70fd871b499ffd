"""Compare servers of one target under the same load.

    python -m benchmarks.serving --target examples/stdlib_target --output D
        --server 'ours=python -m speculator serve --target examples/stdlib_target --speculator S --port {port}'
        --server 'transformers=transformers serve examples/stdlib_target --continuous-batching --port {port}'

Starts one server at a time. N clients each send greedy, streamed completions of held-out prompts, one after the other,
for a fixed time. A server gets each prompt once, until there are no more. Reports requests, failures, tokens per
second, time to the first token, and the server's memory and open files in the second and last quarter of the load, and
draws throughput against the speed of one user.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import openai
import psutil

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from data.mixture import PYTHON_SOURCES
from eval.flags import add_flags
from eval.suites import check_flags, suite_of
from speculator.cli import model_flags
from speculator.device import hardware
from speculator.errors import OneLineParser, refuse, run_command
from speculator.files import make_folder, write_json
from speculator.tables import markdown_table

_START_SECONDS = 300.0
_MAX_PROMPTS = 1000  # more than python-sources holds out


@dataclass
class Load:
    """Measurements of all clients of one load."""

    tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    user_speeds: list[float] = field(default_factory=list)
    """Tokens per second of each request, after its first event."""
    short: int = 0
    """Requests whose text ended before its limit."""
    repeated: int = 0
    """Requests whose prompt the server had got before, in this load or an earlier one."""
    failures: list[str] = field(default_factory=list)


@contextmanager
def started(command: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server, wait until /health answers, and give its URL and process; kill its process group at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command.replace("{port}", str(port)))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
    try:
        while True:
            refuse((process.poll() is not None, f"the server ended with exit code {process.returncode}: {command}"))
            refuse((time.monotonic() > deadline, f"no answer at {url} within {_START_SECONDS:g} seconds: {command}"))
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).is_success:
                    break
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_turn(prompts: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the prompts over and over, each with whether it was yielded before."""
    return ((prompts[number % len(prompts)], number >= len(prompts)) for number in itertools.count())


async def load(
    url: str, model: str, prompts: Iterator[tuple[str, bool]], clients: int, seconds: float, count: int
) -> Load:
    """Send requests from `clients` concurrent clients for some seconds; `prompts` come from `in_turn`."""
    seen, end = Load(), time.monotonic() + seconds

    async def client(server: openai.AsyncOpenAI) -> None:
        while time.monotonic() < end:
            prompt, repeated = next(prompts)
            began, first, tokens = time.monotonic(), None, None
            try:
                stream = await server.completions.create(
                    model=model, prompt=prompt, max_tokens=count, temperature=0, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                async for event in stream:
                    if first is None and any(choice.text for choice in event.choices):
                        first = time.monotonic() - began
                    tokens = event.usage.completion_tokens if event.usage else tokens
                if first is None or tokens is None:
                    raise ValueError("an empty completion")
            except (openai.OpenAIError, httpx.HTTPError, ValueError) as error:
                seen.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            seen.first_token_seconds.append(first)
            seen.user_speeds.append((tokens - 1) / (time.monotonic() - began - first))
            seen.short += tokens < count
            seen.repeated += repeated
            seen.tokens += tokens

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as server:
        await asyncio.gather(*(client(server) for _ in range(clients)))
    return seen


async def watched(process: psutil.Process, *args: Any) -> tuple[Load, list[tuple[float, int]]]:
    """Run `load` and sample the server's memory (MiB) and open files every second."""
    sizes, task = [], asyncio.ensure_future(load(*args))
    while not task.done():
        sizes.append(size_of(process))
        await asyncio.wait({task}, timeout=1.0)
    return task.result(), sizes


def size_of(process: psutil.Process) -> tuple[float, int]:
    """Return the memory (MiB) and open files of a process and its descendants, those that can be read."""
    processes, memory, files = [process], 0.0, 0
    with suppress(psutil.Error):
        processes += process.children(recursive=True)
    for each in processes:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            memory += each.memory_info().rss / 2**20
            files += each.num_fds()
    return memory, files


def measure(command: str, model: str, prompts: list[str], clients: list[int], seconds: float, count: int) -> list[dict]:
    """Measure one server under each number of clients."""
    # One iterator for all loads: n-gram lookup and prefix caches would copy from earlier answers to the same prompts.
    rows, given = [], in_turn(prompts)
    with started(command) as (url, process):
        asyncio.run(load(url, model, given, 1, 3.0, count))  # warm-up
        for number in clients:
            began = time.monotonic()
            seen, sizes = asyncio.run(watched(process, url, model, given, number, seconds, count))
            took, quarter = time.monotonic() - began, max(1, len(sizes) // 4)
            parts = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
            times = [1000 * value for value in seen.first_token_seconds] or [float("nan")]
            rows.append(
                {
                    "clients": number,
                    "requests": len(seen.first_token_seconds),
                    "failed": len(seen.failures),
                    "failures": seen.failures[:5],
                    "tokens_per_second": seen.tokens / took,
                    "user_tokens_per_second": statistics.median(seen.user_speeds or [float("nan")]),
                    "short": seen.short,
                    "repeated": seen.repeated,
                    "first_token_ms": [statistics.median(times), statistics.quantiles([*times, *times], n=20)[-1]],
                    "memory_mib": [statistics.mean(size[0] for size in part) for part in parts],
                    "open_files": [max(size[1] for size in part) for part in parts],
                }
            )
    return rows


def table(measured: dict[str, list[dict]]) -> str:
    """Render all servers; the ratio compares tokens per second with the last server's."""
    header = ("clients", "server", "requests", "failed", "tokens/s", "ratio")
    header += ("first token, ms: median, 95%", "memory, MiB", "files")
    lines = []
    for rows in zip(*measured.values(), strict=True):
        for name, row in zip(measured, rows, strict=True):
            speed, base = row["tokens_per_second"], rows[-1]["tokens_per_second"]
            pairs = (", ".join(f"{v:.0f}" for v in row[key]) for key in ("first_token_ms", "memory_mib", "open_files"))
            ratio = f"{speed / base:.2f}" if base else "-"
            lines.append((row["clients"], name, row["requests"], row["failed"], f"{speed:.0f}", ratio, *pairs))
    return markdown_table(header, lines)


def doubts(measured: dict[str, list[dict]]) -> list[str]:
    """What makes a chart of these measurements invalid, or narrower than it looks."""
    lines = [
        "the clients ran on the server's machine, and took time from it",
        "acceptance, so speed with a head, is that of this text alone",
        "one client warmed each server up for 3 seconds: what it compiles or captures later is in the figures",
        "compare servers that decode as many requests at a time; beyond that number, clients wait",
    ]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
        lines.append(f"other work ran: {load:.0f} processes wanted one of {cores} cores in the last minute")
    for name, rows in measured.items():
        for row in rows:
            where, requests = f"{name}, {row['clients']} clients", row["requests"]
            if row["failed"]:
                lines.append(f"{where}: {row['failed']} requests failed: {row['failures'][0]}")
            if row["short"]:
                lines.append(f"{where}: {row['short']} of {requests} texts ended early, at EOS")
            if row["repeated"]:
                lines.append(
                    f"{where}: {row['repeated']} of {requests} requests repeated a prompt, as the prompts ran out: "
                    "n-gram lookup in other requests copies the earlier answer, and a prefix cache knows the prompt"
                )
            if requests < 3 * row["clients"]:
                lines.append(f"{where}: {requests} requests only, so the first ones, with cold caches, weigh much")
    return lines


def draw(measured: dict[str, list[dict]], title: str, file: Path) -> None:
    """Draw throughput against the speed of one user; each point is a number of clients."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, rows in measured.items():
        speeds = [row["user_tokens_per_second"] for row in rows]
        totals = [row["tokens_per_second"] for row in rows]
        axis.plot(speeds, totals, "o-", label=name)
        for row, point in zip(rows, zip(speeds, totals, strict=True), strict=True):
            axis.annotate(str(row["clients"]), point, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set_xlabel("tokens/s of one user (median), after the first token")
    axis.set_ylabel("tokens/s of all users")
    axis.set_title(title, fontsize=8)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.serving", description=__doc__)
    add_flags(parser, _MAX_PROMPTS)
    parser.add_argument("--output", type=Path, required=True, help="folder for serving.json and .png")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND", help="command with {port}")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="clients (default: 1 8 32)")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load (default: 60)")
    arguments = parser.parse_args(argv)
    return run_command("serving", lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Measure every server, then print and write the table."""
    commands = dict(server.partition("=")[::2] for server in arguments.server)
    refuse((not all("{port}" in command for command in commands.values()), "--server: NAME=COMMAND with {port} in it"))
    check_flags(arguments)
    target = model_flags.load_target(arguments)
    prompts = [target.tokenizer.decode(prompt) for prompt in suite_of(arguments, PYTHON_SOURCES, target).prompts]
    conditions = {"hardware": hardware(target.device), "seconds": arguments.seconds, "commands": commands}
    del target
    settings = (arguments.target, prompts, arguments.clients, arguments.seconds, arguments.max_new_tokens)
    make_folder(arguments.output)
    measured: dict[str, list[dict]] = {}
    for name, command in commands.items():
        measured[name] = measure(command, *settings)
        write_json(arguments.output / "serving.json", {**conditions, "servers": measured})  # the next one may fail
    print("\n".join([table(measured), *doubts(measured)]))
    draw(measured, f"{conditions['hardware']}, {arguments.seconds:g} s a point", arguments.output / "serving.png")


if __name__ == "__main__":
    sys.exit(main())
