"""What the recipes of `configs/` need on the GPU that is here, against their plans: `benchmarks.plan --device cuda`.

Targets have the published sizes and random weights, made on the device in bfloat16. Rows, their length and heads are
the recipe's own; of its gradient accumulation two passes are left, as from the second on the gradients are there.

Longer than other files: what is run, how it is measured and the table that it becomes are one benchmark.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PrinterCallback, Qwen3Config, TrainerCallback, TrainingArguments

from benchmarks.shapes import NO_ENDS, PRESETS, llama, of_random_weights
from data.onpolicy import generate_rows
from speculator.checkpoints.loading import bind
from speculator.decoding.cuda_graphs import capturable
from speculator.device import hardware, synchronize
from speculator.drafters import HeadDrafter
from speculator.errors import first_line
from speculator.files import make_folder, read_text, write_json, write_text
from speculator.heads import ARCHITECTURES, Speculator
from speculator.tables import markdown_table
from speculator.target.model import Target
from train.checks import own_sampling
from train.command_line import parse
from train.config import HERE, ROOT, RunConfig
from train.initialise import head_config
from train.place import Place
from train.plan import MOMENTS, TARGET, WEIGHTS, Plan, dtype_of
from train.trainer import Collator, SpeculatorTrainer, on_one_gpu

_STEPS = 3
_ENOUGH = 20.0  # seconds of steps after which none is begun, once a second one is done
_DOCUMENTS = 4  # of a row: chats of ultrachat_200k have some 1,100 tokens


def llama_8b() -> PreTrainedConfig:
    return LlamaConfig(**PRESETS["llama-3-8b"].target, **NO_ENDS)


def qwen3_8b() -> PreTrainedConfig:
    sizes = llama(151_936, 4096, 12_288, 36, 32, 8, 40_960)
    return Qwen3Config(**sizes, head_dim=128, tie_word_embeddings=False, **NO_ENDS)


def smollm2_135m() -> PreTrainedConfig:
    return LlamaConfig(**llama(49_152, 576, 1536, 30, 9, 3, 8192), tie_word_embeddings=True, **NO_ENDS)


@dataclass(frozen=True)
class Case:
    """A recipe and its target's sizes; a head of another architecture, or other rows at once, where it says so."""

    recipe: str
    target: Callable[[], PreTrainedConfig]
    architecture: str | None = None
    rows: int | None = None
    generates: bool = False

    @property
    def name(self) -> str:
        other = f", {self.architecture} head" if self.architecture else ""
        return f"{self.recipe}{other}" + (f", {self.rows} rows" if self.rows else "")

    def config(self) -> RunConfig:
        """The recipe's, of a few steps."""
        config = parse(["--config", str(ROOT / "configs" / f"{self.recipe}.yaml")])
        rows = self.rows or config.stage1.per_device_train_batch_size
        few = replace(config.stage1, per_device_train_batch_size=rows, gradient_accumulation_steps=2, max_steps=_STEPS)
        head = replace(config.speculator, architecture=self.architecture or config.speculator.architecture)
        return replace(config, stage1=few, speculator=head)


CASES = (
    Case("llama-3.1-8b-instruct", llama_8b, generates=True),
    Case("llama-3.1-8b-instruct-eagle3", llama_8b),
    Case("qwen3-8b", qwen3_8b),
    Case("smollm2-135m-eagle3", smollm2_135m, rows=64),
    Case("llama-3.1-8b-instruct", llama_8b, architecture="lstm"),
)


class StepTimes(TrainerCallback):
    """Seconds of each optimiser step, and the end of training when they have taken enough."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) > 1 and sum(self.seconds) > _ENOUGH:
            control.should_training_stop = True


def head_of(config: RunConfig, target: Target, dtype: torch.dtype = torch.float32) -> Speculator:
    """A head that was trained by nobody, on the target's device."""
    with target.device:
        head = ARCHITECTURES[config.speculator.architecture](head_config(config.speculator, target.config))
    return bind(head.to(target.device, dtype), target)


