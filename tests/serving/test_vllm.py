"""EAGLE-3 heads in both layouts, and a DFlash head, in vLLM 0.32: greedy text and draft tokens equal ours."""

import pytest
import torch
from conftest import DFLASH
from serving.shared import TARGET, draft_from, equal_tokens, fitted, own_steps, vllm_runs
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculator import Target
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig, Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Form

PROMPTS = ["import argparse\n", "class Stack:\n    def __init__(self):\n", "def read(path):\n", "for i in range("]
NEW, LENGTH = 48, 3
HEADS = {
    "eagle3": {"draft_vocab_size": 2000},
    "speculators": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(model) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's greedy continuations."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, attention_mask=ids > -1, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        made.append((ids[0].tolist(), answer[0, ids.shape[1] :].tolist()))
    return made


def aux_hidden_of(model, head: Eagle3Speculator, tokens: list[int]) -> torch.Tensor:  # [1, S, nD]
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[k] for k in head.config.aux_layers], -1)


def half_known(model, texts, changes: dict) -> Eagle3Speculator:
    """A head trained on the texts for a few steps, so that some of its drafts are accepted and some are not."""
    torch.manual_seed(0)
    config = Eagle3SpeculatorConfig.for_target(model.config, n_predict=LENGTH, **changes)
    config.base_model_name_or_path = str(TARGET)
    head = Eagle3Speculator(config)
    rows = [prompt + answer for prompt, answer in texts]
    draft_from(head, rows)
    head.share_embedding(model.get_input_embeddings().weight)
    head.initialise_from(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    aux_hidden = [aux_hidden_of(model, head, row) for row in rows]
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for step in range(30):
        row, states = rows[step % len(rows)], aux_hidden[step % len(rows)]
        length = len(row) - LENGTH - 1
        tokens = torch.tensor([row])
        features = head.unrolled(states[:, :length], tokens[:, 1:-1])
        loss = torch.zeros(())
        for i, feature in enumerate(features):
            labels = tokens[0, i + 2 : i + 2 + length]
            loss = loss + torch.nn.functional.cross_entropy(head.to_full_vocabulary(head.lm_head(feature))[0], labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval()


def our_drafts(
    model, head: Eagle3Speculator, prompt: list[int], answer: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Draft of each step of a greedy run, and the number of its tokens that the text accepts."""
    text = prompt + answer
    aux_hidden, form = aux_hidden_of(model, head, text), Eagle3Form(head)
    memory = form.cache(1, len(text) + LENGTH)
    done, end = 0, len(prompt)  # tokens that the head, and the target, have processed
    drafts, accepted = [], []
    while end < len(text):
        new = torch.tensor([text[done + 1 : end + 1]])
        token = form.first(memory, aux_hidden[:, done:end], new, torch.tensor([end - done])).argmax(-1)
        draft = [token]
        while len(draft) < LENGTH:
            draft.append(form.next(memory, draft[-1], torch.zeros_like(token)).argmax(-1))
        drafts.append([int(token) for token in draft])
        same = [a == b for a, b in zip(drafts[-1], text[end + 1 :], strict=False)]
        accepted.append(([*same, False]).index(False))
        done, end = end, end + 1 + accepted[-1]
        memory.longest = done
    return drafts, accepted


@pytest.mark.parametrize("layout", HEADS)
def test_vllm_writes_our_text_and_drafts_our_tokens(tmp_path, model, texts, layout, run_in, report):
    head = half_known(model, texts, HEADS[layout])
    save(head, tmp_path / "head", layout_of(layout, head))
    runs = [[{"prompt": prompt, "max_new_tokens": NEW}] for prompt, _ in texts]
    engine = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}
    speculative = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    made = vllm_runs(run_in, tmp_path, runs, speculative, engine=engine)
    same = drafted = steps = 0
    per_position, accepted = [0] * LENGTH, [sum(run["accepted"][i] for run in made) for i in range(LENGTH)]
    for (prompt, answer), theirs in zip(texts, made, strict=True):
        assert theirs["texts"] == [answer]
        ours, counts = our_drafts(model, head, prompt, answer)
        equal, of = equal_tokens(ours, theirs["drafts"])
        same, drafted = same + equal, drafted + of
        # The text may end inside the last step; vLLM may draft once more then.
        assert abs(len(ours) - len(theirs["drafts"])) <= 1
        steps += len(ours)
        for count in counts:
            for position in range(count):
                per_position[position] += 1
    report(f"{layout}: text identical; {same} of {drafted} drafted tokens equal in {steps} steps")
    report(f"accepted per position: vLLM {accepted}, ours {per_position}")
    assert same == drafted
    assert 0 < sum(accepted) < drafted
    assert all(abs(a - b) <= len(texts) for a, b in zip(accepted, per_position, strict=True))


@pytest.mark.parametrize(("layers", "window"), [(1, None), (2, None), (2, 8)])
def test_every_token_of_a_dflash_head_is_ours(tmp_path, texts, layers, window, run_in, report):
    """The weights of `k_norm` stay 1: vLLM's CPU backend norms the text's keys of every layer by the first one's."""
    target = Target.load(str(TARGET), dtype="float32")
    torch.manual_seed(0)
    changes = {"n_predict": LENGTH, "num_hidden_layers": layers, "mask_token_id": 3, **DFLASH}
    changes["sliding_window"] = window
    config = DSparkSpeculatorConfig.for_target(target.config, base_model_name_or_path=str(TARGET), **changes)
    head = bind(DSparkSpeculator(config), target)
    for layer in head.layers:
        layer.self_attn.k_norm.weight.requires_grad_(False)
    head = fitted(head, target, [prompt for prompt, _ in texts], NEW, steps=40)
    save(head, tmp_path / "head", layout_of("dflash", head))
    runs = [[{"prompt": prompt, "max_new_tokens": NEW}] for prompt, _ in texts]
    engine = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}
    speculative = {"method": "dflash", "model": str(tmp_path / "head"), "num_speculative_tokens": LENGTH}
    made = vllm_runs(run_in, tmp_path, runs, speculative, engine=engine)
    same = drafted = kept = 0
    for (prompt, answer), theirs in zip(texts, made, strict=True):
        drafts, accepted, text = own_steps(target, head, LENGTH, prompt, NEW)
        assert theirs["texts"] == [text] == [answer]
        kept += sum(accepted)
        equal, of = equal_tokens(drafts, theirs["drafts"])
        same, drafted = same + equal, drafted + of
    found = sum(sum(run["accepted"]) for run in made)
    kind = f"DFlash, {layers} layers, window {window}"
    report(f"{kind}: {same} of {drafted} tokens equal; accepted: vLLM {found}, ours {kept}")
    assert same == drafted
    assert 0 < kept < drafted
    assert abs(found - kept) <= len(texts) * LENGTH  # the text may end inside the last step
