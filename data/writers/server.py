"""Servers with the OpenAI API as a writer; only the target's tokenizer is needed locally."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from transformers import PreTrainedTokenizerBase

from data.conversations import Answering
from data.rendering import text_tokens
from data.writers.base import Job, Writer
from data.writing import Writing
from speculator.chat import decoded, end_token
from speculator.clients.connection import UNAVAILABLE, Connection, base_urls
from speculator.clients.hidden_states import discard
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.prompts import Conversation
from speculator.target.base import PromptTarget
from speculator.target.remote.server_target import ServerTarget
from speculator.terminal import log

CONCURRENCY = 32
"""Concurrent requests to each server."""
FAILURES = ("out_of_memory", "not_finite")
"""Codes of our server's errors about one answer alone."""
_RETRIES = 10  # the client doubles the delay from 0.5 s up to 8 s, so a server may be away for about a minute
_AWAY_SECONDS = 1200.0  # that the last server may be away
_REQUEST_SECONDS, _TOKEN_SECONDS = 1200.0, 0.5  # for one answer, retries included: in all, and for each new token
_FIRST_SECONDS = 30.0  # timeout of the first request to a server
_PROBE_TOKENS = 32
_PROBE_PROMPTS = 4
_WARM = 0.5  # from this temperature on, two seeds should give different texts


