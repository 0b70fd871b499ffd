"""The one typed config of a run: dataclasses <- YAML <- command line. Imports no torch, so mistakes show at once.

Longer than other files: every field of a run has its line of help here, once.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings

from speculator.errors import UserError, printable
from speculator.files import read_text

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@dataclass
class TargetConfig:
    """The model to draft for."""

    name_or_path: str = "examples/stdlib_target"
    """Hub id or local folder of a causal LM."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto, float32, bfloat16 or float16; auto is the checkpoint's own, float32 on a CPU."""
    adapter: str | None = None
    """Hub id or local folder of a PEFT adapter of the target; needs the package peft."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target."""
    parallel: Literal["none", "tp", "fsdp", "device_map"] = "none"
    """Of a target that is too large for one GPU: tp (tensor parallel) or fsdp shard it over processes, device_map lays
    it over the GPUs of one process."""
    parallel_size: int = 0
    """Processes that hold a target together; 0: all. 8 GPUs and 4: two copies of the target, each on 4."""


@dataclass
class SpeculatorConfig:
    """The head's shape."""

    architecture: Literal["mlp", "lstm", "eagle3"] = "mlp"
    """mlp (arXiv 2404.19124), lstm (Arctic's), or eagle3: a layer of attention over three of the target's layers."""
    n_predict: int = 4
    """How many tokens it drafts: one head each; of eagle3 the steps that training unrolls."""
    inner_dim: int = 0
    """Width of the heads; 0 takes the target's hidden size. Of eagle3 that of its MLP; 0 takes the target's."""
    tie_weights: bool = True
    """Share embedding, norm and output matrix among the heads. Not of eagle3, which is one layer."""
    scale_input: bool = True
    """Normalise the hidden state before the first head. Not of eagle3."""
    taps: list[int] | None = None
    """eagle3: the layers that it reads, each by how many of the target's come before; null takes 2, L // 2, L - 3."""
    fc_norm: bool = True
    """eagle3: an RMS norm for each tap."""
    norm_output: bool = True
    """eagle3: each step goes on from the normed state of the one before."""
    norm_before_fc: bool = False
    """eagle3: one RMS norm over all taps; instead of fc_norm."""
    norm_before_residual: bool = False
    """eagle3: the residual is normed as well; SGLang does not run such heads."""
    draft_vocab_size: int = 0
    """Draft from this many tokens only, the most frequent ones of the training text; 0 drafts from all."""
    initialise: Literal["random", "target"] = "random"
    """Start from noise, or from the target's embedding and output matrices (needs inner_dim 0); eagle3 always starts
    from these."""
    warm_start: str | None = None
    """Start from this trained head instead, of any checkpoint layout; its shape must be the one configured here."""


@dataclass
class SelfConfig:
    """What the source self writes before there is a head: chats of which the target writes both sides."""

    max_rows: int = 4000
    """Chats that it begins; those whose prompt can't be used are dropped."""
    turns: int = 1
    """Of the user in a chat, at most."""
    max_prompt_tokens: int = 256
    """Tokens of a user's turn at most."""
    prompt_temperature: float = 1.0
    """Of the user's turns."""
    prompt_top_p: float = 0.99
    """Of the user's turns."""
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    """Of the answers, which take them in turn."""
    max_new_tokens: int = 256
    """Tokens of an answer at most."""
    batch_size: int = 16
    """Rows decoded together."""


@dataclass
class DataConfig:
    """What to train on."""

    sources: list[str] = field(default_factory=lambda: ["python-sources"])
    """Each a hub dataset id, a local .jsonl, .json, .parquet or .txt (.gz too), a folder, python-sources, or self: the
    target writes it; @weight."""
    seq_length: int = 256
    """Tokens per row."""
    max_tokens: int | None = None
    """Use at most this many tokens."""
    max_package_bytes: int = 2_000_000
    """python-sources: at most this much of each top-level package."""
    max_bad_rows: float = 0.05
    """Rows that can't be used are left out, counted and shown; a larger share of them is an error; 0 allows none."""
    num_proc: int | None = None
    """Processes that tokenise, whose number changes no row; default: one for each core, up to 8."""
    self: SelfConfig = field(default_factory=SelfConfig)
    """How the source self is written."""


