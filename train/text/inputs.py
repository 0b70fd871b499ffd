"""What a run reads: its target, rows, prompts, and their fingerprints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import datasets
import transformers
from pyarrow import compute

from data.cli.flags import THINKING_TOKENS
from data.mixture import Mixture
from data.prepare import RowRequest, token_rows
from data.prompts import Cut, PromptLimits, conversations
from data.tally import Tally
from eval.suites import Suite, from_text
from speculator.chat import set_template_variables, thinks
from speculator.checkpoints import shipped
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
from train.checkpoint import reporting_full_disk
from train.door import checks
from train.door.head import shipped_folder
from train.door.plan import Plan
from train.door.settle import Run
from train.door.sizes import Prompt, count_of_tokens, shortened_for
from train.folder import prompts_fingerprint, rows_fingerprint
from train.text.own_text import with_self_written

_PROMPTS_PER_TEXT = 4
_THOUGHTS = 1024  # tokens; few thoughts are shorter


@dataclass
class Inputs:
    """What a run trains and is measured on.

    Attributes:
        run: the run that they were read for.
        length: number of tokens in a row.
        train_rows, validation_rows: packed rows.
        suites: "validation" prompts are decoded at each evaluation, "held-out" ones are in the report.
        own_prompts: prompts that the target continues for stage 2; None: it writes them too, or there is no stage 2.
        plan: the plan for these rows and prompts.
    """

    run: Run
    length: int
    train_rows: datasets.Dataset
    validation_rows: datasets.Dataset
    suites: dict[str, Suite]
    own_prompts: list[Conversation] | None
    plan: Plan

    def fingerprints(self, target: TrainingTarget) -> dict[str, str]:
        """Return fingerprints of "target", and of rows and prompts by split; a resumed run must have the same."""
        rows = {"training": self.train_rows, "validation": self.validation_rows}
        found = {"target": target.fingerprint} | {f"{name} rows": rows_fingerprint(each) for name, each in rows.items()}
        if target.digest:
            # In another dtype, or by another version, the same weights have another hash, and it does not count.
            kind = f"{dtype_name(target.dtype)} by transformers {transformers.__version__}"
            found[f"the target's weights, {kind}"] = target.digest
        return found | {f"{name} prompts": prompts_fingerprint(suite.prompts) for name, suite in self.suites.items()}


def read_inputs(plan: Plan, target: TrainingTarget) -> Inputs:
    """Read all inputs and check them; nothing is written into the run's folder. Every process of the run calls this.

    Missing chats of the source `self` are written into the cache first. `plan` was made before the data were read.
    Raises a UserError if an input can't be read, is too small, or does not fit the target or the memory.
    """
    run, config = plan.run, plan.config
    if (folder := shipped_folder(config)) is not None:
        shipped(folder)
    _warn_of_thoughts(run, target)
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
    check_rows(run, target, train_rows, validation_rows, None if own_prompts is None else len(own_prompts))
    known = plan.knowing(length, sizes_of(own_prompts), stage1=len(train_rows))
    known.refuse_too_large()  # what the plan at the start could only estimate
    return Inputs(
        run=run,
        length=length,
        train_rows=train_rows,
        validation_rows=validation_rows,
        suites=suites,
        own_prompts=own_prompts,
        plan=known,
    )


def _warn_of_thoughts(run: Run, target: TrainingTarget) -> None:
    """Print a warning for each limit of generated answers that most thoughts would reach."""
    written = {"data.self_source": run.lengths.chat, "stage2.generate": run.lengths.own}
    low = [
        f"{name}.max_new_tokens {each.new}"
        for name, each in written.items()
        if each is not None and each.new < _THOUGHTS
    ]
    if low and thinks(target.tokenizer):
        log(
            f"warning: {target.name} may think before it answers, and {' and '.join(low)} cuts its thoughts: take "
            f"{THINKING_TOKENS}, or set target.chat_template_kwargs so that it does not think"
        )


def check_rows(
    run: Run,
    target: TrainingTarget,
    train_rows: datasets.Dataset,
    validation_rows: datasets.Dataset,
    prompts: int | None = None,
) -> None:
    """Raise a UserError if rows hold a token that the target does not have, or are too few.

    Training rows have to fill an optimiser step of stage 1, and `prompts` one of stage 2 (None: it answers
    `stage2.generate.max_rows`). Each process needs a validation row.
    """
    for made in (train_rows, validation_rows):
        tables = made.with_format("arrow").iter(batch_size=1000)
        highest = max(compute.max(table["input_ids"].combine_chunks().flatten()).as_py() for table in tables)
        if highest >= target.vocab_size:
            raise UserError(
                f"the rows hold token {highest}, but {target.name} has only 0..{target.vocab_size - 1}: "
                "its tokenizer has tokens that it does not"
            )
    check_batch(run, "stage1", len(train_rows))
    check_batch(run, "stage2", run.config.stage2.generate.max_rows if prompts is None else prompts)
    if len(validation_rows) < run.processes:
        raise UserError(f"{len(validation_rows)} validation rows are too few for {run.processes} processes")


def check_batch(run: Run, name: str, have: int) -> None:
    """Raise a UserError if `have` rows don't fill one step of "stage1" or "stage2" (`name`) on all processes."""
    stage = run.stage(name, have)
    need = stage.rows_per_step * run.processes
    if stage.max_steps and have < need:
        raise UserError(
            f"{have} rows to train on in {name} are less than one batch of {need}; take more or a smaller batch, or "
            f"set --{name}.epochs, which fits the batch to the rows"
        )


