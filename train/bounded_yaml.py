"""YAML of a size that a config has, and in which each key stands once."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import get_loader

_MOST_VALUES, _DEEPEST = 10_000, 20  # in YAML, its aliases written out; how far it is nested
_read = get_loader("yaml")


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


def load_yaml(text: str) -> Any:
    """What YAML says, within bounds.

    Raises:
        YAMLError: no YAML, or beyond them.
    """
    _check_yaml(text)
    try:
        return _read(text)
    except (ValueError, TypeError) as error:  # a date that can't be, a mapping as a key
        raise yaml.YAMLError(str(error)) from None
