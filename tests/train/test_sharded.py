"""Targets in shards, on real processes: what is read and trained is what one process makes with the whole."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import RECURRENT_RUNS, SETTINGS, settled, tiny_model
from forked import finish, launch
from make_believe_gpu import gpu
from safetensors.torch import load_file
from sharded_process import LOGGED, loop_of, read
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW, Optimizer
from transformers import AutoConfig, LlamaForCausalLM

from speculator import NgramDrafter, Sampling, Target, UserError, generate
from speculator.target.in_process import InProcessTarget
from speculator.target.sharding import Group, check_heads
from train import run
from train.checkpoint import DECODED, METRIC
from train.command_line import parse
from train.door.gpus import Place
from train.door.plan import Plan
from train.optimizers import ShardedAdam
from train.options.config import TargetConfig

__all__ = ["gpu"]
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11, 12], [7] * 9]
SCRIPT = str(ROOT / "tests" / "sharded_process.py")


@pytest.fixture(scope="module")
def whole(target_folder) -> Target:
    return Target.load(str(target_folder), dtype="float64")


def assert_alike(folder: Path, whole: Target, output: Path, processes: int, *kinds: str, rows: int = 16) -> None:
    """Each of these kinds reads and trains as one process does.

    Where the last step's rows are too few for all processes, the head is that of the kind "none".
    """
    started = launch(processes, SCRIPT, str(folder), str(output), str(rows), *kinds)
    alone = loop_of(whole, output / "alone", 4, rows)
    alone.run()
    finish(started)
    weights = dict(alone.head.named_parameters())
    if "none" in kinds:
        weights = torch.load(output / "none.0.pt")["head"]
    for kind in kinds:
        parallel, _, size = kind.partition(":")
        left = [torch.load(output / f"{kind}.{rank}.pt") for rank in range(processes)]
        for rank, made in enumerate(left):
            for ours, theirs in zip(made["read"], read(whole, rank), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
            assert made["fingerprint"] == whole.fingerprint
            for name, weight in weights.items():
                torch.testing.assert_close(made["head"][name], weight.detach(), atol=1e-5, rtol=1e-4)
            for ours, theirs in zip(made["log"], alone.progress.log_history, strict=True):
                for name in {
                    "loss",
                    "position0/accuracy",
                    "eval_loss",
                    "eval_position0/loss",
                    "grad_norm",
                } & theirs.keys():
                    if theirs["step"] < 3:  # then the batches of several processes are filled up
                        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
            if parallel == "none":
                assert made["moments"] == len(weights)
                continue
            assert 0 < made["moments"] < len(weights)
            sharded = TargetConfig(str(folder), dtype="float64", parallel=parallel, parallel_size=int(size or 0))
            config = dataclasses.replace(parse([]), target=sharded)
            planned = Plan(settled(config, AutoConfig.from_pretrained(folder), Place(processes)))
            again = (
                planned.table * planned.size / planned.shards if parallel == "fsdp" else 0
            )  # the whole matrix's shard
            if parallel == "tp" and not made["embedding_is_shared"]:  # in transformers 5.17
                again -= planned.table * planned.size * (1 - 1 / planned.shards)
            assert made["bytes"] + again == pytest.approx(planned.memory()["stage1"]["target's weights"], rel=0.02)
            if "apart" in made:
                tokens = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(rank))
                assert (made["apart"] - whole.hidden(tokens)).abs().max() > 0.1, "rows that differ would not be seen"


@pytest.mark.parametrize("parallel", ["tp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_two_processes_with_a_target_in_shards_do_what_one_does(target_folder, whole, tmp_path, parallel):
    assert_alike(target_folder, whole, tmp_path, 2, parallel)


@pytest.mark.soak
@RECURRENT_RUNS
def test_two_processes_with_a_hybrid_target_do_what_one_does(hybrid_folder, tmp_path):
    whole = Target.load(str(hybrid_folder), dtype="float64")
    assert_alike(hybrid_folder, whole, tmp_path, 2, "none", "tp", "fsdp")


@pytest.mark.soak
def test_four_processes_hold_two_targets(target_folder, whole, tmp_path):
    assert_alike(target_folder, whole, tmp_path, 4, "none", "tp:2", "fsdp:2", "fsdp", rows=19)


@pytest.mark.soak
def test_sharded_moments_resume_on_another_number_of_processes(target_folder, tmp_path):
    loop_of(Target.load(str(target_folder)), tmp_path / "alone", 4, 48, logging_steps=LOGGED).run()
    for processes, steps in ((1, 2), (2, 4), (4, 6)):
        finish(launch(processes, SCRIPT, "go_on", str(target_folder), str(tmp_path / "moved"), str(steps)))
    ours, theirs = (torch.load(tmp_path / name / "checkpoint-6" / "optimizer.pt") for name in ("moved", "alone"))
    assert ours["state"].keys() == theirs["state"].keys()
    for index, moments in theirs["state"].items():
        for name, value in moments.items():
            torch.testing.assert_close(ours["state"][index][name].cpu(), value, atol=1e-6, rtol=1e-3)
    ours, theirs = (load_file(tmp_path / name / "checkpoint-6" / "model.safetensors") for name in ("moved", "alone"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-5, rtol=1e-3)

    states = (
        json.loads((tmp_path / name / "checkpoint-6/trainer_state.json").read_text()) for name in ("moved", "alone")
    )
    ours, theirs = (state["log_history"] for state in states)
    for mine, own in zip(ours, theirs, strict=True):
        assert {name: mine[name] for name in own if "loss" in name} == pytest.approx(
            {name: own[name] for name in own if "loss" in name}, rel=1e-4
        )


def test_sharded_moments_resume_where_the_fused_kernel_of_a_gpu_takes_them(gpu):
    """Also from a file that was read on the CPU, and without a second copy of the moments."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        weight = torch.nn.Parameter(torch.ones(3, 2, device="cuda"))
        made, moments = ShardedAdam(AdamW([weight], fused=True)), torch.ones(3, 2)
        state = {"step": torch.tensor(4.0), "exp_avg": moments, "exp_avg_sq": moments}
        made.load_state_dict({"state": {0: state}, "param_groups": Optimizer.state_dict(made)["param_groups"]})
        assert {value.device.type for value in made.optim.state[weight].values()} == {"cuda"}
        assert not made.state
        made.consolidate_state_dict()
        assert any("synchronize" in wait for wait in gpu.waits), "the copies may be saved before they are complete"
    finally:
        distributed.destroy_process_group()


