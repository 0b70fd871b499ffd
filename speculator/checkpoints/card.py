"""Model card of a head, filled in from the head's config and the config.yaml and eval/report.json of its run."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, try_to_load_from_cache

from speculator.checkpoints import layouts, load_any
from speculator.checkpoints.hub import is_hub_id
from speculator.checkpoints.layout import Layout
from speculator.device import dtype_name
from speculator.errors import UserError
from speculator.files import read_text, write_text
from speculator.heads.base import Speculator
from speculator.report import Interval, Report, ReportRow, RunRecord, known_report
from speculator.tables import BASELINES, DRAFTERS, markdown_table
from speculator.verdict import headlines

NAME = "README.md"
_LICENSE = ("license", "license_name", "license_link")
_HUB_DATASET = re.compile(r"(\w[\w.-]*/[\w.-]+)(/[\w.,-]+)?(:[^/@]+)?(@[\d.]+)?")  # org/name/config:split@weight
_LOCAL_FILE = re.compile(r"\.(jsonl?|txt|parquet|gz|gguf)(@[\d.]+)?$")
_TEMPLATE = Path(__file__).with_name("model_card.md")


def write_card(folder: str | Path, run: tuple[RunRecord, Report | None] | None = None) -> Path:
    """Write README.md into a head's folder and return its path; `run` is as in `card_of`."""
    folder = Path(folder)
    write_text(folder / NAME, card_of(folder, run))
    return folder / NAME


def copy_card(card: Path, copy: Path, renamed: tuple[str | None, str] | None, head: Speculator) -> None:
    """Copy a model card to the path `copy`, with the parameters and the form of `head`, as it was exported.

    Args:
        renamed: the base model's name until now, and the one that replaces it in the card; None: it stays. One that is
            no hub id removes it from the header. The licence becomes the new one's, or goes if its card is not here.
    """
    text = read_text(card)
    for name, value in _shape(head).items():
        text = re.sub(rf"(?m)^\| {name} \| .* \|$", f"| {name} | {value} |", text, count=1)
    if renamed is not None:
        old, base = public_name(renamed[0]), renamed[1]
        with suppress(ValueError, yaml.YAMLError):  # a header that is not YAML stays
            changed: Any = ModelCard(text, ignore_metadata_errors=True)
            changed.data.base_model = base if _is_hub_id(base) else None
            licence = _license(base)
            for name in _LICENSE:
                changed.data[name] = licence.get(name)
            text = str(changed)
        text = _rename_target(text, old, str(public_name(base))) if old else text
    write_text(copy, text)


def _rename_target(text: str, old: str, new: str) -> str:
    """Return a card with another name of the target; of a GGUF file also that of the folder that `dequantise` writes.

    A name without "/" may be any word, so it is replaced only where a card names the target.
    """
    places = (
        *("--target ", 'load("', "target | ", "head for ", "serve ", "-m ", "--model-path ", "(base: "),
        *("--target-model-dir ", "--output "),
    )
    place = r"(?<![\w./-])" if "/" in old else "|".join(map(re.escape, places))
    stem = old.removesuffix(".gguf")

    def replaced(found: re.Match[str]) -> str:
        is_folder = stem != old and not found[0].endswith(".gguf")
        return found[1] + (new.removesuffix(".gguf") if is_folder else new)

    return re.sub(rf"((?:{place})'?){re.escape(stem)}(?:\.gguf)?(?![\w/-]|\.\w)", replaced, text)


def card_of(folder: Path, run: tuple[RunRecord, Report | None] | None = None) -> str:
    """Return the model card of the head in a folder; `run` is from `read_run`, by default on the parent folder."""
    config, report = run or read_run(folder.resolve().parent)
    return model_card(load_any(folder), config, report)


def read_run(run: Path) -> tuple[RunRecord, Report | None]:
    """Read a run's config.yaml and eval/report.json, see `known_report`; {} and None if it is not a run."""
    config_file, report_file = run / "config.yaml", run / "eval" / "report.json"
    try:
        config: Any = yaml.safe_load(read_text(config_file)) if config_file.is_file() else {}
    except yaml.YAMLError as error:
        raise UserError(f"{config_file}: not YAML: {error}") from None
    settings = config.get("settings") if isinstance(config, dict) else None
    if "stage1" not in (settings or {}):
        return {}, None
    return config, known_report(report_file)


def model_card(head: Speculator, run: RunRecord, report: Report | None) -> str:
    """Return the model card of a head, as Markdown with a YAML header.

    `run` is the content of the run's config.yaml, empty if unknown; `report` that of eval/report.json, None if nothing
    was measured.
    """
    config: Any = copy.copy(head.config)
    settings, rows = run.get("settings") or {}, report.suites if report else []
    recorded, adapter = config.base_model_name_or_path, public_name(config.base_model_adapter)
    base = config.base_model_name_or_path = public_name(recorded)
    target = f"{base} --adapter {adapter}" if adapter else base
    data = ModelCardData(
        base_model=recorded if recorded and _is_hub_id(recorded) else None,
        datasets=_hub_datasets(config.training_data or []) or None,
        library_name="speculator",
        tags=["speculative-decoding", config.model_type.replace("_", "-")],
    )
    for name, value in _license(recorded).items():
        data[name] = value
    versions: dict[str, str | None] = {**(run.get("versions") or {}), **(report.versions if report else {})}
    if "git_commit" in run:
        versions["commit"] = run["git_commit"]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        base=base,
        adapter=adapter,
        target=target,
        facts=_facts(head, target),
        stages={
            name: {"epochs": None, **stage}
            for name, stage in settings.items()
            if name.startswith("stage") and stage["max_steps"]
        },
        losses=_listed({name: f"{weight:g}" for name, weight in (settings.get("loss") or {}).items() if weight}),
        processes=run.get("processes", 1),
        report=report,
        settings=_listed(report.settings if report else {}),
        headlines=headlines(report) if report else [],
        results=_results(rows),
        greedy=[row for row in rows if row.drafter == "head" and row.identical_to_greedy],
        layouts=[(layout.name, _servers(layout, head)) for layout in layouts() if layout.stores(head)],
        versions=_listed(versions),
    )
    return str(card)


