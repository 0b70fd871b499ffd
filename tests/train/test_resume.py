"""A run that was stopped, damaged, moved or out of room, in this process: what the next call does."""

import json
import os
import re
import resource
import shutil
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import pytest
import torch
import yaml
from accelerate import Accelerator, PartialState
from bad_inputs.damages import flipped
from conftest import RECURRENT_RUNS, SETTINGS, overflow_at, shorten_validation, tiny_head
from mtp_models import config_of, model_of, mtp_of, save
from reports import report as report_with
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from data.rendering import load_tokenizer
from speculator import report as report_module
from speculator.errors import UserError
from speculator.files import manifest_error, write_manifest
from train import checkpoint, loop, processes, stages
from train.command_line import parse
from train.folder import check_same_run, locked, rows_fingerprint, write_record
from train.options.config import ROOT
from train.run import main
from train.states.batch import Collator

STAGE = ("max_steps", "learning_rate", "per_device_train_batch_size", "warmup_steps", "logging_steps", "eval_steps")
STAGE += ("save_steps", "save_total_limit")
OWN_TEXT = {"max_rows": 32, "prompt_tokens": 16, "max_new_tokens": 24, "batch_size": 8, "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def run(target_folder, text_file, tmp_path_factory):
    """Runs in a folder: (folder, sources, flags) -> exit code."""
    cache = tmp_path_factory.mktemp("cache")

    def run(folder: Path, *flags: str, source: Path = text_file, **settings) -> int:
        given = {
            **SETTINGS,
            "config": ROOT / "tests/plain.yaml",
            "target.name_or_path": target_folder,
            "data.sources": f"[{source}]",
            **settings,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECULATOR_CACHE", str(cache))
            patch.setattr("train.finish.evaluate", report)
            patch.setattr("train.run.write_card", lambda folder: None)
            shorten_validation(patch)
            code = main(parse([f"--output_dir={folder}", *words, *flags]))
        torch.set_num_threads(1)
        return code

    return run


def report(target, head, suites, output: Path, *how, **names) -> None:
    """Stands in for the final evaluation, which takes half of a small run's time."""
    output.mkdir(exist_ok=True)
    (output / "report.md").touch()
    report_module.write_record(output / "report.json", report_with())


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder) == 0
    return folder


@pytest.fixture
def unfinished(finished, tmp_path) -> Path:
    """Trained, but nothing published."""
    folder = tmp_path / "unfinished"
    shutil.copytree(finished, folder)
    for made in ("eval", "speculator", "stage1/speculator"):
        shutil.rmtree(folder / made)
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def history(folder: Path) -> list[dict]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timing = ("runtime", "per_second", "step_over_target", "seconds_left", "mfu")
    return [{k: v for k, v in entry.items() if not any(word in k for word in timing)} for entry in entries]


def test_a_target_that_overflows_in_float16_is_named(run, target_folder, tmp_path, capfd):
    folder = Path(shutil.copytree(target_folder, tmp_path / "target"))
    overflow_at(folder, load_tokenizer(str(folder)).encode("f")[0])
    float16 = {"target.name_or_path": folder, "target.dtype": "float16", "stage1.logging_steps": 1}
    assert run(tmp_path / "run", **float16) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "not finite in float16" in line
    assert "learning_rate" not in line


@pytest.mark.parametrize(("calls", "step"), [(7, 6), (9, 8), (99, 16)])
def test_sigterm_saves_a_checkpoint_and_the_next_call_resumes_bit_identically(
    finished, run, tmp_path, monkeypatch, capfd, calls, step
):
    """Between two lines of the log, at steps 6 and 8: an evaluation after step 4 asks too, and one after step 8.

    Step 16 is the last, and another process got the signal after its vote.
    """
    asked = iter(range(1, 100))
    monkeypatch.setattr(loop, "stop_asked", lambda: next(asked) >= calls)
    monkeypatch.setattr(stages, "gather_object", lambda own: [*own, calls == 99])
    folder = tmp_path / "stopped"
    assert run(folder) == 143
    assert f"the same command resumes from {folder}/stage1/checkpoint-{step}" in capfd.readouterr().err
    monkeypatch.undo()
    assert run(folder) == 0
    assert f"resuming from {folder}/stage1/checkpoint-{step}" in capfd.readouterr().err
    for name in ("stage1/checkpoint-16", "stage1/speculator", "speculator"):
        assert weights(folder / name) == weights(finished / name)
    assert history(folder / "stage1/checkpoint-16") == history(finished / "stage1/checkpoint-16")


ATTENTION = {
    "speculator.architecture": "eagle3",
    "speculator.options": "{aux_layers: [0, 1]}",
    "speculator.draft_vocab_size": 100,
}
ATTENTION |= {"stage1.max_steps": 8, "stage1.learning_rate": 2e-3}
ATTENTION |= {f"stage2.{name}": ATTENTION.get(f"stage1.{name}", SETTINGS.get(f"stage1.{name}")) for name in STAGE}
ATTENTION |= {f"stage2.generate.{name}": count for name, count in OWN_TEXT.items()}


BLOCK = ATTENTION | {
    "speculator.architecture": "dspark",
    "speculator.options": "{aux_layers: [0, 1], num_hidden_layers: 1, markov_rank: 8, anchors: 20}",
    "loss.total_variation": 1.8,
    "stage1.optimizer": "muon",
    "stage2.optimizer": "muon",
}


DFLASH_2 = BLOCK | {
    "speculator.options": "{aux_layers: [0, 1], num_hidden_layers: 1, markov_rank: 0, sample_from_anchor: false, "
    "confidence_head: false, conv_group_size: 4, selector_rank: 6, selector_top_k: 4, anchors: 20}",
    "loss.total_variation": 0.0,
    "speculator.draft_vocab_size": 0,
}


MTP = {name: value for name, value in ATTENTION.items() if name != "speculator.draft_vocab_size"} | {
    "speculator.architecture": "mtp",
    "speculator.options": "{}",
    "speculator.initialise": "target",
}


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory) -> Path:
    config = config_of("glm4_moe")
    config.vocab_size, config.eos_token_id = 300, 0
    model = model_of(config)
    return save(tmp_path_factory.mktemp("targets") / "glm", model, mtp_of(model))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((ATTENTION, "target_folder"), id="eagle3"),
        pytest.param((BLOCK, "target_folder"), id="dspark"),
        pytest.param((ATTENTION, "hybrid_folder"), id="hybrid", marks=[RECURRENT_RUNS, pytest.mark.soak]),
        pytest.param((MTP, "mtp_folder"), id="mtp", marks=pytest.mark.soak),
        pytest.param((DFLASH_2, "target_folder"), id="dflash2", marks=pytest.mark.soak),
    ],
)
def attention(request, run, tmp_path_factory) -> tuple[Path, dict]:
    """A finished run of a head with attention; the target's own text is drafted by the head of stage 1."""
    folder, (settings, target) = tmp_path_factory.mktemp("runs") / "attention", request.param
    settings = {**settings, "target.name_or_path": request.getfixturevalue(target)}
    assert run(folder, **settings) == 0
    return folder, settings


