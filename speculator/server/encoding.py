"""Prompts to tokens, aside from the event loop: texts in a thread, chats in a process of their own.

A chat template is a program of the model's, run on what clients write. `chat_text` bounds its time by a signal, which
comes to a main thread alone, and its memory by the limit of a whole process: the server's main thread and its memory
are not to be had for that.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError
from speculator.prompts import Prompt

_SECONDS = 30.0  # for one chat, the start of the process included; the template's own bound is far below


class Encoder:
    """The tokens of prompts.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._thread = ThreadPoolExecutor(1, "chats")

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat_template is not None

    def start(self) -> None:
        """Start the process: the first chat need not wait for its imports."""
        if self.chats:
            self._thread.submit(self._start)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """Its tokens.

        Raises:
            UserError: as `Prompt.tokens`.
        """
        if prompt.chat:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, prompt)
        return await asyncio.to_thread(prompt.tokens, self._tokenizer)

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(cancel_futures=True)
        self._stop()

    # In the thread of the chats.

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._tokenizer), daemon=True)
        self._process.start()
        theirs.close()

    def _stop(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._process = None

    def _ask(self, prompt: Prompt) -> list[int]:
        if self._process is None or not self._process.is_alive():
            self._stop()
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(prompt)
            answered = self._pipe.poll(_SECONDS)
            answer = self._pipe.recv() if answered else UserError("the chat template does not end")
        except (EOFError, OSError):
            answered, answer = False, UserError("the chat template takes too much memory")
        if not answered:
            self._stop()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(pipe: Connection, tokenizer: PreTrainedTokenizerBase) -> None:
    """The process: an answer for each prompt, until the server closes the pipe, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends it, when its last request has been answered
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            prompt = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = prompt.tokens(tokenizer)
        except UserError as error:
            answer = UserError(str(error))
        pipe.send(answer)
