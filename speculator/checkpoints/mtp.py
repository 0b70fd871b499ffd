"""The MTP layers in a model's own folder: read as a head, and written back under their own names.

Servers draft with the layers that lie in the target's folder, so this layout's folder is a copy of the target's: the
shards that hold MTP layers are rewritten, all other files are linked or copied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform

from speculator.checkpoints import files, fp8
from speculator.checkpoints.commands import BASE, line
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.hub import FILES, MODEL_FILES, downloaded, is_hub_id
from speculator.checkpoints.layout import Layout, Server, load, whole_vocabulary
from speculator.checkpoints.table import Lack
from speculator.checkpoints.targets import SGLANG, VLLM
from speculator.device import dtype_name
from speculator.errors import UserError, first_line, refuse
from speculator.files import JsonObject, read_json
from speculator.heads.mtp.config import COUNTS, MTPSpeculatorConfig, promised
from speculator.heads.mtp.model import MTPSpeculator
from speculator.target.fingerprint import fingerprint, same_target

(_WEIGHTS, _INDEX), _ADDED = files.SAFETENSORS, "model-mtp.safetensors"
_LARGE = 10_000_000
"""Least bytes of a file that is hard-linked: cards, configs and templates have fewer, and people edit them."""
_TABLES = "embed_tokens.weight", "word_embeddings.weight"
_DEFAULT: JsonObject = {"zero_first": False, "recycle_normed": True}
_OPTIONS = "speculator_options"
"""Metadata of shards with MTP layers: those options of the head written there that are not `_DEFAULT`."""
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of all experts as transformers has them, and those of one expert that lie in them one below the other."""


@dataclass(frozen=True)
class Names:
    """Where a family keeps its MTP layers.

    Attributes:
        prefix: start of the tensor names of an MTP layer, such as "{}layers.{}."; the first {} is what precedes
            "layers.", the second the number of the target's layers plus the MTP layer's number.
        block: what follows `prefix` in the names of the MTP layer's decoder layer.
        parts: what follows `prefix` in the names of the MTP layer's other parts, by this library's names.
        single: the family has one MTP layer at most.
    """

    prefix: str
    block: str
    parts: dict[str, str]
    single: bool = False