@dataclass
class LossConfig:
    """Weights of the losses, which are summed over heads."""

    cross_entropy: float = 0.0
    """Of the token that the text goes on with: the published recipe."""
    kl: float = 1.0
    """Of the divergence from the target's own distribution of that token."""
    total_variation: float = 0.0
    """Of the chance that a sampled draft is rejected."""
    lk: float = 0.0
    """Of the LK hybrid: divergence while little is accepted, then the chance of rejection."""
    kl_temperature: float = 1.0
    """Softens both distributions in the divergence."""
    lk_eta: float = 3.0
    """How soon the hybrid turns from divergence to acceptance."""
    head_decay: float = 1.0
    """Head i counts head_decay^i times."""


@dataclass
class StageConfig:
    """One stage of training, in transformers' names."""

    max_steps: int = 1000
    """Optimiser steps."""
    learning_rate: float = 5e-3
    """At its peak."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """How the learning rate falls."""
    warmup_steps: int = 50
    """Steps until the peak."""
    per_device_train_batch_size: int = 8
    """Rows per process and forward pass."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimiser step."""
    weight_decay: float = 0.0
    """On matrices; never on norms or biases."""
    adam_beta2: float = 0.95
    """AdamW's second-moment decay."""
    max_grad_norm: float = 1.0
    """Clip gradients to this norm."""
    bf16: bool = False
    """Autocast to bfloat16; the master weights stay float32."""
    logging_steps: int = 10
    """Steps between log lines."""
    eval_steps: int = 200
    """Steps between evaluations."""
    save_steps: int = 200
    """Steps between checkpoints: a multiple of eval_steps."""
    save_total_limit: int = 3
    """Checkpoints to keep, the best among them; at least 2."""


@dataclass
class GenerateConfig:
    """The target's own text: it continues prompts from the data, with the head of stage 1 drafting."""

    max_rows: int = 2000
    """How many prompts it continues."""
    prompt_tokens: int = 64
    """Tokens of each prompt cut from text; chat prompts are taken whole."""
    max_new_tokens: int = 192
    """New tokens per prompt."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy. The prompts take them in turn: name those that the head will draft at."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this much."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the likeliest."""
    batch_size: int = 8
    """Rows decoded together."""
    draft_length: int = 0
    """Tokens drafted per step; 0 takes what is the fastest here."""


@dataclass
class Stage2Config(StageConfig):
    """Training on the target's own text, from the best head of stage 1."""

    max_steps: int = 400
    """Optimiser steps; 0 leaves this stage out."""
    learning_rate: float = 2e-3
    """At its peak."""
    refused_weight: float | None = None
    """How many times a token counts where the target refused a draft while it wrote the text; default: once."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """What it trains on."""


@dataclass
class EvalConfig:
    """What is measured, while training and after it."""

    validation_rows: int = 64
    """Rows for the loss and accuracies at each evaluation."""
    validation_prompts: int = 16
    """Prompts decoded for the real tokens_per_step at each evaluation."""
    prompt_tokens: int = 64
    """Tokens of each prompt cut from held-out text."""
    tune_prompts: int = 8
    """Of the validation prompts, those on which is tuned what the best head drafts, a chain or a tree; 0: no tuning."""
    max_prompts: int = 32
    """Prompts of the final report."""
    max_new_tokens: int = 128
    """New tokens per prompt."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures of the final report."""


