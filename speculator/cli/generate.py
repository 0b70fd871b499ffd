"""`speculator generate`: continue prompts or chat, with or without a drafter."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from speculator.acceptance import Acceptance
from speculator.cli import model_flags
from speculator.decoding.engine import Engine
from speculator.decoding.request import Request, check_prompts
from speculator.decoding.sampling import Sampling
from speculator.decoding.streaming import TextStream, decode
from speculator.drafters.ngram import MEMORY
from speculator.errors import UserError, as_text, refuse, refuse_below, show
from speculator.files import check_output_file, write_text
from speculator.prompts import Conversation, continued, for_template, log_first_turns, read_prompts
from speculator.terminal import colours, log

Rows = list[tuple[dict, Conversation]]
"""Rows of the input, of which the output's are copies with more keys, each with its prompt."""
Submit = Callable[..., Request]
"""`Engine.submit` with the settings of the command; it is called with prompt, sampling and `on_step`."""


def run(arguments: argparse.Namespace) -> None:
    """Generate for every prompt, or converse; print or write the texts, then a summary."""
    _check(arguments)
    conversation = arguments.chat and arguments.prompt is None
    if arguments.prompts is None:
        rows = [({"prompt": arguments.prompt}, continued(arguments.prompt, arguments.chat, "--prompt"))]
    else:
        rows = read_prompts(arguments.prompts)
        log_first_turns(f"--prompts {arguments.prompts}", [prompt for _, prompt in rows])
    target = model_flags.load_target(arguments)
    without = f"{arguments.target} has no chat template"
    prompts = for_template([prompt for _, prompt in rows], target.tokenizer, without)
    rows = [(row, prompt) for (row, _), prompt in zip(rows, prompts, strict=True)]
    count = len(rows)
    # Samples of a prompt resemble each other, so n-gram lookup also searches the earlier ones.
    memory = MEMORY if arguments.num_samples > 1 else 0
    if arguments.num_samples > 1:
        rows = [(row | {"sample": i}, prompt) for row, prompt in rows for i in range(arguments.num_samples)]
    slots = 1 if conversation else min(arguments.batch_size, len(rows))
    drafter = model_flags.drafter(arguments, target, [arguments.temperature], slots, memory)
    engine = Engine(target, drafter, slots=slots, rule=arguments.rule)
    submit = partial(engine.submit, max_new_tokens=arguments.max_new_tokens, stop_strings=arguments.stop)
    if arguments.show_drafts:
        mark = "green" if colours(sys.stdout) else "in [[brackets]]"
        print(f"accepted draft tokens are {mark}; the other tokens come from the target itself", file=sys.stderr)
    requests = _converse(submit, engine, arguments) if conversation else _continue(submit, engine, rows, arguments)
    if arguments.prompts:
        log(f"--prompts {arguments.prompts}: {count:,} rows read, {count:,} used")
    cut = sum(each.finish_reason == "length" for each in requests)
    if cut and not conversation and any(prompt.chat for _, prompt in rows):
        print(f"{cut} of {len(requests)} answers ended at --max_new_tokens {arguments.max_new_tokens}", file=sys.stderr)
    print(_summary(requests, engine), file=sys.stderr)
    failed = {number: each.failure for number, each in enumerate(requests, start=1) if each.failure}
    for number, failure in failed.items():  # after the texts of the others are written
        raise UserError(f"{len(failed)} of {len(requests)} texts failed, text {number} first: {failure}")


def _check(arguments: argparse.Namespace) -> None:
    """Raise a UserError for flags that are wrong or do not go together, before a model is loaded."""
    no_prompt = arguments.prompt is None and arguments.prompts is None
    several = arguments.num_samples > 1
    refuse_below(arguments, num_samples=1, batch_size=1, max_new_tokens=1)
    refuse(
        (no_prompt and not arguments.chat, "nothing to continue: give --prompt, --prompts or --chat"),
        (arguments.chat and arguments.prompts, '--chat and --prompts: rows with "messages" are chats without --chat'),
        (no_prompt and arguments.output, "--output needs --prompt or --prompts"),
        (no_prompt and several, "--num_samples needs --prompt or --prompts"),
        (several and _sampling(arguments, 0).greedy, "--num_samples needs a --temperature above 0"),
        (
            arguments.show_drafts and (arguments.output or (not no_prompt and arguments.batch_size > 1)),
            "--show_drafts needs text that is printed as it is generated: no --output, --batch_size 1",
        ),
    )
    check_output_file("--output", arguments.output)
    _sampling(arguments, 0)
    model_flags.check(arguments, show_drafts=arguments.show_drafts)


