"""What is refused before a run takes its folder."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import settled, tiny_tokenizer
from datasets import Dataset
from mtp_models import config_of, model_of
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config, T5Config

from speculator import UserError
from speculator.heads import ARCHITECTURES, MLPSpeculator, MLPSpeculatorConfig
from train.command_line import parse
from train.door.gpus import Place
from train.door.head import without_memory
from train.door.initialise import new_head
from train.door.plan import Plan
from train.door.settle import settle
from train.text import inputs


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--eval.temperatures", "[]"], "eval.temperatures"),
        (["--eval.temperatures", "[-1]"], "temperature"),
        (["--eval.temperatures", "[0, 1, 0.0]"], "eval.temperatures"),
        (["--stage2.generate.top_p", "1.5"], "stage2.generate.top_p"),
        (["--stage2.generate.top_k", "-1"], "stage2.generate.top_k"),
        (["--stage1.keep_states", "true", "--target.server", "http://localhost:1"], "stage1.keep_states"),
        (["--target.parallel_size", "2", "--target.server", "http://localhost:1"], "target.parallel_size"),
        (["--stage2.keep_states", "true", "--target.parallel", "fsdp"], "stage2.keep_states"),
        (["--stage2.generate.num_speculative_tokens", "99"], "stage2.generate.num_speculative_tokens"),
        (["--seed", "-1"], "seed"),
        (["--speculator.architecture", "eagle3", "--speculator.options", "{norm_before_fc: true}"], "norm_before_fc"),
        (["--speculator.options", "{aux_layers: [1, 2]}"], "aux_layers"),
        (["--speculator.architecture", "eagle3", "--speculator.options", "{fc_norms: false}"], "fc_norm"),
        (["--speculator.architecture", "eagle3", "--speculator.options", "{aux_layers: [0, x]}"], "list of int"),
        (["--speculator.architecture", "eagle"], "eagle3"),
        (["--speculator.n_predict", "1"], "tie_weights"),
        (["--speculator.architecture", "lstm"], "speculator.architecture lstm is gone"),
        (["--speculator.draft_vocab_size", "5"], "speculator.draft_vocab_size"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_loaded(flags, key):
    with pytest.raises(UserError, match=key):
        settled(parse(flags), checked=True)


@pytest.mark.parametrize(
    ("mark", "limit", "count"), [("<think>", 256, 1), ("<think>", 4096, 0), ("", 256, 0), ("<think>\n</think>", 256, 0)]
)
def test_a_limit_that_cuts_thoughts_is_logged_before_the_text_is_written(mark, limit, count, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}" + mark + "{% endif %}"
    run = settled(parse(["--config", "configs/eagle3.yaml", "--stage2.generate.max_new_tokens", str(limit)]))
    inputs._warn_of_thoughts(run, SimpleNamespace(name="it", tokenizer=tokenizer))
    assert capsys.readouterr().err.count(f"stage2.generate.max_new_tokens {limit} cuts its thoughts") == count


def test_a_target_over_several_gpus_is_for_one_process():
    config = parse(["--target.parallel", "device_map"])
    settled(config, checked=True)
    with pytest.raises(UserError, match=r"target\.parallel device_map .* this run has 2"):
        settled(config, place=Place(2), checked=True)


@pytest.mark.parametrize(
    "flags",
    [
        ["--stage1.learning_rate", "0"],
        ["--stage2.warmup_steps", "-5"],
        ["--stage1.lr_scheduler_type", "constant"],  # in transformers without a warm-up
        ["--stage1.weight_decay", "-1"],
        ["--speculator.inner_dim", "-3"],
        ["--speculator.n_predict", "0"],
        ["--loss.lk", "-5"],
        ["--data.max_tokens", "-1"],
        ["--data.self_source.max_rows", "0"],
    ],
    ids=" ".join,
)
def test_a_number_out_of_its_fields_range_is_named(flags, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert flags[0][2:] in capsys.readouterr().err


def test_an_attention_head_may_draft_deeper_than_it_is_trained():
    flags = ["--speculator.architecture", "eagle3", "--stage2.generate.num_speculative_tokens", "9"]
    settled(parse(flags), checked=True)


OTHERWISE = ["--speculator.initialise", "random", "--data.seq_length", "64", "--eval.prompt_tokens", "8"]
OTHERWISE += ["--eval.max_new_tokens", "8", "--stage2.max_steps", "0", "--eval.tune_prompts", "0"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculator.inner_dim", "100000000"],
        ["--speculator.inner_dim", "100000000", "--speculator.architecture", "mlp"],
    ],
)
def test_a_head_that_no_machine_could_train_is_refused_before_it_is_made(target, flags):
    run = settled(parse([*flags, *OTHERWISE]), target, Place(1, memory=10**12))
    with pytest.raises(UserError, match=r"a head of [\d,]{15,} weights needs [\d,]{5,} GB to train"):
        Plan(run).refuse_too_large()


@pytest.mark.parametrize("flags", [["--shard_optimizer", "true"], ["--stage1.optimizer", "muon"]])
def test_a_head_whose_moments_fit_is_not_refused(target, flags):
    adamw = ["--stage1.optimizer", "adamw", "--speculator.inner_dim", "256", *OTHERWISE]
    run = settled(parse([*adamw, *flags]), target, Place(8, "a GPU"))  # on a CPU a checkpoint joins them
    place = replace(run.place, memory=sum(Plan(run).memory()["stage1"].values()))
    Plan(replace(run, place=place)).refuse_too_large()
    with pytest.raises(UserError, match="stage1 needs"):
        Plan(settled(parse(adamw), target, place)).refuse_too_large()


def test_a_target_without_the_layer_to_start_from_is_refused_before_its_text_is_read(target, tmp_path):
    model_of(config_of("glm4_moe")).save_pretrained(tmp_path)
    flags = ["--speculator.architecture", "mtp", "--speculator.initialise", "target", "--stage2.max_steps", "0"]
    run = settled(parse([*flags, "--eval.tune_prompts", "0", "--target.name_or_path", str(tmp_path)]), target)
    with pytest.raises(UserError, match="promises 1 MTP layers, and its files hold 0"):
        inputs.read_inputs(Plan(run), target)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n_predict", [2, 3, 6])
@pytest.mark.parametrize("drafted", [0, 20])
def test_the_size_of_a_head_is_known_before_it_is_made(target, architecture, n_predict, drafted):
    flags = ["--speculator.architecture", architecture, "--speculator.n_predict", str(n_predict)]
    flags += ["--speculator.draft_vocab_size", str(drafted), "--speculator.inner_dim", "24"]
    flags += ["--speculator.initialise", "random"]
    reads_layers = hasattr(ARCHITECTURES[architecture].config_class, "aux_layers")
    options = {"mlp": ["{}", "{tie_weights: false}", "{own_embedding: false}"]}
    for own in options.get(architecture, ["{aux_layers: [0, 1]}" if reads_layers else "{}"]):
        run = settled(parse([*flags, "--speculator.options", own]), target)
        rows = Dataset.from_dict({"input_ids": [[0, 1]]})
        assert without_memory(run.head).num_parameters() == new_head(run, target, rows, length=2).num_parameters()


def test_rows_with_a_token_that_the_target_lacks_are_refused(target):
    config = parse([])
    run = settled(replace(config, stage1=replace(config.stage1, per_device_train_batch_size=1)), target)
    rows, beyond = (
        Dataset.from_dict({"input_ids": [[0, 1, token]] * 400}) for token in (target.vocab_size - 1, target.vocab_size)
    )
    inputs.check_rows(run, target, rows, rows)
    for pair in ((rows, beyond), (beyond, rows)):
        with pytest.raises(UserError, match=f"hold token {target.vocab_size}"):
            inputs.check_rows(run, target, *pair)


@pytest.mark.parametrize("flags", [[], ["--plan", "H100"], ["--dry_run", "true"], ["--target.server", "http://a"]])
def test_no_head_is_trained_for_encoder_decoder_targets(tmp_path, flags):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} is an encoder-decoder model, for which no head is trained"):
        settle(parse(["--target.name_or_path", str(tmp_path), "--stage2.max_steps", "0", *flags]), processes=1)


MERGE = r"PeftModel\.from_pretrained\(M\.from_pretrained\(\"x\".*\"y\"\)\.merge_and_unload\(\)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target.parallel", "tp", "--target.adapter", "y"], MERGE),
        (["--target.parallel", "fsdp", "--target.adapter", "y"], MERGE),
        (["--target.server", "http://a", "--target.adapter", "y"], MERGE),
        (
            ["--target.parallel", "tp", "--target.name_or_path", "x.GGUF"],
            "target.parallel tp: each process reads a GGUF",
        ),
        (["--target.parallel", "tp"], "x: 4 processes can't share its 2 key heads evenly"),
        (["--target.parallel", "tp", "--target.parallel_size", "3"], "parallel_size 3"),
        (["--target.parallel_size", "3"], "parallel_size needs parallel tp or fsdp"),
        (["--speculator.initialise", "target", "--speculator.inner_dim", "16"], "inner_dim"),
        (["--speculator.served_by", "llama.cpp"], "llama.cpp has no layout for the architecture mlp"),
    ],
)
def test_what_the_settings_and_the_targets_config_tell_is_refused_at_the_door(flags, message):
    target = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
    config = ["--config", "tests/plain.yaml", "--target.name_or_path", "x", *OTHERWISE, *flags]
    with pytest.raises(UserError, match=message):
        settled(parse(config), target, Place(4), checked=True)


@pytest.mark.parametrize(
    ("family", "recipe", "reason"),
    [
        (Qwen2Config, ["configs/llama-cpp.yaml"], "llama.cpp .* hidden states of qwen2 models"),
        (Qwen3Config, ["configs/llama-cpp.yaml"], None),
        (GemmaConfig, ["configs/dspark.yaml", "--speculator.served_by", "vllm"], "vllm .* states of gemma models"),
    ],
)
def test_a_recipe_for_a_server_refuses_a_target_that_it_serves_no_head_for(family, recipe, reason, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    family(**sizes, vocab_size=300).save_pretrained(tmp_path)  # no weights
    flags = ["--target.name_or_path", str(tmp_path)]
    settle(parse(["--config", "configs/eagle3.yaml", *flags]), processes=1)
    with pytest.raises(UserError, match=f"speculator.served_by: {reason}") if reason else nullcontext():
        settle(parse(["--config", *recipe, *flags]), processes=1)


@pytest.mark.parametrize(("sizes", "message"), [((16, 32), "hidden states of size 16"), ((32, 64), "vocabulary of 64")])
def test_a_warm_start_for_another_target_is_refused_before_that_is_loaded(sizes, message, tmp_path):
    width, vocabulary = sizes
    MLPSpeculator(MLPSpeculatorConfig(emb_dim=width, vocab_size=vocabulary, n_predict=2)).save_pretrained(tmp_path)
    target = LlamaConfig(hidden_size=32, vocab_size=32)
    with pytest.raises(UserError, match=message):
        settled(parse(["--target.name_or_path", "x", "--speculator.warm_start", str(tmp_path)]), target)


@pytest.mark.parametrize("plan", [[], ["--plan", "H100"]])
def test_rows_beyond_the_context_are_refused_by_the_config_alone(tmp_path, plan):
    LlamaConfig(max_position_embeddings=64).save_pretrained(tmp_path)  # no weights
    flags = ["--target.name_or_path", str(tmp_path), "--eval.prompt_tokens", "8", "--eval.max_new_tokens", "8"]
    flags += ["--stage2.max_steps", "0", *plan]
    settle(parse([*flags, "--data.seq_length", "64"]), processes=1)
    with pytest.raises(UserError, match=r"data\.seq_length is 65, but .* has a context of 64"):
        settle(parse([*flags, "--data.seq_length", "65"]), processes=1)
