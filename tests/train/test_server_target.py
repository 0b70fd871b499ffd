"""Training with a target that servers run: the same losses and gradients, and what happens when a server fails."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from itertools import islice, pairwise

import pytest
import torch
from checkpoint_folders import edit
from conftest import CONFIGS, DFLASH2, save_tiny, tiny_block_head
from datasets import load_from_disk
from hidden_state_server import StandIn
from server_training import STEPS, apart, trained
from transformers import AutoModelForCausalLM, BloomConfig

from speculator import Target, UserError
from speculator.checkpoints.loading import bind
from speculator.clients import hidden_states as hidden_state_servers
from speculator.files import read_json
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig, MLPSpeculator, MLPSpeculatorConfig
from speculator.target.remote.server_target import ServerTarget
from train import run, server_command
from train.command_line import parse
from train.states.batch import DOCUMENTS, Documents
from train.states.sources import LookAhead

LENGTH = 24
AUX = {"mlp": [], "eagle3": [0, 1], "dspark": [0, 1], "dflash2": [0, 1]}
SERVED = [family for family in CONFIGS if family not in ("gemma3n", "gemma4", "gpt2", "gpt_neox")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("qwen2", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def local(folder) -> Target:
    return Target.load(str(folder), device="cpu")


@pytest.fixture
def serve(local, tmp_path, monkeypatch):
    """`serve(layers, ...)` starts a stand-in; all end with the test, which must leave no file."""
    monkeypatch.setattr(hidden_state_servers, "_PAUSES", (0.02, 0.1))
    started = []

    def start(layers, target=None, **how) -> StandIn:
        started.append(StandIn(target or local, tmp_path / "states", layers, **how))
        return started[-1]

    yield start
    for server in started:
        server.die()
    assert not [file for file in (tmp_path / "states").rglob("*") if file.is_file()]


def connected(folder, servers: list[StandIn], aux_layers) -> ServerTarget:
    target = ServerTarget.connect(str(folder), [server.url for server in servers], device="cpu")
    target.check(aux_layers, LENGTH)
    return target


def head_of(kind: str, target: Target):
    torch.manual_seed(0)
    if kind in ("dspark", "dflash2"):
        shape = {"aux_layers": AUX[kind], "mask_token_id": 1, **(DFLASH2 if kind == "dflash2" else {})}
        return tiny_block_head(target, **shape).float().train().requires_grad_(True)
    config_class, head_class = {
        "eagle3": (Eagle3SpeculatorConfig, Eagle3Speculator),
        "mlp": (MLPSpeculatorConfig, MLPSpeculator),
    }[kind]
    shape = {"n_predict": 3, "inner_dim": 32, **({"aux_layers": AUX[kind]} if AUX[kind] else {})}
    return bind(head_class(config_class.for_target(target.config, **shape)), target)


def rows() -> list[dict]:
    """Rows of two documents and of several lengths."""
    made = []
    for i in range(8):
        length, cut = LENGTH - i, 5 + i
        tokens = [(11 * i + 7 * j) % 300 for j in range(length)]
        made.append({"input_ids": tokens, "document_ids": [0] * cut + [1] * (length - cut)})
    return made


@pytest.mark.parametrize(
    "kind", ["eagle3", "dspark", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("mlp", "dflash2"))]
)
def test_ten_steps_with_servers_are_those_of_the_target_here(kind, folder, local, serve, tmp_path):
    """One server is slow; the other dies at step 3 and is back at step 6."""
    expected, gradients, _ = trained(local, head_of(kind, local), rows(), tmp_path / "local")
    layers = [*AUX[kind], local.config.num_hidden_layers]
    slow, mortal = serve(layers, delay=0.02), serve(layers)
    target = connected(folder, [slow, mortal], AUX[kind])
    port = mortal.server_port
    at = {3: mortal.die, 6: lambda: serve(layers, port=port)}
    losses, found, log = trained(target, head_of(kind, target), rows(), tmp_path / "servers", at)
    target.close()
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(found) == STEPS
    assert apart(found, gradients) < 1e-3
    assert all(0 <= entry["waiting_for_servers"] <= 1 for entry in log if "loss" in entry)
    assert mortal.asked < slow.asked + 40


@pytest.mark.parametrize("family", SERVED)
def test_norm_and_output_are_those_of_the_whole_model(family, tmp_path):
    folder = save_tiny(family, tmp_path)
    whole, served = Target.load(str(folder), device="cpu"), ServerTarget.connect(str(folder), [], device="cpu")
    seen = []
    norm = next(part for name, part in whole.model.get_decoder().named_children() if "norm" in name)
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hidden = whole.hidden(torch.arange(12)[None])
    assert torch.equal(served.norm(seen[0]), hidden)
    torch.testing.assert_close(served.logits(hidden), whole.logits(hidden))
    assert served.fingerprint == whole.fingerprint
    assert served.eos_token_ids == whole.eos_token_ids
    assert sum(weight.numel() for weight in served.model.parameters()) <= 2 * 300 * 32 + 64


def test_a_model_that_only_its_config_ties_is_the_same_with_servers(tmp_path, capsys):
    folder = save_tiny("llama", tmp_path)
    edit(folder, lambda config: config.update(tie_word_embeddings=True))
    whole, served = Target.load(str(folder), device="cpu"), ServerTarget.connect(str(folder), [], device="cpu")
    assert served.fingerprint == whole.fingerprint
    assert capsys.readouterr().err.count("vLLM uses the embedding alone") == 2


def test_a_model_with_more_around_its_layers_is_refused(tmp_path):
    with pytest.raises(UserError, match="has more around its layers"):
        ServerTarget.connect(str(save_tiny("gemma3n", tmp_path)), [], device="cpu")


FAULTS = {
    "connector": ({"fault": "connector"}, "its answers name no file of hidden states"),
    "nothing": ({"fault": "nothing"}, "an answer without token_ids and logprobs"),
    "cut": ({"fault": "cut"}, "is missing or cut short"),
    "full": ({"fault": "full"}, "is missing or cut short"),
    "dtype": ({"dtype": torch.bfloat16}, "holds bfloat16, and target.dtype is float32"),
    "layers": ({"layers": [0, 2]}, "it writes layers-0-2, and the head needs layers-0-1-2"),
    "model": ({"other": True}, "serves another model, or other layers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_server_fails_in_one_line_before_training(name, folder, serve, tmp_path, local):
    how, line = FAULTS[name]
    how = dict(how)
    other = None
    if how.pop("other", False):
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.lm_head.weight.data.mul_(20)
        other = Target(model, None)
    server = serve(how.pop("layers", [0, 1, 2]), target=other, **how)
    with pytest.raises(UserError, match=line) as error:
        connected(folder, [server], [0, 1])
    assert "\n" not in str(error.value)


def test_a_full_disk_fails_in_one_line(folder, serve, monkeypatch):
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(hidden_state_servers.shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"need 0.00 GB, and .* has 0.00 free"):
        connected(folder, [serve([0, 1, 2])], [0, 1])


def test_what_a_killed_trainer_left_is_deleted(folder, serve):
    server = serve([2])
    server.folder.mkdir(parents=True)
    old = server.folder / "cmpl-speculator-0-0.safetensors"
    old.touch()
    os.utime(old, (0, 0))
    connected(folder, [server], []).close()
    assert not old.exists()


def test_what_a_killed_server_left_is_deleted_at_once(folder, serve):
    server = serve([2])
    target = connected(folder, [server], [])
    server.fault = "half"
    target.begin([[[1, 2, 3]]], 3).result()
    assert not server.fault
    assert not list(server.folder.iterdir())
    target.close()


def test_no_server_for_too_long_fails_in_one_line(folder, serve, monkeypatch):
    server = serve([2])
    target = connected(folder, [server], [])
    monkeypatch.setattr(hidden_state_servers, "_PATIENCE", 0.3)
    server.die()
    with pytest.raises(UserError, match=r"no server has answered for .* s; the same command resumes"):
        target.begin([[[1, 2, 3]]], 3).result()
    target.close()


def test_the_disk_holds_no_more_than_its_part(folder, serve, monkeypatch):
    """Of eight documents two fit at a time."""
    server = serve([2], delay=0.01)
    target = connected(folder, [server], [])
    monkeypatch.setattr(target.servers, "_budget", 2 * target.servers.expected.size(LENGTH))
    server.most = 0
    hidden, _ = target.begin([[[*range(LENGTH)]] for _ in range(8)], LENGTH).result()
    assert hidden.shape == (8, LENGTH, 32)
    assert 1 <= server.most <= 2
    target.close()


class Counting:
    """A target whose answers are there at once; it counts the batches whose states are asked for and not yet used."""

    held = most = 0
    seconds = 9.0  # as if the head trained on many batches meanwhile

    def begin(self, documents, length):
        self.held += 1
        self.most = max(self.most, self.held)
        return self

    def result(self):
        self.held -= 1
        return torch.zeros(1), torch.zeros(1)


def test_states_are_held_for_eight_batches_ahead_however_many_make_a_step():
    target = Counting()
    look_ahead = LookAhead(target)
    batch = {"input_ids": torch.zeros(1, 4), DOCUMENTS: Documents([{"input_ids": [1, 2, 3, 4]}])}
    batches = look_ahead.over([batch] * 96)
    for _ in range(3):  # optimiser steps of 32 micro-batches, which the loop reads at once
        for each in list(islice(batches, 32)):
            look_ahead.take(dict(each))
    assert next(batches, None) is None
    assert target.held == 0
    assert target.most == 9, "the one in use, and eight ahead"


def test_rows_leave_room_for_the_token_that_a_server_generates(local, capsys):
    context = local.context_length
    flags = ["--config", "tests/plain.yaml", "--target.name_or_path", local.name, "--stage2.max_steps", "0"]
    flags += ["--target.server", "http://localhost:1", "--eval.max_new_tokens", "16", "--data.seq_length"]
    assert server_command.main([*flags, str(context)]) == 2
    assert f"data.seq_length is {context}, but servers read texts of at most {context - 1}" in capsys.readouterr().err
    assert server_command.main([*flags, "0"]) == 0
    assert f"--max-model-len {context} " in capsys.readouterr().out


RUN = {
    "data.seq_length": LENGTH,
    "data.max_tokens": 4000,
    "eval.validation_rows": 4,
    "eval.validation_prompts": 2,
    "eval.prompt_tokens": 8,
    "eval.max_prompts": 2,
    "eval.max_new_tokens": 8,
    "stage2.generate.max_rows": 12,
    "stage2.generate.prompt_tokens": 8,
    "stage2.generate.max_new_tokens": 12,
    "speculator.n_predict": 2,
    "report_to": "none",
} | {
    f"{stage}.{name}": value
    for stage in ("stage1", "stage2")
    for name, value in {"max_steps": 4, "per_device_train_batch_size": 4, "warmup_steps": 1, "eval_steps": 2}.items()
}


def test_a_run_trains_both_stages_and_says_how_to_serve_the_head(serve, tmp_path, monkeypatch, capfd, text_file, local):
    """Text and hidden states come from the server; the forecast selects the checkpoint; the same command resumes."""
    server = serve([local.config.num_hidden_layers])
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    flags = {**RUN, "config": "tests/plain.yaml", "target.name_or_path": local.name, "data.sources": f"[{text_file}]"}
    flags |= {"target.server": server.url, "output_dir": tmp_path / "run"}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert server_command.main([*argv, "--check"]) == 0
    assert run.main(parse(argv)) == 0
    said = capfd.readouterr()
    assert f"serves {local.name}, with layers 2" in said.out
    assert "forecast of the acceptance length" in said.err
    head = tmp_path / "run" / "speculator"
    forecast = read_json(head / "forecast.json")
    assert forecast["acceptance_length"] == pytest.approx(1 + sum(forecast["accepted_per_draft"]))
    assert f"{forecast['acceptance_length']:.2f} (teacher-forced" in said.out
    assert "--format vllm-plugin" in said.out, "not for a vLLM that has no hidden states"
    rows = load_from_disk(str(tmp_path / "run" / "generated" / "rows"))
    assert len(rows) == 12
    assert run.main(parse(argv)) == 0  # nothing is left to do
    asked = server.asked
    assert "is done" in capfd.readouterr().out

    shutil.rmtree(head)
    shutil.rmtree(tmp_path / "run" / "stage2" / "speculator")
    (tmp_path / "run" / "stage2" / "checkpoint-4" / "model.safetensors").unlink()
    assert run.main(parse(argv)) == 0  # from the checkpoint before
    assert server.asked > asked
    assert "resuming from" in capfd.readouterr().err
    assert read_json(head / "forecast.json") == forecast


def test_the_printed_line_starts_a_server_for_the_head(capsys, local):
    flags = ["--config", "tests/plain.yaml", "--target.name_or_path", local.name, "--data.seq_length", "64"]
    flags += ["--speculator.architecture", "eagle3", "--speculator.options", "{aux_layers: [0, 1]}"]
    flags += ["--eval.max_new_tokens", "16", "--stage2.generate.max_new_tokens", "32"]
    assert server_command.main([*flags, "--storage", "/mnt/ram", "--", "--tensor-parallel-size", "4"]) == 0
    words = shlex.split(capsys.readouterr().out)
    given = dict(pairwise(words))
    speculative, connector = (json.loads(given[f"--{name}-config"]) for name in ("speculative", "kv-transfer"))
    hf_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert words[:3] == ["vllm", "serve", local.name]
    assert speculative["draft_model_config"]["hf_config"] == hf_config
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": "/mnt/ram/layers-0-1-2"}
    assert int(given["--max-model-len"]) == 64 + 32 + 1
    assert words[-2:] == ["--tensor-parallel-size", "4"]


@pytest.mark.parametrize("architecture", ["mlp", "eagle3"])
def test_a_target_that_states_no_context_has_a_line_too(tmp_path, capsys, architecture):
    BloomConfig(vocab_size=300, hidden_size=32, n_layer=8, n_head=4).save_pretrained(tmp_path)
    flags = ["--config", "tests/plain.yaml", "--target.name_or_path", str(tmp_path), "--data.seq_length", "64"]
    flags += ["--speculator.architecture", architecture, "--stage2.max_steps", "0"]
    assert server_command.main(flags) == 0
    assert "--max-model-len 65 " in capsys.readouterr().out


@pytest.mark.soak
def test_two_processes_ask_for_their_own_rows(serve, tmp_path, text_file, local):
    """Losses are those of one process with the same batches."""
    server = serve([local.config.num_hidden_layers])
    flags = {**RUN, "config": "tests/plain.yaml", "target.name_or_path": local.name, "data.sources": f"[{text_file}]"}
    flags |= {"target.server": server.url, "stage2.max_steps": 0, "stage1.logging_steps": 1}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    losses = {}
    for processes, batch, launcher in ((1, 4, []), (2, 2, launch)):
        own = {**flags, "output_dir": tmp_path / str(processes), "stage1.per_device_train_batch_size": batch}
        argv = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        environment = {**os.environ, "SPECULATOR_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, *launcher, "train.py", *argv], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        state = read_json(tmp_path / str(processes) / "stage1" / "checkpoint-4" / "trainer_state.json")
        losses[processes] = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses[1]) == 4
    assert losses[2] == pytest.approx(losses[1], abs=1e-4)
