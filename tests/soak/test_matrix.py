"""Whole journeys over a covering matrix: train, kill and resume or start from a head, export, decode, measure.

Every pair of values of `journeys.FACTORS` is in a cell; a cell's name has the number of pairs covered up to it. A
journey goes on after something is wrong, and its test fails with all of that.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from conftest import exit_code, shorten_validation
from datasets import load_from_disk
from kills import killed_at
from safetensors.torch import load_file
from soak import journeys
from transformers import AutoModelForCausalLM

import train.loop
import train.run
from data.batches import Batches
from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    FixedTree,
    HeadDrafter,
    NgramDrafter,
    Sampling,
    Target,
    Tree,
    generate,
    load_drafter,
    load_head,
    speculative,
)
from speculator.__main__ import main
from speculator.checkpoints import FORMATS
from train.config import ROOT

CELLS, COVERED, PAIRS = journeys.cells()
KILLS: dict[str, list[tuple[Any, str, int]]] = {
    "killed in stage 1": [(train.loop, "stop_asked", 10)],  # after a checkpoint
    "killed writing": [(Batches, "write", 1)],
    "killed in stage 2": [(train.run, "train_stage", 1), (train.loop, "stop_asked", 5)],
}
LOOK = {"0": Sampling(), "1": Sampling(1.0, seed=5), "0.8": Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=9)}
NEW = 14  # tokens


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, text_file) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    journeys.make_targets(folder)
    journeys.make_sources(folder, text_file)
    return folder


@pytest.fixture
def journey(inputs, quick, tmp_path, monkeypatch, capfd):
    """Makes the journey of a cell, which may leave nothing in the working folder and that of temporary files."""
    shorten_validation(monkeypatch)
    for name, empty in (("draw_plots", None), ("write_page", None), ("trace_suite", [])):
        monkeypatch.setattr(f"eval.run.{name}", lambda *_, empty=empty: empty)
    monkeypatch.setattr("speculator.drafters.tuning.SECONDS", 0.5)
    for name in ("cwd", "tmp", "out"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield lambda cell, number: Journey(cell, number, inputs, tmp_path, monkeypatch, capfd)
    torch.set_num_threads(1)
    left = [path for name in ("cwd", "tmp") for path in (tmp_path / name).iterdir()]
    assert [path for path in left if not path.name.startswith("pymp-")] == []  # multiprocessing's own


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        pytest.param(cell, number, id=f"{number}-{cell['target']}-{cell['head']}-{covered}_of_{PAIRS}")
        for number, (cell, covered) in enumerate(zip(CELLS, COVERED, strict=True), 1)
    ],
)
def test_a_journey(cell, number, journey):
    made = journey(cell, number)
    made.run()
    assert not made.wrong, "\n".join([str(cell), *made.wrong])


class Journey:
    def __init__(self, cell, number, inputs, folder, monkeypatch, capfd):
        self.cell, self.number, self.inputs, self.out = cell, number, inputs, folder / "out"
        self.patch, self.capfd, self.wrong = monkeypatch, capfd, []
        kind = cell["target"]
        name = "gguf.gguf" if kind == "gguf" else kind
        self.target = ROOT / "examples/stdlib_target" if kind in ("stdlib", "adapter") else inputs / name
        self.adapter = inputs / "adapter" if kind == "adapter" else None
        self.sources = journeys.sources(cell["source"], inputs)

    def check(self, right: Any, what: str) -> bool:
        if not right:
            self.wrong.append(what)
        return bool(right)

    # --- commands

    def call(self, *argv: Any, cache: str = "cache") -> SimpleNamespace:
        self.patch.setenv("SPECULATOR_CACHE", str(self.out.parent / cache))
        words = [str(word) for word in argv]
        self.capfd.readouterr()
        code = exit_code(main, words)
        torch.set_num_threads(1)
        out, err = self.capfd.readouterr()
        print(f"$ speculator {' '.join(words)}\n-> {code}\n{out[-3000:]}{err[-3000:]}")
        for text in re.finditer(r"([\d,]+) rows read, ([\d,]+) used(?:, ([\d,]+) left out)?", out + err):
            read, used, left = (int((each or "0").replace(",", "")) for each in text.groups())
            self.check(read == used + left, f"counts don't add up: {text[0]}")
        last = [line for line in re.split(r"[\n\r]", err) if line.strip()][-1:] or [""]
        return SimpleNamespace(code=code, out=out, err=err, last=last[0])

    def ok(self, *argv: Any, **how: Any) -> SimpleNamespace:
        done = self.call(*argv, **how)
        self.check(done.code == 0, f"{' '.join(map(str, argv[:2]))}: code {done.code}, {done.last}")
        return done

    def refused(self, what: str, done: SimpleNamespace, left: Path) -> None:
        one = done.code == 2 and re.match(r"(train\.py|speculator|data|eval)[\w .-]*: \S", done.last)
        self.check(one and not left.exists(), f"{what}: not refused in one line: code {done.code}, {done.last}")

    def trained(self, flags: list[str], output: Path, cache: str = "cache") -> None:
        """Train up to the report, which nobody reads."""
        self.killed(["train", *flags, "--output_dir", output], (train.run, "measure", 0), cache)

    def killed(self, argv: list[Any], point: tuple[Any, str, int], cache: str = "cache") -> None:
        done = None
        try:
            with killed_at(*point):
                done = self.call(*argv, cache=cache)
        except pytest.fail.Exception:
            self.check(False, f"train was not killed at {point[1:]}: {done and (done.code, done.last)}")

    # --- the journey

    def flags(self, **changes: Any) -> list[str]:
        c, small = self.cell, self.cell["target"] not in ("stdlib", "adapter")
        options = dict(journeys.FORMS[c["head"]][c["form"]])
        if small and c["head"] not in ("mlp", "mtp"):
            options["aux_layers"] = [1]
        copies = (c["head"] == "mlp" and not c["form"]) or (c["head"] == "mtp" and self.number % 2)
        given: dict[str, Any] = {
            "config": ROOT / "tests/plain.yaml",
            "target.name_or_path": self.target,
            "target.adapter": self.adapter,
            "target.dtype": "bfloat16" if c["dtype"] == "bfloat16 target" else "float32",
            "data.sources": f"[{', '.join(self.sources)}]",
            "data.seq_length": 96,
            "data.max_tokens": 5000,
            **{f"data.self_source.{name}": n for name, n in {"max_rows": 64, "batch_size": 8}.items()},
            **{f"data.self_source.max_{name}_tokens": n for name, n in {"prompt": 32, "new": 24}.items()},
            "speculator.architecture": "dspark" if c["head"].startswith("dflash") else c["head"],
            "speculator.n_predict": c["n_predict"],
            "speculator.draft_vocab_size": c["draft_vocab"],
            "speculator.options": json.dumps(options),
            "speculator.initialise": "target" if copies else "random",
            **{f"loss.{name}": value for name, value in journeys.LOSSES[c["loss"]].items()},
            "eval.validation_rows": 4,
            "eval.validation_prompts": 1,
            "eval.tune_prompts": self.number % 2,
            "eval.prompt_tokens": 16,
            "eval.max_prompts": 1,
            "eval.max_new_tokens": 8,
            "report_to": "none",
            "seed": self.number,
        }
        # Rounding grows from step to step, and one process and two do not round alike.
        for stage, steps, rest in (("stage1", 20 if c["processes"] == 1 else 3, 8), ("stage2", 8, 3)):
            given |= {
                f"{stage}.per_device_train_batch_size": c["batch"],
                f"{stage}.gradient_accumulation_steps": c["accumulation"],
                f"{stage}.optimizer": c["optimizer"],
                f"{stage}.bf16": c["dtype"] == "bfloat16",
                f"{stage}.keep_states": c["keep_states"],
                f"{stage}.warmup_steps": 1,
                f"{stage}.logging_steps": 1,
                f"{stage}.eval_steps": rest,
                f"{stage}.learning_rate": 1e-2,
                **({f"{stage}.max_steps": steps} if c["length"] == "steps" else {f"{stage}.epochs": 0.5}),
            }
        if c["stages"] == 1:
            given |= {"stage2.epochs": None, "stage2.max_steps": 0}
        texts = {"max_rows": 40, "prompt_tokens": 16, "max_new_tokens": 16, "batch_size": 4}
        # Adaptive drafts follow timings, and in bfloat16 the text depends on the draft by rounding.
        texts["num_speculative_tokens"] = 2 if c["dtype"] == "bfloat16 target" else self.number % 3 and 2
        given |= {f"stage2.generate.{name}": value for name, value in texts.items()} | changes
        words = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
        return [word for name in given if given[name] is not None for word in (f"--{name}", words[name])]

    def run(self) -> None:
        c, run, flags = self.cell, self.out / "run", self.flags()
        if c["start"] in ("head", "export"):
            flags = self.from_another_head()
        looks = ["--plan", "--dry_run"][: 1 + (self.number % 6 == 0)]
        for look in looks:
            self.ok("train", *flags, "--output_dir", run, look)
            self.check(not run.exists(), f"{look} made the run's folder")
        if c["start"] in KILLS:
            self.trained(flags, self.out / "calm", "cache-calm")
            for point in KILLS[c["start"]]:
                self.killed(["train", *flags, "--output_dir", run], point)
        if c["processes"] == 2:
            self.on_two_processes(flags, run)
        self.ok("train", *flags, "--output_dir", run)
        if not self.check((run / "eval/report.json").exists(), "no report"):
            return
        if c["start"] in KILLS:
            for part in ("stage1/speculator", "stage2/speculator", "speculator"):
                pair = [self.out / name / part for name in ("calm", "run")]
                same = pair[0].exists() == pair[1].exists() and (not pair[0].exists() or distance(*pair) == 0)
                self.check(same, f"{part} of the resumed run is not that of the undisturbed one")
        if c["start"] in ("head", "export"):
            self.compare_with_start()
        self.figures(run / "eval/report.json")
        self.check(not [*run.rglob("*.partial")], "a partial file is left")
        before = files_of(run)
        self.ok("train", *flags, "--output_dir", run)
        changed = sorted(path for path, _ in before.items() ^ files_of(run).items())
        self.check(not changed, f"a second run changes {changed}")
        exported = self.exports(run / "speculator")
        self.decode(run / "speculator", exported)
        self.commands(run, exported)

    def from_another_head(self) -> list[str]:
        """Train the head to start from; return the flags of a run that starts from it and changes nothing."""
        base = self.out / "base"
        one = {"stage2.max_steps": 0, "stage2.epochs": None}
        self.trained(self.flags(**one), base)
        start = base / "speculator"
        shown = self.ok("inspect", start)
        formats = [name for name in re.findall(r"exports to\s+([\w-]+)", shown.out) if name not in ("native", "gguf")]
        if self.cell["start"] == "export" and formats:
            start = self.out / "start"
            self.export(base / "speculator", formats[self.number % len(formats)], start)
        changes: dict[str, Any] = {f"{stage}.learning_rate": 1e-9 for stage in ("stage1", "stage2")}
        if self.number % 2:  # else its own flags again, but for the embedding that turned out to be the target's
            changes |= {f"speculator.{name}": None for name in ("architecture", "n_predict", "draft_vocab_size")}
            changes |= {"speculator.options": "{}", "speculator.initialise": None}
        flags = self.flags(**changes, **{"speculator.warm_start": start})
        return [word.replace('"own_embedding": true, ', "") for word in flags]

    def compare_with_start(self) -> None:
        first, old = (weights_in(self.out / name / "stage1/speculator") for name in ("run", "base"))
        near = [torch.allclose(first[name].float(), old[name].float(), atol=2e-6) for name in first.keys() & old.keys()]
        self.check(near and all(near), "a run without a rate changes the head that it starts from")

    def on_two_processes(self, flags: list[str], run: Path) -> None:
        """Train on two processes; compare with one process that makes twice the micro-batches."""
        twice = {f"stage{n}.gradient_accumulation_steps": 2 * self.cell["accumulation"] for n in (1, 2)}
        self.trained(self.flags(**twice), self.out / "one", "cache-one")
        self.patch.setenv("SPECULATOR_CACHE", str(self.out.parent / "cache-two"))
        forked.finish(forked.launch(2, "train.py", *map(str, [*flags, "--output_dir", run])))
        # Of few rows of stage 2 one process holds some out, where two hold none.
        apart = distance(*(self.out / name / "stage1/speculator" for name in ("one", "run")))
        self.check(apart <= 1e-4, f"stage 1 on two processes differs from one by {apart}")
        if (run / "generated/rows").exists():
            self.check(
                rows_of(self.out / "one/generated") == rows_of(run / "generated"), "two processes write otherwise"
            )

    def export(self, head: Path, name: str, folder: Path) -> SimpleNamespace:
        argv = ["export", "--speculator", head, "--format", name, "--output", folder]
        if self.cell["target"] == "gguf":
            argv += ["--base_model", self.target]
        done = self.call(*argv)
        if done.code == 2 and "speculator dequantise" in done.last:  # the layout has a matrix of the target
            plain = self.out / "dequantised"
            if not plain.exists():
                self.ok("dequantise", "--target", self.target, "--output", plain, "--dtype", "float32")
            done = self.call(*argv[:-1], plain)
        return done

    def exports(self, head: Path) -> dict[str, Path]:
        """Export the head in each layout that `inspect` lists; each other one must be refused."""
        listed, made = set(re.findall(r"exports to\s+([\w-]+)", self.ok("inspect", head).out)), {}
        for name in FORMATS:
            folder = self.out / f"export-{name}"
            done = self.export(head, name, folder)
            if name not in listed or (name == "gguf" and self.cell["target"] != "gguf"):
                self.refused(f"export {name}", done, folder)
            elif self.check(done.code == 0, f"export {name}: code {done.code}, {done.last}") and name != "gguf":
                self.ok("inspect", folder)
                made[name] = folder
        return made

    def figures(self, file: Path) -> None:
        """The figures of a report agree with each other, and greedy texts are transformers'."""
        report = json.loads(file.read_text())
        for row in report["suites"]:
            where = f"{file.parent.name}: {row['drafter']} at {row['temperature']}"
            for each in (row, *row.get("categories", [])):
                rates, lengths = each["acceptance_by_position"], each["accepted_lengths"]
                expected = 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
                mean = 1 + sum(n * count for n, count in enumerate(lengths)) / max(1, sum(lengths))
                near = max(abs(found - expected) for found in (each["acceptance_length"], mean)) < 1e-6
                self.check(near, f"{where}: length {each['acceptance_length']}, its rates say {expected}")
                self.check(sum(lengths) == each["steps"], f"{where}: steps don't add up")
            same = row.get("identical_to_greedy")
            if same and report["settings"]["dtype"] == "float32":
                self.check(same["identical"] == same["of"], f"{where}: {same} are transformers' greedy texts")

    def decode(self, folder: Path, exported: dict[str, Path]) -> None:
        """Texts are equal with any draft, alone, in a batch and in transformers; exports draft what the head does."""
        c, n = self.cell, self.cell["n_predict"]
        target = Target.load(str(self.target), dtype="float32", adapter=self.adapter and str(self.adapter))
        lines = (self.inputs / "text.jsonl").read_text().splitlines()
        prompts = [
            target.tokenizer(json.loads(line)["text"])["input_ids"][:k]
            for line, k in zip(lines, (5, 23, 60), strict=False)
        ]
        ends = {} if self.number % 2 else {"eos_token_ids": ()}
        samplings = {"0": LOOK["0"], "sampled": LOOK["1" if self.number % 3 else "0.8"]}

        def texts(drafter: Any, sampling: Sampling, alone: bool = False, **more: Any) -> list[list[int]]:
            more = {"max_new_tokens": NEW, **ends, **more}
            if not alone:
                return generate(target, drafter, prompts, sampling, **more).tokens
            rows = [dataclasses.replace(sampling, seed=sampling.seed + i) for i in range(len(prompts))]
            return [generate(target, drafter, [p], row, **more).tokens[0] for p, row in zip(prompts, rows, strict=True)]

        plain = {name: texts(None, sampling, alone=True) for name, sampling in samplings.items()}
        head = load_head(folder, target)
        drafters = {
            "none": None,
            "chain": HeadDrafter(head, n),
            "greedy chain": HeadDrafter(head, Chain(n, sampled=False)),
            "tree": HeadDrafter(head, Tree([3, 2], 4)),
            "candidates": HeadDrafter(head, Candidates([2, 2])),
            "fixed tree": HeadDrafter(head, FixedTree([(0,), (1,), (0, 0)])),
            "adaptive": load_drafter(folder, target, temperatures=[0.0, 1.0], batch_size=3),
            "lookup": NgramDrafter(4),
        }
        if head.config.max_speculative_tokens is None:
            drafters["deep chain"] = HeadDrafter(head, n + 3)
        if c["target"] not in ("stdlib", "adapter", "gguf"):
            model = Target.load(str(self.inputs / "qwen3"), dtype="float32")
            drafters["draft model"] = DraftModelDrafter(model, target, Chain(3))
        for who, drafter in drafters.items():
            for name, sampling in samplings.items():
                for how in ({}, {"max_batch_size": 2}, {"alone": True}):
                    same = texts(drafter, sampling, **how) == plain[name]
                    self.check(same, f"{who} at {name}, {how}: another text than plain decoding")
            for rule in drafter.rules if drafter else ():
                self.check(texts(drafter, LOOK["0"], rule=rule) == plain["0"], f"{who} by {rule}: another greedy text")

        model = self.in_transformers()
        model.generation_config.eos_token_id = None if ends else sorted(target.eos_token_ids)
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

        def greedy(**more: Any) -> list[list[int]]:
            rows = (torch.tensor([ids]) for ids in prompts)
            made = [
                model.generate(input_ids=r, attention_mask=torch.ones_like(r), **how, **more)[0].tolist() for r in rows
            ]
            return [text[len(ids) :] for text, ids in zip(made, prompts, strict=True)]

        self.check(greedy() == plain["0"], "transformers' greedy text is another one")
        self.check(greedy(custom_generate=speculative(folder)) == plain["0"], "custom_generate gives another text")
        made = model.generate(input_ids=padded, attention_mask=mask, **how, custom_generate=speculative(folder))
        for text, row in zip(plain["0"], made[:, longest:].tolist(), strict=True):
            same = row[: len(text)] == text and not any(row[len(text) :])
            self.check(same, "custom_generate gives another text in a padded batch")
        self.check(greedy() == plain["0"], "transformers' own text has changed after custom_generate")

        drafted = {name: self.drafts(target, load_head(each, target), prompts) for name, each in exported.items()}
        for name, each in drafted.items():
            self.check(each == self.drafts(target, head, prompts), f"the {name} export drafts otherwise")

    def drafts(self, target: Target, head: Any, prompts: list[list[int]]) -> list[list]:
        """All drafts of a head, at temperature 0 and 1."""
        made, propose = [], HeadDrafter.propose

        def noted(*given: Any) -> Any:
            made.append((draft := propose(*given)).tokens.tolist())
            return draft

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadDrafter, "propose", noted)
            for sampling in (LOOK["0"], LOOK["1"]):
                generate(target, HeadDrafter(head, self.cell["n_predict"]), prompts, sampling, max_new_tokens=NEW)
        return made

    def in_transformers(self) -> Any:
        if self.cell["target"] == "gguf":
            where = {"gguf_file": self.target.name}
            return AutoModelForCausalLM.from_pretrained(self.inputs, **where, dtype=torch.float32).eval()
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        if self.adapter:
            from peft import PeftModel

            return PeftModel.from_pretrained(model, self.adapter).merge_and_unload().eval()
        return model

    def commands(self, run: Path, exported: dict[str, Path]) -> None:
        """generate, eval, compare, gate and data generate."""
        head, number, n = run / "speculator", self.number, self.cell["n_predict"]
        target = ["--target", self.target, "--dtype", "float32", *(["--adapter", self.adapter] if self.adapter else [])]
        other = [*exported.values(), head][number % max(1, len(exported))]
        texts = {}
        for way, flags in {
            "plain": ["--batch_size", 1],
            "adaptive": ["--speculator", head, "--batch_size", 3],
            "export": ["--speculator", other, "--num_speculative_tokens", n, "--batch_size", 2],
        }.items():
            file = self.out / f"{way}.jsonl"
            shape = ["--temperature", number % 2, "--seed", 5, "--max_new_tokens", 20, "--output", file]
            if not self.ok("generate", *target, *flags, "--prompts", self.inputs / "prompts.jsonl", *shape).code:
                texts[way] = [row["tokens"] for row in map(json.loads, file.read_text().splitlines())]
        for way, rows in texts.items():
            self.check(rows == texts.get("plain"), f"generate: {way} gives another text than plain decoding")
        suite, report = self.inputs / "suite.jsonl", self.out / "report"
        small = ["--suite", suite, "--max_prompts", 2, "--max_new_tokens", 12, "--prompt_tokens", 16]
        more = [[], ["--num_speculative_tokens", n], ["--rule", "rejection"], ["--as", "vllm"], ["--batch_size", 2]]
        self.ok("eval", *target, "--speculator", head, *small, *more[number % 5], "--output", report)
        if (report / "report.json").exists():
            self.figures(report / "report.json")
            self.ok("eval", "compare", report, report)
            self.refused("compare of other suites", self.call("eval", "compare", run, report), self.out / "none")
        gate = self.call("eval", "gate", head, other, *target, *small, "--guard", suite)
        equal = gate.code in (0, 1) and re.search(r"; on \S.* \+0\.0% ", gate.out)
        self.check(
            equal or "every answer has one token" in gate.last, f"gate against its export: {gate.out}{gate.last}"
        )
        rows = []
        for flags in (["--speculator", head], []):
            folder = self.out / f"data-{len(flags)}"
            sizes = ["--max_rows", 48 if self.sources == ["self"] else 6, "--max_new_tokens", 16, "--batch_size", 4]
            sizes += ["--temperature", 0, 1, "--seed", 3]
            sizes += ["--max_prompt_tokens", 32] if self.sources == ["self"] else ["--prompt_tokens", 16]
            if self.ok(
                "data", "generate", *target, *flags, "--sources", *self.sources, *sizes, "--output", folder
            ).code:
                return
            rows.append(rows_of(folder))
            facts = json.loads((folder / "manifest.json").read_text())
            tokens = sum(map(sum, load_from_disk(str(folder / "rows"))["loss_mask"]))
            self.check(facts["tokens"] == tokens, f"the manifest says {facts['tokens']} tokens of {tokens}")
            self.ok("data", "view", folder, "--target", self.target, "--rows", 2)
        self.check(rows[0] == rows[1], "data generate writes other rows with the head")


def rows_of(folder: Path) -> list[dict]:
    return load_from_disk(str(folder / "rows")).to_list()


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def distance(a: Path, b: Path) -> float:
    """The largest difference of two heads' weights; infinity if they have other weights."""
    first, second = weights_in(a), weights_in(b)
    if first.keys() != second.keys():
        return math.inf
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)
