"""Recipes for any model: what a target and its rows decide."""

import gzip
from dataclasses import replace

import pyarrow
import pytest
from conftest import settled, tiny_head
from datasets import Dataset
from transformers import AutoConfig, LlamaConfig

from speculator import UserError
from train.command_line import parse
from train.door.head import head_config
from train.door.sizes import (
    count_of_tokens,
    expected_rows,
    length_of_chats,
    shortened,
    shortened_for,
    with_sizes_of_target,
    with_steps,
)
from train.options.config import HeadOptions, StageConfig

RECIPES = ("eagle3", "dspark", "mlp")


def shaped(layers: int, vocab_size: int, context: int = 8192) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(num_hidden_layers=layers, vocab_size=vocab_size, max_position_embeddings=context, **sizes)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("layers", "vocab_size"), [(24, 300), (28, 49_152), (36, 151_936)])
def test_a_recipe_fits_targets_of_all_shapes(recipe, layers, vocab_size):
    target = shaped(layers, vocab_size, 1024)
    config = with_sizes_of_target(parse(["--config", f"configs/{recipe}.yaml"]), target)
    made = head_config(config.speculator, target)
    assert config.data.seq_length == 1024
    assert made.output_size == (32_000 if vocab_size > 32_000 and recipe != "dspark" else vocab_size)
    if recipe != "mlp":
        assert made.aux_layers == [2, layers // 2, layers - 3]


def test_the_row_length_is_the_targets_context_up_to_a_limit():
    config = parse(["--config", "configs/eagle3.yaml"])
    assert with_sizes_of_target(config, shaped(8, 99, 131_072)).data.seq_length == 4096
    assert with_sizes_of_target(config, None).data.seq_length == 4096
    assert with_sizes_of_target(config, AutoConfig.for_model("mamba")).data.seq_length == 4096
    start = tiny_head().config
    start.trained_length = 60
    assert with_sizes_of_target(config, shaped(8, 99), start).data.seq_length == 60
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = shaped(8, 99)
    phi.rope_parameters, phi.original_max_position_embeddings = longrope, 64  # all that `Target` reads
    assert with_sizes_of_target(config, phi).data.seq_length == 64
    set_by_hand = replace(config, data=replace(config.data, seq_length=77))
    assert with_sizes_of_target(set_by_hand, shaped(8, 99)).data.seq_length == 77


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (
            {"aux_layers": [2, 16, 29]},
            "--speculator.options.aux_layers: aux_layers .* a target of 24 layers has 0 to 23",
        ),
        ({"aux_layers": [3, 2]}, "--speculator.options.aux_layers: "),
        ({"markov_rank": -1}, "--speculator.options.markov_rank: "),
        ({"mask_token_id": 999}, "--speculator.options.mask_token_id: "),
        ({"colour": 1}, "--speculator.options.colour: architecture dspark has no such option"),
    ],
)
def test_an_error_of_an_option_names_its_flag(options, flag):
    with pytest.raises(UserError, match=f"^{flag}"):
        head_config(HeadOptions(architecture="dspark", options=options), shaped(24, 300))


def test_an_option_of_null_takes_the_default():
    options = HeadOptions(architecture="eagle3", options={"aux_layers": None})
    assert head_config(options, shaped(24, 300)).aux_layers == [2, 12, 21]


def stage(**changes) -> StageConfig:
    return StageConfig(**{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, **changes})


@pytest.mark.parametrize(
    ("rows", "changes", "batch", "steps"),
    [
        (54_000, {"epochs": 2.0}, 64, 1688),
        (488, {"epochs": 3.0}, 8, 183),
        (5, {"epochs": 3.0}, 1, 15),
        (5, {"max_steps": 7}, 64, 7),
        (64, {"max_steps": 7}, 64, 7),
    ],
)
def test_epochs_become_steps_and_few_rows_make_smaller_batches(rows, changes, batch, steps):
    made = with_steps(stage(**changes), rows, 1, 576)
    assert made.per_device_train_batch_size * made.gradient_accumulation_steps == batch
    assert made.max_steps == steps
    assert made.learning_rate == pytest.approx(5e-3 * (batch / 64) ** 0.5)


@pytest.mark.parametrize(
    ("rows", "processes", "changes", "share"),
    [
        (54_000, 8, {"epochs": 2.0, "base_batch_size": 64}, 8),
        (54_000, 8, {"epochs": 2.0, "base_batch_size": 64, "gradient_accumulation_steps": 1}, 1),  # the same rows
        (800, 8, {"epochs": 2.0, "base_batch_size": 64}, 16 / 64),  # 2 rows of each process
        (54_000, 4, {"max_steps": 7, "base_batch_size": 64}, 4),
        (54_000, 8, {"epochs": 2.0}, 1),  # as it is named
        (800, 8, {"epochs": 2.0}, 16 / 512),
    ],
)
def test_the_rate_follows_the_rows_of_a_step_however_they_are_split(rows, processes, changes, share):
    assert with_steps(stage(**changes), rows, processes, 576).learning_rate == pytest.approx(5e-3 * share**0.5)


