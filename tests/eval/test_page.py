"""report.html shows which drafter wrote which token, is one file, and escapes every text."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from conftest import measured, tiny_head, tiny_model
from reports import report_row

from eval.decoders import Decoder
from eval.page import page
from eval.suites import Suite
from eval.traces import piece, trace_suite
from speculator import HeadDrafter, NgramDrafter, Sampling, Target, generate
from speculator.drafters.adaptive import AdaptiveDrafter, PathOrDraft
from speculator.drafters.shapes import Chain, Tree
from speculator.drafters.tuning import adaptive_drafter
from speculator.report import read_report
from speculator.tables import shown
from speculator.verdict import fastest, headlines

SUITE = Suite("test text", [[1, 2, 3, 4], [5, 6, 7, 5], [9, 10, 11, 12], [1, 1, 1, 1]])
VOID = {"meta", "img", "input"}
EVIL = ["</pre><script>alert(1)</script>", "&lt;b>", "\ud800", "\x00\x1b", '"><img src=//x onerror=y>', "\r\n", "${x}$"]


class Evil:
    """A tokenizer with hostile texts."""

    eos_token_id = chat_template = None

    def decode(self, tokens, **_) -> str:
        return "".join(EVIL[token % len(EVIL)] for token in tokens)


class Page(HTMLParser):
    """Elements of a page with their attributes, and the texts by element."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def made(drafter, target, temperature=0.0, rule=None):
    decoder = Decoder(drafter.name, print, drafter, rule=rule)
    drafts = {"num_speculative_tokens": drafter.num_speculative_tokens, "nodes": drafter.nodes}
    row = report_row(drafter.name, name="test text", temperature=temperature, **drafts)
    return trace_suite(target, [(decoder, row)], SUITE, Sampling(temperature, seed=3), 24)


def ids(pieces) -> list[int]:
    return [int(piece.text) for piece in pieces]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [3, Tree((3, 2, 1), 6)])
def test_every_token_has_its_drafter_and_rejected_tokens_were_drafted(target, monkeypatch, shape, temperature):
    drafts, propose = [], HeadDrafter.propose
    monkeypatch.setattr(HeadDrafter, "propose", lambda *args: drafts.append(propose(*args)) or drafts[-1])
    drafter = HeadDrafter(tiny_head(), shape)
    samples = made(drafter, target, temperature)
    proposed = list(drafts)
    prompts = SUITE.prompts[:3]
    expected = generate(target, drafter, prompts, Sampling(temperature, seed=3), max_new_tokens=24)
    for sample, tokens, steps in zip(samples, expected.tokens, expected.steps, strict=True):
        assert ids(piece for step in sample.steps for piece in step.accepted + step.sampled) == tokens
        assert [len(step.accepted) + len(step.sampled) for step in sample.steps[1:]] == [s.emitted for s in steps]
    of_steps = [step for sample in samples for step in sample.steps[1:]]
    assert any(step.rejected for step in of_steps)
    for step, draft in zip(of_steps, proposed, strict=True):
        if not step.sampled:  # the limit cut it
            continue
        path, parents, at = ids(step.accepted + step.rejected), draft.before[0].tolist(), 0
        for token in path:
            at = 1 + next(i for i, t in enumerate(draft.tokens[0].tolist()) if parents[i] == at and t == token)
        assert at not in parents, "the path ends at a leaf"
        assert step.drafted == drafter.nodes


def test_lookup_that_finds_nothing_shows_no_draft(target):
    steps = [step for sample in made(NgramDrafter(4), target) for step in sample.steps]
    assert any(step.accepted for step in steps)
    assert any(step.drafted == 0 and not step.rejected for step in steps[1:])
    whole = [step for step in steps if step.sampled]
    assert all(len(step.accepted) + len(step.rejected) == step.drafted for step in whole)


