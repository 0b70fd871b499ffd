"""Rows of other trainers: their marks, their other answers, their images and their padding."""

import json
from itertools import compress

import pytest
from chat_templates import CHATML, chat_tokenizer
from datasets import Dataset, Features, Image, List, Value

from data.documents import RowError
from data.readers import read
from data.rendering import render
from data.rows import content
from data.tally import Tally
from data.writers.server import TextOnly
from eval.suites import load_suite
from speculator.errors import UserError
from speculator.prompts import prompt_of

CHATS = chat_tokenizer("qwen3", CHATML)
NO = (False, 0, 0.0)


def asked(text="q"):
    return {"role": "user", "content": text}


def said(text="bad", **keys):
    return {"role": "assistant", "content": text, **keys}


def human(text):
    return {"from": "human", "value": text}


def gpt(text, **keys):
    return {"from": "gpt", "value": text, **keys}


def learnt(row, tokenizer=CHATS):
    """Return the texts with loss that a row becomes, and the names of the marks that are not followed."""
    tally, found = Tally(1.0), content(row, "f:1")
    rows = render([{"id": "1", "where": "f:1", **found}], tokenizer, tally)
    texts = [tokenizer.decode(list(compress(each["input_ids"], each["loss_mask"]))) for each in rows]
    assert not tally.bad
    return "".join(texts).split("<|im_end|>")[:-1], found.get("unread", [])


MARKS = ["weight", "train", "training", "loss", "loss_weight", "loss_scale", "label", "kto_tag", "loss_mask"]
ROWS = [
    {"messages": [asked(), said()]},
    {"conversations": [human("q"), gpt("bad")]},
    {"instruction": "q", "output": "bad"},
    {"prompt": "q", "completion": "bad"},
    {"prompt": [asked()], "completion": [said()]},
]


@pytest.mark.parametrize("mark", [*MARKS, "step_loss_mask"])
def test_a_mark_of_another_trainer_is_followed_in_a_row_a_message_and_a_part(mark):
    for no in NO:
        for row in ROWS:
            followed = mark not in ("label", "loss") or isinstance(no, bool)  # else a class, or what was measured
            assert learnt({**row, mark: no}) == (([], []) if followed else (["bad"], [f'"{mark}"'])), row
        for marked in (said(**{mark: no}), said([{"type": "text", "text": "bad", mark: no}])):
            chat = [asked(), said("good"), asked(), marked]
            assert learnt({"messages": chat}) == (["good"], [])
        chat = [human("q"), gpt("good"), human("q"), gpt("bad", **{mark: no})]
        assert learnt({"conversations": chat}) == (["good"], [])
    for yes in (True, 1, 1.0, None):
        for row in ROWS:
            assert learnt({**row, mark: yes})[0] == ["bad"], row
        assert learnt({"messages": [asked(), said(**{mark: yes})]}) == (["bad"], [])


def test_marks_whose_other_value_says_no():
    for mark in ("masked", "rejected"):
        assert learnt({"messages": [asked(), said(**{mark: True})]}) == ([], [])
        assert learnt({"messages": [asked(), said(**{mark: False})]}) == (["bad"], [])
    nemo = {"conversations": [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "good"}], "system": ""}
    assert learnt({**nemo, "mask": "User"}) == (["good"], [])
    assert learnt({**nemo, "mask": "Assistant"}) == ([], [])
    spans = [{"begin_offset": 0, "end_offset": 2, "train": False}, {"begin_offset": 3, "end_offset": 4, "train": True}]
    assert learnt({"messages": [asked(), said(train_detail=spans)]}) == ([], [])


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"messages": [asked(), said("good")], "loss_mask": [0, 1]}, ['"loss_mask"']),
        ({"messages": [asked(), said("good", weight=0.5)]}, ['"weight" of a message other than 0 and 1']),
        ({"messages": [asked(), said("good", label="quality:4")]}, ['"label" of a message']),
        ({"messages": [asked(), said("good")], "sample_weight": 0}, ['"sample_weight"']),
        ({"instruction": "q", "output": "good", "rejected": 3}, ['"rejected"']),
        ({"messages": [asked(), said("good")], "completion": "other"}, ["a second answer beside that of the chat"]),
        ({"messages": [asked(), said("good")], "history": [], "images": [], "label": None, "maskot": 1}, []),
        ({"messages": [asked(), said("good")], "chosen": True}, []),
        ({"messages": [asked(), said("good")], "rejected": "bad", "rejected_response": "bad", "score": 0}, []),
    ],
)
def test_a_mark_that_is_not_followed_is_named(row, names):
    assert learnt(row) == (["good"], names)


