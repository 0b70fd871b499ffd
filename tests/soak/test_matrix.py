"""Whole journeys over a covering matrix: train, kill and resume or start from a head, export, decode, measure.

Every pair of values of `journeys.FACTORS` is in a cell; a cell's name has the number of pairs covered up to it. A
journey goes on after something is wrong, and its test fails with all of that.
"""

from __future__ import annotations

import dataclasses
import functools
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
from conftest import exit_code, shorten_validation, tiny_head
from datasets import load_from_disk
from kills import killed_at
from peft import PeftModel
from safetensors.torch import load_file
from soak import journeys
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import train.loop
import train.run
from data.batches import Batches
from speculator import Sampling, Target, generate, load_drafter, load_head, speculative
from speculator.__main__ import main
from speculator.checkpoints import FORMATS
from speculator.drafters import Candidates, Chain, DraftModelDrafter, FixedTree, HeadDrafter, NgramDrafter, Tree
from train.options.config import ROOT

CELLS = journeys.cells()
KILLS: dict[str, list[tuple[Any, str, int]]] = {
    "killed in stage 1": [(train.loop, "stop_asked", 6)],  # after a checkpoint
    "killed writing": [(Batches, "write", 1)],
    "killed in stage 2": [(train.run, "train_stage", 1), (train.loop, "stop_asked", 3)],
}
SAMPLED = [Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=9), Sampling(1.0, seed=5)]
NEW = 14  # tokens


def name_of(number: int) -> str:
    covered, cell = CELLS[number - 1]
    return f"{number}-{cell['target']}-{cell['head']}-{covered}_of_{CELLS[-1][0]}"


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
    yield lambda cell, number: Journey(cell, number, inputs, tmp_path / "out", monkeypatch, capfd)
    torch.set_num_threads(1)
    left = [path.name for name in ("cwd", "tmp") for path in (tmp_path / name).iterdir()]
    assert [name for name in left if not name.startswith("pymp-")] == []  # multiprocessing's own


@pytest.mark.parametrize("number", range(1, len(CELLS) + 1), ids=name_of)
def test_a_journey(number, journey):
    made = journey(CELLS[number - 1][1], number)
    made.with_a_head()
    assert not made.wrong, "\n".join([str(made.cell), *made.wrong])


@pytest.mark.parametrize("kind", journeys.ENCODER_DECODERS)
def test_a_journey_of_an_encoder_decoder(kind, journey):
    made = journey({"target": kind, "source": "pairs"}, 2)
    made.without_a_head()
    assert not made.wrong, "\n".join(made.wrong)