@dataclass(kw_only=True)
class TextOnly(PromptTarget):
    """A target that servers run, of which only the tokenizer is here.

    Attributes:
        name: of the model, unless a server lists exactly one; "NAME --adapter LORA": it is asked for LORA.
        urls: base URLs of the servers, with or without /v1.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    urls: Sequence[str] = ()


class ServerWriter(Writer):
    """Answers with servers that run the target (vLLM, SGLang, llama.cpp, ...).

    Prompts are sent as token ids. A completion without `token_ids` is tokenized from its text. A server that stays
    unavailable for a minute is dropped with a warning, and the others take over its rows; the last one may be away for
    20 minutes. A turn that a server refuses ends its chat. A first turn that it refuses, or that leaves its context no
    room for an answer, gives no row. The API key is read from $OPENAI_API_KEY.

    Args:
        batch_size: concurrent requests to each server.
    """

    def __init__(self, target: ServerTarget | TextOnly, batch_size: int = CONCURRENCY):
        self.urls, self.batch_size, self.record = base_urls(target.urls, "--server"), batch_size, {"drafter": "server"}
        self.name, self.tokenizer, self.context_length = target.name, target.tokenizer, target.context_length

    def answer(self, job: Job, todo: Sequence[int]) -> None:
        """Raises a UserError if no server is available, one does not sample, or no prompt has room for an answer."""
        asyncio.run(_Requests(job, self, todo).run())

    def shortest_context(self) -> int:
        contexts = [self.context_length]
        for base in self.urls:
            server = Connection(base, "--server", openai.OpenAI, max_retries=0, timeout=_FIRST_SECONDS)
            with suppress(openai.APIError, AttributeError, TypeError, ValueError), server.client as client:
                contexts.append(_listed(client.models.list().data, self.name)[1])
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


class _Requests:
    """The requests of a job to its servers, all at once."""

    def __init__(self, job: Job, writer: ServerWriter, todo: Sequence[int]):
        self.job, self.todo, self.concurrency = job, todo, writer.batch_size
        self.servers = [_TextServer(base, writer.name, writer.tokenizer, job.writing) for base in writer.urls]
        self.available = set(self.servers)
        self.written, self.written_at = False, time.monotonic()

    async def run(self) -> None:
        """Write each batch when its last conversation has ended."""
        try:
            await asyncio.gather(*map(self._probe, self.servers))
            # The longest prompt that leaves room for an answer on every server.
            self.room = min(server.longest for server in self.available)
            self.job.longest = min(self.job.longest, self.room)
            self.over = f"more than {self.room} tokens: the servers' context leaves no room for max_new_tokens"
            chats = self.job.chats
            over = all(len(chat.ids) > self.room for chat in chats)
            refuse((over, f"all {len(chats)} prompts have {self.over}; start them with a longer one"))
            # One entry per request that a server may serve: a semaphore for each server, taken in turn.
            self.free_slots: asyncio.Queue[_TextServer] = asyncio.Queue()
            for server in [*self.available] * self.concurrency:
                self.free_slots.put_nowait(server)
            await asyncio.gather(*map(self._batch, self.todo))
        except UserError as error:
            raise UserError(f"{error}{'; the same command resumes' * self.written}") from None
        finally:
            for server in self.servers:
                await server.client.close()

    async def _probe(self, server: _TextServer) -> None:
        try:
            await server.probe(len(self.job.chats))
        except UNAVAILABLE as error:
            self._drop(server, error)

    async def _batch(self, batch: int) -> None:
        by_server: Counter[str] = Counter()
        chats = await asyncio.gather(*(self._chat(row, by_server) for row in self.job.work.rows[batch]))
        models = sorted({server.model for server in self.servers})
        seconds, self.written_at = time.monotonic() - self.written_at, time.monotonic()
        self.job.finish(batch, chats, servers=dict(by_server), models=models, seconds=seconds)
        self.written = True

    async def _chat(self, row: int, by_server: Counter[str]) -> Answering:
        """Answer a chat, and count its answers `by_server`."""
        chat: Answering | None = None
        while chat is None or chat.prompt is not None:
            server = await self.free_slots.get()
            # A server that was dropped leaves its entries in the queue: take them out one by one.
            if server not in self.available:
                continue
            # Not before there is a slot: all rows wait here at once.
            chat = chat or self.job.begin(row)
            if len(self.job.chats[row].ids) > self.room:
                chat.stop(f"prompt {row + 1} has {self.over}")
            begun = time.monotonic()
            try:  # one server answers all turns: it has the chat so far in its cache
                while chat.prompt is not None:
                    begun = time.monotonic()
                    tokens, ended = await server.complete(row, chat.prompt, self.job.sampling(chat))
                    chat.add(tokens, ended)
                    by_server[server.url] += 1
            except UNAVAILABLE as error:
                if not self._asked_again(server, error, begun):
                    self._drop(server, error)
                    continue
            except FailedPromptError as error:
                # A prompt that fits the context may be refused for a reason that all rows share.
                if error.refused and not chat.answers and server.tells_context:
                    raise
                chat.stop(str(error))
            self.free_slots.put_nowait(server)
        return chat

    def _drop(self, server: _TextServer, error: Exception) -> None:
        fault = server.describe(error)
        known = server in self.available
        self.available.discard(server)
        if not self.available:  # also for later errors: a task that missed its cancellation must not wait for a slot
            raise UserError(fault) from None
        if known:
            log(f"warning: {fault}; continuing with {len(self.available)} of {len(self.servers)} servers")

    def _asked_again(self, server: _TextServer, error: Exception, begun: float) -> bool:
        """Return whether a server that did not answer a request sent at the time `begun` is not to be dropped."""
        if server.answered is None:
            return False
        if isinstance(error, asyncio.TimeoutError) and server.answered > begun:
            return True  # busy: it answered other requests meanwhile
        if self.available != {server}:
            return False
        if server.away_since is None:
            server.away_since = time.monotonic()
            log(f"warning: {server.describe(error)}; waiting for it, at most {_AWAY_SECONDS / 60:g} minutes")
        return time.monotonic() - server.away_since < _AWAY_SECONDS


class FailedPromptError(UserError):
    """A server did not answer a prompt: it refused it as a bad request, or this answer alone failed."""

    def __init__(self, message: str, refused: bool):
        super().__init__(message)
        self.refused = refused


class _TextServer(Connection):
    """A server that continues prompts.

    Args:
        base: its URL without /v1.
        target: the model's name, see `TextOnly`.

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

    async def probe(self, rows: int) -> None:
        """Ask for the model's name and context length, and check that two seeds give two texts after a few words.

        Raises a UserError if the server refuses these words, or if none of a few prompts gets two different texts: it
        does not sample. The number of all prompts, `rows`, decides the samplings.
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
        seed = self.writing.seed
        first = range(min(rows, _PROBE_PROMPTS * len(self.writing.samplings)))  # they have each sampling that often
        warm = [row for row in first if self.writing.sampling(row, rows).temperature >= _WARM]
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
        """Return the tokens of the answer to prompt number `row`, and whether it ended by itself.

        Otherwise it reached `max_tokens` (default: `writing.max_new_tokens`).
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
        except (openai.APIError, asyncio.TimeoutError) as error:
            alone = isinstance(error, openai.APIError) and error.code in FAILURES
            fault = f"prompt {row + 1}: {self.describe(error)}"
            if alone or isinstance(error, openai.BadRequestError):
                raise FailedPromptError(fault, refused=not alone) from None
            if isinstance(error, UNAVAILABLE):
                raise
            raise UserError(fault) from None
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
