"""What to measure while a GPU is at hand: `make gpu`, or python -m benchmarks.gpu [--output runs/gpu] [--only PART]...

Every figure is a line of JSON, printed and added to results.jsonl as soon as it is known. The most telling parts come
first, a part that fails does not end the others, and all of them together stop after eight minutes. Type the command
again for the rest: finished parts of the same code, target, card and libraries are kept. Nothing is installed or
downloaded. A machine with torch, transformers, accelerate, pyarrow, pandas, psutil, scipy, xxhash, httpx, matplotlib
and pytest may lack these packages:

    all parts but tests, steps, variants, plain_step, prefill and long: datasets, dill, multiprocess
    serve: openai, fastapi, starlette, uvicorn, prometheus_client and what they need
    a target in a GGUF file: gguf

The 8B shape has random weights and stays in this process. Parts that need a process of their own (pytest, train.py, a
server) end with all of its descendants.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from speculator.device import dtype_name, hardware, resolve_device
from speculator.errors import OneLineParser, first_line, run_command
from speculator.files import make_folder

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
_CODE = ("speculator", "data", "eval", "train", "benchmarks")
_SECONDS = 480.0  # of all parts together
_LEAST = 15.0  # seconds; with less left, no part begins
_PRESET = "llama-3-8b"
_ROWS = (1, 8, 32, 128)
_CONTEXT = 448  # the steps after it read 512 positions, those after 512 tokens read more
_LONG = 7900
_BLOCKS = 6
_PROMPTS = ((1, 448), (1, 2048), (128, 448))  # rows and tokens of a prefill
_MICRO_BATCHES = 10
_NEW_TOKENS = 128
_CONFIGS = {name: f"configs/llama-3.1-8b-instruct{end}.yaml" for name, end in
            {"mlp": "", "eagle3": "-eagle3", "dspark": "-dspark"}.items()}  # fmt: skip
_TARGET, _HEAD = "HuggingFaceTB/SmolLM2-135M-Instruct", "examples/smollm2_135m_instruct"
_TESTS = ("tests/train/test_losses.py", "tests/speculator/target/test_model.py")
_TESTS += ("tests/speculator/heads/test_joint_attention.py", "tests/speculator/kernels/test_cuda_graphs.py")


class OutOfTime(BaseException):
    """Ends a part. Not an Exception, so that no code under measurement handles it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after some seconds."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"{seconds:.0f} s were over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Session:
    """What the parts share: the results file, the 8B target, and the model of `--target`."""

    def __init__(self, output: Path, model: str):
        self.output, self.model, self.began = output, model, time.monotonic()
        self.bytes_per_second = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, part: str, **figures: Any) -> None:
        """Print a line and keep it."""
        line = json.dumps({"part": part, "at": round(self.seconds), **figures})
        print(line, flush=True)
        with (self.output / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    def open(self) -> set[str]:
        """Write down where this runs, and return the parts that have finished there before."""
        file = self.output / "results.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        here, there = self._here(), None
        finished: set[str] = set()
        for line in lines:
            if line["part"] == "session":
                there = {name: line.get(name) for name in here}
                finished = finished if there == here else set()
            elif there == here and line.get("state") == "finished":
                finished.add(line["part"])
        commit = _output_of("git describe --always --dirty")
        self.say("session", **here, commit=commit, date=time.strftime("%Y-%m-%d"))
        return finished

    def _here(self) -> dict[str, Any]:
        import transformers

        # A copy of the tree may have no commit, so the code is known by its content.
        files = sorted(file for folder in _CODE for file in Path(folder).rglob("*.py"))
        code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"card": hardware(resolve_device()), "code": code, "target": self.model, **versions}

    @cached_property
    def target(self) -> Any:
        from benchmarks.shapes import random_target

        return random_target(_PRESET)

    @cached_property
    def head(self) -> Any:
        from benchmarks.shapes import PRESETS, random_head

        return random_head(self.target, PRESETS[_PRESET].head)

    def drop(self, *names: str) -> None:
        """Free models, and whatever the last part left on the device."""
        for name in names:
            vars(self).pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def child(self, name: str, words: Sequence[str]) -> Iterator[subprocess.Popen]:
        """Run a command inside the block, with its output in NAME.log; at the end, kill it and its descendants."""
        with (self.output / f"{name}.log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **_OFFLINE})
            try:
                yield process
            finally:
                kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and its descendants, also those that lead a session of their own."""
    import psutil

    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            root.suspend()  # it starts no others meanwhile
            for each in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    process.wait()


def _output_of(command: str) -> str:
    with suppress(OSError):
        return subprocess.run(shlex.split(command), capture_output=True, text=True).stdout.strip()
    return ""


# ---- the 8B shape


def machine(session: Session) -> None:
    """The card, and its limits: a large copy and a large product."""
    from benchmarks.shapes import bandwidth, matrix_rate

    query = "name,driver_version,clocks.sm,clocks.mem,power.draw"
    session.bytes_per_second = bandwidth()
    session.say(
        "machine",
        card=_output_of(f"nvidia-smi --query-gpu={query} --format=csv,noheader"),
        copy_gb_per_s=round(session.bytes_per_second / 1e9),
        matrix_tflops=round(matrix_rate() / 1e12, 1),
    )


def steps(session: Session) -> None:
    """A plain step over its bytes (goal: 1.35), and the cost of a draft and its verification at 1 to 128 rows."""
    measure_steps_of(session, "steps", _ROWS, _CONTEXT)


def long(session: Session) -> None:
    """The same after long texts, whose keys are not split among processors."""
    measure_steps_of(session, "long", _ROWS[:2], _LONG)


def measure_steps_of(session: Session, part: str, sizes: Sequence[int], context: int, **facts: Any) -> None:
    from benchmarks.step import measure_steps

    for rows in sizes:
        given = session.head, session.head.n_predict, rows, context, _BLOCKS, session.bytes_per_second
        found = measure_steps(session.target, *given)
        length, c, v = session.head.n_predict, found["draft_over_decode"], found["verify_over_decode"]
        session.say(
            part,
            **facts,
            rows=rows,
            context=context,
            plain_ms=round(1e3 * found["decode_seconds"], 3),
            over_bound=round(found["decode_over_bound"], 3),
            verify_ms=round(1e3 * found["verify_seconds"], 3),
            verify_over_bound=round(found["verify_over_bound"], 3),
            c=round(c, 4),
            v=round(v, 4),
            breakeven_acceptance_length=round(length * c + v, 3),
        )
        session.drop()


def recipe(name: str) -> Callable[[Session], None]:
    """Return the part for a recipe: MFU, tokens/s, memory against the plan, and the kernels that take most."""

    def part(session: Session) -> None:
        from benchmarks.recipe import measure
        from train.command_line import parse

        session.drop("head")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        config = parse(["--config", _CONFIGS[name]])
        found = measure(config, session.target, _MICRO_BATCHES)
        loop, peak = found.pop("loop"), found["peak_bytes"] or 0
        tokens = config.stage1.per_device_train_batch_size * config.data.seq_length
        session.say(
            name,
            seconds_per_micro_batch=round(tokens / found["tokens_per_second"], 3),
            tokens_per_second=round(found["tokens_per_second"]),
            mfu=found["mfu"] and float(f"{found['mfu']:.3g}"),
            step_over_target=round(found["step_over_target"], 2),
            peak_gb=round(peak / 1e9, 2),
            planned_gb=round(found["planned_bytes"] / 1e9, 2),
            document_attention=found["document_attention"],
        )
        batch = next(iter(loop.batches))
        kernels(session, name, lambda: loop.step([batch]))

    part.__doc__ = f"A micro-batch of {_CONFIGS[name]}: MFU (goal: 50%), memory against the plan, kernels."
    return part


def prefill(session: Session) -> None:
    """Seconds until prompts of several lengths are in the cache."""
    from speculator import Engine, Sampling
    from speculator.drafters.measure import clock

    for rows, length in _PROMPTS:
        times = []
        for seed in range(3):
            torch.manual_seed(seed)
            engine = Engine(session.target, None, slots=rows, capture=False)
            for prompt in torch.randint(session.target.vocab_size, (rows, length)).tolist():
                engine.submit(prompt, Sampling(), max_new_tokens=8, eos_token_ids=())
            with torch.inference_mode():
                engine.admit()

                def work(engine: Engine = engine) -> None:
                    while engine.scheduler.prefilling:
                        engine.prefill()

                times.append(clock(work)[0])
        seconds = min(times[1:])  # the first one warms up
        session.say("prefill", rows=rows, length=length, seconds=round(seconds, 4), rate=round(rows * length / seconds))
        del engine
        session.drop()


def plain_step(session: Session) -> None:
    """The kernels of a plain step of one row, run without a graph."""
    from speculator import Engine, Sampling

    engine = Engine(session.target, None, slots=1, capture=False)
    prompt = torch.randint(session.target.vocab_size, (_CONTEXT,)).tolist()
    engine.submit(prompt, Sampling(), max_new_tokens=60, eos_token_ids=())
    for _ in range(4):
        engine.step()
    with torch.inference_mode():
        batch = engine.schedule()
        assert batch is not None
        kernels(session, "plain_step", lambda: engine.decode_batch(batch))


def variants(session: Session) -> None:
    """Steps with fewer launches in the target's layers: compiled MLPs and rotation, then one product for q, k and v."""
    from benchmarks.variants import compiled, merged

    with ExitStack() as changes:
        for name, change in {"compiled": compiled, "compiled, merged": merged}.items():
            changes.enter_context(change(session.target.model))
            measure_steps_of(session, "variants", _ROWS[:3:2], _CONTEXT, variant=name)


def kernels(session: Session, part: str, work: Callable[[], Any]) -> None:
    """Write down the kernels of some work: their number and time, and those that take most."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in found.key_averages():
        if event.device_type == DeviceType.CUDA:
            times[event.key] += event.self_device_time_total / 1e3  # type: ignore[assignment]
            launches[event.key] += event.count
    session.say(part, kernels=sum(launches.values()), kernels_ms=round(sum(times.values()), 3))
    for name, ms in times.most_common(10):
        session.say(part, kernel=name[:110], ms=round(ms, 3), launches=launches[name])


# ---- a real model, tests, a resume, a server


def real(session: Session) -> None:
    """A real model and its head at 1 to 128 rows: tokens/s plain and drafted, and whether the texts are equal."""
    from eval.suites import load_suite
    from eval.timing import Timed, time_ours
    from speculator import HeadDrafter, Sampling, Target, load_head

    session.drop("target", "head")
    dtype = torch.bfloat16
    target = Target.load(session.model, dtype=dtype_name(dtype))
    head = load_head(_HEAD, target).to(dtype)
    limits = {"max_prompts": max(_ROWS), "max_new_tokens": _NEW_TOKENS}
    prompts = load_suite("python-sources", target, prompt_tokens=64, **limits).prompts
    lengths = sorted({min(length, head.n_predict) for length in (3, 5)})
    for rows in _ROWS:
        engines: dict = {}
        plain: list[list[int]] = []
        for length in (0, *lengths):
            drafter, timed = HeadDrafter(head, length) if length else None, Timed()
            for start in range(0, max(rows, min(8, 4 * rows)), rows):
                chosen = [prompts[i % len(prompts)] for i in range(start, start + rows)]
                time_ours(target, drafter, chosen, Sampling(), _NEW_TOKENS, timed, engines)
            plain = plain or timed.tokens
            same = sum(a == b for a, b in zip(plain, timed.tokens, strict=True))
            session.say(
                "real",
                model=session.model,
                rows=rows,
                num_speculative_tokens=length,
                tokens_per_second=round(timed.tokens_per_second, 1),
                accepted_per_step=round(sum(step.accepted for step in timed.steps) / max(1, len(timed.steps)), 3),
                identical_texts=f"{same} of {len(plain)}",
            )
        session.drop()


def tests(session: Session) -> None:
    """The tests that need a GPU."""
    flags = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words = [sys.executable, "-m", "pytest", *flags, *_TESTS]
    with session.child("tests", words) as process:
        code = process.wait()
    lines = (session.output / "tests.log").read_text().splitlines()
    session.say("tests", exit_code=code, says=lines[-1] if lines else "")


def resume(session: Session) -> None:
    """A killed run that goes on, against an undisturbed one: the largest difference between their weights."""
    for name, flags in {"resume-deterministic": ["--deterministic", "true"], "resume": []}.items():
        with TemporaryDirectory() as folder, ExitStack() as running:
            folders = [Path(folder, each) for each in ("whole", "killed")]
            whole, killed = (_training(each, flags) for each in folders)
            undisturbed = running.enter_context(session.child(name, whole))
            with session.child(f"{name}-killed", killed) as process:
                while process.poll() is None and not any((folders[1] / "stage1").glob("checkpoint-*[0-9]")):
                    time.sleep(0.1)
                facts: dict[str, Any] = {"deterministic": bool(flags), "killed": process.poll() is None}
            with session.child(f"{name}-resumed", killed) as process:
                facts["exit_codes"] = codes = [process.wait(), undisturbed.wait()]
            if not any(codes):
                facts["largest_difference"] = largest_difference(*folders)
        session.say("resume", **facts)


def _training(folder: Path, flags: list[str]) -> list[str]:
    """Return the command of a short run."""
    words = {
        "--target.name_or_path": "examples/stdlib_target",
        "--target.dtype": "bfloat16",
        "--speculator.architecture": "eagle3",
        "--speculator.n_predict": "3",
        "--speculator.options": "{aux_layers: [0, 1]}",
        "--data.sources": "[python-sources]",
        "--data.max_tokens": "300000",
        "--data.seq_length": "256",
        "--stage1.per_device_train_batch_size": "4",
        "--stage1.max_steps": "120",
        "--stage1.eval_steps": "40",
        "--stage1.bf16": "true",
        "--stage2.max_steps": "0",
        "--eval.validation_rows": "8",
        "--eval.validation_prompts": "2",
        "--eval.tune_prompts": "0",
        "--eval.max_prompts": "1",
        "--eval.max_new_tokens": "16",
        "--report_to": "none",
        "--output_dir": str(folder),
    }
    return [sys.executable, "train.py", *(word for pair in words.items() for word in pair), *flags]


def largest_difference(*folders: Path) -> float:
    """Return the largest difference between the weights of the heads of two runs."""
    from safetensors.torch import load_file

    files = (sorted((folder / "speculator").glob("*.safetensors")) for folder in folders)
    weights = [{name: x for file in each for name, x in load_file(file).items()} for each in files]
    return max(float((a[name].double() - b[name].double()).abs().max()) for a, b in pairwise(weights) for name in a)


def serve(session: Session) -> None:
    """The server under 8 and 128 clients."""
    import httpx

    session.drop("target", "head")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server, clients = _serving(session.model, session.output / "serving", port)
    with session.child("serve", server) as process:
        ready = False
        while not ready:
            if process.poll() is not None:
                raise RuntimeError(f"exit code {process.returncode}, see serve.log")
            time.sleep(0.5)
            with suppress(httpx.TransportError):
                ready = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
        with session.child("clients", clients) as measuring:
            if code := measuring.wait():
                raise RuntimeError(f"exit code {code}, see clients.log")
    for level in json.loads((session.output / "serving" / "served.json").read_text())["suites"]:
        session.say("serve", **{name: value for name, value in level.items() if name != "answers"})


def _serving(model: str, folder: Path, port: int) -> tuple[list[str], list[str]]:
    """Return the commands that start a server, and load it."""
    program = [sys.executable, "-m", "speculator"]
    words, head = ["--target", model, "--dtype", "bfloat16"], ["--speculator", _HEAD]
    suite = ["--suite", sysconfig.get_path("stdlib")]  # the held-out Python sources have fewer than 1,024 prompts
    load = ["--clients", "8", "128", "--max_prompts", "512", "--temperature", "0", "--output", str(folder)]
    server = ["--server", f"http://127.0.0.1:{port}", "--target", model]
    return (
        [*program, "serve", *words, *head, "--max_num_seqs", "128", "--port", str(port)],
        [*program, "eval", *server, *head, *suite, *load],
    )


# ---- all of them


@dataclass(frozen=True)
class Part:
    """A measurement, and the most seconds that it may take."""

    work: Callable[[Session], None]
    seconds: float


PARTS = {
    "steps": Part(steps, 90),
    "mlp": Part(recipe("mlp"), 75),
    "eagle3": Part(recipe("eagle3"), 75),
    "plain_step": Part(plain_step, 30),
    "prefill": Part(prefill, 45),
    "variants": Part(variants, 75),
    "real": Part(real, 90),
    "tests": Part(tests, 150),
    "long": Part(long, 60),
    "dspark": Part(recipe("dspark"), 75),
    "serve": Part(serve, 120),
    "resume": Part(resume, 150),
}
"""In the order of their value."""


def run(arguments: argparse.Namespace) -> None:
    """Run the parts that have not finished yet."""
    os.environ.update(_OFFLINE)  # before the imports that read them
    make_folder(arguments.output)
    session = Session(arguments.output, arguments.target)
    finished = session.open()
    attempt(session, "machine", Part(machine, 60))
    for name, part in PARTS.items():
        if name not in finished and name in (arguments.only or PARTS):
            attempt(session, name, part)


def attempt(session: Session, name: str, part: Part) -> None:
    """Run a part as far as time allows; whatever happens to it becomes a line."""
    left, began = _SECONDS - session.seconds, session.seconds
    if left < _LEAST:
        session.say(name, state="not begun: no time is left")
        return
    state = "finished"
    try:
        with at_most(min(left, part.seconds)):
            part.work(session)
    except (Exception, OutOfTime) as error:
        state = f"failed: {type(error).__name__}: {first_line(error)}"  # type: ignore[arg-type]
        with (session.output / "errors.txt").open("a") as file:
            file.write(f"== {name}\n{traceback.format_exc()}\n")
    session.drop()
    session.say(name, state=state, took=round(session.seconds - began, 1))


def main(argv: Sequence[str] | None = None) -> int:
    described = "\n".join(f"{name}: {part.work.__doc__}" for name, part in PARTS.items())
    shape = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="python -m benchmarks.gpu", description=__doc__, epilog=f"parts:\n{described}", formatter_class=shape
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of results.jsonl and logs")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only (repeatable)")
    parser.add_argument(
        "--target",
        default=_TARGET,
        help=f"the model of the head in {_HEAD}: a folder, a GGUF file, or a hub id in the cache (default: {_TARGET})",
    )
    arguments = parser.parse_args(argv)
    return run_command("gpu", lambda: run(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that children are ended
    sys.exit(main())
