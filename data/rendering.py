"""Documents into tokens, and which of these are to be learnt.

Of a text every token, of a prompt with its completion the completion's, of a chat the assistant's with the token that
ends its turn. What the assistant wrote is found by prefix rendering, with the tokenizer's own chat template: the
conversation up to a turn, and the same with that turn, differ by what the model would have written.

A special token that a text or a completion spells is text. In a chat it is special, whoever wrote it: a template's own
can't be known from those of its messages, and a server reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, TypeAlias

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.rows import RowError, SourceError
from data.tally import Tally
from data.workers import map_in_order
from speculator.chat import DATA_DAY, RefusedError, chat_text
from speculator.errors import UserError, first_line
from speculator.target.gguf import located

_DOCUMENTS_AT_ONCE = 64
_CHARACTERS_AT_ONCE = 1_000_000
_MOST_RENDERED = 20_000_000  # characters of a chat, times its answers: so much is written to tell these apart
Chat: TypeAlias = tuple[list[int], list[int]]


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or a local folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(**located(name, revision), trust_remote_code=trust_remote_code)
        tokenizer("a", verbose=False)
    except Exception as error:  # whatever the libraries stumble over in files that someone else wrote
        raise UserError(f"can't load the tokenizer of {name!r}: {first_line(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"can't load the tokenizer of {name!r}: {type(tokenizer).__name__} is no fast tokenizer")
    return tokenizer


def text_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[list[int]]:
    """Tokens of texts, with what the tokenizer puts in front; special tokens that they spell are text."""
    return tokenizer(list(texts), split_special_tokens=True, verbose=False, **options)["input_ids"] if texts else []


def render(
    documents: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tally: Tally | None = None,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """Documents as rows {"id", "input_ids", "loss_mask"}; a row that was packed already comes as its documents.

    Sequences and completions are ended with EOS, chats as their template ends them. In front is what the tokenizer puts
    there itself (BOS), or for a chat what the template writes.

    Args:
        tally: counts documents that can't be rendered; without it the first is raised.
        processes: that render, some documents each at a time; the rows are the same however many. Documents are drawn
            ahead, so of rows that end early more are read, and counted, than with one.

    Raises:
        SourceError: a document that can't be rendered; it names the row.
    """
    tally = tally or Tally()
    for rendered in map_in_order(partial(_rendered, tokenizer=tokenizer), _batches(documents), processes):
        for each in rendered:
            if isinstance(each, RowError):
                tally.add(each)
            else:
                yield each


def _rendered(batch: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any] | RowError]:
    """The rows of some documents, or what is wrong with one in its place."""
    # Tokenised together: the library does so on all cores, in a process that is alone.
    tokens = iter(text_tokens([document["text"] for document in batch if "text" in document], tokenizer))
    chats = _chats([document for document in batch if "messages" in document], tokenizer)
    made: list[dict[str, Any] | RowError] = []
    for document in batch:
        try:
            if "text" in document:
                ids = _ended(next(tokens), tokenizer)
                rendered = [(ids, [1] * len(ids))]
            elif "messages" in document:
                chat = next(chats)
                if isinstance(chat, RowError):
                    raise chat
                rendered = [chat]
            elif "prompt" in document:
                rendered = [_completion(document, tokenizer)]
            else:
                rendered = list(_given_tokens(document, tokenizer))
        except RowError as error:
            made.append(error)
            continue
        made += [{"id": document["id"], "input_ids": ids, "loss_mask": mask} for ids, mask in rendered]
    return made


def _batches(documents: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Some documents at a time, fewer where they are long."""
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


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise SourceError(f"the tokenizer {tokenizer.name_or_path} has no EOS token to end documents with")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _completion(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    prompt, whole = text_tokens([document["prompt"], document["prompt"] + document["completion"]], tokenizer)
    # A token over the border would be none that the model is asked for: it gets the prompt's tokens and goes on.
    if whole[: len(prompt)] != prompt:
        whole = prompt + text_tokens([document["completion"]], tokenizer, add_special_tokens=False)[0]
    ids = _ended(whole, tokenizer)
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def check_tokens(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a row of tokens that were made by another tokenizer.

    Raises:
        RowError: one of them is not in this one.
    """
    highest = max(document["input_ids"])
    if highest >= len(tokenizer):
        said = f"token {highest}, but the tokenizer has {len(tokenizer)}"
        raise RowError(document["where"], said, "a token that the tokenizer has not")


def _given_tokens(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[int]]]:
    ids, mask = document["input_ids"], document["loss_mask"]
    check_tokens(document, tokenizer)
    columns = zip(document.get("document_ids", [0] * len(ids)), ids, mask, strict=True)
    for _, part in groupby(columns, key=lambda column: column[0]):
        _, part_ids, part_mask = zip(*part, strict=True)
        yield list(part_ids), list(part_mask)


def document_text(
    document: dict[str, Any], tokenizer: PreTrainedTokenizerBase, count: int | None = None, ask: bool = False
) -> str:
    """The first `count` messages of a chat as its template writes them; with `ask`, up to where the model goes on.

    Raises:
        RowError: no chat template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        said = f"a chat, but the tokenizer {tokenizer.name_or_path} has no chat template"
        raise RowError(document["where"], said)
    try:
        return chat_text(tokenizer, document["messages"][:count], document.get("tools"), ask, DATA_DAY)
    except RefusedError as error:
        raise RowError(document["where"], str(error)) from None


def _chats(documents: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Chat | RowError]:
    """Of each chat the tokens and the mask, or what is wrong with it."""
    cut: list[tuple[str, list[int]] | RowError] = []
    for document in documents:
        try:
            text = document_text(document, tokenizer)
            # The assistant's pieces are the second, the fourth, ...
            cut.append((text, [*chain.from_iterable(_turns(document, text, tokenizer)), len(text)]))
        except RowError as error:
            cut.append(error)
    good = [each for each in cut if not isinstance(each, RowError)]
    pieces = [text[a:b] for text, ends in good for a, b in zip([0, *ends], ends, strict=False)]
    apart = iter(tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] if good else [])
    texts = [text for text, _ in good]
    wholes = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if good else [])
    for document, each in zip(documents, cut, strict=True):
        if isinstance(each, RowError):
            yield each
            continue
        text, ends = each
        parts, whole = list(islice(apart, len(ends))), next(wholes)
        if list(chain.from_iterable(parts)) != whole:
            parts = _cut(text, whole, ends, tokenizer) or parts
        mask = [place % 2 for place, part in enumerate(parts) for _ in part]
        if len(set(mask)) < 2:
            none_or_all = "all" if any(mask) else "none"
            yield RowError(document["where"], f"{none_or_all} of the chat's tokens are the assistant's")
        else:
            yield list(chain.from_iterable(parts)), mask