_NUMBERED = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
_LIKE_DEEPSEEK = Names("{}layers.{}.", "", {**_NUMBERED, "norm": "shared_head.norm"})
_LIKE_HUNYUAN = Names("{}layers.{}.", "", {**_NUMBERED, "norm": "final_layernorm"})
_LIKE_QWEN = Names(
    "mtp.",
    "layers.0.",
    {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
    single=True,
)
FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_ocr_text"), _LIKE_DEEPSEEK),
    **dict.fromkeys(("hy_v3", "bailing_hybrid"), _LIKE_HUNYUAN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mellum", "exaone_moe"), _LIKE_QWEN),
}
"""Families by the model type of their text config."""


class Stored:
    """The tensors in a model's folder, read by name, and the names there of an MTP head's tensors.

    Attributes:
        text: the model's text config.
        shards: {tensor name: file name}.
        root: what precedes "layers." in the tensor names.
        layers: number of MTP layers in the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
        except Exception as error:  # whatever the family's code needs
            raise UserError(
                f"{folder}: not the folder of a model that transformers can read: {first_line(error)}"
            ) from None
        self.text: Any = self.config.get_text_config()
        kind = self.text.model_type
        if kind not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"{folder}: no MTP layers of a {kind} can be read or written; those of {known} can")
        self.names = FAMILIES[kind]
        self.shards = files.read_shards(folder)
        # "model.layers.0." in a text model, "model.language_model.layers.0." in a multimodal one.
        roots = (re.match(r"((?:\w*model\.)+)layers\.0\.", name) for name in sorted(self.shards))
        self.root = next((root[1] for root in roots if root), "model.")
        self.layers = 0
        # Most families number MTP layers after the target's: of a model with 48 layers, the first is "layers.48".
        while f"{self.prefix(self.layers)}{self.names.parts['eh_proj']}.weight" in self.shards:
            self.layers += 1
            if self.names.single:
                break

    @property
    def promised(self) -> int:
        """Number of MTP layers that the model's config states; the files may lack some."""
        return promised(self.text)

    def prefix(self, index: int) -> str:
        """Return the start of the tensor names of MTP layer `index`, which counts from 0."""
        return self.names.prefix.format(self.root, self.text.num_hidden_layers + index)

    def name(self, ours: str) -> str:
        """Return the stored name of a tensor, given its name in the head."""
        # "layers.0.block.self_attn.q_proj.weight" has the part "block" and the rest "self_attn.q_proj.weight".
        _, index, part, rest = ours.split(".", 3)
        if part != "block":
            return f"{self.prefix(int(index))}{self.names.parts[part]}.{rest}"
        rest = f".{rest}"  # names of parts are looked for between dots
        for renaming in self._renamings:
            rest = renaming.rename_source_key(rest)[0]
        return self.prefix(int(index)) + self.names.block + rest[1:]

    @cached_property
    def _renamings(self) -> list[WeightTransform]:
        """Renamings from transformers' names of a decoder layer's tensors to the published checkpoint's."""
        made = get_checkpoint_conversion_mapping(self.text.model_type) or []
        return [each.reverse_transform() for each in reversed(made) if type(each) is WeightRenaming]

    def parts(self, ours: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the head's tensor named `ours` by its stored name, or views of each expert's part by theirs.

        A tensor of all experts is split unless the folder stores it as one.
        """
        name = self.name(ours)
        stem, _, last = name.rpartition(".")
        if last not in _EXPERTS or not stem.endswith("experts") or name in self.shards:
            return {name: tensor}
        own = _EXPERTS[last]
        return {
            f"{stem}.{expert}.{each}.weight": part
            for expert, matrix in enumerate(tensor)
            for each, part in zip(own, matrix.chunk(len(own)), strict=True)
        }

    def read(self, name: str) -> Tensor:
        """Read a tensor by its stored name; float8 is dequantised to bfloat16."""
        if name not in self.shards:
            raise UserError(f"{self.folder}: its MTP layer lacks {name}{self._quantised}")
        tensor, scale = self._open(name), self.scale_name(name)
        if scale is None:
            known = tensor.dtype in fp8.PLAIN
            refuse((not known, f"{self.folder}: {name} is {dtype_name(tensor.dtype)} without a scale{self._quantised}"))
            return tensor
        return fp8.dequantise(tensor, self._open(scale), self.scaled(name))

    def scale_name(self, name: str) -> str | None:
        """Return the stored name of a tensor's quantisation scale; None if it has no scale."""
        return next((name + suffix for suffix in fp8.SUFFIXES if name + suffix in self.shards), None)

    def scaled(self, name: str) -> tuple[int, ...]:
        """Return the size, along each dimension, of the part of a float8 tensor that shares one scale."""
        tensor, scale = self._open(name), self._open(str(self.scale_name(name)))
        for each, known in ((tensor, fp8.DTYPES), (scale, (*fp8.PLAIN, torch.float8_e8m0fnu))):
            kind = dtype_name(each.dtype)
            refuse((each.dtype not in known, f"{self.folder}: {name} or its scale is {kind}{self._quantised}"))
        return fp8.sizes_of(f"{self.folder}: {name}", tensor.shape, scale, fp8.block_of(self.quantization))

    @property
    def quantization(self) -> ForeignConfig:
        """The `quantization_config` of the model; empty without one."""
        return (
            getattr(self.config, "quantization_config", None) or getattr(self.text, "quantization_config", None) or {}
        )

    def _open(self, name: str) -> Tensor:
        with files.opened(self.folder / self.shards[name]) as file:
            return file.get_tensor(name)

    @property
    def _quantised(self) -> str:
        """End of an error message: advice for a quantised model, else ""."""
        return "; use the unquantised checkpoint" if self.quantization else ""

    @cached_property
    def fingerprint(self) -> str:
        """The target's fingerprint, computed from its files (see `speculator.target.fingerprint`)."""
        matrices = [SimpleNamespace(weight=self.read(name)) for name in (self._table, self._output)]
        model = SimpleNamespace(
            config=self.config,
            get_input_embeddings=lambda: matrices[0],
            get_output_embeddings=lambda: matrices[1],
            named_parameters=lambda: [],
        )
        return fingerprint(model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored embedding, read from the file."""
        return self._open(self._table).dtype

    @property
    def _table(self) -> str:  # MTP layers have copies of it, under `layers`
        return next(name for name in sorted(self.shards, key=len) if name.endswith(_TABLES))

    @property
    def _output(self) -> str:
        return next((name for name in self.shards if name.endswith("lm_head.weight")), self._table)

    @property
    def options(self) -> JsonObject:
        """Options of the head that was written here; empty for layers as they are published."""
        with files.opened(self.folder / self.shards[f"{self.prefix(0)}{self.names.parts['eh_proj']}.weight"]) as file:
            return json.loads((file.metadata() or {}).get(_OPTIONS, "{}"))

    @property
    def read_files(self) -> set[str]:
        """Names of the files with MTP layers, the embedding and the output matrix: those that `read` opens."""
        starts = (self._table, self._output, *map(self.prefix, range(self.layers)))
        return {shard for name, shard in self.shards.items() if name.startswith(starts)}


# --- reading


def head_folder(name: str, revision: str | None) -> Path:
    """Download the files of a model that its MTP layers are read from; return their folder in the hub's cache."""
    folder = downloaded(name, revision, [files.CONFIG, _INDEX])
    if not (folder / _INDEX).is_file():
        return downloaded(name, revision, FILES)
    about = [pattern for pattern in FILES if pattern != "*.safetensors"]
    return downloaded(name, revision, [*about, *sorted(Stored(folder).read_files)])


def is_model(config: ForeignConfig) -> bool:
    """Return whether a config.json is that of a model of a family that may have MTP layers, not of a head."""
    text = config.get("text_config") or config
    return isinstance(text, dict) and text.get("model_type") in FAMILIES


def shipped(folder: Path) -> Stored:
    """Return a model's folder opened as `Stored`; raise a UserError unless it holds all MTP layers that it promises."""
    stored = Stored(folder)
    refuse(
        (
            stored.layers != (stored.promised or stored.layers),
            f"{folder}: its {files.CONFIG} promises {stored.promised} MTP layers, and its files hold {stored.layers}; "
            "export --format mtp restores them from the base model",
        ),
        (not stored.layers, f"{folder}: no MTP layer in its files"),
        (stored.layers > 1, f"{folder}: its files hold {stored.layers} MTP layers; a chain of layers is not supported"),
        (
            f"{stored.prefix(0)}shared_head.output.weight" in stored.shards,
            f"{folder}: its MTP layers have output matrices of their own, which is not supported",
        ),
    )
    return stored


def read_config(folder: Path) -> MTPSpeculatorConfig:
    """Return the config of a model's MTP layers as a head: `Layout.read_config`."""
    stored = shipped(folder)
    about = {"base_model_name_or_path": str(folder), **stored.options}
    return MTPSpeculatorConfig.for_target(stored.text, **about)


def read(folder: Path, head: MTPSpeculator) -> dict[str, Tensor]:
    """Read the MTP layers of a model by the head's names, to the CPU, in their stored dtype: `Layout.read`."""
    stored = Stored(folder)  # `read_config` has checked it
    weights, dtype = {}, None
    buffers = dict(head.named_buffers())
    for ours, shaped in head.state_dict().items():
        views = stored.parts(ours, shaped)
        parts = {name: stored.read(name) for name in views}
        for name, part in parts.items():
            found, expected = list(part.shape), list(views[name].shape)
            refuse((found != expected, f"{folder}: {name} is {found}, its {files.CONFIG} says {expected}"))
        tensor = torch.cat(list(parts.values())).view(shaped.shape)  # a copy: mapped memory is not aligned
        dtype = dtype or tensor.dtype
        weights[ours] = tensor.to(buffers[ours].dtype if ours in buffers else dtype)
    return weights


# --- writing


def write(head: MTPSpeculator, made: JsonObject, folder: Path) -> None:
    """`Layout.write`: copy the target's folder with the head as its MTP layers, and check that; `made` is unused."""
    base = head.config.base_model_name_or_path
    if base is None:
        raise UserError(str(needs_base(head.config)))
    stored = Stored(downloaded(base, files=[*MODEL_FILES, "*.py"]) if is_hub_id(base) else Path(base))
    missing = sorted(shard for shard in set(stored.shards.values()) if not (stored.folder / shard).is_file())
    refuse((missing, f"{stored.folder}: the shard {', '.join(missing)} is missing; --base_model names the whole model"))
    inside = folder.resolve().is_relative_to(stored.folder.resolve())
    refuse((inside, f"mtp: the output is inside {stored.folder}, which is copied: name a folder outside"))
    _check(head, stored)
    new = _as_stored(head, stored)
    options = {name: value for name, value in _options(head.config).items() if value != _DEFAULT[name]}
    changed: dict[str, dict[str, Tensor]] = defaultdict(dict)
    one_file = (stored.folder / _WEIGHTS).is_file()
    added = _WEIGHTS if one_file and not stored.layers else _ADDED
    for name, tensor in new.items():
        changed[stored.shards.get(name, added)][name] = tensor
    for source in sorted(stored.folder.rglob("*")):
        copy = source.relative_to(stored.folder)
        if source.is_dir():
            (folder / copy).mkdir()
        elif str(copy) not in changed:
            _link(source, folder / copy)
    for shard, tensors in changed.items():
        before, metadata = {}, dict[str, str]()
        if (stored.folder / shard).exists():
            with files.opened(stored.folder / shard) as file:
                before = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
                metadata = file.metadata() or {}
        metadata = {"format": "pt", **metadata, _OPTIONS: json.dumps(options)}
        if not options:
            del metadata[_OPTIONS]
        save_file({**before, **tensors}, folder / shard, metadata=metadata)
        files.make_readable(folder / shard)
    if _ADDED in changed and _ADDED not in stored.shards.values():
        index = read_json(stored.folder / _INDEX)
        index["weight_map"] |= dict.fromkeys(changed[_ADDED], _ADDED)
        if isinstance(index.get("metadata", {}).get("total_size"), int):
            index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in changed[_ADDED].values())
        (folder / _INDEX).unlink()
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # As any published model is read: the new folder, without what was written or how.
    again = load(folder, MTP).state_dict()
    for ours, tensor in head.state_dict().items():
        back, rounded = again[ours], tensor.detach().cpu().to(again[ours].dtype)
        # Half a step of float8 is an eighth of a number at most.
        scaled = any(stored.scale_name(name) for name in stored.parts(ours, tensor))
        error = rounded.abs().max() / 8 if scaled else 0
        if not (back - rounded).abs().max() <= error:
            raise UserError(f"the written layers differ in {ours}; nothing was kept")


def _options(config: MTPSpeculatorConfig) -> JsonObject:
    """Return the options that change drafts and that no target's config.json holds."""
    return {name: getattr(config, name) for name in _DEFAULT}


def _check(head: MTPSpeculator, stored: Stored) -> None:
    """Raise a UserError unless the head's layers fit the target in `stored`, whose copy will hold them."""
    config, folder = head.config, stored.folder
    kind = config.block["model_type"]  # type: ignore[index]
    trained_for = config.base_model_fingerprint
    quantised = bool(stored.quantization)
    refuse(
        (kind != stored.text.model_type, f"the head's layers are of {kind}, {folder} is a {stored.text.model_type}"),
        (config.draft_vocab_size is not None, "mtp: servers draft from the whole vocabulary, and this head does not"),
        (stored.layers > 1, f"the head is one MTP layer, {folder} has {stored.layers}"),
        (
            bool(trained_for) and not same_target(str(trained_for), stored.fingerprint),
            f"the head was trained for other weights ({config.base_model_name_or_path}) than those of {folder}",
        ),
        (
            not stored.layers and stored.text.model_type != "qwen3_next" and stored.promised != 1,
            f"{folder}: its {files.CONFIG} promises {stored.promised} MTP layers, and the head has one: set "
            f"{' or '.join(COUNTS[:2])} as the base model has it",
        ),
        (not stored.layers and quantised, f"{folder}: MTP layers can't be added to a quantised checkpoint"),
    )


def _as_stored(head: MTPSpeculator, stored: Stored) -> dict[str, Tensor]:
    """Return the head's tensors under the checkpoint's names, with its dtypes, quantisation and layout of experts."""
    made: dict[str, Tensor] = {}
    buffers = dict(head.named_buffers())
    added = None if stored.layers else stored.dtype
    for ours, tensor in head.state_dict().items():
        for name, part in stored.parts(ours, tensor).items():
            part = part.detach().cpu()
            if added is not None:
                made[name] = part.to(part.dtype if ours in buffers else added).contiguous()
                continue
            before = stored._open(name) if name in stored.shards else None
            if before is None or before.shape != part.shape:
                shape = "no such tensor" if before is None else list(before.shape)
                raise UserError(f"{name} of the head is {list(part.shape)}, in {stored.folder}: {shape}")
            if (scale_name := stored.scale_name(name)) is not None:
                scale, sizes = stored._open(scale_name), stored.scaled(name)
                # What was not trained keeps its numbers: another scale would round them again.
                made[name], made[scale_name] = before, scale
                if not torch.equal(part.to(torch.bfloat16), stored.read(name)):
                    powers = stored.quantization.get("scale_fmt") == "ue8m0"
                    made[name], made[scale_name] = fp8.quantise(part, scale, sizes, before.dtype, powers)
            else:
                made[name] = part.to(stored.read(name).dtype).contiguous()
    # safetensors refuses views of one storage: the experts' are.
    return {name: tensor.clone() for name, tensor in made.items()}


def _link(source: Path, copy: Path) -> None:
    # A target's shards may have hundreds of gigabytes. In a hub's cache they are links: the copy names the file itself.
    if source.stat().st_size >= _LARGE:
        with suppress(OSError):
            os.link(source.resolve(), copy)
            return
    shutil.copyfile(source, copy)


# --- the layout


_VLLM: dict[str, JsonObject] = {"glm4_moe": {"zero_first": True, "recycle_normed": False}, "qwen3_5_text": _DEFAULT}
"""The options as vLLM has them, for the families whose drafts were compared with ours."""
_TRANSFORMERS = ("glm4_moe", "deepseek_v3", "mellum")
"""Families whose drafts in transformers were compared with ours."""


def needs_base(config: MTPSpeculatorConfig) -> str | None:
    """Return what an export lacks if the config names no base model, else None (`Layout.needs`)."""
    missing = "mtp: the layers are written into a copy of the target's folder: --base_model names it"
    return missing if config.base_model_name_or_path is None else None


def servers(config: MTPSpeculatorConfig, folder: str) -> list[Server]:
    """List the programs that draft with the MTP layers of the target in `folder`, each with its command.

    A command ends with the options that the program drafts with, if the head's are others.
    """
    kind, own = config.block["model_type"], _options(config)  # type: ignore[index]

    def server(name: str, loads: bool | None, how: str, theirs: JsonObject | None) -> Server:
        others = [f"{name} {json.dumps(value)}" for name, value in (theirs or own).items() if value != own[name]]
        return Server(name, loads, how + (f"  # drafts with {', '.join(others)}, unlike this head" if others else ""))

    options = json.dumps({"method": "mtp", "num_speculative_tokens": config.n_predict})
    how = line(folder, "vllm", "serve", BASE, "--speculative-config", options)
    vllm = server(VLLM, True if kind in _VLLM else None, how, _VLLM.get(kind))
    sglang = line(folder, "sglang", "serve", "--model-path", BASE, "--speculative-algorithm", "NEXTN")
    call = f"AutoModelForCausalLM.from_pretrained({json.dumps(folder)}).generate(..., use_mtp=True)"
    return [
        vllm,
        server(SGLANG, None, sglang, _DEFAULT),
        server("transformers 5.23", True if kind in _TRANSFORMERS else None, call, _DEFAULT),
    ]


MTP = Layout(
    name="mtp",
    head=MTPSpeculator,
    architecture="the target's own",
    table=(  # config.json is the target's
        whole_vocabulary("mtp"),
        Lack(
            lambda config: config.block["model_type"] not in FAMILIES,
            lambda config: f"mtp: no server looks for MTP layers in a {config.block['model_type']}; native stores them",
        ),
    ),
    servers=servers,
    needs=needs_base,
    read_config=read_config,
    read=read,
    write=write,
)
