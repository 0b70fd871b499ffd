"""A stream shows whole characters only and nothing of a stop string."""

import random

import pytest
from conftest import tiny_tokenizer
from serving_here import outputs

from speculator.decoding.request import StopStrings
from speculator.decoding.streaming import decode
from speculator.server.answer import AnswerText


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("def f(x):\n    return x", ["return x"]),
        ("def f(x):\n    return x", ["\n", " "]),
        ("naïve · 日本語 🙂🙂 done", ["🙂🙂", "d"]),
        ("naïve · 日本語 🙂🙂 done", ["nowhere"]),
        ("aaabaaab aab", ["b aa", "aabb"]),
        ("aaabaaab aab", []),
        ("stop here</s>and not here", ["</s>"]),
    ],
)
def test_a_stream_is_a_prefix_of_the_text_before_the_first_stop_string(text, stops):
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    places = [place for place in map(text.find, stops) if place >= 0]
    expected = text[: min(places)] if places else text
    draw = random.Random(0)
    for _ in range(20):
        answer, shown = AnswerText(tokenizer, stops), ""
        for output in outputs(tokenizer, tokens, "length", stops, size=lambda: draw.randint(1, 5)):
            shown += answer.push(output.tokens, output.finish_reason)
            assert expected.startswith(shown), (shown, expected)
        assert shown == answer.text == expected
        assert answer.stopped == bool(places)
        assert decode(tokenizer, tokens) == text


def test_a_stop_string_may_not_end_among_the_first_tokens():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("ab ab ab")["input_ids"]
    for count in range(len(tokens)):
        early = decode(tokenizer, tokens[:count])
        place = "ab ab ab".find("ab", max(0, len(early) - 1))
        for step in (1, 3, 8):
            answer = AnswerText(tokenizer, ["ab"])
            for output in outputs(tokenizer, tokens, "length", ["ab"], count, lambda step=step: step):
                answer.push(output.tokens, output.finish_reason)
            assert answer.text == ("ab ab ab" if place < 0 else "ab ab ab"[:place])
            assert answer.stopped == (place >= 0)
            stop = StopStrings(["ab"], tokenizer)
            ends = [n for n in range(1, len(tokens) + 1) if stop.end(tokens[:n], 0, 1, count)]
            assert bool(ends) == (place >= 0)


def test_text_that_starts_no_stop_string_is_shown_at_once():
    tokenizer = tiny_tokenizer()
    answer = AnswerText(tokenizer, ["xyz"])
    (a, x, y) = (tokenizer(letter)["input_ids"] for letter in "axy")
    assert answer.push(a, None) == "a"
    assert answer.push(x, None) == ""
    assert answer.push(y, None) == ""
    assert answer.push(a, None) == "xya"
    assert answer.push(x, "length") == "x", "the end settles what was held back"


def test_half_a_character_at_the_end_is_shown_as_a_replacement_character():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("é")["input_ids"]
    assert len(tokens) == 2
    answer = AnswerText(tokenizer, [])
    assert answer.push(tokens[:1], "length") == "�"
