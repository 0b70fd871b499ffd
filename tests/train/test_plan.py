"""`--plan`: what a run will need, against what was measured on an H100 and what the trainer allocates."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import CONFIGS, RECURRENT, settled, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from speculator import UserError
from speculator.heads import ARCHITECTURES
from speculator.kernels.linear import HAS_ONEDNN
from speculator.target.in_process import InProcessTarget
from train import run
from train.command_line import parse
from train.door import settle as settling
from train.door.gpus import GPUS, Place, gpu_named, place_of
from train.door.head import head_config
from train.door.plan import Plan
from train.door.settle import settle
from train.door.sizes import Prompt
from train.optimizers import largest_share
from train.options.config import HERE

H100 = place_of("H100", 1)
SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
LLAMA = LlamaConfig(
    vocab_size=128_256, intermediate_size=14_336, num_hidden_layers=32, max_position_embeddings=131_072, **SIZES
)
QWEN = Qwen3Config(vocab_size=151_936, intermediate_size=12_288, num_hidden_layers=36, **SIZES)
SMOLLM = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("recipe", "target", "measured", "flags"),
    [
        ("llama-3.1-8b-instruct", LLAMA, 43.4, []),
        ("llama-3.1-8b-instruct-eagle3", LLAMA, 45.6, []),
        ("qwen3-8b", QWEN, 46.5, []),
        ("smollm2-135m-eagle3", SMOLLM, 3.01, ["--stage1.per_device_train_batch_size", "64"]),
    ],
)
def test_memory_is_within_15_percent_of_what_an_h100_measured(recipe, target, measured, flags):
    """The figures of docs/results.md, in GB."""
    made = Plan(settled(parse(["--config", f"configs/{recipe}.yaml", *flags]), target, H100))
    assert sum(made.memory()["stage1"].values()) / 1e9 == pytest.approx(measured, rel=0.15)


def test_generating_is_within_15_percent_of_what_an_h100_measured():
    made = Plan(settled(parse(["--config", "configs/llama-3.1-8b-instruct.yaml"]), LLAMA, H100))
    assert sum(made.memory()["generating"].values()) / 1e9 == pytest.approx(24.8, rel=0.15)


def test_mfu_is_close_to_that_of_counted_operations():
    """docs/results.md: 12,211 tokens/s are 32% of the peak."""
    made = Plan(settled(parse(["--config", "configs/llama-3.1-8b-instruct.yaml"]), LLAMA, H100))
    assert 12_211 * made.seconds_per_token("stage1") == pytest.approx(0.32, abs=0.03)
    # Of the target's two untied matrices, the embedding is not multiplied by, and the other one is once.
    attention = 2 * 32 * 4096 * made.length("stage1")
    target = 2 * (made.weights - made.table) + attention
    head = 6 * made.head_module.weights_per_token(made.length("stage1"))
    assert made.seconds_per_token("stage1") == pytest.approx((target + head) / 989e12, rel=1e-3)


def test_kept_states_take_the_target_out_of_later_passes(tmp_path):
    """A file of 400,000 bytes is 90,000 training tokens; with a draft vocabulary no later pass needs other logits."""
    file = tmp_path / "text.txt"
    file.write_text("x" * 400_000)
    flags = [
        "--config",
        "configs/llama-3.1-8b-instruct.yaml",
        "--data.sources",
        f"[{file}]",
        "--data.seq_length",
        "1000",
    ]
    flags += ["--stage1.max_steps", "90", "--stage1.per_device_train_batch_size", "4", "--stage2.max_steps", "0"]
    flags += ["--stage1.gradient_accumulation_steps", "1"]
    drafting = ["--speculator.draft_vocab_size", "32000"]

    def made(*more):
        return Plan(settled(parse([*flags, *more]), LLAMA, H100))

    plain, kept = made(*drafting), made(*drafting, "--stage1.keep_states", "true")
    target = 2 * (plain.weights - 2 * plain.table) + 2 * 32 * 4096 * 1000 + 2 * plain.table
    spared = plain.seconds_per_token("stage1") - kept.seconds_per_token("stage1")
    drafted = 2 * 32_000 * 4096
    assert spared == pytest.approx((target * (1 - 1 / 4) - drafted) / 989e12, rel=1e-3)
    # An MLP head reads the final states alone; 64 rows are for validation.
    assert kept.kept_bytes() == {"stage1": (90 + 64) * 1000 * (4096 * 2 + 4)}
    assert plain.kept_bytes() == {}
    assert "stage1: 1.26 GB of states in files" in str(kept)
    whole = made("--speculator.draft_vocab_size", "0", "--stage1.keep_states", "true")
    without = made("--speculator.draft_vocab_size", "0")
    spared = without.seconds_per_token("stage1") - whole.seconds_per_token("stage1")
    assert spared == pytest.approx((target - 2 * plain.table) * (1 - 1 / 4) / 989e12, rel=1e-3)


@pytest.mark.skipif(not HAS_ONEDNN, reason="without oneDNN there are no copies")
@pytest.mark.parametrize(
    ("recipe", "of_head"),
    [("eagle3", 576 * (3 * 576 + 2 * (576 + 2 * 192) + 576 + 3 * 1536 + 8192)), ("mlp", 576 * (2 * 576 + 8192))],
)
def test_a_cpu_keeps_a_copy_of_every_matrix_that_multiplies(recipe, of_head):
    """30 layers of SmolLM2, and its output matrix, which is the embedding too (docs/results.md)."""
    flags = ["--target.dtype", "float32", "--stage2.max_steps", "2"]
    config = parse(["--config", f"configs/smollm2-135m-{recipe}.yaml", *flags])
    memory = Plan(settled(config, SMOLLM)).memory()
    layer = 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    copied = 4 * (30 * layer + 49_152 * 576)
    part = "copies of weights, for products of few rows"
    assert {name: parts[part] for name, parts in memory.items()} == dict.fromkeys(memory, copied) | {
        "generating": copied + 4 * of_head
    }


@pytest.mark.parametrize("family", CONFIGS | RECURRENT)
def test_every_family_is_counted_without_its_weights(family):
    config = parse(["--stage2.max_steps", "0"])
    made = Plan(settled(config, (CONFIGS | RECURRENT)[family]))
    assert made.weights == sum(weight.numel() for weight in tiny_model(family).parameters())
    assert made.memory()["stage1"]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *(("mlp", options) for options in ("{}", "{tie_weights: false}", "{inner_dim: 48}", "{own_embedding: false}")),
        ("eagle3", "{}"),
    ],
)
def test_operations_of_a_head_are_those_that_torch_counts(architecture, options):
    """Products with matrices alone: attention has none of its own here."""
    flags = ["--speculator.architecture", architecture, "--speculator.n_predict", "3"]
    given = yaml.safe_load(options)
    flags += ["--speculator.inner_dim", str(given.pop("inner_dim", 32))]
    flags += ["--speculator.options", json.dumps(given)]
    target = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=8, num_attention_heads=4)
    head = ARCHITECTURES[architecture](head_config(parse(flags).speculator, target))
    head.bind(target, torch.randn(64, 32), torch.nn.Linear(32, 64, bias=False))
    inputs = [x.float() if x.is_floating_point() else x for x in head.probe()][:2]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head.logits(*inputs)
    products = counter.get_flop_counts()["Global"]
    counted = sum(count for name, count in products.items() if "bmm" not in str(name))
    # EAGLE-3 computes keys and values of step 0 twice; tokens beyond the last position are embedded too.
    close = 0.1 if architecture == "eagle3" or "own_embedding" in options else 0
    assert 2 * 4 * head.weights_per_token(4) == pytest.approx(counted, rel=close)


def test_a_token_is_multiplied_by_the_experts_that_it_is_sent_to():
    made = Plan(settled(parse(["--stage2.max_steps", "0"]), CONFIGS["mixtral"]))
    experts = 2 * 4 * 3 * 32 * 64  # layers, experts, matrices
    assert made.active == made.weights - experts / 2 - made.table


def planned(config) -> Plan:
    return Plan(settle(config, processes=1))


def config_of(folder, *flags):
    small = [
        "--config",
        "tests/plain.yaml",
        "--target.name_or_path",
        str(folder),
        "--stage2.max_steps",
        "0",
        "--speculator.initialise",
        "random",
        "--eval.prompt_tokens",
        "32",
        "--data.seq_length",
        "64",
        "--eval.max_new_tokens",
        "32",
    ]
    return parse([*small, *flags])


def test_the_command_prints_a_plan_and_takes_no_folder(target_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(InProcessTarget, "load", lambda *_, **__: pytest.fail("something was loaded"))
    only = tmp_path / "target"
    only.mkdir()
    (only / "config.json").write_bytes((target_folder / "config.json").read_bytes())
    assert run.main(config_of(only, "--output_dir", str(tmp_path / "run"), "--plan")) == 0
    printed = capsys.readouterr()
    assert "| stage1 |" in printed.out
    assert "| fits | yes |" in printed.out
    assert "of this CPU's peak" in printed.out
    assert printed.err == ""
    assert sorted(tmp_path.iterdir()) == [only]


def test_a_plan_is_for_the_gpus_that_are_named(target_folder):
    made = planned(config_of(target_folder, "--plan", "64xh100"))
    assert (made.place.processes, made.place.name, made.place.memory) == (64, "H100", 80 * 10**9)
    assert "| fits | yes |" in str(made)
    assert "8% of the GPU's peak" in str(made), "short kernels do not fill a large GPU"
    one = planned(config_of(target_folder, "--plan", "H100"))
    assert one.tokens()["stage1"] * 64 == made.tokens()["stage1"]
    assert made.memory() == one.memory()  # gradients are reduced where they are


def test_a_sharded_target_takes_less_of_each_process(target_folder):
    def made_with(*flags):
        return planned(config_of(target_folder, "--plan", "2xH100", *flags))

    whole, tp, fsdp = (made_with("--target.parallel", parallel) for parallel in ("none", "tp", "fsdp"))
    part = "target's weights"
    for made in (tp, fsdp):
        matrix = whole.table * whole.size // (2 if made is tp else 1)  # the output matrix is whole
        assert made.memory()["stage1"][part] == whole.memory()["stage1"][part] // 2 + matrix
        assert "1/2 of the target" in str(made)
    moments = made_with("--shard_optimizer", "true").memory()["stage1"]["moments"]
    assert whole.memory()["stage1"]["moments"] / 2 <= moments < whole.memory()["stage1"]["moments"]


def test_a_process_holds_only_two_matrices_of_a_target_in_servers():
    flags = ["--config", "configs/llama-3.1-8b-instruct-eagle3.yaml", "--plan", "8xH100"]
    here, served = (
        Plan(settled(parse([*flags, *more]), LLAMA, H100)) for more in ([], ["--target.server", "http://a:8000"])
    )
    assert served.memory()["stage1"]["target's weights"] == 2 * 128_256 * 4096 * 2
    assert set(served.memory()) <= {"stage1", "stage2"}
    saved = here.seconds_per_token("stage1") - served.seconds_per_token("stage1")
    assert saved * 989e12 == pytest.approx(2 * here.active, rel=0.1)  # attention is the rest
    # Three auxiliary layers and the last one, in bfloat16.
    assert "per token 15.0 GFLOP and 32.0 KiB of states" in str(served)


def test_muon_keeps_one_moment_of_the_matrices_inside_a_head(target_folder):
    def moments(*flags: str) -> int:
        return planned(config_of(target_folder, "--plan", "H100", *flags)).memory()["stage1"]["moments"]

    whole, muon = moments(), moments("--stage1.optimizer", "muon")
    assert whole / 2 < muon < whole


def test_the_fullest_process_counts_when_moments_are_shared_as_whole_tensors():
    assert largest_share([6, 5, 4, 3], 2) == 9
    assert largest_share([8, 1, 1], 2) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["tp", "--target.parallel_size", "3"], "parallel_size 3"), (["device_map"], "device_map")],
)
def test_shards_that_cannot_be_are_refused(target_folder, flags, message):
    with pytest.raises(UserError, match=message):
        planned(config_of(target_folder, "--plan", "8xH100", "--target.parallel", *flags))


@pytest.mark.parametrize(("flags", "reason"), [(["--target.parallel", "device_map"], "device_map"), ([], "no meta")])
def test_what_is_not_counted_is_named_and_the_rest_can_be_refused(flags, reason, target_folder, monkeypatch):
    def fail(_):
        raise ValueError(reason)

    if not flags:
        monkeypatch.setattr("train.door.plan.auto_class", fail)
    made = planned(config_of(target_folder, "--plan", "H100", *flags))
    assert reason in made.uncounted
    assert "NOT COUNTED: the target's layers" in str(made)
    assert "| fits | ? |" in str(made)
    assert "expected time" not in str(made)
    assert made.token_at_peak("stage1") is None
    heads = made.memory()["stage1"]["head's weights and gradients"] + made.memory()["stage1"]["moments"]
    made.place = replace(made.place, memory=int(1.1 * heads))  # caches that may be spread over devices do not count
    made.refuse_too_large()
    made.place = replace(made.place, memory=10**5)
    with pytest.raises(UserError, match=r"to train: take a smaller speculator\.inner_dim"):
        made.refuse_too_large()


@pytest.mark.parametrize(
    ("name", "processes", "memory"),
    [("4xA100-40GB", 4, 40), ("v100-16gb", 1, 16), ("2 x A100-SXM4-40G", 2, 40), ("RTX 4090", 1, 24), ("A10G", 1, 24)],
)
def test_a_plan_has_the_memory_that_a_gpus_name_states(name, processes, memory):
    place = place_of(name, 1)
    assert (place.processes, place.memory) == (processes, memory * 10**9)


@pytest.mark.parametrize("name", ["8xh1000", "0xH100", "8xA100,4xH100", "x", "MyGPU"])
def test_an_unknown_gpu_is_refused(name, target_folder):
    with pytest.raises(UserError, match=f"--plan {name}"):
        planned(config_of(target_folder, "--plan", name))


def test_gpus_are_known_by_their_own_names():
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA L4", "T1000"]
    assert [gpu_named(name) for name in names] == ["H100", "A100", "L40S", "L4", None]


def test_a_target_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="config"):
        planned(config_of(tmp_path, "--plan"))


def test_memory_that_a_server_holds_is_not_free(target_folder, monkeypatch):
    """As in `adapt` on the server's own GPU."""
    facts = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 10**9)
    for name, value in {
        "is_available": True, "current_device": 0, "get_device_properties": facts,
        "mem_get_info": (8 * 10**9, 80 * 10**9), "memory_reserved": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    place = place_of(HERE, 1)
    assert (place.memory, place.taken) == (8 * 10**9, 72 * 10**9)
    made = settled(config_of(target_folder), AutoConfig.from_pretrained(target_folder), replace(place, memory=10**6))
    with pytest.raises(UserError, match=r"Other processes hold 72\.0 GB .* CUDA_VISIBLE_DEVICES"):
        Plan(made).refuse_too_large()


@pytest.mark.parametrize("name", ["stage1.per_device_train_batch_size", "stage2.generate.batch_size"])
def test_a_run_out_of_memory_names_its_setting(name, target_folder):
    said = pytest.raises(UserError, match=f"out of memory: .*lower {name}, which is ")
    with said, run._fitting(name, config_of(target_folder)):
        raise torch.OutOfMemoryError("CUDA out of memory")


def quantised(**scheme) -> LlamaConfig:
    return LlamaConfig(**LLAMA.to_diff_dict(), quantization_config=scheme)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.16),
        ({"quant_method": "fp8"}, 8),
    ],
)
def test_a_quantised_target_takes_its_bits_outside_the_embedding_and_the_output_matrix(scheme, bits):
    config = parse(["--config", "configs/llama-3.1-8b-instruct-eagle3.yaml"])
    weights = Plan(settled(config, quantised(**scheme), H100)).memory()["stage1"]["target's weights"]
    inner = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336)
    assert weights == pytest.approx(inner * bits / 8 + 2 * 2 * 128_256 * 4096, rel=0.005)