def _turns(document: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Where in the chat's text each of the assistant's turns begins, and ends with the token that ends it."""
    added = tokenizer.added_tokens_decoder.values()
    special = tuple(token.content for token in added if token.special)
    markers = "|".join(re.escape(token.content) for token in added if not token.special)
    answers = [number for number, message in enumerate(document["messages"]) if message["role"] == "assistant"]
    if len(text) * len(answers) > _MOST_RENDERED:
        raise RowError(document["where"], "a chat of too many and too long turns")
    for number in answers:
        if number == 0:
            raise RowError(document["where"], "the chat begins with the assistant, so it answers nothing")
        before = document_text(document, tokenizer, number, ask=True)
        after = document_text(document, tokenizer, number + 1)
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
            kind = "the chat template breaks prefix rendering"
            raise RowError(
                document["where"],
                f"{kind} at message {number + 1}: it writes a turn otherwise when others follow (thinking left out, a "
                "date, a turn rewritten), so what the assistant wrote can't be found; give the tokenizer a template "
                "that only appends",
                kind,
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


def end_of_answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict] | None) -> int | None:
    """The token with which a target ends an answer: of a chat often another than the tokenizer's EOS, as for Gemma.

    It is one that the generation config beside the tokenizer names, if there is one. Of a chat it is the first of those
    that the template writes behind an answer, or without a config the first special token there.
    """
    ends: list[int] = []
    if tokenizer.name_or_path:
        try:
            named = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
            ends = [end for end in (named if isinstance(named, list) else [named]) if isinstance(end, int)]
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # none there, or none that can be read
    if messages:
        mark = "the answer"
        try:
            written = chat_text(tokenizer, [*messages, {"role": "assistant", "content": mark}]).rpartition(mark)[2]
        except UserError:
            written = ""
        behind = tokenizer(written, add_special_tokens=False)["input_ids"]
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        known = ends or special | set(tokenizer.all_special_ids)
        found = next((token for token in behind if token in known), None)
        if found is not None:
            return found
    eos = tokenizer.eos_token_id
    return ends[0] if ends and eos not in ends else eos
