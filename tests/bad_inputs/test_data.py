"""`python -m data prepare | view | generate`: sources, rows and flags."""

from __future__ import annotations

import gzip
import json

from bad_inputs.cases import Case, bad_rows, flags, table

PREPARE = "data prepare --target TARGET --seq_length 16 --output out"
GENERATE = "data generate --target TARGET --output out --max_new_tokens 4"

ROWS = [
    {"body": "x"},
    {"text": 7},
    {"prompt": "x"},
    {"messages": []},
    {"conversations": [{"from": "alien", "value": "x"}]},
    {"input_ids": [1, 10**9]},
    {"input_ids": [1, 2, 3], "loss_mask": [1]},
]
SOURCES = [
    *bad_rows(f"{PREPARE} --sources"),
    *(Case(f"{PREPARE} --sources bad.jsonl", "bad.jsonl", {"bad.jsonl": (json.dumps(row) + "\n") * 3}) for row in ROWS),
    Case(f"{PREPARE} --sources bad.jsonl.gz", "bad.jsonl.gz", {"bad.jsonl.gz": '{"text": "x"}\n'}),
    Case(f"{PREPARE} --sources bad.jsonl.gz", "bad", {"bad.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 1000)[:-20]}),
    Case(f"{PREPARE} --sources bad.parquet", "bad.parquet", {"bad.parquet": b"PAR1" + bytes(100) + b"PAR1"}),
    Case(f"{PREPARE} --sources d", "d", {"d/readme.doc": "x"}),
    *flags(
        PREPARE,
        {
            "": "required",
            "--sources nowhere.jsonl": "nowhere.jsonl",
            "--sources TEXT@0": "weight",
            "--sources CHATS --target NO_TEMPLATE": "chat template",
            "--sources TEXT --seq_length 1": "seq_length",
            "--sources TEXT --max_tokens 8": "--max_tokens",
            "--sources TEXT --max_bad_rows 1.5": "--max_bad_rows",
            "--sources TEXT@0.5 CHATS": "CHATS has no weight",
            "--sources TEXT --output no/rows": "no folder",
            "--sources TEXT --nonsense": "nonsense",
        },
    ),
]
COMMANDS = [
    Case("data destroy", "destroy"),
    Case("data view TEXT --target TARGET --rows 0", "rows"),
    Case("data view CHATS --target NO_TEMPLATE", "chat template"),
    Case(f"{GENERATE} --prompts bad.jsonl", "bad.jsonl", {"bad.jsonl": '{"prompt": 7}'}),
    *flags(
        GENERATE,
        {
            "": "required",
            "--prompts PROMPTS --sources TEXT": "not allowed",
            "--sources TEXT --turns none": "turns",
            "--prompts PROMPTS --max_new_tokens 0": "max_new_tokens",
            "--prompts PROMPTS --temperature nan": "temperature",
            "--prompts PROMPTS --speculator MLP --num_speculative_tokens 99": "99",
            "--prompts PROMPTS --server http://127.0.0.1:99999": "99999",
            "--sources TEXT --prompt_tokens 8 --num_speculative_tokens 2": "--num_speculative_tokens",
            "--sources TEXT --prompt_tokens 8 --speculator nowhere": "nowhere",
            "--sources TEXT --prompt_tokens 8 --server http://127.0.0.1:9": "no server at http://127.0.0.1:9",
            "--sources TEXT --server http://127.0.0.1:9 --dtype bfloat16": "--dtype",
            "--prompts PROMPTS --max_prompt_tokens 2": "--max_prompt_tokens",
            "--prompts PROMPTS --turns 2": "--turns",
            "--sources self --prompt_tokens 9 --max_bad_rows 0": "--prompt_tokens, --max_bad_rows",
            "--sources self x.jsonl": "--sources self",
            "--sources self --max_prompt_tokens 9 --server http://127.0.0.1:9": "no server at",
            "--sources self --max_prompt_tokens 0": "--max_prompt_tokens",
            "--sources self --target NO_TEMPLATE --turns 2 --max_prompt_tokens 9": "no chat template",
        },
    ),
    Case(f"{GENERATE} --prompts PROMPTS", "out", {"out/thesis.txt": "ten years"}),
    Case(f"{GENERATE} --prompts PROMPTS", "out", {"out": "mine"}),
]


@table(SOURCES)
def test_a_wrong_source_fails_in_one_line(case, fails_in_one_line):
    fails_in_one_line(case)


@table(COMMANDS)
def test_a_wrong_flag_or_prompt_fails_in_one_line(case, fails_in_one_line):
    fails_in_one_line(case)
