"""`python -m eval --target T --speculator S --output DIR`: acceptance and speed on text, as a report.

`python -m eval tune --target T --speculator S`: the draft length or tree that is fastest here, written beside the head.
`python -m eval compare A/report.json B/report.json`: what differs between two reports.
`python -m eval lossless --target T --speculator S`: is the text that drafts speed up the target's own?
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from data.sources import PYTHON_SOURCES
from eval import tracking
from eval.decoders import OPTIONAL, check_batches, decoder_of, decoders, measure_suite
from eval.metrics import row
from eval.page import Text, texts, write_page
from eval.plots import draw_plots
from eval.report import warnings, write
from eval.suites import Suite, add_flags, check_flags, check_lengths, check_rows, suite_of
from eval.timing import Engines, memory_kind
from speculator import HeadDrafter, Sampling, Target, load_head
from speculator.cli import drafting
from speculator.device import dtype_name, hardware
from speculator.drafters.corpus import Corpus, read_corpus
from speculator.drafters.early_exit import check_layers
from speculator.drafters.shapes import Chain
from speculator.drafters.tuned import automatic, tuned_shapes
from speculator.errors import OneLineParser, refuse
from speculator.files import check_folder, make_folder
from speculator.heads import Speculator
from speculator.tables import BASELINES


def build_parser() -> OneLineParser:
    """The flags."""
    parser = OneLineParser(prog="python -m eval", description=__doc__)
    add_flags(parser, max_prompts=32)
    parser.add_argument("--speculator", required=True, help="folder of a trained head")
    parser.add_argument(
        "--suite",
        action="append",
        help="python-sources (the default): its held-out split; a local .jsonl or .txt file; or a hub dataset as "
        "ORG/NAME[/CONFIG][:SPLIT]; repeatable",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template, even where the target has one")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--batch_size", type=int, action="append", help="default: 1; repeatable")
    parser.add_argument(
        "--num_speculative_tokens",
        type=int,
        action="append",
        help="chains of this length instead of what was tuned; repeatable; default: as tuned, else all",
    )
    parser.add_argument(
        "--rule",
        choices=Chain(1).rules,
        help="accept rule above temperature 0, of every drafter; the head then drafts chains; default: as drafted",
    )
    parser.add_argument("--draft_model", help="a small causal LM with the target's tokenizer, to compare with")
    parser.add_argument(
        "--ngram_corpus", type=Path, nargs="+", metavar="FILE", help="n-gram lookup in these texts, to compare with"
    )
    parser.add_argument("--mixed", action="store_true", help="the head and n-gram lookup in one tree, to compare with")
    parser.add_argument("--early_exit", type=int, metavar="K", help="the target's first K layers, to compare with")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=OPTIONAL,
        help="beside the plain loop and transformers' generate; default: hf_compiled on a GPU, hf_assisted with a "
        "draft model; repeatable",
    )
    parser.add_argument("--repeats", type=int, default=1, help="timings of each prompt, the median counts; default: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report_to", choices=["wandb", "none"], default="none", help="default: none")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Evaluate and say where the report is."""
    check_flags(arguments)
    check_rows(max(arguments.batch_size or [1]), arguments.max_prompts)
    check_folder("--output", arguments.output)
    tracking.check(arguments.report_to)
    target = drafting.load_target(arguments)
    head = load_head(arguments.speculator, target)
    model = Target.load(arguments.draft_model, dtype=arguments.dtype) if arguments.draft_model else None
    suites = [suite_of(arguments, source, target, arguments.raw) for source in arguments.suite or [PYTHON_SOURCES]]
    names = [suite.name for suite in suites]
    for name in names:
        refuse((names.count(name) > 1, f"two suites are called {name}: a report could not tell them apart"))
    check_batches(suites, arguments.batch_size or [1])
    temperatures = arguments.temperature or [0.0, 1.0]
    default = ["hf_compiled"] * (target.device.type == "cuda") + ["hf_assisted"] * (model is not None)
    report = evaluate(
        target,
        head,
        suites,
        arguments.output,
        temperatures=temperatures,
        max_new_tokens=arguments.max_new_tokens,
        speculator_name=arguments.speculator,
        seed=arguments.seed,
        batch_sizes=arguments.batch_size or [1],
        draft_lengths=sorted(set(arguments.num_speculative_tokens or []), reverse=True),
        tuned_in=None if arguments.num_speculative_tokens or arguments.rule else arguments.speculator,
        model=model,
        baselines=arguments.baseline or default,
        repeats=arguments.repeats,
        rule=arguments.rule,
        early_exit=arguments.early_exit,
        corpus=read_corpus(arguments.ngram_corpus, target.tokenizer) if arguments.ngram_corpus else None,
        mixed=arguments.mixed,
    )
    if arguments.report_to == "wandb":
        tracking.send(report, arguments.output)
    print(f"\n{(arguments.output / 'report.md').read_text()}\nThe report and its plots are in {arguments.output}")


