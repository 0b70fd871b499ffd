"""How a run is started on several GPUs and machines, and what is seen when one of its processes ends."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from data import batches
from speculator.errors import UserError
from speculator.files import manifest_error
from train import checkpoint, interrupts, processes, stages

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "accelerate"


def launched(*flags: str):
    """What `accelerate launch` makes of its flags and the config file."""
    return _validate_launch_command(launch_command_parser().parse_args([*flags, "train.py"]))[0]


@pytest.mark.parametrize(("name", "machines", "count"), [("single", 1, 1), ("ddp", 1, 8), ("two_nodes", 2, 16)])
def test_accelerate_reads_every_launch_config(name, machines, count):
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"single", "ddp", "two_nodes"}
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.num_machines, config.num_processes) == (machines, count)
    assert config.mixed_precision == "no"  # the recipe's `bf16` decides


def test_the_second_of_two_machines_finds_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    file = str(CONFIGS / "two_nodes.yaml")
    given = launched("--config_file", file, "--main_process_ip", "10.0.0.7", "--machine_rank", "1")
    prepare_multi_gpu_env(given)
    assert (given.node_rank, given.nnodes, given.nproc_per_node) == (1, "2", "8")
    assert (given.rdzv_endpoint, given.rdzv_backend) == ("10.0.0.7:29500", "static")


def test_the_slurm_script_starts_a_launcher_on_each_node(tmp_path):
    """Run by bash, with stand-ins for what SLURM has: each task's launcher gets its node's number and the flags."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\nseq 100000\n")  # more than a pipe holds
    each = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    (tmp_path / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n' + each + "\n")
    (tmp_path / "accelerate").write_text('#!/bin/sh\necho "$@"\n')
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "20011"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["bash", str(CONFIGS / "slurm.sh"), "--seed", "1 2"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--kill-on-bad-exit=1" in (CONFIGS / "slurm.sh").read_text()
    for node, line in enumerate(done.stdout.splitlines()):
        before, after = line.split(" train.py ")
        given = launched(*before.split()[1:])
        assert (given.machine_rank, given.num_machines, given.num_processes) == (node, 2, 8)
        assert (given.main_process_ip, given.main_process_port) == ("node7", 20011)
        assert after == "--seed 1 2"
    assert node == 1


def test_the_slurm_script_saves_and_queues_again_before_its_time_is_over(tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said; echo node7\n')
    saving = f"trap 'sleep 0.2; echo saved >> {tmp_path}/said; exit 143' TERM"
    asked = "sleep 1; kill -USR1 $PPID; sleep 20 > /dev/null 2>&1 & wait"  # the script listens by then
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{saving}\n{asked}\n")
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node7", "SLURM_NNODES": "1", "SLURM_JOB_ID": "20011"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(CONFIGS / "slurm.sh")], env=environment, cwd=ROOT, timeout=15, capture_output=True)
    assert (tmp_path / "said").read_text().splitlines() == ["show hostnames node7", "saved", "requeue 20011"]


def test_a_process_does_as_the_first_one_says_whatever_it_sees_of_the_disk(tmp_path, monkeypatch):
    """Ranks that resume from different steps would train on, without an error."""
    monkeypatch.setattr(processes, "PartialState", lambda: SimpleNamespace(is_main_process=False))
    for said in (True, False):
        monkeypatch.setattr(processes, "broadcast_object_list", lambda _, said=said: [said])
        assert stages.is_published(tmp_path / "not here") is said
    assert processes.of_first(lambda: pytest.fail("asked here")) is False


def test_the_process_group_has_the_documented_timeout(monkeypatch):
    given = {}
    monkeypatch.setattr(batches, "PartialState", lambda **kwargs: given.update(kwargs))
    processes.join()
    assert given["timeout"] == processes.TIMEOUT


def test_a_group_that_no_launcher_made_is_named(monkeypatch):
    """Variables that a shell left over: accelerate finds no address of the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(batches, "PartialState", MagicMock(side_effect=ValueError("`MASTER_ADDR` was not set\nsee")))
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2, but `MASTER_ADDR` was not set; unset RANK and WORLD_SIZE"):
        processes.join()


@pytest.mark.parametrize(
    "variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"]
)
def test_launchers_that_shard_the_head_are_refused(monkeypatch, variable):
    monkeypatch.setattr(batches, "PartialState", lambda **_: None)
    monkeypatch.setenv(variable, "false")
    processes.join()
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UserError, match=r"configs/accelerate; a target in shards is --target\.parallel"):
        processes.join()


def test_the_recipe_decides_the_precision_and_accelerate_compiles_nothing(monkeypatch):
    """As with a default_config.yaml of the user that has mixed_precision and dynamo_config."""
    monkeypatch.setattr(batches, "PartialState", lambda **_: None)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    processes.join()
    assert Accelerator(cpu=True).mixed_precision == "no"
    assert TorchDynamoPlugin().backend == "NO"


LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7777")


@pytest.mark.parametrize(
    ("error", "local_rank", "waits", "said"),
    [
        (UserError("no room"), "0", None, "no room"),
        (UserError("no room"), "1", 10, "no room"),
        (LOST, "0", 10, "lost the connection to another"),
        (LOST, "1", 20, "lost the connection to another"),
        (RuntimeError("a defect"), "0", None, "a defect"),
    ],
)
def test_only_the_process_that_caused_the_end_prints_it_at_once(monkeypatch, error, local_rank, waits, said):
    waited = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(interrupts, "wait_for_end", waited.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises((UserError, RuntimeError), match=said), processes.one_process_reports():
        raise error
    assert waited == ([] if waits is None else [waits])


# Two processes

SETTINGS = {
    "data.seq_length": 64,
    "data.max_tokens": 40_000,
    "speculator.n_predict": 3,
    "stage1.max_steps": 10_000,
    "stage1.per_device_train_batch_size": 4,
    "stage1.eval_steps": 10,
    "stage1.save_steps": 10,
    "stage2.max_steps": 0,
    "eval.validation_rows": 8,
    "eval.validation_prompts": 2,
    "eval.prompt_tokens": 16,
    "eval.max_new_tokens": 12,
    "eval.tune_prompts": 0,
    "report_to": "none",
}


@pytest.fixture
def launch(target_folder, text_file, tmp_path):
    """A run on two processes that has a checkpoint: (machines) -> launchers, process ids by rank, the folder."""
    folder, launchers = tmp_path / "run", []
    given = {
        **SETTINGS,
        "output_dir": folder,
        "config": ROOT / "tests/plain.yaml",
        "target.name_or_path": target_folder,
        "data.sources": f"[{text_file}]",
    }
    command = ["train.py", *(f"--{name}={value}" for name, value in given.items())]
    options = {"env": {**os.environ, "SPECULATOR_CACHE": str(tmp_path / "cache")}, "text": True, "cwd": ROOT}
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(machines: int) -> tuple[list[subprocess.Popen], dict[int, int], Path]:
        for machine in range(machines):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines)]
            launcher += ["--nproc_per_node", str(2 // machines), "--node_rank", str(machine)]
            launcher += ["--rdzv-endpoint", endpoint, "--rdzv-backend", "static"]
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            launchers.append(subprocess.Popen([*launcher, *command], **streams, **options))
        deadline = time.monotonic() + 240
        while not checkpoint.newest(folder / "stage1")[0]:
            if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
                launchers[0].kill()
                pytest.fail(launchers[0].communicate()[1])
            time.sleep(0.1)
        return launchers, {rank: pid for each in launchers for rank, pid in ranks_of(each.pid).items()}, folder

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's processes."""
    found = {}
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in children.read_text().split():
            words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
    return found


def ended(launchers: list[subprocess.Popen], ranks: dict[int, int]) -> list[str]:
    """Wait for the end, for a minute at most; gives what each launcher's stderr had."""
    deadline = time.monotonic() + 60
    texts = [launcher.communicate(timeout=deadline - time.monotonic())[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1] * len(launchers)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert not any('train.py", line' in said for said in texts), texts  # no traceback but the launcher's
    return texts


def cause(said: str) -> str:
    """What a launcher's report names as the first failure."""
    assert said.count("Root Cause") == 1, said
    return " ".join(said.partition("Root Cause")[2].split())


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others_and_is_named(launch, rank):
    launchers, ranks, folder = launch(1)
    os.kill(ranks[rank], signal.SIGKILL)
    (said,) = ended(launchers, ranks)
    assert f"rank : {rank} (local_rank: {rank})" in cause(said)
    assert "Signal 9 (SIGKILL)" in cause(said)
    assert "train.py: " not in said, said
    assert checkpoint.newest(folder / "stage1")[0] is not None


@pytest.mark.soak
def test_a_process_killed_on_another_machine_ends_those_of_this_one(launch):
    launchers, ranks, _ = launch(2)
    os.kill(ranks[1], signal.SIGKILL)
    here, there = ended(launchers, ranks)
    assert here.count("train.py: rank 0 lost the connection to another") == 1, here
    assert "rank : 1 (local_rank: 0)" in cause(there)
    assert "Signal 9 (SIGKILL)" in cause(there)


@pytest.mark.soak
def test_a_full_disk_of_the_process_that_writes_fails_in_one_line_and_checkpoints_stay_valid(launch):
    launchers, ranks, folder = launch(1)
    resource.prlimit(ranks[0], resource.RLIMIT_FSIZE, (1000, 1000))
    (said,) = ended(launchers, ranks)
    assert said.count("train.py: ") == 1, said
    assert f"train.py: can't write {folder}/stage1/checkpoint-" in said
    assert "rank : 0 (local_rank: 0) exitcode : 2" in cause(said)
    newest, _ = checkpoint.newest(folder / "stage1")
    assert newest is not None
    assert manifest_error(newest) is None
