"""Whole conversations regenerated: what each answer follows, which tokens have loss, tools, thinking, servers."""

import json

import pytest
from chat_targets import chatty, tiny_llama
from chat_templates import QWEN3, chat_tokenizer
from serving_here import serving

from data.conversations import Answering
from data.mixture import mixture_of
from data.prompts import Cut, conversations
from data.rendering import render
from data.writers.engine import EngineWriter
from data.writers.server import ServerWriter, TextOnly
from data.writing import Writing
from speculator import HeadDrafter, MLPSpeculator, MLPSpeculatorConfig, Sampling, UserError, generate
from speculator.chat import set_template_variables, thinks
from speculator.prompts import Conversation, split_at_answers

WORDS = ["one", "two", "three", "four", "five", "six"]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def target():
    return chatty(tiny_llama())


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [[turn for word in WORDS[i % 4 :] for turn in (user(f"{word} {i}"), assistant("old"))] for i in range(12)]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def chats_of(file, tokenizer, turns=None) -> list[Conversation]:
    return conversations(mixture_of([str(file)]), None, tokenizer, Cut(8, turns=turns), 99)[0]


def rows_of(target, chats, folder, **changes) -> list[dict]:
    writing = Writing(max_new_tokens=12, seed=3)
    return list(EngineWriter(target, batch_size=3, **changes).write(chats, folder, writing))


def spans(mask: list[int]) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_every_answer_follows_the_targets_own_earlier_answers(target, chats_file, tmp_path):
    """Checked against one chat at a time, rendered anew for every turn, without slots, prefix sharing and a draft."""
    chats, tokenizer = chats_of(chats_file, target.tokenizer), target.tokenizer
    sizes = {"vocab_size": target.vocab_size, "emb_dim": 32, "inner_dim": 16, "n_predict": 3}
    rows = rows_of(target, chats, tmp_path, drafter=HeadDrafter(MLPSpeculator(MLPSpeculatorConfig(**sizes))))
    manifest, made, answers = json.loads((tmp_path / "manifest.json").read_text()), iter(rows), 0
    for number, chat in enumerate(chats):
        messages, later, ids, ended = list(chat.messages), list(chat.later), chat.ids, True
        row, place, turn = next(made), [], 0
        while True:
            sampling = Sampling(1.0, seed=3 + turn * len(chats) + number)
            (answer,) = generate(target, None, [ids], sampling, max_new_tokens=12).tokens
            whole = [*ids, *answer]
            if row["input_ids"][: len(whole)] != whole:
                assert spans(row["loss_mask"]) == place, "a row holds its answers and nothing else"
                row, place = next(made), []
            place.append((len(ids), len(whole)))
            answers, turn = answers + 1, turn + 1
            ended = answer[-1] in target.eos_token_ids
            if not ended or not later:
                break
            text = tokenizer.decode(answer, skip_special_tokens=True)
            messages += [assistant(text), *later.pop(0)]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            if len(ids) > target.context_length - 12:
                break
        assert spans(row["loss_mask"]) == place
        assert row["input_ids"][: place[-1][1]] == row["input_ids"], "nothing follows the last answer"
    assert next(made, None) is None
    assert manifest["answers"] == answers > 2 * len(chats)


def test_the_first_turns_alone_are_the_first_answers(target, chats_file, tmp_path):
    chats = chats_of(chats_file, target.tokenizer, turns=1)
    assert not any(chat.later for chat in chats)
    rows = rows_of(target, chats, tmp_path / "first")
    both = rows_of(target, chats_of(chats_file, target.tokenizer), tmp_path / "all")
    firsts = [row["input_ids"] for row in rows]
    assert all(len(spans(row["loss_mask"])) == 1 for row in rows)
    assert all(any(row["input_ids"][: len(first)] == first for row in both) for first in firsts)


def test_a_server_gives_the_rows_of_the_engine_here(target, chats_file, tmp_path):
    chats = chats_of(chats_file, target.tokenizer)
    here = rows_of(target, chats, tmp_path / "here")
    how, there = Writing(max_new_tokens=12, seed=3), tmp_path / "there"
    with serving(target) as (url, _):
        served = TextOnly(name="tiny", tokenizer=target.tokenizer, context_length=target.context_length, urls=[url])
        there = list(ServerWriter(served, 5).write(chats, there, how))
    assert there == here


def answered(conversation: Conversation, tokenizer, *texts: str, longest: int = 10_000) -> Answering:
    """The conversation after these answers, each of which ends by itself."""
    made = Answering(conversation, tokenizer, longest)
    for text in texts:
        made.add([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], ended=True)
    return made


def conversation_of(tokenizer, *messages: dict, tools=None) -> Conversation:
    opening, later = split_at_answers(list(messages), None)
    ids = tokenizer.apply_chat_template(opening, tools=tools, add_generation_prompt=True)["input_ids"]
    return Conversation(ids, opening, later, tools, chat=True)


def texts_with_loss(made: Answering, tokenizer) -> list[list[str]]:
    return [[tokenizer.decode(row.ids[a:b]) for a, b in spans(row.mask)] for row in made.rows]


