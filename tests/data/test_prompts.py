"""Prompts of each kind of document."""

import json
import re

import pytest
from chat_templates import chat_tokenizer
from conftest import settled, tiny_tokenizer
from datasets import Dataset, DatasetDict

from data.mixture import SourceError, mixture_of
from data.packing import pack
from data.prompts import Cut, PromptLimits, conversations
from data.sources import documents, token_documents
from data.writers.server import TextOnly
from train.options.config import DataConfig, GenerateConfig, RunConfig, Stage2Config
from train.text.inputs import own_prompts_of

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def prompts(sources, split, tokenizer, length, count, *, limits=None):
    cut = Cut(length)
    return [prompt.ids for prompt in conversations(mixture_of(sources), split, tokenizer, cut, count, limits=limits)[0]]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LIMITS = PromptLimits("tiny", 128, 16)


def test_prompts_that_do_not_fit_are_skipped_and_counted(tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": word * 60}, CHAT[1]]} for word in ("long", "a", "b")]
    source, tokenizer = write(tmp_path / "chats.jsonl", rows), chat_tokenizer("qwen3")
    found, left_out = conversations(mixture_of([source]), None, tokenizer, Cut(8), 9, limits=LIMITS)
    assert (len(found), left_out, found[0].ends) == (2, 1, True)
    said = "chats.jsonl: 1 prompts are skipped: they do not fit the context of tiny (128)"
    assert said in capsys.readouterr().err
    with pytest.raises(SourceError, match="none of its 3 prompts fits"):
        prompts([source], None, tokenizer, 8, 9, limits=PromptLimits("tiny", 128, 120))


def test_prompts_longer_than_training_rows_are_skipped(tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": word * 30}, CHAT[1]]} for word in ("long", "a", "b")]
    source, tokenizer = write(tmp_path / "chats.jsonl", rows), chat_tokenizer("qwen3")
    assert (
        len(
            prompts(
                [source],
                None,
                tokenizer,
                8,
                9,
                limits=PromptLimits(name="tiny", context=1024, new_tokens=16, seq_length=99),
            )
        )
        == 2
    )
    said = "chats.jsonl: 1 prompts are skipped: they do not fit data.seq_length 99\n"
    assert said in capsys.readouterr().err


def test_no_two_prompts_of_a_text_are_the_same(tmp_path):
    lines = "".join(f"{i * 37}: function_{i}(x)\n" for i in range(9))
    rows = [{"text": lines.replace("\n", "; ")}, {"text": "x = 1  # and so on\n" * 9}, {"text": lines.upper()}]
    chats, _ = conversations(
        mixture_of([write(tmp_path / "rows.jsonl", rows)]), None, tiny_tokenizer(), Cut(8, per_text=4), 99
    )
    found = [chat.ids for chat in chats]
    assert len({tuple(ids) for ids in found}) == len(found) >= 4
    assert not any(chat.ends for chat in chats)


def packed(tmp_path, rows, tokenizer, length):
    """Rows as `python -m data prepare` leaves them."""
    made = token_documents(mixture_of([write(tmp_path / "rows.jsonl", rows)]), None, tokenizer)
    DatasetDict({"train": Dataset.from_list(list(pack(made, length)))}).save_to_disk(tmp_path / "packed")
    return str(tmp_path / "packed")


def test_prompts_of_packed_chats_are_whole_openings(tmp_path):
    tokenizer = chat_tokenizer("qwen3")
    turns = [(f"{i}?", f"{i}. " * (1 + i % 40)) for i in range(1, 200)]
    rows: list[dict] = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in turns
    ]
    for i in range(0, 199, 10):
        rows[i] = {"text": f"{i}: a text\n" * 9}
    source = packed(tmp_path, rows, tokenizer, 48)
    chats, _ = conversations(mixture_of([source]), "train", tokenizer, Cut(8), 999)
    found = [chat.ids for chat in chats]
    texts = [tokenizer.decode(ids) for ids in found]
    openings = {f"<|im_start|>user\n{i}?<|im_end|>\n<|im_start|>assistant\n" for i in range(1, 200)}
    assert any(chat.ends for chat in chats)
    assert len([text for text in texts if text in openings]) > 30
    cuts = {tokenizer.decode(tokenizer(rows[i]["text"])["input_ids"][:8]) for i in range(0, 199, 10)}
    assert set(texts) - openings <= cuts
    assert set(texts) & cuts
    # Whatever comes before them: rows of packed chats are told from packed text by source.
    before = write(tmp_path / "before.jsonl", [{"text": "def f(x):\n    return x\n" * 9}])
    after, _ = conversations(mixture_of([before, source]), "train", tokenizer, Cut(8), 999)
    assert [chat.ids for chat in after][-len(found) :] == found


def test_packed_texts_give_prompts_of_the_given_length(tmp_path):
    rows = [{"text": f"def function_{i}(x):\n    return x + {i}\n"} for i in range(100)]
    source = packed(tmp_path, rows, tiny_tokenizer(), 16)
    chats, _ = conversations(mixture_of([source]), "train", tiny_tokenizer(), Cut(8), 5)
    found = [chat.ids for chat in chats]
    assert found == [row["input_ids"][:8] for row in documents(source, "train")][:5]
    assert not any(chat.ends for chat in chats)


def test_prompts_are_drawn_by_weight(tmp_path):
    sources = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}", "completion": "x"} for i in range(50)])
        for name in "ab"
    ]
    tokenizer = tiny_tokenizer()
    found = prompts([f"{sources[0]}@0.75", f"{sources[1]}@0.25"], None, tokenizer, 8, 40)
    assert [tokenizer.decode(ids)[0] for ids in found].count("a") == 30


def test_a_greeting_belongs_to_the_opening_of_a_chat(tmp_path):
    system, greeting = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Welcome!"}
    chats = [{"messages": [system, greeting, {"role": "user", "content": f"Q{i}"}, CHAT[1], *CHAT]} for i in range(9)]
    found, _ = conversations(
        mixture_of([write(tmp_path / "chats.jsonl", chats)]), None, chat_tokenizer("llama3"), Cut(8), 99
    )
    assert [prompt.messages for prompt in found] == [chat["messages"][:3] for chat in chats]
    assert all(list(prompt.later) == [CHAT[:1]] for prompt in found)


def test_a_run_prints_what_became_of_the_rows_of_stage_2(tmp_path, capfd):
    asked = {"role": "user", "content": "Q"}
    chats = [{"messages": [{**asked, "content": f"Q{i}"}, CHAT[1]]} for i in range(300)]
    source = write(tmp_path / "chats.jsonl", [*chats, {"messages": [{"role": "system", "content": "S"}, CHAT[1]]}])
    config = RunConfig(data=DataConfig(sources=[source]), stage2=Stage2Config(generate=GenerateConfig(max_rows=999)))
    target = TextOnly(tokenizer=chat_tokenizer("llama3"), name="tiny", context_length=512)
    run = settled(config)
    count = len(own_prompts_of(run, target, run.mixture, 256))
    line = re.search(r"prompts of stage 2, .*: (\d+) rows read, (\d+) used(.*)", capfd.readouterr().err)
    assert int(line[2]) == count > 200
    assert (line[3] == "") == (line[1] == line[2])