def sizes_of(prompts: list[Conversation] | None) -> list[Prompt] | None:
    """Return the sizes of stage 2's prompts, as the plan counts them; None without such prompts."""
    return None if prompts is None else [Prompt(each.size, 1 + len(each.later)) for each in prompts]


def load_target(run: Run) -> TrainingTarget:
    """Load the run's target: a `Target`, its training half if it can't be decoded, or one that servers run."""
    config = run.config
    given = dataclasses.asdict(config.target)
    variables, urls, name = given.pop("chat_template_kwargs"), given.pop("server"), given.pop("name_or_path")
    half: InProcessTarget | None = None
    if urls:
        own = {key: given[key] for key in ("revision", "dtype", "trust_remote_code")}
        target: TrainingTarget = ServerTarget.connect(name, urls, **own)
    else:
        with loading(name):
            target = half = InProcessTarget.load(name, **given)
    set_template_variables(target.tokenizer, variables)
    if config.data.raw:
        target.tokenizer.chat_template = None
    if half is None or config.target.parallel in SHARDED:
        return target
    try:
        return Target.of(half)
    except UserError as error:
        checks.writes_no_text(config, run.mixture, str(error))
        log(f"{error}; the run trains without decoding, and a forecast selects the best checkpoint")
        return target


def needed_of_server(run: Run, context: int) -> tuple[tuple[int, ...], int]:
    """Return the auxiliary layers that the head reads, and the tokens of the longest document that it sends.

    A server reads at most `context` tokens, one less than the target's context length.
    """
    return tuple(getattr(run.head, "aux_layers", None) or ()), min(run.lengths.longest, context)


def rows(
    run: Run, target: TrainingTarget, mixture: Mixture, length: int, split: str, report: bool = True
) -> datasets.Dataset:
    """Return one split's packed rows of `length` tokens; with `report`, print what became of the rows of the sources.

    "train" has at most `data.max_tokens` tokens, "validation" only the rows that are evaluated.
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


def log_sizes(run: Run, name: str, rows: datasets.Dataset, length: int) -> None:
    """Print the rows and steps of stage `name`, its settings that were adapted, and a row's `length` if that was."""
    before, stage = getattr(run.config, name), run.stage(name, len(rows))
    batch, was = (each.rows_per_step for each in (stage, before))
    notes = [f"rows of {length} tokens"] * (length != run.config.data.seq_length)
    notes += [f"batches of {batch}, not {was}"] * (batch != was)
    adapted = f"; this is little text, so {' and '.join(notes)}" if notes else ""
    if stage.learning_rate != before.learning_rate:
        base = before.base_batch_size or was * run.processes
        width = run.head.emb_dim
        adapted += (
            f"; the learning rate is {stage.learning_rate:.2g} for {batch * run.processes} rows a step and a target of "
            f"width {width}: {before.learning_rate:.2g} is for {base} rows and width {before.base_width or width}"
        )
    size = f"{count_of_tokens(rows):,} tokens in {len(rows):,} rows"
    log(f"{name.replace('stage', 'stage ')} trains on {size}, for {stage.max_steps:,} steps{adapted}")
