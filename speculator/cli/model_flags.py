"""Flags of the commands that name the target, the drafter, the shape of its draft and the accept rule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from speculator.chat import set_template_variables
from speculator.checkpoints.loading import load_drafter, load_head
from speculator.drafters import Candidates, Chain, Drafter, DraftModelDrafter, HeadDrafter, NgramDrafter, Tree
from speculator.errors import UserError, refuse
from speculator.target.model import Target
from speculator.terminal import loading

_DEFAULT_LENGTH = 4  # of a draft, where no head says how far it can draft
_WHO = "--speculator, --draft_model or --ngram"
_TREE = ("branches", "nodes")


def load_target(arguments: argparse.Namespace) -> Target:
    """Load the target that the flags name, with `--chat_template_kwargs` as defaults of its chat template."""
    with loading(arguments.target):
        target = Target.load(
            arguments.target,
            revision=arguments.revision,
            dtype=arguments.dtype,
            adapter=arguments.adapter,
            trust_remote_code=arguments.trust_remote_code,
        )
    set_template_variables(target.tokenizer, arguments.chat_template_kwargs)
    return target


def check(arguments: argparse.Namespace, show_drafts: bool = False, required: bool = False) -> None:
    """Check the flags before a model is loaded; `show_drafts` (a flag of the user) and `required` need a drafter."""
    drafts = arguments.speculator or arguments.draft_model or arguments.ngram
    chain, tree = _given(arguments, "num_speculative_tokens"), _given(arguments, *_TREE)
    idle = ", ".join(filter(None, [chain, tree, _given(arguments, "rule"), "--show_drafts" * show_drafts]))
    refuse(
        (arguments.speculator == "", "--speculator is empty: give the hub id or the folder of a trained head"),
        (arguments.draft_model == "", "--draft_model is empty: give a hub id or the folder of a model"),
        (arguments.speculator_revision and not arguments.speculator, "--speculator_revision needs a --speculator"),
        (idle and not drafts, f"{idle}: give a drafter, {_WHO}"),
        (required and not drafts, f"no drafter: give {_WHO}"),
        (arguments.ngram and tree, f"--ngram copies a chain: it has no {tree}"),
        (tree and not arguments.branches, f"{tree}: give --branches, the children of a token level by level"),
        (chain and arguments.branches, f"--branches draft no chain: {chain}"),
    )
    if drafts:
        rules = _rules(arguments)
        if arguments.rule and arguments.rule not in rules:
            raise UserError(f"--rule {arguments.rule} does not fit what is drafted; these do: {', '.join(rules)}")


def coupled(arguments: argparse.Namespace) -> bool:
    """Return whether the accept rule is `match`, under which a seed gives the same text with any draft."""
    return (arguments.rule or _rules(arguments)[0]) == "match"


def _rules(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the accept rules that fit the draft, the default first."""
    return _lookup(arguments).rules if arguments.ngram else _shape(arguments, _DEFAULT_LENGTH).rules


def _lookup(arguments: argparse.Namespace, memory: int = 0) -> NgramDrafter:
    given = arguments.num_speculative_tokens
    return NgramDrafter(_DEFAULT_LENGTH if given is None else given, memory=memory)


def drafter(
    arguments: argparse.Namespace,
    target: Target,
    temperatures: Sequence[float] = (),
    batch_size: int = 1,
    memory: int = 0,
) -> Drafter | None:
    """Make the drafter that the flags describe; None if they name none.

    Args:
        temperatures: a head without further flags drafts adaptively at these temperatures; none: a fixed chain.
        batch_size: the most rows that decode at a time.
        memory: number of tokens of other sequences that n-gram lookup searches.
    """
    if arguments.branches and max(arguments.branches) > target.vocab_size:
        raise UserError(f"--branches: the target has only {target.vocab_size} tokens")
    if arguments.speculator and temperatures and not shaped(arguments):
        return load_drafter(
            arguments.speculator,
            target,
            temperatures=temperatures,
            batch_size=batch_size,
            memory=memory,
            revision=arguments.speculator_revision,
        )
    if arguments.ngram:
        return _lookup(arguments, memory)
    if arguments.speculator:
        head = load_head(arguments.speculator, target, arguments.speculator_revision)
        return HeadDrafter(head, _shape(arguments, head.n_predict))
    if (model := load_draft_model(arguments)) is not None:
        return DraftModelDrafter(model, target, _shape(arguments, _DEFAULT_LENGTH))
    return None


def load_draft_model(arguments: argparse.Namespace) -> Target | None:
    """Load the model of `--draft_model`, if any; a UserError names the flag."""
    if not arguments.draft_model:
        return None
    try:
        return Target.load(arguments.draft_model, dtype=arguments.dtype, trust_remote_code=arguments.trust_remote_code)
    except UserError as error:
        raise UserError(f"--draft_model: {error}") from None


def shaped(arguments: argparse.Namespace) -> str:
    """Return the given flags that fix the draft, such as "--branches, --rule"; "" leaves a head to draft adaptively."""
    return _given(arguments, "num_speculative_tokens", *_TREE, "rule")


def _given(arguments: argparse.Namespace, *names: str) -> str:
    values = vars(arguments)
    return ", ".join(f"--{name}" for name in names if values[name] is not None and values[name] is not False)


def _shape(arguments: argparse.Namespace, length: int) -> Chain | Tree | Candidates:
    """Return the shape of a head's or model's draft that the flags describe; by default a chain of `length` tokens."""
    if arguments.branches is None:
        length = length if arguments.num_speculative_tokens is None else arguments.num_speculative_tokens
        return Chain(length)
    if arguments.nodes is not None:
        return Tree(arguments.branches, arguments.nodes)
    return Candidates(arguments.branches)
