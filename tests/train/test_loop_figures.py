"""What the loop reports about the loss, and what it needs of a target."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.data_loader import DataLoaderShard
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from conftest import VOCAB, settled, tiny_block_head, tiny_head, tiny_model
from datasets import Dataset

from eval.suites import Suite
from speculator import Target, UserError
from speculator.checkpoints.loading import bind
from speculator.target.base import TrainingTarget
from train import stages
from train.door.plan import Plan
from train.door.sizes import with_steps
from train.loop import Loop
from train.options.config import LossConfig, RunConfig, StageConfig
from train.progress import Display, Stopwatch
from train.stages import filled
from train.states.batch import Collator, StageRows, StateSource
from train.text.inputs import Inputs


@pytest.mark.parametrize("d_pace", [1.0, 0.5], ids=["plain", "d_pace"])
def test_an_evaluation_of_the_training_rows_reports_the_loss_of_the_first_training_step(tmp_path, d_pace):
    """A DSpark head: its loss has a confidence part, and its later positions have fewer labels."""
    target = Target(tiny_model(), tokenizer=None)
    head = tiny_block_head(target, n_predict=3, anchors=8, aux_layers=[0], num_hidden_layers=1).float()
    rows = [{"input_ids": [(7 * i + j) % 32 for j in range(9 + i)], "loss_mask": [0] * i + [1] * 9} for i in range(4)]
    stage = StageConfig(max_steps=1, learning_rate=0.0, logging_steps=1, per_device_train_batch_size=4)
    weights = LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8, head_decay=0.7, d_pace=d_pace)
    rows = StageRows(rows, Collator(head.config), validation=rows, evaluation_batch=2)
    loop = Loop(head, StateSource(target, head.aux_layers), stage, weights, rows, tmp_path)
    (trained, evaluated) = loop.run().log_history
    assert evaluated["eval_loss"] == pytest.approx(trained["loss"], rel=1e-3)


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "dspark"])
def test_rows_that_fill_a_batch_do_not_count(tmp_path: Path, architecture: str):
    target = Target(tiny_model(), tokenizer=None)
    head = tiny_block_head(target) if architecture == "dspark" else bind(tiny_head(architecture=architecture), target)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (3, 20), generator=generator).tolist()
    rows = Dataset.from_list([{"input_ids": row, "loss_mask": [1] * 20} for row in tokens])

    def figures(batch: int, evaluated: Dataset) -> dict[str, float]:
        given = StageRows(rows, Collator(head.config), validation=evaluated, evaluation_batch=batch)
        loop = Loop(head, StateSource(target, head.aux_layers), StageConfig(), LossConfig(), given, tmp_path)
        return {name: value for name, value in loop.evaluate().items() if name != "eval_runtime"}

    alone = figures(1, rows)
    for batch, size in ((1, 4), (2, 4), (2, 8)):  # with 8, one batch has no row of the set
        assert len(filled(rows, size)) == size
        assert figures(batch, filled(rows, size)) == pytest.approx(alone, rel=1e-5)
    # Tokens without loss after the row add no label: every token of an answer is a label of all steps that reach it.
    longer = [{"input_ids": row + [0] * 3, "loss_mask": [1] * 20 + [0] * 3} for row in tokens]
    assert figures(1, Dataset.from_list(longer)) == pytest.approx(alone, rel=1e-5)


def test_batches_on_a_gpu_have_few_lengths_and_none_beyond_the_longest_row():
    collate = Collator(tiny_head().config, multiple=8, longest=20)
    rows = [{"input_ids": [1] * length} for length in (9, 16, 17, 20)]
    assert [collate([row])["input_ids"].shape[1] for row in rows] == [16, 16, 20, 20]


@pytest.fixture
def loop(target, tmp_path):
    """Before its first step."""
    head, rows = tiny_head().train(), [{"input_ids": [1 + i, 2, 3, 4, 5, 6, 7]} for i in range(4)]
    stage = StageConfig(max_steps=2, per_device_train_batch_size=2, logging_steps=9)
    return Loop(head, StateSource(target, ()), stage, LossConfig(), StageRows(rows, Collator(head.config)), tmp_path)


def test_a_weight_that_is_not_a_number_is_found_behind_others(loop):
    with torch.no_grad():
        list(loop.head.parameters())[-1][0] = torch.nan
    with pytest.raises(UserError, match="a weight became nan"):
        loop.save()


def test_a_process_whose_own_loss_is_finite_raises_with_the_others(loop, monkeypatch):
    nan = torch.tensor(torch.nan)
    monkeypatch.setattr(loop.accelerator, "reduce", lambda *_: {"objective": (nan, nan)})
    with pytest.raises(UserError, match="the loss became nan"):
        loop.save()


def test_a_step_begins_before_its_batches_are_read(loop, monkeypatch):
    """So that a loader that starves shows in the tokens per second."""
    done = []

    def read(batches):
        for batch in batches:
            done.append("read")
            yield batch

    monkeypatch.setattr(loop.source, "over", read)
    monkeypatch.setattr(
        Stopwatch, "__enter__", lambda watch: done.append("clock") if watch is loop.clock.steps else None
    )
    monkeypatch.setattr(loop, "step", lambda batches: None)
    loop.run()
    assert done == ["clock", "read", "clock", "read"]


def test_an_epoch_reads_all_rows_once_in_an_order_of_its_own(loop, monkeypatch):
    """Also with accelerate before 1.15, whose loaders begin at epoch 0 after `skip_first_batches`."""
    read: list[int] = []
    made = DataLoaderShard.__init__
    monkeypatch.setattr(DataLoaderShard, "__init__", lambda *args, iteration=0, **names: made(*args, **names))
    loop.stage = replace(loop.stage, max_steps=6)
    monkeypatch.setattr(loop, "step", lambda batches: read.extend(batches[0]["input_ids"][:, 0].tolist()))
    loop.run()
    epochs = [read[:4], read[4:8], read[8:]]
    assert [sorted(epoch) for epoch in epochs] == [[1, 2, 3, 4]] * 3
    assert epochs[0] != epochs[1]


def test_a_process_beyond_those_of_a_checkpoint_takes_the_generator_of_one_of_them(loop, monkeypatch):
    torch.rand(3)
    saved = torch.get_rng_state()
    loop.save()
    loop.checkpoints.wait()
    torch.manual_seed(0)
    monkeypatch.setattr(Accelerator, "process_index", 2)
    loop.resume(loop.folder / "checkpoint-0", loop.progress)
    assert torch.equal(torch.get_rng_state(), saved)


class Kept(GeneralTracker):
    """A tracker that keeps what it gets."""

    name, requires_logging_directory = "kept", False

    def __init__(self):
        self.kept = []
        super().__init__()

    tracker = property(lambda self: None)

    def log(self, values, step=None, **_):
        self.kept.append((step, values))


def test_trackers_get_the_log_by_kind_at_the_steps_of_the_training(target, tmp_path):
    rows, head, kept = [{"input_ids": [1 + i, 2, 3, 4, 5, 6, 7]} for i in range(4)], tiny_head(), Kept()
    display = Display(accelerator=Accelerator(cpu=True, log_with=kept))
    display.accelerator.init_trackers("speculator")
    stage = StageConfig(max_steps=4, per_device_train_batch_size=2, logging_steps=2, eval_steps=4)
    rows = StageRows(rows, Collator(head.config), validation=rows[:2])
    Loop(head, StateSource(target, ()), stage, LossConfig(), rows, tmp_path, display=display).run()
    assert [step for step, _ in kept.kept] == [2, 4, 4]
    assert {"train/loss", "train/position0/accuracy", "train/learning_rate", "train/epoch"} <= kept.kept[0][1].keys()
    assert {"eval/loss", "eval/forecast_acceptance_length"} <= kept.kept[2][1].keys()


@pytest.mark.parametrize("kind", ["tensorboard", "trackio", "mlflow"])
def test_a_stage_begins_a_run_of_the_tracker(target, tmp_path, monkeypatch, kind):
    """accelerate's tracker is a stand-in."""
    made = MagicMock(requires_logging_directory=kind == "tensorboard")
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, kind, made)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType(kind)])
    run = settled(RunConfig(output_dir=str(tmp_path / "run"), report_to=kind), target)
    settings = {"stage1": {"max_steps": 9, "epochs": None}, "date": "today"}
    stages.tracker(run, "stage1", settings).log({"loss": 1.0}, step=5)
    (arguments,) = made.call_args_list
    where = {"tensorboard": call("speculator", tmp_path / "run" / "stage1" / "runs")}
    names = {"trackio": {"name": "run stage1", "resume": "allow"}, "mlflow": {"run_name": "run stage1"}}
    assert arguments == where.get(kind, call("speculator", **names.get(kind, {})))
    assert [each[0] for each in made.return_value.method_calls] == ["start", "store_init_configuration", "log"]
    made.return_value.store_init_configuration.assert_called_once_with({"stage1.max_steps": 9})


