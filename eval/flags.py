"""Flags of `speculator eval` and its commands. Each function has a command's name and its description."""

from __future__ import annotations

from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from typing import get_args

from eval.tracking import Tracker
from speculator.cli.shared_flags import MANY, add_drafter_flags, add_filters, add_revision, add_target_flags
from speculator.errors import OneLineParser
from speculator.tables import OPTIONAL

_FITTING = "at most 32, as many as take seven minutes"
_SAMPLES = "at most 4000, as many as take seven minutes, and 100 or more"
SERVERS = ("ours", "vllm", "sglang", "llama.cpp")
CHAIN_RULES = ("match", "block", "rejection")
SAMPLED_PROMPTS = 4


def add_flags(parser: OneLineParser, max_prompts: int | None) -> None:
    """Add the flags of every measurement: the target, and the number and size of the prompts.

    Args:
        max_prompts: default of `--max_prompts`; None: the command chooses by the time it has.
    """
    add_target_flags(parser)
    parser.add_argument(
        "--max_prompts", type=int, default=max_prompts, help=f"prompts per suite (default: {max_prompts or _FITTING})"
    )
    parser.add_argument(
        "--prompt_tokens", type=int, default=64, help="tokens of a prompt that is cut from text (default: 64)"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="new tokens per prompt and turn (default: 128)")


def limits(text: str) -> dict[str, float]:
    """Return the limits of `--slo` in milliseconds."""
    with suppress(ValueError):
        found = {name: float(value) for name, value in (part.split("=") for part in text.split(","))}
        if found.keys() <= {"ttft", "tpot"} and min(found.values()) > 0:
            return found
    raise ArgumentTypeError(f"{text!r} is not of the form ttft=500,tpot=50")


