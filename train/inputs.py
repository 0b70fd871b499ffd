"""What a run reads: its target, rows, prompts, and their fingerprints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import datasets
import transformers

from data.mixture import Mixture
from data.prepare import RowRequest, token_rows
from data.prompts import Cut, PromptLimits, conversations
from data.tally import Tally
from eval.suites import Suite, from_text
from speculator.chat import set_template_variables
from speculator.device import dtype_name
from speculator.errors import UserError
from speculator.files import cache_folder
from speculator.prompts import Conversation
from speculator.target.base import TrainingTarget
from speculator.target.in_process import InProcessTarget
from speculator.target.model import Target
from speculator.target.remote.server_target import ServerTarget
from speculator.target.sharding import SHARDED
from speculator.terminal import loading, log
from train import checks
from train.checkpoint import reporting_full_disk
from train.folder import prompts_fingerprint, rows_fingerprint
from train.own_text import with_self_written
from train.plan import Plan
from train.settle import Run
from train.sizes import Prompt, shortened_for

_PROMPTS_PER_TEXT = 4


@dataclass
class Inputs:
    """What a run trains and is measured on.

    Attributes:
        run: the run that they were read for.
        length: number of tokens in a row.
        train_rows, validation_rows: packed rows.
        suites: "validation" prompts are decoded at each evaluation, "held-out" ones are in the report.
        own_prompts: prompts that the target continues for stage 2; None: it writes them too, or there is no stage 2.
        plan: `Run.plan`, for these rows and prompts; None if the run has none.
    """

    run: Run
    length: int
    train_rows: datasets.Dataset
    validation_rows: datasets.Dataset
    suites: dict[str, Suite]
    own_prompts: list[Conversation] | None
    plan: Plan | None

    def fingerprints(self, target: TrainingTarget) -> dict[str, str]:
        """Return fingerprints of "target", and of rows and prompts by split; a resumed run must have the same."""
        rows = {"training": self.train_rows, "validation": self.validation_rows}
        found = {"target": target.fingerprint} | {f"{name} rows": rows_fingerprint(each) for name, each in rows.items()}
        if target.digest:
            # In another dtype, or by another version, the same weights have another hash, and it does not count.
            kind = f"{dtype_name(target.dtype)} by transformers {transformers.__version__}"
            found[f"the target's weights, {kind}"] = target.digest
        return found | {f"{name} prompts": prompts_fingerprint(suite.prompts) for name, suite in self.suites.items()}


def read_inputs(run: Run, target: TrainingTarget) -> Inputs:
    """Read all inputs and check them; nothing is written into the run's folder.

    Missing chats of the source `self` are written into the cache first. Every process of the run calls this.

    Raises:
        UserError: an input can't be read, is too small, or does not fit the target or the memory.
    """
    config = run.config
    checks.fits_target(run, target)
    if isinstance(target, ServerTarget):
        target.check(*needed_of_server(run, target.context_length), run.processes)
    mixture, length = with_self_written(run, target), config.data.seq_length
    if run.shortens:
        whole = rows(run, target, mixture, length, "train", report=False)
        length = shortened_for(length, whole)
    train_rows, validation_rows = (rows(run, target, mixture, length, split) for split in ("train", "validation"))
    suites = {
        "validation": prompts_of(run, target, mixture, "validation", config.eval.validation_prompts),
        "held-out": prompts_of(run, target, mixture, "held-out", config.eval.max_prompts),
    }
    own_prompts = own_prompts_of(run, target, mixture, length) if run.continues else None
    checks.rows(run, target, train_rows, validation_rows, None if own_prompts is None else len(own_prompts))
    plan = run.plan and run.plan.knowing(length, sizes_of(own_prompts))
    if plan is not None:  # what the plan at the start could only estimate
        plan.refuse_too_large()
    return Inputs(
        run=run,
        length=length,
        train_rows=train_rows,
        validation_rows=validation_rows,
        suites=suites,
        own_prompts=own_prompts,
        plan=plan,
    )


def sizes_of(prompts: list[Conversation] | None) -> list[Prompt] | None:
    """Return the sizes of stage 2's prompts, as the plan counts them; None without such prompts."""
    return None if prompts is None else [Prompt(each.size, 1 + len(each.later)) for each in prompts]