def test_a_target_quantised_in_an_unknown_way_is_not_refused():
    config = parse(["--config", "configs/llama-3.1-8b-instruct-eagle3.yaml"])
    made = Plan(settled(config, quantised(quant_method="new"), place_of("V100", 1)))
    assert "its weights take less than here" in str(made)
    made.refuse_too_large()


@pytest.mark.parametrize(
    ("gpus", "change", "flags"),
    [
        ("A100-40GB", None, ["--stage2.max_steps", "0"]),
        ("RTX 4090", "a target in 4 bits", []),
        ("1xV100-20GB", "a target in 4 bits", []),
        ("2xV100", "--target.parallel fsdp", []),
        ("8xA10G", "--target.parallel fsdp", []),
        ("T4", "take a smaller target", ["--speculator.inner_dim", "8192"]),
    ],
)
def test_a_run_that_does_not_fit_is_told_a_change_with_which_it_fits(gpus, change, flags):
    """The Llama recipe: in a larger card only the batch has to shrink, whatever its largest part is."""
    asked = ["--config", "configs/llama-3.1-8b-instruct-eagle3.yaml", *flags]
    place = place_of(gpus, 1)
    made = Plan(settled(parse(asked), LLAMA, place))
    said = made.remedy()
    assert (change or "") in said
    assert f"to fit: {said}" in str(made)
    with pytest.raises(UserError, match=rf"GB in each process, .*{re.escape(said)}"):
        made.refuse_too_large()
    if "would need" in said:
        settings = said.partition(" would need")[0].rpartition("hardware.md) and ")[2].split()
        target = quantised(load_in_4bit=True) if "4 bits" in said else LLAMA
        table = str(Plan(settled(parse([*asked, *settings]), target, place)))
        assert "yes" in table
        assert "NO" not in table


