"""Every recipe of the repository in a dry run: what is wrong with one is found here and not after a download."""

import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import CONFIGS, RECURRENT, settled, shorten_validation
from transformers import FalconConfig, Glm4MoeConfig, LlamaConfig, Qwen3Config

from speculator.errors import UserError
from speculator.heads import ARCHITECTURES
from train import run
from train.command_line import parse
from train.door import dry_run
from train.door.dry_run import run_on_stand_ins
from train.door.settle import known_config, settle
from train.folder import check_same_run, write_record
from train.run import run as run_all

ROOT = Path(__file__).parents[2]
LONG = (
    "llama-3.1-8b-instruct",
    "llama-3.1-8b-instruct-eagle3",
    "llama-3.1-8b-instruct-eagle3-24gb",
    "llama-3.1-8b-instruct-dspark",
    "llama-cpp",
    "qwen3-8b-dspark",
    "qwen3-8b-dflash2",
    "qwen3-8b",
    "code",
    "glm-4.5-air-mtp",
    "smollm2-135m-eagle3",
    "mlp",
    "smollm2-135m-dspark",
    "smollm2-135m-mlp",
    "qwen2.5-coder-0.5b-eagle3",
)  # the other recipes have every phase and architecture
RECIPES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.soak] * (path.stem in LONG))
    for path in sorted((ROOT / "configs").glob("*.yaml"))
]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """Temporary files and the cache go to folders of the test's own, and nothing may be left there."""
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("SPECULATOR_CACHE", str(cache))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert list(scratch.glob("dry-run-*")) == []
    assert not cache.exists()
    assert os.environ["SPECULATOR_CACHE"] == str(cache)


class SeenError(Exception):
    """Ends a dry run of which enough was seen."""


@pytest.fixture
def unmeasured(monkeypatch):
    """No step costs are measured: with a cache that is empty, every dry run would measure them for seconds."""
    monkeypatch.setattr("speculator.drafters.tuning.SECONDS", 0.0)


def try_out(recipe: Path, *flags: str) -> None:
    config = parse(["--config", str(recipe), "--dry_run", *flags])
    run_on_stand_ins(settle(config, 1, local_only=True), run_all)


@pytest.mark.parametrize("recipe", LONG)
def test_a_recipe_passes_the_checks_of_its_settings(recipe):
    settled(parse(["--config", str(ROOT / "configs" / f"{recipe}.yaml")]), checked=True)


def test_a_dry_run_of_raw_text_has_no_chats(figures_only, unmeasured):
    try_out(ROOT / "configs" / "quickstart.yaml", "--data.raw", "true")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(recipe, capsys, request, monkeypatch):
    if recipe.stem == "quickstart":
        request.getfixturevalue("quick")
    else:
        request.getfixturevalue("figures_only")
        request.getfixturevalue("unmeasured")
        shorten_validation(monkeypatch)
    try_out(recipe)
    text = capsys.readouterr().out
    config = parse(["--config", str(recipe)])
    parts = ["stage1", *["stage2"] * bool(config.stage2.max_steps), "evaluation"]
    assert [line.split(":")[0] for line in text.splitlines()[: len(parts)]] == [
        f"{part} on stand-ins" for part in parts
    ]


def test_stage_2_does_not_hold_the_head_of_stage_1(monkeypatch, unmeasured):
    shorten_validation(monkeypatch)
    trained, train_stage = [], run.train_stage

    def watched(name, target, start, *rest):
        if name == "stage2":
            assert [head() for head in trained] == [None]
            raise SeenError

        def noted():
            head = start()
            trained.append(weakref.ref(head))
            return head

        return train_stage(name, target, noted, *rest)

    monkeypatch.setattr(run, "train_stage", watched)
    with pytest.raises(SeenError):
        try_out(ROOT / "configs" / "code.yaml")


def test_a_dry_run_keeps_the_head_the_sampling_and_the_targets_family(tmp_path, figures_only, unmeasured, monkeypatch):
    """Only sizes shrink. A recipe whose head or distribution were replaced too would prove nothing."""
    shorten_validation(monkeypatch)
    Qwen3Config().save_pretrained(tmp_path)
    given = parse(["--config", str(ROOT / "configs" / "qwen3-8b.yaml"), "--dry_run"])
    speculator, target = (
        replace(given.speculator, architecture="mlp"),
        replace(given.target, name_or_path=str(tmp_path)),
    )
    # The rate is for the run's target, not for the narrow one that stands in.
    given = replace(given, speculator=speculator, target=target, stage1=replace(given.stage1, base_width=4096))
    seen = []

    def run(config):
        assert config.target.name_or_path != given.target.name_or_path
        seen.append((config, (Path(config.target.name_or_path) / "config.json").read_text()))
        run_all(config)

    run_on_stand_ins(settle(given, 1, local_only=True), run)
    ((config, target),) = seen
    assert '"model_type": "qwen3"' in target
    assert config.speculator == replace(given.speculator, inner_dim=config.speculator.inner_dim)
    assert config.loss == given.loss
    assert (config.stage1.max_steps, config.stage2.max_steps) == (1, 1)
    assert config.stage1.bf16
    assert config.stage1.base_width is None
    assert config.stage2.generate.top_p == given.stage2.generate.top_p