def test_every_head_resumes_bit_identically_in_either_stage(run, attention, tmp_path, monkeypatch, capfd):
    """Stopped by SIGTERM in the middle of both stages."""
    finished, settings = attention
    stopped = tmp_path / "stopped"
    # It is asked after each step and each evaluation: in the second call seven times more in stage 1.
    for stage, calls in (("stage1", 3), ("stage2", 10)):
        asked = iter(range(1, 100))
        monkeypatch.setattr(loop, "stop_asked", lambda asked=asked, calls=calls: next(asked) >= calls)
        assert run(stopped, **settings) == 143
        assert f"resumes from {stopped}/{stage}/checkpoint-3" in capfd.readouterr().err
        monkeypatch.undo()
        if stage == "stage1":
            assert not (stopped / "stage2").exists()
    assert run(stopped, **settings) == 0
    for name in ("stage1/checkpoint-8", "stage1/speculator", "stage2/checkpoint-8", "speculator"):
        assert weights(stopped / name) == weights(finished / name), name
    for stage in ("stage1", "stage2"):
        assert history(stopped / stage / "checkpoint-8") == history(finished / stage / "checkpoint-8")


def test_a_stop_at_an_evaluation_between_checkpoints_does_not_change_which_is_the_best(finished):
    entries = [{"step": step, checkpoint.METRIC: 3.0 if step == 4 else 1.0 + step} for step in (4, 8, 12)]
    entries[0][checkpoint.METRIC] = 99.0
    best, _ = checkpoint.best(finished / "stage1", entries, save_steps=8, max_steps=16)
    assert best.name == "checkpoint-8"


