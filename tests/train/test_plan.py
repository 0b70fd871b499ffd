"""What a run will need, said before it begins: against what it then takes."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import CONFIGS, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig

from benchmarks.plan import HEAD, foreseen, measured, run_of, sizes
from speculator import UserError
from speculator.target.kv_cache import forms
from speculator.target.model import Target
from train import plan as planning
from train import run, shapes
from train.command_line import parse
from train.place import GPUS, Gpu, Place, gpu_named
from train.plan import CACHE, GATHERED, GRADIENTS, MOMENTS, TARGET, Plan
from train.shapes import Shapes

CPU = Place("cpu", 1, "CPU")
SMALL = LlamaConfig(**sizes(64, 3, 3000), bos_token_id=None, eos_token_id=None, pad_token_id=None)
# Seven layers have default taps.
DEEP = LlamaConfig(**sizes(64, 7, 3000), bos_token_id=None, eos_token_id=None, pad_token_id=None)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_counted_without_its_weights(family):
    """Its weights, and what the KV cache keeps of a position: of Gemma 3n and 4 some layers read another's."""
    model, made = tiny_model(family), Shapes(CONFIGS[family], torch.float32, HEAD, "cpu")
    tensors = [*model.parameters(), *model.buffers()]
    assert made.weights == sum(weight.numel() for weight in model.parameters())
    assert made.bytes == sum(tensor.nbytes for tensor in tensors)
    with torch.no_grad():
        cache = model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    assert made.kv == forms(cache)
    assert made.forward(32).operations > 2 * 32 * 32 * CONFIGS[family].get_text_config().num_hidden_layers


STEPS = {
    "mlp": (SMALL, replace(HEAD, inner_dim=96), {}),
    "mlp, bfloat16, two passes": (
        SMALL,
        replace(HEAD, options={"tie_weights": False}),
        {"bf16": True, "gradient_accumulation_steps": 2},
    ),
    "lstm, bfloat16": (SMALL, replace(HEAD, architecture="lstm"), {"bf16": True}),
    "eagle3": (DEEP, replace(HEAD, architecture="eagle3", draft_vocab_size=700), {}),
    "eagle3, bfloat16": (DEEP, replace(HEAD, architecture="eagle3"), {"bf16": True}),
}


@pytest.mark.parametrize("name", STEPS)
def test_memory_is_within_a_tenth_of_what_the_trainer_allocates(name):
    """So small a run is nearly all activations: the part that is hard to foresee."""
    target, head, stage = STEPS[name]
    config = run_of(head, 120, per_device_train_batch_size=6, **stage)
    real = measured(target, config)
    made = foreseen(target, config)
    assert made["in all"] == pytest.approx(real["in all"], rel=0.1)
    assert {part: made[part] for part in real if part != "in all"} == {k: v for k, v in real.items() if k != "in all"}
    largest = max(made[part] for part in made if part not in ("in all", TARGET))
    assert abs(made["in all"] - largest - real["in all"]) > 0.1 * real["in all"], "a part left out would be seen"


def test_rows_that_are_not_traced_add_what_those_that_are_add(monkeypatch):
    """A large batch is extrapolated from two small ones: the same as the whole one."""
    monkeypatch.setattr(shapes, "chunk_tokens", lambda *_: 100)
    made = Shapes(SMALL, torch.float32, HEAD, "cpu")
    loss = run_of(HEAD, 128).loss
    grown = made.step(9, 128, loss, False, False)
    whole = made._step(9, 128, loss, False, False, 100)
    assert grown.operations == pytest.approx(whole.operations, rel=0.01)
    assert grown.bytes == pytest.approx(whole.bytes, rel=0.02)


