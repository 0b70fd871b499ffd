"""`speculator data generate`: let the target continue prompts, as training data for its draft head."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.batches import state, warn_of_cut_answers
from data.cli.flags import ALL, MAX_BAD_ROWS, NEW_TOKENS, THINKING_TOKENS
from data.magpie import ROWS, Asking, self_rows, summary
from data.mixture import SELF, mixture_of
from data.prompts import Cut, PromptLimits, conversations
from data.rendering import tokenizer_of
from data.tally import Tally, cut_answers
from data.writers import writer_of
from data.writers.engine import BATCH_SIZE
from data.writers.server import TextOnly
from data.writing import Writing
from speculator.chat import DATA_DAY, thinks
from speculator.cli import model_flags
from speculator.decoding.sampling import Sampling
from speculator.errors import check_text, printable, refuse
from speculator.files import JsonObject, check_output_folder
from speculator.prompts import Conversation, for_template, read_prompts
from speculator.target.gguf.file import read_config
from speculator.target.model import Target
from speculator.target.probe import usable_context
from speculator.target.remote.server_target import ServerTarget
from speculator.terminal import log, quiet_libraries

TEXT_FLAGS = {"prompt_tokens": 64, "max_bad_rows": MAX_BAD_ROWS}
SELF_FLAGS = {"max_prompt_tokens": 256}
"""Flags that only one kind of prompts has, with their defaults."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator data generate`: write the rows to `--output`, and print one line about them on stderr."""
    _check(arguments)
    quiet_libraries()
    processes = state()  # assigns the devices, so it comes before loading the target
    own = arguments.mixture is not None and arguments.mixture.is_self
    served = f"{arguments.target} --adapter {arguments.adapter}" if arguments.adapter else arguments.target
    target: Target | ServerTarget | TextOnly
    if arguments.server is None:
        target = model_flags.load_target(arguments)
        refuse((own and not target.continues, f"--sources {SELF}: {target.name} needs prompts"))
        if arguments.raw or not target.continues:  # a source is the prompt as it is
            target.tokenizer.chat_template = None
    elif own:  # whose manifest has the model's fingerprint
        where = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
        target = ServerTarget.connect(arguments.target, arguments.server, **where)
        target.name, target.tokenizer = served, tokenizer_of(arguments)
    else:
        tokenizer, context = tokenizer_of(arguments), _context_length(arguments)
        target = TextOnly(name=served, tokenizer=tokenizer, context_length=context, urls=arguments.server)
    head: JsonObject = {}
    if arguments.speculator:
        head = {"folder": arguments.speculator, "revision": arguments.speculator_revision}
        head["num_speculative_tokens"] = arguments.num_speculative_tokens or 0
        head["temperatures"] = [each.temperature for each in arguments.samplings]
    writer = writer_of(target, arguments.batch_size or BATCH_SIZE, arguments.batch_size, **head)
    writing = _writing(arguments, target.tokenizer, target.context_length)
    if own and not isinstance(target, TextOnly):
        self_rows(target, writer, arguments.output, arguments.asking, writing)
    else:
        limits = PromptLimits.of(target, writing.max_new_tokens)
        writer.write(_prompts(arguments, target.tokenizer, limits), arguments.output, writing)
    if processes.is_main_process:
        warn_of_cut_answers(arguments.output, "--max_new_tokens")
        print(printable(_line(arguments.output)), file=sys.stderr)