def test_marks_that_are_not_followed_are_counted_in_every_kind_of_file(tmp_path, capsys):
    rows = [{"messages": [asked(str(i)), said("good")], "train_on": i % 2, "score": 1} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset.from_list(rows)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        assert [row.get("unread") for row in read(str(tmp_path / name))] == [['"train_on"']] * 4, name
    tally = Tally(1.0)
    tally.unread.update(['"train_on"'] * 2)
    Tally.from_record(json.loads(json.dumps(tally.record())), 1.0).warn("rows")
    assert 'rows: keys that look like marks and are not followed: 2 x "train_on"' in capsys.readouterr().err


def test_a_text_with_a_label_is_a_text_and_its_label_is_named():
    assert content({"text": "a film", "label": 0}, "f:1") == {"text": "a film", "unread": ['"label"']}
    assert content({"text": "a film", "loss": 0.0}, "f:1") == {"text": "a film", "unread": ['"loss"']}
    for row in ({"text": "a film"}, {"input_ids": [1, 2]}):
        with pytest.raises(UserError, match="marked as not to be learnt"):
            content({**row, "weight": 0}, "f:1")


MEDIA = [
    {"messages": [asked("<image>Who?"), said()], "images": ["1.jpg"]},
    {"image": "1.jpg", "conversations": [human("<image>\nWho?"), gpt("A player.")]},
    {"prompt": "Who?", "completion": "A player.", "videos": [{"path": "1.mp4", "bytes": None}]},
    {"instruction": "Who?", "output": "A player.", "audio": {"path": "1.wav"}},
]


def test_chats_about_images_are_bad_rows_and_no_prompts(tmp_path):
    for row in MEDIA:
        with pytest.raises(RowError, match=r'f:1: "(images?|videos|audio)" beside the text; only text is supported'):
            content(row, "f:1")
    for row in (MEDIA[0], MEDIA[2], {"question": "Who?", "image": "1.jpg"}):
        with pytest.raises(UserError, match=r"f:1: .* beside the text"):
            prompt_of("f:1", row)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MEDIA))
    target = TextOnly(name="tiny", tokenizer=CHATS, context_length=128)
    with pytest.raises(UserError, match=r'no usable row in it; the first fault is .*"images" beside the text'):
        load_suite(str(tmp_path / "rows.jsonl"), target, prompt_tokens=4, max_prompts=9, max_new_tokens=4)


def test_images_of_a_table_are_seen_and_not_decoded(tmp_path):
    features = Features(
        {"messages": List({"role": Value("string"), "content": Value("string")}), "images": List(Image())}
    )
    rows = [[{"bytes": b"no image", "path": None}], []]
    chats = [{"messages": [asked(str(i)), said()], "images": images} for i, images in enumerate(rows)]
    data = Dataset.from_list(chats, features=features)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("saved", "rows.parquet"):
        first, second = read(str(tmp_path / name))
        assert '"images" beside the text' in str(first["fault"])
        assert second["messages"] == [asked("1"), said()]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"conversations": [human("q1"), gpt("a1"), human("q2")], "chosen": gpt("yes")}, ["a1", "yes"]),
        ({"messages": [asked()], "chosen": "yes", "rejected": "no"}, ["yes"]),
        ({"messages": [asked()], "completion": [said("yes")]}, ["yes"]),
        ({"messages": [asked(), said("yes")], "chosen": [asked(), said("yes")], "prompt": "q"}, ["yes"]),
        ({"prompt": [asked()], "chosen": said("yes"), "rejected": said("no")}, ["yes"]),
        ({"prompt": [asked()], "chosen": "yes"}, ["yes"]),
        ({"prompt": "q", "chosen": gpt("yes")}, ["yes"]),
        ({"instruction": "q", "input": "", "chosen": "yes", "rejected": "no"}, ["yes"]),
        ({"instruction": "q", "chosen_response": "yes", "rejected_response": "no"}, ["yes"]),
        ({"chosen_messages": [asked(), said("yes", loss_weight=1.0)], "rejected_messages": [asked(), said()]}, ["yes"]),
        ({"chosen": [asked(), said("yes")], "rejected": [asked(), said("no")]}, ["yes"]),
    ],
)
def test_the_chosen_answer_is_learnt_in_every_format(row, answers):
    assert learnt(row) == (answers, [])