def load_target(run: Run) -> TrainingTarget:
    """Load the run's target: a `Target`, its training half if it can't be decoded, or one that servers run."""
    config = run.config
    given = dataclasses.asdict(config.target)
    variables, urls, name = given.pop("chat_template_kwargs"), given.pop("server"), given.pop("name_or_path")
    target: ServerTarget | InProcessTarget
    if urls:
        own = {key: given[key] for key in ("revision", "dtype", "trust_remote_code")}
        target = ServerTarget.connect(name, urls, **own)
    else:
        with loading(name):
            target = InProcessTarget.load(name, **given)
    set_template_variables(target.tokenizer, variables)
    if config.data.raw:
        target.tokenizer.chat_template = None
    if isinstance(target, ServerTarget) or config.target.parallel in SHARDED:
        return target
    try:
        return Target.of(target)
    except UserError as error:
        checks.check_writes_no_text(run, str(error))
        log(f"{error}; the run trains without decoding, and a forecast selects the best checkpoint")
        return target


def needed_of_server(run: Run, context: int) -> tuple[tuple[int, ...], int]:
    """Return the auxiliary layers that the run's head reads, and the tokens of the longest document that it sends.

    Args:
        context: tokens of the longest text that a server reads, one below the target's context length.
    """
    config = run.config
    longest = config.data.seq_length
    if run.mixture.names_self:
        own = config.data.self_source
        longest = max(longest, own.turns * (own.max_prompt_tokens + own.max_new_tokens))
    if config.stage2.max_steps:
        longest = max(longest, config.data.seq_length) + config.stage2.generate.max_new_tokens
    return tuple(getattr(run.head, "aux_layers", None) or ()), min(longest, context)


def rows(
    run: Run, target: TrainingTarget, mixture: Mixture, length: int, split: str, report: bool = True
) -> datasets.Dataset:
    """Return the packed rows of one split.

    Args:
        length: number of tokens in a row.
        split: "train", at most `data.max_tokens` tokens, or "validation", only the rows that are evaluated.
        report: print what became of the rows of the sources.
    """
    config = run.config
    with reporting_full_disk(cache_folder()):
        return token_rows(
            RowRequest(
                mixture=mixture,
                split=split,
                tokenizer=target.tokenizer,
                length=length,
                max_tokens=config.data.max_tokens if split == "train" else None,
                max_bad_rows=config.data.max_bad_rows,
                first_rows=config.eval.validation_rows if split == "validation" else None,
                num_proc=config.data.num_proc,
            ),
            report,
        )


def prompts_of(run: Run, target: TrainingTarget, mixture: Mixture, split: str, count: int) -> Suite:
    """Return up to `count` prompts of one split: the beginnings of texts, and all turns of a chat before an answer."""
    config = run.config
    # Too many bad rows were an error when the split was prepared.
    tally = Tally(max_share=1.0 if config.data.max_bad_rows else 0.0)
    suite = from_text(
        mixture,
        target.tokenizer,
        config.eval.prompt_tokens,
        count,
        split=split,
        limits=PromptLimits.of(target, config.eval.max_new_tokens),
        tally=tally,
    )
    tally.warn(f"prompts of the {split} split of {mixture}")
    return suite


def own_prompts_of(run: Run, target: TrainingTarget, mixture: Mixture, length: int) -> list[Conversation]:
    """Return the prompts and chats of the training split that the target will answer for stage 2.

    Prompts of more than `length` tokens, the row length of stage 1, are left out. Raises a UserError if none is left.
    """
    config, settings = run.config, run.config.stage2.generate
    tally = Tally(max_share=1.0 if config.data.max_bad_rows else 0.0)
    found, _ = conversations(
        mixture,
        "train",
        target.tokenizer,
        Cut(settings.prompt_tokens, _PROMPTS_PER_TEXT, turns=None if settings.turns == "all" else settings.turns),
        settings.max_rows,
        limits=PromptLimits.of(target, settings.max_new_tokens, length),
        tally=tally,
    )
    tally.warn(f"prompts of stage 2, the train split of {mixture}")
    if not found:
        raise UserError(f"stage2.generate: no document in the train split of {mixture} gives a prompt")
    return found
