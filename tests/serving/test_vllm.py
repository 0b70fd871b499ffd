"""vLLM 0.32 with our heads, in both layouts, on the embedded target: its text is plain greedy text, and each token that
it drafts is the one that we draft there."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculator.checkpoints import layout_of, save
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

TARGET = Path(__file__).parents[2] / "examples" / "stdlib_target"
PROMPTS = ["import argparse\n", "class Stack:\n    def __init__(self):\n", "def read(path):\n", "for i in range("]
NEW, LENGTH = 48, 3
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
HEADS = {
    "eagle3": {"draft_vocab_size": 2000},
    "speculators": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(model) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the target says after each."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    made = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, attention_mask=ids > -1, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        made.append((ids[0].tolist(), said[0, ids.shape[1] :].tolist()))
    return made


def taps_of(model, head: Eagle3Speculator, tokens: list[int]) -> torch.Tensor:  # [1, S, nD]
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[k] for k in head.config.taps], -1)


def half_known(model, texts, changes: dict) -> Eagle3Speculator:
    """A head that has learnt the texts by heart for some steps: some of its drafts are accepted, some are not."""
    torch.manual_seed(0)
    config = Eagle3SpeculatorConfig.for_target(model.config, n_predict=LENGTH, **changes)
    config.base_model_name_or_path = str(TARGET)
    head = Eagle3Speculator(config)
    rows = [prompt + said for prompt, said in texts]
    if head.draft_tokens is not None:
        used = sorted({token for row in rows for token in row})
        rest = sorted(set(range(config.vocab_size)) - set(used))
        head.draft_tokens.copy_(torch.tensor(sorted(used + rest[: len(head.draft_tokens) - len(used)])))
    head.share_embedding(model.get_input_embeddings().weight)
    head.start_from(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    taps = [taps_of(model, head, row) for row in rows]
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for step in range(30):
        row, tap = rows[step % len(rows)], taps[step % len(rows)]
        length = len(row) - LENGTH - 1
        tokens = torch.tensor([row])
        features = head.unrolled(tap[:, :length], tokens[:, 1:-1])
        loss = torch.zeros(())
        for i, feature in enumerate(features):
            labels = tokens[0, i + 2 : i + 2 + length]
            loss = loss + torch.nn.functional.cross_entropy(head.spread(head.lm_head(feature))[0], labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval()


def our_drafts(model, head: Eagle3Speculator, prompt: list[int], said: list[int]) -> tuple[list[list[int]], list[int]]:
    """The draft of each step of a greedy run, and how many tokens of each the text accepts."""
    text = prompt + said
    taps, memory = taps_of(model, head, text), head.memory(1, len(text) + LENGTH)
    done, end = 0, len(prompt)  # rows read; tokens that the target has read, the next one is text[end]
    drafts, accepted = [], []
    while end < len(text):
        new = torch.tensor([text[done + 1 : end + 1]])
        token = head.first(memory, taps[:, done:end], new, torch.tensor([end - done])).argmax(-1)
        draft = [token]
        while len(draft) < LENGTH:
            draft.append(head.next(memory, draft[-1], torch.zeros_like(token)).argmax(-1))
        drafts.append([int(token) for token in draft])
        same = [a == b for a, b in zip(drafts[-1], text[end + 1 :], strict=False)]
        accepted.append(([*same, False]).index(False))
        done, end = end, end + 1 + accepted[-1]
        memory.longest = done
    return drafts, accepted


@pytest.mark.parametrize("layout", HEADS)
def test_vllm_drafts_what_we_draft_and_says_what_the_target_says(tmp_path, model, texts, layout, run_in):
    head = half_known(model, texts, HEADS[layout])
    save(head, tmp_path / "head", layout_of(layout, head))
    given = {"prompts": [prompt for prompt, _ in texts], "max_new_tokens": NEW, "draft_length": LENGTH}
    (tmp_path / "inputs.json").write_text(json.dumps(given))
    arguments = (TARGET, tmp_path / "head", tmp_path / "inputs.json", tmp_path / "output.json")
    run_in("vllm", "vllm_drafts.py", *arguments, **ENVIRONMENT)
    output = json.loads((tmp_path / "output.json").read_text())
    same = drafted = steps = 0
    per_position = [0] * LENGTH
    for (prompt, said), theirs in zip(texts, output["results"], strict=True):
        assert theirs["text"] == said
        ours, accepted = our_drafts(model, head, prompt, said)
        # The last step may end within what it accepts; whether it drafts once more is vLLM's affair.
        for mine, its in zip(ours, theirs["drafts"], strict=False):
            same, drafted = same + sum(a == b for a, b in zip(mine, its, strict=True)), drafted + len(mine)
        assert abs(len(ours) - len(theirs["drafts"])) <= 1
        steps += len(ours)
        for count in accepted:
            for position in range(count):
                per_position[position] += 1
    print(f"{layout}: {same} of {drafted} drafted tokens equal in {steps} steps")
    print(f"accepted per position: vLLM {output['accepted']}, ours {per_position}")
    assert same == drafted
    assert 0 < sum(output["accepted"]) < drafted
    assert all(abs(a - b) <= len(texts) for a, b in zip(output["accepted"], per_position, strict=True))
