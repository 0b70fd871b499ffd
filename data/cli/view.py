"""`speculator data view`: see `data.cli.flags.view`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby, islice

from transformers import PreTrainedTokenizerBase

from data.documents import ChatFacts, TokenDocument
from data.mixture import mixture_of
from data.rendering import tokenizer_of
from data.sources import token_documents
from data.tally import Tally
from speculator.errors import printable, refuse
from speculator.terminal import DIM, GREEN, PLAIN, colours, log, quiet_libraries


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator data view`: print the first `--rows` rows of the source as text."""
    refuse((arguments.rows < 1, "--rows must be at least 1"))
    quiet_libraries()
    tokenizer = tokenizer_of(arguments)
    marks = (DIM, PLAIN, GREEN, PLAIN) if colours(sys.stdout) else ("", "", "[[", "]]")
    tally = Tally(max_share=1.0)
    documents = token_documents(mixture_of([arguments.source]), None, tokenizer, tally=tally)
    # A packed row is rendered as its documents, all with the row's id.
    found = groupby(documents, key=lambda document: document["id"])
    name = None
    for name, row in islice(found, arguments.rows):
        parts = list(row)
        count, with_loss = (sum(map(f, parts)) for f in (lambda p: len(p["input_ids"]), lambda p: sum(p["loss_mask"])))
        print(f"--- {printable(name)}: {count} tokens, {with_loss} with loss")
        for line in _facts(parts[0].get("chat")):
            print(f"    {printable(line)}")
        print("\n-\n".join(_marked(part, tokenizer, marks) for part in parts))
    if next(found, None):
        log(f"there are more rows: --rows {2 * arguments.rows} shows twice as many")
    reason = [*tally.first, *tally.skipped][:1]
    refuse((name is None, ": ".join([f"{arguments.source}: no rows in it", *reason])))
    tally.warn(arguments.source)


def _facts(chat: ChatFacts | None) -> Iterator[str]:
    """Yield lines on why a chat became several rows, or has dropped messages or answers without loss; else none."""
    if chat is None:
        return
    if chat["rows"] > 1:
        yield f"{chat['answers']} answers in {chat['rows']} rows, because each needs its own context:"
        yield from (f"  {why}" for why in chat["why"])
    if chat["dropped"]:
        yield f"the first {chat['dropped']} messages are dropped: the assistant speaks before anyone asks"
    if chat["marked"]:
        yield f"{chat['marked']} answers have no loss: the row marks them as not to be learnt"
    yield from (f"message {number + 1} has no loss: {reason}" for number, reason in chat["left_out"])


def _marked(document: TokenDocument, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str, str, str]) -> str:
    """Return a document's text; the first two of `marks` surround parts without loss, the others those with loss."""
    text, end, shown = "", 0, ""
    for loss, run_of in groupby(document["loss_mask"]):
        end += len(list(run_of))
        # Decode from the beginning: some tokenizers drop the first space of a part.
        so_far = tokenizer.decode(document["input_ids"][:end], clean_up_tokenization_spaces=False)
        assert isinstance(so_far, str)
        before, after = marks[2:] if loss else marks[:2]
        text += before + printable(so_far[len(shown) :]) + after
        shown = so_far
    return text
