"""The head in `examples` loads and drafts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speculator.checkpoints import load_any
from speculator.drafters.tuning import read_tuning
from speculator.heads import Eagle3Speculator, MLPSpeculator

HEAD, CODER = Path("examples/smollm2_135m_instruct"), Path("examples/qwen2.5_coder_0.5b_instruct")


@pytest.mark.parametrize(
    ("folder", "kind", "target", "size", "depth"),
    [
        (HEAD, Eagle3Speculator, "HuggingFaceTB/SmolLM2-135M-Instruct", 26e6, 5),
        (CODER, MLPSpeculator, "Qwen/Qwen2.5-Coder-0.5B-Instruct", 24e6, 4),
    ],
)
def test_the_head_of_a_chat_model_loads_and_drafts(folder, kind, target, size, depth):
    head = load_any(folder)
    assert isinstance(head, kind)
    assert head.config.base_model_name_or_path == target
    assert sum(file.stat().st_size for file in folder.iterdir()) < size
    assert read_tuning(folder, head) is not None
    head.share_embedding(torch.randn(head.config.vocab_size, head.config.emb_dim))
    states = torch.randn(1, 5, (len(head.aux_layers) or 1) * head.config.emb_dim)
    logits = head.float().logits(states, torch.arange(5 + depth - 1)[None])
    assert logits.shape == (depth, 1, 5, head.config.vocab_size)
    assert logits[..., head.draft_tokens].isfinite().all()


@pytest.mark.parametrize(("folder", "report"), [(HEAD, "smollm2/spec_bench-t0"), (CODER, "qwen2.5_coder/humaneval-t0")])
def test_figures_of_a_card_are_those_of_the_report(folder, report):
    card = (folder / "README.md").read_text()
    rows = json.loads(Path("docs/lab", report, "report.json").read_text())["suites"]
    adaptive = next(row for row in rows if row["drafter"] == "adaptive")
    assert f"is {adaptive['speedup']['plain']['value']:.2f} times as fast as plain decoding" in card
    whole = adaptive["end_to_end_speedup"]["plain"]["value"]
    assert f"prefill included, are {whole:.2f} times as fast" in " ".join(card.split())
    tuned = json.loads((folder / "decoding.json").read_text())["prompts"]
    assert f"tuned on {tuned} Spec-Bench prompts" in card


@pytest.mark.parametrize("script", ["unlikelihood.py", "measure.py"])
def test_the_documented_scripts_start_in_an_installation(script, tmp_path):
    """From another folder, and without the paths that pytest adds."""
    file = Path("examples/stdlib_target").resolve() / script
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stderr


def test_prompts_that_the_target_rarely_writes_are_chats_of_one_question(tmp_path):
    script = HEAD / "prompts.py"
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "How many clips?"}) + "\n")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "A paragraph of a text.\n\n" * 60}) + "\n")
    for kind, rows in (("mathematics", "questions.jsonl"), ("texts", "texts.jsonl"), ("code", None)):
        flags = ["--rows", str(tmp_path / rows)] if rows else []
        done = subprocess.run([sys.executable, script, kind, *flags], capture_output=True, text=True, check=True)
        printed = [json.loads(line) for line in done.stdout.splitlines()]
        assert printed
        assert all([message["role"] for message in row["messages"]] == ["user"] for row in printed)
    done = subprocess.run([sys.executable, script, "mathematics"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "prompts.py: error: mathematics needs --rows")
