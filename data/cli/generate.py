"""`python -m data generate`: the target's own continuations of prompts, to train on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from data.batches import state
from data.client import CONCURRENCY, RenderedPrompt, fetch_rows
from data.magpie import ROWS, SELF, asking_of, self_rows, summary
from data.onpolicy import BATCH_SIZE, generate_rows
from data.prompts import Room, prompts
from data.rendering import load_tokenizer
from data.tally import MAX_BAD_ROWS, Tally, add_max_bad_rows
from speculator.chat import DATA_DAY
from speculator.checkpoints.loading import load_drafter, load_head
from speculator.cli import drafting
from speculator.decoding.sampling import Sampling
from speculator.drafters import HeadDrafter
from speculator.errors import OneLineParser, UserError, check_text, printable, refuse
from speculator.files import check_output_folder
from speculator.prompts import read_prompts
from speculator.target.gguf import read_config

OF_TEXT = {"split": "train", "prompt_tokens": 64, "max_bad_rows": MAX_BAD_ROWS}
OF_SELF = {"turns": 1, "max_prompt_tokens": 256, "prompt_temperature": 1.0, "prompt_top_p": 0.99}
"""The flags of one kind of prompts alone, and their defaults."""


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog="python -m data generate", description=__doc__)
    drafting.add_target_flags(parser)
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--speculator", help="folder of a trained head that drafts; default: plain decoding")
    who.add_argument(
        "--server",
        nargs="+",
        metavar="URL",
        help="of OpenAI-compatible servers that run the target; they share the rows",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--sources",
        nargs="+",
        help="prompts from python-sources, local files, folders or hub datasets, mixed by @weight; or self: the target "
        "writes them",
    )
    source.add_argument("--prompts", type=Path, help='a .jsonl file of rows {"prompt"} or {"messages"}')
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the rows; an unfinished one is gone on with"
    )
    parser.add_argument("--max_rows", type=int, help=f"at most so many prompts; default: all, {ROWS} of self")
    text = parser.add_argument_group("--sources of text")
    text.add_argument("--split", help="default: train")
    add_max_bad_rows(text)
    text.add_argument("--prompt_tokens", type=int, help="of each prompt; default: 64")
    own = parser.add_argument_group("--sources self")
    own.add_argument("--turns", type=int, help="of the user in a chat, at most; default: 1")
    own.add_argument("--max_prompt_tokens", type=int, help="of a user's turn at most; default: 256")
    own.add_argument("--prompt_temperature", type=float, help="of the user's turns; default: 1")
    own.add_argument("--prompt_top_p", type=float, help="of the user's turns; default: 0.99")
    parser.set_defaults(max_bad_rows=None)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="the most new tokens of a row; default: 256")
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[1.0],
        help="0 is greedy; of several the rows take each in turn; default: 1, the target's own distribution",
    )
    parser.add_argument("--top_k", type=int, default=0, help="sample from the k likeliest tokens; default: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest with this probability")
    parser.add_argument("--min_p", type=float, default=0.0, help="sample from those this share as likely as the first")
    parser.add_argument(
        "--batch_size",
        type=int,
        help=f"rows decoded at a time, or requests to each server; default: {BATCH_SIZE}, {CONCURRENCY} with --server",
    )
    parser.add_argument(
        "--num_speculative_tokens", type=int, help="tokens per draft; default: what is the fastest here"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Generate, and say where the rows are."""
    _check(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    processes = state()  # before the target is loaded: it says which device is whose
    samplings = _samplings(arguments)
    how = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed}
    if arguments.server is not None:
        tokenizer = load_tokenizer(arguments.target, arguments.revision, arguments.trust_remote_code)
        prompts = _prompts(arguments, tokenizer, _context_length(arguments))
        concurrency = arguments.batch_size or CONCURRENCY
        fetch_rows(
            arguments.server,
            arguments.target,
            tokenizer,
            prompts,
            arguments.output,
            concurrency=concurrency,
            sampling=samplings[0],
            **how,
        )
    else:
        target = drafting.load_target(arguments)
        how["batch_size"] = arguments.batch_size or BATCH_SIZE
        drafter: HeadDrafter | None = None
        if arguments.speculator and arguments.num_speculative_tokens:
            drafter = HeadDrafter(load_head(arguments.speculator, target), arguments.num_speculative_tokens)
        elif arguments.speculator:
            kinds = [each.temperature for each in samplings]
            drafter = load_drafter(arguments.speculator, target, temperatures=kinds, batch_size=how["batch_size"])
        if arguments.sources == [SELF]:
            self_rows(
                target,
                drafter,
                arguments.output,
                rows=arguments.max_rows or ROWS,
                turns=arguments.turns,
                asking=_asking(arguments),
                max_prompt_tokens=arguments.max_prompt_tokens,
                answering=samplings,
                **how,
            )
        else:
            prompts = [prompt.ids for prompt in _prompts(arguments, target.tokenizer, target.context_length)]
            generate_rows(target, drafter, prompts, arguments.output, sampling=samplings, **how)
    if processes.is_main_process:
        print(printable(_line(arguments.output)), file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what can't be, before any model is loaded, and fill in the flags of one kind of prompts."""
    positive = ("max_rows", "prompt_tokens", "max_new_tokens", "batch_size", "num_speculative_tokens", "turns")
    positive += ("max_prompt_tokens",)
    own = arguments.sources is not None and SELF in arguments.sources
    text = arguments.sources is not None and not own
    for flags, used, kind in ((OF_TEXT, text, "text"), (OF_SELF, own, SELF)):
        idle = [f"--{name}" for name in flags if getattr(arguments, name) is not None and not used]
        refuse((idle, f"{', '.join(idle)}: of --sources of {kind}"))
        vars(arguments).update({name: default for name, default in flags.items() if getattr(arguments, name) is None})
    low = [f"--{name}" for name in positive if getattr(arguments, name) is not None and getattr(arguments, name) < 1]
    check_output_folder("--output", arguments.output)
    refuse(
        (low, f"{', '.join(low)}: at least 1"),
        (not 0 <= arguments.max_bad_rows <= 1, "--max_bad_rows: a share, so in 0..1"),
        (
            arguments.num_speculative_tokens and not arguments.speculator,
            "--num_speculative_tokens: give a --speculator",
        ),
        (not abs(arguments.seed) < 2**62, "--seed: must be below 2**62 in size"),
        (own and arguments.sources != [SELF], f"--sources {SELF}: the target's own prompts come alone"),
        (arguments.server is not None and arguments.adapter, "--adapter: a --server has its own model"),
        (arguments.server is not None and arguments.dtype != "auto", "--dtype: a --server has its own"),
        (own and arguments.server is not None, f"--sources {SELF} needs the target here, not a --server"),
        (
            arguments.server is not None and len(arguments.temperature) > 1,
            "--temperature: one for all rows with --server",
        ),
    )
    check_text(f"--output {arguments.output}", str(arguments.output))  # datasets takes no other names
    _samplings(arguments)
    _asking(arguments)


def _asking(arguments: argparse.Namespace) -> Sampling:
    """How the user's turns of `self` are drawn."""
    return asking_of(arguments.prompt_temperature, arguments.prompt_top_p, "--")


def _samplings(arguments: argparse.Namespace) -> list[Sampling]:
    """How the rows are drawn, in turn."""
    return [Sampling(each, arguments.top_k, arguments.top_p, arguments.min_p) for each in arguments.temperature]


def _context_length(arguments: argparse.Namespace) -> int:
    """The target's, where its config is at hand: the server's own may be shorter."""
    try:
        config = read_config(arguments.target, arguments.trust_remote_code, revision=arguments.revision)
        return config.get_text_config().max_position_embeddings or sys.maxsize
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return sys.maxsize


def _prompts(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, context: int) -> list[RenderedPrompt]:
    room = Room(arguments.target, context, arguments.max_new_tokens)
    if arguments.sources:
        most, tally = arguments.max_rows or sys.maxsize, Tally(arguments.max_bad_rows)
        found = prompts(
            arguments.sources, arguments.split, tokenizer, arguments.prompt_tokens, most, room=room, tally=tally
        )
        split = f"the {arguments.split} split of {', '.join(arguments.sources)}"
        tally.check(split)
        tally.warn(split)
        refuse((not found, f"no document in {split} has {arguments.prompt_tokens} tokens"))
        return [RenderedPrompt(ids) for ids in found]
    rows = [replace(prompt, today=DATA_DAY) for _, prompt in read_prompts(arguments.prompts)]
    if tokenizer.chat_template is None and any(row.chat for row in rows):
        raise UserError(f'{arguments.target} has no chat template, which rows with "messages" need')
    chosen, _ = room.take(str(arguments.prompts), ((row.tokens(tokenizer), row) for row in rows), arguments.max_rows)
    return [RenderedPrompt(ids, row.messages if row.chat else None) for ids, row in chosen]


def _line(folder: Path) -> str:
    manifest = json.loads((folder / "manifest.json").read_text())
    line = f"{folder}: {manifest['rows']} rows, {manifest['tokens']} new tokens"
    if "dropped" in manifest:
        return summary(folder)
    speed = manifest["tokens_per_second"]
    if manifest["acceptance_length"] and manifest["drafter"]:
        line += f", {manifest['acceptance_length']:.2f} tokens per step"
    if speed["speculative"] and speed["plain"]:
        gain = speed["speculative"] / speed["plain"]
        line += f", {speed['speculative']:.0f} tokens/s where the same loop without a draft gives "
        line += f"{speed['plain']:.0f} ({gain:.2f}x)"
    return line