def test_the_recipe_for_24_gb_fits():
    config = parse(["--config", "configs/llama-3.1-8b-instruct-eagle3-24gb.yaml"])
    assert "NO" not in str(Plan(settled(config, quantised(load_in_4bit=True), place_of("RTX 4090", 1))))


def test_fits_leaves_room_for_what_tensors_do_not_tell():
    """A run of 45.6 GB has reserved 50.4 on an H100, and CUDA has a context."""
    for memory, fits in ((52, False), (53, True)):
        place = Place(1, "a GPU", memory * 10**9)
        assert place.holds(46 * 10**9, spare=True) is fits
        assert place.holds(46 * 10**9, spare=False)


def test_gradients_of_several_micro_batches_lie_beside_the_buckets_of_ddp(target_folder):
    def weights(place, accumulation):
        flags = ["--stage1.gradient_accumulation_steps", accumulation]
        made = Plan(settled(config_of(target_folder, *flags), AutoConfig.from_pretrained(target_folder), place))
        assert made.memory()["stage1"]["copy that a checkpoint is written from"] == 12 * made.trained  # on a CPU
        return made.memory()["stage1"]["head's weights and gradients"] / made.trained

    assert [weights(*case) for case in ((Place(1), "2"), (Place(2), "1"), (Place(2), "2"))] == [8, 8, 12]


