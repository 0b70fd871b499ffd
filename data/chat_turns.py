"""Find where the user and the assistant speak in a chat template, and check the user turns that a target writes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.conversations import Row
from data.duplicates import NearDuplicates
from data.writing import Ends
from speculator.chat import DATA_DAY, Message, chat_text, chat_tokens, decoded
from speculator.errors import UserError, refuse
from speculator.target.base import TrainingTarget

_MARKS = ("MARKofUSERone", "MARKofANSWER", "MARKofUSERtwo")
_NGRAM, _MIN_NGRAMS = 4, 12


@dataclass(frozen=True)
class TurnTexts:
    """The texts that a chat template writes around the turns of a user and an assistant.

    Attributes:
        before: before the user's first turn.
        ask: between the user's first turn and the answer.
        again: between an answer and the user's next turn.
        ask_again: between the user's next turn and its answer.
    """

    before: str
    ask: str
    again: str = ""
    ask_again: str = ""


def turn_texts(tokenizer: PreTrainedTokenizerBase, several: bool = False) -> TurnTexts | None:
    """Return the texts around the first turns, and with `several` around the next user turn; None: no chat template.

    Raises a UserError if the template does not write each turn exactly once and unchanged.
    """
    if not tokenizer.chat_template:
        return None
    first = _split_at_turns(tokenizer, 1)
    return TurnTexts(*first, *_split_at_turns(tokenizer, 3)[2:]) if several else TurnTexts(*first)


def _split_at_turns(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Return the `count` + 1 texts that the template writes before, between and after the first `count` turns."""
    roles = ("user", "assistant", "user")
    messages: list[Message] = [
        {"role": role, "content": mark} for role, mark in zip(roles, _MARKS[:count], strict=False)
    ]
    text = chat_text(tokenizer, messages, ask=True, today=DATA_DAY)
    # Three marks cut the text into four parts: before the first user turn, the two between the turns, and the text that
    # asks for the second answer.
    parts = re.split("|".join(_MARKS[:count]), text)
    if len(parts) != count + 1 or re.findall("|".join(_MARKS), text) != list(_MARKS[:count]):
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} does not write each turn exactly once and unchanged, as "
            "the source self needs"
        )
    return parts


