"""Prompts that the source `self` rarely writes: mathematics, code, and questions about long texts.

    python examples/smollm2_135m_instruct/prompts.py mathematics --rows gsm8k_train.jsonl > mathematics.jsonl
    python examples/smollm2_135m_instruct/prompts.py code > code.jsonl
    python examples/smollm2_135m_instruct/prompts.py texts --rows peps.jsonl > texts.jsonl

mathematics reads rows with "question" (GSM8K's training side), texts reads rows with "text", and code needs no rows: it
asks for the documented functions of Python's standard library. Answer them with `speculator data generate --prompts`.
"""

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_CODE = (
    "Write a Python function with this signature and docstring.\n\n```python\n{head}\n```",
    "Implement this Python function:\n\n{head}",
    "How can I write a Python function called `{name}`? Its description: {doc}",
    "Explain what a function with this description does, and write it in Python: {doc}",
)
_MATHEMATICS = ("{question}", "{question}\nThink step by step.", "Solve this problem: {question}")
_TEXTS = (
    "Summarize the following text:\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "{text}\n\nRewrite the text above in simpler words.",
    "Read this text and list its key facts.\n\n{text}",
    "{text}\n\nExplain to a beginner what this is about.",
)
_SHORTEST, _LONGEST = 60, 700  # characters of a docstring
_PASSAGE = 1200  # characters of a text


def rows(file: Path) -> Iterator[dict]:
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def mathematics(file: Path, draw: random.Random) -> Iterator[str]:
    for row in rows(file):
        yield draw.choice(_MATHEMATICS).format(question=row["question"])


def code(draw: random.Random) -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if doc and _SHORTEST < len(doc) < _LONGEST:
                head = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""'
                yield draw.choice(_CODE).format(head=head, name=node.name, doc=doc)


def texts(file: Path, draw: random.Random) -> Iterator[str]:
    for row in rows(file):
        paragraphs = row["text"].split("\n\n")
        while paragraphs:
            passage = ""
            while paragraphs and len(passage) < _PASSAGE // 2:
                passage += paragraphs.pop(0) + "\n\n"
            if len(passage) > _PASSAGE // 3:
                yield draw.choice(_TEXTS).format(text=passage.strip()[:_PASSAGE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("mathematics", "code", "texts"))
    parser.add_argument("--rows", type=Path, help=".jsonl file, maybe .gz, with the questions or texts")
    flags = parser.parse_args()
    if flags.kind != "code" and flags.rows is None:
        parser.error(f"{flags.kind} needs --rows")
    draw = random.Random(0)
    made = code(draw) if flags.kind == "code" else globals()[flags.kind](flags.rows, draw)
    chosen = list(dict.fromkeys(made))
    draw.shuffle(chosen)
    for text in chosen:
        print(json.dumps({"messages": [{"role": "user", "content": text}]}))


if __name__ == "__main__":
    main()
