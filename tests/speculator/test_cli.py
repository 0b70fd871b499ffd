import io
import json
import random
import re
import shutil
import sys

import pytest
from conftest import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from speculator import Candidates, Chain, Engine, Sampling, Tree
from speculator.__main__ import main
from speculator.cli import generate as command
from speculator.cli import model_flags
from speculator.decoding import streaming
from speculator.decoding.request import StopStrings
from speculator.decoding.rows import Rows
from speculator.decoding.streaming import Detokenizer, TextStream, decode
from speculator.errors import printable
from speculator.server.answer import AnswerText

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    from speculator import MLPSpeculator, MLPSpeculatorConfig

    folder = tmp_path_factory.mktemp("head")
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_folder(target_folder, tmp_path_factory):
    """The target with a chat template."""
    folder = shutil.copytree(target_folder, tmp_path_factory.mktemp("chat") / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def greedy(folder, ids: list[int], count: int) -> list[int]:
    import torch

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


@pytest.mark.parametrize("drafting", [[], ["--draft_model"], ["--ngram"]])
def test_rows_of_the_output_file_are_the_targets_greedy_text(target_folder, head_folder, tmp_path, drafting):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["def main():", "import sys", "class A"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    folders = {"--speculator": [str(head_folder)], "--draft_model": [str(target_folder)]}
    drafting = [part for flag in drafting for part in (flag, *folders.get(flag, []))]
    flags = ["--prompts", str(prompts), "--output", str(output), "--max_new_tokens", "20", "--batch_size", "2"]
    assert main(["generate", "--target", str(target_folder), *drafting, *flags]) == 0
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == texts
    for row in rows:
        expected = greedy(target_folder, tokenizer(row["prompt"])["input_ids"], 20)
        assert row["tokens"] == expected
        assert row["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert row["acceptance_length"] is None or row["acceptance_length"] >= 1


def test_every_sample_is_a_row(target_folder, tmp_path):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "def main():", "id": 5}\n{"prompt": "class A"}\n')
    command = ["generate", "--target", str(target_folder), "--prompts", str(prompts), "--output", str(output)]
    command += ["--max_new_tokens", "16", "--temperature", "0.8"]

    def rows(*flags) -> list[dict]:
        assert main([*command, *flags]) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    alone = rows()
    assert not any("sample" in row for row in alone)
    several = rows("--num_samples", "3")
    assert [(row["prompt"], row["sample"]) for row in several] == [(r["prompt"], i) for r in alone for i in range(3)]
    assert several[0]["tokens"] == alone[0]["tokens"]
    assert several[2]["id"] == 5
    assert len({row["text"] for row in several}) == 6
    drafted = rows("--num_samples", "3", "--batch_size", "4", "--ngram")
    assert [row["tokens"] for row in drafted] == [row["tokens"] for row in several]


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_the_texts_of_other_prompts_are_printed_if_one_fails(target_folder, tmp_path, monkeypatch, capsys, batch_size):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def a", "~", "class B")))
    load = model_flags.load_target

    def broken(arguments):
        target = load(arguments)
        target.model.get_input_embeddings().weight.data[target.tokenizer.convert_tokens_to_ids("~")] = float("nan")
        return target

    monkeypatch.setattr(model_flags, "load_target", broken)
    flags = ["--prompts", str(prompts), "--max_new_tokens", "4", "--batch_size", batch_size]
    assert main(["generate", "--target", str(target_folder), *flags]) == 2
    shown = capsys.readouterr()
    assert "1 of 3 texts failed, text 2 first: " in shown.err
    assert "not finite" in shown.err
    assert "def a" in shown.out
    assert "class B" in shown.out


@pytest.mark.parametrize("prompt", ["", "x\n" * 300])
def test_all_prompts_are_checked_before_the_first_is_decoded(target_folder, tmp_path, capsys, prompt):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", prompt, "c")))
    assert main(["generate", "--target", str(target_folder), "--prompts", str(prompts), "--max_new_tokens", "4"]) == 2
    shown = capsys.readouterr()
    assert "prompt 3" in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


@pytest.mark.parametrize(
    ("flags", "kind", "expected"),
    [
        (["--num_speculative_tokens", "2"], Chain, {"depth": 2, "sampled": True}),
        (["--rule", "block"], Chain, {"depth": 3, "sampled": True}),
        (["--branches", "3,2", "--nodes", "5", "--rule", "match"], Tree, {"branches": (3, 2), "nodes": 5}),
        (["--branches", "2,2"], Candidates, {"nodes": 6}),
    ],
)
def test_flags_reach_the_drafter_and_do_not_change_the_text(
    target_folder, head_folder, monkeypatch, capsys, flags, kind, expected
):
    calls = []

    class Recorded(Engine):
        def __init__(self, target, drafter, **how):
            super().__init__(target, drafter, **how)
            self.given = drafter, how

        def submit(self, prompt, sampling, **settings):
            calls.append((self.given[0], sampling, {**self.given[1], **settings}))
            return super().submit(prompt, sampling, **settings)

    monkeypatch.setattr(command, "Engine", Recorded)
    argv = ["generate", "--target", str(target_folder), "--prompt", "def f", "--max_new_tokens", "16"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--speculator", str(head_folder), *flags]) == 0
    assert capsys.readouterr().out == plain
    settings = [
        *["--temperature", "0.9", "--top_k", "7", "--top_p", "0.8", "--min_p", "0.1", "--seed", "5", "--stop"],
        "}",
    ]
    assert main([*argv, "--speculator", str(head_folder), *flags, *settings]) == 0
    drafter, sampling, others = calls[-1]
    assert type(drafter.shape) is kind
    assert {name: getattr(drafter.shape, name) for name in expected} == expected
    assert sampling == Sampling(temperature=0.9, top_k=7, top_p=0.8, min_p=0.1, seed=5)
    assert others["stop_strings"] == ["}"]
    assert others["rule"] == (flags[flags.index("--rule") + 1] if "--rule" in flags else None)


def test_stop_strings_end_the_text(target_folder, capsys):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    argv = ["generate", "--target", str(target_folder), "--prompt", "def f", "--max_new_tokens", "20"]
    text = decode(tokenizer, greedy(target_folder, tokenizer("def f")["input_ids"], 20))
    stop = re.search(r"[!-~]", text[3:])[0]
    assert main([*argv, "--stop", "never said", "--stop", stop]) == 0
    shown = capsys.readouterr().out
    assert shown == "def f" + text[: len(shown) - 6] + "\n"
    assert len(shown) < len(text)
    assert stop in shown


def llama_like_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like sentencepiece's: a space is part of its word, unknown characters are byte tokens."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁▁", "é", "<eos>"]
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def test_characters_of_several_tokens_are_streamed_whole():
    text = "naïve 日本語🙂🙂 Ελλάδα e\u0301 \u200d end"
    tokenizer = tiny_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert "\ufffd" in "".join(
        decode(tokenizer, [token]) for token in tokens
    )  # decoded token by token, characters break
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) == text == decode(tokenizer, tokens)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(text) // 2  # a stream, not one text at the end
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), llama_like_tokenizer()], ids=["byte-level", "byte-fallback"])
def test_pieces_add_up_to_the_whole_text_for_any_tokens(tokenizer):
    """Most of these texts are not valid UTF-8; the stream must still equal the text decoded at once."""
    draw = random.Random(0)
    late = [tokenizer.eos_token_id, *range(len(tokenizer) - 8, len(tokenizer))]
    for _ in range(300):
        tokens = draw.choices([*range(len(tokenizer)), *late * 20], k=12)
        detokenizer, shown, whole = Detokenizer(tokenizer), "", decode(tokenizer, tokens)
        for token in tokens:
            shown += detokenizer.push(token)
            assert whole.startswith(shown)
        assert shown + detokenizer.finish() == whole


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), llama_like_tokenizer()], ids=["byte-level", "byte-fallback"])
def test_a_continuation_is_the_rest_of_the_whole_text(tokenizer):
    draw = random.Random(1)
    for _ in range(100):
        ids = tokenizer("".join(draw.choices("ab é", k=60)), add_special_tokens=False)["input_ids"]
        prompt, new = ids[:30], ids[30:]
        whole, known = decode(tokenizer, ids), decode(tokenizer, prompt)
        if whole.startswith(known):  # else the prompt ends inside a character
            assert known + decode(tokenizer, new, prompt) == whole
        detokenizer = Detokenizer(tokenizer, prompt)
        assert "".join(map(detokenizer.push, new)) + detokenizer.finish() == decode(tokenizer, new, prompt)


