"""Traces of the first prompts of a suite for the page: who proposed each token, and what was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eval.decoders import Decoder
from eval.recording import RecordingEngine
from eval.suites import Suite
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter
from speculator.decoding.engine import Verified
from speculator.decoding.sampling import Sampling
from speculator.drafters.adaptive import PathOrDraft
from speculator.report import ReportRow
from speculator.target.model import Target

PROMPTS, TOKENS = 3, 128  # traced prompts of a suite, and tokens of each
_WINDOW = 16  # preceding tokens with which a token is decoded


class Piece(NamedTuple):
    """Text of a token, and who proposed it: "head", "ngram", "draft_model" or "target"."""

    text: str
    source: str


@dataclass
class TracedStep:
    """One step. The first step is the prefill, which drafts nothing.

    Attributes:
        rejected: rejected draft tokens after them; of a tree, those on the path of first children.
        sampled: the token that the target sampled; empty if the limit or EOS cut the step.
        drafted: number of draft tokens, of a tree all nodes.
    """

    accepted: list[Piece] = field(default_factory=list)
    rejected: list[Piece] = field(default_factory=list)
    sampled: list[Piece] = field(default_factory=list)
    drafted: int = 0


@dataclass
class Trace:
    """One prompt and its completion by the decoder of one report row."""

    row: ReportRow
    prompt: str
    steps: list[TracedStep]


def trace_suite(
    target: Target,
    decoders: Sequence[tuple[Decoder, ReportRow]],
    suite: Suite,
    sampling: Sampling,
    max_new_tokens: int,
) -> list[Trace]:
    """Decode a suite's first prompts with every drafter, untimed, and return the traces, all of a prompt together.

    Further draft lengths of the head are left out. The decoders run the built-in engine; each has its report's row.
    """
    traces = []
    for number, prompt in enumerate(suite.prompts[:PROMPTS]):
        seeded = replace(sampling, seed=sampling.seed + number)
        for decoder, row in decoders:
            if decoder.drafter and decoder.key == row.drafter:
                steps = _trace(target, decoder, prompt, seeded, min(max_new_tokens, TOKENS))
                traces.append(Trace(row, _text_of(target.tokenizer, prompt), steps))
    return traces


def _trace(target: Target, decoder: Decoder, prompt: list[int], sampling: Sampling, limit: int) -> list[TracedStep]:
    """Decode at most `limit` new tokens after a prompt, and return the steps."""
    engine = RecordingEngine(target, decoder.drafter, decoder.rule)
    sequence, steps = list(target.text(prompt)), []

    def on_step(new: list[int], accepted: int) -> None:
        step = TracedStep()
        path: list[tuple[int, str]] = []
        if engine.newest:
            path, step.drafted = _path(engine.drafter, decoder.key, *engine.newest)
        engine.newest = None
        # The path begins with the accepted tokens, of which the end of the completion may have dropped some.
        for (token, source), _ in zip(path, new[:accepted], strict=False):
            step.accepted.append(Piece(piece(target.tokenizer, sequence, token), source))
            sequence.append(token)
        if new[accepted:]:  # the rejected tokens were drafted for this position
            alternative = list(sequence)
            for token, source in path[accepted:]:
                step.rejected.append(Piece(piece(target.tokenizer, alternative, token), source))
                alternative.append(token)
        for token in new[accepted:]:
            step.sampled.append(Piece(piece(target.tokenizer, sequence, token), "target"))
            sequence.append(token)
        steps.append(step)

    engine.decode(prompt, sampling, max_new_tokens=limit, on_step=on_step)
    return steps


def _path(drafter: Drafter | None, key: str, draft: Draft, verified: Verified) -> tuple[list[tuple[int, str]], int]:
    """Return the path of a draft that the page shows, as (token, source) pairs, and the number of drafted tokens.

    The path has the accepted tokens, and then the first child of each token, down to a leaf. The source is `key`, the
    decoder's, or who drafted the row adaptively. The draft has one row.
    """
    drafted = int(draft.lengths[0])
    tokens, parents = draft.tokens[0, :drafted].tolist(), draft.before[0, :drafted].tolist()
    if key == "adaptive":
        key = "ngram" if isinstance(getattr(drafter, "shape", None), PathOrDraft) else "head"
    places = []
    at = 0  # position in the verification; draft token i is at position i + 1
    for token in verified.tokens[0, 1 : 1 + int(verified.accepted[0])].tolist():
        # Siblings are different tokens, so parent and token identify the node.
        at = next(i + 1 for i in range(drafted) if parents[i] == at and tokens[i] == token)
        places.append(at - 1)
    # Below the accepted part: what a reader of the page sees as rejected is the likeliest continuation of the draft.
    while (child := next((i for i in range(drafted) if parents[i] == at), None)) is not None:
        places.append(child)
        at = child + 1
    return [(tokens[i], key) for i in places], drafted


def piece(tokenizer: PreTrainedTokenizerBase | None, before: Sequence[int], token: int) -> str:
    """Return the text that a token adds, without a tokenizer its id; a character belongs to the last of its tokens."""
    window = list(before[-_WINDOW:])
    return _text_of(tokenizer, [*window, token])[len(_text_of(tokenizer, window)) :]


def _text_of(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> str:
    """Return tokens' text, with special tokens but no incomplete last character; without a tokenizer, their ids."""
    if tokenizer is None:
        return "".join(f"{token} " for token in tokens)
    text = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text.rstrip("\ufffd")
