"""`python -m speculator generate`: continue prompts, or answer in a chat, with a target and whoever drafts for it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers.utils import logging

from speculator.commands import drafting
from speculator.commands.prompts import encode, prompt_of, read_rows
from speculator.decoding.generate import Generation, Step, check_prompts, generate, tokens_per_step
from speculator.decoding.sampling import Sampling
from speculator.decoding.session import Session
from speculator.errors import OneLineParser, UserError, check_text, refuse, show
from speculator.files import check_file, write_text
from speculator.streaming import LEGEND, TextStream, decode
from speculator.target import Target

HELP = "continue prompts; the text is the target's own, whoever drafts"
Continue = Callable[..., Generation]
"""`generate` with everything fixed but prompts, sampling, on_step and session."""


def add_flags(parser: OneLineParser) -> None:
    """The command's flags, and `run` as its work."""
    parser.set_defaults(run=run)
    parser.add_argument("--target", required=True, help="hub id or folder of a causal LM")
    parser.add_argument("--revision", help="hub branch, tag or commit of the target")

    drafting.add_flags(parser)

    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; with --chat the one user message")
    source.add_argument("--prompts", type=Path, help='a .jsonl file of rows {"prompt"} or {"messages"}')
    parser.add_argument("--chat", action="store_true", help="chat template; without --prompt a conversation on stdin")

    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens; default: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest with this probability")
    parser.add_argument("--min_p", type=float, default=0.0, help="sample from those this share as likely as the first")
    parser.add_argument("--stop", action="append", default=[], metavar="STRING", help="end a text there; repeatable")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="the most new tokens of a text; default: 128")
    parser.add_argument("--batch_size", type=int, default=1, help="rows of --prompts at a time; default: 1")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="default: auto")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    parser.add_argument("--output", type=Path, help="write rows as .jsonl instead of printing the text")
    parser.add_argument("--show-drafts", "--show_drafts", action="store_true", help="colour accepted drafts green")


