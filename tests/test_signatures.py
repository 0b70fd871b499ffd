"""Values have types with names, and neither functions nor values take many things by position."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [file for name in ("speculator", "data", "eval", "train") for file in sorted((ROOT / name).rglob("*.py"))]
MOST_PARAMETERS, MOST_BY_POSITION, MOST_UNTYPED_DICTS = 9, 3, 43
OF_TRANSFORMERS = {
    "speculator/target/attention/attention.py": {"attention", "varlen_attention"},
    "speculator/heads/mtp/block.py": {"attention"},
}
"""Functions that transformers calls with parameters of its own choice."""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    return sum(each.arg not in ("self", "cls") for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def test_a_function_has_at_most_nine_parameters():
    long = {
        file.relative_to(ROOT).as_posix(): functions
        for file in MODULES
        if (
            functions := {
                node.name
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MOST_PARAMETERS
            }
        )
    }
    assert long == OF_TRANSFORMERS


def is_value(node: ast.AST) -> bool:
    """Return whether a node is a dataclass or a named tuple."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list) or "NamedTuple" in map(
        ast.unparse, node.bases
    )


def test_no_value_takes_more_than_three_fields_by_position():
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in MODULES}
    values = {node.name for tree in trees.values() for node in ast.walk(tree) if is_value(node)}
    long = [
        f"{file.relative_to(ROOT).as_posix()}:{node.lineno} {ast.unparse(node.func)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in values
        if len(node.args) > MOST_BY_POSITION
    ]
    assert not long, "\n".join(long)


def test_no_more_dicts_of_anything_than_today():
    found = {
        file.name: count for file in MODULES if (count := file.read_text(encoding="utf-8").count("dict[str, Any]"))
    }
    assert sum(found.values()) <= MOST_UNTYPED_DICTS, f"give the keys a type, as data/documents.py does: {found}"
