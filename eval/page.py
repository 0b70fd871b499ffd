"""report.html: the report as one page with tables that sort, its plots, and texts coloured by who wrote each token."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.decoders import Decoder
from eval.metrics import shown
from eval.report import drafter_rows, facts, head_lengths, label, per_step, plots
from eval.suites import Suite
from speculator.decoding.draft import Draft
from speculator.decoding.engine import Engine, Verified
from speculator.decoding.sampling import Sampling
from speculator.errors import printable
from speculator.files import write_text
from speculator.tables import BASELINES
from speculator.target.model import Target

PROMPTS, TOKENS = 3, 128  # of each suite at each temperature are decoded for the page
_WINDOW = 16  # tokens before one that it is decoded behind
_TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass
class Pass:
    """One step of a text: the tokens' texts; the first, the prefill's, drafted nothing.

    Attributes:
        accepted: drafted tokens that are part of the text.
        refused: drafted tokens that would have gone on from there; of a tree those on its best path.
        own: the target's token behind the accepted ones; none where the text's end cut the step.
        drafted: tokens, all of a tree's counted.
    """

    accepted: list[str]
    refused: list[str]
    own: list[str]
    drafted: int = 0


@dataclass
class Text:
    """One prompt and its continuation; `row` is of the report."""

    row: dict
    prompt: str
    passes: list[Pass]


class _Watched(Engine):
    """An engine that remembers the draft of its newest step, and where it was accepted."""

    newest: tuple[Draft, Verified] | None = None

    def verify(self, draft: Draft, u: Tensor) -> Verified:
        verified = super().verify(draft, u)
        self.newest = draft, verified
        return verified


def texts(
    target: Target,
    table: Sequence[Decoder],
    rows: Sequence[dict],
    suite: Suite,
    sampling: Sampling,
    max_new_tokens: int,
) -> list[Text]:
    """A suite's first prompts by every drafter of a table, untimed; of one head's draft lengths by the first.

    Args:
        rows: of the report, for each of the table's decoders that are the built-in loop.
    """
    made = []
    for number, prompt in enumerate(suite.prompts[:PROMPTS]):
        own = replace(sampling, seed=sampling.seed + number)
        for decoder, row in zip((d for d in table if d.ours), rows, strict=True):
            if decoder.drafter and decoder.key == row["drafter"]:
                passes = _decoded(target, decoder, prompt, own, min(max_new_tokens, TOKENS), suite.chat)
                made.append(Text(row, _spelled(target.tokenizer, prompt), passes))
    return made


def _decoded(
    target: Target, decoder: Decoder, prompt: list[int], sampling: Sampling, limit: int, ends: bool
) -> list[Pass]:
    engine = _Watched(target, decoder.drafter, slots=1, rule=decoder.rule, capture=False)
    text, passes = list(prompt), []

    def on_step(row: int, new: list[int], accepted: int) -> None:
        refused, drafted = _refused(*engine.newest) if engine.newest else ([], 0)
        engine.newest = None
        step = Pass([], [], [], drafted)
        for place, token in enumerate(new):
            (step.accepted if place < accepted else step.own).append(piece(target.tokenizer, text, token))
            if place == accepted:  # what was refused would have stood here
                there = list(text)
                for other in refused:
                    step.refused.append(piece(target.tokenizer, there, other))
                    there.append(other)
            text.append(token)
        passes.append(step)

    eos = sorted(target.eos_token_ids) if ends else []
    engine.generate([prompt], sampling, max_new_tokens=limit, eos_token_ids=eos, on_step=on_step)
    return passes


def piece(tokenizer: PreTrainedTokenizerBase | None, before: Sequence[int], token: int) -> str:
    """What a token adds to the text before it: a character of several tokens comes with the last of them."""
    window = list(before[-_WINDOW:])
    return _spelled(tokenizer, [*window, token])[len(_spelled(tokenizer, window)) :]


def _spelled(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included, up to a character that is not complete."""
    if tokenizer is None:
        return "".join(f"{token} " for token in tokens)
    text = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text.rstrip("\ufffd")


def _refused(draft: Draft, verified: Verified) -> tuple[list[int], int]:
    """Of one row's draft, the path of first children from where the accepted one ends; and how many were drafted."""
    drafted = int(draft.lengths[0])
    tokens, before = draft.tokens[0, :drafted].tolist(), draft.before[0, :drafted].tolist()
    at = 0  # the verify position: that of draft token i is i + 1
    for token in verified.tokens[0, 1 : 1 + int(verified.accepted[0])].tolist():
        at = next(i + 1 for i in range(drafted) if before[i] == at and tokens[i] == token)
    path = []
    while (child := next((i for i in range(drafted) if before[i] == at), None)) is not None:
        path.append(tokens[child])
        at = child + 1
    return path, drafted


def write_page(report: dict, samples: Sequence[Text], folder: Path) -> None:
    """Write report.html; the plots are in the folder."""
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in plots(report)}
    write_text(folder / "report.html", page(report, samples, pictures))


def page(report: dict, samples: Sequence[Text], pictures: dict[str, bytes]) -> str:
    """The page: whatever a text or a name holds, it is shown as text."""
    lengths, shown_plots = head_lengths(report), plots(report)
    figures = (
        f'<figure><img src="data:image/png;base64,{base64.b64encode(picture).decode()}" '
        f'alt="{_safe(shown_plots[name])}"><figcaption>{_safe(shown_plots[name])}</figcaption></figure>'
        for name, picture in pictures.items()
    )
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        facts="".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts(report).items()),
        warnings="".join(f"<p class=warning>{_safe(line)}</p>" for line in report["warnings"]),
        decoders=_table(_decoders(report, lengths)),
        categories=_table(_categories(report, lengths)),
        plots="".join(figures),
        texts="".join(_prompt(list(group), lengths) for _, group in groupby(samples, _asked)),
    )


