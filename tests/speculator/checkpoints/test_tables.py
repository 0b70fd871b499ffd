"""Every layout's table, read both ways: a head's config comes back for all values of its fields, or is refused."""

import json
import random
from pathlib import Path

import pytest

from speculator import UserError
from speculator.checkpoints import layouts
from speculator.checkpoints.gguf_file import TABLES
from speculator.checkpoints.layout import Layout, declared_fields
from speculator.checkpoints.table import Lack, fields_in, from_json, keys, to_json
from speculator.heads import DSparkSpeculator, Eagle3Speculator, MLPSpeculator

FLAG = (False, True)
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64}
EVERY_HEAD = {
    **dict.fromkeys(("vocab_size", "emb_dim", "inner_dim"), (24, 32)),
    "n_predict": (4, 8),
    "draft_vocab_size": (None, 5),
    "base_model_name_or_path": ("org/unknown", "org/other"),
    "base_model_adapter": (None, "org/adapter"),
    "base_model_fingerprint": (None, "some"),
    "trained_length": (None, 7),
    "training_data": (None, ["a", "b"]),
}
ATTENTION = {
    "num_attention_heads": (4, 8, 6),
    "num_key_value_heads": (2, 1),
    "head_dim": (4, 6),
    "rms_norm_eps": (1e-6, 1e-5),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 9.0}, YARN),
    "max_position_embeddings": (64, 128),
    "sliding_window": (None, 16),
}
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "attention_bias", "qk_norm", "own_embedding")
VALUES = {
    MLPSpeculator: {**EVERY_HEAD, **dict.fromkeys(("tie_weights", "scale_input", "own_embedding"), FLAG)},
    Eagle3Speculator: {
        **EVERY_HEAD,
        **ATTENTION,
        **dict.fromkeys((*FLAGS, "fc_norm"), FLAG),
        "aux_layers": (None, [2, 4, 5], [1, 3], [0, 1, 2, 7]),
    },
    DSparkSpeculator: {
        **EVERY_HEAD,
        **ATTENTION,
        **dict.fromkeys(("sample_from_anchor", "is_causal", "confidence_head"), FLAG),
        "num_hidden_layers": (1, 3),
        "markov_rank": (0, 4),
        "aux_layers": ([2, 4, 5], [1, 3], [0, 1]),
        "mask_token_id": (0, 3),
        "conv_group_size": (0, 0, 4),
        "selector_rank": (0, 0, 6),
        "selector_top_k": (5, 16),
        "anchors": (64, 512),
    },
}
"""Values of every field; a config may refuse some of them together."""
LOST = {MLPSpeculator: {"own_embedding"}, DSparkSpeculator: {"anchors"}}
"""Fields that only `native` holds: MLP heads elsewhere have an embedding of their own, and anchors are for training."""
PLAIN = {"fc_norm": False, "norm_output": False, "qk_norm": False, "attention_bias": False, "own_embedding": False}
PLAIN |= {
    "sliding_window": None,
    "aux_layers": [2, 4, 5],
    "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
}
"""What llama.cpp runs."""
DFLASH = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False}
BARE = {**DFLASH, "is_causal": False, "draft_vocab_size": None, "sliding_window": None}
DFLASH2 = {**DFLASH, "conv_group_size": 4, "selector_rank": 6, "is_causal": False, "draft_vocab_size": None}
TABLED = [layout for layout in layouts() if layout.head in VALUES and layout.write is None]


def drawn(head, number: int, **fixed):
    """Configs with random values, and the values: every pair is met. Half of the block drafters are DFlash."""
    draw = random.Random(0)
    while number:
        given = {field: draw.choice(values) for field, values in VALUES[head].items()} | fixed
        if head is DSparkSpeculator:
            given |= (DFLASH2, DFLASH, BARE, {})[number % 4]
        if not given.get("selector_rank"):  # then it means nothing
            given.pop("selector_top_k", None)
        try:
            config = head.config_class(**given)
        except ValueError:  # the values exclude each other
            continue
        number -= 1
        yield config, {field: getattr(config, field) for field in VALUES[head]}


def refusal(layout: Layout, config) -> str | None:
    try:
        layout.fields(config, "float32")
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", TABLED, ids=lambda layout: f"{layout.name}-{layout.head.__name__}")
def test_a_config_comes_back_for_any_values_of_its_fields(monkeypatch, layout):
    stored, refused, written = set(), 0, 0
    monkeypatch.setattr("speculator.checkpoints.files.read_names", lambda folder: stored)
    fields = fields_in(layout.table) & declared_fields(layout.head.config_class).keys()
    lost = LOST.get(layout.head, set()) if layout.name != "native" else set()
    assert declared_fields(layout.head.config_class).keys() - fields - {"selector_top_k"} == lost
    for config, given in drawn(layout.head, 150):
        if why := refusal(layout, config):
            assert why in {lack.why(config) for lack in layout.table if isinstance(lack, Lack) and lack.has(config)}
            refused += 1
            continue
        stored = {"embed_tokens.weight"} if given.get("own_embedding") else set()
        made = json.loads(json.dumps(layout.fields(config, "float32")))
        read = layout.read_fields(made, Path("head/config.json"))
        again = layout.head.config_class(**read)
        assert {field: getattr(again, field) for field in fields} == {field: given[field] for field in fields}
        written += 1
    assert written > 3
    assert bool(refused) is any(isinstance(row, Lack) for row in layout.table)


@pytest.mark.parametrize(
    ("name", "head", "fixed"),
    [("eagle3", Eagle3Speculator, PLAIN), ("dflash", DSparkSpeculator, {"rope_parameters": PLAIN["rope_parameters"]})],
)
def test_the_keys_of_a_gguf_file_hold_the_same_config(name, head, fixed):
    kept = 0
    for config, given in drawn(head, 60, **fixed):
        if not any(lack.has(config) for lack in TABLES[name] if isinstance(lack, Lack)):
            read = from_json(TABLES[name], to_json(TABLES[name], config, "float32"), Path("head.gguf"))
            assert read == {field: given[field] for field in read}
            kept += 1
    assert kept > 20


def test_a_gguf_file_has_the_packages_keys():
    """But for those that only llama.cpp knows yet."""
    parts = vars(pytest.importorskip("gguf").constants.Keys).values()
    known = {str(key) for part in parts if isinstance(part, type) for key in vars(part).values()}
    ours = {row.theirs.replace("eagle3.", "{arch}.") for row in keys(TABLES["eagle3"])}
    own = ("target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc")
    assert ours - known == {f"{{arch}}.{key}" for key in own}
