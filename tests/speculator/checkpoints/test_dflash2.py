"""The layouts of DFlash 2: published keys and names, and an implementation from the published equations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import DFLASH
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculator import Chain, UserError
from speculator.checkpoints import layout_of, load_any, recognise, save
from speculator.decoding.drafter import LogitsSource
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.target.cache.kv_cache import KVCache

V, D, G, TEXT = 48, 32, 4, 9
PARTS = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def head(**changes) -> DSparkSpeculator:
    shape = {
        "vocab_size": V, "emb_dim": D, "inner_dim": 40, "n_predict": G, "num_hidden_layers": 2, **DFLASH, **PARTS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "aux_layers": [1, 3], "mask_token_id": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    torch.manual_seed(0)
    made = DSparkSpeculator(DSparkSpeculatorConfig(**{**shape, **changes})).eval()
    for name, weight in made.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name or "base_kernel" in name else 0.0, std=0.3)
    return made


def given() -> dict[str, Tensor]:
    """States and tokens of a text and the target's two matrices."""
    torch.manual_seed(3)
    sizes = {"states": (TEXT, 2 * D), "embedding": (V, D), "output": (V, D)}
    return {"tokens": torch.randint(V, (TEXT + 1,)), **{name: torch.randn(size) for name, size in sizes.items()}}