@pytest.mark.parametrize(
    ("recipe", "target", "measured"),
    [
        ("llama-3.1-8b-instruct-eagle3", LLAMA, 10_431),
        ("llama-3.1-8b-instruct", LLAMA, 12_211),
        ("smollm2-135m-eagle3", SMOLLM, 190_344),
    ],
)
def test_time_is_within_a_factor_of_two_of_what_an_h100_measured(recipe, target, measured):
    """Tokens a second of docs/results.md."""
    made = Plan(settled(parse(["--config", f"configs/{recipe}.yaml"]), target, H100))
    row = made.expected_speed().row["stage1"]
    assert 0.5 < made.length("stage1") / row / measured < 2


@pytest.mark.parametrize(("rows", "measured"), [(1, 9.27e-3), (32, 11.44e-3)])
def test_a_decoding_step_is_within_a_quarter_of_what_an_h100_measured(rows, measured):
    """Plain steps of docs/results.md."""
    made = Plan(settled(parse(["--config", "configs/llama-3.1-8b-instruct.yaml"]), LLAMA, H100))
    assert made.expected_speed().decode(rows) == pytest.approx(measured, rel=0.25)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(target_folder, tmp_path, monkeypatch):
    def place(memory):
        monkeypatch.setattr(settling, "place_of", lambda *_: Place(1, "a GPU", memory))

    def load(*_, **__):
        raise UserError("loads")

    monkeypatch.setattr(InProcessTarget, "load", load)
    config = config_of(target_folder, "--output_dir", str(tmp_path / "run"))
    place(10**6)
    with pytest.raises(UserError, match=r"stage1 needs .* GB"):
        run.run(config)
    assert not (tmp_path / "run").exists()
    for memory in (10**12, None):
        place(memory)
        with pytest.raises(UserError, match="loads"):
            run.run(config)


