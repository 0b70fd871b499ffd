"""Suites in their published formats: prompts, turns, categories and malformed rows."""

import gzip
import json
from argparse import Namespace
from collections import Counter

import pytest
from conftest import tiny_tokenizer

from data.readers import hub_dataset
from data.writers.server import TextOnly
from eval import suites
from eval.suites import _MT_BENCH, first_turns, held_out, load_suite
from speculator import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PUBLISHED = {
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Now in verse."]},
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Shorter."], "reference": ["x"]},
    "gsm8k": {"question": "How many eggs?", "answer": "9"},
}


def model_of(chat: bool = False) -> TextOnly:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    return TextOnly(name="tiny", tokenizer=tokenizer, context_length=128)


def load(source, model=None, **options):
    sizes = {"prompt_tokens": 8, "max_prompts": 4, "max_new_tokens": 16}
    return load_suite(str(source), model or model_of(), **{**sizes, **options})


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_recorded_row_that_was_cut_is_skipped(tmp_path, capfd):
    (tmp_path / "rows").mkdir()
    write(tmp_path / "manifest.json", {"recorded": True})
    rows = [{"input_ids": [number] * 9, "loss_mask": [0] * 8 + [1]} for number in range(60)]
    file = write(tmp_path / "rows" / "0.jsonl", *rows)
    file.write_bytes(file.read_bytes()[:-5])
    assert load(tmp_path).prompts == [[57] * 8, [58] * 8]
    assert "1 x not JSON" in capfd.readouterr().err


def test_a_later_turn_follows_the_answer(tmp_path):
    file = write(tmp_path / "q.jsonl", PUBLISHED["spec_bench"])
    for chat, expected in (
        (False, "Write a post. Fine.\n\nNow in verse."),
        (True, "<user>Write a post.<assistant> Fine.<user>Now in verse.<assistant>"),
    ):
        model = model_of(chat)
        suite = load(file, model)
        answer = model.tokenizer(" Fine.")["input_ids"]
        assert model.tokenizer.decode(suite.conversations[0].after(model.tokenizer, answer).ids) == expected


def test_the_digest_is_that_of_all_questions(tmp_path):
    rows = [{"turns": ["One?", "Two?"]}, {"turns": ["One?", "Three?"]}, {"turns": ["Two?", "Two?"]}]
    suites = [load(write(tmp_path / f"{i}.jsonl", row)) for i, row in enumerate([*rows, rows[0]])]
    assert len({suite.digest for suite in suites}) == 3
    assert suites[0].digest == suites[3].digest


def test_spec_benchs_six_tasks_have_as_many_prompts_each(tmp_path):
    names = [*sorted(_MT_BENCH), "translation", "summarization", "qa", "math_reasoning", "rag"]
    rows = [{"category": name, "turns": [f"{name} {i}"]} for name in names for i in range(9)]
    suite = load(write(tmp_path / "q.jsonl", *rows), max_prompts=54)
    counts = Counter("mt_bench" if name in _MT_BENCH else name for name in suite.categories)
    assert set(counts.values()) == {9}
    assert len(counts) == 6
    assert set(suite.categories[::6]) == _MT_BENCH
    alone = load(write(tmp_path / "mt.jsonl", *rows[: 9 * 8]), max_prompts=8)
    assert set(alone.categories) == _MT_BENCH, "a short run covers every category"