def _servers(layout: Layout, head: Speculator) -> list[str]:
    """Return a line about each server of a layout, for a head in the folder D, without paths of this machine."""
    found = layout.servers(head.config, "D")  # the base model is looked for by its whole name
    config: Any = head.config
    names = [name for name in (config.base_model_name_or_path, config.base_model_adapter) if name]
    names += [name.removesuffix(".gguf") for name in names]  # the folder that `dequantise` writes beside the file
    lines = [f"{server.verdict} {server.name}: {server.how}" for server in found]
    for name in sorted(names, key=len, reverse=True):
        lines = [line.replace(name, str(public_name(name))) for line in lines]
    return lines


def _shape(head: Speculator) -> dict[str, str]:
    """Return the rows of `_facts` that may differ in another layout or dtype."""
    count = sum(weight.numel() for weight in head.parameters())
    return {"parameters": f"{count:,}, {dtype_name(head.dtype)}", "form": head.config.describe()}


def _facts(head: Speculator, target: str | None) -> str:
    """Return a table of a head's architecture, size, target and training data; `target` None: not recorded."""
    config: Any = head.config
    unknown, shape = "not recorded", _shape(head)
    facts = {
        "architecture": f"{type(head).__name__.removesuffix('Speculator')}, drafts up to {config.n_predict} tokens",
        "parameters": shape["parameters"],
        "sizes": f"hidden {config.emb_dim}, inner {config.inner_dim}, vocabulary {config.vocab_size}",
        "draft vocabulary": f"{config.output_size} of {config.vocab_size} tokens",
        "form": shape["form"],
        "target": target or unknown,
        "longest context in training": f"{config.trained_length} tokens" if config.trained_length else unknown,
        "training data": ", ".join(filter(None, map(public_name, config.training_data or []))) or unknown,
    }
    return markdown_table(("", ""), facts.items())


def _results(rows: list[ReportRow]) -> str:
    """Return a Markdown table of each row's acceptance and speed; "" without rows."""
    if not rows:
        return ""
    baselines = [name for name in BASELINES if any(name in row.speedup for row in rows)]
    header = ["prompts", "temperature", "drafter", "acceptance length", "acceptance by position", "tokens/s"]
    cells = []
    for row in rows:
        plain = row.drafter == "none"
        speed = row.tokens_per_second["plain" if plain else "speculative"]
        cells.append(
            [
                f"{row.prompts} of {row.name}",
                f"{row.temperature:g}",
                _drafter(row),
                f"{row.acceptance_length:.2f}",
                "" if plain else " ".join(f"{rate:.2f}" for rate in row.acceptance_by_position),
                f"{speed:.1f}" if speed else "",
                *(_with_interval(row.speedup.get(name)) for name in baselines),
                _with_interval(row.end_to_end_speedup.get("plain")),
            ]
        )
    header += [*(f"speedup over {BASELINES[name]}" for name in baselines), "speedup of whole answers"]
    return markdown_table(header, cells)


def _drafter(row: ReportRow) -> str:
    """Return the drafter of a row, with the size of its tree and its accept rule, as the table names it."""
    if row.drafter == "none":
        return "plain decoding"
    name = DRAFTERS[row.drafter]
    if row.drafter == "adaptive":  # picks shape and rule before each step
        return name
    if row.nodes > row.num_speculative_tokens:
        name += f", tree of {row.nodes}"
    elif row.drafter == "head":
        name += f", chain of {row.num_speculative_tokens}"
    return name if row.rule == "greedy" else f"{name}, rule {row.rule}"


def _with_interval(ratio: Interval | None) -> str:
    """Format a speedup with its interval, such as "1.32 (1.28-1.36)"; "" for None."""
    if not ratio:
        return ""
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}-{ratio.high:.2f})"  # None: a single prompt
    return f"{ratio.value:.2f}{interval}"


def _listed(values: Mapping[str, object]) -> str:
    """Join names and values: "batch size 1, ..."; None is left out."""
    given = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _license(base: str | None) -> dict[str, str]:
    """Return the base model's "license", "license_name", "license_link"; {} if its card is not on this machine."""
    file = base and (
        Path(base) / NAME if Path(base).is_dir() else _is_hub_id(base) and try_to_load_from_cache(base, NAME)
    )
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    known = {}
    with suppress(ValueError, yaml.YAMLError):
        known = metadata_load(file) or {}
    return {name: known[name] for name in _LICENSE if known.get(name)}


def _is_hub_id(name: str) -> bool:
    """Return whether a name is org/name, and neither the name of a data file nor a path on this machine."""
    return is_hub_id(name) and not _LOCAL_FILE.search(name)


def _hub_datasets(sources: list[str]) -> list[str]:
    matches = [_HUB_DATASET.fullmatch(source) for source in sources if not _LOCAL_FILE.search(source)]
    return list(dict.fromkeys(match[1] for match in matches if match and not Path(match[1]).exists()))


def public_name(name: str | None) -> str | None:
    """Return the last part of an absolute path, since cards are published; other names are returned unchanged."""
    return Path(name).name if name and Path(name).is_absolute() else name