def test_a_template_that_drops_thinking_gives_a_row_per_answer():
    tokenizer = chat_tokenizer("qwen3")
    talk = [user("a"), assistant("x"), user("b"), assistant("y")]
    made = answered(conversation_of(tokenizer, *talk), tokenizer, "<think>\nhm\n</think>\n\nfirst", "second")
    assert texts_with_loss(made, tokenizer) == [["<think>\nhm\n</think>\n\nfirst<|im_end|>"], ["second<|im_end|>"]]
    assert "hm" not in tokenizer.decode(made.rows[1].ids), "the server does not read earlier thoughts either"
    plain = answered(conversation_of(tokenizer, *talk), tokenizer, "first", "second")
    assert texts_with_loss(plain, tokenizer) == [["first<|im_end|>", "second<|im_end|>"]]


def test_thinking_is_kept_where_the_template_keeps_it():
    keeps = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content is defined %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer("qwen3", keeps)
    talk = [user("a"), assistant("x"), user("b"), assistant("y")]
    made = answered(conversation_of(tokenizer, *talk), tokenizer, "<think>\nhm\n</think>\n\nfirst", "second")
    assert len(made.rows) == 1


def test_the_history_has_the_tool_calls_that_the_results_belong_to():
    template = (
        "{% if tools %}{{ tools[0].name }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chat_tokenizer("qwen3", template)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    talk = [user("weather?"), call, {"role": "tool", "content": "rain"}, assistant("old"), user("thanks")]
    chat = conversation_of(tokenizer, *talk, tools=[{"name": "look"}])
    other = answered(chat, tokenizer, "I can't", "It rains", "Bye")
    expected = [["I can't<|im_end|>"], ["It rains<|im_end|>", "Bye<|im_end|>"]]
    assert texts_with_loss(other, tokenizer) == expected
    last = tokenizer.decode(other.rows[1].ids)
    assert last.startswith("look\n<|im_start|>user\nweather?")
    assert "CALL look<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in last
    assert "old" not in last
    assert other.prompt is None
    same = answered(chat, tokenizer, "CALL look", "It rains")
    assert len(same.rows) == 1, "the target calls as the history does"


def test_an_answer_that_fails_ends_the_conversation_after_the_one_before():
    tokenizer = chat_tokenizer("qwen3")
    talk = [user("a"), assistant("x"), user("b"), assistant("y")]
    made = answered(conversation_of(tokenizer, *talk), tokenizer, "first")
    made.stop("too little memory")
    assert made.prompt is None
    assert (texts_with_loss(made, tokenizer), made.rows[0].mask[-1]) == ([["first<|im_end|>"]], 1)
    none = answered(conversation_of(tokenizer, *talk), tokenizer)
    none.stop("too little memory")
    assert none.rows == []


@pytest.mark.parametrize(
    ("ended", "longest", "goes_on"), [(True, 10_000, True), (False, 10_000, False), (True, 12, False)]
)
def test_a_cut_answer_and_a_long_chat_end_the_conversation(ended, longest, goes_on):
    tokenizer = chat_tokenizer("qwen3")
    made = Answering(conversation_of(tokenizer, user("a"), assistant("x"), user("b")), tokenizer, longest)
    made.add(tokenizer("yes<|im_end|>")["input_ids"], ended)
    assert (made.prompt is not None) == goes_on
    assert made.rows[0].mask[-1] == (not goes_on), "no question without an answer"


def test_a_chat_is_asked_where_somebody_waits_for_an_answer():
    opening, later = split_at_answers([user("a"), assistant("x"), assistant("y"), user("b")], None)
    assert (opening, later) == ([user("a")], [])
    opening, later = split_at_answers([user("a"), user("b"), assistant("x"), user("c")], None)
    assert (opening, later) == ([user("a"), user("b")], [[user("c")]])


def test_variables_of_the_template_hold_for_rows_prompts_and_histories():
    """Qwen 3 without thinking: its generation prompt has an empty block, which earlier turns lack."""
    asks = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    block = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer = chat_tokenizer("qwen3", QWEN3.replace(asks, asks + block))
    assert thinks(tokenizer)
    set_template_variables(tokenizer, {"enable_thinking": False})
    assert not thinks(tokenizer)
    talk = [user("a"), assistant("x"), user("b"), assistant("y")]
    chat = conversation_of(tokenizer, *talk)
    assert tokenizer.decode(chat.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    made = answered(chat, tokenizer, "first", "second")
    assert texts_with_loss(made, tokenizer) == [["first<|im_end|>"], ["second<|im_end|>"]]
    (row,) = render([{"id": "0", "where": "x:1", "messages": talk}], tokenizer)
    texts = [tokenizer.decode(row["input_ids"][a:b]) for a, b in spans(row["loss_mask"])]
    assert texts == ["x<|im_end|>", "y<|im_end|>"]


@pytest.mark.parametrize("variables", [{"enable-thinking": False}, {"x": 1}])
def test_variables_that_no_template_can_have_are_an_error(variables):
    tokenizer = chat_tokenizer("qwen3", "" if "x" in variables else None)
    with pytest.raises(UserError, match="chat_template_kwargs"):
        set_template_variables(tokenizer, variables)