def test_prompts_of_recorded_answers_are_spread_over_the_newest(tmp_path):
    (tmp_path / "rows").mkdir()
    write(tmp_path / "manifest.json", {"recorded": True})
    rows = [{"input_ids": [n % 250 + 3, *[n // 250] * 8], "loss_mask": [0] * 8 + [1]} for n in range(2000)]
    write(tmp_path / "rows" / "0.jsonl", *rows)
    number = lambda prompt: prompt[0] - 3 + 250 * prompt[1]  # noqa: E731
    assert list(map(number, load(tmp_path).prompts)) == [1900, 1925, 1950, 1975]
    assert list(map(number, load(tmp_path, split="validation").prompts)) == [1800, 1825, 1850, 1875]


def test_of_a_long_file_a_suite_takes_some_rows_at_random_and_always_the_same(tmp_path):
    """Rows are often sorted, by time or by difficulty."""
    model = model_of()
    file = write(tmp_path / "q.jsonl", *({"prompt": f"def f{n}"} for n in range(40)))
    taken = [model.tokenizer.decode(prompt) for prompt in load(file, model, max_prompts=8).prompts]
    assert sum(int(text.removeprefix("def f")) >= 20 for text in taken) in range(2, 7)
    assert taken == [model.tokenizer.decode(prompt) for prompt in load(file, model, max_prompts=8).prompts]
    whole = load(file, model, max_prompts=40).prompts
    assert [model.tokenizer.decode(prompt) for prompt in whole] == [f"def f{n}" for n in range(40)]


def test_a_prompt_without_room_is_left_out_and_counted(tmp_path):
    model = model_of()
    file = write(tmp_path / "q.jsonl", {"prompt": "self " * 300}, {"prompt": "def f():"})
    suite = load(file, model)
    assert suite.left_out == 1
    assert [model.tokenizer.decode(prompt) for prompt in suite.prompts] == ["def f():"]
    room = model.context_length - len(suite.prompts[0])
    assert len(load(file, model, max_new_tokens=room).prompts) == 1
    with pytest.raises(UserError, match="none of its 2 prompts fits"):
        load(file, model, max_new_tokens=room + 1)


def test_raw_prompts_have_no_template(tmp_path):
    file, model = tmp_path / "q.jsonl", model_of(chat=True)
    file.write_text(json.dumps({"prompt": "def f():", "completion": "return 1"}))
    assert model.tokenizer.decode(load(file, model).prompts[0]) == "<user>def f():<assistant>"
    raw = load(file, model, raw=True)
    assert model.tokenizer.decode(raw.prompts[0]) == "def f():"
    assert not raw.chat, "nothing says where its answer ends"
    assert load(file.rename(tmp_path / "q.json"), model, raw=True).prompts == raw.prompts


def test_a_command_that_asks_first_turns_only_says_so(tmp_path, capsys):
    file = write(tmp_path / "q.jsonl", PUBLISHED["mt_bench"], PUBLISHED["spec_bench"])
    sizes = Namespace(prompt_tokens=8, max_prompts=4, max_new_tokens=16)
    assert len(first_turns(sizes, str(file), model_of()).prompts) == 2
    assert "q.jsonl: first turns only, 2 later turns are not asked" in capsys.readouterr().err
    load(file)
    assert "later turns" not in capsys.readouterr().err


def test_gzipped_rows_are_read_and_texts_are_cut_into_prompts(tmp_path):
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as stream:
        stream.write(json.dumps(PUBLISHED["gsm8k"]))
    assert len(load(tmp_path / "q.jsonl.gz").prompts) == 1
    suite = load(write(tmp_path / "t.jsonl", {"text": "a = 1\n" * 30}))
    assert [len(prompt) for prompt in suite.prompts] == [8]
    assert suite.prompts == held_out(str(tmp_path / "t.jsonl"), model_of().tokenizer, 8, 4).prompts
    (tmp_path / "t.txt").write_text("b = 2\n" * 30)
    assert [len(prompt) for prompt in load(tmp_path / "t.txt").prompts] == [8]


def test_a_hub_dataset_is_read_by_its_library(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, split, rows in (
        ("name", "test", [{"question": f"How many {i}?", "answer": "1"} for i in range(3)]),
        ("name", "train", [{"question": "Wrong split?", "answer": "1"}]),
        ("texts", "train", [{"text": "a = 1\n" * 30}, {"text": "b = 1\n" * 30}]),
    ):
        (tmp_path / "owner" / name).mkdir(parents=True, exist_ok=True)
        write(tmp_path / "owner" / name / f"{split}.jsonl", *rows)
    # The library takes a local folder for a hub id, so only the name differs from a download.
    monkeypatch.setattr("data.readers.hub_dataset", lambda name, *rest: hub_dataset(str(tmp_path / name), *rest))
    assert len(load("owner/name:test").prompts) == 3
    assert len(load("owner/name").prompts) == 1
    assert load("owner/name:test").name == "owner/name:test", "two data sets may end alike"
    with pytest.raises(UserError, match=r"owner/name: .*dev"):
        load("owner/name:dev")
    assert [len(prompt) for prompt in load("owner/texts").prompts] == [8, 8]
    with pytest.raises(UserError, match="no document of owner/texts has 999 tokens"):
        load("owner/texts", prompt_tokens=999)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "no usable row in it; the first fault is .*q.jsonl:1: not JSON"),
        ([{"turns": []}, {"question": 5}], "q.jsonl:1"),
        ([{"text": 5}], "q.jsonl:1"),
        ([], "no rows"),
    ],
)
def test_a_suite_without_a_usable_row_fails_in_one_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as error:
        load(write(tmp_path / "q.jsonl", *rows))
    assert "\n" not in str(error.value)


def test_odd_rows_of_a_suite_are_counted_and_skipped_and_no_more_rows_are_read_than_due(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(suites, "_SHUFFLED", 0)
    odd = ["{", {"turns": []}, {"text": "y"}, {"messages": [{"role": "user", "content": 5}]}, {"answer": "1"}]
    questions = [{"question": f"How many {i}?", "category": {"a": i}} for i in range(9)]
    suite = load(write(tmp_path / "q.jsonl", *odd[:1], questions[0], *odd[1:], *questions[1:]))
    assert len(suite.prompts) == 4
    assert "9 rows read, 4 used, 5 left out: " in capfd.readouterr().err


def test_a_category_of_any_type_names_a_group_or_none(tmp_path):
    rows = [{"category": kind, "turns": ["a"]} for kind in ("math", 3, ["x"], {"y": 1}, None)]
    suite = load(write(tmp_path / "q.jsonl", *rows), max_prompts=9)
    assert sorted(suite.categories) == ["", "", "", "3", "math"]


def test_every_row_of_a_suite_with_categories_is_accounted_for(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(suites, "_SHUFFLED", 0)
    rows = [{"category": "ab"[i % 2], "question": f"How {i}?"} for i in range(20)]
    suite = load(write(tmp_path / "q.jsonl", {"category": "a", "question": "self " * 300}, *rows))
    assert (suite.categories, suite.left_out) == (["b", "a", "b", "a"], 1)
    assert "21 rows read, 4 used, 17 left out: 16 x beyond --max_prompts; 1 x too long" in capfd.readouterr().err