def run(parser: OneLineParser) -> None:
    """`speculator eval --target T --speculator S --output DIR` measures acceptance and speed, and writes a report.

    Other commands (each has --help):
    `speculator eval tune` measures which drafts are fastest on this machine, and writes decoding.json.
    `speculator eval lossless` checks that speculative decoding keeps the target's output.
    `speculator eval compare A/report.json B/report.json` shows the differences of two reports.
    `speculator eval gate OLD NEW` says whether a new head should replace an old one.
    """
    add_flags(parser, max_prompts=32)
    parser.add_argument("--speculator", help="hub id or folder of a trained head; required without --server")
    add_revision(parser)
    parser.add_argument(
        "--suite",
        **MANY,
        help="prompts to decode: python-sources (its held-out split), a local file or folder, or a hub dataset "
        "ORG/NAME[/CONFIG][:SPLIT]; repeatable (default: python-sources)",
    )
    parser.add_argument("--raw", action="store_true", help="never apply the target's chat template")
    parser.add_argument("--temperature", type=float, **MANY, help="sampling temperature; repeatable (default: 0 and 1)")
    add_filters(parser)
    parser.add_argument("--batch_size", type=int, **MANY, help="prompts per batch; repeatable (default: 1)")
    parser.add_argument(
        "--num_speculative_tokens",
        type=int,
        **MANY,
        metavar="G",
        help="tokens that the head drafts per step, as a chain; repeatable (default: as tuned, else all it can)",
    )
    parser.add_argument(
        "--as",
        dest="server",
        choices=SERVERS,
        default="ours",
        help="draft as this server does by default, and predict the acceptance figures that it logs: chains of greedy "
        "tokens, or with --rule rejection or block sampled ones (default: ours)",
    )
    parser.add_argument(
        "--server",
        dest="server_url",
        metavar="URL",
        help="measure the server at this address (ours, vLLM or llama-server): how long clients wait, and what it "
        "accepts by its own counters",
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        metavar="N",
        help="with --server: numbers of clients to compare, each with --max_prompts other prompts, or 4 times N if "
        "that is more; the server need not draft (default: 8, for the acceptance alone)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="with --clients: requests per second, at random times (default: each client sends one after an answer)",
    )
    parser.add_argument(
        "--slo",
        type=limits,
        metavar="LIMITS",
        help="with --clients: limits in milliseconds of the first token and of the time per token: ttft=500,tpot=50",
    )
    parser.add_argument(
        "--price",
        type=float,
        help="with --clients: price of the server's machine per hour, for the cost of a million tokens",
    )
    parser.add_argument(
        "--rule",
        choices=CHAIN_RULES,
        help="accept rule of every drafter above temperature 0; the head then drafts chains (default: each drafter's)",
    )
    parser.add_argument(
        "--draft_model",
        help="small causal LM with the target's tokenizer, measured as another drafter; --trust_remote_code "
        "counts for it too",
    )
    parser.add_argument(
        "--baseline",
        **MANY,
        choices=OPTIONAL,
        help="further baseline next to plain decoding and transformers' generate; repeatable (default: hf_compiled on "
        "a GPU, hf_assisted with a draft model)",
    )
    parser.add_argument("--repeats", type=int, default=1, help="timings per batch; the median counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--report_to", choices=get_args(Tracker), default="none", help="tracker of the figures (default: none)"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the report")


def tune(parser: OneLineParser) -> None:
    """Measure what adaptive drafting starts from, and write it to `decoding.json` in the head's folder.

    That is: how often each token of a draft is accepted at temperatures 0 and 1, how often n-gram lookup is right, and
    the cost of steps with several drafts at 1 to 32 rows. They give the trees worth drafting and the predicted
    speedups, which are printed. Measured speedups come from `speculator eval`.
    """
    add_flags(parser, max_prompts=16)
    parser.add_argument(
        "--speculator", required=True, help="folder of a head, to write decoding.json to; with --output, also a hub id"
    )
    add_revision(parser)
    add_filters(parser)
    parser.add_argument(
        "--suite",
        default="python-sources",
        help="prompts to measure on, other ones than those of `speculator eval`; of python-sources and of a folder of "
        "`serve --record`, the validation split (default: python-sources)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--output", type=Path, help="file to write instead of decoding.json in the head's folder")


def compare(parser: OneLineParser) -> None:
    """Compare two reports of `speculator eval`: the differences B - A, with 95% intervals.

    Of two measurements in servers (--server) it prints the speed of B over A at each number of clients, and where
    drafting stops paying, and draws compared.png in B's folder.

    If both decoded the same prompts, acceptance lengths and whole answers are compared prompt by prompt. Other figures
    count as independent (MOVER, Zou and Donner 2008), whose intervals are wider.
    """
    parser.add_argument("a", type=Path, metavar="A", help="file of the first, its folder, or that of a run")
    parser.add_argument("b", type=Path, metavar="B", help="second report")


def gate(parser: OneLineParser) -> None:
    """Accept a new head in place of an old one, or not: exit code 0 or 1, and one line with the figures.

    The new head is accepted if it decodes faster, with the 95% interval of the paired difference above 0, and if its
    acceptance length on the guard suite has not fallen by more than 5%, by its 95% interval. Both heads
    draft adaptively, as in `speculator serve`, or the chains of the server that `--as` names, and decode every prompt
    one right after the other.
    """
    parser.add_argument("old", metavar="OLD", help="hub id or folder of the head in use")
    parser.add_argument("new", metavar="NEW", help="hub id or folder of the head that would replace it")
    add_revision(parser, "OLD")
    add_flags(parser, max_prompts=64)
    parser.add_argument(
        "--suite",
        required=True,
        help="prompts of the traffic; of a folder of `serve --record`, spread over the newest requests, 64 to 500",
    )
    parser.add_argument("--guard", help="suite on which the head was published (default: no guard)")
    parser.add_argument("--guard_head", metavar="HEAD", help="head that the guard compares NEW with (default: OLD)")
    parser.add_argument("--as", dest="server", choices=SERVERS, default="ours", help="server whose drafts to compare")
    what = "tokens that the server of --as drafts per step (default: its own, or all that the head can)"
    parser.add_argument("--num_speculative_tokens", type=int, metavar="G", help=what)
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="sampling temperature (default: 1, as in a server's requests)"
    )
    add_filters(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")


def lossless(parser: OneLineParser) -> None:
    """Check on this machine, with these weights, that speculative decoding keeps the target's output.

    At temperature 0, completions are compared token by token with plain decoding and with transformers. Above it, a
    chi-square test compares many short completions with drafts and without.
    """
    add_flags(parser, max_prompts=None)
    add_drafter_flags(parser)
    parser.add_argument("--temperature", type=float, **MANY, help="sampling temperature; repeatable (default: 0 and 1)")
    parser.add_argument(
        "--suite", default="python-sources", help="prompts, as in `speculator eval` (default: python-sources)"
    )
    what = f"completions of each of the first {SAMPLED_PROMPTS} prompts (default: {_SAMPLES})"
    parser.add_argument("--samples", type=int, help=what)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--output", type=Path, help="JSON file to write the checks to")