def test_a_truncated_checkpoint_is_skipped_for_the_one_before(unfinished, finished, run, capfd):
    damaged = unfinished / "stage1" / "checkpoint-16"
    (damaged / "model.safetensors").write_bytes(weights(damaged)[:1000])
    assert run(unfinished) == 0
    said = capfd.readouterr().err
    assert f"skipping {damaged}" in said
    assert "resuming from" in said
    rows = 16 * SETTINGS["stage1.per_device_train_batch_size"]
    found = re.search(r"([\d,]+) rows read ([\d,.]+) times in 16 steps", said)
    assert float(found[2]) == pytest.approx(rows / int(found[1].replace(",", "")), abs=0.05)
    assert weights(unfinished / "speculator") == weights(finished / "speculator")


def test_a_damaged_best_checkpoint_is_skipped_for_the_next_best(unfinished, run, capfd):
    newest, best, second = unfinished / "stage1" / "checkpoint-16", 8, 12
    state = json.loads((newest / "trainer_state.json").read_text())
    for entry in state["log_history"]:  # the newest is the best otherwise, and a damaged newest one is trained again
        if checkpoint.METRIC in entry:
            entry[checkpoint.METRIC] = {best: 9.0, second: 8.0}.get(entry["step"], 1.0)
    (newest / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(newest)
    flipped("model.safetensors", at=1)(unfinished / "stage1" / f"checkpoint-{best}")
    assert run(unfinished) == 0
    line = f"skipping {unfinished}/stage1/checkpoint-{best}: model.safetensors does not match its checksum"
    assert line in capfd.readouterr().err
    assert weights(unfinished / "stage1/speculator") == weights(unfinished / "stage1" / f"checkpoint-{second}")


@pytest.mark.parametrize("name", ["stage1/speculator", "speculator"])
def test_a_damaged_head_is_written_again(finished, run, tmp_path, capfd, name):
    folder = tmp_path / "damaged"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "eval")
    if name == "stage1/speculator":
        shutil.rmtree(folder / "speculator")
    flipped("model.safetensors", at=1)(folder / name)
    assert run(folder) == 0
    said = capfd.readouterr().err
    assert f"{folder}/{name}: model.safetensors does not match its checksum; it is written again" in said
    assert weights(folder / name) == weights(finished / name)
    assert manifest_error(folder / name) is None


def test_a_moved_run_resumes_and_copies_of_checkpoints_stay(unfinished, run, tmp_path, monkeypatch, capfd):
    """Under a relative name from another folder, with copies beside the checkpoints, from the middle of the stage."""
    folder = tmp_path / "elsewhere" / "renamed"
    folder.parent.mkdir()
    unfinished.rename(folder)
    stage = folder / "stage1"
    copies = [stage / name for name in ("checkpoint-8.bak", "checkpoint-best", "checkpoint-012", "checkpoint-")]
    for copy in copies:
        shutil.copytree(stage / "checkpoint-4", copy)
    expected = weights(stage / "checkpoint-16")
    for step in (12, 16):
        shutil.rmtree(stage / f"checkpoint-{step}")
    monkeypatch.chdir(folder.parent)
    assert run(Path("renamed"), "--stage1.save_total_limit", "4") == 0
    assert "resuming from renamed/stage1/checkpoint-8" in capfd.readouterr().err
    assert weights(stage / "checkpoint-16") == expected
    assert all(weights(copy) == weights(stage / "checkpoint-4") for copy in copies)