def _writing(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, context: int) -> Writing:
    """Return how the target writes, and set the default of `--max_new_tokens`: room for thoughts if it thinks."""
    if arguments.max_new_tokens is None:
        thinking = thinks(tokenizer)
        arguments.max_new_tokens = min(THINKING_TOKENS, context // 2) if thinking else NEW_TOKENS
        if thinking:
            log(f"{arguments.target} thinks before it answers: --max_new_tokens {arguments.max_new_tokens}")
    return Writing(samplings=arguments.samplings, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed)


def _check(arguments: argparse.Namespace) -> None:
    """Check the flags before a model is loaded, and raise a UserError for wrong ones.

    Sets defaults of the flags of text and of self, and `mixture`, `samplings` (which share the rows) and `asking` (how
    the target writes user turns).
    """
    positive = ["max_rows", "prompt_tokens", "max_new_tokens", "batch_size", "num_speculative_tokens", "turns"]
    positive.append("max_prompt_tokens")
    arguments.mixture = None if arguments.sources is None else mixture_of(arguments.sources)
    own = arguments.mixture is not None and arguments.mixture.names_self
    text = arguments.mixture is not None and not own
    for flags, used, kind in ((TEXT_FLAGS, text, "text"), (SELF_FLAGS, own, SELF)):
        idle = [f"--{name}" for name in flags if getattr(arguments, name) is not None and not used]
        refuse((idle, f"{', '.join(idle)} only applies to --sources of {kind}"))
        vars(arguments).update({name: default for name, default in flags.items() if getattr(arguments, name) is None})
    low = [f"--{name}" for name in positive if getattr(arguments, name) is not None and getattr(arguments, name) < 1]
    check_output_folder("--output", arguments.output)
    refuse(
        (low, f"{', '.join(low)} must be at least 1"),
        (arguments.speculator == "", "--speculator is empty: give the hub id or the folder of a trained head"),
        (arguments.speculator_revision and not arguments.speculator, "--speculator_revision needs a --speculator"),
        (not 0 <= arguments.max_bad_rows <= 1, "--max_bad_rows must be in 0..1"),
        (
            arguments.num_speculative_tokens and not arguments.speculator,
            "--num_speculative_tokens needs a --speculator",
        ),
        (not abs(arguments.seed) < 2**62, "--seed must be below 2**62"),
        (own and not arguments.mixture.is_self, f"--sources {SELF} can't be mixed with other sources"),
        (arguments.turns is not None and not arguments.mixture, "--turns only applies to --sources"),
        (own and arguments.turns == ALL, f"--turns all needs chats: give the number of turns that {SELF} writes"),
        (arguments.server is not None and arguments.dtype != "auto", "--dtype does not apply to a --server"),
    )
    check_text(f"--output {arguments.output}", str(arguments.output))  # `datasets` accepts no surrogates
    filters = {"top_k": arguments.top_k, "top_p": arguments.top_p, "min_p": arguments.min_p}
    arguments.samplings = tuple(Sampling(each, **filters) for each in arguments.temperature or [1.0])
    arguments.asking = Asking(
        rows=arguments.max_rows or ROWS,
        turns=arguments.turns or 1,
        max_prompt_tokens=arguments.max_prompt_tokens,
    )


def _context_length(arguments: argparse.Namespace) -> int:
    """Return the context length in the target's config; `sys.maxsize` if it states none or can't be read."""
    try:
        config = read_config(arguments.target, arguments.trust_remote_code, revision=arguments.revision)
        return usable_context(config.get_text_config()) or sys.maxsize
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return sys.maxsize


def _prompts(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, limits: PromptLimits
) -> list[Conversation]:
    """Return the prompts of `--sources` or of the file `--prompts` that fit `limits`, and print what was left out."""
    if arguments.mixture:
        limit, tally = arguments.max_rows or sys.maxsize, Tally(arguments.max_bad_rows)
        found, _ = conversations(
            arguments.mixture,
            "train",
            tokenizer,
            Cut(arguments.prompt_tokens, turns=arguments.turns),
            limit,
            limits=limits,
            tally=tally,
        )
        split = f"the train split of {arguments.mixture}"
        tally.check(split)
        tally.warn(split)
        refuse((not found, f"no document in {split} has {arguments.prompt_tokens} tokens"))
        return found
    without = "--raw leaves out the chat template" if arguments.raw else f"{arguments.target} has no chat template"
    rows = for_template([prompt for _, prompt in read_prompts(arguments.prompts)], tokenizer, without)
    rows = [replace(prompt, today=DATA_DAY) for prompt in rows]
    prompts = (replace(prompt, ids=prompt.tokens(tokenizer)) for prompt in rows)
    chosen, left_out = limits.take(str(arguments.prompts), prompts, arguments.max_rows)
    tally = Tally(rows=len(rows))
    tally.take(len(chosen), left_out, "--max_rows")
    tally.warn(f"--prompts {arguments.prompts}")
    return chosen


def _line(folder: Path) -> str:
    """Return one line about the rows in a finished folder: their number, acceptance length and speed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    skipped = manifest.get("skipped", 0)
    rows = manifest["rows"] - skipped
    line = f"{folder}: {rows} rows, {manifest['tokens']} new tokens"
    if manifest.get("answers", 0) > rows:
        line += f" in {manifest['answers']} answers"
    if cut := cut_answers(manifest):
        line += f", {cut}"
    if skipped:
        line += f", {skipped} prompts skipped"
    if "dropped" in manifest:
        return summary(folder)
    speed = manifest["tokens_per_second"]
    if manifest["acceptance_length"] and manifest["drafter"]:
        line += f", acceptance length {manifest['acceptance_length']:.2f}"
    if speed["speculative"] and speed["plain"]:
        gain = speed["speculative"] / speed["plain"]
        line += f", {speed['speculative']:.0f} tokens/s, plain decoding {speed['plain']:.0f} ({gain:.2f}x)"
    return line
