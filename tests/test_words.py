"""One name per thing, and one thing per name: docs/contributing/glossary.md."""

import ast
import re
import tokenize
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("speculator", "data", "eval", "train")
WORDS = {
    # a word in names of the code: the files where it may stand
    "pace": ("train/losses.py", "train/options/config.py"),  # D-PACE; of a run it is the throughput
    "recurrent": (  # layers of a target
        "speculator/target/*",
        "speculator/decoding/*",
        "speculator/drafters/*",
        "train/door/dry_run.py",  # of transformers' Trainer
    ),
    "tap": (  # of a convolution; hidden states of the target are auxiliary layers
        *("speculator/heads/dspark/dflash2.py", "speculator/checkpoints/block_drafters.py"),
    ),
    "accelerator": (  # the device or the package accelerate; trained weights are a draft head
        *("speculator/device.py", "data/batches.py", "eval/decoders.py"),
        *("train/processes.py", "train/states/*.py", "train/loop.py", "train/progress.py", "train/stages.py"),
    ),
    # not words of the field: equal, suppressed, again, shared, verified, locked
    "alike": (),
    "held_back": (),
    "anew": (),
    "lent": (),
    "sealed": (),
    "claimed": (),
}


def names(path: Path) -> set[str]:
    """The names in a file as words: `MLPHead` and `_mlp_head` are mlp_head."""
    with tokenize.open(path) as file:
        found = {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}
    return {"_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)).lower() for name in found}


FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}


@pytest.fixture(scope="module")
def named() -> dict[str, set[str]]:
    return {file: names(path) for file, path in FILES.items()}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_stands_where_it_has_its_meaning(word, named):
    whole = re.compile(rf"(^|_){word}s?(_|$)")
    users = {file for file, its in named.items() if any(whole.search(name) for name in its)}
    assert {file for file in users if not any(fnmatch(file, where) for where in WORDS[word])} == set()
    idle = [where for where in WORDS[word] if not any(fnmatch(file, where) for file in users)]
    assert not idle, "the list names files that no longer use the word"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_classes_of_a_package_share_a_name(package):
    places = defaultdict(list)
    for file, path in FILES.items():
        if file.startswith(f"{package}/"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(file)
    assert not {name: files for name, files in places.items() if len(files) > 1}
