"""Values have types with names, and functions have few parameters."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [file for name in ("speculator", "data", "eval", "train") for file in sorted((ROOT / name).rglob("*.py"))]
MOST_PARAMETERS, MOST_UNTYPED_DICTS = 9, 168
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


def test_no_more_dicts_of_anything_than_today():
    found = {
        file.name: count for file in MODULES if (count := file.read_text(encoding="utf-8").count("dict[str, Any]"))
    }
    assert sum(found.values()) <= MOST_UNTYPED_DICTS, f"give the keys a type, as data/documents.py does: {found}"
