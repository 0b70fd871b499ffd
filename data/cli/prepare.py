"""`speculator data prepare`: see `data.cli.flags.prepare`."""

from __future__ import annotations

import argparse

from data.mixture import mixture_of
from data.prepare import RowRequest, save_rows
from data.rendering import tokenizer_of
from speculator.errors import refuse
from speculator.files import check_output_folder
from speculator.terminal import quiet_libraries


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator data prepare`: write the rows to `--output`, and print a table of the counts of each split."""
    check_output_folder("--output", arguments.output)
    parent = arguments.output.absolute().parent
    refuse(
        (arguments.num_proc is not None and arguments.num_proc < 1, "--num_proc must be at least 1"),
        (arguments.output.exists(), f"--output {arguments.output} already exists: choose a new folder"),
        (not parent.is_dir(), f"--output {arguments.output}: no folder {parent}"),
        (not 0 <= arguments.max_bad_rows <= 1, "--max_bad_rows must be in 0..1"),
        (arguments.seq_length < 2, "--seq_length must be at least 2"),
        (
            arguments.max_tokens is not None and arguments.max_tokens < arguments.seq_length,
            "--max_tokens must be at least --seq_length",
        ),
    )
    quiet_libraries()
    request = RowRequest(
        mixture=mixture_of(arguments.sources),
        split="train",
        tokenizer=tokenizer_of(arguments),
        length=arguments.seq_length,
        max_tokens=arguments.max_tokens,
        max_bad_rows=arguments.max_bad_rows,
        num_proc=arguments.num_proc,
    )
    counts = save_rows(request, arguments.output)
    print(f"{'':12}{'documents':>12}{'rows':>12}{'tokens':>14}{'with loss':>11}")
    for split, count in counts.items():
        share = count["tokens_with_loss"] / count["tokens"]
        print(f"{split:12}{count['documents']:>12,}{count['rows']:>12,}{count['tokens']:>14,}{share:>11.1%}")
    print(f"in {arguments.output}")
