"""DFlash heads in transformers' own class: the files, and its decoding next to ours."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import tiny_block_head

from speculator import Chain, HeadDrafter, Target, UserError, generate
from speculator.checkpoints import layout_of, load_any, recognise, save

DFLASH = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False, "aux_layers": [1, 3]}
DECODES = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers decodes DFlash heads from 5.23 on"
)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, eos_token_id=None, **shape))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return Target(model.eval(), tokenizer=None)


def test_a_head_is_the_same_after_it_was_written_and_read(target, tmp_path):
    made = tiny_block_head(target, **DFLASH)
    save(made, tmp_path / "head", layout_of("transformers", made))
    assert recognise(tmp_path / "head").name == "transformers"
    again = load_any(tmp_path / "head")
    ours, theirs = made.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (again.n_predict, again.config.aux_layers, again.config.mask_token_id) == (3, [1, 3], 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({**DFLASH, "markov_rank": 4}, "no Markov head"),
        ({**DFLASH, "confidence_head": True}, "no confidence head"),
        ({**DFLASH, "sample_from_anchor": True}, "the anchor's slot"),
        ({**DFLASH, "is_causal": True}, "no causal blocks"),
        ({**DFLASH, "sliding_window": 6}, "sliding window"),
        ({**DFLASH, "draft_tokens": [1, 2, 5]}, "can't store a draft vocabulary"),
        ({**DFLASH, "aux_layers": [0, 1]}, "aux_layers 0"),
        (
            {**DFLASH, "num_attention_heads": 3, "num_key_value_heads": 1},
            "a multiple of the 3 attention heads; it is 32",
        ),
    ],
)
def test_options_without_a_counterpart_in_transformers_are_refused(target, tmp_path, changes, reason):
    made = tiny_block_head(target, **changes)
    with pytest.raises(UserError, match=reason):
        save(made, tmp_path / "head", layout_of("transformers", made))
    assert not (tmp_path / "head").exists()


@DECODES
@pytest.mark.parametrize(("rope", "n_predict"), [("default", 1), ("llama3", 4)])
def test_transformers_drafts_and_writes_what_we_do(target, tmp_path, monkeypatch, n_predict, rope):
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    model: transformers.LlamaForCausalLM = target.model
    llama3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    parameters = {"rope_type": rope, "rope_theta": 100.0, **(llama3 if rope == "llama3" else {})}
    made = tiny_block_head(target, n_predict, **DFLASH, rope_parameters=parameters)
    save(made, tmp_path / "head", layout_of("transformers", made))
    assistant = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert type(assistant).__name__ == "MuseGlimmerAssistantModel"

    theirs: list[list[int]] = []
    ours: list[list[int]] = []
    draft = Generator.get_candidates

    def recorded(self, input_ids, *arguments, **named):
        candidates, logits = draft(self, input_ids, *arguments, **named)
        if logits is not None:
            theirs.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    class Recorded(HeadDrafter):
        def propose(self, *arguments):
            draft = super().propose(*arguments)
            ours.append(draft.tokens[0].tolist())
            return draft

    monkeypatch.setattr(Generator, "get_candidates", recorded)
    ends = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    accepted = 0
    for start in range(8):
        prompt = [(start * 7 + i * 3) % 32 for i in range(3 + start)]
        row = torch.tensor([prompt])
        asked = {"attention_mask": torch.ones_like(row), "assistant_model": assistant, "speculation_type": "dflash"}
        text = model.generate(row, **asked, **ends)[0, len(prompt) :].tolist()
        drafter = Recorded(made, Chain(n_predict))
        generation = generate(target, drafter, [prompt], max_new_tokens=40, eos_token_ids=())
        assert text == generation.tokens[0]
        accepted += sum(step.accepted for step in generation.steps[0])
        # transformers drafts nothing where one token is left
        assert theirs == ours[: len(theirs)]
        assert 0 <= len(ours) - len(theirs) <= 1
        assert theirs
        theirs.clear(), ours.clear()
    assert accepted