# It appends tokens, where `Conversation.after` renders a chat again: no template renders a chat up to where the user
# speaks, so the target continues the very tokens that it wrote, and they need not be those of their text.
class UserTurns:
    """Makes the prompts from which the target writes user turns, and drops turns that can't be used.

    Args:
        turns: largest number of user turns in a chat.
        max_new_tokens: room that the context keeps for an answer.

    Attributes:
        template: the texts around the turns; without a chat template the tokens that begin every text.
        ends: stop tokens and strings of a user turn; None without a chat template: the text just continues.
    """

    def __init__(self, target: TrainingTarget, turns: int, max_prompt_tokens: int, max_new_tokens: int, context: int):
        self.tokenizer = tokenizer = target.tokenizer
        self._texts = turn_texts(tokenizer, turns > 1)
        # Added tokens that are plain text, as runs of spaces in GPT-NeoX and line breaks in Gemma, are no marks.
        added = tokenizer.added_tokens_decoder.items()
        marks = {index for index, token in added if token.special or str(token).replace("\u2581", " ").strip()}
        self._special = {*marks, *target.eos_token_ids}
        self._max_prompt_tokens, self._max_context = max_prompt_tokens, context - max_new_tokens
        self._max_asking = context - max(max_prompt_tokens, max_new_tokens)
        self._seen = NearDuplicates()
        self.ends: Ends | None = None
        if self._texts is None:
            single = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
            self._first = tokenizer("", verbose=False)["input_ids"] or single
            refuse(
                (not self._first, f"{target.name} has no chat template and no BOS or EOS token to begin a text with"),
                (turns > 1, f"{target.name} has no chat template, so it can't write chats of {turns} turns"),
            )
            self.template: Any = self._first
            return
        self.template = asdict(self._texts)
        # What the template writes after a user turn ends the turn: its first token that is no space, such as
        # <|im_end|>.
        ask = [
            token
            for token in chat_tokens(self._texts.ask, tokenizer)
            if decoded(tokenizer, [token], special=True).strip()
        ]
        if ask and ask[0] in tokenizer.added_tokens_decoder:
            self.ends = Ends(sorted({ask[0], *target.eos_token_ids}))
        else:  # plain words, such as "ASSISTANT:"
            self.ends = Ends(sorted(target.eos_token_ids), self._texts.ask.strip().splitlines()[:1])
        if not (self.ends.eos_token_ids or self.ends.stop_strings):
            raise UserError(f"{target.name}: its chat template writes nothing between a user turn and the answer")

    def add_seen(self, folder: Path) -> str:
        """Register the first user turns of a folder, so that `add` drops near-duplicates; return the texts' hash."""
        texts = []
        for row in Dataset.load_from_disk(str(folder / "rows")):
            # The first answer begins at the first token with loss; before it are the turn and the template's texts.
            ids = row["input_ids"][0 if self._texts else len(self._first) : row["loss_mask"].index(1)]
            text = decoded(self.tokenizer, ids, special=True)
            if self._texts:
                text = text.removeprefix(self._texts.before).partition(self._texts.ask)[0]
            self._seen.add(text)
            texts.append(text)
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def prompt(self, chat: Row) -> list[int]:
        """Return the prompt of the next user turn: the chat so far, and what the template writes before a user turn."""
        if self._texts is None:
            return self._first
        # A model that is given the last space does not write the word after it.
        text = (self._texts.again if chat.ids else self._texts.before).rstrip(" ")
        return chat.ids + self._continue(chat, text)

    def has_room(self, chat: Row) -> bool:
        return len(self.prompt(chat)) < self._max_asking

    def _continue(self, chat: Row, text: str) -> list[int]:
        tokens = chat_tokens(text, self.tokenizer)
        # The answer ends with <|im_end|>, and the template's text between answer and question begins with it.
        return tokens[1:] if chat.ids and tokens[:1] == chat.ids[-1:] else tokens

    def add(self, chat: Row, tokens: list[int]) -> str | None:
        """Append a user turn, and the template's text up to its answer, to a chat; or drop the turn and return why."""
        text, ended = self._read(tokens)
        if self._texts is None:
            following = [*self._first, *tokens]
        elif chat.ids:
            following = self._continue(chat, self._texts.again + text + self._texts.ask_again)
        else:
            following = chat_tokens(self._texts.before + text + self._texts.ask, self.tokenizer)
        # The token that ends a turn may stand at its end only; anywhere else it would open a turn of its own.
        body = tokens[:-1] if tokens[-1] in self._special else tokens
        # A turn of a chat has to end. Without a chat template the text is a prompt to continue, which must not.
        if ended != (self._texts is not None):
            limit = f"ended within {self._max_prompt_tokens} tokens"
            return f"not {limit}" if self._texts else limit
        if not re.search(r"\w", text):
            return "empty"
        if self._special.intersection(body):
            return "with special tokens in it"
        if is_repetitive(body):
            return "repetitive"
        if len(chat.ids) + len(following) > self._max_context:
            return "without room for an answer"
        if not chat.ids and self._seen.add(text):
            return "near-duplicate"
        chat.add(following, 0)
        return None

    def _read(self, tokens: list[int]) -> tuple[str, bool]:
        """Return the text of a turn, and whether an end token or a stop string ended it."""
        ends = self.ends or Ends([])
        ended = tokens[-1] in {*ends.eos_token_ids, *self._special}
        text = decoded(self.tokenizer, tokens[:-1] if ended else tokens, special=True)
        for string in ends.stop_strings:
            text, found, _ = text.partition(string)
            ended |= bool(found)
        return text.strip(), ended


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Return whether more than half of a text's 4-grams of tokens occurred earlier in it; False for a short text."""
    # With 12 4-grams of which 5 are different, 7 have occurred before.
    ngrams = list(zip(*(tokens[i:] for i in range(_NGRAM)), strict=False))
    return len(ngrams) >= _MIN_NGRAMS and len(set(ngrams)) < len(ngrams) / 2