def test_moments_for_a_gpu_are_read_from_a_mapped_file(tmp_path, monkeypatch, target_folder):
    """On the CPU, where all processes of a machine share its pages."""
    seen, load = [], torch.load
    loop = loop_of(Target.load(str(target_folder)), tmp_path, 4, 8)
    loop.run()
    monkeypatch.setattr(torch, "load", lambda file, **how: (seen.append((file.name, how)), load(file, **how))[1])
    for device in ("cpu", "cuda"):
        loop.device = torch.device(device)
        loop.resume(tmp_path / "checkpoint-1", dataclasses.replace(loop.progress, since_log={}))
    how = [given for name, given in seen if name == "optimizer.pt"]
    assert [(given["map_location"], given["mmap"]) for given in how] == [("cpu", False), ("cpu", True)]


def test_sharding_needs_processes_that_can_be_divided(target_folder, monkeypatch):
    with pytest.raises(UserError, match="torchrun"):
        InProcessTarget.load(str(target_folder), parallel="tp")
    with pytest.raises(UserError, match="training only"):
        Target.load(str(target_folder), parallel="tp")
    with pytest.raises(UserError, match="parallel_size 2"):
        Target.load(str(target_folder), parallel_size=2)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 6)
    with pytest.raises(UserError, match="parallel_size 4"):
        Group("tp", 4)


def test_attention_heads_that_cannot_be_divided_are_named(whole):
    with pytest.raises(UserError, match="2 key heads"):
        check_heads("tiny", whole.config, 4)


