"""`python -m eval --server URL`: acceptance of an exported head in the server that drafts with it, by its own counters.

vLLM has counters of all requests: nobody else may use the server meanwhile. llama-server counts in each answer too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any, TypedDict

from data.mixture import PYTHON_SOURCES
from data.rendering import load_tokenizer
from eval.suites import Suite, check_names, first_turns, sampling_of
from speculator.acceptance import Acceptance
from speculator.checkpoints import head_folder
from speculator.clients.counters import read_acceptance
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, first_line, refuse
from speculator.files import make_folder, read_json, write_json
from speculator.tables import markdown_table

FORECAST_FILE = "forecast.json"
_REQUESTS = 8  # at a time
_LLAMA_CPP = ("predicted_n", "draft_n", "draft_n_accepted")
"""Counts in an answer's `timings`: tokens of the text, drafted and accepted ones; without a draft the last two lack."""
_OWN_DECODING: dict[str, tuple] = dict.fromkeys(
    ("num_speculative_tokens", "rule", "baseline", "draft_model", "adapter"), (None, False)
)
_OWN_DECODING |= {"batch_size": (None, [1]), "repeats": (1,), "report_to": ("none",), "dtype": ("auto",)}
"""Flags that a measurement in a server has no use for, with the values that change nothing."""


class Served(TypedDict, total=False):
    """A row of served.json. vLLM counts drafts and positions; llama-server steps, and drafted and accepted tokens."""

    suite: str
    temperature: float
    acceptance_length: float
    drafts: int
    accepted_per_position: list[int]
    steps: int
    drafted_tokens: int
    accepted_tokens: int


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval --server`: measure every suite at every temperature, and print and write the acceptance.

    The table has the forecast of the head's training too, if there is one; the file is served.json in `--output`.
    """
    import openai

    from speculator.clients.connection import Connection, base_urls

    for flag, idle in _OWN_DECODING.items():
        given = getattr(arguments, flag) not in idle
        refuse((given, f"--server measures the server as it was started: --{flag} is for decoding in this process"))
    (base,) = base_urls([arguments.server_url], "--server")
    server = Connection(base, "--server", openai.OpenAI)
    head = head_folder(arguments.speculator, arguments.speculator_revision)
    refuse((not head.is_dir(), f"--speculator {head}: not a folder"))
    forecast = read_json(head / FORECAST_FILE) if (head / FORECAST_FILE).is_file() else None
    tokenizer = load_tokenizer(
        arguments.target, arguments.revision, arguments.trust_remote_code, arguments.chat_template_kwargs
    )
    make_folder(arguments.output)
    with server.client as client:
        try:
            try:
                model = client.models.list().data[0]
            except (AttributeError, IndexError, TypeError, ValueError):  # a page, nothing, or no model
                raise UserError(f"--server {server.url}: not OpenAI's API, or no model is served there") from None
            llama_cpp = model.owned_by == "llamacpp"
            context = getattr(model, "max_model_len", None) or sys.maxsize
            known: Any = SimpleNamespace(
                tokenizer=tokenizer, name=arguments.target, context_length=context, encoder=None
            )
            sources = arguments.suite or [PYTHON_SOURCES]
            suites = [first_turns(arguments, source, known, arguments.raw) for source in sources]
            check_names(suites)
            rows: list[Served] = []
            for suite, temperature in product(suites, arguments.temperature or [0.0, 1.0]):
                before = None if llama_cpp else _counters(base, server.url)
                sampling = sampling_of(arguments, temperature)
                counted = _generate(client, model.id, suite, sampling, arguments.max_new_tokens)
                if before is None:
                    measured = _acceptance_of_answers(counted)
                else:
                    measured = _acceptance(_counters(base, server.url) - before)
                rows.append({"suite": suite.name, "temperature": temperature, **measured})
                found = {"server": server.url, "suites": rows, "forecast": forecast}
                write_json(arguments.output / "served.json", found)  # after each, should the server fail later
        except openai.APIError as error:
            raise UserError(server.describe(error)) from None
    print(_table(rows, forecast))


def _generate(client: Any, model: str, suite: Suite, sampling: Sampling, max_new_tokens: int) -> Counter[str]:
    """Let the server complete all prompts; return sums over its answers: "texts", and the counts of `_LLAMA_CPP`.

    Servers other than llama-server do not count in their answers, so all sums but "texts" are 0.
    """

    def complete(number: int) -> dict[str, int]:
        answer = client.completions.create(
            model=model,
            prompt=suite.prompts[number],
            max_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed + number,
            # Also what the model's own defaults would change.
            extra_body={
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
            },
        )
        timings = getattr(answer, "timings", None) or {}
        return {"texts": 1, **{name: int(timings.get(name, 0)) for name in _LLAMA_CPP}}

    counted: Counter[str] = Counter()
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for answer in pool.map(complete, range(len(suite.prompts))):
            counted.update(answer)
    return counted


def _counters(base: str, shown: str) -> Acceptance:
    """Return the steps that vLLM, or our server, has counted since its start.

    `base` is the server's URL without /v1. A UserError names the server as `shown` if there is no page or no counters.
    """
    import httpx

    try:
        answer = httpx.get(f"{base}/metrics", timeout=60, follow_redirects=True)
    except httpx.HTTPError as error:
        raise UserError(f"{shown}/metrics: {first_line(error)}") from None
    # Not httpx's own message, which has the URL with its password.
    refuse((not answer.is_success, f"{shown}/metrics: status {answer.status_code}"))
    found = read_acceptance(answer.text)
    if found is None:
        raise UserError(f"{shown}/metrics has no counters of drafts: the server does not draft, or logs no statistics")
    return found


def _acceptance(found: Acceptance) -> Served:
    """Return "drafts", "accepted_per_position" and "acceptance_length" of the steps in which the server answered."""
    refuse((not found.steps, "the server counted no drafts while it answered"))
    return {"drafts": found.steps, "accepted_per_position": found.reached[1:], "acceptance_length": found.length}


def _acceptance_of_answers(counted: Counter[str]) -> Served:
    """Return "steps", "drafted_tokens", "accepted_tokens" and "acceptance_length" of llama-server's answers.

    They do not count drafts or positions. `counted` is what `_generate` returns.
    """
    texts, tokens, drafted, accepted = (counted[name] for name in ("texts", *_LLAMA_CPP))
    refuse((not drafted, "the server drafted nothing: start llama-server with -md and --spec-type"))
    # The prompt's pass gives a text's first token; each later step its own token, after those that it accepts.
    steps = tokens - texts - accepted
    length = (tokens - texts) / max(1, steps)
    return {"steps": steps, "drafted_tokens": drafted, "accepted_tokens": accepted, "acceptance_length": length}


def _table(rows: list[Served], forecast: Any) -> str:
    """Return the rows as a Markdown table, with the content of forecast.json (None: there is none) as the last line."""

    def shares(values: list[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    cells = []
    for row in rows:
        if "drafts" in row:
            accepted = shares([count / row["drafts"] for count in row["accepted_per_position"]])
        else:
            accepted = f"{row['accepted_tokens'] / row['drafted_tokens']:.2f} of all drafted tokens"
        steps = row.get("drafts", row.get("steps"))
        cells.append([row["suite"], f"{row['temperature']:g}", steps, accepted, f"{row['acceptance_length']:.2f}"])
    if forecast:
        expected = shares(forecast["accepted_per_draft"])
        cells.append([f"forecast ({forecast['how']})", "0", "", expected, f"{forecast['acceptance_length']:.2f}"])
    return markdown_table(("prompts", "temperature", "drafts", "accepted by position", "acceptance length"), cells)
