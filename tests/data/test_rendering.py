"""Loss masks, checked by string search and character offsets, which the package does not use."""

from datetime import datetime

import pytest
from chat_templates import CHATML, FAMILIES, answers_by_offsets, chat_tokenizer
from conftest import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.mixture import SourceError
from data.rendering import render
from data.tally import Tally
from speculator.chat import DATA_DAY
from speculator.prompts import Conversation


def chat(*contents: str, first: str = "user") -> list[dict]:
    roles = ["user", "assistant"] if first == "user" else [first, "user", "assistant"]
    order = roles[:1] + [roles[-2:][i % 2] for i in range(len(contents) - 1)] if first == "system" else None
    order = order or [roles[i % 2] for i in range(len(contents))]
    return [{"role": role, "content": content} for role, content in zip(order, contents, strict=True)]


DIALOGUES = [
    chat(
        "Find me a place to eat.", "In which city?", "San Jose, American food.", "71 Saint Peter is nice.\n\nBook it?"
    ),
    chat("I need a bus.", "Where to?", "Fresno", "When?", "On the 3rd, 2 seats, 10 am.", "Done: $40.", "Thanks!"),
    chat(
        "Natalia sold 48 clips in April and half as many in May. How many altogether?",
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 altogether.\n#### 72",
    ),
    chat("  spaces around  ", "  and in the answer \n", "日本語?", "はい。 ✓ naïve", "...", "user\nassistant\n"),
    chat("The same word", "same", "same", "same"),
]


def rendered(tokenizer, **content):
    documents = list(render([{"id": "rows.jsonl:7", "where": "some/rows.jsonl:7", **content}], tokenizer))
    assert [document["id"] for document in documents] == ["rows.jsonl:7"] * len(documents)
    return documents


def text_with_loss(tokenizer, document) -> str:
    columns = zip(document["input_ids"], document["loss_mask"], strict=True)
    return tokenizer.decode([token for token, mask in columns if mask])


@pytest.mark.parametrize("messages", DIALOGUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_of_a_chat_covers_the_assistants_tokens_and_no_others(family, messages):
    tokenizer = chat_tokenizer(family)
    [document] = rendered(tokenizer, messages=messages)
    ids, mask = answers_by_offsets(tokenizer, family, messages)
    assert document["input_ids"] == ids
    assert document["loss_mask"] == mask
    if bos := tokenizer.bos_token_id:
        assert ids.count(bos) == 1


def test_a_system_message_is_context():
    tokenizer = chat_tokenizer("llama3")
    [document] = rendered(tokenizer, messages=chat("Be brief.", "Hello", "Hi", first="system"))
    assert text_with_loss(tokenizer, document) == "Hi<|eot_id|>"


def test_thinking_in_the_last_turn_has_loss():
    tokenizer = chat_tokenizer("qwen3")
    messages = chat("one?", "1", "two?", "<think>\nafter one\n</think>\n\n2")
    [document] = rendered(tokenizer, messages=messages)
    assert text_with_loss(tokenizer, document) == "1<|im_end|><think>\nafter one\n</think>\n\n2<|im_end|>"
    assert document["loss_mask"] == answers_by_offsets(tokenizer, "qwen3", messages)[1]


def test_tools_reach_the_template():
    tokenizer = chat_tokenizer("qwen3", "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    [document] = rendered(tokenizer, messages=chat("hi", "yes"), tools=[{"name": "search"}])
    assert tokenizer.decode(document["input_ids"]).startswith("search<|im_start|>")


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"


@pytest.mark.parametrize(
    ("family", "template", "messages", "message"),
    [
        ("gemma", None, chat("Be brief.", "Hello", "Hi", first="system"), "System role not supported"),
        ("llama3", None, chat("Hello"), "a chat without an answer"),
        (
            "llama3",
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            chat("", "Hi"),
            "nothing stands before the answer",
        ),
        ("llama3", "", chat("Hello", "Hi"), "no chat template"),
    ],
)
def test_a_chat_that_cannot_be_masked_is_named(family, template, messages, message):
    with pytest.raises(SourceError, match=rf"some/rows\.jsonl:7: .*{message}"):
        rendered(chat_tokenizer(family, template), messages=messages)


def test_an_answer_is_cut_where_the_prompt_ends_though_one_token_could_span_the_border():
    bpe = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "Ċ": 3, "ĊĊ": 4}, [("Ċ", "Ċ")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% else %}{{ m.content }}<s>{% endif %}"
        "{% endfor %}"
    )
    assert tokenizer("a\n\nb")["input_ids"] == [1, 4, 2]
    for template, content in (
        (tokenizer.chat_template, {"messages": chat("a", "\nb")}),
        (None, {"prompt": "a\n", "completion": "\nb"}),
    ):
        tokenizer.chat_template = template
        [document] = rendered(tokenizer, **content)
        assert (document["input_ids"], document["loss_mask"]) == ([1, 3, 3, 2, 0], [0, 0, 1, 1, 1])


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_inside_a_chat():
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, ":": 5}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}"
    )
    [document] = rendered(tokenizer, messages=chat("a", "b"))
    assert document["input_ids"] == tokenizer("a:b</s>", add_special_tokens=False)["input_ids"] == [2, 3, 5, 4, 1]
    assert document["loss_mask"] == [0, 0, 0, 1, 1]


