"""Checks of a run's settings and its target's config, before the weights of the target are read."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

from transformers import PreTrainedConfig

from data.mixture import SELF, Mixture
from speculator.checkpoints import layouts
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse
from speculator.heads import SpeculatorConfig
from speculator.target.gguf.file import is_gguf
from speculator.target.probe import usable_context
from speculator.target.sharding import SHARDED, check_heads, divided
from speculator.terminal import log
from train.door.head import head_class
from train.door.sizes import Lengths
from train.options.config import RunConfig, StageConfig, TargetConfig
from train.options.loss_table import LOSSES

_LEAST_DRAFTED = 16  # tokens of a draft vocabulary: several children of a token have to be among them
_MERGE = (
    "from peft import PeftModel; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    'PeftModel.from_pretrained(M.from_pretrained({0}, dtype="auto"), {1}).merge_and_unload()'
    '.save_pretrained("merged"); T.from_pretrained({0}).save_pretrained("merged")'
)


def settings(config: RunConfig, mixture: Mixture, head: SpeculatorConfig, lengths: Lengths, processes: int) -> None:
    """Raise a UserError for settings that are out of range or contradict each other."""
    options, generate = config.speculator, config.stage2.generate
    if options.warm_start_revision and not options.warm_start:
        raise UserError("speculator.warm_start_revision needs speculator.warm_start")
    if options.warm_start and options.initialise != "random":
        raise UserError("speculator.warm_start and speculator.initialise target are mutually exclusive")
    if 0 < options.draft_vocab_size < _LEAST_DRAFTED:
        raise UserError(f"speculator.draft_vocab_size must be 0 (all tokens) or at least {_LEAST_DRAFTED}")
    _stage("stage1", config.stage1)
    if not config.stage1.max_steps:
        raise UserError("stage1.max_steps must be at least 1")
    if lengths.own:
        _stage("stage2", config.stage2)
        deepest = head.max_speculative_tokens
        if deepest is not None and generate.num_speculative_tokens > deepest:
            raise UserError(f"stage2.generate.num_speculative_tokens must be in 0..{deepest}, what the head can draft")
        if lengths.own.tokens() < options.n_predict + 2:
            raise UserError(f"{lengths.own.settings} must be at least {options.n_predict + 2}")
    target, stages = config.target, {"stage1": config.stage1, "stage2": config.stage2}
    where = "server" if target.server else "parallel" if target.parallel in SHARDED else ""
    for name, stage in ((name, stage) for name, stage in stages.items() if stage.max_steps):
        refuse(
            (
                stage.keep_states and where,
                f"{name}.keep_states needs a target that is whole in each process, not target.{where}",
            ),
            (
                config.shard_optimizer and stage.optimizer == "muon",
                f"shard_optimizer splits AdamW's moments; it needs --{name}.optimizer adamw, at half the rate of a "
                "recipe with Muon",
            ),
        )
    if 0 < config.data.seq_length < options.n_predict + 2:
        raise UserError(f"data.seq_length must be at least {options.n_predict + 2} for n_predict {options.n_predict}")
    if mixture.locations.count(SELF) > 1:
        raise UserError(f"data.sources names {SELF} twice")
    sharded, merged = f"target.parallel {target.parallel}", _merged(target)
    refuse(
        (
            target.parallel == "device_map" and processes > 1,
            f"target.parallel device_map spreads the target over all GPUs of one process, and this run has "
            f"{processes}: start it without accelerate launch, or shard the target by tp or fsdp",
        ),
        (target.server and target.parallel != "none", "target.server and target.parallel are mutually exclusive"),
        (target.parallel_size and target.parallel not in SHARDED, "target.parallel_size needs parallel tp or fsdp"),
        (target.server and target.adapter, f"target.server: servers run merged weights; {merged}"),
        (where and target.adapter, f"{sharded} needs merged weights; {merged}"),
        (
            target.parallel in SHARDED and is_gguf(target.name_or_path),
            f"{sharded}: each process reads a GGUF file whole; shard the folder that `speculator dequantise` writes",
        ),
    )
    if target.parallel in SHARDED:
        writes_no_text(config, mixture, sharded, ", or take --target.parallel device_map")
    if not any(getattr(config.loss, name) for name in LOSSES):
        raise UserError(f"loss: at least one of {', '.join(LOSSES)} must be above 0")
    for section, temperatures in (
        ("eval", config.eval.temperatures),
        ("data.self_source", config.data.self_source.temperatures),
        ("stage2.generate", generate.temperatures),
    ):
        if not temperatures or len(set(temperatures)) < len(temperatures):
            raise UserError(f"{section}.temperatures must be distinct, and at least one")
    samplings("eval", config.eval.temperatures)
    if not 0 <= config.seed < 2**32:
        raise UserError("seed must be in 0..4294967295")
    if config.eval.max_new_tokens < 2:
        raise UserError("eval.max_new_tokens must be at least 2: the first new token comes from the prefill")


def fits_target(
    config: RunConfig, head: SpeculatorConfig, lengths: Lengths, text: PreTrainedConfig, processes: int
) -> None:
    """Raise a UserError for what does not fit the target, given its text config."""
    target, options = config.target, config.speculator
    head.starts_from_target(options.initialise == "target")
    if target.parallel in SHARDED and processes > 1:
        size = divided(processes, target.parallel_size)
        if target.parallel == "tp":
            check_heads(target.name_or_path, text, size)
    if context := usable_context(text):
        if target.server:  # a server generates a token after each text, see `ServerTarget.context_length`
            lengths.check(context - 1, f"servers read texts of at most {context - 1} tokens")
        lengths.check(context, f"{target.name_or_path} has a context of {context}")
    if options.served_by:
        made = copy.deepcopy(head)
        made.base_model_name_or_path = target.name_or_path
        own = (layout for layout in layouts() if layout.head is head_class(options))
        servers = [server for layout in own for server in layout.servers(made, "HEAD")]
        able = [server for server in servers if server.name.lower().startswith(options.served_by)]
        if not any(server.loads for server in able):
            unknown = f"{'was not tried with' if able else 'has no layout for'} the architecture {options.architecture}"
            why = next((server.how for server in able if server.loads is False), unknown)
            raise UserError(
                f"speculator.served_by: {options.served_by} {why}; take another target, or a recipe for another "
                "server, such as configs/eagle3.yaml"
            )


def _merged(target: TargetConfig) -> str:
    """Return advice to merge the target's adapter, with the command."""
    names = (json.dumps(name) for name in (target.name_or_path, target.adapter))
    command = shlex.join(["python", "-c", _MERGE.format(*names)])
    return f"merge the adapter, and name the folder `merged` as the target: {command}"


