"""Logits of a block drafter in the `speculators` library; runs in that library's environment.

Usage: speculators_block_logits.py HEAD INPUTS OUTPUT. INPUTS holds aux_hidden [1, S, nD], tokens [1, S], documents
[1, S], hidden [1, S, D] (before the target's last norm) and anchors [A]. The script writes each slot's logits, the
target's, and the confidence head's to OUTPUT; with a selector the logits are its scores, and 0 for other tokens.
"""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig


def main(kind: str, head: str, inputs: str, output: str) -> None:
    kinds = {
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    }
    config_class, model_class = kinds[kind]
    config = config_class.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class.from_pretrained(head, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    anchors = given["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    mask = torch.ones_like(given["tokens"])
    with torch.no_grad():
        hidden, logits, targets, _, places = model._backbone_forward(
            given["aux_hidden"],
            given["tokens"],
            mask,
            given["hidden"],
            given["documents"],
            max_anchors=len(anchors),
        )
        size = config.block_size
        found = {"logits": logits, "targets": targets}
        found = {name: x.view(len(anchors), size, -1) for name, x in found.items()}
        states = hidden.view(len(anchors), size, -1)
        if getattr(model, "markov_head", None) is not None:
            ids = given["tokens"][0][places.view(len(anchors), size)]
            if not config.sample_from_anchor:
                ids = torch.cat([ids[:, :1], ids[:, :-1]], 1)
            found["logits"] = found["logits"] + model.markov_head.block_bias(prev_token_ids=ids, hidden_states=states)
            if model.confidence_head is not None:
                embedded = model.markov_head.markov_w1(ids)
                found["confidence"] = model.confidence_head(torch.cat([states, embedded], -1))
        if kind == "dflash2":
            before = model._predecessor_ids(given["tokens"], places)
            best, scores = model.candidate_selector.select(found["logits"], states, before)
            found["logits"] = torch.zeros_like(found["logits"]).scatter(-1, best, scores)
    save_file({name: x.contiguous() for name, x in found.items()}, Path(output) / "logits.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