def published(folder: Path, tokens: Tensor, states: Tensor, embedding: Tensor, output: Tensor) -> tuple[list, Tensor]:
    """Draft greedily with the files of a folder in the `dflash2` layout, slot by slot and channel by channel.

    Nothing of the library is used. Returns the path and the scores [G, V] along it, -inf for what is no candidate.
    """
    config = json.loads((folder / "config.json").read_text())
    block, w = config["dflash_config"], load_file(folder / "model.safetensors")
    size, heads, kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    slots, window = block["block_size"], config.get("sliding_window") or 10**9

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[name]

    def turned(x: Tensor, position: int) -> Tensor:  # [size]
        out = x.clone()
        for i in range(size // 2):
            angle = torch.tensor(position * config["rope_parameters"]["rope_theta"] ** (-2 * i / size))
            a, b = x[i], x[i + size // 2]
            out[i], out[i + size // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    def key_value(x: Tensor, layer: str, position: int) -> list[tuple[Tensor, Tensor]]:
        keys, values = (w[f"{layer}.self_attn.{name}_proj.weight"] @ x for name in "kv")
        keys, values = keys.view(kv, size), values.view(kv, size)
        return [(turned(rms(keys[i], f"{layer}.self_attn.k_norm.weight"), position), values[i]) for i in range(kv)]

    def mixed(x: list[Tensor], name: str, kernels: list[Tensor], side: int) -> list[Tensor]:
        out = []
        for j, own in enumerate(x):
            before = x[j - 1] if j else torch.zeros(D)
            row = torch.zeros(D)
            for c in range(D):
                delta = kernels[j].view(2, block["conv_kernel_size"], -1)[side, :, c // block["conv_group_size"]]
                base = w[f"{name}.base_kernel"][side, :, c]
                row[c] = (base[0] + delta[0]) * own[c] + (base[1] + delta[1]) * before[c]
            out.append(row)
        return out

    def around(x: list[Tensor], name: str, sublayer) -> list[Tensor]:
        kernels = [w[f"{name}.kernel_projection.weight"] @ row for row in x]
        return mixed(sublayer(mixed(x, name, kernels, 0)), name, kernels, 1)

    context = [rms(w["fc.weight"] @ row, "hidden_norm.weight") for row in states]
    start = len(states)
    h = [embedding[tokens[-1]], *[embedding[block["mask_token_id"]]] * (slots - 1)]
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"

        def attention(y: list[Tensor], layer: str = layer) -> list[Tensor]:
            memory = [key_value(row, layer, t) for t, row in enumerate(context)]
            memory += [key_value(row, layer, start + j) for j, row in enumerate(y)]
            out = []
            for j, row in enumerate(y):
                queries = (w[f"{layer}.self_attn.q_proj.weight"] @ row).view(heads, size)
                seen = [pair for t, pair in enumerate(memory) if t > start + j - window]
                parts = []
                for n in range(heads):
                    query = turned(rms(queries[n], f"{layer}.self_attn.q_norm.weight"), start + j)
                    pairs = [pair[n * kv // heads] for pair in seen]
                    weights = torch.stack([query @ key / size**0.5 for key, _ in pairs]).softmax(0)
                    parts.append(sum(share * value for share, (_, value) in zip(weights, pairs, strict=True)))
                out.append(w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(parts))
            return out

        def mlp(z: list[Tensor], layer: str = layer) -> list[Tensor]:
            gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return [down @ (torch.nn.functional.silu(gate @ row) * (up @ row)) for row in z]

        added = around([rms(row, f"{layer}.input_layernorm.weight") for row in h], f"{layer}.attention_conv", attention)
        h = [row + more for row, more in zip(h, added, strict=True)]
        added = around([rms(row, f"{layer}.post_attention_layernorm.weight") for row in h], f"{layer}.mlp_conv", mlp)
        h = [row + more for row, more in zip(h, added, strict=True)]
    selector, before, path, scores = "candidate_selector", tokens[-1], [], []
    for row in h[1:]:
        state = rms(row, "norm.weight")
        logits = output @ state
        best = logits.argsort(descending=True)[: block["selector_top_k"]]
        left = w[f"{selector}.predecessor_codebook"][before] * (w[f"{selector}.hidden_projection.weight"] @ state)
        whole = torch.full((V,), -torch.inf)
        whole[best] = logits[best] + w[f"{selector}.successor_codebook"][best] @ left
        before = whole.argmax()
        path.append(before.item())
        scores.append(whole)
    return path, torch.stack(scores)


def walked(made: DSparkSpeculator, tokens: Tensor, states: Tensor, embedding: Tensor, output: Tensor):
    """What `published` returns, by the head's own drafting form."""
    with made.sharing(embedding, output), torch.no_grad():
        source: LogitsSource = made.drafting_source()
        source.reserve(Chain(G))
        source = source.open(KVCache([], 1, TEXT + 1, torch.device("cpu")))
        source.prefill(0, [tokens[:-1].tolist()], [0], states[None], [TEXT])
        scores = [source.first(tokens[-1:], [tokens.tolist()])[0, 0]]
        while len(scores) < G:
            scores.append(source.next(len(scores), scores[-1].argmax()[None, None], torch.zeros(1, 1).long())[0, 0])
    return [row.argmax().item() for row in scores], torch.stack(scores)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 1, "sliding_window": 6}], ids=["full", "window"])
def test_a_written_head_drafts_as_the_published_equations_say(tmp_path, changes):
    made, inputs = head(**changes), given()
    save(made, tmp_path / "head", layout_of("dflash2", made))
    path, scores = published(tmp_path / "head", **inputs)
    mine, ours = walked(load_any(tmp_path / "head"), **inputs)
    assert mine == path
    finite = scores.isfinite()
    assert torch.equal(finite, ours.isfinite())
    assert (scores[finite] - ours[finite]).abs().max() < 1e-5 * scores[finite].std()
    # Without a part the draft is another one.
    for name in ("successor_codebook", "mlp_conv.kernel_projection", "attention_conv.base_kernel"):
        stored = load_file(tmp_path / "head" / "model.safetensors")
        save_file({n: x * (name not in n) for n, x in stored.items()}, tmp_path / "head" / "model.safetensors")
        assert (walked(load_any(tmp_path / "head"), **inputs)[1][:, :] - scores).nan_to_num(0).abs().max() > 0.1
        save_file(stored, tmp_path / "head" / "model.safetensors")


PUBLISHED = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "attention_bias": False, "is_causal": False, "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 2048, "vocab_size": V,
    "num_target_layers": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "dflash_config": {
        "block_size": G + 1, "conv_group_size": 8, "conv_kernel_size": 2, "mask_token_id": 7, "selector_rank": 6,
        "selector_top_k": 5, "target_layer_ids": [0, 2],
    },
}  # fmt: skip
"""The keys of z-lab/Qwen3.8-27B-DFlash2's config.json."""


def write(folder: Path, made: DSparkSpeculator, **changes) -> Path:
    folder.mkdir()
    nested = {**PUBLISHED["dflash_config"], **changes.pop("dflash_config", {})}
    config = {**PUBLISHED, **changes, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made.state_dict(), folder / "model.safetensors")
    return folder


def test_a_published_folder_is_read(tmp_path):
    made, inputs = head(sliding_window=2048), given()
    folder = write(tmp_path / "head", made)
    again = load_any(folder)
    assert recognise(folder).name == "dflash2"
    assert (again.n_predict, again.config.sliding_window, again.config.aux_layers) == (G, 2048, [1, 3])
    assert {name: getattr(again.config, name) for name in PARTS} == PARTS
    path, scores = published(folder, **inputs)
    mine, ours = walked(again, **inputs)
    assert mine == path
    torch.testing.assert_close(ours, scores, atol=1e-5 * D, rtol=0)
    save(again, tmp_path / "written", layout_of("dflash2", again))
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    more = {"target_layer_ids", "mask_token_id", "block_size", "draft_vocab_size", "rope_theta", "transformers_version"}
    assert PUBLISHED["dflash_config"] == written["dflash_config"]
    left_out = {name for name in PUBLISHED if name not in written}
    assert left_out == {"num_target_layers", "max_window_layers"}, "the target is not on this machine"
    assert {name for name in written if name not in PUBLISHED} <= more
    assert {name: value for name, value in PUBLISHED.items() if name not in left_out} == {
        name: written[name] for name in PUBLISHED if name not in left_out
    }


def test_a_folder_with_a_window_and_no_key_for_causal_blocks_has_none(tmp_path):
    folder = write(tmp_path / "head", head(sliding_window=2048))
    written = json.loads((folder / "config.json").read_text())
    del written["is_causal"]
    (folder / "config.json").write_text(json.dumps(written))
    assert load_any(folder).config.is_causal is False


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dflash_config": {"conv_kernel_size": 3}}, "conv_kernel_size is 3; must be 2"),
        ({"dflash_config": {"conv_kernel_size": None}}, "conv_kernel_size is None; must be 2"),
        ({"dflash_config": {"selector_rank": None}}, "config.json: selector_rank is missing"),
        ({"dflash_config": {"selector_top_k": V + 1}}, f"selector_top_k {V + 1} is more than the vocabulary"),
        ({"dflash_config": {"selector_rank": 5}}, r"predecessor_codebook is \[48, 6\], config.json says \[48, 5\]"),
        ({"dflash_config": {"output_multiplier": 0.2}}, "output_multiplier is 0.2; must be 1"),
        ({"dflash_config": {"final_logit_softcapping": 20.0}}, "final_logit_softcapping is 20.0; must be 0"),
        ({"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor must be false for DFlash"),
        ({"is_causal": True}, "is_causal must be false, not true: "),
        ({"draft_vocab_size": 9}, r"draft_vocab_size must be 0 \(all tokens\), not 9"),
        ({"architectures": ["DFlashDraftModel"]}, "unexpected tensors: candidate_selector"),
    ],
)
def test_a_head_that_would_draft_something_else_is_refused(tmp_path, changes, error):
    with pytest.raises(UserError, match=error):
        load_any(write(tmp_path / "head", head(), **changes))


@pytest.mark.parametrize("changes", [{}, {"conv_group_size": 0}, {"selector_rank": 0}, {"sliding_window": 8}])
@pytest.mark.parametrize("name", ["dflash2", "speculators", "native", "dflash", "dspark", "transformers"])
def test_a_head_is_the_same_after_it_was_written_and_read(tmp_path, name, changes):
    made = head(**changes)
    whole = made.config.conv_group_size and made.config.selector_rank
    if name in ("dflash", "dspark", "transformers") or (name != "native" and not whole):
        with pytest.raises(UserError, match=r"has no (convolutions|selector)|this head has none"):
            save(made, tmp_path / "head", layout_of(name, made))
        return
    save(made, tmp_path / "head", layout_of(name, made))  # compares config, tensors and logits
    again = load_any(tmp_path / "head")
    assert recognise(tmp_path / "head").name == name
    assert all(torch.equal(x, y) for x, y in zip(made.state_dict().values(), again.state_dict().values(), strict=True))
    kept = ("sliding_window", "n_predict", "aux_layers", "mask_token_id", *PARTS)
    assert [getattr(again.config, each) for each in kept] == [getattr(made.config, each) for each in kept]


def test_the_speculators_layout_has_that_librarys_keys(tmp_path, caplog):
    made = head()
    save(made, tmp_path / "head", layout_of("speculators", made))
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    expected = {
        "speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"], "block_size": G + 1,
        "sample_from_anchor": False, "sliding_window_non_causal": True, "conv_kernel_size": 2, **PARTS,
        "draft_vocab_size": V,
    }  # fmt: skip
    assert {name: written[name] for name in expected} == expected
    assert written["speculators_config"]["algorithm"] == "dflash2"
    del written["sliding_window_non_causal"]  # true by default, other than for DFlash
    written["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
    (tmp_path / "head" / "config.json").write_text(json.dumps(written))
    assert load_any(tmp_path / "head").config.is_causal is False
    assert "not read" not in caplog.text
    del written["selector_rank"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="selector_rank is missing"):
        load_any(tmp_path / "head")


def test_each_server_has_its_command_or_its_reason():
    made = head(sliding_window=2048)  # as published heads have it
    lines = {server.name: server for server in layout_of("dflash2", made).servers(made.config, "F")}
    assert all(server.loads for server in lines.values())
    assert '"method": "dflash"' in lines["vLLM 0.32 on a GPU"].how
    assert "--speculative-algorithm DFLASH" in lines["SGLang 0.5.23"].how
    assert "--spec-type draft-dflash" in lines["llama.cpp 0.5"].how
    wide = head(selector_top_k=16)
    reasons = {server.name: server.how for server in layout_of("dflash2", wide).servers(wide.config, "F")}
    assert "does not run a selector over 16 tokens below hidden size 272" in reasons["llama.cpp 0.5"]
