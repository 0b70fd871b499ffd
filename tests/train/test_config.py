import random
import subprocess
import sys
from pathlib import Path
from types import NoneType

import pytest

from train.command_line import default_recipe, parse
from train.options.config import RunConfig
from train.options.loader import options

ROOT = Path(__file__).parents[2]


def refuse(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("stage1:\n  max_steps: 7\n  learning_rate: 0.5\ndata:\n  sources: [a.txt, b.jsonl]\n")
    config = parse(["--config", str(file), "--stage1.max_steps", "9"])
    assert (config.stage1.max_steps, config.stage1.learning_rate) == (9, 0.5)
    assert config.data.sources == ["a.txt", "b.jsonl"]
    assert config.speculator.n_predict == parse([]).speculator.n_predict


def test_flags_go_over_the_file_wherever_they_stand(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("seed: 1\noutput_dir: a\nstage1:\n  max_steps: 7\n")
    second.write_text("output_dir: b\n")
    config = parse(["--seed", "3", "--config", str(first), "--data.sources", "[x.txt]", f"--config={second}"])
    assert (config.seed, config.output_dir, config.stage1.max_steps) == (3, "b", 7)


def test_without_arguments_the_quickstart_runs():
    assert parse([]).output_dir == parse(["--seed", "3"]).output_dir == "runs/quickstart"


SETTINGS = {name: option for name, option in options(RunConfig).items() if not option.is_section}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_key_without_a_value_is_refused_where_it_needs_one(name, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(name.split("."))))
    if NoneType in SETTINGS[name].kinds:
        parse(["--config", str(file)])
    else:
        assert f"{name} has no value" in refuse(["--config", str(file)], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stage1.max_stepz", "20"], "did you mean stage1.max_steps?"),
        (["--stage1.max_steps", "many"], "stage1.max_steps: must be a whole number >= 0, got many"),
        (["--colour", "blue"], "unknown key colour"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_fails_in_one_line_that_names_it(argv, message, capsys):
    assert message in refuse(argv, capsys)


def test_a_mistyped_key_in_a_file_is_named_too(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("stage1:\n  max_stepz: 7\n")
    message = f"train.py: {file}: unknown key stage1.max_stepz: did you mean stage1.max_steps?\n"
    assert refuse(["--config", "configs/mlp.yaml", "--config", str(file)], capsys) == message


def test_a_mistyped_key_is_refused_before_torch_is_imported():
    """As a user types it: one line, exit 2, and none of the seconds that importing torch takes."""
    probe = "import runpy, sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    probe += "sys.argv = ['train.py', '--stage1.max_stepz', '20']; runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "train.py: unknown key stage1.max_stepz: did you mean stage1.max_steps?\n"
    assert done.stdout == "False\n"


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [name for name, option in options(RunConfig).items() if not (option.help or option.is_section)] == []
    assert "Optimiser steps, unless epochs is set (default: 1000)." in " ".join(text.split())
    assert "the order of the data and the sampling (default: 0)." in " ".join(text.split())
    assert "Hub id, local folder or GGUF file of a causal LM (default: examples/stdlib_target)." in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("output_dir: café\n".encode("latin-1"), "UTF-8"),
        (b"[1, 2]", ""),
        (b"hello", ""),
        (b"stage1: null\n", "section"),
        (b"loss: [1, 2]\n", "section"),
        (b"target: org/name\n", "did you mean target.name_or_path: org/name?"),
        (b"stage1:\n  max stepz: 7\n", "max stepz"),
        (b"seed: 1\n---\nseed: 2\n", "document"),
        (b"data: {}\nstage1: {}\ndata: {}\n", "line 3: data comes a second time"),
        (b"data:\n  raw: true\n  raw: false\n", "line 3: raw comes a second time"),
        (b"stage1.max_steps: 5\nstage1: {max_steps: 9}\n", "stage1.max_steps comes a second time"),
        (b"output_dir: !!python/object/apply:os.system ['id']\n", "constructor"),
        (b"loss:\n  kl: .nan\n", "loss.kl"),
        (b"loss:\n  head_decay: .inf\n", "loss.head_decay"),
        (b"eval:\n  temperatures: [0, .inf]\n", "eval.temperatures"),
        (b"stage1:\n  warmup_steps: -1\n", "stage1.warmup_steps"),
        (b"speculator:\n  n_predict: 0\n", "n_predict"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_file_fails_in_one_line_that_names_the_key(tmp_path, capsys, text, key):
    file = tmp_path / "run.yaml"
    file.write_bytes(text)
    assert key in refuse(["--config", str(file)], capsys)


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_a_file_as_a_section_is_not_opened_as_a_config(tmp_path, capsys, flag):
    model, file = tmp_path / "model.gguf", tmp_path / "run.yaml"
    model.write_bytes(b"GGUF\x80\x81")
    file.write_text(f"target: {model}\n")
    assert f"did you mean target.name_or_path: {model}?" in refuse(flag.format(file).split(), capsys)


def test_a_config_file_may_use_yaml_anchors_and_merges(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("stage1: &one\n  learning_rate: 1e-3\n  max_steps: 40_000\nstage2:\n  <<: *one\n  max_steps: 5\n")
    config = parse(["--config", str(file)])
    assert (config.stage1.learning_rate, config.stage2.learning_rate) == (1e-3, 1e-3)
    assert (config.stage1.max_steps, config.stage2.max_steps) == (40_000, 5)


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", "+1e-03", "0.001", ".001"])
def test_a_number_is_read_in_any_form(number, tmp_path):
    """YAML 1.1 takes some of these for texts."""
    file = tmp_path / "run.yaml"
    file.write_text(f"stage1:\n  learning_rate: {number}\ndata:\n  max_tokens: 1e9\n")
    for argv in (["--config", str(file)], ["--stage1.learning_rate", number, "--data.max_tokens", "1e9"]):
        config = parse(argv)
        assert (config.stage1.learning_rate, config.data.max_tokens) == (1e-3, 10**9)
    assert parse([f"--speculator.options.rms_norm_eps={number}"]).speculator.options == {"rms_norm_eps": 1e-3}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stage1.max_step", "3"], "unknown key stage1.max_step: did you mean stage1.max_steps?"),
        (["--confi", "x"], "unknown key confi"),
        (["--stage2.rejected_token_weight", "2"], "stage2.rejected_token_weight is gone: weighting tokens after"),
        (["--stage1", "null"], "stage1"),
        (["--target", str(ROOT / "model.gguf")], f"--target.name_or_path {ROOT}/model.gguf"),
        (["--target=org/name"], "--target.name_or_path org/name"),
        (["--stage1.learning_rate", "nan"], "stage1.learning_rate"),
        (["--loss.kl", "1e400"], "loss.kl"),
        (["--output_dir", ""], "output_dir"),
        (["--config", "."], "not a regular file"),
    ],
    ids=str,
)
def test_a_wrong_flag_fails_in_one_line_that_names_it(argv, message, capsys):
    assert message in refuse(argv, capsys)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--stage2.generate.turns", "0: must be a whole number > 0 or all, got 0"),
        ("--target.dtype", "int8: must be auto, float32, bfloat16 or float16, got int8"),
        ("--stage1.epochs", "-1: must be a number > 0 or null, got -1"),
        ("--data.max_bad_rows", "2: must be a number from 0 to 1, got 2"),
        ("--data.sources", "{a: b}: must be a list of texts, got {a: b}"),
        ("--eval.temperatures", "[0, warm]: must be a list of numbers, got [0, warm]"),
        ("--stage1.bf16", "maybe: must be true or false, got maybe"),
    ],
)
def test_a_wrong_value_is_told_what_it_must_be(flag, words, capsys):
    value, said = words.split(": must", 1)
    assert refuse([flag, value], capsys) == f"train.py: {flag[2:]}: must{said}\n"


def test_a_list_takes_a_single_item_and_a_switch_stands_alone():
    config = parse(
        ["--stage1.bf16", "--data.sources", "my.jsonl", "--eval.temperatures", "1", "--target.server=http://a"]
    )
    assert (config.stage1.bf16, config.data.sources, config.eval.temperatures) == (True, ["my.jsonl"], [1.0])
    assert config.target.server == ["http://a"]


def test_null_takes_the_default_of_an_optional_setting(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: {revision: v1}\ndata: {max_tokens: 9}\n")
    config = parse(["--config", str(file), "--target.revision", "null", "--data.max_tokens", "null"])
    assert (config.target.revision, config.data.max_tokens) == (None, None)


@pytest.mark.parametrize(
    ("files", "flags", "lengths"),
    [
        (["stage1: {epochs: 2}"], ["--stage1.max_steps", "7"], (7, None)),
        (["stage1: {epochs: 2}", "stage1: {max_steps: 7}"], [], (7, None)),
        (["stage1: {max_steps: 0}", "stage1: {epochs: 2}"], [], (1000, 2)),
        (["stage1: {max_steps: 5}"], ["--stage1.epochs", "2"], (5, 2)),
        (["stage1: {max_steps: 5}", "stage1: {epochs: null}"], [], (5, None)),
        (["stage1: {max_steps: 5, epochs: 2}"], ["--stage1.epochs", "null"], (5, None)),
        (["stage1: {epochs: 3}", "stage1: {epochs: 2, max_steps: 7}", "stage1: {learning_rate: 1.0}"], [], (7, 2)),
        (["stage1: {max_steps: 0}"], ["--stage1.epochs", "null"], (0, None)),
        (["stage1: {epochs: 2}"], ["--stage1.epochs", "null", "--stage1.max_steps=3"], (3, None)),
    ],
)
def test_a_stage_has_the_length_that_is_given_last(files, flags, lengths, tmp_path):
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(text)
        flags = [*flags, "--config", str(tmp_path / f"{number}.yaml")]
    stage = parse(flags).stage1
    assert (stage.max_steps, stage.epochs) == lengths


def test_steps_and_epochs_exclude_each_other(capsys):
    assert "mutually exclusive" in refuse(["--stage1.epochs", "7", "--stage1.max_steps=3"], capsys)


@pytest.mark.parametrize("flag", ["dry_run", "overwrite_output_dir"])
def test_a_switch_takes_a_value_or_none(flag):
    flags = [[f"--{flag}"], [f"--{flag}", "true"], [f"--{flag}=true"], [f"--{flag}", "--seed", "3"]]
    assert [getattr(parse(given), flag) for given in flags] == [True] * 4
    assert getattr(parse([f"--{flag}", "false"]), flag) is False


def test_whatever_a_setting_is_given_the_answer_is_a_config_or_one_line(capsys):
    """150 settings with values of every type."""
    draw, known = random.Random(0), list(options(RunConfig))
    values = ["", "null", "~", "true", "-1", "0", "1.5", "1e9", "nan", "-.inf", "[]", "[[1]]", "{}", "{a: 1}", "a: b"]
    values += ["9" * 400, "!!binary aGk=", "2024-01-01", "*a", "&a b", "\x1b[2J", "\ud800", "--", "@2", "'", "|", "[x]"]
    for _ in range(150):
        name, value = draw.choice(known), draw.choice(values)
        code = 0
        try:
            parse([f"--{name}={value}"])
        except SystemExit as stop:
            code = stop.code
        if code:
            error = capsys.readouterr().err
            assert (code, error.count("\n")) == (2, 1), (name, value, error)
            assert error[:-1].isprintable()


def test_checkpoints_are_saved_at_every_evaluation_by_default():
    assert parse(["--stage1.eval_steps", "70"]).stage1.save_steps == 70
    assert parse(["--stage1.eval_steps", "70", "--stage1.save_steps", "140"]).stage1.save_steps == 140


def test_a_recipe_is_found_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in (["--config", "configs/dspark.yaml"], ["--config=configs/dspark.yaml"]):
        assert parse([*flags, "--target.name_or_path", "M"]).speculator.architecture == "dspark"


def test_a_target_without_a_config_gets_the_recipe_for_any_model():
    recipe = parse(["--config", "configs/eagle3.yaml", "--target.name_or_path", "org/name"])
    assert parse(["--target.name_or_path", "org/name"]) == recipe
    assert recipe.speculator.architecture == "eagle3"
    assert parse(["--target.name_or_path=examples/stdlib_target"]).output_dir == "runs/quickstart"
    assert default_recipe({"target.name_or_path": "org/name", "speculator.warm_start": "head"}).name == "continue.yaml"


@pytest.mark.parametrize("flags", [["{b: [2], c: x}"], ["b", "[2]", "c", "x"]], ids=["a mapping", "one by one"])
def test_options_are_added_to_those_of_the_recipe(flags, tmp_path):
    """And those of a file to those of the file before it."""
    files = [tmp_path / "recipe.yaml", tmp_path / "more.yaml"]
    for file, text in zip(files, ("{a: 0, b: 1, d: 1}", "{a: 1, b: 1}"), strict=True):
        file.write_text(f"speculator:\n  options: {text}\n")
    name = "--speculator.options"
    argv = [name, *flags] if len(flags) == 1 else [f"{name}.b", "[2]", f"{name}.c=x"]
    argv += [f"--config={file}" for file in files]
    assert parse(argv).speculator.options == {"a": 1, "b": [2], "c": "x", "d": 1}
    assert parse(["--target.chat_template_kwargs={a: false}"]).target.chat_template_kwargs == {"a": False}


@pytest.mark.parametrize("value", ["3", "[1]", "{", "{1: 2}", "{a b: 2}"])
def test_options_that_are_no_mapping_are_refused(value, capsys):
    assert "speculator.options: must be a mapping" in refuse(["--speculator.options", value], capsys)