def test_old_checkpoints_are_deleted_except_the_best_and_copies(tmp_path):
    for name in ("checkpoint-4", "checkpoint-8", "checkpoint-12", "checkpoint-16", "checkpoint-2.bak"):
        (tmp_path / name).mkdir()
    checkpoint.rotate(tmp_path, 2, best_step=4, newest_step=16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-16", "checkpoint-2.bak", "checkpoint-4"]


def test_a_skipped_damaged_checkpoint_does_not_displace_an_undamaged_one(tmp_path):
    for step in (4, 8, 16):  # the last is damaged, and training went on from 4
        (tmp_path / f"checkpoint-{step}").mkdir()
    checkpoint.rotate(tmp_path, 2, best_step=4, newest_step=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


def test_other_rows_than_the_run_began_with_are_refused(unfinished, run, text_file, tmp_path, capfd):
    record = yaml.safe_load((unfinished / "config.yaml").read_text())
    names = {"target", "training rows", "validation rows", "validation prompts", "held-out prompts"}
    assert names <= record["fingerprints"].keys()
    changed = tmp_path / text_file.name
    changed.write_text(text_file.read_text().replace("def ", "fed "))
    record["settings"]["data"]["sources"] = [str(changed)]  # as if the file itself had changed
    (unfinished / "config.yaml").write_text(yaml.safe_dump(record))
    before = sorted(unfinished.rglob("*"))
    capfd.readouterr()
    assert run(unfinished, source=changed) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "train.py:" in line)
    assert f"{unfinished}: changed since this run began: training rows, validation rows" in line
    assert "--overwrite_output_dir starts again" in line
    assert sorted(unfinished.rglob("*")) == before


def test_another_target_of_the_same_sizes_under_the_same_name_is_refused(tmp_path):
    write_record(tmp_path / "run", parse([]), 1, {"target": "llama-2:0123", "training rows": "45"})
    write_record(tmp_path / "run", parse([]), 1, {"target": "llama-2:0123", "training rows": "45"})
    with pytest.raises(UserError, match=r"changed since this run began: target; --overwrite_output_dir"):
        write_record(tmp_path / "run", parse([]), 1, {"target": "llama-2:4567", "training rows": "45"})


def test_settings_of_stages_that_have_not_begun_may_change(tmp_path, capsys):
    folder = tmp_path / "run"
    write_record(folder, parse([]), 1)
    other = parse(["--stage2.max_steps", "7", "--stage2.generate.batch_size", "3", "--report_to", "none"])
    check_same_run(folder, other, 1)
    write_record(folder, other, 1)
    assert yaml.safe_load((folder / "config.yaml").read_text())["settings"]["stage2"]["max_steps"] == 7
    assert capsys.readouterr().err == ""
    # A first batch that did not fit the memory leaves the record of the text's settings alone.
    begun = folder / "generated" / "batches"
    begun.mkdir(parents=True)
    (begun / "record.json").touch()
    check_same_run(folder, parse([]), 1)
    write_record(folder, other, 1)
    assert begun.exists()
    write_record(folder, parse([]), 1)
    assert not begun.exists()
    write_record(folder, other, 1)
    for made in ("generated/batches/0.json", "stage2", "speculator"):
        (folder / made).mkdir(parents=True) if "." not in made else begun.mkdir(parents=True)
        if "." in made:
            (folder / made).touch()
        check_same_run(folder, other, 1)
        again = "" if made == "speculator" else f"; to write .* again, remove {folder}/generated and {folder}/stage2$"
        with pytest.raises(UserError, match=f"holds a run with another stage2.*{again}"):
            check_same_run(folder, parse([]), 1)
        shutil.rmtree(folder / made.split("/")[0])
    with pytest.raises(UserError, match=r"holds a run with another stage1\.max_steps"):
        check_same_run(folder, parse(["--stage1.max_steps", "7"]), 1)
    record = yaml.safe_load((folder / "config.yaml").read_text())
    settings = record["settings"]
    for now, said in (
        (settings | {"target": {name: value for name, value in settings["target"].items() if name != "server"}}, None),
        (settings | {"target": settings["target"] | {"server": True}}, r"target\.server \(True, not False\)"),
        (settings | {"stage3": 1}, "stage3, which this version does not have"),
        (settings | {"stage1": settings["stage1"] | {"beta3": 1}}, r"stage1\.beta3, which this version does not have"),
    ):
        (folder / "config.yaml").write_text(yaml.safe_dump(record | {"settings": now}))
        with pytest.raises(UserError, match=f"another {said}") if said else nullcontext():
            check_same_run(folder, other, 1)


def test_another_number_of_processes_keeps_the_rows_per_step_or_prints_them(tmp_path, capsys):
    folder = tmp_path / "run"
    four, two = (parse(["--stage1.gradient_accumulation_steps", count]) for count in ("4", "2"))
    write_record(folder, four, 1)
    with pytest.raises(UserError, match=r"another stage1\.gradient_accumulation_steps"):
        check_same_run(folder, two, 1)
    check_same_run(folder, two, 2)
    write_record(folder, two, 2)
    rows = two.stage2.per_device_train_batch_size * two.stage2.gradient_accumulation_steps
    said = f"{folder}: rows per optimiser step changed: {2 * rows} in stage2, before {rows}\n"
    assert capsys.readouterr().err == said
    check_same_run(folder, two, 2)
    write_record(folder, two, 2)
    assert capsys.readouterr().err == ""
    without = replace(two.stage2, max_steps=0)
    four, two = (replace(config, stage2=without) for config in (four, two))
    write_record(tmp_path / "one stage", four, 1)
    write_record(tmp_path / "one stage", two, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("steps", "advice"),
    [(128, ""), (14, ", or keep the rows of a step by --stage1.gradient_accumulation_steps")],
    ids=["and one pass a step can't be halved", "and more passes a step would do"],
)
def test_a_stage_of_epochs_is_not_continued_with_other_rows_per_step(unfinished, run, capfd, steps, advice):
    """Eight processes would have an eighth of the steps: step 16 is not the end of 128."""
    if steps < 16:
        shutil.rmtree(unfinished / "stage1" / "checkpoint-16")
    for folder in (unfinished / "stage1").glob("checkpoint-*"):
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps(state | {"max_steps": steps}))
        write_manifest(folder)
    assert run(unfinished) == 2
    said = capfd.readouterr().err
    begun = f"stage1 has 16 steps on 1 processes, and was begun with {steps}"
    assert f"{begun}: start as many processes as before{advice}\n" in said


