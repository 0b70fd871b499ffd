"""Documents into tokens, and which of these are to be learnt.

Of a text every token, of a prompt with its completion the completion's, of a chat the assistant's with the token that
ends its turn. What the assistant wrote is found by prefix rendering, with the tokenizer's own chat template: the
conversation up to a turn, and the same with that turn, differ by what the model would have written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.rows import SourceError
from speculator.errors import UserError, first_line

_DOCUMENTS_AT_ONCE = 64


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or a local folder.

    Raises:
        UserError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # a damaged one fails anywhere in the libraries that read it
        raise UserError(f"can't load the tokenizer of {name!r}: {first_line(error)}") from None


def render(documents: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Documents as rows {"id", "input_ids", "loss_mask"}; a row that was packed already comes as its documents.

    Texts and completions are ended with EOS, chats as their template ends them. In front is what the tokenizer puts
    there itself (BOS), or for a chat what the template writes.

    Raises:
        SourceError: a document that can't be rendered; it names the row.
    """
    stream = iter(documents)
    while batch := list(islice(stream, _DOCUMENTS_AT_ONCE)):
        # Tokenised together: the library does so on all cores.
        texts = [document["text"] for document in batch if "text" in document]
        tokens = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        chats = iter(_chats([document for document in batch if "messages" in document], tokenizer))
        for document in batch:
            if "text" in document:
                ids = _ended(next(tokens), tokenizer)
                rendered = [(ids, [1] * len(ids))]
            elif "messages" in document:
                rendered = [next(chats)]
            elif "prompt" in document:
                rendered = [_completion(document, tokenizer)]
            else:
                rendered = list(_given_tokens(document, tokenizer))
            for ids, mask in rendered:
                yield {"id": document["id"], "input_ids": ids, "loss_mask": mask}


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise SourceError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end documents with")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _completion(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    prompt = tokenizer(document["prompt"], verbose=False)["input_ids"]
    whole = tokenizer(document["prompt"] + document["completion"], verbose=False)["input_ids"]
    # A token over the border would be none that the model is asked for: it gets the prompt's tokens and goes on.
    if whole[: len(prompt)] != prompt:
        whole = prompt + _plain(document["completion"], tokenizer)
    ids = _ended(whole, tokenizer)
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def _given_tokens(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    ids, mask = document["input_ids"], document["loss_mask"]
    if max(ids) >= len(tokenizer):
        raise SourceError(f"{document['where']}: token {max(ids)}, but the tokenizer has {len(tokenizer)}")
    columns = zip(document.get("document_ids", [0] * len(ids)), ids, mask, strict=True)
    for _, part in groupby(columns, key=lambda column: column[0]):
        _, part_ids, part_mask = zip(*part, strict=True)
        yield list(part_ids), list(part_mask)


def chat_text(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase, count: int | None = None, ask: bool = False
) -> str:
    """The first `count` messages of a chat as its template writes them; with `ask`, up to where the model goes on.

    Raises:
        SourceError: no chat template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise SourceError(
            f"{document['where']}: a chat, but the tokenizer {tokenizer.name_or_path} has no chat template"
        )
    try:
        text = tokenizer.apply_chat_template(
            document["messages"][:count],
            tools=document.get("tools"),
            tokenize=False,
            add_generation_prompt=ask,
        )
    except (TemplateError, TypeError, ValueError, IndexError) as error:
        raise SourceError(f"{document['where']}: the chat template refuses the messages: {error}") from None
    assert isinstance(text, str)
    return text


def chat_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of what a chat template wrote, and nothing in front: it writes BOS itself where there is one."""
    return _plain(text, tokenizer)


def _chats(
    documents: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    if not documents:
        return
    texts = [chat_text(document, tokenizer) for document in documents]
    # The assistant's pieces are the second, the fourth, ...
    ends = [
        [*chain.from_iterable(_turns(document, text, tokenizer)), len(text)]
        for document, text in zip(documents, texts, strict=True)
    ]
    pieces = [text[a:b] for text, own in zip(texts, ends, strict=True) for a, b in zip([0, *own], own, strict=False)]
    apart = iter(tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"])
    wholes = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for document, text, own_ends, whole in zip(documents, texts, ends, wholes, strict=True):
        parts = list(islice(apart, len(own_ends)))
        if list(chain.from_iterable(parts)) != whole:
            parts = _cut(text, whole, own_ends, tokenizer) or parts
        mask = [place % 2 for place, part in enumerate(parts) for _ in part]
        if len(set(mask)) < 2:
            none_or_all = "all" if any(mask) else "none"
            raise SourceError(f"{document['where']}: {none_or_all} of the chat's tokens are the assistant's")
        yield list(chain.from_iterable(parts)), mask


def _turns(document: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Where in the chat's text each of the assistant's turns begins, and ends with the token that ends it."""
    added = tokenizer.added_tokens_decoder.values()
    special = tuple(token.content for token in added if token.special)
    markers = "|".join(re.escape(token.content) for token in added if not token.special)
    for number, message in enumerate(document["messages"]):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise SourceError(f"{document['where']}: the chat begins with the assistant, so it answers nothing")
        before = chat_text(document, tokenizer, number, ask=True)
        after = chat_text(document, tokenizer, number + 1)
        turn = after[len(before) :]
        # The model stops at the token that ends its turn; a line end behind it is the template's.
        if turn.rstrip().endswith(special):
            turn = turn.rstrip()
        start = place = len(before)
        if not text.startswith(turn, place) and markers:
            # Some templates put empty markers ("<think></think>") before the last turn only. Nothing else may go.
            turn = re.sub(rf"^(?:{markers}|\s)+", "", turn)
            place += len(text[place:]) - len(text[place:].lstrip())
        if not (after.startswith(before) and text.startswith(before) and text.startswith(turn, place)):
            raise SourceError(
                f"{document['where']}: the chat template breaks prefix rendering at message {number + 1}: it writes a "
                "turn otherwise when others follow (thinking left out, a date, a turn rewritten), so what the "
                "assistant wrote can't be told; give the tokenizer a template that only appends"
            )
        yield start, place + len(turn)


def _cut(text: str, whole: list[int], ends: list[int], tokenizer: PreTrainedTokenizerBase) -> list[list[int]] | None:
    """A text's tokens between the ends of its pieces, where pieces tokenised apart give others.

    So it is with tokenizers that begin every text with a space of their own. None where a token lies over an end, as
    where an answer begins with a line end: then the pieces apart are right, since the model is given the tokens up to
    there and goes on with its own.
    """
    prefixes = tokenizer([text[:end] for end in ends], add_special_tokens=False, verbose=False)["input_ids"]
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return None
    return [whole[len(a) : len(b)] for a, b in zip([[], *prefixes], prefixes, strict=False)]
