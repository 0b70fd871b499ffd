"""The source `self`: chats that the target writes alone, whatever its template, the same after a kill."""

import json
from collections import Counter

import pytest
from chat_targets import CHATML, PLAIN, chatty, tiny_llama, tokenizer_of

from data.magpie import self_rows, turns_of
from speculator import UserError


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def made(target, folder, **changes):
    settings = {"rows": 60, "max_prompt_tokens": 24, "max_new_tokens": 12, "batch_size": 8, "progress": False}
    return list(self_rows(target, settings.pop("drafter", None), folder, **{**settings, **changes}))


def test_what_a_template_writes_around_turns_is_found_by_rendering():
    assert turns_of(tokenizer_of(CHATML), several=True).__dict__ == {
        "before": "<|im_start|>user\n",
        "ask": "<|im_end|>\n<|im_start|>assistant\n",
        "again": "<|im_end|>\n<|im_start|>user\n",
        "ask_again": "<|im_end|>\n<|im_start|>assistant\n",
    }
    assert turns_of(tokenizer_of(PLAIN)).ask == "\nA: "
    assert turns_of(tokenizer_of(None)) is None
    with pytest.raises(UserError, match="once and as it is"):
        turns_of(tokenizer_of("{{ messages[0]['content'] | upper }}"))


@pytest.mark.parametrize("turns", [1, 2])
def test_rows_are_chats_with_the_answers_to_learn(model, tmp_path, turns):
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