def trainer_of(run: RunConfig, target: Target, rows: Dataset, folder: str) -> SpeculatorTrainer:
    """The trainer of a run's first stage, which writes and evaluates nothing."""
    stage = run.stage1
    settings = TrainingArguments(
        folder,
        max_steps=stage.max_steps,
        disable_tqdm=True,
        per_device_train_batch_size=stage.per_device_train_batch_size,
        gradient_accumulation_steps=stage.gradient_accumulation_steps,
        bf16=stage.bf16,
        use_cpu=target.device.type == "cpu",
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["labels"],
        logging_nan_inf_filter=False,
    )
    head = head_of(run, target)
    trainer = SpeculatorTrainer(
        model=head,
        target=target,
        loss=run.loss,
        decode=lambda _: {},
        args=on_one_gpu(settings),
        data_collator=Collator(head.config),
        train_dataset=rows,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def parts_of(trainer: SpeculatorTrainer) -> dict[str, int]:
    """Bytes of what is there between two steps."""
    target, head = trainer.target.model, trainer.model
    moments = [v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return {
        TARGET: sum(tensor.nbytes for tensor in (*target.parameters(), *target.buffers())),
        WEIGHTS: sum(weight.nbytes for weight in head.parameters()),
        MOMENTS: sum(moment.nbytes for moment in moments if moment.ndim),
    }


def train(config: RunConfig, target: Target) -> dict[str, Any]:
    """Some steps of the trainer: seconds of each, the loss, bytes by part."""
    stage, length = config.stage1, config.data.seq_length
    count = stage.max_steps * stage.gradient_accumulation_steps * stage.per_device_train_batch_size
    documents = [place * _DOCUMENTS // length for place in range(length)]
    columns = {
        "input_ids": torch.randint(target.vocab_size, (count, length), device="cpu").tolist(),
        "document_ids": [documents] * count,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(config, target, Dataset.from_dict(columns), folder)
        times = StepTimes()
        trainer.add_callback(times)
        loss = trainer.train().training_loss
        return {"step_seconds": times.seconds, "loss": loss, "held": parts_of(trainer)}


def generate(config: RunConfig, target: Target) -> dict[str, Any]:
    """As many rows as stage 2 decodes together, as it makes them, with a head of noise."""
    own = config.stage2.generate
    drafter = HeadDrafter(head_of(config, target, target.dtype), own.num_speculative_tokens or None)
    prompts = torch.randint(target.vocab_size, (own.batch_size, own.prompt_tokens), device="cpu").tolist()
    with tempfile.TemporaryDirectory() as folder:
        generate_rows(
            target,
            drafter,
            prompts,
            Path(folder) / "generated",
            sampling=own_sampling(own),
            max_new_tokens=own.max_new_tokens,
            batch_size=own.batch_size,
            progress=False,
        )
        manifest = json.loads(read_text(Path(folder) / "generated" / "manifest.json"))
    figures = {name: manifest[name] for name in ("tokens", "tokens_per_second", "acceptance_length")}
    return {**figures, "captured": capturable(target, drafter)}


class Heights:
    """The most bytes of the device that tensors hold, and that the allocator holds; None on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()  # statistics are refused before

    def reset(self) -> int:
        """Give back what is free, and count anew from what is there: the bytes of it."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def now(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return {"measured": None, "reserved": None}
        heights = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return dict(zip(("measured", "reserved"), heights, strict=True))


def tried(work: Callable[[], dict[str, Any]], heights: Heights) -> dict[str, Any]:
    """What some work gives, or its error in a line; how high memory was, and the seconds that it took."""
    before, began = heights.reset(), time.perf_counter()
    try:
        found = work()
    except Exception as error:  # of one case: the others go on
        found = {"error": f"{type(error).__name__}: {first_line(error)}"}
    return {**found, "before": before, **heights.now(), "seconds": time.perf_counter() - began}


def rows_of(case: Case, place: Place, device: torch.device) -> Iterator[dict[str, Any]]:
    """Of a case the row of its training, and that of generating if it does."""
    made: dict[str, Any] = {}
    heights = Heights(device)

    def prepare() -> dict[str, Any]:
        sizes, config = case.target(), case.config()
        made["config"] = config
        plan = Plan(config, sizes, place)
        made["memory"] = plan.memory()
        stage, length = config.stage1, config.data.seq_length
        tokens = stage.gradient_accumulation_steps * stage.per_device_train_batch_size * length
        at_peak = plan.token_at_peak("stage1")
        made["step"] = {"tokens": tokens, "planned_seconds": at_peak and at_peak * tokens}
        made["target"] = of_random_weights(sizes, dtype_of(config, sizes, device.type), device)
        return {}

    prepared = tried(prepare, heights)
    if "error" in prepared:
        yield {"name": case.name, **prepared}
        return
    row = {"name": case.name, **made["step"], "made_in": prepared["seconds"], **_planned(made["memory"]["stage1"])}
    yield row | tried(lambda: train(made["config"], made["target"]), heights)
    if case.generates:
        row = {"name": f"{case.name}, generating", **_planned(made["memory"]["generating"])}
        yield row | tried(lambda: generate(made["config"], made["target"]), heights)


def _planned(parts: dict[str, float]) -> dict[str, Any]:
    return {"parts": dict(parts), "planned": sum(parts.values())}


def markdown(report: dict[str, Any]) -> str:
    """The table."""

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        planned, measured, reserved = (row.get(name) for name in ("planned", "measured", "reserved"))
        cells = [_gb(planned), _gb(measured)]
        cells += [f"{planned / measured - 1:+.1%}" if planned and measured else "", _gb(reserved)]
        if "error" in row:
            return (row["name"], *cells, row["error"].replace("|", "/")[:300], "", "", "")
        at_peak = row.get("planned_seconds")
        cells.append(f"{at_peak:.2f}" if at_peak else "")
        if row.get("step_seconds"):
            last = row["step_seconds"][-1]
            cells += [f"{last:.2f}", f"{row['tokens'] / last:,.0f}", f"{at_peak / last:.0%}" if at_peak else ""]
        else:
            cells += [""] * 3
        return (row["name"], *cells)

    header = ("recipe", "planned, GB", "measured, GB", "off by", "reserved, GB")
    header += ("bound of a step, s", "a step, s", "tokens/s", "share of the peak")
    return f"{report['hardware']}, torch {report['torch']}\n\n{markdown_table(header, map(line, report['rows']))}\n"


def _gb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:,.2f}"


def run(device: torch.device, output: Path | None, cases: tuple[Case, ...] = CASES) -> dict[str, Any]:
    """Print each row when it is there, write what there is so far, and the table last."""
    if output:
        make_folder(output)
    place = Place.of(HERE, 1) if device.type == "cuda" else Place("cpu", 1, "CPU")
    report: dict[str, Any] = {"hardware": hardware(device), "torch": torch.__version__, "rows": []}
    for case in cases:
        for row in rows_of(case, place, device):
            report["rows"].append(row)
            print({name: value for name, value in row.items() if name != "parts"}, flush=True)
            if output:
                write_json(output / "plan.json", report)
                write_text(output / "plan.md", markdown(report))
    print(f"\n{markdown(report)}", flush=True)
    return report
