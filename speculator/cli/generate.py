"""`python -m speculator generate`: continue prompts, or answer in a chat, with a target and whoever drafts for it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from speculator.cli import drafting
from speculator.decoding.engine import Engine
from speculator.decoding.request import Request, acceptance_length, check_prompts
from speculator.decoding.sampling import Sampling
from speculator.decoding.streaming import LEGEND, TextStream, decode
from speculator.drafters.ngram import MEMORY
from speculator.errors import OneLineParser, UserError, check_text, refuse, show
from speculator.files import check_file, write_text
from speculator.prompts import Prompt, continued, read_prompts

HELP = "continue prompts; the text is the target's own, whoever drafts"
_MOST = 10_000  # texts of a prompt
Submit = Callable[..., Request]
"""`Engine.submit` with everything fixed but prompt, sampling and on_step."""


def add_flags(parser: OneLineParser) -> None:
    """The command's flags."""
    drafting.add_target_flags(parser)

    drafting.add_flags(parser)

    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue; with --chat the one user message")
    source.add_argument("--prompts", type=Path, help='a .jsonl file of rows {"prompt"} or {"messages"}')
    parser.add_argument("--chat", action="store_true", help="chat template; without --prompt a conversation on stdin")

    parser.add_argument(
        "--num_samples", type=int, default=1, help="texts of each prompt; a lookup looks in all of them"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens; default: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest with this probability")
    parser.add_argument("--min_p", type=float, default=0.0, help="sample from those this share as likely as the first")
    parser.add_argument("--stop", action="append", default=[], metavar="STRING", help="end a text there; repeatable")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="the most new tokens of a text; default: 128")
    parser.add_argument("--batch_size", type=int, default=1, help="rows of --prompts at a time; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    parser.add_argument("--output", type=Path, help="write rows as .jsonl instead of printing the text")
    parser.add_argument("--show-drafts", "--show_drafts", action="store_true", help="colour accepted drafts green")


def run(arguments: argparse.Namespace) -> None:
    """Generate for every prompt, or converse; print or write the texts, then say how it went."""
    _check(arguments)
    if arguments.prompts is None:
        rows = [({"prompt": arguments.prompt}, continued(arguments.prompt, arguments.chat, "--prompt"))]
    else:
        rows = read_prompts(arguments.prompts)
    for number, (row, _) in enumerate(rows, start=1):
        refuse((not _is_json(row), f"--prompts {arguments.prompts}, row {number}: NaN or Infinity, which is not JSON"))
    conversation = arguments.chat and arguments.prompt is None
    target = drafting.load_target(arguments)
    if target.tokenizer.chat_template is None and (arguments.chat or any(prompt.chat for _, prompt in rows)):
        raise UserError(f'{arguments.target} has no chat template, which --chat and rows with "messages" need')
    several = arguments.num_samples > 1
    drafter = drafting.drafter(arguments, target, arguments.temperature, MEMORY if several else 0)
    if several:
        rows = [(row | {"sample": i}, prompt) for row, prompt in rows for i in range(arguments.num_samples)]
    slots = 1 if conversation else min(arguments.batch_size, len(rows))
    engine = Engine(target, drafter, slots=slots, rule=arguments.rule)
    submit = partial(engine.submit, max_new_tokens=arguments.max_new_tokens, stop_strings=arguments.stop)
    if arguments.show_drafts:
        print(LEGEND, file=sys.stderr)
    answered = _converse(submit, engine, arguments) if conversation else _continue(submit, engine, rows, arguments)
    print(_summary(answered, engine, arguments.max_new_tokens), file=sys.stderr)


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
        (not 1 <= arguments.num_samples <= _MOST, f"--num_samples {arguments.num_samples} is not in 1..{_MOST}"),
        (
            arguments.num_samples > 1 and _sampling(arguments, 0).greedy,
            f"--num_samples {arguments.num_samples} at --temperature 0 would be equal texts: give a --temperature",
        ),
        (
            conversation and arguments.num_samples > 1,
            "--num_samples needs --prompt or --prompts: a conversation goes on from one answer",
        ),
        (min(arguments.batch_size, arguments.max_new_tokens) < 1, "--batch_size and --max_new_tokens: at least 1"),
        (not abs(arguments.seed) < 2**62, "--seed: must be below 2**62 in size"),
        (not all(arguments.stop), "--stop: the string is empty"),
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


def _summary(requests: list[Request], engine: Engine, wanted: int) -> str:
    """How it went."""
    tokens = sum(len(request.tokens) for request in requests)
    if not tokens:
        return "no tokens"
    mean = acceptance_length(step for request in requests for step in request.steps)
    per_step = "" if math.isnan(mean) else f"{mean:.2f} tokens per step, "
    seconds = engine.prefill_seconds + engine.decode_seconds
    speed = f"{per_step}{tokens / seconds:.1f} tokens/s, prefill included"
    full = sum(request.finish_reason == "context" for request in requests)
    if not full:
        return speed
    texts, context = "1 text" if full == 1 else f"{full} texts", engine.target.context_length
    return f"{texts} ended at the context of {context} tokens, not at --max_new_tokens {wanted}\n{speed}"


def _is_json(row: dict) -> bool:
    """Whether a row that Python has read is JSON to others too."""
    try:
        return bool(json.dumps(row, allow_nan=False))
    except ValueError:
        return False


def _continue(
    submit: Submit, engine: Engine, rows: list[tuple[dict, Prompt]], arguments: argparse.Namespace
) -> list[Request]:
    """All rows through the engine; each is shown when it has ended, and those before it."""
    tokenizer = engine.target.tokenizer
    ids = [prompt.tokens(tokenizer) for _, prompt in rows]
    check_prompts(engine.target, ids)  # all of them before the first is answered
    leads = ["" if prompt.chat else prompt.text for _, prompt in rows]
    befores = [() if prompt.chat else own for (_, prompt), own in zip(rows, ids, strict=True)]
    requests: list[Request] = []
    if arguments.batch_size == 1 and not arguments.output:
        for number, (prompt, lead, before) in enumerate(zip(ids, leads, befores, strict=True)):
            stream = TextStream(tokenizer, lead, arguments.show_drafts, before)
            requests.append(submit(prompt, _sampling(arguments, number), on_step=partial(stream, number)))
            engine.run()
            stream.finish()
        return requests
    requests += [submit(prompt, _sampling(arguments, number)) for number, prompt in enumerate(ids)]
    shown = 0
    while shown < len(requests):
        engine.step()
        while shown < len(requests) and requests[shown].finish_reason:  # in the order of the rows
            if not arguments.output:
                show(leads[shown] + decode(tokenizer, requests[shown].tokens, befores[shown]))
            shown += 1
    if arguments.output:
        columns = zip(rows, requests, befores, strict=True)
        written = [
            _row(row, request, decode(tokenizer, request.tokens, before)) for (row, _), request, before in columns
        ]
        write_text(arguments.output, "".join(json.dumps(row, allow_nan=False) + "\n" for row in written))
    return requests


def _row(row: dict, request: Request, text: str) -> dict:
    mean = acceptance_length(request.steps)
    new = {"text": text, "tokens": request.tokens}
    return {**row, **new, "acceptance_length": None if math.isnan(mean) else mean}  # JSON has no nan


def _converse(submit: Submit, engine: Engine, arguments: argparse.Namespace) -> list[Request]:
    """Answer the lines of stdin until it ends. Each turn processes only what is new in the conversation."""
    messages, requests, tokenizer = [], [], engine.target.tokenizer
    while line := _ask():
        if line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            ids = Prompt(messages, chat=True, where="the conversation").tokens(tokenizer)
            stream = TextStream(tokenizer, colours=arguments.show_drafts)
            request = submit(ids, _sampling(arguments, len(messages) // 2), on_step=partial(stream, 0))
            engine.run()
            stream.finish()
            requests.append(request)
            messages.append({"role": "assistant", "content": decode(tokenizer, request.tokens)})
    print(file=sys.stderr)
    return requests


def _ask() -> str:
    """The next line of stdin; empty at its end."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: {error}") from None
