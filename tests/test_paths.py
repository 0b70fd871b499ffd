"""How many paths the product has: tests/paths.txt, counted here. `python -m tests.test_paths` prints the table.

A branch that must know the kind of target, the stage or the encoder is a path, and so is each further reader, driver or
declaration of the same thing. A commit that raises a row says why; one that lowers a row writes the new number down.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("speculator", "data", "eval", "train")
TABLE = ROOT / "tests/paths.txt"
Places = set[str]
"""What is counted: "FILE", "FILE:LINE" or "FILE:FUNCTION"."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def texts() -> dict[str, str]:
    files = sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


@cache
def nodes_of(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(texts()[file])))


def nodes(word: str, *kinds: type) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of these kinds, each with its file, of the files that have the word."""
    for file, text in texts().items():
        if word in text:
            yield from ((file, node) for node in nodes_of(file) if isinstance(node, kinds))


def places(word: str, kind: type, counts: Callable[..., bool]) -> Places:
    return {f"{file}:{node.lineno}" for file, node in nodes(word, kind) if counts(node)}


def last_name(node: ast.AST) -> str:
    """Return the last name of a dotted expression: c of a.b.c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def functions(word: str, does: Callable[[ast.AST], bool]) -> Places:
    return {
        f"{file}:{node.name}" for file, node in nodes(word, *FUNCTIONS) if any(does(each) for each in ast.walk(node))
    }


def server_branches() -> Places:
    """branches on server target: lines that ask for the target's class, or read target.server in train/"""

    def asks(node: ast.Call) -> bool:
        classes = last_name(node.func) == "isinstance" and ast.unparse(node.args[1])
        return bool(classes and re.search(r"\b(Server|InProcess)Target\b", classes))

    def reads(node: ast.Attribute) -> bool:
        return node.attr == "server" and last_name(node.value) in ("target", "named")

    setting = {place for place in places(".server", ast.Attribute, reads) if place.startswith("train/")}
    return setting | places("isinstance", ast.Call, asks)


def encoder_branches() -> Places:
    """encoder branches: lines that read .encoder or .is_encoder_decoder itself, not one of its attributes"""
    words = ("encoder", "is_encoder_decoder")
    further = {id(node.value) for _, node in nodes("encoder", ast.Attribute)}
    return places("encoder", ast.Attribute, lambda node: node.attr in words and id(node) not in further)


def encoder_branch_files() -> Places:
    """encoder branches: files with such lines"""
    return {place.partition(":")[0] for place in encoder_branches()}


def encoder_files() -> Places:
    """files with "encoder" in their code or text, JSON's aside"""
    return {file for file, text in texts().items() if re.search(r"(?<!json)encoder", text, re.IGNORECASE)}


def stage2_in_logic() -> Places:
    """stage2: lines with .stage2 or the text "stage2" alone, so messages don't count"""
    alone = places("stage2", ast.Constant, lambda node: node.value == "stage2")
    return alone | places("stage2", ast.Attribute, lambda node: node.attr == "stage2")


def prompt_readers() -> Places:
    """readers of prompts: functions that call read_prompts or conversations"""
    names = ("read_prompts", "conversations")
    found = (
        functions(name, lambda node: isinstance(node, ast.Call) and getattr(node.func, "id", "") in names)
        for name in names
    )
    return set().union(*found)


def turn_drivers() -> Places:
    """drivers of several turns: functions that call answer_message outside server/, or read .ask_again"""
    answers = functions(
        "answer_message", lambda node: isinstance(node, ast.Call) and last_name(node.func) == "answer_message"
    )
    again = functions("ask_again", lambda node: isinstance(node, ast.Attribute) and node.attr == "ask_again")
    return {place for place in answers | again if not place.startswith("speculator/server/")}


def lengths() -> Places:
    """computations of lengths: functions that add max_new_tokens to something"""

    def adds(node: ast.AST) -> bool:
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else ()
        return "max_new_tokens" in map(last_name, sides)

    return functions("max_new_tokens", adds)


def decoding_loops() -> Places:
    """drivers of the decoding loop: functions that name draft, verify and commit of an engine"""

    def named(function: ast.AST) -> set[object]:
        inside = ast.walk(function)
        return {
            getattr(node, "attr", None) or getattr(node, "value", None)
            for node in inside
            if isinstance(node, ast.Attribute) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        }

    steps = {"draft", "verify", "commit"}
    return {f"{file}:{node.name}" for file, node in nodes("commit", *FUNCTIONS) if steps <= named(node)}


def sampling_declarations() -> Places:
    """declarations of a sampling setting: fields of classes and flags for top-p, besides Sampling's"""

    def flag(node: ast.Call) -> bool:
        return last_name(node.func) == "add_argument" and str(getattr(node.args[0], "value", "")).endswith("top_p")

    fields = {
        f"{file}:{node.name}"
        for file, node in nodes("top_p", ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and last_name(field.target).endswith("top_p")
    }
    return (fields | places("top_p", ast.Call, flag)) - {"speculator/decoding/sampling.py:Sampling"}


def before_the_first_step() -> Places:
    """files before the first step: modules of train/ that train.run imports by any way, and what these import"""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    door = {"train.run", *(name for name in graph.find_upstream_modules("train.run") if name.startswith("train."))}
    return door.union(*map(graph.find_modules_directly_imported_by, door))


def surface() -> Places:
    """flags, settings and options: lines of tests/surface.txt"""
    return set((ROOT / "tests/surface.txt").read_text().splitlines())


COUNTED = (
    *(server_branches, encoder_branches, encoder_branch_files, encoder_files, stage2_in_logic, prompt_readers),
    *(turn_drivers, lengths, decoding_loops, sampling_declarations, before_the_first_step, surface),
)


def row(counted: Callable[[], Places]) -> str:
    return f"{len(counted()):4}  {counted.__doc__}"


def test_the_product_has_the_paths_of_the_table():
    listed = TABLE.read_text().splitlines()
    assert len(listed) == len(COUNTED)
    for line, counted in zip(listed, COUNTED, strict=True):
        assert line == row(counted), "\n".join(["tests/paths.txt has another number", *sorted(counted())])


if __name__ == "__main__":
    print(*map(row, COUNTED), sep="\n")
