"""Tiny models with MTP layers, and transformers' own form of those layers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import VOCAB, tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmOcrConfig,
    HYV3Config,
    MellumConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.modeling_layers import MtpModel

from speculator.checkpoints.loading import bind
from speculator.heads import MTPSpeculator, MTPSpeculatorConfig
from speculator.target.model import Target

_SHAPE: dict[str, Any] = dict(  # noqa: C408
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_EXPERTS: dict[str, Any] = dict(moe_intermediate_size=24, num_experts_per_tok=2)  # noqa: C408
_GLM = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)  # noqa: C408
_MLA = dict(q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)  # noqa: C408
_MIXED = ["linear_attention", "full_attention"]
_DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)  # noqa: C408

_ROUTED = dict(num_experts=4, num_shared_experts=1)  # noqa: C408
_OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_next": (
        Qwen3NextConfig,
        {**_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16, "layer_types": _MIXED},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**_GLM, **_MLA, "num_key_value_heads": 2, "head_dim": 8}),
    "hy_v3": (HYV3Config, _ROUTED),
    "bailing_hybrid": (
        getattr(transformers, "BailingHybridConfig", None),  # since 5.23
        {
            **_MLA,
            **_ROUTED,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": _MIXED,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "exaone_moe": (
        ExaoneMoeConfig,
        {
            **_ROUTED,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def config_of(family: str, layers: int = 2, mtp_layers: int = 1, **sizes: Any) -> Any:
    """Config of a tiny model of a family; `qwen3_5` is a hybrid one."""
    shape = _SHAPE | _EXPERTS | {"num_hidden_layers": layers} | sizes
    if family == "glm4_moe":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        made: Any = Glm4MoeConfig(**shape, **_GLM, use_qk_norm=True, rope_parameters=rope)
    elif family == "deepseek_v3":
        shape |= {"num_key_value_heads": 2, "head_dim": 8}
        made = DeepseekV3Config(**shape, **_GLM, **_MLA, routed_scaling_factor=1.5)
    elif family == "mellum":
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        made = MellumConfig(**shape, num_experts=4, sliding_window=6, layer_types=kinds, num_mtp_layers=1)
    elif family == "glm_ocr":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
        text = {**shape, "rope_parameters": rope, "num_nextn_predict_layers": mtp_layers}
        tower = dict(hidden_size=16, depth=1, num_heads=2, intermediate_size=16, out_hidden_size=32)  # noqa: C408
        return GlmOcrConfig(text_config=text, vision_config=tower)
    elif family in _OTHERS:
        kind, more = _OTHERS[family]
        if kind is None:
            pytest.skip("this version of transformers lacks the family")
        made = kind(**{**shape, **more})
    else:
        shape = {"layer_types": ["linear_attention", "full_attention"] * (layers // 2), **shape, **_DELTA}
        if family == "qwen3_5":
            made = Qwen3_5TextConfig(**{name: value for name, value in shape.items() if name not in _EXPERTS})
        else:
            made = Qwen3_5MoeTextConfig(**shape, num_experts=4, shared_expert_intermediate_size=16)
        made.mtp_num_hidden_layers = mtp_layers
        return made
    made.num_nextn_predict_layers = mtp_layers
    return made


def model_of(config: Any) -> Any:
    """Random model with norms between 0.7 and 1.3."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(copy.deepcopy(config), experts_implementation="eager")
    return _rough(model)


def _rough(model: Any) -> Any:
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data += torch.rand_like(weight) * 0.6 - 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model.eval()


def mtp_of(model: Any, layers: int = 1) -> MtpModel:
    """transformers' own MTP model, with random weights."""
    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this version of transformers runs MTP layers in another way")
    text = model.config.get_text_config()
    if getattr(text, "num_mtp_layers", None) is None or text.model_type == "bailing_hybrid":
        # A family whose layer transformers doesn't run.
        model = copy.copy(model)
        model.config = copy.deepcopy(model.config)
        text = model.config.get_text_config()
        text.num_mtp_layers, text.mtp_layer_types = layers, ["full_attention"] * layers
        text.mtp_mlp_layer_types = ["dense" if text.model_type == "exaone_moe" else "sparse"] * layers
    torch.manual_seed(1)
    mtp = MtpModel(model, layers)
    for name, weight in mtp.named_parameters():
        if name.startswith("layers.") and weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    parts = {id(each) for each in model.parameters()}
    for name, weight in mtp.named_parameters():
        if "norm" in name and id(weight) not in parts:
            weight.data += torch.rand_like(weight) * 0.6 - 0.3
    for name, buffer in mtp.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return mtp.eval()