def test_history_comes_before_the_question():
    history = [["q1", "a1"], ["q2", "a2"]]
    chat = [asked("q1"), said("a1"), asked("q2"), said("a2"), asked("q3")]
    for row in (
        {"instruction": "q3", "input": "", "output": "a3", "history": history},
        {"query": "q3", "response": "a3", "history": history},
        {"prompt": "q3", "completion": "a3", "history": history},
    ):
        assert content(row, "f:1") == {"messages": [*chat, said("a3")]}
    assert content({"instruction": "q", "output": "a", "history": []}, "f:1") == {"messages": [asked(), said("a")]}
    assert prompt_of("f:1", {"prompt": "q3", "history": history}).messages == chat
    brief = {"role": "system", "content": "Be brief."}
    for row in (
        {"messages": [brief, asked("q3")], "completion": "a3"},
        {"messages": [asked("q3")], "system": "Be brief.", "completion": "a3"},
        {"prompt": [brief, asked("q3")], "completion": "a3"},
    ):
        assert content({**row, "history": history}, "f:1") == {"messages": [brief, *chat, said("a3")]}
        assert prompt_of("f:1", {**row, "history": history}).messages == [brief, *chat]
    for wrong in ([["q"]], ["qa"], 3):
        for reader in (lambda row: content(row, "f:1"), lambda row: prompt_of("f:1", row)):
            with pytest.raises(UserError, match='f:1: "history" is not a list of pairs'):
                reader({"prompt": "q", "completion": "a", "history": wrong})
    with pytest.raises(UserError, match='the "content" of message 1 is not a text'):
        content({"instruction": "q", "output": "a", "history": [[1, "a"]]}, "f:1")


@pytest.mark.parametrize(
    ("columns", "right"),
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}),
        (
            {"attention_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, -100, 8, 9], "special_tokens_mask": [0] * 5},
            {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]},
        ),
        (
            {"attention_mask": [1, 1, 2, 2, 0], "position_ids": [0, 1, 0, 1, 0]},
            {"input_ids": [5, 6, 7, 8], "loss_mask": [1] * 4, "document_ids": [0, 0, 1, 1]},
        ),
        (
            {"attention_mask": [0, 1, 1, 1, 1], "position_ids": [0, 0, 1, 0, 1]},
            {"input_ids": [6, 7, 8, 9], "loss_mask": [1] * 4, "document_ids": [0, 0, 1, 1]},
        ),
        ({"position_ids": [0, 1, 2, 3, 4]}, {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [1] * 5}),
        (
            {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [1, 1, 1, 0, 1], "labels": [5, 6, 7, 8, -100]},
            {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 0]},
        ),
    ],
)
def test_padding_and_the_columns_of_packers_are_followed(columns, right):
    assert content({"input_ids": [5, 6, 7, 8, 9], **columns}, "f:1") == right


def test_faults_of_the_columns_beside_tokens():
    row = {"input_ids": [5, 6]}
    for columns, fault in (
        ({"attention_mask": [0, 0]}, "padding alone"),
        ({"attention_mask": [1]}, '1 values of "attention_mask" for 2 tokens'),
        ({"completion_mask": [0, 2]}, '"completion_mask" must contain only 0 and 1'),
    ):
        with pytest.raises(UserError, match=fault):
            content({**row, **columns}, "f:1")
    assert content({**row, "mask": [1, 0]}, "f:1")["unread"] == ['"mask"']


def test_a_function_call_of_llama_factory_is_a_call():
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [human("q"), {"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "2"}]
    messages = content({"conversations": [*turns, gpt("It is 2.")]}, "f:1")["messages"]
    assert messages[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
