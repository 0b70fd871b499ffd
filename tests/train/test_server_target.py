"""Training with a target that servers run: the same losses and gradients, and what happens when a server fails."""

import shutil

import pytest
import torch
from conftest import CONFIGS, save_tiny, tiny_block_head
from hidden_state_server import StandIn
from transformers import AutoModelForCausalLM, TrainerCallback

from speculator import Target, UserError
from speculator.checkpoints.loading import bind
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig, MLPSpeculator, MLPSpeculatorConfig
from speculator.target import hidden_state_servers
from speculator.target.server import ServerTarget
from train.config import LossConfig
from train.trainer import Collator, SpeculatorTrainer, arguments

STEPS, LENGTH = 10, 24
AUX = {"mlp": [], "eagle3": [0, 1], "dspark": [0, 1]}
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
    if kind == "dspark":
        return tiny_block_head(target, aux_layers=AUX[kind], mask_token_id=1).float().train().requires_grad_(True)
    config_class, head_class = {
        "eagle3": (Eagle3SpeculatorConfig, Eagle3Speculator),
        "mlp": (MLPSpeculatorConfig, MLPSpeculator),
    }[kind]
    shape = {"n_predict": 3, "inner_dim": 32, **({"aux_layers": AUX[kind]} if AUX[kind] else {})}
    return bind(head_class(config_class.for_target(target.config, **shape)), target)


class Noting(TrainerCallback):
    """Keeps the gradients of every step; `at` maps steps to calls."""

    def __init__(self, head, at):
        self.head, self.at, self.gradients = head, at, []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.head.parameters() if p.grad is not None]))

    def on_step_end(self, args, state, *rest, **kwargs):
        self.at.get(state.global_step, lambda: None)()


def trained(target: Target, kind: str, tmp_path, at=None) -> tuple[list[float], list[torch.Tensor], list[dict]]:
    """Losses and gradients of ten steps on packed rows, and the log."""
    head = head_of(kind, target)
    rows = []
    for i in range(8):
        cut = 5 + i
        rows.append(
            {
                "input_ids": [(11 * i + 7 * j) % 300 for j in range(LENGTH - i)],
                "document_ids": [0] * cut + [1] * (LENGTH - i - cut),
            }
        )
    trainer = SpeculatorTrainer(
        model=head,
        target=target,
        loss=LossConfig(cross_entropy=0.1),
        decode=None,
        args=arguments(
            output_dir=str(tmp_path / kind),
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            eval_steps=STEPS,
            save_steps=STEPS,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            report_to="none",
        ),
        data_collator=Collator(head.config, for_servers=isinstance(target, ServerTarget)),
        train_dataset=rows,
        eval_dataset=rows[:4],
    )
    noting = Noting(head, at or {})
    trainer.add_callback(noting)
    trainer.train()
    log = trainer.state.log_history
    losses = [entry["loss"] for entry in log if "loss" in entry] + [log[-2]["eval_loss"]]
    return losses, noting.gradients, log


@pytest.mark.parametrize("kind", AUX)
def test_ten_steps_with_servers_are_those_of_the_target_here(kind, folder, local, serve, tmp_path):
    """One server is slow; the other dies at step 3 and is back at step 6."""
    expected, gradients, _ = trained(local, kind, tmp_path / "local")
    layers = [*AUX[kind], local.config.num_hidden_layers]
    slow, mortal = serve(layers, delay=0.02), serve(layers)
    target = connected(folder, [slow, mortal], AUX[kind])
    port = mortal.server_port
    at = {3: mortal.die, 6: lambda: serve(layers, port=port)}
    losses, found, log = trained(target, kind, tmp_path / "servers", at)
    target.close()
    assert losses == pytest.approx(expected, abs=1e-4)
    assert len(found) == STEPS
    for ours, theirs in zip(found, gradients, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
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


def test_a_model_with_more_around_its_layers_is_refused(tmp_path):
    with pytest.raises(UserError, match="has more around its layers"):
        ServerTarget.connect(str(save_tiny("gemma3n", tmp_path)), [], device="cpu")


FAULTS = {
    "connector": ({"fault": "connector"}, "its answers name no file of hidden states"),
    "cut": ({"fault": "cut"}, "is missing or cut short"),
    "full": ({"fault": "full"}, "is missing or cut short"),
    "dtype": ({"dtype": torch.bfloat16}, "holds bfloat16, and target.dtype is float32"),
    "layers": ({"layers": [0, 2]}, "it writes layers-0-2, and the head needs layers-0-1-2"),
    "model": ({"other": True}, "serves another model, or other layers"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_server_is_one_line_before_training(name, folder, serve, tmp_path, local):
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


def test_a_full_disk_is_one_line(folder, serve, monkeypatch):
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(hidden_state_servers.shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"need 0.00 GB, and .* has 0.00 free"):
        connected(folder, [serve([0, 1, 2])], [0, 1])


def test_no_server_for_too_long_is_one_line(folder, serve, monkeypatch):
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
