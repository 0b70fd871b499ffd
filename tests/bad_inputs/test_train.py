"""`train.py`: every field of the config, config files, sources, targets and folders that can't be."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from bad_inputs.refusal import NO_FILES, NO_OBJECT, NO_TEXT, Case, files, table

from train.config import RunConfig

RUN = ["train", "--target.name_or_path", "TARGET", "--data.sources", "[TEXT]", "--output_dir", "run"]
for section in ("eval", "stage2.generate"):
    RUN += [f"--{section}.prompt_tokens", "16", f"--{section}.max_new_tokens", "16"]
RUN += ["--data.seq_length", "64", "--report_to", "none", "--speculator.initialise", "random"]


def fields(kind: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every field that is no section, by the name that a user types, with its type."""
    found = {}
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, own = f"{prefix}{field.name}", types[field.name]
        found |= fields(own, f"{name}.") if dataclasses.is_dataclass(own) else {name: own}
    return found


# A value of each kind that no field of that type takes.
_NEVER = {
    int: ("1.5", "nan", "-1"),
    float: ("x", "nan", "inf", "-1"),
    bool: ("7", "maybe"),
    str: (),
    list[str]: ("7", "{a: 1}", "[]", "[1, 2]"),
    list[float]: ("x", "[x]", "{a: 1}", "[]", "[nan]", "[inf]", "[-1]", "[1, 1]", "[1.0e+39]"),
}
_PATHS = ("target.name_or_path", "output_dir", "target.revision", "speculator.warm_start")


def wrong_values() -> list[Case]:
    cases = []
    for name, kind in fields().items():
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if typing.get_origin(kind) is typing.Literal:
            values: tuple[str, ...] = ("nonsense", "7", "[]")
        elif kind in _NEVER:
            values = _NEVER[kind]
        else:
            values = _NEVER.get(options[0], ()) if options else ()
        if name in (
            "stage2.generate.temperatures",
            "data.self_source.temperatures",
        ):  # taken in turn, so one may come twice
            values = tuple(value for value in values if value != "[1, 1]")
        mentions = name.split(".")[-1].removesuffix("s")
        cases += [Case(f"{name} {value}", [*RUN, f"--{name}={value}"], mentions) for value in values]
    return cases


HUGE = {
    "speculator.n_predict": "100000000",
    "speculator.inner_dim": "1000000000",
    "speculator.draft_vocab_size": "1000000000",
    "data.seq_length": "1000000000000",
    "data.max_package_bytes": "-5",
    "data.num_proc": "100000",
    "stage1.per_device_train_batch_size": "1000000000000",
    "stage1.gradient_accumulation_steps": "1000000000000",
    "stage2.generate.prompt_tokens": "1000000000000",
    "stage2.generate.max_new_tokens": "1000000000000",
    "stage2.generate.num_speculative_tokens": "1000000000000",
    "eval.prompt_tokens": "1000000000000",
    "eval.max_new_tokens": "1000000000000",
    "seed": "1000000000000",
    "stage1.adam_beta2": "1.5",
    "stage1.learning_rate": "0",
    "stage1.logging_steps": "0",
    "stage1.eval_steps": "0",
    "stage1.save_steps": "0",
    "stage1.save_total_limit": "1",
    "stage1.max_steps": "0",
    "stage2.generate.top_p": "2",
    "stage2.generate.min_p": "1",
    "loss.kl_temperature": "0",
    "loss.head_decay": "0",
    "data.max_tokens": "1",
    "speculator.n_predict ": "0",
}
ABSURD = [
    Case(f"{name}={value}", [*RUN, f"--{name.strip()}={value}"], f"{name.strip().split('.')[-1]}|{value}|fill one row")
    for name, value in HUGE.items()
]