def test_a_prompt_that_ends_in_byte_tokens_breaks_no_character_after_it():
    tokenizer = llama_like_tokenizer()
    for count in range(1, 12):
        prompt, new = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("日" * count, "本語"))
        assert len(prompt) == 3 * count
        assert decode(tokenizer, new, prompt) == "本語"
        assert AnswerText(tokenizer, [], prompt).push(new, "length") == "本語"


def test_a_stop_string_is_found_in_a_run_of_byte_tokens():
    tokenizer = llama_like_tokenizer()
    for count in range(12):
        new = tokenizer("日" * count + "本", add_special_tokens=False)["input_ids"]
        stop = StopStrings(["本"], tokenizer)
        ends = [stop.end(new[:end], 0, 1) for end in range(1, len(new) + 1)]
        assert ends == [None] * (len(new) - 1) + [len(new)]
        for length in range(1, len(new)):  # a step of several tokens, and one after it
            assert StopStrings(["本"], tokenizer).end([*new, *new], 0, len(new) + length) == len(new)


def test_the_space_before_the_first_new_word_is_kept():
    tokenizer = llama_like_tokenizer()
    a, word = tokenizer.convert_tokens_to_ids(["a", "▁a"])
    assert [decode(tokenizer, [word]), decode(tokenizer, [word], [a])] == ["a", " a"]
    assert AnswerText(tokenizer, [], [a]).push([word, word], "length") == " a a"
    assert AnswerText(tokenizer, []).push([word, word], "length") == "a a"
    stop = StopStrings([" a"], tokenizer)
    assert [stop.end([a, word], 1, 1), stop.end([word], 0, 1)] == [2, None]  # two requests share it
    assert StopStrings([" a"], tokenizer).end([a, word], 1, 1, min_tokens=1) is None


