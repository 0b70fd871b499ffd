"""Render documents as token ids and loss masks.

The loss covers every token of a text, the completion of a prompt, and the assistant's turns of a chat with their end
tokens. Prefix rendering finds the assistant's turns: the chat template renders the chat up to a turn, and again with
that turn; the difference is what the model would write.

The text of a special token is plain text in texts and completions. In chats it becomes the special token, as on a
server: rendering does not separate the template's own special tokens from those in messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, TypeAlias

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.rows import RowError, SourceError
from data.tally import Tally
from data.workers import map_in_order
from speculator.chat import DATA_DAY, RefusedError, chat_text
from speculator.errors import UserError, first_line
from speculator.target.gguf import located

_DOCUMENTS_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 1_000_000
Chat: TypeAlias = tuple[list[int], list[int], int]
"""Token ids, loss mask, and the number of assistant turns that are left out of the loss."""


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id or a local folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(**located(name, revision), trust_remote_code=trust_remote_code)
        tokenizer("a", verbose=False)
    except Exception as error:  # the libraries raise many types for damaged files
        raise UserError(f"can't load the tokenizer of {name!r}: {first_line(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"can't load the tokenizer of {name!r}: {type(tokenizer).__name__} is not a fast tokenizer")
    return tokenizer


def text_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[list[int]]:
    """Tokenize texts, with BOS if the tokenizer adds one; the text of a special token is plain text."""
    return tokenizer(list(texts), split_special_tokens=True, verbose=False, **options)["input_ids"] if texts else []


def render(
    documents: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally | None = None,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield documents as rows {"id", "input_ids", "loss_mask"}; a packed row becomes one row per document.

    Texts and completions end with EOS, chats as their template ends them.

    Args:
        tally: counts documents that can't be rendered (default: the first one raises).
        processes: processes that render. The rows do not depend on it, but more processes read further ahead.
    """
    tally = tally or Tally()
    for rendered in map_in_order(partial(_render_batch, tokenizer=tokenizer), _batches(documents), processes):
        for each in rendered:
            if isinstance(each, RowError):
                tally.add(each)
            else:
                tally.lost_turns += each.pop("lost_turns")
                yield each


def _render_batch(batch: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any] | RowError]:
    """Return the rows of some documents, with a RowError in the place of a bad one."""
    # One call for all texts: the tokenizer then uses all cores, unless this is one of several processes.
    tokens = iter(text_tokens([document["text"] for document in batch if "text" in document], tokenizer))
    chats = _chats([document for document in batch if "messages" in document], tokenizer)
    rows: list[dict[str, Any] | RowError] = []
    for document in batch:
        lost = 0
        try:
            if "text" in document:
                ids = _with_eos(next(tokens), tokenizer)
                rendered = [(ids, [1] * len(ids))]
            elif "messages" in document:
                chat = next(chats)
                if isinstance(chat, RowError):
                    raise chat
                *tokens_and_mask, lost = chat
                rendered = [tokens_and_mask]
            elif "prompt" in document:
                rendered = [_completion(document, tokenizer)]
            else:
                rendered = list(_unpacked(document, tokenizer))
        except RowError as error:
            rows.append(error)
            continue
        row = {"id": document["id"], "lost_turns": lost}
        for ids, mask, *marks in rendered:
            rejected = marks[0] if marks else [0] * len(ids)
            rows.append({**row, "input_ids": ids, "loss_mask": mask, "rejected": rejected})
    return rows


def _batches(documents: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group documents, fewer of them if they are long."""
    batch: list[dict[str, Any]] = []
    size = 0
    for document in documents:
        batch.append(document)
        texts = (document.get("text"), *(message.get("content") for message in document.get("messages", ())))
        size += sum(map(len, filter(None, texts)))
        if len(batch) == _DOCUMENTS_AT_ONCE or size > _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _with_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise SourceError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end documents with")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _completion(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    prompt, whole = text_tokens([document["prompt"], document["prompt"] + document["completion"]], tokenizer)
    # The model continues the prompt's own tokens, so no token may span the end of the prompt.
    if whole[: len(prompt)] != prompt:
        whole = prompt + text_tokens([document["completion"]], tokenizer, add_special_tokens=False)[0]
    ids = _with_eos(whole, tokenizer)
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def check_tokens(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a RowError if a row has tokens that are not in the tokenizer's vocabulary."""
    highest = max(document["input_ids"])
    if highest >= len(tokenizer):
        fault = f"token {highest}, but the tokenizer has {len(tokenizer)}"
        raise RowError(document["where"], fault, "a token outside of the tokenizer's vocabulary")


def _unpacked(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], ...]]:
    ids, mask = document["input_ids"], document["loss_mask"]
    check_tokens(document, tokenizer)
    none = [0] * len(ids)
    columns = zip(document.get("document_ids", none), ids, mask, document.get("rejected", none), strict=True)
    for _, part in groupby(columns, key=lambda column: column[0]):
        _, *columns_of_part = zip(*part, strict=True)
        yield tuple(map(list, columns_of_part))


