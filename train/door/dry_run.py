"""`--dry_run`: everything that a config asks for, on tiny stand-ins, one optimiser step per stage.

It finds what is wrong with a recipe in seconds, without a GPU, and with no download but that of a warm start. The
target is a random model of the same family (a Llama if its config is not on this machine or if it can't be made small)
with a tokenizer of bytes; each source is a few chats or texts. The head, the losses, dtypes, sampling and stages stay
as configured; steps, rows and lengths shrink.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from data.mixture import PYTHON_SOURCES, SELF, Source, SourceError
from data.readers import hub_id
from data.sources import documents
from data.tally import Tally
from speculator.files import make_cache_folder
from train import interrupts
from train.door import checks
from train.door.head import head_class
from train.door.settle import Run
from train.options.config import RunConfig, StageConfig, TargetConfig
from train.processes import of_first

_HIDDEN, _INNER, _LENGTH, _CONTEXT = 32, 16, 64, 1024
_DRAFTED = 100  # of the stand-in's vocabulary, where a part of the real one is drafted from
_ROWS_READ = 100  # of each local source
_ROWS = {"train": 24, "validation": 6, "held-out": 6}
_MOST_WEIGHTS = 5 * 10**6
# The sizes that families have besides those of a Llama, by all of their names.
_MORE_SIZES = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _HIDDEN),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), _INNER),
    "num_kv_shared_layers": 0,
}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Stage = TypeVar("Stage", bound=StageConfig)


def run_on_stand_ins(run: Run, carry_out: Callable[[RunConfig], None]) -> None:
    """Run on stand-ins in a temporary folder, and print what was done; all processes of a launch call it.

    The first rows of local sources are read. The files of the target and its adapter and hub datasets are not tried,
    nor is a sharded target, nor training from `speculator.warm_start`. `carry_out` gets the config of the stand-ins.
    Raises a SourceError if a local source has no rows, or too many of its first rows are bad.
    """
    config, state = run.config, PartialState()
    for source in run.mixture.sources:
        if Path(source.location).exists():
            _look_at(source, config)
        elif source.location not in (PYTHON_SOURCES, SELF):
            hub_id(source.location)
    for name in ("stage1", "stage2") if state.is_main_process else ():
        if not (stage := getattr(config, name)).epochs:
            checks.warn_of_warm_up(name, stage)
    # Where all nodes see it: of several, they share the cache alone.
    shared = make_cache_folder() if state.num_processes > int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else None
    folder = Path(of_first(lambda: tempfile.mkdtemp(prefix="dry-run-", dir=shared)))
    with interrupts.temporary(folder) if state.is_main_process else nullcontext():
        # What a run says of itself would be read as this config's results.
        with _cache_in(folder / "cache"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            if state.is_main_process:
                # The fewest layers with default auxiliary layers, or two for a head that reads none.
                layers = 7 if hasattr(head_class(config.speculator).config_class, "aux_layers") else 2
                _make_target(folder / "target", _family(run.target), layers)
                for number in range(len(run.mixture.sources)):
                    _make_source(folder / f"source{number}", number, state.num_processes, run.config.data.raw)
            state.wait_for_everyone()
            carry_out(_shrunk(run, folder))
        state.wait_for_everyone()
        if state.is_main_process:
            print("\n".join(_done(config, folder / "run")))


def _look_at(source: Source, config: RunConfig) -> None:
    """Read the first rows of a local source; raise a SourceError if it has none, or too many of them are bad."""
    tally = Tally(config.data.max_bad_rows)
    found = list(islice(documents(source.location, None, tally=tally), _ROWS_READ))
    tally.check(source.location)
    if not found:
        raise SourceError(f"{source.location}: no rows in it")


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Set the environment variable SPECULATOR_CACHE, the folder of prepared rows, inside the block."""
    before = os.environ.get("SPECULATOR_CACHE")
    os.environ["SPECULATOR_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["SPECULATOR_CACHE"]
        if before is not None:
            os.environ["SPECULATOR_CACHE"] = before


def _family(target: PreTrainedConfig | None) -> str:
    """Return the target's `model_type`, or "llama" if it is unknown or has recurrent layers, which can't be shrunk."""
    text = target and target.get_text_config()
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) if text else None
    kinds = getattr(text, "layer_types", None) or []
    recurrent = getattr(model, "_is_stateful", False) or any("attention" not in kind for kind in kinds)
    return "llama" if text is None or model is None or recurrent else text.model_type


