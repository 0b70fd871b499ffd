"""`python -m speculator generate | export | inspect | push`: damaged targets, heads and prompts, and flags."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bad_inputs.damages import HEADS, TARGETS, TEMPLATES, TUNED, Damage
from bad_inputs.refusal import NO_FILES, NO_OBJECT, NO_TEXT, Case, files, table

GENERATE = ["speculator", "generate", "--target", "TARGET", "--max_new_tokens", "4"]
TEXT = [*GENERATE, "--prompt", "import os"]
HEAD = [*TEXT, "--speculator", "MLP"]
PROMPTS = [*GENERATE, "--prompts", "bad.jsonl"]
EXPORT = ["speculator", "export", "--speculator", "MLP", "--output", "out", "--format", "native"]
PUSH = ["speculator", "push", "--speculator", "MLP", "--repo_id", "org/name"]


def flags(prefix: str, argv: list[str], *wrong: tuple[list[str], str]) -> list[Case]:
    return [Case(f"{prefix}: {' '.join(words)[:80]}", [*argv, *words], mentions) for words, mentions in wrong]


GENERATES = [
    *flags(
        "generate",
        GENERATE,
        ([], "--prompt"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x y " * 500], "context"),
        (["--prompt", "\udcff"], "surrogate"),
        (["--prompt", "x", "--prompts", "PROMPTS"], "not allowed"),
        (["--chat", "--prompts", "PROMPTS"], "--chat"),
        (["--chat", "--output", "out.jsonl"], "--output"),
        (["--chat", "--prompt", "x", "--target", "PLAIN"], "chat template"),
        (["--prompts", "a\0b"], ""),
        (["--prompts", ""], "prompts"),
        (["--prompts", "CHATS", "--target", "PLAIN"], "chat template"),
        (["--nonsense"], "nonsense"),
    ),
    *flags(
        "text",
        TEXT,
        (["--target", ""], "''|target"),
        (["--target", "nowhere/at/all"], "nowhere/at/all"),
        (["--target", "./nowhere"], "nowhere"),
        (["--target", "a\0b"], ""),
        (["--target", "a\x1b[31mb"], ""),
        (["--target", "MLP"], "mlp"),
        (["--target", "TEXT"], "text.jsonl"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--temperature", "1e39"], "temperature"),
        (["--temperature", "hot"], "temperature"),
        (["--top_k", "-1"], "top_k"),
        (["--top_k", "1.5"], "top_k"),
        (["--top_p", "0"], "top_p"),
        (["--top_p", "1.1"], "top_p"),
        (["--top_p", "nan"], "top_p"),
        (["--min_p", "-0.1"], "min_p"),
        (["--min_p", "1"], "min_p"),
        (["--min_p", "nan"], "min_p"),
        (["--stop", ""], "stop"),
        (["--stop", "\udcff"], "stop"),
        (["--max_new_tokens", "0"], "max_new_tokens"),
        (["--max_new_tokens", "-5"], "max_new_tokens"),
        (["--max_new_tokens", "many"], "max_new_tokens"),
        (["--batch_size", "0"], "batch_size"),
        (["--dtype", "int8"], "dtype"),
        (["--seed", str(2**70)], "seed"),
        (["--seed", "x"], "seed"),
        (["--output", ""], "output"),
        (["--output", "no/out.jsonl"], "no"),
        (["--output", "."], "folder"),
        (["--output", "a\0b"], ""),
        (["--output", "pipe"], "pipe"),
        (["--rule", "block"], "rule"),
        (["--rule", "nonsense"], "nonsense"),
        (["--num_speculative_tokens", "2"], "num_speculative_tokens"),
        (["--ngram", "--num_speculative_tokens", "0"], "draft"),
        (["--ngram", "--num_speculative_tokens", "-1"], "draft"),
        (["--ngram", "--num_speculative_tokens", "1000000000000"], "draft"),
        (["--ngram", "--branches", "2,1"], "branches"),
        (["--ngram", "--rule", "walk2"], "walk2"),
        (["--draft_model", ""], "draft_model"),
        (["--draft_model", "nowhere"], "nowhere"),
        (["--draft_model", "MLP"], "mlp"),
        (["--draft_model", "TARGET", "--num_speculative_tokens", "0"], "draft"),
        (["--speculator", ""], "speculator"),
        (["--speculator", "nowhere"], "nowhere"),
        (["--speculator", "a\0b"], ""),
        (["--speculator", "TARGET"], "architectures"),
        (["--speculator", "TEXT"], "text.jsonl"),
        (["--show-drafts"], "show_drafts"),
    ),
    *flags(
        "head",
        HEAD,
        (["--num_speculative_tokens", "0"], "draft"),
        (["--num_speculative_tokens", "4"], "4"),
        (["--num_speculative_tokens", "1000000000000"], "draft"),
        (["--branches", ""], "branches"),
        (["--branches", "x"], "branches"),
        (["--branches", "0"], "child"),
        (["--branches", "-1"], "branches|child"),
        (["--branches", "301"], "branches"),
        (["--branches", "4096,4096,4096"], "branches|4096|68,736,258,048"),
        (["--branches", "300,300,300"], "branches|nodes|tree|27"),
        (["--branches", "2,2,2,2,2"], "5"),
        (["--branches", "3,2", "--nodes", "0"], "nodes"),
        (["--branches", "3,2", "--nodes", "99"], "nodes"),
        (["--branches", "3,2", "--paths", "0"], "path"),
        (["--branches", "3,2", "--paths", "99"], "path"),
        (["--branches", "3,2", "--nodes", "4", "--paths", "2"], "only one"),
        (["--nodes", "4"], "branches"),
        (["--replacement"], "branches"),
        (["--min_confidence", "1.5"], "min_confidence"),
        (["--min_confidence", "nan"], "min_confidence"),
        (["--rule", "match"], "match"),
        (["--draft_sampling", "nonsense"], "nonsense"),
    ),
    *files("prompts", PROMPTS, "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *(
        Case(f"prompts: {name}", PROMPTS, "bad.jsonl|prompt|message|template", {"bad.jsonl": text + "\n"})
        for name, text in {
            "no keys": "{}",
            "prompt a number": '{"prompt": 7}',
            "prompt null": '{"prompt": null}',
            "prompt empty": '{"prompt": ""}',
            "prompt half a surrogate pair": '{"prompt": "\\ud800"}',
            "messages empty": '{"messages": []}',
            "messages a text": '{"messages": "x"}',
            "messages of texts": '{"messages": ["x"]}',
            "content half a surrogate pair": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "the second row bad": '{"prompt": "x"}\n7',
        }.items()
    ),
]
OTHERS = [
    *flags(
        "speculator",
        ["speculator"],
        ([], "command"),
        (["destroy"], "destroy"),
        (["inspect"], "path"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", ""], "path is empty"),
        (["inspect", "a\0b"], ""),
        (["inspect", "TEXT"], "text.jsonl"),
        (["inspect", "TARGET"], "architectures"),
        (["export"], "required"),
        (["push"], "required"),
        (["push", "--speculator", "nowhere", "--repo_id", "a/b"], "nowhere"),
    ),
    *flags(
        "export",
        EXPORT,
        (["--format", "nonsense"], "nonsense"),
        (["--speculator", "nowhere"], "nowhere"),
        (["--speculator", "LSTM", "--format", "ibm"], "ibm"),
        (["--output", "TARGET"], "target"),
        (["--output", "TEXT"], "text.jsonl"),
        (["--output", "a\0b"], ""),
        (["--output", "pipe"], "pipe"),
        (["--output", "/proc/nowhere/out"], "/proc"),
        (["--dtype", "int8"], "int8"),
        (["--expand-tied"], "expand-tied"),
    ),
    *flags("push", PUSH, ([], "token"), (["--repo_id", "a b"], ""), (["--repo_id", ""], "")),
]


@table([*GENERATES, *OTHERS])
def test_a_wrong_flag_or_prompt_is_named(case, refused):
    refused(case)


def damaged(good: str, damage: Damage, world: dict[str, Path], here: Path) -> str:
    """A copy of a good folder with one thing spoilt; gives its name."""
    folder = shutil.copytree(world[good], here / "damaged")
    damage(folder)
    return folder.name


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_target_is_named(name, refused, world, here):
    folder = damaged("TARGET", TARGETS[name], world, here)
    refused(Case(name, [*TEXT, "--target", f"./{folder}"], "damaged"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bad_template_is_named(name, refused, world, here):
    folder = damaged("TARGET", TEMPLATES[name], world, here)
    refused(Case(name, [*TEXT, "--chat", "--target", f"./{folder}"], "template|damaged|empty"))


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_is_named(name, refused, world, here):
    folder = damaged("MLP", HEADS[name], world, here)
    refused(Case(name, ["speculator", "inspect", folder], "damaged"))


@pytest.mark.parametrize(
    "name", ["config a list", "weights: NaN", "weights: integers", "n_predict 1e8", "inner_dim 1e9"]
)
@pytest.mark.parametrize("command", ["generate", "export", "push", "eval", "tune", "data"])
def test_every_command_refuses_a_damaged_head(name, command, refused, world, here):
    folder = damaged("LSTM", HEADS[name], world, here)
    argv = {
        "generate": [*TEXT, "--speculator", folder],
        "export": [*EXPORT, "--speculator", folder],
        "push": [*PUSH, "--speculator", folder],
        "eval": ["eval", "--target", "TARGET", "--speculator", folder, "--output", "out"],
        "tune": ["eval", "tune", "--target", "TARGET", "--speculator", folder, "--suite", "TEXT"],
        "data": ["data", "generate", *TEXT[2:4], "--prompts", "PROMPTS", "--speculator", folder, "--output", "out"],
    }
    refused(Case(name, argv[command], "damaged"))


@pytest.mark.parametrize("name", TUNED)
def test_a_bad_decoding_json_is_named(name, refused, world, here):
    folder = damaged("MLP", TUNED[name], world, here)
    refused(Case(name, [*TEXT, "--speculator", folder], "decoding.json|draft"))
