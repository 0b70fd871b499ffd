"""On-policy text from servers with OpenAI's interface: the target runs there, only its tokenizer is needed here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.batches import Batches
from data.connection import MOST_BYTES, Connection, RefusedError
from data.onpolicy import ON_POLICY, record_of
from data.rendering import end_of_answer
from data.spread import spread
from speculator.checkpoints.layout import base_config
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, check_text, refuse

CONCURRENCY = 32
"""Requests at a time, to each server."""
_FIRST_SECONDS = 30.0  # until a server that was not heard of has said which models it has
_BYTES_PER_TOKEN = 1 << 10
_MOST_OF_ALL = 32 << 20
_PROBE_TOKENS = 32
_PROBE_PROMPTS = 4
_WARM = 0.5  # from this temperature on, texts that are alike under two seeds were not sampled


@dataclass(frozen=True)
class RenderedPrompt:
    """Token ids to continue, and the messages and tools that they were rendered from, if they were."""

    ids: list[int]
    messages: list[dict] | None = None
    tools: list[dict] | None = None


@dataclass(frozen=True)
class _Form:
    """How a prompt is put to the server.

    Attributes:
        kind: "ids" and "text" go to /v1/completions, "messages" to /v1/chat/completions.
        extended: with fields that OpenAI's interface lacks. They set samplers to what was asked for, where the server
            would follow defaults of its own or of the model, and ask for the answer's token ids.
    """

    kind: str
    extended: bool


def fetch_rows(
    urls: str | Sequence[str],
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[RenderedPrompt],
    folder: str | Path,
    *,
    sampling: Sampling = ON_POLICY,
    max_new_tokens: int = 256,
    concurrency: int = CONCURRENCY,
    seed: int = 0,
    progress: bool = True,
) -> Dataset:
    """Rows as `data.onpolicy.generate_rows` makes them, continued by servers: vLLM, SGLang, llama.cpp and others.

    The first prompts find out what a server takes: token ids, else text, or messages for a prompt rendered from
    them. An answer that comes as text is tokenised behind its prompt. Rate limits, errors of the server and lost
    connections are tried again for a minute; of several servers one that then is gone is left out, with a line. A key
    is taken from $OPENAI_API_KEY.

    Args:
        urls: of the server or servers, with or without /v1.
        target: the model's name there, unless the server has only one.
        tokenizer: the target's.
        prompts: to continue.
        folder: as for `generate_rows`; answers are kept there `concurrency` at a time.
        sampling, max_new_tokens, seed, progress: as for `generate_rows`; row r asks for the seed `seed + r`.
        concurrency: requests at a time, to each server.

    Raises:
        UserError: no URL, or one twice, or a key that no header can hold; no server that can be reached and answers in
            time; one that takes a prompt in no form, reads it as another number of tokens, does not sample, refuses a
            prompt, or answers too much, or otherwise than OpenAI's interface; a folder that was made otherwise.
    """
    refuse(
        (not prompts, "no prompt to continue"),
        (concurrency < 1, f"{concurrency} requests at a time are not at least 1"),
        (max_new_tokens < 1, f"max_new_tokens {max_new_tokens} is not at least 1"),
    )
    ids = [prompt.ids for prompt in prompts]
    record = {"target": target, "drafter": "server", **record_of([sampling], seed, max_new_tokens, ids)}
    rows = [list(range(start, min(start + concurrency, len(prompts)))) for start in range(0, len(prompts), concurrency)]
    with Batches(Path(folder), {**record, "batch_size": concurrency}, rows, progress) as work:
        if todo := work.todo():
            names = [urls] if isinstance(urls, str) else urls
            servers = [_Server(url, target, tokenizer, sampling, max_new_tokens) for url in names]
            counted = Counter(server.url for server in servers)
            twice = next((url for url, count in counted.items() if count > 1), None)
            refuse((not servers, "no server"), (twice, f"--server {twice} is given twice"))
            asyncio.run(_fetch(servers, work, {batch: rows[batch] for batch in todo}, prompts, seed, concurrency))
        return work.finish(ids, _summary)


def _summary(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """What the manifest says: how many rows each server has made."""
    made: Counter[str] = Counter()
    for facts in batches:
        made.update(facts.get("servers", {}))
    unknown = {"speculative": None, "plain": None}
    return {"servers": dict(made), "acceptance_length": None, "tokens_per_second": unknown}


async def _fetch(
    servers: Sequence[_Server],
    work: Batches,
    batches: dict[int, list[int]],
    prompts: Sequence[RenderedPrompt],
    seed: int,
    concurrency: int,
) -> None:
    """Ask for all rows, so many at a time: a slow answer keeps no other row waiting, whichever batch it is in."""
    left = {batch: len(rows) for batch, rows in batches.items()}
    answers: dict[int, list[int]] = {}
    made: dict[int, Counter[str]] = {batch: Counter() for batch in batches}

    async def ask(server: _Server, item: tuple[int, int]) -> None:
        batch, row = item
        answers[row] = await server.ask(row, prompts[row], seed + row)
        made[batch][server.url] += 1
        left[batch] -= 1
        if not left[batch]:
            work.write(batch, [answers.pop(row) for row in batches[batch]], servers=dict(made.pop(batch)))

    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.connection.client)
        items = [(batch, row) for batch, rows in batches.items() for row in rows]
        await spread(servers, lambda server: server.probe(prompts, seed), ask, items, concurrency)


class _Server:
    """The server, and what it takes.

    Args: as of `fetch_rows`.
    """

    def __init__(
        self, url: str, target: str, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, max_new_tokens: int
    ):
        self.connection = Connection(url)
        self.url = self.connection.url
        self.tokenizer, self.sampling, self.max_new_tokens = tokenizer, sampling, max_new_tokens
        self._forms: dict[bool, _Form] = {}
        self._ends: dict[bool, int | None] = {}
        self._target = target
        self._model = ""
        vocab_size = getattr(base_config(tokenizer.name_or_path or None), "vocab_size", 0)
        self._vocab_size = max(len(tokenizer), vocab_size)

    async def probe(self, prompts: Sequence[RenderedPrompt], seed: int) -> None:
        """Find out the model's name, the form of prompt to use, and whether the server samples."""
        try:
            listed = await self.connection.json("GET", "models", tries=3, seconds=_FIRST_SECONDS)
        except UserError:
            if not self.connection.reached:
                raise
            listed = None  # some servers have no list, or fail to make it
        models = listed.get("data") if isinstance(listed, dict) else None
        names = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
        self._model = names[0] if len(names) == 1 and isinstance(names[0], str) else self._target
        for chat in (False, True):
            of_kind = [prompt for prompt in prompts if bool(prompt.messages) == chat][:_PROBE_PROMPTS]
            if of_kind:
                self._ends[chat] = end_of_answer(self.tokenizer, of_kind[0].messages)
                self._forms[chat] = await self._form(of_kind[0], seed)
                if self.sampling.temperature >= _WARM and not await self._samples(of_kind, self._forms[chat], seed):
                    raise UserError(
                        f"{self.url} gives the same texts under two seeds, so it does not sample at temperature "
                        f"{self.sampling.temperature:g} (transformers serve samples where the model's "
                        "generation_config.json has do_sample)"
                    )

    async def ask(self, row: int, prompt: RenderedPrompt, seed: int) -> list[int]:
        """The new tokens of a row."""
        try:
            return await self._continue(prompt, self._forms[bool(prompt.messages)], seed, self.max_new_tokens)
        except RefusedError as error:
            raise UserError(f"{self.url}: prompt {row + 1}: {error}") from None

    async def _form(self, prompt: RenderedPrompt, seed: int) -> _Form:
        """The most exact form that the server takes: ids leave no doubt about the context."""
        asked = self.sampling.top_k or self.sampling.min_p
        last = None
        for kind in ("ids", "messages" if prompt.messages else "text"):
            for extended in (True,) if asked else (True, False):
                try:
                    await self._continue(prompt, _Form(kind, extended), seed, _PROBE_TOKENS)
                    return _Form(kind, extended)
                except RefusedError as error:
                    last = error
        which = "top_k or min_p" if asked else "the first prompt in any form"
        raise UserError(f"{self.url} does not take {which}; its last answer was: {last}")

    async def _samples(self, prompts: Sequence[RenderedPrompt], form: _Form, seed: int) -> bool:
        for prompt in prompts:
            first, second = [await self._continue(prompt, form, own, _PROBE_TOKENS) for own in (seed, seed + 1)]
            if first != second:
                return True
        return False

    async def _continue(self, prompt: RenderedPrompt, form: _Form, seed: int, count: int) -> list[int]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": count,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed,
        }
        if form.extended:
            top_k = self.sampling.top_k or -1
            body |= {"top_k": top_k, "min_p": self.sampling.min_p, "repetition_penalty": 1.0, "return_token_ids": True}
        if form.kind == "messages":
            path = "chat/completions"
            body |= {"messages": prompt.messages} | ({"tools": prompt.tools} if prompt.tools else {})
        else:
            # A tokenizer puts special tokens in front of a text itself, here and there.
            text = self.tokenizer.decode(prompt.ids, skip_special_tokens=True)
            path, body["prompt"] = "completions", prompt.ids if form.kind == "ids" else text
        most = min(MOST_BYTES + count * _BYTES_PER_TOKEN, _MOST_OF_ALL)
        answer = await self.connection.json("POST", path, body, most=most)
        return self._read(answer, prompt, form, count)

    def _read(self, answer: Any, prompt: RenderedPrompt, form: _Form, count: int) -> list[int]:
        """The new tokens of an answer: those that it gives, or else those of its text."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = (choice.get("message") or {"content": choice.get("text")}) if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise RefusedError(f"an answer without a choice: {self.connection.said(_brief(answer))}")
        usage = answer.get("usage")
        read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if form.kind != "text" and isinstance(read, int) and read != len(prompt.ids):
            raise UserError(
                f"{self.url} reads a prompt of {len(prompt.ids)} tokens as {str(read)[:20]}: another tokenizer or "
                "chat template"
            )
        if message.get("reasoning_content") or message.get("reasoning"):
            raise RefusedError("reasoning apart from the answer: start the server without a reasoning parser")
        if tokens := choice.get("token_ids"):
            if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < self._vocab_size for t in tokens):
                raise RefusedError(f"token_ids that are no tokens of the target: {_brief(tokens)}")
            if len(tokens) > count:
                raise RefusedError(f"{len(tokens)} tokens where at most {count} were asked for")
            return tokens
        text = message.get("content") or ""
        if not isinstance(text, str):
            raise RefusedError(f"an answer whose text is none: {_brief(text)}")
        try:
            check_text("the answer", text)
        except UserError as error:
            raise RefusedError(str(error)) from None
        end = self._ends[bool(prompt.messages)] if choice.get("finish_reason") == "stop" else None
        new = self._tokens(prompt.ids, text) + ([] if end is None else [end])
        if not new:
            raise RefusedError("an empty answer")
        # Tokenised anew a text may have some tokens more than the server counted, but not twice as many.
        if len(new) > 2 * count + 1:
            raise RefusedError(f"a text of {len(new)} tokens where at most {count} were asked for")
        return new[:count]

    def _tokens(self, prompt: list[int], text: str) -> list[int]:
        """The tokens of a text that follows the prompt."""
        before = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        whole = self.tokenizer(before + text, add_special_tokens=False, verbose=False)["input_ids"]
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        # The text's beginning would merge with the prompt's end.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _brief(value: Any) -> str:
    """The beginning of some JSON."""
    try:
        return repr(value)[:100]
    except RecursionError:
        return "deeply nested JSON"
