"""Peak memory and time of one training pass of the attention head, as the sequence grows: in blocks, and in one piece.

    python -m benchmarks.eagle3_memory [LENGTH ...]

Each figure is of a process of its own, so that its peak is its own, and above what the process has with the head, its
gradients and the taps in it. In the last columns a third of the rows learn, as in chats. In one piece is left out
beyond 2,048 tokens: it grows with the square.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from speculator.tables import markdown_table

SIZES = {"vocab_size": 4096, "emb_dim": 512, "inner_dim": 1024, "n_predict": 5, "draft_vocab_size": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "aux_layers": [2, 6, 9]}
FORMS = ("blocks", "one piece", "a third learns")


def measure(form: str, length: int) -> tuple[float, float]:
    """MiB above the start, and seconds, of a forward and a backward pass."""
    import torch

    from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig, eagle3

    head = Eagle3Speculator(Eagle3SpeculatorConfig(**SIZES, **HEADS))
    head.share_embedding(torch.randn(SIZES["vocab_size"], SIZES["emb_dim"]))
    taps = torch.randn(1, length, head.fc.in_features)
    tokens = torch.randint(SIZES["vocab_size"], (1, length + SIZES["n_predict"] - 1))
    for weight in head.parameters():
        weight.grad = torch.zeros_like(weight)
    loss_mask = torch.arange(length)[None] % 96 >= (64 if form == "a third learns" else 0)
    if form == "one piece":
        eagle3._SCORES["cpu"] = 2**62
    before, start = _peak(), time.perf_counter()
    sum(feature.square().mean() for feature in head.unrolled(taps, tokens, None, loss_mask)).backward()
    return _peak() - before, time.perf_counter() - start


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(lengths: list[int]) -> None:
    table = []
    for length in lengths:
        cells = [str(length)]
        for form in FORMS:
            if form == "one piece" and length > 2048:
                cells += ["", ""]
                continue
            command = [sys.executable, "-m", "benchmarks.eagle3_memory", "--one", form, str(length)]
            done = subprocess.run(command, capture_output=True, text=True)
            cells += done.stdout.split() if done.returncode == 0 else ["out of memory", ""]
        table.append(cells)
    print(markdown_table(("tokens", *(f"{form}: {unit}" for form in FORMS for unit in ("MiB", "s"))), table))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("{:.0f} {:.1f}".format(*measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main([int(length) for length in sys.argv[1:]] or [1024, 2048, 4096, 8192])
