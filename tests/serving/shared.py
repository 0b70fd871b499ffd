"""Helpers of the tests with other servers: the bundled target, half-trained heads, and the steps of our decoder."""

import json
from pathlib import Path

import torch

from speculator import Chain, HeadDrafter, Target, generate
from speculator.decoding.engine import Engine
from speculator.heads import Speculator
from speculator.heads.training import TrainingBatch
from train.losses import ChunkedLoss
from train.options.config import LossConfig

TARGET = Path(__file__).parents[2] / "examples" / "stdlib_target"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def vllm_runs(run_in, folder: Path, runs: list, speculative: dict | None = None, **given) -> list[dict]:
    """Run `vllm_runs.py`; a run is a list of requests that are submitted together."""
    inputs = {"target": str(TARGET), "speculative": speculative, "runs": runs, **given}
    (folder / "inputs.json").write_text(json.dumps(inputs))
    run_in("vllm", "vllm_runs.py", folder / "inputs.json", folder / "output.json", **ENVIRONMENT)
    return json.loads((folder / "output.json").read_text())


def draft_from(head, rows: list[list[int]]) -> None:
    """Set a draft vocabulary that contains every token of the texts."""
    if head.draft_tokens is None:
        return
    used = {token for row in rows for token in row}
    rest = sorted(set(range(head.config.vocab_size)) - used)
    head.draft_tokens.copy_(torch.tensor(sorted(used) + rest[: len(head.draft_tokens) - len(used)]).sort().values)


def our_steps(target, head, length: int, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Accepted tokens of each step of our decoder, per text, for steps that start within `counts` new tokens."""
    longer = [count + length + 1 for count in counts]
    made = generate(target, HeadDrafter(head, length), prompts, max_new_tokens=longer, eos_token_ids=())
    kept = []
    for steps, count in zip(made.steps, counts, strict=True):
        kept.append([])
        done = 1
        for step in steps:
            if done >= count:
                break
            assert not step.cut
            done += step.accepted + 1
            kept[-1].append(step.accepted)
    return kept


def per_position(steps: list[list[int]], length: int) -> list[int]:
    """Number of steps that accept each position of a draft."""
    return [sum(accepted > position for text in steps for accepted in text) for position in range(length)]


def equal_tokens(ours: list[list[int]], theirs: list[list]) -> tuple[int, int]:
    """Return how many drafted tokens are equal, of how many; the last step of a text may exist on one side only."""
    steps = zip(ours, (draft for *_, draft in theirs), strict=False)
    pairs = [pair for mine, its in steps for pair in zip(mine, its, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def fitted(
    head: Speculator, target: Target, prompts: list[list[int]], new: int, steps: int = 8, rate: float = 5e-3
) -> Speculator:
    """Train on the target's own continuations, so that some drafts are accepted and some are not."""
    batches = []
    for prompt, answer in zip(prompts, Engine(target).generate(prompts, max_new_tokens=new).tokens, strict=True):
        row = torch.tensor([prompt + answer])
        documents = torch.zeros_like(row)
        targets = head.config.training_targets(row, documents, torch.ones_like(row), [0])
        with target.aux_layers.recorded(head.aux_layers) as states:
            hidden = target.hidden(row)
        batches.append(
            TrainingBatch(input_ids=row, document_ids=documents, hidden=hidden, states=states(hidden), targets=targets)
        )
    loss = ChunkedLoss(target.logits, LossConfig(cross_entropy=1.0, kl=0.0), target.vocab_size)
    optimiser = torch.optim.AdamW([weight for weight in head.parameters() if weight.requires_grad], lr=rate)
    for step in range(steps):
        optimiser.zero_grad()
        total, count = head.train()(batches[step % len(batches)], loss)["objective"]
        (total * head.n_predict / count).backward()
        optimiser.step()
    return head.eval().requires_grad_(False)


def own_steps(
    target: Target, head: Speculator, drafted: int, prompt: list[int], new: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the draft of each step, the number accepted, and the text."""
    drafts: list[list[int]] = []

    class Noting(HeadDrafter):
        def propose(self, *given):
            draft = super().propose(*given)
            drafts.append(draft.tokens[0].tolist())
            return draft

    engine = Engine(target, Noting(head, Chain(drafted)), slots=1)
    made = engine.generate([prompt], max_new_tokens=new)
    return drafts, [step.accepted for step in made.steps[0]], made.tokens[0]
