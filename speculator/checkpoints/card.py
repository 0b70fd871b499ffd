"""The model card of a head's folder: what the head is, what it was trained on, what was measured, and how to run it.

It says only what the folder and its run say: the head's config.json, and of the run that the folder lies in, if it
does, config.yaml and eval/report.json. It knows nothing of how either was made.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from speculator.checkpoints import layouts, load_any
from speculator.device import dtype_name
from speculator.errors import UserError
from speculator.files import write_text
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.tables import BASELINES, DRAFTERS, markdown_table

NAME = "README.md"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_SOURCE = re.compile(r"([\w.-]+/[\w.-]+)(/[\w.,-]+)?(:[^/]+)?")  # org/name/config:split
_FILE = re.compile(r"\.(jsonl?|txt|parquet|gz|gguf)$")


def write_card(folder: str | Path, run: str | Path | None = None) -> Path:
    """Write README.md into a head's folder, whole or not at all; gives its path.

    Args:
        folder: of a head, in any layout.
        run: folder of the run that made it; default: the one that `folder` lies in.

    Raises:
        UserError: no head there, a config.yaml or report.json of its run that can't be read, or no room to write.
    """
    folder = Path(folder)
    head = load_any(folder)
    write_text(folder / NAME, card(head, *read_run(Path(run) if run else folder.resolve().parent)))
    return folder / NAME


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.yaml and eval/report.json of a run's folder; empty if it is none.

    Raises:
        UserError: one of them is damaged.
    """
    try:
        record = yaml.safe_load(_text(run / "config.yaml") or "{}")
        report = json.loads(_text(run / "eval" / "report.json") or "{}")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{run}: its config.yaml or eval/report.json can't be read: {error}") from None
    settings = record.get("settings") if isinstance(record, dict) else None
    return (record, report) if isinstance(settings, dict) and isinstance(settings.get("stage1"), dict) else ({}, {})


def card(head: Speculator, record: dict[str, Any], report: dict[str, Any]) -> str:
    """The card's text.

    Args:
        head: the head, with what its config records.
        record: the run's config.yaml: settings, versions, processes; empty if it is not known.
        report: its report.json; empty if nothing was measured.
    """
    config: Any = copy.copy(head.config)
    base, name = config.base_model_name_or_path, None
    if base:
        name = config.base_model_name_or_path = _shown(base)
    if config.base_model_adapter:
        config.base_model_adapter = _shown(config.base_model_adapter)
    data = ModelCardData(
        base_model=base if base and _is_hub_id(base) else None,
        datasets=_hub_datasets(config.training_data or []) or None,
        library_name="speculator",
        tags=["speculative-decoding", config.model_type.replace("_", "-")],
        **_licence(base),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# Draft head for {name or 'a causal language model'}\n",
        "It drafts the next tokens of its target, which checks a whole draft in one forward pass and keeps what it "
        "would have said itself: the same text in fewer passes.\n",
        *_architecture(head, config),
        *_training(config, record),
        *_measured(report),
        *_use(head, config),
        *_versions(record, report),
    ]
    return "\n".join(parts)


def _architecture(head: Speculator, config: SpeculatorConfig) -> list[str]:
    kind = type(head).__name__.removesuffix("Speculator")
    facts = {
        "architecture": f"{kind}, drafts up to {config.n_predict} tokens",
        "parameters": f"{sum(weight.numel() for weight in head.parameters()):,}, {dtype_name(head.dtype)}",
        "sizes": f"hidden {config.emb_dim}, inner {config.inner_dim}, vocabulary {config.vocab_size}",
        "drafts from": f"{config.output_size} of {config.vocab_size} tokens",
        "form": config.describe(),
        "target": _base(config, "not recorded"),
        "longest context trained on": f"{config.trained_length} tokens" if config.trained_length else "not recorded",
        "training data": ", ".join(_shown(source) for source in config.training_data or []) or "not recorded",
    }
    return [markdown_table(("", ""), facts.items()), ""]


def _base(config: SpeculatorConfig, otherwise: str) -> str:
    """The target's name and its adapter's, as the commands take them."""
    base, adapter = config.base_model_name_or_path or otherwise, config.base_model_adapter
    return f"{base} --adapter {adapter}" if adapter else base


def _training(config: SpeculatorConfig, record: dict[str, Any]) -> list[str]:
    """The recipe, a row for each stage of the run."""
    settings = record.get("settings") or {}
    stages = {name: stage for name, stage in settings.items() if name.startswith("stage") and isinstance(stage, dict)}
    if not stages:
        return []
    table = []
    processes = record.get("processes", 1)
    length = (settings.get("data") or {}).get("seq_length") or config.trained_length or 0
    for name, stage in stages.items():
        steps = stage.get("max_steps", 0)
        if not steps:
            continue
        most = "generate" in stage  # rows of the target's own text are of different lengths
        length = config.trained_length or length if most else length
        rows = stage.get("per_device_train_batch_size", 0) * stage.get("gradient_accumulation_steps", 1) * processes
        rate = f"{stage.get('learning_rate', 0):g}, {stage.get('lr_scheduler_type', '')}".rstrip(", ")
        shown = "up to " * most
        tokens = f"{shown}{steps * rows * length:,}"
        table.append((name, f"{steps:,}", f"{rows} of {shown}{length} tokens", tokens, rate))
    losses = ", ".join(f"{name} {weight:g}" for name, weight in (settings.get("loss") or {}).items() if weight)
    kept = "The head is the checkpoint that got the most tokens per step in real decoding of validation prompts."
    header = ("stage", "steps", "rows per step", "tokens", "learning rate")
    return ["## Training\n", markdown_table(header, table), "", f"Loss: {losses or 'not recorded'}. {kept}\n"]


