"""The layouts of DSpark and DFlash heads: written, read back, and read as others write them."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_folders import edit
from conftest import tiny_model
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from speculator import UserError
from speculator.checkpoints import config_of, layout_of, load_any, recognise, save
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.target.fingerprint import fingerprint

V, D = 32, 32
DFLASH = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


def head(base=None, **changes) -> DSparkSpeculator:
    shape = {
        "vocab_size": V, "emb_dim": D, "inner_dim": 24, "n_predict": 3, "num_hidden_layers": 2, "markov_rank": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "aux_layers": [1, 2], "mask_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "base_model_name_or_path": base and str(base),
    }  # fmt: skip
    torch.manual_seed(0)
    made = DSparkSpeculator(DSparkSpeculatorConfig(**{**shape, **changes}))
    for weight in made.parameters():
        torch.nn.init.normal_(weight)
    if made.draft_tokens is not None:
        made.draft_tokens.copy_(torch.arange(made.config.draft_vocab_size) * 2 + 1)
    return made


WINDOWS = [{"sliding_window": 8}, {"sliding_window": 4, "is_causal": True}, {**DFLASH, "sliding_window": 6}]


@pytest.mark.parametrize(
    "changes", [{}, DFLASH, {"draft_vocab_size": 10}, {**DFLASH, "draft_vocab_size": 10}, *WINDOWS]
)
@pytest.mark.parametrize("name", ["dspark", "dflash", "speculators", "native"])
def test_a_head_is_the_same_after_it_was_written_and_read(base, tmp_path, name, changes):
    made = head(base, **changes)
    if name == "dflash" and made.config.markov_rank:
        with pytest.raises(UserError, match="dflash has no Markov head, and this head has one of rank 4"):
            save(made, tmp_path / "head", layout_of(name, made))
        assert not layout_of(name, made).stores(made), "inspect says the same"
        return
    assert layout_of(name, made).stores(made)
    save(made, tmp_path / "head", layout_of(name, made))  # compares the logits
    again = load_any(tmp_path / "head")
    assert recognise(tmp_path / "head").name == name
    ignored = {"anchors", "dtype", "transformers_version", "architectures", "_name_or_path"}
    before, after = (config.to_dict() for config in (made.config, again.config))
    assert {k: v for k, v in after.items() if k not in ignored} == {k: v for k, v in before.items() if k not in ignored}


def test_the_rows_of_a_draft_vocabulary_are_stored(base, tmp_path):
    made = head(base, draft_vocab_size=10)
    save(made, tmp_path / "head", layout_of("dspark", made))
    stored = load_file(tmp_path / "head" / "model.safetensors")
    output = tiny_model().get_output_embeddings().weight
    assert torch.equal(stored["lm_head.weight"], output[made.draft_tokens])
    assert stored["d2t"].tolist() == [i + 1 for i in range(10)]
    assert "embed_tokens.weight" not in stored
    made.config.base_model_fingerprint = fingerprint(tiny_model(scale=3.0))
    with pytest.raises(UserError, match=r"output matrix, but .* has other weights"):
        save(made, tmp_path / "other", layout_of("dspark", made))
    made.config.base_model_fingerprint = fingerprint(tiny_model())
    save(made, tmp_path / "same", layout_of("dspark", made))
    # Tied by the config, untied by the files, which count.
    edit(base, lambda config: config.update(tie_word_embeddings=True))
    save(made, tmp_path / "untied", layout_of("dspark", made))
    edit(base, lambda config: config.update(tie_word_embeddings=False))


def test_both_formats_of_settings_for_servers_are_written(tmp_path):
    made = head()
    save(made, tmp_path / "head", layout_of("dspark", made))
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    expected = {"target_layer_ids": [0, 1], "mask_token_id": 0, "block_size": 3}
    assert {name: written[name] for name in expected} == expected == written["dflash_config"]
    assert written["sample_from_anchor"] is True


def foreign(folder, made, changes, **tensors):
    """Write a head with a changed config.json (None removes a field) and additional tensors."""
    name = "dspark" if made.config.markov_rank else "dflash"
    save(made, folder, layout_of(name, made))
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors")
    return folder


def same(made, again) -> bool:
    return all(torch.equal(x, y) for x, y in zip(made.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_deepspec_folder_is_read_with_its_copies_of_the_targets_matrices(tmp_path):
    made = head()
    copies = {"embed_tokens.weight": torch.randn(V, D), "lm_head.weight": torch.randn(V, D)}
    changes = {"dflash_config": None, "draft_vocab_size": None, "sample_from_anchor": None, "is_causal": None}
    again = load_any(foreign(tmp_path / "head", made, changes, **copies))
    assert same(made, again)
    assert again.config.sample_from_anchor


def test_a_zlab_folder_is_read(tmp_path):
    made = head(**DFLASH)
    nested = {"target_layer_ids": [0, 1], "mask_token_id": 0}
    changes = {"dflash_config": nested, "target_layer_ids": None, "mask_token_id": None, "draft_vocab_size": None}
    again = load_any(foreign(tmp_path / "head", made, changes))
    assert same(made, again)
    assert (again.n_predict, again.config.block_size, again.config.aux_layers) == (3, 4, [1, 2])


@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_specforge_folder_is_read(tmp_path, from_anchor):
    """Its keys of DSpark are in `dflash_config` alone."""
    made = head(sample_from_anchor=from_anchor)
    save(made, tmp_path / "flat", layout_of("dspark", made))
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    own = ("sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
           "confidence_head_with_markov")  # fmt: skip
    flat["architectures"] = ["DSparkDraftModel"]
    flat["dflash_config"] |= {name: flat.pop(name) for name in own}
    (tmp_path / "flat" / "config.json").write_text(json.dumps(flat))
    again = load_any(tmp_path / "flat")
    assert same(made, again)
    assert again.config.sample_from_anchor is from_anchor
    assert again.n_predict == made.n_predict
    for name, wrong in (("markov_head_type", "rnn"), ("confidence_head_with_markov", False)):
        changed = {**flat, "dflash_config": {**flat["dflash_config"], name: wrong}}
        (tmp_path / "flat" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=name):
            load_any(tmp_path / "flat")


@pytest.mark.parametrize(
    ("changes", "window", "causal"),
    [
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 16}, None, False),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, 16, True),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "is_causal": False}, 16, False),
        ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 12}}, 12, False),
        ({"layer_types": ["sliding_attention"] * 2, "dflash_config": {"causal": False}, "sliding_window": 9}, 9, False),
    ],
)
def test_windows_are_read_as_servers_read_them(tmp_path, changes, window, causal):
    made = head(**DFLASH)
    again = load_any(foreign(tmp_path / "head", made, {"is_causal": None, **changes}))
    assert (again.config.sliding_window, again.config.is_causal) == (window, causal)
    assert same(made, again)


@pytest.mark.parametrize("from_anchor", [True, False, None])
def test_a_folder_of_the_speculators_library_is_read(tmp_path, from_anchor):
    made = head(sample_from_anchor=bool(from_anchor))
    save(made, tmp_path / "flat", layout_of("dspark", made))
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    top = ("draft_vocab_size", "block_size", "mask_token_id", "markov_rank", "markov_head_type",
           "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
    inner = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "rope_parameters", "vocab_size",
             "max_position_embeddings", "model_type")  # fmt: skip
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        **{name: flat[name] for name in top},
        "aux_hidden_state_layer_ids": [1, 2],
        "transformer_layer_config": {name: flat[name] for name in inner},
        "speculators_config": {"verifier": {"name_or_path": "base", "architectures": []}},
    }
    if from_anchor is not None:
        config["sample_from_anchor"] = from_anchor
    (tmp_path / "flat" / "config.json").write_text(json.dumps(config))
    if from_anchor is None:
        with pytest.raises(UserError, match="sample_from_anchor is missing; vLLM assumes false, and speculators true"):
            load_any(tmp_path / "flat")
        return
    again = load_any(tmp_path / "flat")
    assert same(made, again)
    config.pop("draft_vocab_size")
    config["transformer_layer_config"]["vocab_size"] = 50000
    (tmp_path / "flat" / "config.json").write_text(json.dumps(config))
    assert config_of(tmp_path / "flat").draft_vocab_size == 32000  # the library's default
    assert (again.config.aux_layers, again.n_predict) == ([1, 2], 3)
    assert again.config.base_model_name_or_path == "base"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type is 'rnn'; must be 'vanilla'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be the same for all layers"),
        ({"model_type": "llama"}, "model_type is 'llama'; must be 'qwen3'"),
        ({"block_size": None, "dflash_config": None}, "block_size is missing"),
        ({"target_hidden_size": 8}, "target_hidden_size is 8, not 32"),
        ({"attention_bias": True}, "attention_bias is True; must be False"),
        ({"block_size": "8", "dflash_config": None, "target_layer_ids": [1]}, "malformed"),
        ({"dflash_config": {"target_layer_ids": 5}}, "malformed"),
    ],
)
def test_a_head_that_would_draft_something_else_is_refused(tmp_path, changes, error):
    with pytest.raises(UserError, match=error):
        load_any(foreign(tmp_path / "head", head(), changes))


def test_export_names_the_servers_that_do_not_load_the_head():
    def refusing(made, name):
        return {
            server.name: server.how for server in layout_of(name, made).servers(made.config, "F") if not server.loads
        }

    assert refusing(head(), "dspark") == {}
    assert refusing(head(draft_vocab_size=10), "dspark") == {"SGLang 0.5.23": "does not run a draft vocabulary"}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    assert refusing(head(rope_parameters=scaled), "dspark") == {"llama.cpp 0.5": "does not run the linear rope"}
    assert "llama.cpp 0.5" in refusing(head(**DFLASH, draft_vocab_size=10), "dflash")


@pytest.mark.parametrize(("changes", "name"), [({}, "dspark"), (DFLASH, "dflash")])
def test_servers_run_no_head_of_a_target_that_gives_them_no_hidden_states(tmp_path, changes, name):
    MixtralConfig().save_pretrained(tmp_path)
    made = head(tmp_path, **changes)
    vllm, sglang, _ = layout_of(name, made).servers(made.config, "F")
    assert (vllm.loads, sglang.loads) == (False, False)
    assert "mixtral" in vllm.how
    assert "set_dflash_layers_to_capture" in sglang.how


def test_a_layer_that_servers_cannot_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="aux_layers 0: servers number a layer by its output"):
        save(head(aux_layers=[0, 2]), tmp_path / "head", layout_of("dspark", head()))