def test_operations_are_those_that_a_real_pass_counts():
    model, made = tiny_model("qwen3"), Shapes(CONFIGS["qwen3"], torch.float32, HEAD, "cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.base_model(torch.zeros(1, 40, dtype=torch.long))
    heads = CONFIGS["qwen3"].num_attention_heads * CONFIGS["qwen3"].head_dim
    triangle = 2 * heads * 40 * 40 * CONFIGS["qwen3"].num_hidden_layers
    assert made.forward(40).operations == counter.get_total_flops() + triangle, "which torch does not count on a CPU"


def test_a_token_is_multiplied_by_the_experts_that_it_is_sent_to():
    made = Shapes(CONFIGS["mixtral"], torch.float32, HEAD, "cpu")
    experts = 2 * 4 * 3 * 32 * 64  # layers, experts, matrices
    assert made.experts == experts
    assert made.active == made.weights - experts / 2 - 32 * 32


def config_of(folder, *flags):
    small = ["--target.name_or_path", str(folder), "--stage2.max_steps", "0", "--speculator.initialise", "random"]
    return parse([*small, *flags])


def test_the_command_prints_a_plan_and_takes_no_folder(target_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("something was loaded"))
    only = tmp_path / "target"
    only.mkdir()
    (only / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    flags = ["--output_dir", str(tmp_path / "run"), "--plan"]
    assert run.main(config_of(only, *flags)) == 0
    printed = capsys.readouterr()
    assert "1 process, each on CPU" in printed.out
    assert "| stage1 |" in printed.out
    assert printed.err == ""
    assert sorted(tmp_path.iterdir()) == [only]


def test_a_plan_is_for_the_gpus_that_are_named(target_folder):
    made = planning.plan(config_of(target_folder, "--plan", "64xh100"), processes=1)
    assert (made.place.processes, made.place.name, made.place.memory) == (64, "H100", 80 * 10**9)
    text = str(made)
    assert "| fits | yes |" in text
    assert "bound by operations" in text
    one = planning.plan(config_of(target_folder, "--plan", "H100"), processes=1)
    assert one.tokens()["stage1"] * 64 == made.tokens()["stage1"]
    bucket = sum(made.memory()["stage1"].values()) - sum(one.memory()["stage1"].values())
    assert bucket == 4 * made.shapes.trained, "several processes hold the gradients once more, to reduce them"


def test_a_part_of_the_target_is_planned_for_each_of_its_processes(target_folder):
    def planned(*flags):
        return planning.plan(config_of(target_folder, "--plan", "2xH100", *flags), processes=1)

    whole, tp, fsdp = (planned("--target.parallel", parallel) for parallel in ("none", "tp", "fsdp"))
    table = whole.shapes.table
    parts = {made: made.memory()["stage1"] for made in (whole, tp, fsdp)}
    half = parts[whole][TARGET] / 2
    assert parts[tp][TARGET] == pytest.approx(half + table / 2, rel=0.01), "the output matrix is whole"
    assert parts[fsdp][TARGET] == pytest.approx(half + table), "beside its shard"
    layer = whole.shapes.layer
    gathered = [made.memory()["evaluations"][GATHERED] for made in parts]
    assert gathered == [0, 0, 2 * max(table, layer)], "as received, and as used"
    alone, sharded = (made.passes["stage1"][0].bytes for made in (whole, fsdp))
    assert sharded == max(alone + 2 * layer, 2 * table), "the embedding's when nothing else of the pass is there"
    caches = [made.memory()["evaluations"][CACHE] for made in parts]
    assert caches[1] * 2 == caches[2], "of the same rows half of the heads"
    assert caches[0] * 2 == caches[2], "and each whole target has rows of its own"
    assert len({made.tokens()["stage1"] for made in parts}) == 1
    for made in (tp, fsdp):
        assert sum(made.operations()["stage1"]) == pytest.approx(sum(whole.operations()["stage1"]), rel=0.01)
        assert f"each with 1/2 of the target ({made.config.target.parallel}), on one H100" in str(made)
    moments = planned("--shard_optimizer", "true").memory()["stage1"][MOMENTS]
    assert 1 <= moments / (parts[whole][MOMENTS] / 2) < 1.2, "whole tensors"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tp", "--target.parallel_size", "3"], "parallel_size 3: 8 processes can't be divided into groups of 3"),
        (["tp"], "2 key heads"),
        (["device_map"], "target.parallel device_map: what lies on which GPU is not planned"),
    ],
)
def test_shards_that_cannot_be_are_refused_by_the_plan(target_folder, flags, message):
    with pytest.raises(UserError, match=message):
        planning.plan(config_of(target_folder, "--plan", "8xH100", "--target.parallel", *flags), processes=1)


@pytest.mark.parametrize("name", ["8xh1000", "0xH100", "00xH100", "8xA100,4xH100", "x", "8", "MyGPU"])
def test_a_gpu_that_nobody_knows_is_refused_with_those_that_are(name, target_folder):
    with pytest.raises(UserError, match=f"--plan {name}: a GPU is named as in 8xH100; known are B200, H200"):
        planning.plan(config_of(target_folder, "--plan", name), processes=1)