def evaluate(
    target: Target,
    head: Speculator,
    suites: list[Suite],
    output: Path,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    speculator_name: str,
    seed: int = 0,
    batch_sizes: Sequence[int] = (1,),
    draft_lengths: Sequence[int] = (),
    tuned_in: str | Path | None = None,
    model: Target | None = None,
    baselines: Collection[str] = (),
    repeats: int = 1,
    rule: str | None = None,
    early_exit: int | None = None,
    corpus: Corpus | None = None,
    mixed: bool = False,
) -> dict:
    """Measure and write the report; gives report.json's content. A wandb run that is on gets it too.

    Args:
        target: the model.
        head: who drafts.
        suites: what to decode.
        output: the report's folder.
        temperatures, batch_sizes: every suite at each of them.
        max_new_tokens: per prompt and turn.
        speculator_name: as the report calls the head.
        seed: of the sampling.
        draft_lengths: of the head's chains; default: all that it has.
        tuned_in: the head's folder: it drafts as was tuned there, where no `draft_lengths` are given, and beside that
            what is chosen before each step.
        model: a draft model to compare with.
        baselines: beside the plain loop and transformers' generate: of `eval.decoders.OPTIONAL`.
        repeats: timings of every prompt, of which the median counts.
        rule: the accept rule of every drafter above temperature 0; default: each has its own.
        early_exit: how many of the target's first layers draft as well.
        corpus: texts for a second n-gram lookup.
        mixed: the head and n-gram lookup draft in one tree as well.

    Raises:
        UserError: what was asked for does not fit the target or the head, or can't be written.
    """
    check_lengths(target, max(len(prompt) for suite in suites for prompt in suite.prompts), max_new_tokens)
    lengths = list(draft_lengths) or [head.n_predict]
    deepest = head.config.max_speculative_tokens
    deeper = deepest is not None and max(lengths) > deepest
    refuse((deeper, f"draft length {max(lengths)}: the head drafts at most {deepest}"))
    if early_exit is not None:
        check_layers(target, early_exit)
    rows: list[dict] = []
    samples: list[Text] = []
    skipped: dict[str, str] = {}
    for batch_size in batch_sizes:
        shapes = tuned_shapes(tuned_in, target, head, temperatures, batch_size) if tuned_in else {}
        engines: Engines = {}
        default, unfit = decoders(
            target, head, lengths, model, baselines, batch_size, engines, rule, early_exit, corpus, mixed
        )
        autos = {}
        if tuned_in and not draft_lengths and not rule:
            autos = {t: automatic(tuned_in, target, head, [t], batch_size) for t in temperatures}
        tuned = {t: HeadDrafter(head, shape) for t, shape in shapes.items() if shape and not draft_lengths}
        swapped = {t: decoder_of(target, "head", drafter, engines, rule) for t, drafter in tuned.items()}
        skipped |= unfit
        make_folder(output)
        for suite, temperature in product(suites, temperatures):
            table = [swapped.get(temperature, d) if d.key == "head" else d for d in default]
            if auto := autos.get(temperature):
                table.append(decoder_of(target, "auto", auto, engines))
            sampling = Sampling(temperature, seed=seed)
            measured = measure_suite(target, table, suite, sampling, max_new_tokens, batch_size, repeats)
            skipped |= measured.skipped
            trained = head.config.trained_length
            made = [
                row(target, d, suite, sampling, measured, max_new_tokens, batch_size, trained) for d in table if d.ours
            ]
            rows += made
            if batch_size == batch_sizes[0]:
                samples += texts(target, table, made, suite, sampling, max_new_tokens)
    report = {
        "schema": 1,
        "target": target.name,
        "speculator": speculator_name,
        "hardware": hardware(target.device),
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
        "settings": {
            "batch_size": batch_sizes[0] if len(batch_sizes) == 1 else list(batch_sizes),
            "dtype": dtype_name(target.dtype),
            "threads": torch.get_num_threads(),
            "ignore_eos": not any(suite.chat for suite in suites),
            "seed": seed,
            "repeats": repeats,
            "num_speculative_tokens": lengths[0],
            "draft_model": model.name if model else None,
            "early_exit": early_exit,
            "prompt_tokens": sorted({len(prompt) for suite in suites for prompt in suite.prompts}),
            "trained_length": head.config.trained_length,
            "peak_memory": memory_kind(target.device),
        },
        "not_run": {BASELINES[name]: reason for name, reason in skipped.items()},
        "warnings": warnings(rows),
        "suites": rows,
    }
    draw_plots(report, output)
    write_page(report, samples, output)
    tracking.log(report, output)
    write(report, output)  # last: where it is, nothing is left to do
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    return report
