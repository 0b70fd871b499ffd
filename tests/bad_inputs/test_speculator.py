"""`python -m speculator`: flags, prompts, damaged targets and damaged heads."""

from __future__ import annotations

import pytest
from bad_inputs.cases import NOT_TEXT, Case, bad_files, flags, table
from bad_inputs.damages import HEADS, KEYWORDS, TARGETS, TEMPLATES, TUNED, damaged_copy

GENERATE = "speculator generate --target TARGET --max_new_tokens 4"
PROMPT = f"{GENERATE} --prompt 'import os'"
HEAD = f"{PROMPT} --speculator MLP"
FLAGS = [
    *flags(
        GENERATE,
        {
            "": "--prompt",
            "--prompt ''": "empty",
            f"--prompt '{'x y ' * 500}'": "context",
            "--prompt x --prompts PROMPTS": "not allowed",
            "--chat --output out.jsonl": "--output",
            "--chat --prompt x --target NO_TEMPLATE": "chat template",
        },
    ),
    *flags(
        PROMPT,
        {
            "--target nowhere/at/all": "nowhere/at/all",
            "--target MLP": "mlp",
            "--temperature -1": "temperature",
            "--top_p 1.1": "top_p",
            "--max_new_tokens 0": "max_new_tokens",
            "--dtype int8": "dtype",
            "--output no/out.jsonl": "no",
            "--num_speculative_tokens 2": "num_speculative_tokens",
            "--ngram --num_speculative_tokens 0": "draft",
            "--draft_model nowhere": "nowhere",
            "--speculator nowhere": "nowhere",
            "--nonsense": "nonsense",
        },
    ),
    *flags(
        HEAD,
        {
            "--num_speculative_tokens 4": "4",
            "--branches x": "branches",
            "--branches 3,2 --nodes 99": "nodes",
            "--min_confidence 0.5": "min_confidence is gone",
            "--rule multi_candidate": "multi_candidate",
        },
    ),
    *bad_files(f"{GENERATE} --prompts bad.jsonl", "bad.jsonl", NOT_TEXT),
    Case(f"{GENERATE} --prompts bad.jsonl", "bad.jsonl", {"bad.jsonl": '{"prompt": "x"}\n{"prompt": 7}'}),
    Case("speculator inspect nowhere", "nowhere"),
    Case("speculator inspect TARGET", "architectures"),
    Case("speculator export --speculator MLP --format dspark --output out", "dspark"),
    Case("speculator export --speculator MLP --format native --output TEXT", "text.jsonl"),
    Case("speculator push --speculator nowhere --repo_id a/b", "nowhere"),
]


@table(FLAGS)
def test_a_wrong_flag_or_prompt_fails_in_one_line(case, fails_in_one_line):
    fails_in_one_line(case)


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_target_fails_in_one_line(name, fails_in_one_line, inputs, workdir):
    damaged_copy(inputs["TARGET"], TARGETS[name], workdir)
    fails_in_one_line(Case(f"{PROMPT} --target ./damaged", f"damaged {KEYWORDS.get(name, '')}"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bad_template_fails_in_one_line(name, fails_in_one_line, inputs, workdir):
    damaged_copy(inputs["TARGET"], TEMPLATES[name], workdir)
    fails_in_one_line(Case(f"{PROMPT} --chat --target ./damaged", "template"))


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_fails_in_one_line(name, fails_in_one_line, inputs, workdir):
    damaged_copy(inputs["MLP"], HEADS[name], workdir)
    fails_in_one_line(Case(f"{PROMPT} --speculator ./damaged", f"damaged {KEYWORDS.get(name, '')}"))


@pytest.mark.parametrize("name", TUNED)
def test_a_bad_decoding_json_fails_in_one_line(name, fails_in_one_line, inputs, workdir):
    damaged_copy(inputs["MLP"], TUNED[name], workdir)
    fails_in_one_line(Case(f"{PROMPT} --speculator ./damaged"))
