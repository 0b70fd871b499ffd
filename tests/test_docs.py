"""What the documentation names exists: links, modules, and every command with its flags."""

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.served import Served, compare
from speculator import clients
from speculator.__main__ import COMMANDS, PACKAGES
from speculator.errors import OneLineParser
from speculator.report import read_record
from train import server_command
from train.command_line import parse
from train.options.config import RunConfig
from train.options.loader import options

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import chart  # noqa: E402
import generated  # noqa: E402
from generated import parser_of  # noqa: E402

FILES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/*/README.md"),
    *ROOT.glob("integrations/*/*.md"),
]
OTHER_PROGRAMS = {
    *("cd", "curl", "docker", "git", "head", "hf", "llama-server", "sbatch", "sglang", "shuf", "tail", "vllm"),
}
OTHER_FLAGS = {
    *("--num_processes", "--config_file", "--machine_rank", "--main_process_ip", "--quiet"),  # accelerate
    *("--enforce-eager", "--served-model-name", "--enable-auto-tool-choice", "--speculate"),  # vLLM, TGI
    *("--tensor-parallel-size", "--enable-expert-parallel", "--max-model-len", "--shm-size"),  # vLLM, Docker
    *("--no-enable-chunked-prefill", "--speculative-config", "--nproc_per_node"),  # vLLM, torchrun
    "--version",  # of `speculator` without a command
    "--loss",  # a column of settings
}


FENCE = re.compile(r"^```(.*)\n((?s:.*?))^```$", re.MULTILINE)


def commands(text: str) -> list[str]:
    """Commands in the fenced blocks that name no language."""
    blocks = [block for language, block in FENCE.findall(text) if not language]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if line for command in line.split(" && ")]


def test_the_tables_of_the_pages_are_those_of_the_code():
    differing = [
        (page.name, line)
        for page, text in generated.stale().items()
        for line in set(text.splitlines()) - set(page.read_text().splitlines())
    ]
    assert differing == [], "run python docs/generated.py"


def test_the_reference_has_every_command_setting_and_public_name():
    marks = {
        mark.group(2, 3)
        for page in ROOT.glob("docs/reference/*.md")
        for mark in generated.MARK.finditer(page.read_text())
    }
    listed = [name for kind, names in marks if kind == "settings" for name in names.split() or [""]]
    assert sorted(listed) == sorted(["", *(name for name, option in options(RunConfig).items() if option.is_section)])
    assert {name for kind, name in marks if kind == "flags"} == {*COMMANDS, "server-command"}
    assert {("names", ""), ("shared", ""), ("gpus", "")} <= marks


def test_the_layout_names_every_module_and_folder_of_the_library():
    layout = re.search(r"```text\n(train.py .*?)```", (ROOT / "docs/contributing/index.md").read_text(), re.DOTALL)
    assert layout
    found = {path.name for path in (ROOT / "speculator").iterdir() if path.suffix == ".py"}
    found |= {f"{path.parent.name}/" for path in (ROOT / "speculator").glob("*/__init__.py")}
    assert {name for name in found if not name.startswith("__") and f" {name} " not in layout[1]} == set()


def test_the_list_of_code_for_other_servers_names_what_exists():
    named = re.findall(r"^    (\S+/\S*)", clients.__doc__ or "", re.MULTILINE)
    assert len(named) > 9
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_link_leads_to_a_file_and_a_heading():
    prose = {file: FENCE.sub("", file.read_text()) for file in FILES}
    links = [
        (file, *link) for file, text in prose.items() for link in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", text)
    ]
    assert len(links) > 100
    broken = [f"{file.name}: {path}#{anchor}" for file, path, anchor in links if not leads(file, path, anchor)]
    assert not broken


def test_every_function_that_a_page_links_exists():
    links = [
        (file.parent / path, name)
        for file in FILES
        for name, path in re.findall(r"\[`(\w+(?:\.(?!py`)\w+)?)`\]\(([^)\s#]+\.py)\)", file.read_text())
    ]
    assert len(links) > 25
    assert [name for path, name in links if name not in definitions(ast.parse(path.read_text()))] == []


def test_no_excerpt_is_blank_where_a_page_is_read_without_sphinx():
    assert [file.name for file in FILES if "{literalinclude}" in file.read_text()] == []


def ratio(interval: dict[str, Any]) -> str:
    low, high = interval["low"], interval["high"]
    return f"{interval['value']:.2f}" + ("" if low is None else f" ({low:.2f}-{high:.2f})")


