"""`python -m eval`, `eval lossless | tune | compare`: suites, reports, flags."""

from __future__ import annotations

import json
from typing import Any

from bad_inputs.refusal import NO_FILES, NO_OBJECT, NO_TEXT, Case, files, table

from eval.__main__ import main

WITH = ["--target", "TARGET", "--speculator", "MLP", "--max_new_tokens", "8", "--prompt_tokens", "8"]
EVAL = ["eval", *WITH, "--output", "out"]
LOSSLESS = ["eval", "lossless", *WITH]
TUNE = ["eval", "tune", *WITH]
SUITE = [*EVAL, "--suite", "bad.jsonl"]
COMPARE = ["eval", "compare", "bad.json", "good.json"]

_COMMON = [
    (["--target", ""], "''|target"),
    (["--target", "nowhere"], "nowhere"),
    (["--target", "MLP"], "mlp"),
    (["--speculator", "nowhere"], "nowhere"),
    (["--speculator", "TARGET"], "architectures"),
    (["--suite", ""], "suite"),
    (["--suite", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--suite", "a\0b"], ""),
    (["--suite", "org/name:split"], "org/name"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--temperature", "inf"], "temperature"),
    (["--temperature", "1e39"], "temperature"),
    (["--max_prompts", "0"], "max_prompts"),
    (["--max_prompts", "-1"], "max_prompts"),
    (["--prompt_tokens", "0"], "prompt_tokens"),
    (["--prompt_tokens", "1000000"], "1000000|context"),
    (["--max_new_tokens", "0"], "max_new_tokens"),
    (["--max_new_tokens", "1000000"], "max_new_tokens|context"),
    (["--max_new_tokens", "many"], "max_new_tokens"),
    (["--dtype", "int8"], "dtype"),
    (["--seed", str(2**70)], "seed"),
    (["--nonsense"], "nonsense"),
]
FLAGS = [
    Case(f"{name}: {' '.join(words)}", [*argv, "--suite", "TEXT", *words], mentions)
    for name, argv in {"eval": EVAL, "lossless": LOSSLESS, "tune": TUNE}.items()
    for words, mentions in _COMMON
] + [
    Case(f"{' '.join(argv[:2])}: {' '.join(words)}", [*argv, "--suite", "TEXT", *words], mentions)
    for argv, words, mentions in [
        (EVAL, ["--batch_size", "0"], "batch_size"),
        (EVAL, ["--num_speculative_tokens", "0"], "draft"),
        (EVAL, ["--num_speculative_tokens", "99"], "99"),
        (EVAL, ["--repeats", "0"], "repeats"),
        (EVAL, ["--baseline", "nonsense"], "nonsense"),
        (EVAL, ["--draft_model", "nowhere"], "nowhere"),
        (EVAL, ["--report_to", "nobody"], "nobody"),
        (EVAL, ["--suite", "TEXT"], "text.jsonl"),
        (EVAL, ["--temperature", "1", "--temperature", "1"], "temperature"),
        (EVAL, ["--output", "TEXT"], "text.jsonl"),
        (EVAL, ["--output", "pipe"], "pipe"),
        (EVAL, ["--output", "a\0b"], ""),
        (EVAL, ["--output", "/proc/nowhere"], "/proc"),
        (LOSSLESS, ["--rule", "match"], "match"),
        (LOSSLESS, ["--draft_model", "x"], "not allowed"),
        (LOSSLESS, ["--samples", "0"], "samples"),
        (LOSSLESS, ["--sampled_prompts", "-1"], "sampled_prompts"),
        (LOSSLESS, ["--output", "no/such.json"], "no"),
        (LOSSLESS, ["--branches", "4096,4096,4096"], "4096|branches|68,736,258,048"),
        (TUNE, ["--batch_size", "0"], "batch_size"),
        (TUNE, ["--output", "no/such.json"], "no"),
        (TUNE, ["--output", "."], "folder"),
        (TUNE, ["--max_new_tokens", "2"], "max_new_tokens"),
    ]
]

_MESSAGE = {"role": "user", "content": "x"}
ROWS: dict[str, Any] = {
    "a list": [1],
    "a number": 7,
    "no keys": {},
    "foreign keys": {"body": "x"},
    "prompt a number": {"prompt": 7},
    "prompt empty": {"prompt": ""},
    "prompt too long": {"prompt": "x y " * 500},
    "prompt half a surrogate pair": {"prompt": "\ud800"},
    "question a list": {"question": ["x"]},
    "turns a text": {"turns": "x"},
    "turns empty": {"turns": []},
    "turns of numbers": {"turns": [1, 2]},
    "turns of empty texts": {"turns": [""]},
    "messages a text": {"messages": "x"},
    "messages empty": {"messages": []},
    "messages of texts": {"messages": ["x"]},
    "role missing": {"messages": [{"content": "x"}]},
    "role a number": {"messages": [{"role": 7, "content": "x"}]},
    "content a number": {"messages": [{"role": "user", "content": 7}]},
    "content missing": {"messages": [{"role": "user"}]},
    "text a number": {"text": 7},
    "text too short": {"text": "x"},
    "category a list": {"prompt": "x", "category": ["a"]},
}
SUITES = [
    *files("suite", SUITE, "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT}),
    *(Case(f"suite: {name}", SUITE, "bad.jsonl", {"bad.jsonl": json.dumps(row) + "\n"}) for name, row in ROWS.items()),
    *files(
        "suite",
        [*EVAL, "--suite", "bad.txt"],
        "bad.txt",
        {**NO_FILES, **{kind: NO_TEXT[kind] for kind in ("empty", "binary", "UTF-16")}},
    ),
]

_ROW = {
    "name": "s",
    "temperature": 0.0,
    "drafter": "head",
    "acceptance_length": 2.0,
    "acceptance_by_position": [0.5],
    "speedup": {"plain": {"value": 1.0, "low": 0.9, "high": 1.1}},
}
_REPORT = {"schema": 1, "target": "t", "speculator": "s", "hardware": "h", "settings": {}, "suites": [_ROW]}


def report(**changes: Any) -> str:
    return json.dumps({key: value for key, value in {**_REPORT, **changes}.items() if value is not ...})


def suite(**changes: Any) -> str:
    return report(suites=[{key: value for key, value in {**_ROW, **changes}.items() if value is not ...}])


REPORTS = {
    **NO_FILES,
    **NO_TEXT,
    **NO_OBJECT,
    "no keys": "{}",
    "suites a number": report(suites=7),
    "suites a text": report(suites="x"),
    "suites of numbers": report(suites=[7]),
    "suites of texts": report(suites=["x"]),
    "suites null": report(suites=None),
    "no target": report(target=...),
    "no hardware": report(hardware=...),
    "no settings": report(settings=...),
    "settings a list": report(settings=[1]),
    "settings a text": report(settings="x"),
    "settings null": report(settings=None),
    "no drafter": suite(drafter=...),
    "no acceptance_length": suite(acceptance_length=...),
    "acceptance_length a text": suite(acceptance_length="x"),
    "acceptance_length null": suite(acceptance_length=None),
    "no acceptance": suite(acceptance_by_position=...),
    "acceptance a number": suite(acceptance_by_position=7),
    "temperature a text": suite(temperature="x"),
    "temperature a list": suite(temperature=[0]),
    "name a list": suite(name=["s"]),
    "name an object": suite(name={"a": 1}),
    "batch_size a text": suite(batch_size="x"),
    "speedup a list": suite(speedup=[1]),
    "speedup null": suite(speedup=None),
    "speedup of texts": suite(speedup={"plain": "x"}),
    "speedup of numbers": suite(speedup={"plain": 1.5}),
    "speedup without a value": suite(speedup={"plain": {"low": 1, "high": 2}}),
    "speedup of text values": suite(speedup={"plain": {"value": "x", "low": "a", "high": "b"}}),
    "an interval of texts": suite(acceptance_length_interval={"low": "x", "high": "y"}),
    "an interval a list": suite(acceptance_length_interval=[1, 2]),
}
COMPARES = [
    *(
        Case(f"compare: {name}", COMPARE, "bad.json", {"bad.json": content, "good.json": suite()})
        for name, content in REPORTS.items()
    ),
    Case("compare: nothing", ["eval", "compare"], "required"),
    Case("compare: one", ["eval", "compare", "REPORT"], "required"),
    Case("compare: the second", ["eval", "compare", "REPORT", "bad.json"], "bad.json", {"bad.json": "[]"}),
    Case("compare: a NUL", ["eval", "compare", "REPORT", "a\0b"], ""),
    Case("compare: nothing in common", COMPARE, "in common", {"bad.json": suite(name="another"), "good.json": suite()}),
    Case("compare: a target", ["eval", "compare", "REPORT", "TARGET"], "target"),
]


@table(FLAGS)
def test_a_wrong_flag_is_named(case, refused):
    refused(case)


@table(SUITES)
def test_a_wrong_suite_is_named(case, refused):
    refused(case)


@table(COMPARES)
def test_a_wrong_report_is_named(case, refused):
    refused(case)


def test_the_report_that_the_cases_vary_is_a_good_one(here):
    for name in ("a.json", "b.json"):
        (here / name).write_text(suite())
    assert main(["compare", "a.json", "b.json"]) == 0
