"""New heads: draft vocabulary, initial weights and warm starts."""

from dataclasses import replace

import datasets
import pytest
import torch
from conftest import DFLASH, DFLASH2, VOCAB, settled, tiny_block_head, tiny_head, tiny_model, tiny_tokenizer
from transformers import LlamaConfig

from speculator import Target, UserError
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from train.command_line import parse
from train.door.head import with_settings_of_start, without_memory
from train.door.initialise import copy_weights, count_tokens, for_rows, most_frequent, new_head, unused_token
from train.door.plan import Plan
from train.door.settle import settle
from train.options.config import DataConfig, HeadOptions, RunConfig, TargetConfig

ROWS = datasets.Dataset.from_list(
    [
        {"input_ids": [5, 5, 5, 9, 9, 2], "loss_mask": [0, 0, 1, 1, 1, 1]},
        {"input_ids": [9, 7, 7, 2, 2, 30], "loss_mask": [1, 1, 1, 1, 0, 0]},
    ]
)


def test_only_tokens_in_the_loss_mask_are_counted():
    counts = count_tokens(ROWS, VOCAB)
    assert {token: n for token, n in enumerate(counts.tolist()) if n} == {2: 2, 5: 1, 7: 2, 9: 3}
    assert count_tokens(ROWS.remove_columns("loss_mask"), VOCAB).sum() == 12
    assert torch.equal(count_tokens(ROWS.select([1, 0, 1]), VOCAB), counts + count_tokens(ROWS.select([1]), VOCAB))


def test_the_draft_vocabulary_has_the_most_frequent_tokens_and_eos():
    counts = count_tokens(ROWS, VOCAB)
    assert most_frequent(counts, 2, []).tolist() == [2, 9]
    assert most_frequent(counts, 3, []).tolist() == [2, 7, 9]
    assert most_frequent(counts, 3, {31}).tolist() == [2, 9, 31]
    assert most_frequent(counts, 6, []).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tokenizer=None)


def config(**shape) -> RunConfig:
    return completed(n_predict=2, draft_vocab_size=3, **shape)


def completed(**given) -> RunConfig:
    return with_settings_of_start(RunConfig(speculator=HeadOptions(**given)), given)


def test_a_head_starts_from_the_rows_of_the_targets_matrix(target):
    head = new_head(settled(config(initialise="target"), target), target, ROWS, 6)
    assert head.draft_tokens.tolist() == [2, 7, 9]
    rows = target.model.get_output_embeddings().weight[[2, 7, 9]]
    torch.testing.assert_close(head.output(1).weight / head.output(1).weight.std(), rows / rows.std())


def test_a_head_records_local_targets_and_rows_by_absolute_paths(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "chats.jsonl").touch()
    sources = DataConfig(sources=["chats.jsonl@0.5", "org/data@2", "python-sources@1"])
    run = replace(config(), target=TargetConfig("models/base", adapter="org/adapter"), data=sources)
    made = new_head(settled(run, target), target, ROWS, 6).config
    assert made.base_model_name_or_path == str(tmp_path / "models" / "base")
    assert made.base_model_adapter == "org/adapter"
    assert made.training_data == [f"{tmp_path}/chats.jsonl@0.5", "org/data@2", "python-sources@1"]


ATTENTION = {"architecture": "eagle3", "options": {"aux_layers": [0, 1]}}


def test_eagle3_starts_from_the_targets_output_and_shares_its_embedding(target):
    head = new_head(settled(config(**ATTENTION), target), target, ROWS, 6)
    assert head.draft_tokens.tolist() == [2, 7, 9]
    assert torch.equal(head.lm_head.weight, target.model.get_output_embeddings().weight[[2, 7, 9]])
    assert head.embedding_weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert not any("embed" in name for name in head.state_dict())
    assert (head.config.fc_norm, head.config.norm_output, head.config.inner_dim) == (True, True, 64)


