"""The layout of IBM's published MLP heads: fms-extras, IBM TGIS, vLLM up to 0.9.2, and TGI for tied heads."""

from __future__ import annotations

import transformers

from speculator.checkpoints import commands
from speculator.checkpoints.base_model import with_own_embedding
from speculator.checkpoints.commands import line
from speculator.checkpoints.layout import KEPT, ORIGIN, PREFIX, Layout, Server, origin
from speculator.files import JsonObject
from speculator.heads.base import SpeculatorConfig
from speculator.heads.mlp.model import MLPSpeculator

_REFUSED = "Model architectures ['MLPSpeculatorPreTrainedModel'] are not supported for now"


def fields(config: SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json. Every field is written out, because some loaders have other defaults, or none.

    `top_k_tokens_per_head` and `n_candidates` shape the trees of fms-extras and TGIS; vLLM uses the list's length only.
    """
    n = config.n_predict
    written = {
        "architectures": [IBM.architecture],
        "model_type": "mlp_speculator",
        "torch_dtype": dtype,
        "transformers_version": transformers.__version__,
        "vocab_size": config.vocab_size,
        "emb_dim": config.emb_dim,
        "inner_dim": config.inner_dim,  # never 0: TGI reads that as zero embeddings
        "n_predict": n,
        "top_k_tokens_per_head": getattr(config, "top_k_tokens_per_head", None) or ([4, 3] + [2] * n)[:n],
        "n_candidates": getattr(config, "n_candidates", None) or 4,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
    }
    return {**written, **origin(config)}


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """List vLLM, TGI, fms-extras and TGIS, each with its command for a head in `folder` or the reason that it fails."""
    n, base = config.n_predict, config.base_model_name_or_path
    vllm = commands.vllm(base, model=folder, num_speculative_tokens=n, draft_tensor_parallel_size=1)
    if not config.tie_weights:
        tgi = "fails when it loads a head that is not tied (AttributeError on emb.weight, since 2024-08-29)"
    elif not base:
        tgi = "reads the base model from base_model_name_or_path, which is not recorded: give --base_model"
    else:
        tgi = (
            f"{line(base, 'text-generation-launcher', '--model-id', folder, '--speculate', str(n))} (base: {base} at "
            f"revision main; a smaller --speculate silently changes what the head computes; best at temperature 0)"
        )
    return [
        Server("vLLM 0.5.1 to 0.9.2 (V0 engine)", True, vllm),
        Server("vLLM 0.10 to 0.32", False, f"refuses at start: {_REFUSED}; for 0.32 export --format vllm-plugin"),
        Server("vLLM 0.33 and later", False, "no longer has this speculator"),
        Server("TGI", config.tie_weights and bool(base), tgi),
        Server("fms-extras, IBM TGIS", True, "the layout is theirs; dormant"),
    ]


IBM = Layout(
    name="ibm",
    head=MLPSpeculator,
    architecture="MLPSpeculatorPreTrainedModel",
    prefix=PREFIX,
    fields=fields,
    servers=servers,
    # Heads published before July 2024 lack the last two fields, which are then false.
    defaults={"inner_dim": 0, "tie_weights": False, "scale_input": False},
    kept={name: KEPT[name] for name in (*ORIGIN, "top_k_tokens_per_head", "n_candidates")},
    expandable=True,
    adapt=with_own_embedding,
)
