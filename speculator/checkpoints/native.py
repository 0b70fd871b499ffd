"""This library's own layouts, one per kind of head, as `save_pretrained` writes them."""

from __future__ import annotations

import json
import re
from functools import cache
from inspect import formatannotation, get_annotations

from transformers import PreTrainedConfig

from speculator.checkpoints import eagle3
from speculator.checkpoints.commands import BASE, line
from speculator.checkpoints.layout import KEPT, SHAPE, Layout, Server
from speculator.files import JsonObject
from speculator.heads.base import Speculator, SpeculatorConfig

_JSON: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """Return one entry, for the bundled decoder, with its command for a head in `folder`."""
    adapter = ("--adapter", config.base_model_adapter) if config.base_model_adapter else ()
    words = ("speculator", "generate", "--target", BASE, *adapter, "--speculator", folder, "--prompt", "...")
    return [Server("speculator", True, line(config.base_model_name_or_path, *words))]


@cache
def native_layout(head: type[Speculator]) -> Layout:
    """Return the `native` layout of a head class: the config and tensors that `save_pretrained` writes."""
    own = declared_fields(head.config_class)
    shape = {name: kind for name, kind in (SHAPE | eagle3.SHAPE).items() if name in own}

    def fields(config: SpeculatorConfig, dtype: str) -> JsonObject:
        """Return the content of config.json as transformers writes it; `dtype` is that of the weights."""
        written = json.loads(config.to_json_string(use_diff=True))
        return {**written, "architectures": [head.__name__], "dtype": dtype}

    return Layout(
        name="native",
        head=head,
        architecture=head.__name__,
        fields=fields,
        servers=servers,
        shape=shape,
        kept=KEPT | {name: kind for name, kind in own.items() if name not in shape},
    )


def declared_fields(config: type[SpeculatorConfig]) -> dict[str, type]:
    """Return the fields of JSON types that a head's config class and its bases declare, with their types."""
    found: dict[str, type] = {}
    for kind in config.__mro__[: config.__mro__.index(PreTrainedConfig)]:
        for name, hint in get_annotations(kind).items():
            # "int | None" counts as int: a field that may be absent is in `kept`, which does not require it.
            word = re.match(r"\w+", hint if isinstance(hint, str) else formatannotation(hint))
            if word and word[0] in _JSON:
                found.setdefault(name, _JSON[word[0]])
    return found