MISTYPED = [
    Case(f"key {key}", [*RUN, f"--{key}", "1"], mentions)
    for key, mentions in {
        "stage1.max_step": "stage1.max_step",
        "stage1.learning-rate": "learning",
        "stage3.max_steps": "stage3",
        "max_steps": "max_steps",
        "speculator.n_predicts": "n_predict",
        "data.source": "data.source",
        "stage2.generate.temperature": "temperature",
        "output_dirs": "output_dir",
        "nonsense": "nonsense",
        "stage1": "stage1",
        "loss.": "loss",
        "target.name": "target.name",
    }.items()
] + [
    Case("a word without a flag", [*RUN, "word"], "word"),
    Case("a flag without its value", [*RUN, "--stage1.max_steps"], "max_steps"),
    Case("two wrong keys", [*RUN, "--stage1.max_stepz", "1", "--evil.x", "2"], "max_step"),
]

CONFIG = ["train", "--config", "run.yaml", *RUN[1:]]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
YAML: dict[str, Any] = {
    "a list": "- 1\n- 2\n",
    "a word": "hello",
    "a number": "7",
    "UTF-16": "stage1:\n  max_steps: 5\n".encode("utf-16"),
    "Latin-1": "output_dir: r\xe9sum\xe9\n".encode("latin-1"),
    "binary": bytes(range(256)) * 64,
    "stage1 null": "stage1: null\n",
    "stage2.generate null": "stage2:\n  generate: null\n",
    "stage1 a word": "stage1: quick\n",
    "stage1 a list": "stage1: [1, 2]\n",
    "stage1 a number": "stage1: 3\n",
    "a bomb": BOMB,
    "deep nesting": "[" * 5_000,
    "deep mappings": "{a: " * 5_000,
    "an endless alias": "eval:\n  temperatures: &x [*x]\n",
    "a key twice": "seed: 1\nseed: 2\n",
    "a key twice in a section": "stage1:\n  max_steps: 1\n  max_steps: 2\n",
    "a python object": "output_dir: !!python/object/apply:os.system ['touch hacked']\n",
    "a tag": "seed: !nonsense 3\n",
    "a tab": "stage1:\n\tmax_steps: 5\n",
    "unbalanced": "stage1: {max_steps: 5\n",
    "a key that is a number": "1: 2\n",
    "a key that is a list": "? [1, 2]\n: 3\n",
    "a key that is null": "null: 3\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
    "an unknown section": "stage9:\n  max_steps: 1\n",
    "an unknown key": "stage1:\n  max_stepss: 1\n",
    "a text for a number": "seed: many\n",
    "a list for a number": "seed: [1]\n",
    "a mapping for a number": "seed: {a: 1}\n",
    "a NaN": "loss:\n  kl: .nan\n",
    "an infinity": "stage1:\n  learning_rate: .inf\n",
    "a date": "seed: 2024-01-01\n",
    "a NUL": 'speculator:\n  warm_start: "a\\0b"\n',
    "a control character": b"seed: 1\x07\n",
    "a long number": "seed: " + "9" * 10_000 + "\n",
}
CONFIGS = files("config", CONFIG, "run.yaml", NO_FILES) + [
    Case(f"config: {name}", CONFIG, mentions, {"run.yaml": text})
    for (name, text), mentions in zip(
        YAML.items(),
        ["run.yaml|config"] * 6
        + ["stage1", "generate", "stage1", "stage1", "stage1"]
        + ["run.yaml|config"] * 3
        + ["temperatures|config", "seed", "max_steps"]
        + ["run.yaml|config"] * 4
        + ["run.yaml|1", "run.yaml|1", "run.yaml|null|none", "run.yaml|config", "stage9", "max_steps"]
        + ["seed", "seed", "seed", "kl", "learning_rate", "seed", "", "run.yaml|config", "seed|run.yaml|config"],
        strict=True,
    )
]
CONFIGS += [
    Case("config: an empty name", ["train", "--config", ""], "config"),
    Case("config: a NUL in its name", ["train", "--config", "a\0b"], ""),
    Case("config: a long name", ["train", "--config", "a" * 5_000], ""),
]


def replaced(flag: str, *values: str) -> list[str]:
    return [*RUN, *(word for value in values for word in (flag, value))]


