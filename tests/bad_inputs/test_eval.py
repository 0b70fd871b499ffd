"""`python -m eval` with `tune`, `lossless` and `compare`: suites, reports and flags."""

from __future__ import annotations

import json
from typing import Any

from bad_inputs.cases import NOT_TEXT, Case, bad_files, flags, table
from reports import report as made_up
from reports import report_row

from eval.__main__ import main
from speculator.report import as_json

COMMON = "--target TARGET --speculator MLP --max_new_tokens 8 --prompt_tokens 8"
EVAL = f"eval {COMMON} --output out"
WITH_SUITE = f"{EVAL} --suite TEXT"
FLAGS = [
    *flags(
        WITH_SUITE,
        {
            "--target nowhere": "nowhere",
            "--speculator nowhere": "nowhere",
            "--suite nowhere.jsonl": "nowhere.jsonl",
            "--temperature nan": "temperature",
            "--max_new_tokens many": "max_new_tokens",
            "--prompt_tokens 1000000": "1000000",
            "--batch_size 0": "batch_size",
            "--num_speculative_tokens 99": "99",
            "--output TEXT": "text.jsonl",
            "--nonsense": "nonsense",
        },
    ),
    *flags(
        f"eval lossless {COMMON} --suite TEXT", {"--rule multi_candidate": "multi_candidate", "--samples 0": "samples"}
    ),
    *flags(
        f"eval tune {COMMON} --suite TEXT",
        {
            "--batch_size 0": "batch_size",
            "--max_new_tokens 0": "--max_new_tokens",
            "--speculator nowhere": "no folder",
            "--output no/such.json": "no",
            "--output .": "not a regular file",
        },
    ),
]
ROWS = [
    {"prompt": 7},
    {"prompt": ""},
    {"prompt": "x y " * 500},
    {"messages": [{"role": "user", "content": 7}]},
]
SUITES = [
    *bad_files(f"{EVAL} --suite bad.jsonl", "bad.jsonl", NOT_TEXT),
    *(Case(f"{EVAL} --suite bad.jsonl", "bad.jsonl", {"bad.jsonl": json.dumps(row) + "\n"}) for row in ROWS),
]

ROW = as_json(report_row())


def report(row: dict[str, Any] = ROW, **changes: Any) -> str:
    return json.dumps(as_json(made_up()) | {"suites": [row]} | changes)


COMPARE = "eval compare bad.json REPORT"
COMPARES = [
    *bad_files(COMPARE, "bad.json", {**NOT_TEXT, "no keys": "{}", "suites": report(suites=7)}),
    Case("eval compare bad.json bad.json", "bad.json", {"bad.json": report({**ROW, "acceptance_length": "x"})}),
    Case("eval compare bad.json bad.json", "bad.json", {"bad.json": report({**ROW, "speedup": [1]})}),
    Case(COMPARE, "in common", {"bad.json": report({**ROW, "name": "another"})}),
    Case("eval compare REPORT", "required"),
]


@table(FLAGS, SUITES, COMPARES)
def test_a_wrong_flag_suite_or_report_fails_in_one_line(case, fails_in_one_line):
    fails_in_one_line(case)


def test_the_report_that_the_cases_vary_is_a_good_one(workdir):
    for name in ("a.json", "b.json"):
        (workdir / name).write_text(report())
    assert main(["compare", "a.json", "b.json"]) == 0
