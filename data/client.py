"""Generate rows with servers that implement the OpenAI API; only the target's tokenizer is needed locally."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, BatchFacts, stored_record
from data.conversations import Answering
from data.onpolicy import record_of
from data.rendering import text_tokens
from data.tally import log
from data.writing import Writing
from speculator.chat import decoded, end_token
from speculator.clients.connection import UNAVAILABLE, Connection, base_urls
from speculator.clients.hidden_states import discard
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.prompts import Conversation

CONCURRENCY = 32
"""Concurrent requests to each server."""
_RETRIES = 10  # the client doubles the delay from 0.5 s up to 8 s, so a server may be away for about a minute
_AWAY_SECONDS = 1200.0  # that the last server may be away
_REQUEST_SECONDS, _TOKEN_SECONDS = 1200.0, 0.5  # for one answer, retries included: in all, and for each new token
_FIRST_SECONDS = 30.0  # timeout of the first request to a server
_PROBE_TOKENS = 32
_PROBE_PROMPTS = 4
_WARM = 0.5  # from this temperature on, two seeds should give different texts


def fetch_rows(
    urls: str | Sequence[str],
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Conversation],
    folder: str | Path,
    writing: Writing,
    *,
    max_prompt_tokens: int = sys.maxsize,
    concurrency: int = CONCURRENCY,
    progress: bool = True,
) -> Dataset:
    """Generate rows like `data.onpolicy.generate_rows`, by servers (vLLM, SGLang, llama.cpp, ...), and return them.

    Prompts are sent as token ids. A completion without `token_ids` is tokenized from its text. A server that stays
    unavailable for a minute is dropped with a warning, and the others take over its rows; the last one may be away for
    20 minutes. A turn that a server refuses ends its chat. A first turn that it refuses, or that leaves its context no
    room for an answer, gives no row. The API key is read from $OPENAI_API_KEY.

    Args:
        urls: base URLs of the servers, with or without /v1.
        target: name of the model, unless the server lists exactly one; "NAME --adapter LORA": it is asked for LORA.
        tokenizer: the target's.
        prompts: prompts to continue, and conversations to answer.
        folder: output folder, resumed if it is unfinished. Completions are stored in batches of `concurrency` rows, as
            it was when the folder was begun.
        writing: sampling and length of the completions.
        max_prompt_tokens: a conversation ends when its prompt is longer.
        concurrency: concurrent requests to each server.
        progress: show a progress bar.

    Raises:
        UserError: no server is available, one does not sample, or no prompt is answered.
    """
    bases = base_urls([urls] if isinstance(urls, str) else urls, "--server")
    record: JsonObject = {"target": target, "drafter": "server", **record_of(writing, prompts)}
    if writing.ends:
        record["ends"] = asdict(writing.ends)
    size: Any = (stored_record(Path(folder)) or {}).get("batch_size", concurrency)
    # Of 70 prompts, 32 in a batch: 0..31, 32..63 and 64..69.
    rows = [list(range(start, min(start + size, len(prompts)))) for start in range(0, len(prompts), size)]
    servers = [_TextServer(base, target, tokenizer, writing) for base in bases]
    with Batches(Path(folder), {**record, "batch_size": size}, rows, progress) as work:
        if batches := work.todo():
            todo = {batch: rows[batch] for batch in batches}
            asyncio.run(_fetch(servers, work, todo, prompts, max_prompt_tokens, concurrency))
        return work.finish(_summary)


def shortest_context(urls: Sequence[str], target: str) -> int:
    """Return the shortest context of some servers; sys.maxsize: none tells it, or none is there.

    Args:
        target: name of the model, unless a server lists exactly one.
    """
    contexts = [sys.maxsize]
    for base in base_urls(urls, "--server"):
        server = Connection(base, "--server", openai.OpenAI, max_retries=0, timeout=_FIRST_SECONDS)
        with suppress(openai.APIError, AttributeError, TypeError, ValueError), server.client as client:
            contexts.append(_listed(client.models.list().data, target)[1])
    return min(contexts)


def _listed(models: Sequence[Any], name: str) -> tuple[str, int]:
    """Return the name of the only model that a server lists, or else `name`, and its context length.

    A server of adapters lists them beside the model; `name` may be "NAME --adapter LORA". The length is sys.maxsize if
    the server does not tell it.
    """
    _, adapter, asked = name.rpartition(" --adapter ")
    own = models if len(models) == 1 and not adapter else [each for each in models if each.id == asked]
    if not own:
        return asked, sys.maxsize
    # vLLM and our server tell it, vLLM beside the model of an adapter only.
    lengths = [getattr(each, "max_model_len", None) or 0 for each in (own if not adapter else models)]
    return own[0].id, max(lengths) or sys.maxsize


def _summary(batches: list[BatchFacts]) -> JsonObject:
    """Return facts for the manifest: answers of each server and in all, models, and seconds; None for draft speeds."""
    by_server: Counter[str] = Counter()
    for facts in batches:
        by_server.update(facts["servers"])
    return {
        "servers": dict(by_server),
        "models": sorted({model for facts in batches for model in facts.get("models", ())}),
        "answers": by_server.total(),
        "acceptance_length": None,
        "tokens_per_second": {"speculative": None, "plain": None},
        "seconds": sum(facts["seconds"] for facts in batches),
    }


async def _fetch(
    servers: Sequence[_TextServer],
    work: Batches,
    batches: dict[int, list[int]],
    prompts: Sequence[Conversation],
    max_prompt_tokens: int,
    concurrency: int,
) -> None:
    """Request the answers to the prompts of some batches, and write each batch when its last conversation has ended.

    `batches` maps the number of a batch to the numbers of its prompts.
    """
    available = set(servers)
    refused: list[str] = []
    finished: dict[int, dict[int, Answering]] = {batch: {} for batch in batches}
    by_server: dict[int, Counter[str]] = {batch: Counter() for batch in batches}
    written_at = time.monotonic()

    def drop(server: _TextServer, error: Exception) -> None:
        fault = server.describe(error)
        known = server in available
        available.discard(server)
        if not available:  # also for later errors: a task that missed its cancellation must not wait for a slot
            raise UserError(fault) from None
        if known:
            log(f"warning: {fault}; continuing with {len(available)} of {len(servers)} servers")

    def asked_again(server: _TextServer, error: Exception, begun: float) -> bool:
        """Return whether a server that did not answer a request sent at the time `begun` is not to be dropped."""
        if server.answered is None:
            return False
        if isinstance(error, asyncio.TimeoutError) and server.answered > begun:
            return True  # busy: it answered other requests meanwhile
        if available != {server}:
            return False
        if server.away_since is None:
            server.away_since = time.monotonic()
            log(f"warning: {server.describe(error)}; waiting for it, at most {_AWAY_SECONDS / 60:g} minutes")
        return time.monotonic() - server.away_since < _AWAY_SECONDS

    def room() -> int:
        """Return the length of a prompt that leaves room for a completion on every server, once they were probed."""
        return min(server.longest for server in available)

    async def probe(server: _TextServer) -> None:
        try:
            await server.probe(prompts)
        except UNAVAILABLE as error:
            drop(server, error)

    async def fetch(batch: int, row: int) -> None:
        longest = min(max_prompt_tokens, room())
        answering: Answering | None = None
        if row in beyond:
            answering = Answering(prompts[row], servers[0].tokenizer, longest)
            answering.stop()
        while answering is None or answering.prompt is not None:
            server = await free_slots.get()
            # A server that was dropped leaves its entries in the queue: take them out one by one.
            if server not in available:
                continue
            # Not before there is a slot: all rows wait here at once.
            answering = answering or Answering(prompts[row], servers[0].tokenizer, longest)
            try:  # one server answers all turns: it has the chat so far in its cache
                while answering.prompt is not None:
                    begun = time.monotonic()
                    sampling = server.writing.sampling(row, len(prompts), answering.answers)
                    tokens, ended = await server.complete(row, answering.prompt, sampling)
                    answering.add(tokens, ended)
                    by_server[batch][server.url] += 1
            except UNAVAILABLE as error:
                if not asked_again(server, error, begun):
                    drop(server, error)
                    continue
            except RefusedPromptError as error:  # of a server that does not tell its context, a chat beyond it
                if not answering.answers and server.tells_context:
                    raise
                refused.append(str(error))
                answering.stop()
            free_slots.put_nowait(server)
        finished[batch][row] = answering
        # Conversations end in any order; the last one of a batch writes the whole batch.
        if len(finished[batch]) == len(batches[batch]):
            nonlocal written_at
            made, seconds = finished.pop(batch), time.monotonic() - written_at
            rows = [[each.columns() for each in made[row].rows] for row in batches[batch]]
            models = sorted({server.model for server in servers})
            answered, cut = dict(by_server.pop(batch)), sum(each.cut for each in made.values())
            work.write(batch, rows, servers=answered, models=models, cut=cut, seconds=seconds)
            written_at = time.monotonic()

    try:
        await asyncio.gather(*map(probe, servers))
        longest = room()
        if beyond := {row for rows in batches.values() for row in rows if len(prompts[row].ids) > longest}:
            long = (
                f"{len(beyond)} prompts, such as number {min(beyond) + 1}, have more than {longest} tokens: the "
                "servers' context leaves no room for max_new_tokens"
            )
            refuse((len(beyond) == len(prompts), f"{long}; start them with a longer one"))
            log(f"{long}; they are skipped")
        # One entry per request that a server may serve: a semaphore for each server, taken in turn.
        free_slots: asyncio.Queue[_TextServer] = asyncio.Queue()
        for server in [*available] * concurrency:
            free_slots.put_nowait(server)
        await asyncio.gather(*(fetch(batch, row) for batch, rows in batches.items() for row in rows))
        if refused:
            log(f"{len(refused)} chats end before a turn that the server refused, such as {refused[0]}")
    finally:
        for server in servers:
            await server.client.close()


class RefusedPromptError(UserError):
    """A server refused a prompt as a bad request."""


class _TextServer(Connection):
    """A server that continues prompts.

    Args:
        base: its URL without /v1.
        target: see `fetch_rows`.
        tokenizer: the target's.
        writing: sampling and length of the completions.

    Attributes:
        model: name of the model that it is asked for, once `probe` has asked the server.
        longest: largest length of a prompt that leaves room for a completion, once `probe` has asked the server.
        answered: time of the latest answer, of `time.monotonic`; None before the first.
        away_since: time of the first failure after it; None: there was none.
        agrees: whether the tokenizer gave an answer's token ids the server's text; None: no answer had both.
    """

    def __init__(self, base: str, target: str, tokenizer: PreTrainedTokenizerBase, writing: Writing):
        self._seconds = _REQUEST_SECONDS + _TOKEN_SECONDS * writing.max_new_tokens
        super().__init__(
            base,
            "--server",
            openai.AsyncOpenAI,
            max_retries=_RETRIES,
            timeout=openai.Timeout(self._seconds, connect=_FIRST_SECONDS),
        )
        self.answered: float | None = None
        self.away_since: float | None = None
        self._gives_text = False  # without token ids
        self.model, self.tokenizer, self.writing = _listed((), target)[0], tokenizer, writing
        self._target = target
        self.agrees: bool | None = None
        self.longest, self.tells_context = sys.maxsize, False

    def describe(self, error: Exception) -> str:
        """Return one line that names the server and what went wrong, without secrets."""
        if isinstance(error, asyncio.TimeoutError):
            return f"{self.url}: no answer within {self._seconds:g} seconds"
        return super().describe(error)

    async def probe(self, prompts: Sequence[Conversation]) -> None:
        """Ask for the model's name and context length, and check that two seeds give two texts after a few words.

        Raises a UserError if the server refuses these words, or if none of a few prompts gets two different texts: it
        does not sample.
        """
        try:
            models = (await self.client.with_options(max_retries=0, timeout=_FIRST_SECONDS).models.list()).data
            self.model, context = _listed(models, self._target)
            self.longest, self.tells_context = context - self.writing.max_new_tokens, context < sys.maxsize
            if len(models) > 1:
                log(f"{self.url}: {self.model} answers, of the models {', '.join(each.id for each in models)}")
            elif Path(self.model).name != Path(self._target).name:
                log(f"{self.url}: {self.model} answers, the server's only model, for {self._target}")
        except (openai.APIStatusError, AttributeError, TypeError, ValueError):
            pass  # some servers do not list their models
        rows, seed = len(prompts), self.writing.seed
        warm = [row for row in range(rows) if self.writing.sampling(row, rows).temperature >= _WARM]
        # An answer may be certain, as "Paris" or a label is, a model may know its system prompt by heart, and the run's
        # top_k may be 1. These texts are open to any model, and without filters only a greedy server continues several
        # of them in the same way for both seeds.
        for row in warm[:_PROBE_PROMPTS] or [0]:
            prompt = Conversation(text_tokens([f"Page {row + 1}"], self.tokenizer)[0])
            free = [Sampling(1.0, seed=each) for each in (seed + 2 * row, seed + 2 * row + 1)]
            texts = [await self.complete(row, prompt, each, _PROBE_TOKENS) for each in free]
            if self.agrees is False:
                raise UserError(
                    f"{self.url}: the texts of {self.model} are not what the tokenizer of {self._target} makes of its "
                    "token ids: it serves another model"
                )
            if texts[0] != texts[1]:
                return
        if warm:
            raise UserError(f"{self.url} returns the same text for two seeds: it does not sample at temperature 1")

    async def complete(
        self, row: int, prompt: Conversation, sampling: Sampling, max_tokens: int | None = None
    ) -> tuple[list[int], bool]:
        """Return the tokens of the answer to a prompt, and whether it ended by itself, not at its length limit.

        Args:
            row: number of the prompt, which names it in errors.
            max_tokens: largest length of the answer (default: `writing.max_new_tokens`).
        """
        max_tokens = max_tokens or self.writing.max_new_tokens
        # Not in OpenAI's API. The samplers override the server's own defaults.
        samplers: JsonObject = {"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0}
        if whole := self._gives_text:
            samplers["skip_special_tokens"] = False
        if ends := self.writing.ends:
            samplers |= {"stop_token_ids": ends.eos_token_ids, "stop": ends.stop_strings}
        try:
            request = self.client.completions.create(
                model=self.model,
                prompt=prompt.ids,
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                extra_body={**samplers, "return_token_ids": True},
            )
            answer = await asyncio.wait_for(request, self._seconds)
            # A server for training also stores hidden states; those of this answer are deleted at once.
            await asyncio.to_thread(discard, answer)
            choice = answer.choices[0]
            ended = choice.finish_reason == "stop"
            tokens = getattr(choice, "token_ids", None)
            self.answered, self.away_since = time.monotonic(), None
            if not tokens and not whole:
                # A text without its special tokens, as those around a tool call, is not what the target wrote.
                self._gives_text = True
                return await self.complete(row, prompt, sampling, max_tokens)
            if tokens:
                self._compare(tokens, choice.text)
            tokens = tokens or self._tokenize(prompt.ids, choice.text, ended, prompt.ends)
        except UNAVAILABLE:
            raise
        except openai.BadRequestError as error:
            raise RefusedPromptError(f"prompt {row + 1}: {self.describe(error)}") from None
        except openai.APIError as error:
            raise UserError(f"prompt {row + 1}: {self.describe(error)}") from None
        except (AttributeError, TypeError, IndexError, ValueError):
            raise UserError(f"{self.url}: an answer that is not in the format of OpenAI's API") from None
        if not tokens:
            raise UserError(f"{self.url}: prompt {row + 1}: an empty completion")
        return list(tokens)[:max_tokens], ended

    def _compare(self, tokens: list[int], text: str) -> None:
        """Set `agrees` by whether the tokenizer gives the token ids the answer's text."""
        # The server's text may lack a half character and stop strings at its end, and any special token.
        own, theirs = (
            "".join(each.replace("\ufffd", "").split()) for each in (decoded(self.tokenizer, tokens, False), text)
        )
        if theirs:
            self.agrees = bool(self.agrees) or own.startswith(theirs)

    def _tokenize(self, prompt: list[int], text: str, ended: bool, chat: bool) -> list[int]:
        """Return the tokens of a completion's text, as they follow the prompt's tokens.

        If the completion `ended` by itself, the end token is appended, which servers remove: in a `chat` that of the
        template, else EOS.
        """
        before = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        assert isinstance(before, str)
        tokens = self.tokenizer(before + text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokens[: len(prompt)] == prompt:
            tokens = tokens[len(prompt) :]
        else:  # the text's first characters would merge with the prompt's last token
            tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = end_token(self.tokenizer) if chat else None
        end = self.tokenizer.eos_token_id if end is None else end
        return tokens if not ended or end is None or tokens[-1:] == [end] else [*tokens, end]
