"""`speculator eval --server URL`: how long clients of a server wait, and what it accepts by its own counters.

vLLM and ours count all requests: nobody else may use the server meanwhile. llama-server counts in each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from data.mixture import PYTHON_SOURCES
from data.rendering import load_tokenizer
from data.writers.server import TextOnly
from eval.load import Answer, Asking
from eval.served import SERVED, Level, Served, figures, table
from eval.suites import Suite, check_names, first_turns, sampling_of
from speculator.acceptance import Acceptance
from speculator.checkpoints import head_folder
from speculator.clients.counters import read_acceptance
from speculator.errors import UserError, first_line, refuse
from speculator.files import make_folder, read_json
from speculator.report import write_record
from speculator.terminal import Progress

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
    make_folder(arguments.output)
    found = Served(
        server=server.url,
        target=arguments.target,
        speculator=arguments.speculator,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        argv=sys.argv,
        slo=arguments.slo or {},
        price=arguments.price,
        hours=training_hours(head.parent) if head else None,
        forecast=forecast,
    )
    try:
        asyncio.run(_measure(arguments, base, server, tokenizer, found))
    except (openai.APIError, httpx.HTTPError) as error:
        raise UserError(server.describe(error)) from None
    if arguments.clients:
        plot_load({found.server: found.suites}, arguments.output / "load.png")
    print(table(found))


async def _measure(arguments: argparse.Namespace, base: str, server: Any, tokenizer: Any, found: Served) -> None:
    """Fill `found` level by level, and write it after each, should the server fail later."""
    async with server.client as client:
        try:
            model = (await client.models.list()).data[0]
        except (AttributeError, IndexError, TypeError, ValueError):  # a page, nothing, or no model
            raise UserError(f"--server {server.url}: not OpenAI's API, or no model is served there") from None
        llama_cpp = model.owned_by == "llamacpp"
        context = getattr(model, "max_model_len", None) or sys.maxsize
        known = TextOnly(tokenizer=tokenizer, name=arguments.target, context_length=context)
        temperatures, numbers = arguments.temperature or [0.0, 1.0], arguments.clients or [_CLIENTS]
        busy = bool(arguments.clients and not arguments.rate)  # all clients, until the last answer
        least = max(numbers) * (_PROMPTS if busy else 1)
        # A server may know a prompt, or even its answer, from before: prefix caches and lookup in other texts. So every
        # load has prompts of its own, the same ones in each server.
        parts = len(temperatures) * len(numbers) if arguments.clients else 1
        sizes = copy.copy(arguments)
        sizes.max_prompts = parts * arguments.max_prompts
        suites = [first_turns(sizes, source, known, arguments.raw) for source in arguments.suite or [PYTHON_SOURCES]]
        check_names(suites)
        for suite in suites:
            each = len(suite.prompts) // parts
            fault = f"--clients {max(numbers)}: {suite.name} has {len(suite.prompts)} prompts, {each} for each load, "
            fault += f"which needs {least}; raise --max_prompts, or measure fewer loads"
            refuse((arguments.clients and each < least, fault))
        loads = [(suite, *load) for suite in suites for load in enumerate(product(temperatures, numbers))]
        for suite, number, (temperature, clients) in Progress(loads, title="loads", unit="loads"):
            each = len(suite.prompts) // parts
            part = Suite(suite.name, suite.prompts[number % parts * each :][:each])
            clients = min(clients, each)
            asking = Asking(
                client=client,
                model=model.id,
                sampling=sampling_of(arguments, temperature),
                max_new_tokens=arguments.max_new_tokens,
                rate=arguments.rate,
            )
            if arguments.clients and not found.suites:  # compiles and captures; backwards, so that no cache knows them
                warm = replace(asking, max_new_tokens=min(_WARM_UP, arguments.max_new_tokens), rate=None)
                await warm.ask([prompt[::-1] for prompt in part.prompts[-max(numbers) :]], max(numbers))
            counters = partial(_counters, base, server.url, may_lack=llama_cpp or bool(arguments.clients))
            read = partial(asyncio.to_thread, counters)
            before, began = await read(), time.monotonic()
            answers, after = await asking.ask(part.prompts, clients, read if busy else None)
            seconds = None if busy else time.monotonic() - began
            after = after or await read()
            drafts = _of_answers(answers) if llama_cpp else _of_counters(after - before)
            nothing = "the server drafted nothing while it answered: start it with a drafter"
            refuse((not drafts["steps"] and not arguments.clients, nothing))
            rows = [[each.tokens, each.first, each.seconds] for each in answers]
            level = Level(
                suite=suite.name,
                digest=part.digest,
                temperature=temperature,
                max_new_tokens=arguments.max_new_tokens,
                clients=clients,
                rate=arguments.rate,
                answers=rows,
                **figures(rows, clients, seconds, found.slo),
                **drafts,
            )
            found.suites.append(level)
            write_record(arguments.output / SERVED, found)


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


def _of_counters(counted: Acceptance) -> dict[str, Any]:
    """Return the fields of a `Level` about drafts, by a server's counters."""
    found = {"steps": counted.steps, "accepted_tokens": counted.accepted}
    return {**found, "accepted_per_position": counted.reached[1:], "drafted_tokens": None}


def _of_answers(answers: list[Answer]) -> dict[str, Any]:
    """Return a `Level`'s fields about drafts from llama-server's counts, which have no positions; 0 without drafts."""
    drafted = sum(int(each.timings.get("draft_n", 0)) for each in answers)
    accepted = sum(int(each.timings.get("draft_n_accepted", 0)) for each in answers)
    # The prompt's pass gives a text's first token; each later step its own token, after those that it accepts.
    steps = sum(each.tokens - 1 for each in answers) - accepted if drafted else 0
    return {"steps": steps, "accepted_tokens": accepted, "accepted_per_position": [], "drafted_tokens": drafted or None}


def training_hours(run: Path) -> float | None:
    """Return the hours that a run's stages took by the rate in their logs, and its text; None if it is no run."""
    seconds = 0.0
    for stage in run.glob("stage*"):
        states = sorted(stage.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime)
        with suppress(KeyError, IndexError):
            state = read_json(states[-1])
            steps = state["max_steps"]
            entry = [each for each in state["log_history"] if "seconds_left" in each and each["step"] < steps][-1]
            seconds += entry["seconds_left"] * steps / (steps - entry["step"])
    manifest = run / "generated" / "manifest.json"
    if seconds and manifest.is_file():
        seconds += read_json(manifest).get("seconds") or 0.0
    return seconds / 3600 or None
