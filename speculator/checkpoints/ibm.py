"""The layout of IBM's published MLP heads: fms-extras, IBM TGIS, vLLM up to 0.9.2, and TGI for tied heads."""

from __future__ import annotations

from typing import Any

import transformers

from speculator.checkpoints import commands
from speculator.checkpoints.base_model import needs_embedding, with_own_embedding
from speculator.checkpoints.commands import line
from speculator.checkpoints.layout import ORIGIN, PREFIX, Layout, Server, whole_vocabulary
from speculator.checkpoints.table import DTYPE, Key, Table, constant, same
from speculator.heads.base import SpeculatorConfig
from speculator.heads.mlp.model import MLPSpeculator

_REFUSED = "Model architectures ['MLPSpeculatorPreTrainedModel'] are not supported for now"


def table(name: str, *more: Key) -> Table:
    """Return the rows of IBM's layout under another name, with more at the end.

    Every key is written, because some loaders have other defaults, or none. `top_k_tokens_per_head` and `n_candidates`
    shape the trees of fms-extras and TGIS; vLLM uses the list's length only.
    """
    return (
        whole_vocabulary(name),
        constant("model_type", "mlp_speculator"),
        Key(DTYPE, "torch_dtype"),
        constant("transformers_version", transformers.__version__),
        *same("vocab_size", "emb_dim"),
        Key("inner_dim", "inner_dim", default=0),  # never written as 0: TGI reads that as zero embeddings
        *same("n_predict"),
        Key("top_k_tokens_per_head", "top_k_tokens_per_head", _widths, optional=True),
        Key("n_candidates", "n_candidates", lambda config: getattr(config, "n_candidates", None) or 4, optional=True),
        # Heads published before July 2024 lack both, which are then false.
        *(Key(key, key, default=False) for key in ("tie_weights", "scale_input")),
        *ORIGIN,
        *more,
    )


def _widths(config: Any) -> list[int]:
    n = config.n_predict
    return getattr(config, "top_k_tokens_per_head", None) or ([4, 3] + [2] * n)[:n]


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
        Server("vLLM 0.5.1 to 0.9.2 (V0 engine)", True, vllm, ran=False),
        Server("vLLM 0.10 to 0.32", False, f"refuses at start: {_REFUSED}; for 0.32 export --format vllm-plugin"),
        Server("vLLM 0.33 and later", False, "no longer has this speculator"),
        Server("TGI", config.tie_weights and bool(base), tgi, ran=False),
        Server("fms-extras, IBM TGIS", True, "the layout is theirs; dormant", ran=False),
    ]


IBM = Layout(
    name="ibm",
    head=MLPSpeculator,
    architecture="MLPSpeculatorPreTrainedModel",
    table=table("ibm"),
    servers=servers,
    prefix=PREFIX,
    adapt=with_own_embedding,
    needs=needs_embedding,
)
