"""One table of what every command asks, by the kind of row in a file: with a chat template, and without one."""

import json
from argparse import Namespace

import pytest
from conftest import tiny_tokenizer
from datasets import Dataset

from data.cli.generate import _prompts
from data.mixture import mixture_of
from data.prompts import Cut, PromptLimits, conversations
from data.writers.server import TextOnly
from eval.suites import from_text, load_suite
from speculator.errors import UserError
from speculator.prompts import for_template, read_prompts

TEMPLATE = (
    "{{ tools[0].name if tools }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"
    "{{ 'a:' if add_generation_prompt }}"
)


def chat(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


ANSWER = chat("", "x")[1:]
ONE, BOTH, SYSTEM, LONG = "u:a a:", "u:a a:|b", "s:s u:a a:", "u:a a:x u:b a:"
EVERY, ANSWERED, ASKED, TEXT = (ONE,) * 4, (None, ONE, ONE, ONE), (ONE, ONE, None, None), ("a", "a", None, None)
KINDS = {
    # row: what is asked of a target with a chat template, and of one without
    # - generate, and data generate --prompts, which answers the later turns after "|" too
    # - eval, gate, tune and lossless, of .jsonl, .json and .parquet; eval asks the later turns after "|" too
    # - the suites of a training run
    # - data generate --sources and stage 2, which answer the later turns after "|" too
    "prompt": ({"prompt": "a"}, TEXT, TEXT),
    "list of texts": ({"prompt": ["a", "b"]}, (BOTH, BOTH, None, None), (None, "a|b", None, None)),
    "turns": ({"turns": ["a", "b"]}, (BOTH, BOTH, None, None), (None, "a|b", None, None)),
    "question": ({"question": "a"}, ASKED, (None, "a", None, None)),
    "chat": ({"messages": chat("a")}, EVERY, (None, "a", None, None)),
    "answered chat": ({"messages": chat("a", "x")}, ANSWERED, (None, "a", None, None)),
    "chat of two turns": (
        {"messages": chat("a", "x", "b", "y")},
        (None, LONG, LONG, BOTH),
        (None, "a\n\nx\n\nb", None, None),
    ),
    "open chat of two turns": (
        {"messages": chat("a", "x", "b")},
        (LONG, LONG, LONG, BOTH),
        (None, "a\n\nx\n\nb", None, None),
    ),
    "chat beside its prompt": ({"prompt": "p", "messages": chat("a"), "turns": None}, EVERY, (None, "a", None, None)),
    "tools": ({"messages": chat("a"), "tools": [{"name": "t"}]}, ("t" + ONE,) * 4, (None, "a", None, None)),
    "system": ({"messages": chat("a"), "system": "s"}, (SYSTEM,) * 4, (None, "s\n\na", None, None)),
    "history": (
        {"prompt": "b", "history": [["a", "x"]]},
        (LONG, LONG, None, None),
        (None, "a\n\nx\n\nb", None, None),
    ),
    "messages as prompt": ({"prompt": chat("a")}, ASKED, (None, "a", None, None)),
    "completion": ({"prompt": "a", "completion": "x"}, EVERY, ("a",) * 4),
    "preference": ({"prompt": "a", "chosen": "x", "rejected": "y"}, EVERY, ("a",) * 4),
    "preference of chats": ({"prompt": "a", "chosen": chat("a", "x")}, EVERY, ("a", "a", None, None)),
    "completion of a chat": ({"prompt": chat("a"), "completion": ANSWER}, EVERY, (None, "a", None, None)),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
        ANSWERED,
        (None, "a", None, None),
    ),
    "WildChat": ({"conversation": chat("a", "x")}, ANSWERED, (None, "a", None, None)),
    "Alpaca": ({"instruction": "a", "input": "", "output": "x"}, ANSWERED, (None, "a", None, None)),
    "messages as input": ({"input": chat("a"), "output": "x"}, ANSWERED, (None, "a", None, None)),
    "text": ({"text": "a b c d e"}, (None, "a b c", "a b c", "a b c"), (None, "a b c", "a b c", "a b c")),
    "short text": ({"text": "a"}, (None,) * 4, (None,) * 4),
    "tokens without a mask": ({"input_ids": [*range(65, 70)]}, *((None, *("abcd",) * 3),) * 2),
    "tokens that all have loss": (
        {"input_ids": [*range(65, 70)], "loss_mask": [1] * 5},
        *((None, *("abcd",) * 3),) * 2,
    ),
    "tokens": ({"input_ids": [65, 66, 67], "loss_mask": [0, 0, 1]}, (None, "ab", "ab", "ab"), (None, "ab", "ab", "ab")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "bare"])
def test_every_command_asks_what_a_row_says(tmp_path, kind, template):
    row, *expected = KINDS[kind]
    tokenizer, limits = tiny_tokenizer(), PromptLimits("tiny", 128, 16)
    tokenizer.chat_template = template
    model = TextOnly(name="tiny", tokenizer=tokenizer, context_length=128)
    lines, values, table = (tmp_path / f"rows{suffix}" for suffix in (".jsonl", ".json", ".parquet"))
    lines.write_text(json.dumps(row))
    values.write_text(json.dumps([row]))
    Dataset.from_list([row]).to_parquet(str(table))

    def generate():
        return for_template([prompt for _, prompt in read_prompts(lines)], tokenizer, "no chat template")

    def data_generate():
        flags = Namespace(mixture=None, prompts=lines, raw=False, target="tiny", max_rows=None)
        return _prompts(flags, tokenizer, limits)

    def suite(file):
        return load_suite(str(file), model, prompt_tokens=4, max_prompts=9, max_new_tokens=16)

    def of_suite(made):
        return [[ids] for ids in made.prompts] if not made.conversations else made.conversations

    def asked(read):
        """The text of the one prompt, and later turns; None: refused, or there is none."""
        try:
            (prompt,) = read() or [None]
        except UserError:
            return None
        if prompt is None:
            return None
        if isinstance(prompt, list):
            return tokenizer.decode(prompt[0])
        ids = prompt.ids or prompt.tokens(tokenizer)
        return "|".join([tokenizer.decode(ids), *(each["content"] for turn in prompt.later for each in turn)])

    sources = mixture_of([str(lines)])
    found = tuple(
        asked(read)
        for read in (
            generate,
            lambda: of_suite(suite(lines)),
            lambda: of_suite(from_text(sources, tokenizer, 4, 9, split=None)),
            lambda: conversations(sources, None, tokenizer, Cut(4), 9, limits=limits)[0],
        )
    )
    assert found == expected[template is None]
    assert asked(data_generate) == found[0]
    assert asked(lambda: of_suite(suite(values))) == asked(lambda: of_suite(suite(table))) == found[1]