def figures(suites: list[dict[str, Any]]) -> dict[str, str]:
    """The cells of a row of the results that a report gives, by column."""
    adaptive, head, ngram = (
        next(row for row in suites if row["drafter"] == key) for key in ("adaptive", "head", "ngram")
    )
    return {
        "T": f"{adaptive['temperature']:.0f}",
        "whole answer": ratio(adaptive["end_to_end_speedup"]["plain"]),
        "decoding": f"{adaptive['speedup']['plain']['value']:.2f}",
        "acceptance length": f"{adaptive['acceptance_length']:.2f}",
        "head alone": ratio(head["end_to_end_speedup"]["plain"]),
        "n-gram lookup": ratio(ngram["end_to_end_speedup"]["plain"]),
        "slower": f"{adaptive['spread']['slower']:.0%}",
    }


def test_rows_of_the_results_are_those_of_their_reports():
    header, rows = [], 0
    for line in (ROOT / "docs/results.md").read_text().splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if line.startswith("| prompts |"):
            header = cells
        elif report := re.match(r"\[.*\]\((lab/.*report.json)\), (\d+)$", cells[0]):
            suites = json.loads((ROOT / "docs" / report[1]).read_text())["suites"]
            assert int(report[2]) == suites[0]["prompts"]
            expected = figures(suites)
            assert cells[1:] == [expected[name] for name in header[1:]], report[1]
            assert not {row["tuned_on"] for row in suites} - {0}, "the head was tuned on none of these prompts"
            rows += 1
    assert rows == 11


def test_the_readme_has_the_figures_of_its_reports():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"\((docs/lab/\S+)\) \| \*\*(.+?)\*\* \| (.+?) \|$", text, re.MULTILINE)
    for report, whole, decoding in rows:
        found = figures(json.loads((ROOT / report).read_text())["suites"])
        assert (whole, decoding) == (found["whole answer"].split()[0], found["decoding"]), report
    assert len(rows) == 4
    alternative = re.search(r"!\[(.*)\]\(docs/speedup.svg\)", text)
    assert alternative
    shown = [f"{whole:.2f}" for whole, _ in chart.speedups().values()]
    assert re.findall(r"\d\.\d\d", alternative[1]) == shown[1:]


def test_the_figures_under_load_are_those_of_their_servers():
    page, load = (ROOT / "docs/results.md").read_text(), ROOT / "docs/lab/smollm2/load"
    cells: dict[int, list[str]] = {}
    for engine in ("vllm", "ours"):
        plain, head = (read_record(Served, load / f"{engine}-{kind}" / "served.json") for kind in ("plain", "head"))
        (pairs,) = compare(plain, head)[1].values()
        for without, with_head, speed in pairs:
            row = cells.setdefault(without.clients, [str(without.clients)])
            row += [f"{without.tokens_per_second:.0f}", f"{with_head.tokens_per_second:.0f}", ratio(asdict(speed))]
    assert [row for row in cells.values() if f"| {' | '.join(row)} |" not in page] == []


def test_the_comparison_with_transformers_is_that_of_its_report():
    page = (ROOT / "docs/results.md").read_text()
    named = {"plain": "plain", "n-gram": "n-gram lookup", "draft model": "draft model"}
    for row in json.loads((ROOT / "docs/lab/peers.json").read_text())["rows"]:
        speed = row["tokens_per_second"]
        cells = [named[row["ours"]], f"{speed['ours']:.0f}", f"{speed['theirs']:.0f}", ratio(row["ratio"])]
        assert f"| {' | '.join(cells)} |" in page


def test_the_texts_equal_to_transformers_are_those_of_the_report():
    page = " ".join((ROOT / "docs/explanation/accept-rules.md").read_text().split())
    named = re.search(r"\[(\d+) of (\d+) greedy texts\]\(\.\./(lab/[^)]*report\.json)\)", page)
    assert named
    suites = json.loads((ROOT / "docs" / named[3]).read_text())["suites"]
    same = [row["identical_to_greedy"] for row in suites if row["drafter"] in ("none", "head", "ngram")]
    assert {(each["identical"], each["of"]) for each in same} == {(int(named[1]), int(named[2]))}


def test_every_report_that_is_kept_is_named():
    text = "".join(path.read_text() for path in FILES)
    kept = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs/lab").rglob("*") if path.is_file()]
    assert [path for path in kept if str(path) not in text and f"{path.parent}:" not in text] == []


def definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module's functions and classes, and of those in its classes: `Engine`, `Engine.step`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")


def leads(file: Path, path: str, anchor: str) -> bool:
    target = file.parent / path if path else file
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_accepted_by_its_parser(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("train.door.head.with_settings_of_start", lambda config, given: config)  # no head is there
    for command in commands(page.read_text()):
        check(shlex.split(command, comments=True), monkeypatch)


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "train.py" in words:
        before, flags = words[: words.index("train.py")], words[words.index("train.py") + 1 :]
        assert all(Path(word).exists() for word in before if word.endswith(".yaml"))
        parse(flags)
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert set(re.findall(r"\w+", " ".join(re.findall(r"\[.*?\]", words[-1])))) <= set(extras)
    elif words[:2] == ["speculator", "server-command"]:
        parse(server_command.split(words[2:])[1])
    elif words[0] == "speculator" and words[1] in PACKAGES:
        check(["python", "-m", *words[1:]] if words[1] != "train" else ["train.py", *words[2:]], monkeypatch)
    elif words[0] == "speculator" or words[1:3] in (["-m", "speculator"], ["-m", "data"]):
        name, *flags = words[1:] if words[0] == "speculator" else words[3:]
        parser_of(f"{'data' if 'data' in words[:3] else 'speculator'} {name}").parse_args(flags)
    elif words[1:3] == ["-m", "eval"]:
        named = [] if words[3].startswith("-") else words[3:4]
        parser_of(" ".join(["eval", *named])).parse_args(words[3 + len(named) :])
    elif words[0] == "python":
        run_to_the_parser(words[1:], monkeypatch)
    else:
        assert words[0] in OTHER_PROGRAMS, words


class ParsedError(Exception):
    """The flags were accepted."""


def run_to_the_parser(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script, or a module after -m, until its flags are parsed."""
    accept = OneLineParser.parse_args

    def stop(parser, *arguments, **settings):
        accept(parser, *arguments, **settings)
        raise ParsedError

    run, name = (runpy.run_module, words[1]) if words[0] == "-m" else (runpy.run_path, words[0])
    with monkeypatch.context() as patched:
        patched.setattr("argparse.ArgumentParser.parse_args", stop)
        patched.setattr(sys, "argv", words[words[0] == "-m" :])
        patched.syspath_prepend(Path(words[0]).parent)
        with pytest.raises(ParsedError):
            run(name, run_name="__main__")


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_in_the_prose_of_a_page_exists(page: Path):
    prose = FENCE.sub("", page.read_text())
    named = {flag for code in re.findall(r"`([^`]+)`", prose) for flag in re.findall(r"(?<!\S)--[a-z][\w.-]*\b", code)}
    mappings = {name for name, option in options(RunConfig).items() if option.default == {}}
    of_mappings = {flag for flag in named if flag[2:].rpartition(".")[0] in mappings}
    assert named - OTHER_FLAGS - of_mappings <= known_flags()


def known_flags() -> set[str]:
    names = [*COMMANDS, "train.py", "server-command"]
    return {flag for name in names for action in parser_of(name)._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/tutorials").glob("*.md")), ids=lambda page: page.name)
def test_a_tutorial_installs_what_its_commands_need(page: Path):
    words = [shlex.split(command, comments=True) for command in commands(page.read_text())]
    extras = {
        name
        for each in words
        if each[:2] == ["pip", "install"]
        for name in re.findall(r"\w+", each[-1].partition("[")[2])
    }
    assert "make" in {each[0] for each in words} or "train" in extras
    assert ["speculator", "serve"] not in [each[:2] for each in words] or "serve" in extras


def test_what_the_container_writes_is_in_its_volume_and_its_run_hears_docker_stop():
    text = (ROOT / "Dockerfile").read_text()
    volume, folder, cache, command = (
        re.search(pattern, text, flags=re.MULTILINE)[1]
        for pattern in (
            r'-v "\$PWD/runs:(\S+)"',
            r"^WORKDIR (\S+)",
            r"^ENV SPECULATOR_CACHE=(\S+)",
            r"^#       (speculator .*)$",
        )
    )
    config = parse(shlex.split(command)[2:])  # without `accelerate launch`, which passes no SIGTERM on
    assert all(Path(folder, path).is_relative_to(volume) for path in (cache, config.output_dir))