def test_tokens_are_those_of_the_settings(target_folder):
    config = parse(["--config", "configs/quickstart.yaml"])
    made = Plan(settled(config, AutoConfig.from_pretrained(target_folder, max_position_embeddings=512), Place(2)))
    assert made.tokens() == {"stage1": 800 * 2 * 256, "stage2": 250 * 2 * 256, "generating": 160 * 192}


def test_all_that_a_target_writes_itself_counts_up_to_its_context(target_folder):
    source = {"max_rows": 10, "max_prompt_tokens": 3, "max_new_tokens": 5, "turns": 2}
    sizes = " ".join(f"--data.self_source.{name} {value}" for name, value in source.items())
    own = "--stage2.generate.max_rows 20 --stage2.generate.max_new_tokens 7"
    flags = ["--config", "configs/quickstart.yaml", "--data.sources", "[self]", *sizes.split(), *own.split()]
    config = parse(flags)
    target = AutoConfig.from_pretrained(target_folder)
    tokens = Plan(settled(config, target)).tokens()
    assert list(tokens) == ["self", "stage1", "generating", "stage2"]
    assert (tokens["self"], tokens["generating"]) == (10 * 2 * (3 + 5), 20 * 2 * (3 + 7))
    config = parse([*flags, "--data.self_source.turns", "500"])
    assert Plan(settled(config, target)).tokens()["self"] == 10 * target.max_position_embeddings