@pytest.mark.parametrize("kind", [{}, ATTENTION], ids=["mlp", "eagle3"])
def test_a_warm_start_keeps_the_draft_vocabulary(target, tmp_path, kind):
    first = new_head(settled(config(**kind), target), target, ROWS, 6)
    first.save_pretrained(tmp_path)
    for rows in (ROWS, ROWS.select([0])):  # the second would make other tokens the most frequent ones
        again = new_head(settled(config(**kind, warm_start=str(tmp_path)), target), target, rows, 6)
        assert all(torch.equal(again.state_dict()[name], value) for name, value in first.state_dict().items())
    assert (
        new_head(settled(config(), target), target, ROWS.select([0]), 6).draft_tokens.tolist()
        != first.draft_tokens.tolist()
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"draft_vocab_size": 0}, "has draft_vocab_size 3, but this run's head has None"),
        ({"n_predict": 3}, "has n_predict 2, but this run's head has 3"),
        ({"n_predict": 4}, "has n_predict 2, but this run's head has 4"),  # the default
        ({"architecture": "eagle3"}, "holds a head of architecture mlp, not the eagle3 configured"),
    ],
)
def test_a_warm_start_from_another_shape_raises(target, tmp_path, shape, message):
    new_head(settled(config(), target), target, ROWS, 6).save_pretrained(tmp_path)
    settings = {"n_predict": 2, "draft_vocab_size": 3, "warm_start": str(tmp_path)} | shape
    with pytest.raises(UserError, match=message):
        new_head(settled(completed(**settings), target), target, ROWS, 6)


def test_a_missing_warm_start_is_found_before_the_target_is_loaded(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        settled(RunConfig(speculator=HeadOptions(warm_start=str(tmp_path / "nowhere"))))


def test_a_warm_start_from_ibms_layout_copies_its_weights(target, tmp_path):
    head = new_head(settled(RunConfig(speculator=HeadOptions(n_predict=2)), target), target, ROWS, 6)
    save(head, tmp_path / "ibm", layout_of("ibm", head))
    again = new_head(
        settled(replace(completed(n_predict=2, warm_start=str(tmp_path / "ibm")), seed=1), target), target, ROWS, 6
    )
    assert all(torch.equal(again.state_dict()[name], value) for name, value in head.state_dict().items())
    assert again.dtype == torch.float32


PARTS = {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
BLOCK = {**DFLASH, "aux_layers": [0, 1], "num_hidden_layers": 1, "mask_token_id": 3}


def test_a_dflash_2_head_starts_from_a_dflash_head(target, tmp_path):
    """The parts that it adds change nothing at first, and a head can't lose them again."""
    shape = {"architecture": "dspark", "n_predict": 2}
    first = new_head(settled(completed(**shape, options=BLOCK), target), target, ROWS, 6)
    save(first, tmp_path / "dflash", layout_of("native", first))
    more = {"options": PARTS, "warm_start": str(tmp_path / "dflash")}
    again = new_head(settled(completed(**shape, **more), target), target, ROWS, 6)
    weights = again.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in first.state_dict().items())
    assert again.config.conv_group_size == 8
    assert again.config.mask_token_id == 3
    assert torch.equal(again.logits(*again.probe()).argmax(-1), first.logits(*first.probe()).argmax(-1))
    save(again, tmp_path / "dflash2", layout_of("native", again))
    for changed, tensor in (({"selector_rank": 8}, "codebook"), ({"conv_group_size": 0}, "conv")):
        run = settled(completed(**shape, options=changed, warm_start=str(tmp_path / "dflash2")), target)
        with pytest.raises(UserError, match=f"has .*{tensor}.* does not fit this run's head"):
            new_head(run, target, ROWS, 6)


def test_only_the_parts_of_an_extension_may_be_missing_in_the_head_of_a_warm_start(target):
    start = tiny_block_head(target, **DFLASH)
    copy_weights(tiny_block_head(target, **DFLASH2), start, "HEAD")
    with pytest.raises(UserError, match=r"HEAD has no confidence_head\..*weight, confidence_head\..*bias, which"):
        copy_weights(tiny_block_head(target, **DFLASH | {"confidence_head": True}), start, "HEAD")


def test_all_options_that_contradict_a_warm_start_are_named_before_the_target_is_loaded(target, tmp_path):
    first = new_head(settled(completed(architecture="dspark", n_predict=2, options=BLOCK), target), target, ROWS, 6)
    first.save_pretrained(tmp_path)
    flags = ["--target.name_or_path", "x", "--speculator.warm_start", str(tmp_path)]
    with pytest.raises(UserError) as refusal:
        settled(parse(["--config", "configs/qwen3-8b-dflash2.yaml", *flags]))
    assert (
        "has n_predict 2 and aux_layers [0, 1] and num_hidden_layers 1 and sliding_window None and mask_token_id 3, "
        "but this run's head has 7 and [2, 10, 18, 26, 34] and 5 and 2048 and 151669"
    ) in str(refusal.value)
    parts = "{conv_group_size: 8, selector_rank: 4, selector_top_k: 6}"
    run = settled(parse([*flags, "--speculator.options", parts]), target)
    assert new_head(run, target, ROWS, 6).config.is_dflash2
    assert run.config.loss.cross_entropy == 1


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_warm_start_from_a_servers_layout_keeps_unset_options(target, tmp_path, layout):
    """Unset options come from the trained head; its number of steps is not part of its weights."""
    shape = {
        "aux_layers": [0, 1],
        "draft_vocab_size": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
    }
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "fc_norm": False, "n_predict": 7}
    head = bind(Eagle3Speculator(Eagle3SpeculatorConfig.for_target(target.config, **shape)), target)
    save(head, tmp_path / "head", layout_of(layout, head))
    again = new_head(settled(config(warm_start=str(tmp_path / "head")), target), target, ROWS, 6)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in head.state_dict().items())
    assert again.config.rope_parameters["rope_theta"] == 77.0
    assert (again.n_predict, again.config.num_attention_heads, again.config.attention_bias) == (2, 2, True)
    assert again.config.fc_norm is False
    other = {"architecture": "eagle3", "options": {"aux_layers": [0, 1], "fc_norm": True}}
    with pytest.raises(UserError, match="fc_norm"):
        new_head(settled(config(**other, warm_start=str(tmp_path / "head")), target), target, ROWS, 6)
    with pytest.raises(UserError, match="2 layers"):
        new_head(settled(config(architecture="eagle3", options={"aux_layers": [1, 5]}), target), target, ROWS, 6)
    with pytest.raises(UserError, match="2 layers"):
        new_head(settled(config(architecture="eagle3"), target), target, ROWS, 6)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_warm_start_is_checked_and_counted_as_it_is_trained(tmp_path, layers):
    """A shallow target has no default auxiliary layers, and the default shape of a head has other sizes."""
    shape = {"aux_layers": [0, 1], "num_attention_heads": 1, "num_key_value_heads": 1, "n_predict": 7, "head_dim": 16}
    text = LlamaConfig(**tiny_model().config.to_dict() | {"num_hidden_layers": layers, "max_position_embeddings": 1024})
    head = Eagle3Speculator(Eagle3SpeculatorConfig.for_target(text, **shape))
    head.save_pretrained(tmp_path / "head")
    text.save_pretrained(tmp_path / "target")
    given = ["--target.name_or_path", str(tmp_path / "target"), "--speculator.warm_start", str(tmp_path / "head")]
    found = parse([*given, "--plan"])
    run = settle(found, processes=1)
    assert without_memory(run.head).num_parameters() == head.num_parameters()
    assert Plan(run).trained == sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


