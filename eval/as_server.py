"""`speculator eval --as SERVER`: acceptance under another server's drafting, and the figures that the server logs.

vLLM, SGLang (with one token per level) and llama.cpp draft chains of the likeliest tokens. Above temperature 0, vLLM
and SGLang accept such a token x with probability p(x), and llama.cpp compares it with its own sample. Both have the law
of the rule `match`, which runs here. Under `rejection` and `block` the chain is sampled: vLLM's `draft_sample_method:
probabilistic` with `rejection_sample_method` standard or block, and SGLang's DSpark.
"""

from __future__ import annotations

from eval.decoders import Decoder, decoder_of
from eval.timing import Engines, Timed
from speculator.acceptance import Acceptance
from speculator.drafters import Chain, HeadDrafter
from speculator.errors import refuse
from speculator.heads import Speculator
from speculator.report import ServerLog
from speculator.target.model import Target

_LENGTHS = {"llama.cpp": 3, "sglang": 3}
"""Defaults of --spec-draft-n-max and, but for Llama, --speculative-num-steps; vLLM has none."""


def default_lengths(server: str, head: Speculator, target: Target) -> list[int]:
    """Return the draft lengths to measure by default ([]: as trained); a UserError if SGLang's default is a tree."""
    refuse(
        (
            server == "sglang" and target.config.model_type == "llama",
            "--as sglang: SGLang drafts a tree for this target by default: start it with --speculative-eagle-topk 1 "
            "and --speculative-num-steps G, and give --num_speculative_tokens G",
        )
    )
    return [min(_LENGTHS[server], head.n_predict)] if server in _LENGTHS else []


def server_decoders(
    target: Target, head: Speculator, lengths: list[int], engines: Engines, rule: str | None
) -> list[Decoder]:
    """Return plain decoding, then the head's chain of each length: likeliest tokens, or with a `rule` sampled ones."""
    table = [decoder_of(target, "none", None, engines)]
    for number, length in enumerate(lengths):
        drafter = HeadDrafter(head, Chain(length, sampled=rule is not None))
        table.append(decoder_of(target, f"head {length}" if number else "head", drafter, engines, rule))
    return table


def server_log(timed: Timed, num_speculative_tokens: int) -> ServerLog:
    """Return what a server logs for these steps; unlike a report's figures it has those that ended a text."""
    found = Acceptance.of(timed.steps, cut=True)
    drafted = sum(step.drafted for step in timed.steps)
    return ServerLog(
        found.steps,
        drafted,
        accepted_per_position=found.per_position(num_speculative_tokens),
        mean_acceptance_length=found.length,
    )