def test_gpus_are_known_by_their_own_names():
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA L40S",
        "NVIDIA L4",
        "Tesla V100-SXM2-16GB",
        "T1000",
    ]
    assert [gpu_named(name) for name in names] == ["H100", "A100", "L40S", "L4", "V100", None]
    assert all(isinstance(gpu, Gpu) for gpu in GPUS.values())


def test_a_target_without_a_config_is_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match="its config can't be read"):
        planning.plan(config_of(tmp_path, "--plan"), processes=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [],
            "stage1 needs .* in each process, and a GPU has .*: take a smaller stage1.per_device_train_batch_size and",
        ),
        (["--stage1.per_device_train_batch_size", "1", "--speculator.inner_dim", "2000"], "take a smaller speculator"),
        (["--eval.validation_prompts", "9000"], "evaluations needs .* pass and logits: .*eval.validation_prompts"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    flags, message, target_folder, tmp_path, monkeypatch
):
    few = flags or ["--stage1.per_device_train_batch_size", "64"]
    place = Place("cuda", 1, "a GPU", memory=30_000_000)
    monkeypatch.setattr(Place, "of", lambda *_: place)
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("something was loaded"))
    config = config_of(target_folder, "--output_dir", str(tmp_path / "run"), *few)
    with pytest.raises(UserError, match=message):
        run._run(config)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(Target, "load", lambda *_, **__: (_ for _ in ()).throw(UserError("loads")))
    monkeypatch.setattr(Place, "of", lambda *_: replace(place, memory=10**12))
    with pytest.raises(UserError, match="loads"):
        run._run(config)
    monkeypatch.setattr(Place, "of", lambda *_: CPU)
    with pytest.raises(UserError, match="loads"):
        run._run(config)


def test_what_cannot_be_planned_is_left_to_whoever_loads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Place, "of", lambda *_: Place("cuda", 1, "a GPU", memory=1))
    planning.refuse_too_large(config_of(tmp_path), 1)


def test_disk_and_tokens_are_those_of_the_settings(target_folder):
    config = parse(["--config", "configs/quickstart.yaml"])
    target = AutoConfig.from_pretrained(target_folder, max_position_embeddings=512)
    made = Plan(config, target, replace(CPU, processes=2))
    assert made.tokens() == {"stage1": 2400 * 2 * 256, "stage2": 800 * 2 * 256, "generating": 400 * 192}
    head = made.shapes.trained
    assert made.disk() == {
        "stage1: 3 checkpoints": 36 * head,
        "stage2: 2 checkpoints": 24 * head,
        "the best heads": 12 * head,
        "generated rows, at most": 5 * 400 * 256,
    }
    assert made.memory()["stage1"][GRADIENTS] > 0
    assert json.dumps(made.operations())


def test_of_a_target_that_writes_its_own_prompts_all_that_it_writes_counts(target_folder):
    source = {"max_rows": 10, "max_prompt_tokens": 3, "max_new_tokens": 5, "turns": 2}
    sizes = " ".join(f"--data.self_source.{name} {value}" for name, value in source.items())
    own = "--stage2.generate.max_rows 20 --stage2.generate.max_new_tokens 7"
    config = parse(["--config", "configs/quickstart.yaml", "--data.sources", "[self]", *sizes.split(), *own.split()])
    made = Plan(config, AutoConfig.from_pretrained(target_folder), CPU)
    row = 2 * (3 + 7)
    assert list(made.tokens()) == ["self", "stage1", "generating", "stage2"]
    assert made.tokens()["self"] == 10 * 2 * (3 + 5)
    assert made.tokens()["generating"] == 20 * row
    assert made.tokens()["stage2"] == 800 * row
    assert made.disk()["generated rows, at most"] == 5 * 20 * row
    short = Plan(
        replace(config, data=replace(config.data, self_source=replace(config.data.self_source, turns=1))),
        made.shapes.config,
        CPU,
    )
    assert made.traffic()["generating"] > 1.9 * short.traffic()["generating"]


def test_what_the_target_writes_is_no_longer_than_its_context(target_folder):
    config = parse(["--data.sources", "[self]", "--data.self_source.turns", "50", "--stage2.max_steps", "1"])
    target = AutoConfig.from_pretrained(target_folder)
    context = target.max_position_embeddings
    made = Plan(config, target, CPU)
    assert {own.length for own in made.writings.values()} == {context} == {made.lengths["stage2"]}
    assert made.tokens()["self"] <= config.data.self_source.max_rows * context