def test_only_the_completion_of_a_prompt_has_loss():
    tokenizer = tiny_tokenizer()
    [document] = rendered(tokenizer, prompt="def f(x):\n", completion="    return x\n")
    assert tokenizer.decode(document["input_ids"]) == "def f(x):\n    return x\n<eos>"
    assert text_with_loss(tokenizer, document) == "    return x\n<eos>"
    assert sorted(document["loss_mask"]) == document["loss_mask"]


def test_every_token_of_a_text_has_loss():
    tokenizer = chat_tokenizer("gemma")
    [document] = rendered(tokenizer, text="import os")
    assert tokenizer.decode(document["input_ids"]) == "<bos>import os<eos>"
    assert document["loss_mask"] == [1] * len(document["input_ids"])


def test_token_rows_are_unchanged_and_separate_documents():
    parts = rendered(tiny_tokenizer(), input_ids=[5, 6, 7, 8], loss_mask=[1, 1, 0, 1], document_ids=[0, 0, 1, 1])
    columns = [(part["input_ids"], part["loss_mask"]) for part in parts]
    assert columns == [([5, 6], [1, 1]), ([7, 8], [0, 1])]


def test_a_token_that_the_tokenizer_lacks_is_named():
    with pytest.raises(SourceError, match=r"rows\.jsonl:7: token 300, but the tokenizer has 300"):
        rendered(tiny_tokenizer(), input_ids=[5, 300], loss_mask=[1, 1])


def test_a_prompt_with_its_completion_is_a_chat_if_there_is_a_template(capsys):
    tokenizer, tally = chat_tokenizer("llama3"), Tally()
    pair = {"id": "f:1", "where": "f:1", "prompt": "2 + 2 =\n", "completion": " 4"}
    [document] = render([pair], tokenizer, tally)
    [same] = rendered(tokenizer, messages=chat("2 + 2 =", "4"))
    assert [document[key] for key in ("input_ids", "loss_mask")] == [same[key] for key in ("input_ids", "loss_mask")]
    tally.warn("f")
    assert "--data.raw" in capsys.readouterr().err
    tokenizer.chat_template = None
    [document] = render([pair], tokenizer)
    assert tokenizer.decode(document["input_ids"]).startswith("<|begin_of_text|>2 + 2 =\n 4")


def test_a_special_token_that_a_text_spells_is_text():
    tokenizer = chat_tokenizer("llama3")
    eos = tokenizer.eos_token_id
    [text] = rendered(tokenizer, text="it ends with <|eot_id|> it says")
    template, tokenizer.chat_template = tokenizer.chat_template, None
    [pair] = rendered(tokenizer, prompt="what is <|eot_id|>?", completion="<|eot_id|> is a token")
    tokenizer.chat_template = template
    for document in (text, pair):
        assert document["input_ids"].count(eos) == 1
        assert document["input_ids"][0] == tokenizer.bos_token_id
        assert document["input_ids"][-1] == eos
        assert "<|eot_id|>" in tokenizer.decode(document["input_ids"], skip_special_tokens=True)
    # A chat's are special wherever they come from, as they are for a server; and no text before changes that.
    [document] = rendered(tokenizer, messages=chat("what is <|eot_id|>?", "a token"))
    assert document["input_ids"].count(eos) == 3


def test_a_template_that_writes_the_date_gives_the_same_rows_on_any_day():
    tokenizer = chat_tokenizer("qwen3", "It is {{ strftime_now('%d %B %Y') }}.\n" + LOOP + ASK)
    [document] = rendered(tokenizer, messages=DIALOGUES[1])
    assert tokenizer.decode(document["input_ids"]).startswith("It is 26 July 2024.\n")
    today = Conversation(messages=DIALOGUES[1][:1], chat=True).tokens(tokenizer)
    assert f"{datetime.now():%Y}" in tokenizer.decode(today), "who asks now is told the day"
    of_data = Conversation(messages=DIALOGUES[1][:1], chat=True, today=DATA_DAY).tokens(tokenizer)
    assert tokenizer.decode(of_data).startswith("It is 26 July 2024.\n")


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": "{}"}}]}
KNOWS_TOOLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "call", "lost"),
    [
        (CHATML.replace("m.content", "(m.content or '')"), CALL, 1),
        (CHATML, {**CALL, "content": "One moment."}, 1),
        (KNOWS_TOOLS, {**CALL, "content": "One moment."}, 0),
        (KNOWS_TOOLS, CALL, 0),
        (CHATML, {"role": "assistant", "content": ""}, 1),
    ],
)
def test_a_turn_that_the_template_does_not_write_has_no_loss(template, call, lost, capsys):
    tokenizer = chat_tokenizer("qwen3", template)
    messages = [{"role": "user", "content": "Hi"}, call, {"role": "user", "content": "So?"}]
    messages.append({"role": "assistant", "content": "Yes, it rains."})
    tally = Tally()
    (row,) = render([{"id": "0", "where": "x:1", "messages": messages}], tokenizer, tally)
    learnt = tokenizer.decode([token for token, loss in zip(row["input_ids"], row["loss_mask"], strict=True) if loss])
    assert learnt.endswith("Yes, it rains.<|im_end|>")
    assert learnt.count("<|im_end|>") == 2 - lost
    assert (tally.answers, tally.left_out.total()) == (2 - lost, lost)
    Tally.from_record(tally.record(), 0.0).warn("chats")
    assert ("1 have none" in capsys.readouterr().err) == bool(lost)