class Elsewhere(TrainingTarget):
    """Has the members of the interface alone, computed by another target."""

    device, dtype, generation_config = torch.device("cpu"), torch.float32, None

    def __init__(self, inner: Target):
        self._inner, self.name, self.config, self.tokenizer = inner, inner.name, inner.config, None
        self.fingerprint, self.context_length = inner.fingerprint, inner.context_length

    def training_states(self, tokens, documents, aux_layers):
        return self._inner.training_states(tokens, documents, aux_layers)

    def logits(self, hidden):
        return self._inner.logits(hidden)

    def embedding_matrix(self):
        return self._inner.embedding_matrix()

    def output_layer(self):
        return self._inner.output_layer()

    def check_aux_layers(self, wanted):
        self._inner.check_aux_layers(wanted)


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "dspark"])
def test_a_target_that_only_gives_states_trains_the_same_head(tmp_path, architecture):
    inner, trained = Target(tiny_model(), tokenizer=None), []
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": row} for row in torch.randint(32, (8, 20), generator=generator).tolist()]
    for target in (inner, Elsewhere(inner)):
        torch.manual_seed(0)
        head = tiny_block_head(inner).float() if architecture == "dspark" else tiny_head(architecture=architecture)
        head, stage = bind(head, target), StageConfig(max_steps=2, learning_rate=1e-2)
        source, batches = StateSource(target, head.aux_layers), StageRows(rows, Collator(head.config))
        Loop(head, source, stage, LossConfig(), batches, tmp_path).run()
        trained.append([weight.detach().clone() for weight in head.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


@pytest.mark.parametrize("epochs", [1.0, 50.0])
def test_a_warm_up_longer_than_its_epochs_is_a_warning(target, tmp_path, epochs, monkeypatch, capsys):
    class Begun(BaseException):
        """Training would begin here."""

    def begin(*_, **__):
        raise Begun

    rows = Dataset.from_list([{"input_ids": [*range(8)], "loss_mask": [1] * 8}] * 2)
    settings = with_steps(StageConfig(max_steps=7, epochs=epochs, warmup_steps=50), len(rows), 1, 16)
    monkeypatch.setattr(stages, "Loop", begin)
    run = settled(RunConfig(output_dir=str(tmp_path), report_to="none", stage1=settings), target)
    inputs = Inputs(
        run=run,
        length=8,
        train_rows=rows,
        validation_rows=rows,
        suites={"validation": Suite("text", [[1, 2]])},
        own_prompts=None,
        plan=Plan(run),
    )
    with pytest.raises(Begun):
        stages.train_stage("stage1", target, tiny_head, inputs, str)
    assert ("stage1.warmup_steps (50) exceeds the 2 steps" in capsys.readouterr().err) == (epochs == 1)
