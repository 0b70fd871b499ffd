"""Training on recorded answers: the old head's shape, held-out rows, and the early end."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_tensors, refused
from conftest import DFLASH, DFLASH2, settled, tiny_block_head, tiny_head
from datasets import Dataset
from mtp_models import config_of, model_of, mtp_of
from mtp_models import save as save_mtp
from reports import report as report_with

from data.mixture import mixture_of
from data.prepare import RowRequest, token_rows
from eval.suites import load_suite
from speculator import Engine, HeadDrafter, Sampling, Target, UserError
from speculator.checkpoints import layout_of, load_any, save
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.report import write_record
from speculator.server.recorder import Recorder
from speculator.target.remote.server_target import split
from train import run
from train.command_line import parse
from train.door.initialise import new_head
from train.door.settle import settle
from train.loop import Loop, Progress
from train.options.config import StageConfig
from train.run import main


@pytest.fixture(scope="module")
def traffic(target_folder, tmp_path_factory):
    """Folder of a head and of the answers that it drafted."""
    folder = tmp_path_factory.mktemp("traffic")
    target = Target.load(str(target_folder))
    head = tiny_head(n_predict=2, vocab_size=target.vocab_size)
    head.save_pretrained(folder / "head")
    engine = Engine(target, HeadDrafter(head), slots=8)
    requests = [engine.submit([5 + n, 6, 7], Sampling(1.0, seed=n), max_new_tokens=40) for n in range(60)]
    engine.run()
    recorder = Recorder(folder / "recorded", target, 1.0, 1e9)
    recorder.add(requests)
    recorder.close()
    return folder, requests


def test_the_newest_answers_are_held_out(traffic, target_folder, monkeypatch):
    folder, requests = traffic
    monkeypatch.setenv("SPECULATOR_CACHE", str(folder / "cache"))
    target = Target.load(str(target_folder))
    rows = token_rows(
        RowRequest(
            mixture=mixture_of([str(folder / "recorded")]), split="train", tokenizer=target.tokenizer, length=128
        )
    )
    answers = [answer for row in rows for answer in split(row["input_ids"], row["document_ids"])]
    assert sorted(answers) == sorted(request.sequence for request in requests[:54])
    suite = load_suite(str(folder / "recorded"), target, prompt_tokens=8, max_prompts=9, max_new_tokens=8)
    assert suite.prompts == [list(request.prompt) for request in requests[57:]]


def test_a_head_is_trained_until_it_no_longer_improves(traffic, target_folder, tmp_path, monkeypatch):
    folder, _ = traffic
    monkeypatch.setenv("SPECULATOR_CACHE", str(folder / "cache"))

    def no_report(config, target, suites):
        report = Path(config.output_dir) / "eval" / "report.json"
        report.parent.mkdir()
        write_record(report, report_with())

    # One head's forecast may differ in its last bits from pass to pass: kernels follow the alignment of memory.
    figures = Loop.figures
    monkeypatch.setattr(Loop, "figures", lambda *given: {k: round(v, 4) for k, v in figures(*given).items()})
    monkeypatch.setattr(run, "measure", no_report)
    monkeypatch.setattr(run, "write_card", lambda folder: None)
    monkeypatch.setattr("train.processes.use_all_cores", lambda: None)
    settings = {
        "config": "configs/continue.yaml",
        "target.name_or_path": target_folder,
        "speculator.warm_start": folder / "head",
        "data.sources": f"[{folder / 'recorded'}]",
        "data.seq_length": 32,
        "stage1.learning_rate": 1e-9,  # no checkpoint is better than the first
        "stage1.eval_steps": 2,
        "stage1.save_steps": 2,
        "stage1.max_steps": 40,
        "stage1.warmup_steps": 0,
        "eval.validation_rows": 2,
        "eval.validation_prompts": 2,
        "eval.tune_prompts": 0,
        "eval.max_prompts": 2,
        "eval.max_new_tokens": 8,
        "output_dir": tmp_path / "run",
        "report_to": "none",
    }
    argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert main(parse(argv)) == 0

    def steps() -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "stage1").glob("checkpoint-*"))

    assert max(steps()) == 6, "the best checkpoint is the first, and two others follow"
    made, old = load_any(tmp_path / "run" / "speculator"), load_any(folder / "head")
    assert type(made) is type(old)
    assert made.n_predict == 2
    assert all(torch.allclose(made.state_dict()[name], value, atol=1e-6) for name, value in old.state_dict().items())
    for name in ("speculator", "eval", "stage1/speculator"):  # as if killed when the stage had just ended
        shutil.rmtree(tmp_path / "run" / name)
    assert main(parse(argv)) == 0
    assert max(steps()) == 6


def test_a_head_that_stores_its_targets_embedding_goes_on_with_its_own_settings(target_folder, tmp_path):
    target = Target.load(str(target_folder))
    shape = {"n_predict": 2, "aux_layers": [0, 1], "own_embedding": True, "trained_length": 96}
    shape["max_position_embeddings"] = 64  # others often write 2,048
    head = Eagle3Speculator(Eagle3SpeculatorConfig.for_target(target.config, **shape))
    head.embed_tokens.weight.data.copy_(target.embedding_matrix())
    head.save_pretrained(tmp_path / "head")
    flags = ["--target.name_or_path", str(target_folder), "--speculator.warm_start", str(tmp_path / "head")]
    config = parse(flags)
    assert config.loss.d_pace == 0.5
    assert parse([*flags, "--loss.d_pace", "1"]).loss.d_pace == 1
    assert settled(config, target).config.data.seq_length == 96
    made = new_head(settled(config, target), target, Dataset.from_list([{"input_ids": [1, 2, 3]}]), length=32)
    assert not made.config.own_embedding
    assert made.config.trained_length == made.config.max_position_embeddings == 96
    assert torch.equal(made.fc.weight, head.fc.weight)


def continued(folder: Path, *flags: str):
    """The head of a run on the target in a folder, before its first step."""
    target = Target.load(str(folder))
    config = parse(["--target.name_or_path", str(folder), *flags])
    return new_head(settled(config, target), target, Dataset.from_list([{"input_ids": [1, 2, 3]}]), length=32)


@pytest.mark.parametrize("layout", ["native", "dspark", "speculators"])
def test_a_block_drafter_goes_on_with_any_number_of_anchors(target_folder, tmp_path, layout):
    head = tiny_block_head(Target.load(str(target_folder)), anchors=20, aux_layers=[1])
    save(head, tmp_path / "head", layout_of(layout, head))
    for given in (20, 7):
        flags = ["--speculator.warm_start", str(tmp_path / "head"), "--speculator.options", f"{{anchors: {given}}}"]
        made = continued(target_folder, *flags)
        assert made.config.anchors == given
        assert torch.equal(made.layers[0].mlp.up_proj.weight, head.layers[0].mlp.up_proj.weight)


def test_the_options_of_a_shipped_layer_are_free_and_a_warm_start_keeps_them(tmp_path):
    config = config_of("glm4_moe", vocab_size=300)
    model = model_of(config)
    folder = save_mtp(tmp_path / "glm", model, mtp_of(model))
    options = ["--speculator.options", "{zero_first: true, recycle_normed: false}"]
    shipped = ["--speculator.architecture", "mtp", "--speculator.initialise", "target"]
    head = continued(folder, *shipped, *options)
    assert (head.config.zero_first, head.config.recycle_normed) == (True, False)
    assert torch.equal(head.layers[0].eh_proj.weight, load_any(folder).layers[0].eh_proj.weight)
    for layout in ("native", "mtp"):
        save(head, tmp_path / layout, layout_of(layout, head))
        start = ["--speculator.warm_start", str(tmp_path / layout)]
        for flags, expected in (([], True), (options, True), (["--speculator.options", "{zero_first: false}"], False)):
            assert continued(folder, *start, *flags).config.zero_first == expected


def test_an_embedding_of_a_new_heads_own_is_the_targets(target_folder):
    shape = ["--speculator.architecture", "eagle3", "--speculator.options", "{own_embedding: true, aux_layers: [0, 1]}"]
    head, target = continued(target_folder, *shape), Target.load(str(target_folder))
    assert torch.equal(head.embedding_weight, target.embedding_matrix())


@pytest.mark.parametrize(
    ("options", "total_variation", "cross_entropy"), [({}, 1.8, 0.1), (DFLASH, 0, 1), (DFLASH2, 0, 1)]
)
def test_a_block_drafter_goes_on_with_the_loss_of_its_recipes(
    target_folder, tmp_path, options, total_variation, cross_entropy
):
    tiny_block_head(Target.load(str(target_folder)), **options).save_pretrained(tmp_path / "head")
    flags = ["--target.name_or_path", str(target_folder), "--speculator.warm_start", str(tmp_path / "head")]
    loss = parse(flags).loss
    assert (loss.total_variation, loss.cross_entropy, loss.kl) == (total_variation, cross_entropy, 0)


def start_of(kind: str, target: Target, folder: Path) -> list[str]:
    """Flags of a run that starts from a head of some architecture and layout, which is written first."""
    architecture, layout = kind.split()
    head = tiny_block_head(target, aux_layers=[1]) if architecture == "dspark" else tiny_head(2, architecture)
    save(head, folder, layout_of(layout, head))
    return ["--target.name_or_path", str(target.name), "--speculator.warm_start", str(folder)]


@pytest.mark.parametrize(
    "kind",
    ["mlp native", "mlp ibm", "mlp arctic", "eagle3 native", "eagle3 eagle3", "eagle3 speculators", "dspark dspark"],
)
def test_the_settings_of_a_start_need_no_values_of_its_weights(target_folder, tmp_path, kind):
    flags = start_of(kind, Target.load(str(target_folder)), tmp_path / "head")
    config = parse(flags)
    wrong = {True: torch.nan, False: -1}
    edit_tensors(
        tmp_path / "head",
        lambda t: t.update({n: torch.full_like(x, wrong[x.is_floating_point()]) for n, x in t.items()}),
    )
    assert parse(flags) == config
    refused(tmp_path / "head")


def test_a_recipes_draft_vocabulary_of_all_tokens_is_none(target_folder, tmp_path):
    flags = start_of("eagle3 native", Target.load(str(target_folder)), tmp_path / "head")
    start = load_any(tmp_path / "head").config
    assert start.draft_vocab_size is None
    size = "--speculator.draft_vocab_size"
    found = [parse([*flags, size, str(start.vocab_size + more)]).speculator.draft_vocab_size for more in (0, 1)]
    assert found == [start.vocab_size, start.vocab_size + 1]  # which the target's config turns into 0
    with pytest.raises(UserError, match="has draft_vocab_size None, but this run's head has 31"):
        settle(parse([*flags, "--target.name_or_path", "x", size, "31"]), processes=1, local_only=True)


def test_a_start_that_is_cut_off_is_refused_before_the_target_is_loaded(target_folder, tmp_path):
    flags = start_of("mlp native", Target.load(str(target_folder)), tmp_path / "head")
    config, weights = parse(flags), tmp_path / "head" / "model.safetensors"
    os.truncate(weights, 8 + int.from_bytes(weights.read_bytes()[:8], "little"))  # its header
    assert parse(flags) == config
    message = refused(tmp_path / "head")
    assert "damaged" in message
    with pytest.raises(UserError, match=re.escape(message)):
        settle(config, processes=1, local_only=True)


def test_a_start_whose_weights_are_wrong_is_refused_before_the_target_is_loaded(target_folder, tmp_path):
    flags = start_of("mlp native", Target.load(str(target_folder)), tmp_path / "head")
    edit_tensors(tmp_path / "head", lambda t: t.pop(next(iter(t))))
    with pytest.raises(UserError, match=re.escape(refused(tmp_path / "head"))):
        settle(parse(flags), processes=1, local_only=True)


@pytest.mark.parametrize(
    ("step", "best", "patience", "ended"),
    [
        (40, 40, None, True),
        (38, 2, None, False),
        (6, 2, 2, True),
        (4, 2, 2, False),
        (6, 4, 2, False),
        (6, None, 2, False),
    ],
)
def test_a_stage_ends_after_all_steps_or_without_a_better_checkpoint(step, best, patience, ended):
    stage = StageConfig(max_steps=40, save_steps=2, patience=patience)
    assert Progress(40, step, best_global_step=best).ends(stage) is ended