def _make_target(folder: Path, family: str, layers: int) -> None:
    """Save a random model of the `model_type` `family` (see `_small_model`), and a tokenizer of bytes."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    whole.add_tokens(["<|im_start|>"], special_tokens=True)
    whole.chat_template = _TEMPLATE
    whole.save_pretrained(folder)
    model = _small_model(
        family,
        vocab_size=len(whole),
        vocab_size_per_layer_input=len(whole),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HIDDEN // 4,
        max_position_embeddings=_CONTEXT,
        bos_token_id=None,
        eos_token_id=whole.eos_token_id,
        pad_token_id=None,
    )
    model.save_pretrained(folder)


def _small_model(family: str, **shape: Any) -> PreTrainedModel:
    """Return a random model of a family, or a Llama if that family can't be made of less than five million weights."""
    torch.manual_seed(0)
    with suppress(Exception):  # whatever a family's code says of sizes that do not fit each other
        usual = AutoConfig.for_model(family)
        # Only those that the family has: a head takes a layer of low rank for what has a `kv_lora_rank`.
        more = {name: size for name, size in _MORE_SIZES.items() if hasattr(usual, name)}
        config = AutoConfig.for_model(family, **shape, **more)
        with torch.device("meta"):
            small = AutoModelForCausalLM.from_config(config).num_parameters() < _MOST_WEIGHTS
        if small:
            model = AutoModelForCausalLM.from_config(config)
            model(torch.arange(2)[None])
            return model
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape))


def _make_source(folder: Path, number: int, processes: int, raw: bool) -> None:
    """Save a dataset of chats and texts in turn, or with `raw` of texts, in three splits, with rows for `processes`.

    Its rows contain the source's `number`, so that no two rows of all sources are the same.
    """

    def row(split: str, i: int) -> dict:
        words = f"{split} row {i} of source {number}: the quick brown fox jumps over the lazy dog. "
        if raw or i % 2:
            return {"text": f"{words}\n" * 3, "messages": None}
        turns = [("user", "Say something."), ("assistant", words), ("user", "And more?"), ("assistant", words * 2)]
        return {"text": None, "messages": [{"role": role, "content": text} for role, text in turns]}

    counts = {name: max(count, 4 * processes) for name, count in _ROWS.items()}  # for a step of each process
    splits = {name: Dataset.from_list([row(name, i) for i in range(count)]) for name, count in counts.items()}
    DatasetDict(splits).save_to_disk(str(folder))


def _shrunk(run: Run, folder: Path) -> RunConfig:
    """Return the settings of the run on the stand-ins in a folder, with output in its subfolder "run"."""
    config, processes = run.config, run.processes
    stand_ins = [
        str(folder / f"source{number}") + (f"@{source.weight}" if source.weight else "")
        for number, source in enumerate(run.mixture.sources)
    ]
    # A row of L tokens has labels for N positions from L = N + 2 on.
    length = max(_LENGTH, config.speculator.n_predict + 2)
    prompt = length // 2
    generate = replace(
        config.stage2.generate,
        max_rows=max(_ROWS["train"], 4 * processes),
        prompt_tokens=prompt,
        max_new_tokens=length - prompt,
    )
    # Starting from the target's matrices needs the target's width: both are the stand-in's.
    inner = 0 if config.speculator.initialise == "target" else config.speculator.inner_dim and _INNER
    kind = head_class(config.speculator).config_class
    drafted = min(config.speculator.draft_vocab_size, _DRAFTED)
    return replace(
        config,
        target=TargetConfig(str(folder / "target"), dtype=config.target.dtype),
        speculator=replace(
            config.speculator,
            inner_dim=inner,
            draft_vocab_size=drafted,
            initialise="random" if kind.ships_with_target else config.speculator.initialise,
            warm_start=None,
            warm_start_revision=None,
            served_by=None,
            options=kind.shrunk(config.speculator.options, _HIDDEN, _DRAFTED),
        ),
        data=replace(config.data, sources=stand_ins, seq_length=length, max_tokens=None),
        stage1=_one_step(config.stage1),
        stage2=replace(_one_step(config.stage2), generate=generate),
        eval=replace(
            config.eval,
            validation_rows=max(4, processes),
            validation_prompts=2,
            tune_prompts=0,
            prompt_tokens=16,
            max_prompts=2,
            max_new_tokens=8,
        ),
        output_dir=str(folder / "run"),
        overwrite_output_dir=False,
        report_to="none",
        dry_run=False,
    )


def _one_step(stage: Stage) -> Stage:
    """Return a stage's settings for one optimiser step, of two micro-batches if it has several; no steps stay none."""
    return replace(
        stage,
        max_steps=min(stage.max_steps, 1),
        epochs=None,
        base_batch_size=None,
        base_width=None,
        warmup_steps=0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=min(stage.gradient_accumulation_steps, 2),
        logging_steps=1,
        eval_steps=1,
        save_steps=1,
    )


def _done(config: RunConfig, run: Path) -> Iterator[str]:
    """Yield lines about what each stage and the evaluation did in the folder `run`; `config` has the real settings."""
    for name in ("stage1", "stage2"):
        if getattr(config, name).max_steps:
            history = json.loads((run / name / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
            assert all(any(key in entry for entry in history) for key in ("loss", "eval_loss"))
            yield f"{name} on stand-ins: one step and an evaluation; checkpoint and head written"
    rows = json.loads((run / "eval" / "report.json").read_text())["suites"]
    yield f"evaluation on stand-ins: {len(rows)} rows of a report; nothing is kept"
    yield "memory and time of the real run: --plan"
