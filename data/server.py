"""On-policy text from a server with OpenAI's interface: the target runs there, only its tokenizer is needed here."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.batches import Batches
from data.onpolicy import ON_POLICY, record_of
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse

CONCURRENCY = 32
"""Requests at a time."""
_TRIES = 8
_FIRST_DELAY = 0.5  # seconds; doubled from try to try, so a server may be gone for a minute
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_NOT_SO = (400, 404, 405, 415, 422, 501)  # what servers say of a path, a prompt or a field that they don't know
_PROBE_TOKENS = 32
_PROBE_PROMPTS = 4
_WARM = 0.5  # from this temperature on, texts that are alike under two seeds were not sampled


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the messages that they were rendered from, if they were."""

    ids: list[int]
    messages: list[dict] | None = None


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


class _RefusedError(UserError):
    """The server won't take a prompt in this form."""


def fetch_rows(
    url: str,
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    sampling: Sampling = ON_POLICY,
    max_new_tokens: int = 256,
    concurrency: int = CONCURRENCY,
    seed: int = 0,
    progress: bool = True,
) -> Dataset:
    """Rows as `data.onpolicy.generate_rows` makes them, continued by a server: vLLM, SGLang, llama.cpp and others.

    The first prompts find out what the server takes: token ids, else text, or messages for a prompt rendered from
    them. An answer that comes as text is tokenised behind its prompt. Rate limits, errors of the server and lost
    connections are tried again for a minute. A key is taken from $OPENAI_API_KEY.

    Args:
        url: of the server, with or without /v1.
        target: the model's name there, unless the server has only one.
        tokenizer: the target's.
        prompts: to continue.
        folder: as for `generate_rows`; answers are kept there `concurrency` at a time.
        sampling, max_new_tokens, seed, progress: as for `generate_rows`; row r asks for the seed `seed + r`.
        concurrency: requests at a time.

    Raises:
        UserError: a server that can't be reached, takes a prompt in no form, reads it as another number of tokens,
            does not sample, or refuses a prompt; a folder that was made otherwise.
    """
    refuse(
        (not prompts, "no prompt to continue"),
        (concurrency < 1, f"{concurrency} requests at a time are not at least 1"),
        (max_new_tokens < 1, f"max_new_tokens {max_new_tokens} is not at least 1"),
    )
    ids = [prompt.ids for prompt in prompts]
    record = {"target": target, "drafter": "server", **record_of([sampling], seed, max_new_tokens, ids)}
    rows = [list(range(start, min(start + concurrency, len(prompts)))) for start in range(0, len(prompts), concurrency)]
    unknown = {"tokens_per_step": None, "tokens_per_second": {"speculative": None, "same_loop": None}}
    with Batches(Path(folder), {**record, "batch_size": concurrency}, rows, progress) as work:
        if todo := work.todo():
            server = _Server(url, target, tokenizer, sampling, max_new_tokens, concurrency)
            pool = ThreadPoolExecutor(concurrency)
            try:
                server.probe(prompts, seed)
                # All requests queue at once: a slow answer keeps no other row waiting, whichever batch it is in.
                asked = [[pool.submit(server.ask, row, prompts[row], seed + row) for row in rows[i]] for i in todo]
                for batch, answers in zip(todo, asked, strict=True):
                    work.write(batch, [answer.result() for answer in answers])
            finally:
                server.close()
                pool.shutdown(cancel_futures=True)
        return work.finish(ids, lambda _: unknown)