def test_a_model_sharded_elsewhere_is_not_decoded():
    store, half = torch.distributed.HashStore(), InProcessTarget(tiny_model(), tokenizer=None)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = half.model.model.layers[0].mlp.up_proj
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, init_device_mesh("cpu", (1,))), False)
        with pytest.raises(UserError, match="training only"):
            Target.of(half)
    finally:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def test_a_target_with_an_offloaded_layer_gives_the_same_text(target_folder, tmp_path):
    """By accelerate's hooks: on a machine without GPUs a layer lies on the disk."""
    layout = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layout |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = LlamaForCausalLM.from_pretrained(target_folder, device_map=layout, offload_folder=tmp_path)
    target, whole = Target(model, tokenizer=None), Target.load(str(target_folder))
    assert next(model.model.layers[1].parameters()).is_meta
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        text, expected = (generate(each, NgramDrafter(3), PROMPTS, sampling).tokens for each in (target, whole))
        assert text == expected
    torch.testing.assert_close(target.hidden(torch.tensor(PROMPTS[:1])), whole.hidden(torch.tensor(PROMPTS[:1])))
    layout |= {"model.layers.1": "cpu", "lm_head": "disk"}
    short = LlamaForCausalLM.from_pretrained(target_folder, device_map=layout, offload_folder=tmp_path)
    with pytest.raises(UserError, match="does not fit the GPUs"):
        Target(short, tokenizer=None)
    one = Target.load(str(target_folder), parallel="device_map")
    torch.testing.assert_close(one.hidden(torch.tensor(PROMPTS[:1])), whole.hidden(torch.tensor(PROMPTS[:1])))


@pytest.mark.parametrize(
    "flags",
    [["--data.sources", "[self]", "--stage2.max_steps", "0"], ["--stage2.max_steps", "1"]],
    ids=["self", "stage2"],
)
@pytest.mark.parametrize("parallel", ["tp", "fsdp"])
def test_text_by_a_target_in_shards_is_refused_before_anything_is_loaded(parallel, flags, tmp_path, capsys):
    flags = ["--target.parallel", parallel, *flags, "--output_dir", str(tmp_path / "run")]
    for plan in ([], ["--plan", "8xH100"]):
        assert run.main(parse(["--config", str(ROOT / "tests/plain.yaml"), *flags, *plan])) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in (parallel, "--server", "device_map"))
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["tp", "fsdp"])
def test_a_whole_run_with_a_target_in_shards_trains_the_head_of_one_process(
    target_folder, text_file, tmp_path, parallel
):
    """The forecast, not decoding, selects its checkpoint; a second start has nothing left to do."""
    sizes = SETTINGS | {
        "config": ROOT / "tests/plain.yaml",
        "target.name_or_path": target_folder,
        "data.sources": f"[{text_file}]",
        "eval.validation_prompts": 4,
        "eval.tune_prompts": 2,
        "eval.max_new_tokens": 12,
    }
    steps = {"max_steps": 4, "logging_steps": 1, "eval_steps": 2, "save_steps": 2}
    sizes |= {f"stage1.{name}": count for name, count in steps.items()}
    made = {"one": (1, 2, {}), "two": (2, 1, {"target.parallel": parallel, "shard_optimizer": "true"})}
    for name, (processes, accumulation, more) in made.items():
        given = sizes | more | {"stage1.gradient_accumulation_steps": accumulation}
        flags = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        for _ in range(processes):
            finish(launch(processes, "train.py", "--output_dir", str(tmp_path / name), *flags))
    one, two = tmp_path / "one", tmp_path / "two"
    ours, theirs = (load_file(folder / "stage1" / "checkpoint-4" / "model.safetensors") for folder in (two, one))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-3, rtol=1e-2)
    state = json.loads((two / "stage1" / "checkpoint-4" / "trainer_state.json").read_text())
    figures = {entry["step"]: entry[METRIC] for entry in state["log_history"] if METRIC in entry}
    assert state["best_global_step"] == max(figures, key=figures.__getitem__)
    assert not any(DECODED in entry for entry in state["log_history"])
    assert (two / "speculator" / "README.md").exists()
    assert not (two / "eval").exists()