def head_of(target: Target, mtp: MtpModel, **options: Any) -> MTPSpeculator:
    """Our head with the weights of transformers' MTP model."""
    config = MTPSpeculatorConfig.for_target(target.config, **options)
    head = MTPSpeculator(config)
    names = {name: name.replace(".block.", ".mtp_block.") for name in head.state_dict()}
    names = {
        name: theirs.replace("norm.weight", "post_norm.weight") if _is_final(name) else theirs
        for name, theirs in names.items()
    }
    theirs = mtp.state_dict()
    head.load_state_dict({name: theirs[other].clone() for name, other in names.items()})
    for part in head.modules():
        if type(part).__name__.endswith("Experts"):
            part.config._experts_implementation = "eager"  # grouped products exist in float32 only
    return bind(head.to(target.dtype).eval(), target)


def _is_final(name: str) -> bool:
    return name.split(".")[2] == "norm"


@torch.no_grad()
def naive(target: Target, mtp: MtpModel, drafts: list[tuple]) -> Tensor:  # [len(drafts), V]
    """Logits after drafts (text, path), by whole rows without a cache. Texts have one length, and a pending token."""
    row, steps = torch.tensor([text for text, _ in drafts]), 1 + max(len(path) for _, path in drafts)
    paths = torch.tensor([[*path, *[0] * (steps - len(path))] for _, path in drafts])
    states, tokens, last = target.hidden(row[:, :-1]), row[:, 1:], []
    for i in range(steps):
        positions = torch.arange(1, states.shape[1] + 1)[None]  # counted as transformers does
        out = mtp.forward_layer(0, states, positions, None, input_ids=tokens)
        states = torch.cat([states, out[:, -1:]], 1)
        tokens = torch.cat([tokens, paths[:, i : i + 1]], 1)
        last.append(out[:, -1])
    return mtp.shared_head(torch.stack(last)[[len(path) for _, path in drafts], torch.arange(len(drafts))])


def save(
    folder: Path, model: Any, mtp: MtpModel, experts: str = "loose", shards: int = 1, dtype: torch.dtype | None = None
) -> Path:
    """Save a model with its MTP layers under the names of the hub, and the tiny tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()} | hub_tensors(
        model, mtp, experts, dtype
    )
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors, shards)
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index, names = {}, sorted(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensors[name] for name in names[number::shards]}
        save_file(own, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )


_PUBLISHED = {
    "hy_v3": {
        ".mlp.gate.": ".mlp.router.gate.",
        ".mlp.e_score_correction_bias": ".mlp.expert_bias",
        ".mlp.shared_experts.": ".mlp.shared_mlp.",
    },
    "bailing_hybrid": {
        ".self_attn.o_proj.": ".attention.dense.",
        ".self_attn.": ".attention.",
        ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    },
}
"""Names in transformers that differ from the published ones."""


def hub_tensors(
    model: Any, mtp: MtpModel, experts: str = "loose", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The MTP layers' tensors under the names of the hub."""
    text = model.config.get_text_config()
    kind, root = text.model_type, "model." if text is model.config else "model.language_model."
    numbered = kind in ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "glm_ocr_text", "hy_v3", "bailing_hybrid")
    final = "final_layernorm" if kind in ("hy_v3", "bailing_hybrid") else "shared_head.norm"
    made = {}
    for ours, tensor in mtp.state_dict().items():
        if not ours.startswith("layers."):
            continue
        tensor = tensor if ours.endswith("correction_bias") else tensor.to(dtype or tensor.dtype)
        _, index, rest = ours.split(".", 2)
        if numbered:
            prefix = f"{root}layers.{text.num_hidden_layers + int(index)}."
            name = prefix + rest.replace("mtp_block.", "").replace("post_norm", final)
        else:
            parts = {
                "enorm": "pre_fc_norm_embedding",
                "hnorm": "pre_fc_norm_hidden",
                "eh_proj": "fc",
                "post_norm": "norm",
            }
            first, _, last = rest.partition(".")
            name = "mtp." + (f"{parts[first]}.{last}" if first in parts else f"layers.0.{last}")
        for theirs, published in _PUBLISHED.get(kind, {}).items():
            name = name.replace(theirs, published)
        stem = name.rpartition(".")[0]
        if experts == "loose" and name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                made |= {f"{stem}.{e}.gate_proj.weight": gate.clone(), f"{stem}.{e}.up_proj.weight": up.clone()}
        elif experts == "loose" and name.endswith("experts.down_proj"):
            made |= {f"{stem}.{e}.down_proj.weight": matrix.clone() for e, matrix in enumerate(tensor)}
        else:
            made[name] = tensor.clone()
    return made