@dataclass
class RunConfig:
    """Everything that decides a run's result."""

    target: TargetConfig = field(default_factory=TargetConfig)
    speculator: SpeculatorConfig = field(default_factory=SpeculatorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    stage1: StageConfig = field(default_factory=StageConfig)
    stage2: Stage2Config = field(default_factory=Stage2Config)
    eval: EvalConfig = field(default_factory=EvalConfig)
    shard_optimizer: bool = False
    """Split Adam's moments among the processes (ZeRO-1); the head stays whole in each."""
    output_dir: str = "runs/speculator"
    """Where everything goes."""
    overwrite_output_dir: bool = False
    """Delete what is there and start again."""
    dry_run: bool = False
    """Run both stages and the evaluation on tiny stand-ins, a step each, then say how large the real run is."""
    plan: str | None = None
    """Print what the run needs in memory, time and disk, and do nothing else; here, or on GPUs named as in 8xH100."""
    seed: int = 0
    """Of the weights, the order of the data and the sampled drafts."""
    report_to: Literal["wandb", "none"] = "wandb"
    """wandb (offline unless a key is set) or none."""


_LONGEST_MESSAGE = 500
_LARGEST_FILE = 1 << 18  # bytes of YAML
_MOST_VALUES, _DEEPEST = 10_000, 20  # in YAML, its aliases written out; how far it is nested
_MOST = 10**8  # of any count of a config ...
_UNBOUNDED = ("seed", "max_tokens", "max_package_bytes")  # ... but these


def _fail(message: str) -> NoReturn:
    shown = " ".join(message[:_LONGEST_MESSAGE].split()) + " ..." * (len(message) > _LONGEST_MESSAGE)
    print(f"train.py: {printable(shown)}", file=sys.stderr)
    raise SystemExit(2)


def _sections(kind: type = RunConfig, path: str = "") -> Iterator[str]:
    """The dotted names of all sections."""
    for item in fields(kind):
        section = item.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield f"{path}{item.name}"
            yield from _sections(section, f"{path}{item.name}.")


def _optional(kind: type = RunConfig, path: str = "") -> Iterator[str]:
    """The dotted names of the settings that may be null."""
    for item in fields(kind):
        section = item.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield from _optional(section, f"{path}{item.name}.")
        elif "None" in str(item.type):
            yield f"{path}{item.name}"


def _values(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and value of every setting; of a list one for each item."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from _values(value, f"{path}{item.name}.")
        else:
            yield from ((f"{path}{item.name}", each) for each in (value if isinstance(value, list) else [value]))


def _check_yaml(text: str) -> None:
    """Refuse YAML that says a key twice, is nested deep, or grows as its aliases are written out.

    Raises:
        YAMLError: it does, or is none.
    """
    sizes: dict[int, int] = {}

    def measure(node: yaml.Node, depth: int) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        if depth > _DEEPEST:  # an alias of what it is in goes on for ever
            raise yaml.YAMLError(f"nested deeper than {_DEEPEST}")
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in (seen if isinstance(key, yaml.ScalarNode) else ()):
                    raise yaml.YAMLError(f"the key {key.value} is there twice, again in line {key.start_mark.line + 1}")
                seen.add(str(key.value))
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        size = 1 + sum(measure(part, depth + 1) for part in parts)
        if size > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES} values")
        return sizes.setdefault(id(node), size)

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            measure(node, 0)
    except RecursionError:
        raise yaml.YAMLError(f"nested deeper than {_DEEPEST}") from None


_read_yaml = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """What YAML says, within bounds.

    Raises:
        YAMLError: no YAML, or beyond them.
    """
    _check_yaml(text)
    try:
        return _read_yaml(text)
    except (ValueError, TypeError) as error:  # a date that can't be, a mapping as a key
        raise yaml.YAMLError(str(error)) from None


set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,))


def _check_file(name: str) -> None:
    """Refuse a config file that can't be one, before the parser reads it."""
    try:
        read = load_yaml(read_text(name, _LARGEST_FILE))
    except UserError as error:
        _fail(f"--config {error}")
    except yaml.YAMLError as error:
        _fail(f"--config {name}: {error}")
    for section in ("", *_sections()):
        inner = read
        for key in section.split(".") if section else ():
            inner = inner.get(key, {})
        if not isinstance(inner, dict):
            where = f"{section} is {inner!r:.40}, not a section" if section else "no config: it has no keys"
            _fail(f"--config {name}: {where}")
        odd = next((key for key in inner if not isinstance(key, str) or re.search(r"\s", key) or not key), None)
        if odd is not None:
            _fail(f"--config {name}: unknown key {f'{section}.{odd}' if section else odd}")


