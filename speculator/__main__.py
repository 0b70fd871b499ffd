"""`python -m speculator generate`: continue prompts with a target and whoever drafts for it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from transformers.utils import logging

from speculator import Drafter, HeadDrafter, NgramDrafter, Sampling, Step, Target, generate, load_head
from speculator.decoding.generate import tokens_per_step
from speculator.errors import OneLineParser, UserError, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command line; gives the exit code. Wrong input is one line on stderr and 2."""
    arguments = build_parser().parse_args(argv)
    return run_command("speculator", lambda: run_generate(arguments))


def build_parser() -> OneLineParser:
    """The commands and their flags."""
    parser = OneLineParser(prog="python -m speculator")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="continue prompts; the text is the target's own, whoever drafts")
    generate.add_argument("--target", required=True, help="hub id or folder of a causal LM")
    generate.add_argument("--revision", help="hub branch, tag or commit of the target")
    drafter = generate.add_mutually_exclusive_group()
    drafter.add_argument("--speculator", help="folder of a trained head; without a drafter the target decodes plainly")
    drafter.add_argument("--ngram", action="store_true", help="draft by n-gram lookup in the text so far")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--prompts", type=Path, help='a .jsonl file of rows {"prompt"} or {"messages"}')
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--max_new_tokens", type=int, default=128)
    generate.add_argument("--draft_length", type=int, help="tokens per draft; default: all that the head has, or 4")
    generate.add_argument("--batch_size", type=int, default=1)
    generate.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--output", type=Path, help="write rows as .jsonl instead of printing the text")
    return parser


def run_generate(arguments: argparse.Namespace) -> None:
    """Generate for every prompt, print or write the rows, then say how it went."""
    rows = _read_prompts(arguments)
    if arguments.output and not arguments.output.parent.is_dir():
        raise UserError(f"--output {arguments.output}: no folder {arguments.output.parent}")
    if arguments.batch_size < 1 or arguments.max_new_tokens < 1:
        raise UserError("--batch_size and --max_new_tokens must be at least 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    Sampling(arguments.temperature)  # refuse a bad one before the target is loaded
    target = Target.load(arguments.target, revision=arguments.revision, dtype=arguments.dtype)
    drafter = _drafter(arguments, target)
    ids = [_encode(target.tokenizer, row) for row in rows]

    written: list[dict] = []
    steps: list[Step] = []
    started = time.perf_counter()
    for start in range(0, len(rows), arguments.batch_size):
        batch = slice(start, start + arguments.batch_size)
        sampling = Sampling(arguments.temperature, seed=arguments.seed + start)  # every row a stream of its own
        generation = generate(target, drafter, ids[batch], sampling, max_new_tokens=arguments.max_new_tokens)
        for row, tokens, row_steps in zip(rows[batch], generation.tokens, generation.steps, strict=True):
            text = target.tokenizer.decode(tokens, skip_special_tokens=True)
            mean = tokens_per_step(row_steps)
            row_mean = None if math.isnan(mean) else mean  # JSON has no nan
            written.append({**row, "text": text, "tokens": tokens, "tokens_per_step": row_mean})
            steps += row_steps
            if not arguments.output:
                print(row.get("prompt", "") + text, flush=True)
    seconds = time.perf_counter() - started
    if arguments.output:
        scratch = arguments.output.with_name(f"{arguments.output.name}.partial")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in written))
        scratch.rename(arguments.output)
    count = sum(len(row["tokens"]) for row in written)
    mean = tokens_per_step(steps)
    per_step = "" if math.isnan(mean) else f"{mean:.2f} tokens per step, "
    print(f"{per_step}{count / seconds:.1f} tokens/s, prefill included", file=sys.stderr)


def _read_prompts(arguments: argparse.Namespace) -> list[dict]:
    if arguments.prompts is None:
        return [{"prompt": arguments.prompt}]
    try:
        lines = arguments.prompts.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {arguments.prompts}: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{arguments.prompts}:{number}: not JSON: {error.msg}") from None
            is_row = isinstance(row, dict)
            if not is_row or not (isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)):
                raise UserError(f'{arguments.prompts}:{number}: a row needs "prompt" (text) or "messages" (a list)')
            rows.append(row)
    if not rows:
        raise UserError(f"--prompts {arguments.prompts}: no rows in it")
    return rows


def _encode(tokenizer, row: dict) -> list[int]:
    if isinstance(row.get("prompt"), str):
        return tokenizer(row["prompt"])["input_ids"]
    if tokenizer.chat_template is None:
        raise UserError('a row has "messages", but the target\'s tokenizer has no chat template')
    return tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]


def _drafter(arguments: argparse.Namespace, target: Target) -> Drafter | None:
    if arguments.speculator:
        return HeadDrafter(load_head(arguments.speculator, target), arguments.draft_length)
    return NgramDrafter(4 if arguments.draft_length is None else arguments.draft_length) if arguments.ngram else None


if __name__ == "__main__":
    sys.exit(main())
