"""Trackers get the figures of a report; wandb also the plots, in a new run or in the current one."""

import json
import shutil
import sqlite3
import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import measured, tiny_head, tiny_model

from eval import tracking
from eval.suites import Suite
from speculator import Target, UserError
from speculator.report import read_report

wandb = pytest.importorskip("wandb")
Run = pytest.importorskip("wandb.sdk.wandb_run").Run  # older releases have no `wandb.Run`
SUITE = Suite("text", [[1, 2, 3, 4], [5, 6, 7, 8]])


def report_of(folder):
    options = {"temperatures": [0.0], "max_new_tokens": 16, "speculator_name": "test"}
    return measured(Target(tiny_model(), tokenizer=None), tiny_head(), [SUITE], folder, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report, and a folder with its files."""
    folder = tmp_path_factory.mktemp("report")
    return report_of(folder), folder


def test_an_offline_run_holds_figures_and_plots(made, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: dict = {}
    (report, folder), log = made, Run.log
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert not (tmp_path / "wandb").exists()
    monkeypatch.setattr(Run, "log", lambda run, values: (logged.update(values), log(run, values)))
    tracking.send(read_report(tmp_path / "report.json"), tmp_path, "wandb")
    assert wandb.run is None
    row = next(row for row in report["suites"] if row["drafter"] == "head")
    assert logged["eval/text T=0/head 3/acceptance_length"] == row["acceptance_length"]
    assert logged["eval/text T=0/head 3/speedup over plain"] == row["speedup"]["plain"]["value"]
    plots = {name for name, value in logged.items() if isinstance(value, wandb.Image)}
    assert plots == {"eval/acceptance", "eval/speed", "eval/lengths"}
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    assert json.loads((tmp_path / "report.json").read_text()) == report


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "mlflow"])
def test_other_trackers_write_the_figures_to_local_files(made, tmp_path, monkeypatch, name):
    """With the package, its files are read back; without it, accelerate's tracker is a stand-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    found: dict = {}
    if not find_spec(name):
        stub = MagicMock()
        stub.return_value.log.side_effect = found.update
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, stub)
    report, folder = made
    shutil.copytree(folder, tmp_path / "report")
    tracking.send(read_report(folder / "report.json"), tmp_path / "report", name)
    if not find_spec(name):
        assert [call[0] for call in stub.return_value.method_calls] == ["start", "log", "finish"]
    elif name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "report" / tracking.PROJECT)).Reload()
        found = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    elif name == "trackio":
        rows = sqlite3.connect(tmp_path / "trackio" / f"{tracking.PROJECT}.db").execute("SELECT metrics FROM metrics")
        found = {key: value for (metrics,) in rows for key, value in json.loads(metrics).items()}
    else:
        import mlflow

        experiment = mlflow.get_experiment_by_name(tracking.PROJECT)
        (run,) = mlflow.search_runs([experiment.experiment_id], output_format="list")
        assert run.info.run_name == "report"
        found = run.data.metrics
    row = next(row for row in report["suites"] if row["drafter"] == "head")
    assert found["eval/text T_0/head 3/acceptance_length"] == pytest.approx(row["acceptance_length"])


def test_the_current_run_gets_the_report(tmp_path, monkeypatch):
    logged = {}
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True)) as run:
        monkeypatch.setattr(wandb, "log", logged.update)
        report_of(tmp_path)
        assert wandb.run is run
    assert "eval/text T=0/head 3/acceptance_length" in logged


def test_a_missing_package_raises_at_once(monkeypatch, tmp_path):
    for name in ("wandb", "mlflow"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # folders of these names, which trackers leave, are no packages
    for name in [each for each in sys.modules if each.partition(".")[0] in ("wandb", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)
    tracking.check("none")
    for name in ("wandb", "mlflow"):
        with pytest.raises(UserError, match=f"pip install {name}"):
            tracking.check(name)


def test_nothing_is_uploaded_unless_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracking.start(tmp_path)
    tracking.stop()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"wandb sync {run}" in line
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **facts: given.update(facts))
    for name, value, mode in (("WANDB_MODE", "online", "online"), ("WANDB_DISABLED", "true", "disabled")):
        monkeypatch.setenv(name, value)
        tracking.start(tmp_path)
        assert given["mode"] == mode


def test_a_server_that_does_not_answer_fails_in_one_line(tmp_path, monkeypatch):
    def init(**_):
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match="wandb: no route to host"):
        tracking.start(tmp_path)
