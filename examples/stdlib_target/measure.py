"""How good the embedded target is, or another: its held-out loss, and how much of its greedy text repeats itself.

    python examples/stdlib_target/measure.py [--target FOLDER] [--output FILE]

An under-trained model loops, and loops flatter every drafter, so both figures stand beside its weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data.mixture import PYTHON_SOURCES, mixture_of  # noqa: E402
from data.sources import documents, token_documents  # noqa: E402
from eval.suites import from_text  # noqa: E402
from speculator import Target, generate  # noqa: E402
from train.processes import use_all_cores  # noqa: E402

TEXT = mixture_of([PYTHON_SOURCES])
LENGTH = 256
PROMPT_TOKENS, NEW_TOKENS, NGRAM = 64, 128, 8


def held_out_loss(target: Target, count: int) -> dict[str, float]:
    """Mean loss per token over packed held-out rows, in nats, and the same in bits per byte of text."""
    texts = (document["input_ids"] for document in token_documents(TEXT, "held-out", target.tokenizer))
    tokens_of_all = list(islice(chain.from_iterable(texts), count * LENGTH))
    rows = [tokens_of_all[start : start + LENGTH] for start in range(0, len(tokens_of_all) - LENGTH + 1, LENGTH)]
    total = 0.0
    for start in range(0, len(rows), 8):
        ids = torch.tensor(rows[start : start + 8], device=target.device)
        logits = target.logits(target.hidden(ids))[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    tokens = len(rows) * (LENGTH - 1)
    text_bytes = sum(len(target.tokenizer.decode(row[1:], skip_special_tokens=True).encode()) for row in rows)
    return {
        "tokens": tokens,
        "nats_per_token": total / tokens,
        "bits_per_byte": total / text_bytes / 0.6931471805599453,
    }


def repeated_share(texts: list[list[int]]) -> float:
    """Share of a text's n-grams that it contained already."""
    repeated = total = 0
    for text in texts:
        seen: set[tuple[int, ...]] = set()
        for i in range(len(text) - NGRAM + 1):
            gram = tuple(text[i : i + NGRAM])
            repeated += gram in seen
            total += 1
            seen.add(gram)
    return repeated / total


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=here, help="folder of the model")
    parser.add_argument("--output", type=Path, help="default: quality.json beside the model")
    parser.add_argument("--rows", type=int, default=400, help=f"of {LENGTH} tokens, for the loss; default: 400")
    parser.add_argument("--prompts", type=int, default=64, help="continued greedily; default: 64")
    args = parser.parse_args()
    use_all_cores()
    target = Target.load(str(args.target))
    prompts = from_text(TEXT, target.tokenizer, PROMPT_TOKENS, args.prompts, split="held-out").prompts
    greedy = generate(target, None, prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=()).check().tokens
    originals = []
    for row in documents(PYTHON_SOURCES, "held-out"):
        ids = target.tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= NEW_TOKENS:
            originals.append(ids[:NEW_TOKENS])
        if len(originals) == args.prompts:
            break
    figures = {
        "parameters": target.model.num_parameters(),
        "held_out": held_out_loss(target, args.rows),
        f"greedy_{NGRAM}_grams_repeated": repeated_share(greedy),
        f"real_text_{NGRAM}_grams_repeated": repeated_share(originals),
    }
    (args.output or args.target / "quality.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