def _check_numbers(config: RunConfig) -> None:
    optional = set(_optional())
    for name, value in _values(config):
        if value is None and name not in optional:
            _fail(f"{name} has no value")
        if isinstance(value, float) and not math.isfinite(value):
            _fail(f"{name} is {value}, not a number that can be used")
        if isinstance(value, int) and abs(value) > _MOST and name.split(".")[-1] not in _UNBOUNDED:
            _fail(f"{name} is {value:,}; the most is {_MOST:,}")
        if isinstance(value, str) and (not value or "\0" in value):
            _fail(f"{name} is {'empty' if not value else 'no text: it has a NUL in it'}")


@cache
def build_parser() -> ArgumentParser:
    """One flag per field, `--section.field`, with its docstring as help."""
    parser = ArgumentParser(
        prog="train.py",
        description="Train a speculator. Where neither --config nor a target is given: configs/quickstart.yaml.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file with any of the fields below")
    parser.add_class_arguments(RunConfig, None, fail_untyped=True)
    return parser


_SWITCHES = ("--overwrite_output_dir", "--dry_run")
HERE = "here"
"""The plan of a run where it is started: --plan without a value."""

# What jsonargparse says of a key that no field has, on the command line and in a file.
_UNKNOWN = [
    re.compile(r"unrecognized arguments: --(?P<key>[^\s=]+)", re.IGNORECASE),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"(?:Key|option) '(?P<key>[^']+)' is not (?:expected|accepted)", re.IGNORECASE),
]


def _explain(parser: ArgumentParser, error: str) -> str:
    """The parser's complaint, with the nearest valid key for an unknown one."""
    found = next((match.groupdict() for pattern in _UNKNOWN if (match := pattern.search(error))), None)
    if found is None:
        return error
    key = f"{found['group']}.{found['key']}" if found.get("group") else found["key"]
    known = [action.dest for action in parser._actions]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"unknown key {key}" + (f": did you mean {near[0]}?" if near else ": --help lists the valid ones")


def _files_first(argv: list[str]) -> list[str]:
    """Flags go over the files, wherever they stand."""
    files, flags = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            files += [word, *islice(words, 1)]
        else:
            (files if word.startswith("--config=") else flags).append(word)
    return files + flags


def parse(argv: list[str]) -> RunConfig:
    """The config of a command line.

    Raises:
        SystemExit: 2 with one line on stderr for an unknown key or an unusable value; 0 after --help.
    """
    parser = build_parser()
    argv = _files_first(argv)
    if not any(word.partition("=")[0] in ("--config", "--target.name_or_path") for word in argv):
        argv = [f"--config={QUICKSTART}", *argv]
    argv = [f"{word}=true" if word in _SWITCHES else word for word in argv]
    alone = (word == "--plan" and after.startswith("--") for word, after in zip(argv, [*argv[1:], "--"], strict=True))
    argv = [f"--plan={HERE}" if here else word for word, here in zip(argv, alone, strict=True)]
    sections = {f"--{name}" for name in _sections()}
    for word, after in zip(argv, [*argv[1:], None], strict=True):
        flag, given, value = word.partition("=")
        if flag == "--config" and (given or after is not None):
            _check_file(value if given else str(after))
        if flag in sections:
            _fail(f"{flag} is a section: give its settings one by one, as {flag}.NAME VALUE")
    try:
        parsed: Namespace = parser.parse_args(argv)
        built = parser.instantiate(parsed)
    except (ArgumentError, OverflowError) as error:  # the latter of an integer that is no float
        _fail(_explain(parser, str(error)))
    config = RunConfig(**{item.name: built[item.name] for item in fields(RunConfig)})
    _check_numbers(config)
    return config