def document_text(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase, count: int | None = None, ask: bool = False
) -> str:
    """Render the first `count` messages of a chat; with `ask`, up to where the model answers."""
    if not tokenizer.chat_template:
        raise RowError(document["where"], f"a chat, but the tokenizer {tokenizer.name_or_path} has no chat template")
    try:
        return chat_text(tokenizer, document["messages"][:count], document.get("tools"), ask, DATA_DAY)
    except RefusedError as error:
        raise RowError(document["where"], str(error)) from None


def _chats(documents: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Chat | RowError]:
    """Yield the tokens and the loss mask of each chat, or its RowError."""
    found: list[tuple[str, list[int], list[bool]] | RowError] = []
    for document in documents:
        try:
            text = document_text(document, tokenizer)
            turns = list(_turns(document, text, tokenizer))
            # The pieces alternate: the second, the fourth, ... are the assistant's.
            places = [place for start, end, _ in turns for place in (start, end)]
            found.append((text, [*places, len(text)], [traced for *_, traced in turns]))
        except RowError as error:
            found.append(error)
    good = [each for each in found if not isinstance(each, RowError)]
    pieces = [text[a:b] for text, ends, _ in good for a, b in zip([0, *ends], ends, strict=False)]
    separate = iter(tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] if good else [])
    texts = [text for text, *_ in good]
    wholes = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if good else [])
    for document, each in zip(documents, found, strict=True):
        if isinstance(each, RowError):
            yield each
            continue
        text, ends, traced = each
        parts, whole = list(islice(separate, len(ends))), next(wholes)
        if list(chain.from_iterable(parts)) != whole:
            parts = _split_tokens(text, whole, ends, tokenizer) or parts
        mask = [int(place % 2 and traced[place // 2]) for place, part in enumerate(parts) for _ in part]
        if len(set(mask)) < 2:
            none_or_all = "all" if any(mask) else "none"
            yield RowError(document["where"], f"{none_or_all} of the chat's tokens are the assistant's")
        else:
            yield list(chain.from_iterable(parts)), mask, traced.count(False)


def _turns(document: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of each assistant turn in the text of a chat, and whether the template wrote all of it.

    The end includes the token that ends the turn.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = tuple(token.content for token in added if token.special)
    markers = "|".join(re.escape(token.content) for token in added if not token.special)
    answers = [number for number, message in enumerate(document["messages"]) if message["role"] == "assistant"]
    for number in answers:
        if number == 0:
            raise RowError(document["where"], "the chat begins with the assistant")
        before = document_text(document, tokenizer, number, ask=True)
        after = document_text(document, tokenizer, number + 1)
        turn = after[len(before) :]
        # The model stops at the token that ends its turn; the template writes the line end after it.
        if turn.rstrip().endswith(special):
            turn = turn.rstrip()
        prefix = before
        if not text.startswith(before) and markers:
            # Without thinking, some generation prompts have empty markers that earlier turns lack.
            prefix = re.sub(rf"(?:{markers})(?:{markers}|\s)*$", "", before)
        start = place = len(prefix)
        if not text.startswith(turn, place) and markers:
            # Some templates write empty markers ("<think></think>") before the last turn only.
            turn = re.sub(rf"^(?:{markers}|\s)+", "", turn)
            place += len(text[place:]) - len(text[place:].lstrip())
        if not (after.startswith(before) and text.startswith(prefix) and text.startswith(turn, place)):
            kind = "the chat template breaks prefix rendering"
            raise RowError(
                document["where"],
                f"{kind} at message {number + 1}: it changes a turn when others follow (it drops thinking, or adds "
                "a date), so the assistant's turns can't be found; use a chat template that only appends",
                kind,
            )
        yield start, place + len(turn), _is_traced(document["messages"][number], turn)


def _is_traced(message: dict[str, Any], turn: str) -> bool:
    """Return whether a turn has a trace of its content and of each tool call.

    Without one, as of a call under a template that knows no tools, the head would learn to end where the target calls.
    """
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    named = [name for call in calls if (name := (call.get("function") or call).get("name"))]
    return bool(lines or calls) and (not lines or any(line in turn for line in lines)) and all(n in turn for n in named)


def _split_tokens(
    text: str, whole: list[int], ends: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]] | None:
    """Split the tokens of a text at the ends of its pieces; return None if a token spans an end.

    Used if separately tokenized pieces give other tokens, for example because the tokenizer prepends a space to every
    text. If a token spans an end, separate pieces are right: the model is given the tokens up to that end.
    """
    prefixes = tokenizer([text[:end] for end in ends], add_special_tokens=False, verbose=False)["input_ids"]
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return None
    return [whole[len(a) : len(b)] for a, b in zip([[], *prefixes], prefixes, strict=False)]