def test_a_stream_without_an_end_to_wait_for_is_shown_in_parts(monkeypatch):
    """Characters that stay broken, and runs of byte tokens: work and delay don't grow with the text."""
    read: list[int] = []
    real = streaming.decoded
    monkeypatch.setattr(
        streaming, "decoded", lambda one, tokens, special: read.append(len(tokens)) or real(one, tokens, special)
    )
    for tokenizer, text in ((tiny_tokenizer(), "\ufffd"), (tiny_tokenizer(), None), (llama_like_tokenizer(), "日")):
        cycle = [tokenizer(b"\xff".decode("latin-1"))["input_ids"][0]] if text is None else tokenizer(text)["input_ids"]
        tokens = cycle * 300
        detokenizer, pieces = Detokenizer(tokenizer), []
        read.clear()
        for token in tokens:
            pieces.append(detokenizer.push(token))
        assert max(read) <= 2 * 20
        assert len("".join(pieces[:32])) >= 5
        shown = "".join(pieces) + detokenizer.finish()
        if text:
            assert shown == text * 300


class Terminal(io.StringIO):
    """Stdout that is a terminal and records its writes."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


def test_text_appears_as_it_comes(target_folder, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "import"}\n{"prompt": "class A"}\n')
    argv = ["generate", "--target", str(target_folder), "--ngram", "--max_new_tokens", "24"]
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    for source, prompts in (
        (["--prompt", "import"], ["import"]),
        (["--prompts", str(tmp_path / "in.jsonl")], ["import", "class A"]),
    ):
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        assert main([*argv, *source]) == 0
        expected = [decode(tokenizer, greedy(target_folder, tokenizer(p)["input_ids"], 24)) for p in prompts]
        assert terminal.getvalue() == "".join(f"{p}{text}\n" for p, text in zip(prompts, expected, strict=True))
        assert sum(map(bool, terminal.writes)) > 5 * len(prompts)
        assert "\x1b" not in terminal.getvalue()


def test_on_a_terminal_nothing_steers_it_and_a_pipe_has_the_text_as_it_is(target_folder, tmp_path, monkeypatch):
    prompt = "\x1b]0;title\x07x\x9b2J"
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    argv = ["generate", "--target", str(target_folder), "--max_new_tokens", "4"]
    for source in (["--prompt", prompt], ["--prompts", str(tmp_path / "in.jsonl"), "--batch_size", "2"]):
        shown = []
        for is_terminal in (True, False):
            monkeypatch.setattr(sys, "stdout", terminal := Terminal())
            monkeypatch.setattr(terminal, "isatty", lambda is_terminal=is_terminal: is_terminal)
            assert main([*argv, *source]) == 0
            shown.append(terminal.getvalue())
        assert shown[1].startswith(prompt)
        assert shown[0] == printable(shown[1])
        assert shown[0].startswith("\\x1b]0;title\\x07x\\x9b2J")


def test_show_drafts_colours_accepted_draft_tokens(target_folder, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = TextStream(tokenizer, lead="> ", show_drafts=True)
    tokens = tokenizer("abé")["input_ids"]
    assert len(tokens) == 4
    stream(0, tokens[:2], 1)
    stream(0, tokens[2:], 2)
    stream.finish()
    assert terminal.getvalue() == "> \x1b[32ma\x1b[0mb\x1b[32mé\x1b[0m\n"
    monkeypatch.undo()

    argv = ["generate", "--target", str(target_folder), "--draft_model", str(target_folder), "--prompt", "import"]
    assert main([*argv, "--show_drafts"]) == 0
    coloured = capsys.readouterr()
    assert main(argv) == 0
    plain = capsys.readouterr()
    assert "[[" in coloured.out, "a pipe has no colours"
    assert coloured.out.replace("[[", "").replace("]]", "") == plain.out
    assert "\x1b" not in coloured.out + coloured.err + plain.out + plain.err


def test_chat_with_a_prompt_is_one_user_message(chat_folder, tmp_path, capsys):
    flags = ["generate", "--target", str(chat_folder), "--max_new_tokens", "8"]
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    expected = greedy(chat_folder, tokenizer("<user>hello\n<assistant>")["input_ids"], 8)
    output, rows = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    assert main([*flags, "--chat", "--prompt", "hello", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["tokens"] == expected
    assert json.loads(output.read_text())["prompt"] == "hello"
    assert main([*flags, "--chat", "--prompt", "hello"]) == 0
    assert capsys.readouterr().out == decode(tokenizer, expected) + "\n"
    rows.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    assert main([*flags, "--prompts", str(rows), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["tokens"] == expected


@pytest.mark.parametrize("how", [["--prompts"], ["--prompts", "--batch_size", "2"], ["--chat"]])
def test_a_text_that_memory_has_no_room_for_is_an_error(chat_folder, tmp_path, monkeypatch, capsys, how):
    def no_room(self, waiting):
        for request in [*waiting, *(slot.request for slot in self.scheduler.slots if slot.request)]:
            request.fail("memory", "too little memory for a prompt of 1 token")
        self.scheduler.release()

    monkeypatch.setattr(Rows, "grow", no_room)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    flags = [part for flag in how for part in (flag, *([str(tmp_path / "in.jsonl")] if flag == "--prompts" else []))]
    assert main(["generate", "--target", str(chat_folder), *flags]) == 2
    assert "too little memory for a prompt of" in capsys.readouterr().err


def test_a_conversation_that_fills_the_context_ends_with_its_summary(chat_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n" * 40))
    assert main(["generate", "--target", str(chat_folder), "--chat", "--max_new_tokens", "16"]) == 0
    shown = capsys.readouterr().err
    assert f"(the conversation has filled the context of {chat_folder})\n" in shown
    assert "tokens/s" in shown


@pytest.mark.parametrize("drafting", [["--ngram"], ["--speculator"]])
def test_a_conversation_keeps_its_turns_and_prefills_only_new_tokens(
    chat_folder, head_folder, monkeypatch, capsys, drafting
):
    engines = []

    class Recorded(Engine):
        def __init__(self, *given, **how):
            super().__init__(*given, **how)
            engines.append(self)

    monkeypatch.setattr(command, "Engine", Recorded)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then?\nlast"))
    folders = {"--speculator": [str(head_folder)]}
    drafting = [part for flag in drafting for part in (flag, *folders.get(flag, []))]
    assert main(["generate", "--target", str(chat_folder), "--chat", "--max_new_tokens", "8", *drafting]) == 0
    shown = capsys.readouterr()
    tokenizer, text, answers, read = AutoTokenizer.from_pretrained(chat_folder), "", [], 0
    for line in ("hello", "and then?", "last"):
        text += f"<user>{line}\n<assistant>"
        ids = tokenizer(text)["input_ids"]
        read += len(ids)
        answers.append(decode(tokenizer, greedy(chat_folder, ids, 8)))
        text += answers[-1] + "\n"
    assert shown.out == "".join(f"{answer}\n" for answer in answers)
    assert shown.err.count("> ") == 5  # an empty line, and the end
    assert shown.err.count("(the answer ended at --max_new_tokens 8)\n") == 3
    assert "tokens/s" in shown.err
    assert len(engines) == 1
    assert 0 < engines[0].num_prefilled_tokens < read