@pytest.mark.parametrize(("base", "share"), [(None, 1), (4096, 4096 / 896), (448, 0.5)])
def test_the_rate_follows_one_over_the_targets_width(base, share):
    made = with_steps(stage(max_steps=7, base_width=base), 54_000, 1, 896)
    assert made.learning_rate == pytest.approx(5e-3 * share)


def test_a_rate_for_no_rows_and_no_width_is_kept_exactly():
    made = with_steps(stage(max_steps=7, learning_rate=3e-3), 54_000, 1, 192)
    assert made.learning_rate == 3e-3  # 3e-3 * 192 / 192 is another number


@pytest.mark.parametrize(("tokens", "length"), [(20_000, 256), (40_000, 512), (64 * 4096, 4096), (1, 256)])
def test_little_text_has_shorter_rows(tokens, length):
    assert shortened(4096, tokens) == length


def rows_of(run) -> int | None:
    return expected_rows(run.config, run.mixture, run.lengths.chat_tokens, run.config.data.seq_length)


def test_the_size_of_local_data_is_estimated(tmp_path):
    (tmp_path / ".venv").mkdir()
    for name in (".a.jsonl.swp", "1.png", "README.md", "dataset_info.json", ".venv/a.py"):
        (tmp_path / name).write_text("not read" * 10_000)
    (tmp_path / "a.jsonl").write_text("x" * 40_960)
    config = parse(["--data.sources", f"[{tmp_path}]", "--data.seq_length", "1024"])
    assert rows_of(settled(replace(config, data=replace(config.data, max_tokens=None)))) == 9
    assert rows_of(settled(parse(["--config", "configs/eagle3.yaml", "--data.sources", "[org/name]"]))) is None
    assert rows_of(settled(parse(["--config", "configs/eagle3.yaml", "--data.sources", "[self]"]))) == 500


def test_packed_files_count_by_their_text_and_a_limit_counts_for_any_source(tmp_path):
    text = "".join(f"{i} the quick brown fox " for i in range(4000))
    (tmp_path / "plain.txt").write_text(text)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(text)
    Dataset.from_dict({"text": [text[i : i + 500] for i in range(0, len(text), 500)]}).to_parquet(
        tmp_path / "a.parquet"
    )
    plain, packed, parquet = (
        rows_of(settled(parse(["--data.sources", f"[{tmp_path / name}]", "--data.max_tokens", "10000000"])))
        for name in ("plain.txt", "a.txt.gz", "a.parquet")
    )
    assert plain == packed == pytest.approx(parquet, rel=0.1)
    limit = ["--config", "configs/eagle3.yaml", "--data.sources", "[org/name]", "--data.max_tokens", "30000"]
    assert rows_of(settled(parse([*limit, "--data.seq_length", "1000"]))) == 30


def test_short_rows_for_little_text_keep_chats_whole():
    masks = [[0] * 100 + [1] * 800, [1] * 3000, [0, 1] * 450, [0] * 10 + [1] * 1990]
    row = {
        "loss_mask": [loss for mask in masks for loss in mask],
        "document_ids": [i for i, mask in enumerate(masks) for _ in mask],
    }
    short = {"loss_mask": [0, *[1] * 899] * 20, "document_ids": [i for i in range(20) for _ in range(900)]}
    assert length_of_chats([row, short]) == 900
    assert length_of_chats([row]) == 2000
    assert shortened(4096, 20_000, 900) == 1024


def test_the_chats_of_much_text_are_not_measured(monkeypatch):
    rows = Dataset.from_list([{"input_ids": [5] * 1000, "loss_mask": [0, *[1] * 999], "document_ids": [0] * 1000}] * 64)
    assert shortened_for(4000, rows) == 1000
    monkeypatch.setattr("train.door.sizes.length_of_chats", lambda _: pytest.fail("a pass over all tokens"))
    assert shortened_for(1000, rows) == 1000


def test_more_tokens_are_counted_than_fit_the_offsets_of_a_column():
    row = pyarrow.ListArray.from_arrays([0, 2**30], pyarrow.nulls(2**30))  # which take no memory
    table = pyarrow.table({"input_ids": pyarrow.chunked_array([row] * 3)})
    rows = Dataset(table, fingerprint="huge")
    assert count_of_tokens(rows) == 3 * 2**30