def test_chats_are_planned_with_the_prompts_that_they_have(tmp_path):
    """Prompts of text are cut to `prompt_tokens`, those of chats are taken whole, with all turns."""
    file = tmp_path / "chats.jsonl"
    turns = [{"role": role, "content": "x" * 4000} for _ in range(2) for role in ("user", "assistant")]
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(30)))
    flags = ["--config", "configs/eagle3.yaml", "--data.seq_length", "4096", "--target.name_or_path", "x"]
    chats = Plan(settled(parse([*flags, "--data.sources", f"[{file}]"]), LLAMA, H100))
    assert chats.generated["generating"].length == 2 * (1000 + 256)
    assert chats.tokens()["generating"] == 4000 * 2 * 256
    assert chats.length("stage2") == 4096
    assert not chats.guessed
    unknown = Plan(settled(parse([*flags, "--data.sources", "[org/chats]"]), LLAMA, H100))
    assert unknown.generated["generating"].length == 64 + 256
    assert "the prompts are not known yet" in str(unknown)
    counted = unknown.knowing(4096, [Prompt(9000, 3), Prompt(100)])
    assert counted.generated["generating"].length == 4096 + 256
    assert counted.length("stage2") == 4096 + 256
    parts = [sum(made.memory()["generating"].values()) for made in (unknown, chats, counted)]
    assert parts == sorted(parts)


def test_the_peak_is_known_for_known_gpus_only(target_folder):
    config, target = config_of(target_folder), AutoConfig.from_pretrained(target_folder)
    assert Plan(settled(config, target, Place(1, "another", 10**12))).token_at_peak("stage1") is None
    assert min(Plan(settled(config, target, Place(1, "H100", 10**12, GPUS["H100"]))).token_at_peak("stage1")) > 0