def _asked(sample: Text) -> tuple[str, float, str]:
    return sample.row["name"], sample.row["temperature"], sample.prompt


def _safe(text: Any) -> str:
    return escape(printable(str(text)))


def _number(value: float | None, form: str = ".2f", interval: dict | None = None) -> tuple[str, float | None]:
    """A cell: what is read, and what is sorted by."""
    if value is None or not math.isfinite(value):
        return "", None
    return shown(interval, form) if interval else f"{value:{form}}", value


def _ratio(interval: dict | None) -> tuple[str, float | None]:
    return _number(interval and interval["value"], interval=interval)


def _where(report: dict, row: dict) -> dict[str, Any]:
    several = len({row["batch_size"] for row in report["suites"]}) > 1
    where = {"suite": row["name"], "temperature": _number(row["temperature"], "g")}
    return where | ({"batch size": row["batch_size"]} if several else {})


def _decoders(report: dict, lengths: set[int]) -> Iterator[dict[str, Any]]:
    """A line for every decoder that was measured, by column."""
    theirs = [name for name in BASELINES if any(name in row["tokens_per_second"] for row in report["suites"])]
    for row in report["suites"]:
        plain = row["drafter"] == "none"
        for key in [name for name in theirs if name in row["tokens_per_second"]] if plain else ["speculative"]:
            cost = row.get("cost", {})
            yield {
                **_where(report, row),
                "decoder": BASELINES[key] if plain else label(row, lengths),
                "rule": "" if plain else row["rule"],
                "tokens per step": _number(1.0 if key == "plain" else None) if plain else _ratio(per_step(row)),
                "tokens/s": _number(row["tokens_per_second"][key], ".1f"),
                "end to end": _number(row["end_to_end_tokens_per_second"][key], ".1f"),
                "first token, ms": _number(1e3 * row["time_to_first_token"][key], ".1f"),
                **{
                    f"speedup over {BASELINES[name]}": _number(1.0 if key == name else None)
                    if plain
                    else _ratio(row["speedup"].get(name))
                    for name in theirs
                },
                "predicted": _number(row.get("predicted_speedup")),
                "one draft costs": _number(cost.get("draft_over_decode"), ".3f"),
                "a verify pass": _number(cost.get("verify_over_decode")),
            }


def _categories(report: dict, lengths: set[int]) -> Iterator[dict[str, Any]]:
    for row in drafter_rows(report["suites"]):
        for part in row.get("categories", ()):
            yield {
                **_where(report, row),
                "category": part["name"],
                "turns": part["turns"],
                "decoder": label(row, lengths),
                "tokens per step": _ratio(per_step(part)),
                "tokens/s": _number(part["tokens_per_second"]["speculative"], ".1f"),
                "speedup over the same loop": _ratio(part["speedup"]["plain"]),
            }


def _table(lines: Iterator[dict[str, Any]]) -> str:
    """HTML; cells are texts, integers, or what `_number` gives."""
    rows = list(lines)
    if not rows:
        return ""
    head = "".join(f"<th><button>{_safe(name)}</button></th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Any) -> str:
    read, number = value if isinstance(value, tuple) else (value, value if isinstance(value, int) else None)
    return f"<td{'' if number is None else f' data-v={float(number)!r}'}>{_safe(read)}</td>"


def _prompt(samples: Sequence[Text], lengths: set[int]) -> str:
    """One prompt, and its continuation by every drafter."""
    row = samples[0].row
    return (
        f"<section><h3>{_safe(row['name'])}, temperature {row['temperature']:g}</h3>"
        f"<details><summary>prompt</summary><pre>{_safe(samples[0].prompt)}</pre></details>"
        f"<div class=texts>{''.join(_text(sample, lengths) for sample in samples)}</div></section>"
    )


def _text(sample: Text, lengths: set[int]) -> str:
    drafter, steps = sample.row["drafter"], sample.passes[1:]
    accepted, drafted = (sum(map(f, steps)) for f in (lambda s: len(s.accepted), lambda s: s.drafted))
    tokens = sum(len(step.accepted) + len(step.own) for step in sample.passes)
    marked = []
    for number, step in enumerate(sample.passes):
        at, after = f"step {number}: " if number else "prefill: ", 1 + len(step.accepted)
        for place, text in enumerate(step.accepted, start=1):
            marked.append(_mark("span", drafter, text, place, f"{at}draft token {place}, accepted"))
        for place, text in enumerate(step.refused, start=after):
            marked.append(_mark("s", drafter, text, place, f"{at}draft token {place}, refused"))
        fate = f"; {len(step.accepted)} of {step.drafted} drafted tokens accepted" if number else ""
        marked += [_mark("span", "own", text, 0, f"{at}the target's own{fate}") for text in step.own]
    return (
        f"<article><h4>{_safe(label(sample.row, lengths))}</h4><p>{tokens} tokens in {len(steps)} steps; {accepted} of "
        f"{drafted} drafted tokens accepted</p><pre>{''.join(marked)}</pre></article>"
    )


def _mark(tag: str, who: str, text: str, position: int, title: str) -> str:
    text = text.replace("\n", "\u21b5" if tag == "s" else "\u21b5\n")
    return f'<{tag} class="{who} p{min(position, 8)}" title="{title}">{_safe(text)}</{tag}>'
