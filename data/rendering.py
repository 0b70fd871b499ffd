"""Render documents as token ids and loss masks.

The loss covers every token of a text, the completion of a prompt, and the answers of a chat with their end tokens (see
`data.answers`).

The text of a special token is plain text in texts and completions. In chats it becomes the special token, as on a
server: rendering does not separate the template's own special tokens from those in messages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, islice, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.answers import ChatRows, TextRow, chat_rows
from data.documents import ChatFacts, Document, NothingToLearnError, RowError, TokenDocument
from data.mixture import SourceError
from data.rows import errors_of_row
from data.tally import Tally
from data.workers import map_in_order
from speculator.chat import Message, set_template_variables
from speculator.errors import UserError, first_line
from speculator.files import Json
from speculator.target.gguf.file import read_config, read_tokenizer
from speculator.target.loading import causal

_DOCUMENTS_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 1_000_000


def load_tokenizer(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    variables: dict[str, Json] | None = None,
    raw: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id or local folder; `variables` are for its chat template, which `raw` drops."""
    try:
        tokenizer = read_tokenizer(name, trust_remote_code, revision)
        tokenizer("a", verbose=False)
        with suppress(OSError, ValueError):  # a folder with a tokenizer alone
            causal(read_config(name, trust_remote_code, revision=revision), name)
    except Exception as error:  # the libraries raise many types for damaged files
        raise UserError(f"can't load the tokenizer of {name!r}: {first_line(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"can't load the tokenizer of {name!r}: {type(tokenizer).__name__} is not a fast tokenizer")
    set_template_variables(tokenizer, variables)
    if raw:
        tokenizer.chat_template = None
    return tokenizer


def tokenizer_of(arguments: argparse.Namespace) -> PreTrainedTokenizerBase:
    return load_tokenizer(
        arguments.target,
        revision=getattr(arguments, "revision", None),
        trust_remote_code=getattr(arguments, "trust_remote_code", False),
        variables=arguments.chat_template_kwargs,
        raw=getattr(arguments, "raw", False),
    )


def as_chat(document: Document, tokenizer: PreTrainedTokenizerBase) -> Document:
    """Return a prompt and its completion as a chat if the tokenizer has a template, and other documents unchanged."""
    if "completion" not in document or not tokenizer.chat_template or not document["prompt"].strip():
        return document
    answer: Message = {"role": "assistant", "content": document["completion"].strip()}
    if "label" in document:
        answer["weight"] = 0
    return {**document, "messages": [{"role": "user", "content": document["prompt"].strip()}, answer]}


def text_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[list[int]]:
    """Return the token ids of texts, with BOS if the tokenizer adds one; the text of a special token is plain text."""
    return tokenizer(list(texts), split_special_tokens=True, verbose=False, **options)["input_ids"] if texts else []


def render(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally | None = None,
    processes: int = 1,
) -> Iterator[TokenDocument]:
    """Yield documents as rows {"id", "input_ids", "loss_mask"}.

    A packed row becomes one row per document, and a chat one or several, the first of which has "chat": `ChatFacts`.
    Texts and completions end with EOS, chats as their template ends them.

    Args:
        tally: counts the documents that are used, those that can't be rendered (default: the first one raises), which
            are skipped, and chats.
        processes: processes that render. The rows do not depend on it, but more processes read further ahead.
    """
    tally = tally or Tally()
    documents = (as_chat(document, tokenizer) for document in documents)
    work = partial(_render_batch, tokenizer=tokenizer)
    for rendered in map_in_order(work, _batches(documents), processes):
        for each in rendered:
            if isinstance(each, RowError):
                tally.add(each)
                continue
            tally.used += 1
            for row in each:
                if "chat" in row:
                    tally.add_chat(row["chat"])
                yield row


def _render_batch(batch: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[list[TokenDocument] | RowError]:
    """Return, for each document of a batch, its rows or the RowError of a bad document."""
    # One call for all texts: the tokenizer then uses all cores, unless this is one of several processes.
    tokens = iter(text_tokens([document["text"] for document in batch if "text" in document], tokenizer))
    chats = _chats([document for document in batch if "messages" in document], tokenizer)
    found: list[list[TokenDocument] | RowError] = []
    for document in batch:
        try:
            with errors_of_row(document["where"]):
                found.append(_rows_of(document, tokenizer, tokens, chats))
        except RowError as error:
            found.append(error)
    return found


def _rows_of(
    document: Document,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Iterator[list[int]],
    chats: Iterator[Any],
) -> list[TokenDocument]:
    """Return the rows of a document; a text takes the next of its batch's `tokens`, a chat the next of `chats`."""
    rendered: list[tuple[list[int], list[int]]]  # token ids and loss mask
    facts: ChatFacts | None = None
    if "text" in document:
        ids = _with_eos(next(tokens), tokenizer)
        rendered = [(ids, [1] * len(ids))]
    elif "messages" in document:
        chat = next(chats)
        if isinstance(chat, RowError):
            raise chat
        rendered, facts = chat
    elif "prompt" in document:
        rendered = [_completion(document, tokenizer)]
    else:
        rendered = list(_unpacked(document, tokenizer))
    rows: list[TokenDocument] = [{"id": document["id"], "input_ids": ids, "loss_mask": mask} for ids, mask in rendered]
    if facts is not None:
        rows[0]["chat"] = facts
    return rows


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of 64 documents each, or fewer with more than a million characters, to render in one call."""
    batch: list[Document] = []
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
    """Return tokens that end with EOS, which is appended if missing; without an EOS token a SourceError is raised."""
    if tokenizer.eos_token_id is None:
        raise SourceError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end documents with")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _completion(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt with its completion and EOS, and the loss mask: 1 after the prompt."""
    if "label" in document:
        raise NothingToLearnError(document["where"], 'completions with "label": false')
    prompt, whole = text_tokens([document["prompt"], document["prompt"] + document["completion"]], tokenizer)
    # The model continues the prompt's own tokens, so no token may span the end of the prompt.
    if whole[: len(prompt)] != prompt:
        whole = prompt + text_tokens([document["completion"]], tokenizer, add_special_tokens=False)[0]
    ids = _with_eos(whole, tokenizer)
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def check_tokens(document: Document, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a RowError if a row has tokens that are not in the tokenizer's vocabulary."""
    highest = max(document["input_ids"] + document.get("source_ids", []))
    if highest >= len(tokenizer):
        fault = f"token {highest}, but the tokenizer has {len(tokenizer)}"
        raise RowError(document["where"], fault, "a token outside of the tokenizer's vocabulary")


def _unpacked(document: Document, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (token ids, loss mask) of each document of a row of tokens; a bad row raises a RowError."""
    ids, mask = document["input_ids"], document["loss_mask"]
    check_tokens(document, tokenizer)
    if "source_ids" in document:
        raise RowError(document["where"], '"source_ids", of an encoder-decoder target, for which no head is trained')
    columns = zip(document.get("document_ids", [0] * len(ids)), ids, mask, strict=True)
    for _, part in groupby(columns, key=lambda column: column[0]):
        _, own, has_loss = zip(*part, strict=True)
        yield list(own), list(has_loss)


def _chats(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Yield for each chat ([(token ids, loss mask) of each row], `ChatFacts`), or the RowError of a bad chat."""
    found: list[ChatRows | RowError] = []
    for document in documents:
        try:
            with errors_of_row(document["where"]):
                found.append(chat_rows(document, tokenizer))
        except RowError as error:
            found.append(error)
    rows = [row for chat in found if isinstance(chat, ChatRows) for row in chat.rows]
    texts, ends = [row.text for row in rows], [[*chain.from_iterable(row.spans), len(row.text)] for row in rows]
    # Each text is cut at its answers: context, answer, context, ... If the pieces' tokens, one after the other, are
    # those of the whole text, no token spans a border, and the mask follows from the pieces' lengths.
    pieces = [text[a:b] for text, places in zip(texts, ends, strict=True) for a, b in pairwise([0, *places])]
    wholes, separate = iter(_tokens(texts, tokenizer)), iter(_tokens(pieces, tokenizer))
    for document, chat in zip(documents, found, strict=True):
        if isinstance(chat, RowError):
            yield chat
            continue
        rendered: list[tuple[list[int], list[int]]] = []
        for row in chat.rows:
            parts, whole = list(islice(separate, 2 * len(row.spans) + 1)), next(wholes)
            if list(chain.from_iterable(parts)) == whole:
                # The pieces alternate: the second, the fourth, ... are answers.
                rendered.append((whole, [place % 2 for place, part in enumerate(parts) for _ in part]))
            else:
                rendered += _token_rows(row, whole, tokenizer)
        facts: ChatFacts = {
            "where": document["where"],
            "completion": "completion" in document,
            "rows": len(rendered),
            "answers": sum(len(row.spans) for row in chat.rows),
            "left_out": chat.left_out,
            "marked": chat.marked,
            "thoughtless": chat.thoughtless,
            "dropped": document.get("dropped", 0),
            "why": [row.why for row in chat.rows if row.why],
        }
        yield rendered, facts


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of rendered texts: nothing is added, and the text of a special token is that token."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def _token_rows(
    row: TextRow, whole: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Tokenise a row in which a token may span the start or the end of an answer; return (token ids, loss mask) pairs.

    A server tokenises all that precedes an answer at once, and the model continues these tokens. So an answer whose
    first character would join the context's last token is tokenised alone. A later context that tokenises an earlier
    answer in another way begins another row. The part after the last answer is taken from `whole`, the row's tokens.
    """
    rows: list[tuple[list[int], list[int]]] = []
    contexts, written = (_tokens([row.text[: span[side]] for span in row.spans], tokenizer) for side in (0, 1))
    for (start, end), context, both in zip(row.spans, contexts, written, strict=True):
        # Does the answer's first character join the last token of its context? Then the model would have had to write a
        # token that begins in the prompt, which it can't: take the answer's own tokens.
        joined = both[: len(context)] == context
        answer = both[len(context) :] if joined else _tokens([row.text[start:end]], tokenizer)[0]
        # A later context that tokenises the earlier answer in another way is another text: it needs a row of its own.
        if not rows or context[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, mask = rows[-1]
        # No loss from the end of the last answer to the end of this context.
        mask += [0] * (len(context) - len(ids)) + [1] * len(answer)
        ids += context[len(ids) :] + answer
    ids, mask = rows[-1]
    if whole[: len(ids)] == ids:
        mask += [0] * (len(whole) - len(ids))
        ids += whole[len(ids) :]
    return rows