class Journey:
    def __init__(self, cell, number, inputs, out, monkeypatch, capfd):
        self.cell, self.number, self.inputs, self.out = cell, number, inputs, out
        self.patch, self.capfd, self.wrong = monkeypatch, capfd, []
        kind = cell["target"]
        self.stdlib = kind in ("stdlib", "adapter")
        self.path = journeys.STDLIB if self.stdlib else inputs / ("gguf.gguf" if kind == "gguf" else kind)
        adapter = str(inputs / "adapter") if kind == "adapter" else None
        self.target = Target.load(str(self.path), dtype="float32", adapter=adapter)
        self.names = ["--target", self.path, "--dtype", "float32", *(["--adapter", adapter] if adapter else [])]
        self.sources = journeys.sources(cell["source"], inputs)
        self.suite = ["--suite", inputs / "suite.jsonl", "--max_prompts", 2, "--max_new_tokens", 12]
        self.suite += ["--prompt_tokens", 16]

    def check(self, right: Any, what: str) -> bool:
        self.wrong += [] if right else [what]
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
        return SimpleNamespace(code=code, out=out, last=last[0], name=" ".join(words[:2]))

    def ok(self, *argv: Any) -> SimpleNamespace:
        done = self.call(*argv)
        self.check(done.code == 0, f"{done.name}: code {done.code}, {done.last}")
        return done

    def refused(self, done: SimpleNamespace, left: Path) -> None:
        one = done.code == 2 and re.match(r"(train\.py|speculator|data|eval)[\w .-]*: \S", done.last)
        what = "not refused in one line" if not one else f"refused, but {left.name} is left"
        self.check(one and not left.exists(), f"{done.name}: {what}: code {done.code}, {done.last}")

    def again(self, folder: Path, *argv: Any) -> None:
        before = files_of(folder)
        self.ok(*argv)
        changed = sorted(path for path, _ in before.items() ^ files_of(folder).items())
        self.check(not changed, f"a second {argv[0]} changes {changed}")

    def train(self, flags: list[str], run: Path, at: tuple = (train.run, "measure", 0), cache: str = "cache") -> None:
        """Train until the run is killed at a call: by default for its report, which nobody reads."""
        done = None
        try:
            with killed_at(*at):
                done = self.call("train", *flags, "--output_dir", run, cache=cache)
        except pytest.fail.Exception:
            self.check(False, f"train was not killed at {at[1:]}: {done and (done.code, done.last)}")

    def flags(self, **changes: Any) -> list[str]:
        c, odd = self.cell, self.number % 2
        options = dict(journeys.FORMS[c["head"]][c["form"]])
        if not self.stdlib and c["head"] not in ("mlp", "mtp"):
            options["aux_layers"] = [1]
        copies = (c["head"] == "mlp" and not c["form"]) or (c["head"] == "mtp" and odd)
        coarse = c["dtype"] == "bfloat16 target"
        given = {"config": ROOT / "tests/plain.yaml", "report_to": "none", "seed": self.number}
        given |= under("target", name_or_path=self.path, adapter=self.names[5:] and self.names[5])
        given |= under("target", dtype="bfloat16" if coarse else "float32")
        given |= under("data", sources=f"[{', '.join(self.sources)}]", seq_length=96, max_tokens=5000)
        given |= under("data.self_source", max_rows=256, batch_size=32, max_prompt_tokens=32, max_new_tokens=24)
        given |= under("speculator", architecture="dspark" if c["head"].startswith("dflash") else c["head"])
        given |= under("speculator", n_predict=c["n_predict"], draft_vocab_size=c["draft_vocab"])
        given |= under("speculator", options=json.dumps(options), initialise="target" if copies else "random")
        given |= under("loss", **journeys.LOSSES[c["loss"]])
        given |= under("eval", validation_rows=4, validation_prompts=1, tune_prompts=odd)
        given |= under("eval", prompt_tokens=16, max_prompts=1, max_new_tokens=8)
        # Rounding grows from step to step, and one process and two do not round alike.
        for stage, steps, epochs, rest in (("stage1", 20 if c["processes"] == 1 else 3, 1.5, 5), ("stage2", 8, 0.5, 3)):
            given |= under(stage, per_device_train_batch_size=c["batch"], gradient_accumulation_steps=c["accumulation"])
            given |= under(stage, optimizer=c["optimizer"], bf16=c["dtype"] == "bfloat16", keep_states=c["keep_states"])
            given |= under(stage, warmup_steps=1, logging_steps=1, eval_steps=rest, learning_rate=1e-2)
            given |= under(stage, **({"max_steps": steps} if c["length"] == "steps" else {"epochs": epochs}))
        if c["stages"] == 1:
            given |= under("stage2", epochs=None, max_steps=0)
        given |= under("stage2.generate", max_rows=40, prompt_tokens=16, max_new_tokens=16, batch_size=4)
        # Adaptive drafts follow timings, and in bfloat16 the text depends on the draft by rounding.
        given |= under("stage2.generate", num_speculative_tokens=2 if coarse or self.number % 3 else 0) | changes
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
        return [str(word) for name, value in words.items() if value not in (None, []) for word in (f"--{name}", value)]

    # --- the journeys

    def with_a_head(self) -> None:
        start, run, flags = self.cell["start"], self.out / "run", self.flags()
        if start in ("head", "export"):
            flags = self.from_another_head()
        for look in ["--plan", "--dry_run"][: 1 + (self.number % 6 == 0)]:
            self.ok("train", *flags, "--output_dir", run, look)
            self.check(not run.exists(), f"{look} made the run's folder")
        if start in KILLS:
            self.train(flags, self.out / "calm", cache="cache-calm")
        for point in KILLS.get(start, ()):
            self.train(flags, run, point)
        if self.cell["processes"] == 2:
            self.on_two_processes(flags, run)
        self.ok("train", *flags, "--output_dir", run)
        if not self.check((run / "eval/report.json").exists(), "no report"):
            return
        for part in ("stage1/speculator", "stage2/speculator", "speculator"):
            self.check(start not in KILLS or apart(self.out / "calm" / part, run / part) == 0, f"resumed: other {part}")
        kept = start not in ("head", "export") or apart(self.out / "base", run, "stage1/speculator") <= 1e-5
        self.check(kept, "a run without a rate changes the head that it starts from")
        self.figures(run / "eval/report.json")
        self.check(not [*run.rglob("*.partial")], "a partial file is left")
        self.again(run, "train", *flags, "--output_dir", run)
        self.heads(run / "speculator", self.exports(run / "speculator"))
        self.data(["--speculator", run / "speculator"])

    def without_a_head(self) -> None:
        """Lookup and draft models draft for an encoder-decoder; all that makes or compares heads is refused."""
        head, left, target = self.out / "head", self.out / "none", self.target
        drafters = {"lookup": NgramDrafter(4), "draft model": DraftModelDrafter(target, target, Chain(3))}
        drafters["tree"] = DraftModelDrafter(target, target, Tree([2, 2], 3))
        model = AutoModelForSeq2SeqLM.from_pretrained(self.path, dtype=torch.float32)
        self.decode(model.eval(), drafters, custom=drafters["lookup"])
        small = ["--draft_model", self.path, "--num_speculative_tokens", 2]
        self.generate({"lookup": ["--ngram", "--batch_size", 3], "draft model": [*small, "--batch_size", 2]})
        for flags in (["--ngram"], small):
            done = self.ok("eval", "lossless", *self.names, *flags, *self.suite)
            self.check("\nLOSSLESS" in done.out, f"lossless {flags[0]}: {done.out}")
        tiny_head(vocab_size=300).save_pretrained(head)  # `eval` asks for one
        self.measure(head, *small)
        self.data([])
        rows = ["--target", self.path, "--sources", *self.sources, "--output", left]
        start = ["--target.name_or_path", self.path, "--data.sources", f"[{rows[3]}]", "--output_dir", left]
        for argv in (
            *(["train", *start, *look] for look in ([], ["--plan"], ["--dry_run"])),
            *(["export", "--speculator", each, "--format", "ibm", *rows[4:]] for each in (self.path, head)),
            ["eval", "gate", self.path, head, *self.names, *self.suite],
            ["data", "prepare", *rows, "--seq_length", 64],
            ["data", "generate", *rows[:3], "self", *rows[4:]],
        ):
            argv += ["--base_model", self.path] if "ibm" in argv else []
            self.refused(self.call(*argv), left)

    def from_another_head(self) -> list[str]:
        """Train the head to start from; return the flags of a run that starts from it and changes nothing."""
        start = self.out / "base/speculator"
        self.train(self.flags(**under("stage2", max_steps=0, epochs=None)), start.parent)
        formats = [name for name in self.formats(start) if name not in ("native", "gguf")]
        if self.cell["start"] == "export" and formats:
            self.export(start, formats[self.number % len(formats)], self.out / "start")
            start = self.out / "start"
        changes = under("stage1", learning_rate=1e-9) | under("stage2", learning_rate=1e-9)
        if self.number % 2:  # else its own flags again, but for the embedding that turned out to be the target's
            changes |= under("speculator", architecture=None, n_predict=None, draft_vocab_size=None, initialise=None)
            changes |= under("speculator", options="{}")
        flags = self.flags(**changes, **under("speculator", warm_start=start))
        return [word.replace('"own_embedding": true, ', "") for word in flags]

    def on_two_processes(self, flags: list[str], run: Path) -> None:
        """Train on two processes; compare with one process that makes twice the micro-batches."""
        one, twice = self.out / "one", {"gradient_accumulation_steps": 2 * self.cell["accumulation"]}
        self.train(self.flags(**under("stage1", **twice), **under("stage2", **twice)), one, cache="cache-one")
        self.patch.setenv("SPECULATOR_CACHE", str(self.out.parent / "cache-two"))
        forked.finish(forked.launch(2, "train.py", *flags, "--output_dir", str(run)))
        # Of few rows of stage 2 one process holds some out, where two hold none.
        most = apart(one, run, "stage1/speculator")
        # Muon turns rounding into steps of its rate: 1.9e-4 was seen. A process whose share is lost makes it 0.03.
        self.check(most <= 1e-3, f"stage 1 on two processes differs from one by {most}")
        texts = [rows_of(each / "generated") for each in (one, run) if (each / "generated/rows").exists()]
        self.check(texts[:1] == texts[1:], "two processes write otherwise")

    def formats(self, head: Path) -> list[str]:
        return re.findall(r"exports to\s+([\w-]+)", self.ok("inspect", head).out)

    def export(self, head: Path, name: str, folder: Path) -> SimpleNamespace:
        argv = ["export", "--speculator", head, "--format", name, "--output", folder]
        argv += ["--base_model", self.path] if self.path.suffix else []
        done, plain = self.call(*argv), self.out / "dequantised"
        if done.code == 2 and "speculator dequantise" in done.last:  # the layout has a matrix of the target
            if not plain.exists():
                self.ok("dequantise", "--target", self.path, "--output", plain, "--dtype", "float32")
            done = self.call(*argv[:-1], plain)
        return done

    def exports(self, head: Path) -> dict[str, Path]:
        """Export the head in each layout that `inspect` lists; each other one must be refused."""
        listed, made = self.formats(head), {}
        for name in FORMATS:
            done = self.export(head, name, folder := self.out / f"export-{name}")
            if name not in listed or (name == "gguf" and not self.path.suffix):
                self.refused(done, folder)
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
            same = report["settings"]["dtype"] == "float32" and row.get("identical_to_greedy")
            self.check(not same or same["identical"] == same["of"], f"{where}: {same} are transformers' greedy texts")

    def decode(self, model: Any, drafters: dict[str, Any], custom: Any) -> list[list[int]]:
        """Texts are equal with any draft, alone, in a batch and by transformers' `model`. Returns the prompts."""
        texts = [json.loads(line)["text"] for line in (self.inputs / "text.jsonl").read_text().splitlines()[:3]]
        prompts = [self.target.tokenizer(text)["input_ids"][:k] for text, k in zip(texts, (5, 23, 60), strict=True)]
        ends = {} if self.number % 2 else {"eos_token_ids": ()}

        def decoded(drafter: Any, sampling: Sampling, size: int = 3, **more: Any) -> list[list[int]]:
            """Decode `size` prompts at a time."""
            rows = [dataclasses.replace(sampling, seed=sampling.seed + i) for i in range(3)]
            more |= {"max_new_tokens": NEW, **ends}
            made = (
                generate(self.target, drafter, prompts[i : i + size], rows[i : i + size], **more)
                for i in range(0, 3, size)
            )
            return [text for each in made for text in each.tokens]

        samplings = (Sampling(), SAMPLED[self.number % 3 > 0])
        plain = [decoded(None, sampling, 1) for sampling in samplings]
        for who, drafter in ({"none": None} | drafters).items():
            for sampling, expected in zip(samplings, plain, strict=True):
                for how in ({}, {"max_batch_size": 2}, {"size": 1}):
                    same = decoded(drafter, sampling, **how) == expected
                    self.check(same, f"{who} at {sampling}, {how}: another text than plain decoding")
            for rule in drafter.rules if drafter else ():
                same = decoded(drafter, Sampling(), rule=rule) == plain[0]
                self.check(same, f"{who} by {rule}: another greedy text")

        model.generation_config.eos_token_id = None if ends else sorted(self.target.eos_token_ids)

        def theirs(size: int = 1, **more: Any) -> list[list[int]]:
            """Decode `size` prompts at a time with transformers."""
            skip, found = self.target.encoder and 1, []
            padded = functools.partial(pad_sequence, batch_first=True, padding_side="right" if skip else "left")
            for rows in (prompts[i : i + size] for i in range(0, 3, size)):
                ids, mask = (
                    padded([torch.tensor(x) for x in part]) for part in (rows, [[1] * len(row) for row in rows])
                )
                more |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
                made = model.generate(input_ids=ids, attention_mask=mask, **more)
                found += made[:, skip or ids.shape[1] :].tolist()
            return found

        drafted = {"custom_generate": speculative(custom)}
        for who, how in {"alone": {}, "drafted": drafted, "padded": {"size": 3, **drafted}, "later": {}}.items():
            found = zip(theirs(**how), plain[0], strict=True)
            same = all(row[: len(text)] == text and not any(row[len(text) :]) for row, text in found)
            self.check(same, f"transformers, {who}: another greedy text")
        return prompts

    def heads(self, folder: Path, exported: dict[str, Path]) -> None:
        """Texts don't depend on the head, exports draft what it does, and gate measures both."""
        n, number, target = self.cell["n_predict"], self.number, self.target
        head = load_head(folder, target)
        drafters = {
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
        if not self.stdlib and not self.path.suffix:
            model = Target.load(str(self.inputs / "qwen3"), dtype="float32")
            drafters["draft model"] = DraftModelDrafter(model, target, Chain(3))
        where = {"gguf_file": self.path.name} if self.path.suffix else {}
        model = AutoModelForCausalLM.from_pretrained(
            self.path.parent if where else self.path, dtype=torch.float32, **where
        )
        if self.names[5:]:
            model = PeftModel.from_pretrained(model, self.names[5]).merge_and_unload()
        prompts = self.decode(model.eval(), drafters, custom=folder)
        own = self.drafts(head, prompts)
        for name, each in exported.items():
            self.check(self.drafts(load_head(each, target), prompts) == own, f"the {name} export drafts otherwise")
        other = [*exported.values(), folder][number % max(1, len(exported))]
        chain = ["--speculator", other, "--num_speculative_tokens", n, "--batch_size", 2]
        self.generate({"adaptive": ["--speculator", folder, "--batch_size", 3], "export": chain})
        more = [[], ["--num_speculative_tokens", n], ["--rule", "rejection"], ["--as", "vllm"], ["--batch_size", 2]]
        report = self.measure(folder, *more[number % 5])
        self.ok("eval", "compare", report, report)
        self.refused(self.call("eval", "compare", folder.parent, report), self.out / "none")
        gate = self.call("eval", "gate", folder, other, *self.names, *self.suite, "--guard", self.suite[1])
        equal = gate.code in (0, 1) and re.search(r"; on \S.* \+0\.0% ", said := gate.out + gate.last)
        self.check(equal or "every answer has one token" in said, f"gate against its export: {said}")

    def drafts(self, head: Any, prompts: list[list[int]]) -> list[list]:
        """All drafts of a head, at temperature 0 and 1."""
        made, propose = [], HeadDrafter.propose

        def noted(*given: Any) -> Any:
            made.append((draft := propose(*given)).tokens.tolist())
            return draft

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadDrafter, "propose", noted)
            drafter = HeadDrafter(head, self.cell["n_predict"])
            for sampling in (Sampling(), SAMPLED[1]):
                generate(self.target, drafter, prompts, sampling, max_new_tokens=NEW)
        return made

    def generate(self, ways: dict[str, list]) -> None:
        """The files of `speculator generate` have the same texts with any draft."""
        shape = ["--prompts", self.inputs / "prompts.jsonl", "--temperature", self.number % 2, "--seed", 5]
        plain = None
        for way, flags in ({"plain": ["--batch_size", 1]} | ways).items():
            file = self.out / f"{way}.jsonl"
            if not self.ok("generate", *self.names, *flags, *shape, "--max_new_tokens", 20, "--output", file).code:
                texts = [json.loads(line)["tokens"] for line in file.read_text().splitlines()]
                self.check(
                    texts == (plain := plain or texts), f"generate: {way} gives another text than plain decoding"
                )

    def measure(self, head: Path, *more: Any) -> Path:
        report = self.out / "report"
        if not self.ok("eval", *self.names, "--speculator", head, *self.suite, *more, "--output", report).code:
            self.figures(report / "report.json")
        return report

    def data(self, drafted: list) -> None:
        """`data generate` writes the same rows with any draft, and counts them; a second run writes none."""
        own, rows = self.sources == ["self"], []
        sizes = ["--max_rows", 48 if own else 6, "--max_prompt_tokens" if own else "--prompt_tokens", 32 if own else 16]
        sizes += ["--max_new_tokens", 16, "--batch_size", 4, "--seed", 3, "--temperature", 0, 1]
        for number, flags in enumerate((drafted, [])):
            folder = self.out / f"data-{number}"
            argv = ["data", "generate", *self.names, *flags, "--sources", *self.sources, *sizes, "--output", folder]
            if self.ok(*argv).code:
                return
            self.again(folder, *argv)
            rows.append(rows_of(folder))
            facts, tokens = (
                json.loads((folder / "manifest.json").read_text()),
                sum(sum(row["loss_mask"]) for row in rows[-1]),
            )
            self.check(facts["tokens"] == tokens, f"the manifest says {facts['tokens']} tokens of {tokens}")
            if not self.target.encoder:
                self.ok("data", "view", folder, "--target", self.path, "--rows", 2)
        self.check(rows[0] == rows[1], "data generate writes other rows with a draft")


def under(section: str, **values: Any) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in values.items()}


def rows_of(folder: Path) -> list[dict]:
    return load_from_disk(str(folder / "rows")).to_list()


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def apart(a: Path, b: Path, part: str = ".") -> float:
    """The largest difference of two heads' weights; 0 if there is no head, infinity if one is missing."""
    first, second = (load_file(each / part / "model.safetensors") if (each / part).exists() else {} for each in (a, b))
    if first.keys() != second.keys():
        return math.inf
    return max(((first[name].double() - second[name].double()).abs().max().item() for name in first), default=0)