@pytest.mark.parametrize("flag", ["--speculator.architecture=mlp", "--speculator.draft_vocab_size=0"])
def test_a_flag_that_contradicts_a_warm_start_is_an_error_even_with_its_default_value(target, tmp_path, flag, capsys):
    shape = ATTENTION if "architecture" in flag else {}
    new_head(settled(config(**shape), target), target, ROWS, 6).save_pretrained(tmp_path)
    with pytest.raises((SystemExit, UserError)) as refusal:
        new_head(
            settled(parse(["--target.name_or_path=x", "--speculator.warm_start", str(tmp_path), flag]), target),
            target,
            ROWS,
            6,
        )
    assert flag[2:].partition("=")[0].removeprefix("speculator.") in capsys.readouterr().err + str(refusal.value)


@pytest.mark.parametrize(("known", "trained"), [(None, 6), (4, 6), (64, 64)])
def test_further_training_updates_the_trained_length(known, trained):
    target, head = Target(tiny_model(), None), tiny_head()
    head.config.trained_length = known
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2]}, *ROWS])
    assert for_rows(head, target, rows).config.trained_length == trained


def test_the_mask_token_is_one_that_no_text_contains():
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    seen = torch.ones(size)
    assert unused_token(tokenizer, torch.ones(size + 5), []) == size + 4
    seen[[3, 7]] = 0
    assert unused_token(tokenizer, seen, []) == 7
    assert unused_token(tokenizer, seen, [7]) == 3
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(3)]})
    assert unused_token(tokenizer, seen, []) == 3
    assert unused_token(tokenizer, torch.ones(size), []) == size - 1
