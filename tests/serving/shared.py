"""Helpers of the tests with vLLM: the bundled target, runs of vLLM, and the steps of our decoder."""

import json
from pathlib import Path

import torch

from speculator import HeadDrafter, generate

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