def test_each_adaptive_draft_has_its_own_drafter(target, monkeypatch):
    drafts = {"head": [], "ngram": []}

    def note(shape, name):
        draft = shape.draft

        def noted(self, *args):
            made = draft(self, *args)
            drafts[name].append(made)
            return made

        monkeypatch.setattr(shape, "draft", noted)

    note(PathOrDraft, "ngram")
    note(Chain, "head")
    head = tiny_head()
    tuned = adaptive_drafter(head, target)
    cheap = AdaptiveDrafter(head, tuned.choices, tuned.lookup, lambda *_: 1.0, packed=tuned.packed)
    samples = made(cheap, target)
    pieces = [piece for sample in samples for step in sample.steps for piece in step.accepted + step.rejected]
    assert {piece.source for piece in pieces} == {"head", "ngram"}
    of_head = {token for draft in drafts["head"] for token in draft.tokens[0].tolist()}
    assert all(int(piece.text) in of_head for piece in pieces if piece.source == "head")


@pytest.mark.parametrize("text", ["plain text", "né 漢字 \U0001f600!"])
def test_a_character_of_several_tokens_appears_once(text):
    class Bytes:
        def decode(self, tokens, **_) -> str:
            return bytes(tokens).decode("utf-8", "replace")

    tokens = list(text.encode())
    assert "".join(piece(Bytes(), tokens[:i], token) for i, token in enumerate(tokens)) == text


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    target = Target(tiny_model(), tokenizer=None)
    options = {"temperatures": [0.0], "max_new_tokens": 8, "speculator_name": "head"}
    measured(target, tiny_head(), [SUITE], folder, **options)
    return read_report(folder / "report.json"), (folder / "report.html").read_text()


def test_the_page_is_one_file_with_headlines_sortable_tables_plots_and_texts(report):
    report, text = report
    found = Page(text)
    assert not found.open or found.open == ["html"]
    asked = [attrs[name] for _, attrs in found.tags for name in ("src", "href", "data", "action") if name in attrs]
    assert len(asked) == 3, "the plots"
    assert all(link.startswith("data:image/png;base64,") for link in asked)
    assert "http" not in text.replace("http-equiv", "")
    sorted_by = [float(attrs["data-v"]) for tag, attrs in found.tags if tag == "td" and "data-v" in attrs]
    assert report.suites[1].acceptance_length in sorted_by
    classes = {attrs.get("class", "").split(" ")[0] for tag, attrs in found.tags if tag in ("span", "s")}
    assert classes <= {"target", "head", "ngram", ""}, "of adaptive drafts, too, each token has its own drafter"
    assert classes >= {"target", "head", ""}
    assert "draft head" in found.texts["td"]
    columns = [attrs["class"] for tag, attrs in found.tags if tag == "th"]
    assert columns.count("") == 7, "the others on demand"
    assert "more" in columns
    assert all(attrs["title"] for tag, attrs in found.tags if tag == "button")
    alone, verdict = headlines(report)
    assert shown(fastest(report.suites, "head")[0].speedup["plain"]) in alone
    assert found.texts["p"][:2] == [f"{alone}.", f"{verdict}."]


def test_hostile_texts_are_shown_and_never_run(report):
    report, _ = report
    target = Target(tiny_model(), tokenizer=None)
    target.tokenizer = Evil()
    names = {"target": EVIL[0], "speculator": EVIL[2], "warnings": EVIL, "not_run": {EVIL[4]: EVIL[0]}}
    rows = [replace(row, name=EVIL[0]) for row in report.suites]
    samples = made(HeadDrafter(tiny_head()), target)
    found = Page(page(replace(report, **names, suites=rows), samples, {}))
    assert not found.open or found.open == ["html"]
    assert [tag for tag, _ in found.tags].count("script") == 1
    assert not any(tag == "img" or name.startswith("on") for tag, attrs in found.tags for name in attrs)
    assert EVIL[0] in found.texts["dd"]
    shown = "".join(found.texts["span"] + found.texts["s"])
    for text in (EVIL[0], EVIL[1], EVIL[4], EVIL[6], "\\ud800", "\\x00\\x1b"):
        assert text in shown + "".join(found.texts["pre"]), text