def test_the_record_of_a_start_that_was_refused_does_not_refuse_the_one_that_it_advised(tmp_path):
    epochs = ["--stage1.epochs", "3", "--stage1.gradient_accumulation_steps"]
    eight, two = (parse([*epochs, count]) for count in ("8", "2"))
    write_record(tmp_path, eight, 1)
    check_same_run(tmp_path, eight, 4)
    write_record(tmp_path, eight, 4)  # and its stage says: 4 processes have other steps, keep the rows of a step
    check_same_run(tmp_path, two, 4)


def test_the_command_that_resumes_an_overwriting_run_does_not_overwrite(monkeypatch, tmp_path, capfd):
    def fail(_):
        raise UserError("no server has answered; the same command resumes from the last checkpoint")

    monkeypatch.setattr("train.run.run", fail)
    assert main(parse(["--overwrite_output_dir", "--output_dir", str(tmp_path)])) == 2
    assert "; the same command without overwrite_output_dir resumes from" in capfd.readouterr().err


def test_two_runs_in_a_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(UserError, match="another process is running this"), locked(folder):
        pass
    with locked(folder):
        check_same_run(folder, parse([]), 1)
        write_record(folder, parse(["--overwrite_output_dir"]), 1)
        with pytest.raises(UserError, match="another process is running this"), locked(folder):
            pass


def test_a_full_disk_fails_in_one_line_and_with_room_the_run_resumes(finished, run, tmp_path, capfd):
    folder = tmp_path / "full"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        assert run(folder) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "train.py:" in line)
    assert f"can't write {folder}/stage1/checkpoint-4" in line
    assert not (folder / "stage1" / "checkpoint-4").exists()
    assert run(folder) == 0
    assert weights(folder / "speculator") == weights(finished / "speculator")


def test_a_run_whose_loss_is_not_finite_keeps_finite_checkpoints_only(run, tmp_path, capfd, monkeypatch):
    """Its log would say so too late: the evaluation before the checkpoint does. Its trackers are closed."""
    folder, logs = tmp_path / "diverged", Accelerator(cpu=True)
    logs.trackers = [MagicMock()]
    monkeypatch.setattr(stages, "tracker", lambda *_: logs)
    assert run(folder, **{"stage1.learning_rate": 1e30, "stage1.logging_steps": 100}) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "train.py:" in line)
    assert "the loss became" in line
    logs.trackers[0].finish.assert_called_once_with()
    assert not (folder / "speculator").exists()
    for kept in checkpoint.numbered(folder / "stage1").values():
        assert all(weight.isfinite().all() for weight in load_file(kept / "model.safetensors").values())