def test_a_dry_run_shrinks_the_sizes_of_dflash_2():
    sizes = "{conv_group_size: 64, selector_top_k: 512}"
    recipe = ["--config", str(ROOT / "configs/qwen3-8b-dflash2.yaml"), "--speculator.options", sizes]

    def run(config):
        head = settle(config, processes=1).head
        assert (head.conv_group_size, head.selector_top_k, head.selector_rank) == (32, 100, 256)
        raise SeenError

    with pytest.raises(SeenError):
        run_on_stand_ins(settle(parse([*recipe, "--dry_run"]), 1, local_only=True), run)


@pytest.mark.parametrize(
    ("config", "stand_in"),
    [
        *(pytest.param(RECURRENT[family], "llama", id=family) for family in ("mamba2", "lfm2_moe", "kimi_linear")),
        *((CONFIGS[family], f"{family}_text") for family in ("gemma3n", "gemma4")),
        (CONFIGS["qwen3_moe"], "qwen3_moe"),
        (Glm4MoeConfig(), "glm4_moe"),
        (FalconConfig(), "llama"),  # its config takes no head_dim
    ],
)
def test_a_dry_run_stands_a_small_model_in_for_the_target(config, stand_in, tmp_path, monkeypatch):
    """It has another family than the target only if that one has recurrent layers or can't be made small."""
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(dry_run, "head_class", lambda options: ARCHITECTURES["eagle3"])  # it reads the most layers
    sizes = ["--data.seq_length", "64", "--eval.max_new_tokens", "32", "--stage2.max_steps", "0"]
    given = parse(["--config", str(ROOT / "tests/plain.yaml"), "--target.name_or_path", str(tmp_path), *sizes])
    seen = []

    def run(config):
        folder = Path(config.target.name_or_path)
        seen.append(json.loads((folder / "config.json").read_text()))
        assert (folder / "model.safetensors").stat().st_size < 20e6
        raise SeenError

    with pytest.raises(SeenError):
        run_on_stand_ins(settle(given, 1, local_only=True), run)
    assert (seen[0]["model_type"], seen[0]["num_hidden_layers"]) == (stand_in, 7)


def test_rows_longer_than_the_targets_context_are_refused_where_that_is_known():
    with pytest.raises(UserError, match=r"data\.seq_length"):
        try_out(ROOT / "configs" / "quickstart.yaml", "--data.seq_length", "100000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stage1.save_steps", "7"], "stage1.save_steps"),
        (["--data.sources", "[nowhere.jsonl]"], "nowhere.jsonl"),
        (["--data.sources", "[a/b@0.5, c/d]"], "weight"),
    ],
)
def test_a_wrong_recipe_fails_with_the_error_of_the_run(flags, message):
    with pytest.raises(UserError, match=re.escape(message)):
        try_out(ROOT / "configs" / "llama-3.1-8b-instruct.yaml", *flags)


def test_a_dry_run_is_not_recorded_as_a_setting_of_the_run(tmp_path):
    config = replace(parse([]), output_dir=str(tmp_path / "run"))
    write_record(tmp_path / "run", config, processes=1)
    check_same_run(tmp_path / "run", replace(config, dry_run=True), 1)
    assert "dry_run" not in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["settings"]


def test_stand_ins_of_several_nodes_are_where_all_see_them(monkeypatch):
    def make(prefix, dir=None):
        raise UserError(str(dir))

    cache = Path(os.environ["SPECULATOR_CACHE"])
    monkeypatch.setattr(dry_run, "PartialState", lambda: SimpleNamespace(num_processes=4, is_main_process=True))
    monkeypatch.setattr(dry_run.tempfile, "mkdtemp", make)
    for local, where in (("2", cache), ("4", None)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        config = parse(["--config", "tests/plain.yaml", "--target.name_or_path", "x"])
        with pytest.raises(UserError, match=f"^{where}$"):
            run_on_stand_ins(settle(config, processes=4, local_only=True), lambda _: None)
    cache.rmdir()


def test_a_config_that_does_not_validate_fails_in_one_line(tmp_path):
    config = LlamaConfig().to_dict() | {"hidden_size": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="hidden_size"):
        known_config(parse(["--target.name_or_path", str(tmp_path)]))


@pytest.mark.soak
def test_the_command_on_two_processes_leaves_nothing(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = ["train.py", "--config", "configs/code.yaml", "--dry_run", "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    done = subprocess.run([*launcher, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stage1 on stand-ins") == 1
    assert not (tmp_path / "run").exists()
