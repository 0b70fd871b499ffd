"""Modules and files that the documentation names exist."""

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_module_in_the_documentation_exists():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {
        (file.name, module)
        for file in files
        for module in re.findall(r"python -m ((?:speculator|data|eval|train|benchmarks)\b(?:\.\w+)*)", file.read_text())
    }
    assert {module for _, module in named} >= {"speculator", "data", "eval", "benchmarks.step"}
    missing = [(name, module) for name, module in sorted(named) if "NAME" not in module and not find_spec(module)]
    assert not missing


def test_every_link_leads_to_a_file():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    links = [
        (file, link)
        for file in files
        for link in re.findall(r"\]\(([^)#\s]+)", file.read_text())
        if not link.startswith(("http://", "https://"))
    ]
    assert len(links) > 50
    assert not [f"{file.name}: {link}" for file, link in links if not (file.parent / link).exists()]
