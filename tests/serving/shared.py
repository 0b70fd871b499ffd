"""What the tests with vLLM share: the embedded target, how vLLM is run, and what our decoder accepts."""

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
    """What `vllm_runs.py` gives for these runs: lists of requests that are there at once."""
    inputs = {"target": str(TARGET), "speculative": speculative, "runs": runs, **given}
    (folder / "inputs.json").write_text(json.dumps(inputs))
    run_in("vllm", "vllm_runs.py", folder / "inputs.json", folder / "output.json", **ENVIRONMENT)
    return json.loads((folder / "output.json").read_text())


def draft_from(head, rows: list[list[int]]) -> None:
    """Give a head a draft vocabulary that has every token of the texts."""
    if head.draft_tokens is None:
        return
    used = {token for row in rows for token in row}
    rest = sorted(set(range(head.config.vocab_size)) - used)
    head.draft_tokens.copy_(torch.tensor(sorted(used) + rest[: len(head.draft_tokens) - len(used)]).sort().values)


def our_steps(target, head, length: int, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """How many tokens each step of our decoder accepts, of each text: steps that begin within so many new tokens."""
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
    """How many steps accept each position of a draft."""
    return [sum(accepted > position for text in steps for accepted in text) for position in range(length)]