def samplings(section: str, temperatures: list[float], **filters: Any) -> tuple[Sampling, ...]:
    """Return a `Sampling` per temperature, with `filters` such as top_p; a UserError about a value names `section`."""
    try:
        return tuple(Sampling(temperature, **filters) for temperature in temperatures)
    except UserError as error:
        raise UserError(f"{section}.{error}") from None


def writes_no_text(config: RunConfig, mixture: Mixture, why: str, instead: str = "") -> None:
    """Raise a UserError (`why`, advice, `instead`) if a run needs text of a target that can't be decoded here."""
    wanted = (f"the source {SELF}", mixture.names_self), ("stage 2", bool(config.stage2.max_steps))
    for what in (name for name, asked in wanted if asked):
        raise UserError(
            f"{why}: the target trains and writes no text, so there is no {what}; let a server that runs it, such as "
            "vLLM, write the text beforehand (speculator data generate --server URL --max_new_tokens N, which has room "
            f"for its thoughts), name its folder in data.sources, and set --stage2.max_steps 0{instead}"
        )


def warn_of_warm_up(name: str, stage: StageConfig) -> None:
    """Print a warning if a stage whose steps are known ends before its warm-up."""
    if 0 < stage.max_steps < stage.warmup_steps:
        log(
            f"warning: {name}.warmup_steps ({stage.warmup_steps}) exceeds the {stage.max_steps} steps of {name}: "
            "the learning rate never reaches its peak"
        )


def _stage(name: str, stage: StageConfig) -> None:
    """Raise a UserError for settings of the stage `name` that are out of range or contradict each other."""
    if stage.save_total_limit < 2:
        raise UserError(f"{name}.save_total_limit must be at least 2: the best checkpoint and the newest one")
    if stage.save_steps % stage.eval_steps:
        raise UserError(
            f"{name}.save_steps ({stage.save_steps}) must be a multiple of {name}.eval_steps ({stage.eval_steps}): "
            "the best checkpoint is chosen by its evaluation"
        )