class _Server:
    """The server, and what it takes.

    Args: as of `fetch_rows`.
    """

    def __init__(
        self,
        url: str,
        target: str,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        max_new_tokens: int,
        connections: int,
    ):
        self.url, self.tokenizer = url.rstrip("/").removesuffix("/v1"), tokenizer
        self.sampling, self.max_new_tokens = sampling, max_new_tokens
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=connections),
        )
        self._reached = False
        self._closed = threading.Event()
        self._forms: dict[bool, _Form] = {}
        self._target = target
        self._model = ""

    def close(self) -> None:
        """Give up what is under way."""
        self._closed.set()
        self._client.close()

    def probe(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Find out the model's name, the form of prompt to use, and whether the server samples."""
        try:
            names = [model["id"] for model in self._answer("GET", "models", tries=3)["data"]]
        except (UserError, KeyError, TypeError):
            if not self._reached:
                raise
            names = []  # some servers have no list, or fail to make it
        self._model = names[0] if len(names) == 1 else self._target
        for chat in (False, True):
            of_kind = [prompt for prompt in prompts if bool(prompt.messages) == chat][:_PROBE_PROMPTS]
            if of_kind:
                self._forms[chat] = self._form(of_kind[0], seed)
                if self.sampling.temperature >= _WARM and not self._samples(of_kind, self._forms[chat], seed):
                    raise UserError(
                        f"{self.url} gives the same texts under two seeds, so it does not sample at temperature "
                        f"{self.sampling.temperature:g} (transformers serve samples where the model's "
                        "generation_config.json has do_sample)"
                    )

    def ask(self, row: int, prompt: Prompt, seed: int) -> list[int]:
        """The new tokens of a row."""
        try:
            return self._continue(prompt, self._forms[bool(prompt.messages)], seed, self.max_new_tokens)
        except _RefusedError as error:
            raise UserError(f"prompt {row + 1}: {error}") from None

    def _form(self, prompt: Prompt, seed: int) -> _Form:
        """The most exact form that the server takes: ids leave no doubt about the context."""
        asked = self.sampling.top_k or self.sampling.min_p
        last = None
        for kind in ("ids", "messages" if prompt.messages else "text"):
            for extended in (True,) if asked else (True, False):
                try:
                    self._continue(prompt, _Form(kind, extended), seed, _PROBE_TOKENS)
                    return _Form(kind, extended)
                except _RefusedError as error:
                    last = error
        which = "top_k or min_p" if asked else "the first prompt in any form"
        raise UserError(f"{self.url} does not take {which}; its last answer was: {last}")

    def _samples(self, prompts: Sequence[Prompt], form: _Form, seed: int) -> bool:
        return any(
            self._continue(prompt, form, seed, _PROBE_TOKENS) != self._continue(prompt, form, seed + 1, _PROBE_TOKENS)
            for prompt in prompts
        )

    def _continue(self, prompt: Prompt, form: _Form, seed: int, count: int) -> list[int]:
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
            answer = self._answer("POST", "chat/completions", {**body, "messages": prompt.messages})
        else:
            # A tokenizer puts special tokens in front of a text itself, here and there.
            text = self.tokenizer.decode(prompt.ids, skip_special_tokens=True)
            answer = self._answer("POST", "completions", {**body, "prompt": prompt.ids if form.kind == "ids" else text})
        try:
            choice = answer["choices"][0]
            message = choice.get("message") or {"content": choice.get("text")}
            read = (answer.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _RefusedError(f"an answer without a choice: {answer!r:.200}") from None
        if form.kind != "text" and read is not None and read != len(prompt.ids):
            raise UserError(
                f"{self.url} reads a prompt of {len(prompt.ids)} tokens as {read}: another tokenizer or chat template"
            )
        if message.get("reasoning_content") or message.get("reasoning"):
            raise _RefusedError("reasoning apart from the answer: start the server without a reasoning parser")
        return choice.get("token_ids") or self._tokens(prompt.ids, message["content"], choice.get("finish_reason"))

    def _tokens(self, prompt: list[int], text: str | None, finish_reason: str | None) -> list[int]:
        """The tokens of a text that follows the prompt, and EOS where it ended by itself."""
        before = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
        whole = self.tokenizer(before + (text or ""), add_special_tokens=False, verbose=False)["input_ids"]
        if whole[: len(prompt)] == prompt:
            new = whole[len(prompt) :]
        else:  # the text's beginning would merge with the prompt's end
            new = self.tokenizer(text or "", add_special_tokens=False, verbose=False)["input_ids"]
        if finish_reason == "stop" and self.tokenizer.eos_token_id is not None:
            new = [*new, self.tokenizer.eos_token_id]
        if not new:
            raise _RefusedError("an empty answer")
        return new

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, tries: int = _TRIES
    ) -> dict[str, Any]:
        """The JSON that the server answers; tried again while the fault may pass."""
        fault = ""
        for attempt in range(tries):
            if attempt:
                self._closed.wait(_FIRST_DELAY * 2 ** (attempt - 1))
            if self._closed.is_set():
                break
            try:
                response = self._client.request(method, f"{self.url}/v1/{path}", json=body)
                self._reached = True
                if response.is_success:
                    return response.json()
                fault = f"{response.status_code} {response.text[:200]}"
                if response.status_code in _NOT_SO:
                    raise _RefusedError(fault)
                if response.status_code != 429 and response.status_code < 500:
                    break
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise UserError(f"--server {self.url}: {error}") from None
            except (httpx.TransportError, ValueError) as error:
                if not self._reached:
                    raise UserError(f"no server at {self.url}: {error}") from None
                fault = str(error) or type(error).__name__
        raise UserError(f"{self.url}/v1/{path}: {fault}")