def run(arguments: argparse.Namespace) -> None:
    """Generate for every prompt, or converse; print or write the texts, then say how it went."""
    _check(arguments)
    rows = [{"prompt": arguments.prompt}] if arguments.prompts is None else read_rows(arguments.prompts)
    for number, row in enumerate(rows, start=1):
        refuse((not _is_json(row), f"--prompts {arguments.prompts}, row {number}: NaN or Infinity, which is not JSON"))
    conversation = arguments.chat and arguments.prompt is None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = Target.load(arguments.target, revision=arguments.revision, dtype=arguments.dtype)
    if target.tokenizer.chat_template is None and (arguments.chat or any(prompt_of(row) is None for row in rows)):
        raise UserError(f'{arguments.target} has no chat template, which --chat and rows with "messages" need')
    continue_ = partial(
        generate,
        target,
        drafting.drafter(arguments, target, arguments.temperature),
        rule=arguments.rule,
        max_new_tokens=arguments.max_new_tokens,
        stop_strings=arguments.stop,
    )
    tally = _Tally(target.context_length, arguments.max_new_tokens)
    if arguments.show_drafts:
        print(LEGEND, file=sys.stderr)
    if conversation:
        _converse(continue_, target, arguments, tally)
    else:
        _continue_rows(continue_, target, rows, arguments, tally)
    print(tally, file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what can't be, before any model is loaded."""
    conversation = arguments.chat and arguments.prompt is None
    printed_late = arguments.output or (arguments.prompts and arguments.batch_size > 1)
    refuse(
        (
            not arguments.chat and arguments.prompt is None and arguments.prompts is None,
            "nothing to continue: give --prompt, --prompts or --chat",
        ),
        (arguments.chat and arguments.prompts, '--chat and --prompts: rows with "messages" are chats without --chat'),
        (conversation and arguments.output, "--output needs --prompt or --prompts: a conversation is printed"),
        (min(arguments.batch_size, arguments.max_new_tokens) < 1, "--batch_size and --max_new_tokens: at least 1"),
        (not abs(arguments.seed) < 2**62, "--seed: must be below 2**62 in size"),
        (not all(arguments.stop), "--stop: the string is empty"),
        (
            arguments.revision is not None and Path(arguments.target).is_dir(),
            f"--revision: {arguments.target} is a folder, which has no revisions",
        ),
        (
            arguments.show_drafts and printed_late,
            "--show-drafts colours text as it comes: not with --output, nor with a --batch_size above 1",
        ),
    )
    for stop in arguments.stop:
        check_text(f"--stop {stop[:20]!r}", stop)
    check_file("--output", arguments.output)
    _sampling(arguments, 0)
    drafting.check(arguments, show_drafts=arguments.show_drafts)


def _sampling(arguments: argparse.Namespace, stream: int) -> Sampling:
    """The settings, with a stream of uniforms of its own."""
    return Sampling(
        arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p, seed=arguments.seed + stream
    )


@dataclass
class _Tally:
    """What the generations of this call came to, with the target's context and the new tokens that were asked for."""

    context: int
    wanted: int
    steps: list[Step] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    full: int = 0

    def add(self, prompts: list[list[int]], generation: Generation) -> None:
        self.steps += [step for row in generation.steps for step in row]
        self.tokens += sum(map(len, generation.tokens))
        self.seconds += generation.prefill_seconds + generation.decode_seconds
        for prompt, new in zip(prompts, generation.tokens, strict=True):
            self.full += len(new) < self.wanted and len(prompt) + len(new) >= self.context

    def __str__(self) -> str:
        if not self.tokens:
            return "no tokens"
        mean = tokens_per_step(self.steps)
        per_step = "" if math.isnan(mean) else f"{mean:.2f} tokens per step, "
        speed = f"{per_step}{self.tokens / self.seconds:.1f} tokens/s, prefill included"
        if not self.full:
            return speed
        texts = "1 text" if self.full == 1 else f"{self.full} texts"
        return f"{texts} ended at the context of {self.context} tokens, not at --max_new_tokens {self.wanted}\n{speed}"


def _continue_rows(
    continue_: Continue, target: Target, rows: list[dict], arguments: argparse.Namespace, tally: _Tally
) -> None:
    ids = [encode(target.tokenizer, row, arguments.chat) for row in rows]
    check_prompts(target, ids)  # all of them before the first is answered
    written: list[dict] = []
    session = Session(target)
    for start in range(0, len(rows), arguments.batch_size):
        batch = rows[start : start + arguments.batch_size]
        leads = ["" if arguments.chat else prompt_of(row) or "" for row in batch]
        streams = arguments.batch_size == 1 and not arguments.output
        stream = TextStream(target.tokenizer, leads[0], arguments.show_drafts) if streams else None
        session.forget()
        prompts = ids[start : start + len(batch)]
        generation = continue_(prompts, _sampling(arguments, start), on_step=stream, session=session)
        tally.add(prompts, generation)
        if stream:
            stream.finish()
        for row, lead, tokens, steps in zip(batch, leads, generation.tokens, generation.steps, strict=True):
            text, mean = decode(target.tokenizer, tokens), tokens_per_step(steps)
            row_mean = None if math.isnan(mean) else mean  # JSON has no nan
            written.append({**row, "text": text, "tokens": tokens, "tokens_per_step": row_mean})
            if not stream and not arguments.output:
                show(lead + text)
    if arguments.output:
        write_text(arguments.output, "".join(json.dumps(row, allow_nan=False) + "\n" for row in written))


def _is_json(row: dict) -> bool:
    """Whether a row that Python has read is JSON to others too."""
    try:
        return bool(json.dumps(row, allow_nan=False))
    except ValueError:
        return False


def _converse(continue_: Continue, target: Target, arguments: argparse.Namespace, tally: _Tally) -> None:
    """Answer the lines of stdin until it ends. Each turn processes only what is new in the conversation."""
    session, messages = Session(target), []
    while line := _ask():
        if line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            ids = encode(target.tokenizer, {"messages": messages}, chat=True)
            stream = TextStream(target.tokenizer, colours=arguments.show_drafts)
            sampling = _sampling(arguments, len(messages) // 2)
            generation = continue_([ids], sampling, on_step=stream, session=session)
            stream.finish()
            tally.add([ids], generation)
            messages.append({"role": "assistant", "content": decode(target.tokenizer, generation.tokens[0])})
    print(file=sys.stderr)


def _ask() -> str:
    """The next line of stdin; empty at its end."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: {error}") from None