PLACES = [
    Case("target: empty", replaced("--target.name_or_path", ""), "''|target"),
    Case("target: not there", replaced("--target.name_or_path", "nowhere/at/all"), "nowhere/at/all"),
    Case("target: a folder of others", replaced("--target.name_or_path", "."), "config.json"),
    Case("target: a file", replaced("--target.name_or_path", "TEXT"), "text.jsonl"),
    Case("target: a NUL", replaced("--target.name_or_path", "a\0b"), "target"),
    Case("target: a long name", replaced("--target.name_or_path", "a" * 5_000), ""),
    Case("target: control characters", replaced("--target.name_or_path", "./a\x1b[31mb"), "config.json"),
    Case("target: a head", replaced("--target.name_or_path", "MLP"), "mlp"),
    Case("warm start: not there", replaced("--speculator.warm_start", "nowhere"), "nowhere"),
    Case("warm start: a target", replaced("--speculator.warm_start", "TARGET"), "architectures"),
    Case("warm start: another architecture", replaced("--speculator.warm_start", "LSTM"), "lstm"),
    Case("warm start: another shape", replaced("--speculator.warm_start", "MLP"), "n_predict"),
    Case(
        "warm start and initialise", [*RUN, "--speculator.warm_start=MLP", "--speculator.initialise=target"], "choose"
    ),
    Case("output: empty", replaced("--output_dir", ""), "output"),
    Case("output: a NUL", replaced("--output_dir", "a\0b"), ""),
    Case("output: a file", replaced("--output_dir", "taken"), "taken", {"taken": "mine"}),
    Case("output: in a file", replaced("--output_dir", "taken/run"), "taken", {"taken": "mine"}),
    Case("output: a pipe", replaced("--output_dir", "pipe"), "pipe"),
    Case("output: somebody else's", replaced("--output_dir", "mine"), "mine", {"mine/thesis.txt": "ten years"}),
    Case(
        "output: overwrite somebody else's",
        [*replaced("--output_dir", "mine"), "--overwrite_output_dir"],
        "mine",
        {"mine/thesis.txt": "ten years"},
    ),
    *(
        Case(f"output: its config.yaml is {kind}", RUN, "config.yaml|run", {"run/config.yaml": content})
        for kind, content in {
            **{k: v for k, v in NO_FILES.items() if k != "missing"},
            **NO_TEXT,
            "a list": "[1]",
            "no YAML": "a: [",
        }.items()
    ),
    *(
        Case(f"sources: {name}", [*RUN, f"--data.sources={value}"], mentions)
        for name, value, mentions in [
            ("not there", "[nowhere.jsonl]", "nowhere.jsonl"),
            ("not on the hub", "[org/name]", "org/name"),
            ("an empty name", "['']", "source"),
            ("a weight of 0", "[a.jsonl@0]", "weight"),
            ("a weight of some", "[a.jsonl@1, b.jsonl]", "weight"),
            ("a NUL", '["a\\0b.jsonl"]', ""),
            ("a long name", f"[{'a' * 5_000}]", ""),
        ]
    ),
    Case(
        "conflict: untied LSTM",
        [*RUN, "--speculator.architecture=lstm", "--speculator.options={tie_weights: false}"],
        "lstm",
    ),
    Case("conflict: one head tied", [*RUN, "--speculator.n_predict=1"], "tie_weights"),
    Case("conflict: no loss", [*RUN, "--loss.kl=0"], "loss"),
    Case("conflict: save_steps", [*RUN, "--stage1.save_steps=7"], "save_steps"),
    Case("conflict: initialise", [*RUN, "--speculator.initialise=target", "--speculator.inner_dim=8"], "inner_dim"),
]
SOURCES = files("source", [*RUN, "--data.sources=[bad.jsonl]"], "bad.jsonl", {**NO_FILES, **NO_TEXT, **NO_OBJECT})


@table([*wrong_values(), *ABSURD, *MISTYPED])
def test_a_wrong_setting_is_named(case, refused):
    refused(case)


@table(CONFIGS)
def test_a_wrong_config_file_is_named(case, refused):
    refused(case)


@table([*PLACES, *SOURCES])
def test_a_wrong_place_is_named(case, refused):
    refused(case)


def test_the_run_that_the_cases_vary_is_a_good_one(refused):
    with pytest.raises(pytest.fail.Exception, match="TakenError"):
        refused(Case("good", RUN, ""))
