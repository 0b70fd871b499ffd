"""How fast text becomes rows, by the number of processes that tokenise it, and how much memory that takes.

    python -m benchmarks.preparation [--megabytes 200] [--num_proc 1 2] [--chats] [--target examples/stdlib_target]

The text is this machine's Python sources, again and again, each time with another line in front, as a .jsonl file: a
text a row, or a question with a source as its answer. Each line of the table is made in a process of its own with an
empty cache: all of its training split, and a tenth of it before that, so that memory that grows with the text shows.
Memory is of all processes together without what they share and without files (Linux: Pss_Anon, looked at five times a
second), above what there was before the first row. One process still tokenises texts on all cores, by threads of the
tokenizer's own; `taskset -c 0` has it on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import datasets

from data import python_sources
from data.prepare import token_rows
from data.rendering import load_tokenizer
from speculator.device import cores
from speculator.errors import OneLineParser, refuse, run_command

LENGTH = 2048
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_text(file: Path, megabytes: float, chats: bool) -> None:
    """Rows of so much text, no two the same."""
    texts = [document["text"][:20_000] for document in python_sources.documents(500_000)]
    left = megabytes * 1e6
    with file.open("w") as stream:
        for number, text in enumerate(itertools.cycle(texts)):
            content = f"# {number}\n{text}"
            chat = [{"role": "user", "content": f"Write {number}"}, {"role": "assistant", "content": content}]
            stream.write(json.dumps({"messages": chat} if chats else {"text": content}) + "\n")
            left -= len(content)
            if left <= 0:
                return


def anonymous() -> int:
    """Bytes of this process and its children that are no file's; pages that they share count once."""
    total = 0
    for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        try:
            found = re.search(r"Pss_Anon:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())
        except OSError:  # it has just ended
            continue
        total += int(found[1]) * 1024 if found else 0
    return total


class Height:
    """The most memory within a block, above what there was before."""

    def __enter__(self) -> Height:
        self.before, self.bytes, self._over = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.2):
            self.bytes = max(self.bytes, anonymous() - self.before)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def measure(file: Path, target: str, num_proc: int) -> dict[str, float]:
    """One line of the table."""
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = _TEMPLATE
    found: dict[str, float] = {}
    size = file.stat().st_size
    for name, most in (("a tenth", size // 40), ("all", size)):  # some four bytes are a token
        began = time.monotonic()
        with Height() as height:
            rows = token_rows([str(file)], "train", tokenizer, LENGTH, max_tokens=most, num_proc=num_proc)
        found |= {name: height.bytes, "rows": len(rows), "seconds": time.monotonic() - began}
    return found


def run(flags: argparse.Namespace) -> None:
    refuse((flags.megabytes <= 0 or min(flags.num_proc) < 1, "--megabytes and --num_proc must be above 0"))
    if flags.of:
        print(json.dumps(measure(flags.of, flags.target, flags.num_proc[0])))
        return
    kind = "chats" if flags.chats else "texts"
    print(f"{flags.megabytes:g} MB of {kind}, rows of {LENGTH} tokens, {cores()} cores\n")
    print("| num_proc | rows | seconds | rows/s | MB/s | memory for a tenth, MB | for all, MB |\n|" + "---|" * 7)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        file = Path(folder) / "text.jsonl"
        write_text(file, flags.megabytes, flags.chats)
        for num_proc in flags.num_proc:
            argv = [sys.executable, "-m", "benchmarks.preparation", "--of", str(file), "--num_proc", str(num_proc)]
            environment = {**os.environ, "SPECULATOR_CACHE": str(Path(folder) / f"cache{num_proc}")}
            argv += ["--target", flags.target]
            done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            line = json.loads(done.splitlines()[-1])
            speeds = line["rows"] / line["seconds"], flags.megabytes * 0.9 / line["seconds"]
            memory = line["a tenth"] / 1e6, line["all"] / 1e6
            print(
                f"| {num_proc} | {line['rows']:,} | {line['seconds']:.1f} | {speeds[0]:,.0f} | {speeds[1]:.2f} "
                f"| {memory[0]:,.0f} | {memory[1]:,.0f} |",
                flush=True,
            )


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="python -m benchmarks.preparation", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--num_proc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--target", default="examples/stdlib_target", help="whose tokenizer")
    parser.add_argument("--folder", type=Path, help="where text and rows are put meanwhile")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    return run_command("benchmarks.preparation", lambda: run(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
