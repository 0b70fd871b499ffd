"""The source `self`: chats that the target writes, with any chat template, the same after a kill."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import fields
from itertools import pairwise

import pytest
from chat_targets import CHATML, PLAIN, chatty, save, tiny_llama, tokenizer_of
from tokenizers import AddedToken
from written import writing_of

from data.__main__ import main
from data.chat_turns import UserTurns, is_repetitive, turn_texts
from data.conversations import Row
from data.duplicates import NearDuplicates
from data.magpie import Asking, self_rows
from data.writers import engine as engine_writer
from data.writers.engine import EngineWriter
from speculator import UserError


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def made(target, folder, **changes):
    settings = {"rows": 60, "max_prompt_tokens": 24, "max_new_tokens": 12, **changes}
    asking = Asking(**{field.name: settings.pop(field.name) for field in fields(Asking) if field.name in settings})
    writer = EngineWriter(target, batch_size=8)
    return list(self_rows(target, writer, folder, asking, writing_of(settings), **settings))


def test_rendering_finds_the_text_around_turns():
    assert turn_texts(tokenizer_of(CHATML), several=True).__dict__ == {
        "before": "<|im_start|>user\n",
        "ask": "<|im_end|>\n<|im_start|>assistant\n",
        "again": "<|im_end|>\n<|im_start|>user\n",
        "ask_again": "<|im_end|>\n<|im_start|>assistant\n",
    }
    assert turn_texts(tokenizer_of(PLAIN)).ask == "\nA: "
    assert turn_texts(tokenizer_of(None)) is None
    with pytest.raises(UserError, match="chat template"):
        turn_texts(tokenizer_of("{{ messages[0]['content'] | upper }}"))


@pytest.mark.parametrize("turns", [1, 2])
def test_only_the_answers_of_written_chats_have_loss(model, tmp_path, turns):
    target = chatty(model)
    rows = made(target, tmp_path / "out", turns=turns)
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = Counter()
    for row in rows:
        text = target.tokenizer.decode(row["input_ids"])
        assert text.startswith("<|im_start|>user\n")
        learnt = [id for id, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert learnt.count(end) <= turns
        asked[text.count("<|im_start|>user\n")] += 1
        assert text.count("<|im_start|>user\n") == text.count("<|im_end|>\n<|im_start|>assistant\n")
        again = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert again == row["input_ids"] or turns  # what is sampled need not be how the text is cut
    assert max(asked) == turns
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["begun"] == 60
    assert manifest["rows"] == len(rows)
    assert manifest["rows"] + sum(manifest["dropped"].values()) >= 60
    assert manifest["tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert [each["what"] for each in manifest["passes"]] == ["prompts", "answers"] * turns
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rows", "manifest.json"}


def test_a_template_of_plain_words_ends_a_turn_where_the_answer_begins(model, tmp_path):
    target = chatty(model, PLAIN)
    chat = Row()
    assert (
        UserTurns(target, 1, 24, 12, target.context_length).add(
            chat, target.tokenizer("why is it?\nA: because")["input_ids"]
        )
        is None
    )
    assert target.tokenizer.decode(chat.ids) == "Q: why is it?\nA: "
    assert all(target.tokenizer.decode(row["input_ids"]).startswith("Q: ") for row in made(target, tmp_path / "out"))


def test_a_target_without_a_template_continues_its_text(model, tmp_path):
    target = chatty(model, None)
    for row in made(target, tmp_path / "out", max_prompt_tokens=4):
        assert row["loss_mask"].index(1) == 5
        assert row["input_ids"][0] == target.tokenizer.eos_token_id


def test_unusable_user_turns_are_dropped_with_a_reason(model):
    target = chatty(model)
    end, start = target.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    writer = UserTurns(target, 1, 24, 12, target.context_length)

    def fault(text, *after):
        return writer.add(Row(), [*target.tokenizer(text)["input_ids"], *after])

    assert fault("how do I wrap a text?", end) is None
    assert fault("How do I wrap a text", end) == "near-duplicate"
    assert fault("what is the shortest line?", end) is None
    assert fault("how do I", start, end) == "with special tokens in it"
    assert fault("how do I unwrap it") == "not ended within 24 tokens"
    assert fault(" \n", end) == "empty"
    assert fault("x y z " * 20, end) == "repetitive"
    assert fault(" ".join(map(str, range(100))), end) == "without room for an answer"


def test_added_tokens_that_are_plain_text_may_stand_in_a_user_turn(model):
    target = chatty(model)
    target.tokenizer = deepcopy(target.tokenizer)
    target.tokenizer.add_tokens([AddedToken("    ", special=False), AddedToken("<mark>", special=False)])
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    writer = UserTurns(target, 1, 24, 12, target.context_length)
    indented, marked = (target.tokenizer(f"why is{text}it indented?")["input_ids"] for text in ("    ", "<mark>"))
    assert writer.add(Row(), [*indented, end]) is None
    assert writer.add(Row(), [*marked, end]) == "with special tokens in it"
    cut = target.tokenizer("and where does    ")["input_ids"]
    assert writer.add(Row(), cut) == "not ended within 24 tokens"


def test_neighbouring_seeds_write_other_chats(model, tmp_path):
    target = chatty(model)
    first, second = ([row["input_ids"] for row in made(target, tmp_path / str(seed), seed=seed)] for seed in (0, 1))
    assert len([chat for chat in second if chat in first]) < len(second) / 4


def test_near_duplicates_are_found():
    seen = NearDuplicates()
    text = "Write a function that reads a file of comma separated values and gives the mean of its second column."
    assert not seen.add(text)
    assert seen.add(text.replace("Write", "write").replace(".", ""))
    assert seen.add(text.replace("mean", "sum"))
    assert not seen.add("Write a poem about the sea, in which no line rhymes with another.")
    assert seen.add(text)


def test_a_text_is_repetitive_if_most_ngrams_repeat():
    assert is_repetitive([1, 2, 3] * 10)
    assert not is_repetitive([1, 2, 3] * 3)  # a short one may
    assert not is_repetitive(list(range(40)))
    assert not is_repetitive(list(range(20)) + list(range(12)))


def test_the_command_prints_the_number_of_dropped_prompts(model, tmp_path, capsys):
    folder = save(chatty(model), tmp_path / "target")
    sizes = ["--max_rows", "60", "--max_prompt_tokens", "24", "--max_new_tokens", "12", "--batch_size", "8"]
    assert (
        main(["generate", "--target", str(folder), "--sources", "self", "--output", str(tmp_path / "out"), *sizes]) == 0
    )
    assert "of 60 prompts that the target wrote: " in capsys.readouterr().err.splitlines()[-1]
    assert (
        main(["generate", "--target", str(folder), "--sources", "self", "--output", str(tmp_path / "out"), *sizes]) == 0
    )


def test_a_turn_that_fails_is_dropped_and_the_chats_go_on(model, tmp_path, monkeypatch):
    """In each pass a quarter of the rows fails, of user turns and of answers, as without memory."""
    target, answer, failed = chatty(model), engine_writer._answer, Counter()

    def failing(engine, job, chats, **how):
        for chat in chats[::4]:
            chat.stop("too little memory")
            failed[job.writing.max_new_tokens] += 1
        return answer(engine, job, [chat for chat in chats if chat.prompt], **how)

    monkeypatch.setattr(engine_writer, "_answer", failing)
    rows = made(target, tmp_path / "out", turns=2)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert min(failed[24], failed[12]) > 3, "user turns, and answers"
    assert manifest["dropped"]["failed"] == failed.total()
    assert all(row["loss_mask"][-1] for row in rows), "nothing after the last answer"
    asked = sum(each["rows"] for each in manifest["passes"] if each["what"] == "answers")
    begun = sum(pair == (0, 1) for row in rows for pair in pairwise(row["loss_mask"]))
    assert begun == manifest["answers"] == asked - failed[12]


@pytest.mark.parametrize("late", ["3-prompts", "4-answers"])
def test_a_late_pass_that_fails_as_a_whole_leaves_the_chats_before_it(model, tmp_path, monkeypatch, late):
    target, answer = chatty(model), engine_writer._answer
    once = made(target, tmp_path / "once")

    def failing(engine, job, chats, **how):
        for chat in chats if job.work.folder.name == late else ():
            chat.stop("too little memory")
        return answer(engine, job, [chat for chat in chats if chat.prompt], **how)

    monkeypatch.setattr(engine_writer, "_answer", failing)
    assert made(target, tmp_path / "out", turns=2) == once
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["passes"][-1]["what"] == late[2:]
    assert manifest["dropped"]["failed"] == manifest["passes"][-1]["rows"] > 0


@pytest.mark.parametrize("context_length", [44, 48, 52])
def test_a_chat_ends_if_the_next_user_turn_does_not_fit(model, tmp_path, context_length):
    target = chatty(model)
    target.context_length = context_length
    assert made(target, tmp_path / "out", turns=4, rows=16)


def test_lengths_that_do_not_fit_the_context_are_an_error_before_decoding(model, tmp_path, monkeypatch):
    target = chatty(model)
    monkeypatch.setattr(EngineWriter, "write", None)
    with pytest.raises(UserError, match=f"do not fit .*, with a context of {target.context_length}"):
        made(target, tmp_path / "out", max_new_tokens=target.context_length)
    assert not (tmp_path / "out").exists()
