"""docs/terminal.svg: what a terminal shows while a head drafts, as a picture.

python -m benchmarks.terminal_picture --target HuggingFaceTB/SmolLM2-135M-Instruct --output docs/terminal.svg

It runs `speculator generate --chat --show_drafts` on a pseudo-terminal and keeps its colours.
"""

import argparse
import os
import pty
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 92


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--speculator", default="examples/smollm2_135m_instruct")
    parser.add_argument("--prompt", default="Explain in three sentences why the sky is blue.")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    command = ["-m", "speculator", "generate", "--target", arguments.target, "--speculator", arguments.speculator]
    command += [
        "--dtype",
        "bfloat16",
        "--chat",
        "--show_drafts",
        "--max_new_tokens",
        "120",
        "--prompt",
        arguments.prompt,
    ]
    shown = bytearray()

    def read(descriptor: int) -> bytes:
        part = os.read(descriptor, 1024)
        shown.extend(part)
        return part

    os.environ.pop("NO_COLOR", None)
    pty.spawn([sys.executable, *command], read)
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    # A line that a progress bar wrote over shows only its last state, which is empty.
    text = "\n".join(line.rpartition("\r")[2] for line in lines if "Loading weights" not in line)
    typed = [
        f"$ speculator generate --target {Path(arguments.target).name} --dtype bfloat16 \\",
        f"    --speculator {arguments.speculator} --chat --show_drafts \\",
        f'    --prompt "{arguments.prompt}"',
    ]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("\n".join(typed), style="bold"))
    console.print(Text.from_ansi(text.strip()))
    console.save_svg(str(arguments.output), title="speculator", theme=MONOKAI)


if __name__ == "__main__":
    main()