def test_a_training_step_does_not_wait_for_its_loss(run, tmp_path, monkeypatch):
    """Nor anything else; but transformers looks whether a row is packed, once, before the target's first layer."""
    reads = []
    theirs = "find_packed_sequence_indices"

    class Reading(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            reading = op is torch.ops.aten._local_scalar_dense.default
            reads.append(reading and theirs not in {frame.name for frame in traceback.extract_stack()})
            return op(*args, **(kwargs or {}))

    step = loop.Loop.step

    def watched(self, batches):
        with Reading():
            return step(self, batches)

    monkeypatch.setattr(loop.Loop, "step", watched)
    assert run(tmp_path / "watched", **{"stage1.max_steps": 4}) == 0
    assert len(reads) > 100
    assert not any(reads)


def test_overwriting_a_link_replaces_the_linked_folder(unfinished, run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(unfinished)
    (unfinished / "generated").mkdir()
    marker = unfinished / "stage1" / "checkpoint-4" / "marker"
    marker.touch()
    assert run(link, "--overwrite_output_dir", **{"stage1.max_steps": 4}) == 0
    assert link.is_symlink()
    assert not marker.exists()
    assert not (unfinished / "generated").exists()
    assert yaml.safe_load((unfinished / "config.yaml").read_text())["settings"]["stage1"]["max_steps"] == 4


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"settings", b"settings: 3", b"a: &a [*a]", b"settings: {}\nsettings: {}", b"", None]
)
def test_a_damaged_record_fails_in_one_line(tmp_path, content):
    if content is None:
        os.mkfifo(tmp_path / "config.yaml")
    else:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError, match=r"was not written by train\.py, or is damaged"):
        check_same_run(tmp_path, parse([]), 1)


def test_a_folder_with_a_foreign_config_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("settings:\n  theme: dark\n")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"was not written by train\.py"):
        check_same_run(tmp_path, parse(["--overwrite_output_dir"]), 1)


def test_a_folder_whose_record_was_being_written_is_free(tmp_path):
    (tmp_path / "config.yaml.123.partial").write_text("sett")
    check_same_run(tmp_path, parse([]), 1)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="holds no run"):
        check_same_run(tmp_path, parse([]), 1)


def test_one_process_uses_one_gpu_of_several(monkeypatch, capsys):
    monkeypatch.setattr("train.processes.has_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    processes.log_unused_gpus(PartialState())
    said = capsys.readouterr().err
    assert said.startswith("4 GPUs are visible, one process uses one; `accelerate launch --multi_gpu --num_processes 4")
    assert said.count("\n") == 1


def test_batches_do_not_depend_on_the_number_of_loaders(tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[7 * i + j for j in range(3 + i % 4)] for i in range(40)]})
    rows.save_to_disk(str(tmp_path / "rows"))
    rows = datasets.load_from_disk(str(tmp_path / "rows"))

    def batches(workers: int) -> list[dict]:
        loader = torch.utils.data.DataLoader(rows, 8, collate_fn=Collator(tiny_head(2).config), num_workers=workers)
        plain = [vars(batch.pop("on_host")) | batch for batch in loader]
        return [{name: values.tolist() for name, values in batch.items()} for batch in plain]

    assert batches(2) == batches(0)


def test_rows_without_marks_of_rejected_drafts_have_the_fingerprint_of_those_with_none():
    """Such a column of zeros is what the rows of begun runs have."""
    columns = {"input_ids": [[5, 6, 7], [8, 9]], "document_ids": [[0, 0, 1], [0, 0]], "loss_mask": [[0, 1, 1], [1, 1]]}
    for more in ({}, {"rejected": [[0, 0, 0], [0, 0]]}):
        kinds = datasets.Features(dict.fromkeys(columns | more, datasets.List(datasets.Value("int32"))))
        assert rows_fingerprint(datasets.Dataset.from_dict(columns | more, features=kinds)) == "b76d6fe10fd8d730"
    columns["loss_mask"][0][1] = 0
    kinds = datasets.Features(dict.fromkeys(columns, datasets.List(datasets.Value("int32"))))
    assert rows_fingerprint(datasets.Dataset.from_dict(columns, features=kinds)) != "b76d6fe10fd8d730"
