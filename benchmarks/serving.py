"""`python -m benchmarks.serving`: servers of one target under the same load.

    python -m benchmarks.serving --target examples/stdlib_target --output D
        --server 'ours=python -m speculator serve --target examples/stdlib_target --speculator S --port {port}'
        --server 'transformers=transformers serve examples/stdlib_target --continuous-batching --cb-num-blocks 256
            --cb-max-batch-tokens 256 --attn-implementation sdpa --device cpu --port {port}'

Each server is started in turn. So many clients ask for greedy completions of held-out prompts, streamed, one after the
other, for so many seconds. Told of each number of clients: requests and what failed, tokens per second, the time to the
first token, and of the server's processes memory and open files in the second and in the last quarter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.common import build_parser, load_prompts, load_target
from speculator.device import hardware
from speculator.errors import UserError, refuse, run_command
from speculator.files import write_json

_START_SECONDS = 300.0
_WARM_REQUESTS = 4
_AFTER_FAILURE = 0.1


@dataclass
class Load:
    """What some clients saw in so many seconds."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


class Server:
    """A server's process group, from its command until it is ended."""

    def __init__(self, command: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = shlex.split(command.replace("{port}", str(port)))
        self.process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> Server:
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        """Until it answers.

        Raises:
            UserError: it ends, or does not answer in time.
        """
        end = time.monotonic() + _START_SECONDS
        while True:
            refuse((self.process.poll() is not None, f"the server ended: {self.process.returncode}"))
            refuse((time.monotonic() > end, f"no answer at {self.url} within {_START_SECONDS:g} seconds"))
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def size(self) -> tuple[float, int]:
        """MiB of memory and open files of its processes."""
        processes = [root := psutil.Process(self.process.pid), *root.children(recursive=True)]
        return sum(each.memory_info().rss for each in processes) / 2**20, sum(each.num_fds() for each in processes)


async def load(url: str, model: str, prompts: list[str], clients: int, seconds: float, count: int) -> Load:
    """Ask as so many clients."""
    seen, end, turn = Load(), time.monotonic() + seconds, itertools.count()

    async def client(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            number = next(turn) % len(prompts)
            body = {"model": model, "prompt": prompts[number], "max_tokens": count, "temperature": 0, "stream": True}
            body["stream_options"] = {"include_usage": True}
            began, first, text, usage = time.monotonic(), None, "", None
            try:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        event = json.loads(line[6:])
                        usage = event.get("usage") or usage
                        piece = "".join(choice.get("text") or "" for choice in event.get("choices", []))
                        if piece and first is None:
                            first = time.monotonic() - began
                        text += piece
                if usage is None or first is None:
                    raise ValueError(f"{response.status_code}, {text[:100]!r}")
            except (httpx.HTTPError, ValueError) as error:
                seen.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(_AFTER_FAILURE)
                continue
            seen.first.append(first)
            seen.texts[number] = text
            seen.tokens += usage["completion_tokens"]

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return seen


async def watched(server: Server, *how: Any) -> tuple[Load, list[tuple[float, int]]]:
    """`load`, and the server's size while it lasts."""
    sizes, task = [], asyncio.ensure_future(load(server.url, *how))
    while not task.done():
        sizes.append(server.size())
        await asyncio.wait({task}, timeout=1.0)
    return task.result(), sizes


def measure(command: str, model: str, prompts: list[str], clients: list[int], seconds: float, count: int) -> list[dict]:
    """A row for each number of clients."""
    rows = []
    with Server(command) as server:
        asyncio.run(load(server.url, model, prompts[:_WARM_REQUESTS], 1, 3.0, count))
        for number in clients:
            began = time.monotonic()
            seen, sizes = asyncio.run(watched(server, model, prompts, number, seconds, count))
            took, quarter = time.monotonic() - began, max(1, len(sizes) // 4)
            parts = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
            rows.append(
                {
                    "clients": number,
                    "requests": len(seen.first),
                    "failed": len(seen.failed),
                    "failures": seen.failed[:5],
                    "tokens_per_second": seen.tokens / took,
                    "first_token_ms": [1000 * value for value in _quantiles(seen.first)],
                    "memory_mib": [statistics.mean(size[0] for size in part) for part in parts],
                    "open_files": [max(size[1] for size in part) for part in parts],
                    "texts": seen.texts,
                }
            )
            print(f"  {number} clients: {len(seen.first)} requests, {seen.tokens / took:.0f} tokens/s", file=sys.stderr)
    return rows


def _quantiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values or [float("nan")])[0], (values or [float("nan")])[0]
    parts = statistics.quantiles(values, n=20)
    return statistics.median(values), parts[-1]


def table(found: dict[str, list[dict]]) -> str:
    """What was measured; the ratio is to the last server with as many clients."""
    lines = [
        "| clients | server | requests | failed | tokens/s | ratio | first token, ms: median, 95% | memory, MiB "
        "| files |",
        "|---" * 9 + "|",
    ]
    *_, last = found
    for at, base in enumerate(found[last]):
        for name, rows in found.items():
            row = rows[at]
            first, memory, files = row["first_token_ms"], row["memory_mib"], row["open_files"]
            ratio = row["tokens_per_second"] / base["tokens_per_second"] if base["tokens_per_second"] else float("nan")
            lines.append(
                f"| {row['clients']} | {name} | {row['requests']} | {row['failed']} "
                f"| {row['tokens_per_second']:.0f} | {ratio:.2f} | {first[0]:.0f}, {first[1]:.0f} "
                f"| {memory[0]:.0f}, {memory[1]:.0f} | {files[0]}, {files[1]} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser("serving", __doc__, 64)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND", help="with {port} in it")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load; default: 60")
    arguments = parser.parse_args(argv)
    return run_command("serving", lambda: run(arguments))


def run(arguments: Any) -> None:
    """Measure, print the table and write it."""
    commands = dict(each.partition("=")[::2] for each in arguments.server)
    refuse((not all("{port}" in command for command in commands.values()), "--server: NAME=COMMAND with {port} in it"))
    target = load_target(arguments)
    prompts = [target.tokenizer.decode(prompt) for prompt in load_prompts(arguments, target)]
    place = hardware(target.device)
    del target
    found = {}
    for name, command in commands.items():
        print(name, file=sys.stderr)
        how = prompts, arguments.clients, arguments.seconds, arguments.max_new_tokens
        try:
            found[name] = measure(command, arguments.target, *how)
        except UserError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    refuse((not found, "no server could be measured"))
    base = next(iter(found.values()))[0]["texts"]
    alike = {name: sum(base.get(at) == text for at, text in rows[0]["texts"].items()) for name, rows in found.items()}
    print(f"{place}, {arguments.seconds:g} seconds each, {arguments.max_new_tokens} tokens\n\n{table(found)}")
    report = {"hardware": place, "commands": commands, "seconds": arguments.seconds, "texts_alike": alike}
    for row in itertools.chain.from_iterable(found.values()):
        row["texts"] = len(row["texts"])
    write_json(arguments.output / "serving.json", {**report, "servers": found})


if __name__ == "__main__":
    sys.exit(main())
