"""`speculator eval --server URL`: how long clients of a server wait, and what it accepts by its own counters.

vLLM and ours count all requests: nobody else may use the server meanwhile. llama-server counts in each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import accumulate, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from data.mixture import PYTHON_SOURCES
from data.rendering import load_tokenizer
from data.writers.server import TextOnly
from eval.load import Answer, Asking
from eval.served import DRAFTS, PART, SERVED, Level, Served, figures, table, with_totals
from eval.suites import Suite, check_names, first_turns, sampling_of
from speculator.about import command_line
from speculator.acceptance import Acceptance
from speculator.checkpoints import head_folder
from speculator.clients.counters import read_acceptance
from speculator.errors import UserError, first_line, refuse
from speculator.files import read_json
from speculator.report import write_record
from speculator.terminal import Progress, log

FORECAST_FILE = "forecast.json"
_CLIENTS = 8
_WARM_UP = 8  # new tokens
_PROMPTS = 4  # of each client at least, so that the counters are read after most of the answers
_OWN_DECODING: dict[str, tuple] = dict.fromkeys(
    ("num_speculative_tokens", "rule", "baseline", "draft_model", "adapter"), (None, False)
)
_OWN_DECODING |= {"batch_size": (None, [1]), "repeats": (1,), "report_to": ("none",), "dtype": ("auto",)}
"""Flags that a measurement in a server has no use for, with the values that change nothing."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval --server`: ask every suite at every temperature and number of clients; print and write it.

    The files are served.json and load.png in `--output`. With `--clients`, the server need not draft.
    """
    import httpx
    import openai

    from eval.plots import plot_load
    from speculator.clients.connection import Connection, base_urls

    for flag, idle in _OWN_DECODING.items():
        given = getattr(arguments, flag) not in idle
        refuse((given, f"--server measures the server as it was started: --{flag} is for decoding in this process"))
    (base,) = base_urls([arguments.server_url], "--server")
    server = Connection(base, "--server", openai.AsyncOpenAI, max_retries=0, timeout=600)
    head = head_folder(arguments.speculator, arguments.speculator_revision) if arguments.speculator else None
    refuse((head and not head.is_dir(), f"--speculator {head}: not a folder"))
    forecast = read_json(head / FORECAST_FILE) if head and (head / FORECAST_FILE).is_file() else None
    tokenizer = load_tokenizer(
        arguments.target, arguments.revision, arguments.trust_remote_code, arguments.chat_template_kwargs
    )
    found = Served(
        server=server.url,
        target=arguments.target,
        speculator=arguments.speculator,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        argv=command_line(),
        slo=arguments.slo or {},
        price=arguments.price,
        hours=training_hours(head.parent) if head else None,
        forecast=forecast,
    )
    try:
        asyncio.run(_measure(arguments, base, server, tokenizer, found))
    except (openai.APIError, httpx.HTTPError) as error:
        kept = f"; {arguments.output / SERVED} has what was measured" if found.suites else ""
        raise UserError(f"{server.describe(error)}{kept}") from None
    if arguments.clients:
        plot_load({found.server: found.suites}, arguments.output / "load.png")
    print(table(found))


async def _measure(arguments: argparse.Namespace, base: str, server: Any, tokenizer: Any, found: Served) -> None:
    """Fill `found` level by level, and write it after each, should the server fail later."""
    async with server.client as client:
        try:
            models = (await client.models.list()).data
            model = next((each for each in models if each.id == arguments.target), models[0])
        except (AttributeError, IndexError, TypeError, ValueError):  # a page, nothing, or no model
            raise UserError(f"--server {server.url}: not OpenAI's API, or no model is served there") from None
        if len(models) > 1 and model.id != arguments.target:
            log(f"{server.url} serves {', '.join(each.id for each in models)}: measuring {model.id}")
        llama_cpp = model.owned_by == "llamacpp"
        context = getattr(model, "max_model_len", None) or sys.maxsize
        known = TextOnly(tokenizer=tokenizer, name=arguments.target, context_length=context)
        pairs = product(arguments.temperature or [0.0, 1.0], arguments.clients or [_CLIENTS])
        loads = sorted(pairs, key=itemgetter(1))  # so no load's prompts depend on those with more clients
        busy = bool(arguments.clients and not arguments.rate)  # all clients, until the last answer
        least = [clients * (_PROMPTS if busy else 1) for _, clients in loads] if arguments.clients else [1]
        sizes = copy.copy(arguments)
        sizes.max_prompts = sum(max(each, arguments.max_prompts) for each in least)
        suites = [first_turns(sizes, source, known, arguments.raw) for source in arguments.suite or [PYTHON_SOURCES]]
        check_names(suites)
        work = list[tuple[Suite, tuple[float, int]]]()
        for suite in suites:
            if arguments.clients:
                work += zip(_parts(suite, arguments.max_prompts, least), loads, strict=True)
            else:
                work += ((part, load) for load in loads for part in _by_category(suite))
        for part, (temperature, clients) in Progress(work, title="loads", unit="loads"):
            clients = min(clients, len(part.prompts))
            asking = Asking(
                client=client,
                model=model.id,
                sampling=sampling_of(arguments, temperature),
                max_new_tokens=arguments.max_new_tokens,
                rate=arguments.rate,
            )
            if arguments.clients and not found.suites:  # compiles and captures; backwards, so that no cache knows them
                warm = replace(asking, max_new_tokens=min(_WARM_UP, arguments.max_new_tokens), rate=None)
                most, largest = loads[-1][1], work[-1][0]
                await warm.ask([prompt[::-1] for prompt in largest.prompts[-most:]], most)
            counters = partial(_counters, base, server.url, may_lack=llama_cpp or bool(arguments.clients))
            read = partial(asyncio.to_thread, counters)
            before, began = await read(), time.monotonic()
            answers, after = await asking.ask(part.prompts, clients, read if busy else None)
            seconds = None if busy else time.monotonic() - began
            after = after or await read()
            counted = after - before
            drafts: Any = (
                _of_answers(answers) if llama_cpp else (counted.steps, counted.accepted, counted.reached[1:], None)
            )
            nothing = "the server drafted nothing while it answered: start it with a drafter"
            refuse((not drafts[0] and not arguments.clients, nothing))
            rows = [[each.tokens, each.first, each.seconds] for each in answers]
            level = Level(
                suite=part.name,
                digest=part.digest,
                temperature=temperature,
                max_new_tokens=arguments.max_new_tokens,
                clients=clients,
                rate=arguments.rate,
                answers=rows,
                **figures(rows, clients, seconds, found.slo),
                **dict(zip(DRAFTS, drafts, strict=True)),
            )
            found.suites.append(level)
            write_record(arguments.output / SERVED, found)
        if not arguments.clients:
            found.suites = with_totals(found.suites, {suite.name: suite.digest for suite in suites}, found.slo)
            write_record(arguments.output / SERVED, found)


def _parts(suite: Suite, most: int, least: Sequence[int]) -> list[Suite]:
    """Return a part of a suite for each load: of its `least` number of prompts, or `most` if that is more.

    A server may know a prompt, or even its answer, from before: prefix caches and lookup in other texts. So every load
    has prompts of its own, the same ones in each server. A short suite gives fewer than `most`; too few: UserError.
    """
    count, needed = len(suite.prompts), sum(least)
    refuse((count < needed, f"--clients: {suite.name} has {count} prompts, and these loads need {needed}"))
    sizes = next(found for size in range(most, -1, -1) if sum(found := [max(size, each) for each in least]) <= count)
    if min(sizes) < most:
        own = ", ".join(map(str, sizes))
        log(f"{suite.name} has only {count} prompts, so the loads have {own} and not all --max_prompts {most}")
    ends = accumulate(sizes)
    return [Suite(suite.name, suite.prompts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _by_category(suite: Suite) -> list[Suite]:
    """Return a suite of the prompts of each category."""
    groups: dict[str, list[list[int]]] = {}
    for category, prompt in zip(suite.categories, suite.prompts, strict=True):
        name = f"{suite.name}{PART}{category or '(none)'}" if any(suite.categories) else suite.name
        groups.setdefault(name, []).append(prompt)
    return [Suite(name, prompts) for name, prompts in groups.items()]


def _counters(base: str, shown: str, may_lack: bool) -> Acceptance:
    """Return the steps that vLLM, or our server, has counted since its start; none if it counts none, and `may_lack`.

    `base` is the server's URL without /v1. A UserError names the server as `shown` if there is no page or no counters.
    """
    import httpx

    try:
        answer = httpx.get(f"{base}/metrics", timeout=60, follow_redirects=True)
    except httpx.HTTPError as error:
        raise UserError(f"{shown}/metrics: {first_line(error)}") from None
    # Not httpx's own message, which has the URL with its password.
    refuse((not answer.is_success and not may_lack, f"{shown}/metrics: status {answer.status_code}"))
    found = read_acceptance(answer.text)
    lacks = f"{shown}/metrics has no counters of drafts: the server does not draft, or logs no statistics"
    refuse((found is None and not may_lack, lacks))
    return found or Acceptance()


def _of_answers(answers: list[Answer]) -> tuple[int, int, list[int], int | None]:
    """Return a `Level`'s `DRAFTS` from llama-server's counts, which have no positions; 0 without drafts."""
    drafted = sum(int(each.timings.get("draft_n", 0)) for each in answers)
    accepted = sum(int(each.timings.get("draft_n_accepted", 0)) for each in answers)
    # The prompt's pass gives a text's first token; each later step its own token, after those that it accepts.
    steps = sum(each.tokens - 1 for each in answers) - accepted if drafted else 0
    return steps, accepted, [], drafted or None


def training_hours(run: Path) -> float | None:
    """Return the hours that a run trained, by the rates in its logs, and wrote text; None without a finished stage."""
    seconds = 0.0
    for stage in run.glob("stage*"):
        states = sorted(stage.glob("checkpoint-*[0-9]/trainer_state.json"), key=lambda file: file.stat().st_mtime)
        try:
            state = read_json(states[-1])
            steps = state["max_steps"]
            entry = [each for each in state["log_history"] if "seconds_left" in each and each["step"] < steps][-1]
        except (KeyError, IndexError):  # too short for a line, or not begun
            return None
        seconds += entry["seconds_left"] * steps / (steps - entry["step"])
    manifest = run / "generated" / "manifest.json"
    if seconds and manifest.is_file():
        seconds += read_json(manifest).get("seconds") or 0.0
    return seconds / 3600 or None