def _sampling(arguments: argparse.Namespace, row: int) -> Sampling:
    """Return the sampling settings of row number `row`, with a seed of its own."""
    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed + row,
    )


def _continue(submit: Submit, engine: Engine, rows: Rows, arguments: argparse.Namespace) -> list[Request]:
    """Decode all rows; print or write their texts, and return the finished requests, in the order of the rows."""
    tokenizer = engine.target.tokenizer
    # All of them, before the first is decoded.
    ids = check_prompts(engine.target, [prompt.tokens(tokenizer) for _, prompt in rows])
    continues = [not prompt.chat and engine.target.continues for _, prompt in rows]
    leads = [prompt.text if shown else "" for (_, prompt), shown in zip(rows, continues, strict=True)]
    contexts = [tokens if shown else () for tokens, shown in zip(ids, continues, strict=True)]
    requests: list[Request] = []
    if arguments.batch_size == 1 and not arguments.output:
        for number, (prompt, lead, context) in enumerate(zip(ids, leads, contexts, strict=True)):
            stream = TextStream(tokenizer, lead, arguments.show_drafts, context)
            requests.append(submit(prompt, _sampling(arguments, number), on_step=partial(stream, number)))
            engine.run()
            stream.finish()
        return requests
    requests += [submit(prompt, _sampling(arguments, number)) for number, prompt in enumerate(ids)]
    written = []
    for (row, _), request, lead, context in zip(rows, requests, leads, contexts, strict=True):
        while not request.finish_reason:
            engine.step()
        text = decode(tokenizer, request.tokens, context)
        written.append(json.dumps(_row(row, request, text)) + "\n")
        if not arguments.output:
            show(lead + text)
    if arguments.output:
        write_text(arguments.output, "".join(written))
    return requests


def _row(row: dict, request: Request, text: str) -> dict:
    """Return a row of the output file, given that of the input; a text that failed has "error", its finish reason."""
    steps = Acceptance.of(request.steps)
    failed = {"error": request.finish_reason} if request.failure else {}
    made = {"text": text, "tokens": request.tokens, "acceptance_length": steps.length if steps.steps else None}
    return {name: value for name, value in row.items() if name != "error"} | made | failed


def _converse(submit: Submit, engine: Engine, arguments: argparse.Namespace) -> list[Request]:
    """Answer each line of stdin as a user turn until input or context end; a turn prefills only its new tokens."""
    requests: list[Request] = []
    answer: list[int] = []
    chat = Conversation()
    tokenizer = engine.target.tokenizer
    while line := _read_line():
        if line.strip():
            asked = continued(line.rstrip("\n"), chat=True, where="the conversation")
            if requests:
                chat = chat.after(tokenizer, answer, asked.messages)
            else:
                chat = replace(asked, ids=asked.tokens(tokenizer))
            if requests and len(chat.ids) >= engine.target.context_length:
                print(f"(the conversation has filled the context of {engine.target.name})", file=sys.stderr)
                break
            stream = TextStream(tokenizer, show_drafts=arguments.show_drafts)
            request = submit(chat.ids, _sampling(arguments, len(requests)), on_step=partial(stream, 0))
            engine.run()
            request.check()
            stream.finish()
            if request.finish_reason == "length":
                print(f"(the answer ended at --max_new_tokens {arguments.max_new_tokens})", file=sys.stderr)
            requests.append(request)
            answer = request.tokens[:-1] if request.finish_reason == "eos" else request.tokens
    print(file=sys.stderr)
    return requests


def _read_line() -> str:
    """Prompt for and return the next line of stdin, with its line end; "" at the end of stdin."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Lines can be edited, and be longer than the 4,095 bytes of a terminal's own lines.
            with suppress(ImportError):
                import readline  # noqa: F401
            return as_text(input("> ")) + "\n"
        print("> ", end="", file=sys.stderr, flush=True)
        return as_text(sys.stdin.readline())
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise UserError(f"stdin: {error}") from None


def _summary(requests: list[Request], engine: Engine) -> str:
    """Return the acceptance length and the speed of all requests, for stderr."""
    tokens = sum(len(request.tokens) for request in requests)
    if not tokens:
        return "no tokens"
    steps = Acceptance.of(step for request in requests for step in request.steps)
    acceptance = f"acceptance length {steps.length:.2f}, " if steps.steps else ""
    seconds = engine.prefill_seconds + engine.decode_seconds
    summary = f"{acceptance}{tokens / seconds:.1f} tokens/s with prefill"
    cut = sum(request.finish_reason == "context" for request in requests)
    if cut:
        context = engine.target.context_length
        summary = f"{cut} of {len(requests)} texts ended at the context of {context} tokens\n{summary}"
    return summary