def _measured(report: dict[str, Any]) -> list[str]:
    """Acceptance and speed: every decoder and every baseline that ran, with the machine and the settings."""
    rows = report.get("suites") or []
    if not rows:
        return ["## Results\n", "Not measured: `python -m eval` measures acceptance and speed.\n"]
    settings = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in report["settings"].items())
    baselines = [name for name in BASELINES if any(name in row.get("speedup", {}) for row in rows)]
    intro = (
        f"On {report['hardware']}; {settings}. Tokens per step count the one that the target gives itself; tokens per "
        "second leave out the prefill; a speedup is followed by its 95% interval.\n"
    )
    header = ["prompts", "temperature", "decoder", "tokens per step", "acceptance by position", "tokens/s"]
    header += [f"speedup over {BASELINES[name]}" for name in baselines]
    table = []
    for row in rows:
        plain = row["drafter"] == "none"
        decoder = "plain decoding" if plain else DRAFTERS.get(row["drafter"], row["drafter"])
        if row["drafter"] != "adaptive":  # which takes another shape and rule each step
            if row.get("nodes", 0) > row.get("num_speculative_tokens", 0):
                decoder += f", tree of {row['nodes']}"
            if row.get("rule") not in (None, "plain", "greedy"):
                decoder += f", rule {row['rule']}"
        speed = row["tokens_per_second"]["plain" if plain else "speculative"]
        cells = [
            f"{row['prompts']} of {row['name']}",
            f"{row['temperature']:g}",
            decoder,
            f"{row['acceptance_length']:.2f}",
            "" if plain else " ".join(f"{value:.2f}" for value in row["acceptance_by_position"]),
            f"{speed:.1f}" if speed else "",
            *(_interval(row.get("speedup", {}).get(name)) for name in baselines),
        ]
        table.append(cells)
    lines = ["## Results\n", intro, markdown_table(header, table)]
    identical = [row for row in rows if row["drafter"] == "head" and "identical_to_greedy" in row]
    for row in identical:
        same = row["identical_to_greedy"]
        lines.append(
            f"\nTemperature 0, {row['name']}: {same['identical']} of {same['of']} texts identical to those of "
            f"transformers' greedy `generate` in {same['dtype']}."
        )
    return [*lines, ""]


def _use(head: Speculator, config: SpeculatorConfig) -> list[str]:
    """How to run it here and elsewhere; D is this folder, or what an export of it wrote."""
    base, adapter = config.base_model_name_or_path or "BASE", config.base_model_adapter
    more = f', adapter="{adapter}"' if adapter else ""
    served = []
    for layout in layouts():
        if layout.head is type(head) and layout.carries(config):
            served += [f"[{layout.name}]"]
            for server in layout.servers(config, "D"):
                served.append(f"{'loads' if server.loads else 'DOES NOT LOAD'} in {server.name}: {server.how}")
    return [
        "## Use\n",
        f"```\npython -m speculator generate --target {_base(config, 'BASE')} --speculator D --prompt ...\n```\n",
        "```python\nfrom speculator import HeadDrafter, Target, generate, load_head\n\n"
        f'target = Target.load("{base}"{more})\n'
        'drafter = HeadDrafter(load_head("D", target))\n'
        'generation = generate(target, drafter, [target.tokenizer("...")["input_ids"]])\n```\n',
        "D is this folder; of a repository, what `hf download` makes of it. Servers read other layouts: "
        "`python -m speculator export --speculator D --format ... --output ...` writes them.\n",
        "```text\n" + "\n".join(served) + "\n```\n",
    ]


def _versions(record: dict[str, Any], report: dict[str, Any]) -> list[str]:
    versions = {**(record.get("versions") or {}), **(report.get("versions") or {})}
    if record.get("git_commit"):
        versions["commit"] = record["git_commit"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [f"## Versions\n\n{made}\n"] if made else []


def _licence(base: str | None) -> dict[str, Any]:
    """The base model's licence from its own card, if that is on this machine: nothing is fetched."""
    if not base:
        return {}
    file = Path(base) / NAME if Path(base).is_dir() else _is_hub_id(base) and try_to_load_from_cache(base, NAME)
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    try:
        known = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {name: known[name] for name in ("license", "license_name", "license_link") if known.get(name)}


def _is_hub_id(name: str) -> bool:
    """Whether a name is a repository's, as far as can be seen without asking: not a file or folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not _FILE.search(name) and not Path(name).exists() and name[0] != "."


def _hub_datasets(sources: list[str]) -> list[str]:
    """The repositories among sources, each once."""
    locations = [re.sub(r"@[\d.]+$", "", source) for source in sources]
    matches = [_HUB_SOURCE.fullmatch(location) for location in locations if not _FILE.search(location)]
    found = [match[1] for match in matches if match and not Path(match[0]).exists()]
    return [name for name in dict.fromkeys(found) if _is_hub_id(name)]


def _shown(name: str) -> str:
    """A name as others see it: of a path on this machine its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _interval(ratio: dict[str, float] | None) -> str:
    if not ratio:
        return ""
    alone = ratio["low"] is None  # a single prompt has no interval
    return f"{ratio['value']:.2f}" + ("" if alone else f" ({ratio['low']:.2f}-{ratio['high']:.2f})")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
