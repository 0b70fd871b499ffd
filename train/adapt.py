"""`speculator adapt`: rounds of training on recorded answers, the gate, and the swap.

    OUTPUT/speculator             link to the head in use
    OUTPUT/rounds.html, .svg      page and plot of all rounds
    OUTPUT/cache/                 rows that the round prepared, deleted at its end, and the target's chats, which stay
    OUTPUT/round-001/traffic/     the recorded answers when the round began; deleted at its end
    OUTPUT/round-001/run/         run of train.py, without its head if that was rejected
    OUTPUT/round-001/exported/    old and new head for vLLM; deleted at its end
    OUTPUT/round-001/gate.json    figures of `speculator eval gate`
    OUTPUT/round-001/before.json  acceptance length in a vLLM server before the update
    OUTPUT/round-001/round.json   outcome of the round, written last

These files say how far a round is, so the same command resumes it after a kill.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import httpx
import torch

import speculator
from data.documents import digest_of
from data.mixture import SELF
from data.readers import ENOUGH_RECORDED, local_files, source_files
from speculator.__main__ import build_parser
from speculator.checkpoints import head_folder, layout_of, load_any
from speculator.checkpoints.files import read_config
from speculator.cli.serve import KEY_VARIABLE
from speculator.clients.connection import base_urls, shown
from speculator.clients.vllm_updates import VLLMServer
from speculator.drafters.tuning import TUNED
from speculator.errors import UserError, first_line, read_secret, refuse
from speculator.files import make_folder, new_folder, parse_rows, read_json, write_bytes, write_text
from speculator.report import Gate, Round, read_record, write_record
from speculator.terminal import log
from train.command_line import parse
from train.door.settle import settle
from train.finish import target_flags

_POLL_SECONDS = 5
_LOG_SECONDS = 30
"""Shortest time between two lines about the answers that have arrived."""
_LOAD_SECONDS = 600
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What a command of this one process must not inherit: it would wait for the others."""
_LEAST_ANSWERS = ENOUGH_RECORDED
"""Different answers below which too few are held out for the gate to accept anything."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator adapt`: resume the unfinished round, then begin others, up to `--rounds` in all or endlessly."""
    key = read_secret(KEY_VARIABLE, "--api_key", arguments.api_key)
    refuse(
        (arguments.every_tokens < 1, "--every_tokens must be at least 1"),
        (arguments.layout and not arguments.server, "--layout needs --server"),
    )
    arguments.speculator = head_folder(arguments.speculator, arguments.speculator_revision)
    read_config(arguments.speculator)
    # A typing error is found here, and not after hours of waiting and training.
    gate = build_parser("eval gate").parse_args(
        ["old", "new", "--target", "target", "--suite", "suite", *arguments.gate_flags]
    )
    if gate.guard and not gate.guard_head:  # else each accepted round may lose a little, and ten of them a lot
        arguments.gate_flags = ["--guard_head", str(arguments.speculator.resolve()), *arguments.gate_flags]
    if arguments.layout:  # a head that the layout can't store is refused here, and not after the first round
        start = load_any(arguments.speculator)
        layout = layout_of(arguments.layout, start)
        layout.fields_of(start)
        layout.adapt(start)
    refuse((not arguments.record.is_dir(), f"--record {arguments.record}: not a folder"))
    arguments.target = arguments.target or read_json(arguments.record / "manifest.json")["target"]
    refuse((" --" in arguments.target, f"{arguments.record} was recorded with {arguments.target}: give --target"))
    # So are settings that contradict the head.
    settle(parse(_training_flags(arguments, arguments.record, str(arguments.speculator))), processes=1, local_only=True)
    if torch.cuda.device_count():  # asks the driver: this process takes no memory on the GPU
        where = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
        log(f"rounds train on GPU {where}, in the memory that a server leaves; CUDA_VISIBLE_DEVICES names another GPU")
    make_folder(arguments.output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _alone(arguments.output) as lock:
        if arguments.layout:
            server = VLLMServer(arguments.server, key)
            server.counters()
            server.resume()
        elif arguments.server:
            _ask(arguments.server, key, {})
        first = str(arguments.speculator.resolve())
        rounds, head = _settle(arguments.output, first)
        last: Round | None = rounds[-1] if rounds else None
        if arguments.rounds is not None and len(rounds) >= arguments.rounds:
            log(f"{len(rounds)} rounds are done; --rounds {len(rounds) + 1} runs another")
        while arguments.rounds is None or len(rounds) < arguments.rounds:
            folder = arguments.output / f"round-{len(rounds) + 1:03d}"
            if not (folder / "traffic").exists():
                _wait(arguments, last)
                _copy_shards(arguments, folder / "traffic")
            last = _round(arguments, folder, head, key, lock)
            rounds, head = _settle(arguments.output, first)
            log(f"round {len(rounds)}: {last.gate.line}; {last.outcome}")


@contextmanager
def _alone(output: Path) -> Iterator[IO[str]]:
    """Lock the folder in the block and yield the lock file; raise a UserError if another run has locked it.

    The commands of a round inherit the file, so that the lock outlives a kill as long as they do.
    """
    with (output / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{output}: another adapt, or a command that a killed one started, is running") from None
        yield lock


def _settle(output: Path, first: str) -> tuple[list[Round], str]:
    """Delete what finished rounds no longer need, point OUTPUT/speculator to the head in use, and write the page.

    Returns the finished rounds, oldest first, and the folder of the head in use: `first` until a round replaces it.
    Raises a UserError, before any change, if the first round began with another head than `first`.
    """
    rounds, head = list[Round](), first
    for file in sorted(output.glob("round-*/round.json")):
        rounds.append(read_record(Round, file))
        refuse((rounds[0].old != first, f"{output} began with {rounds[0].old}; choose another --output for {first}"))
        head = rounds[-1].new if rounds[-1].outcome == "in use" else head
        made = ["traffic", "run/stage1", "run/generated", "run/stage2", "exported"]
        if rounds[-1].outcome == "rejected":  # others passed the gate, and may be of use
            made.append("run/speculator")
        for name in made:
            shutil.rmtree(file.parent / name, ignore_errors=True)
    if not (output / f"round-{len(rounds) + 1:03d}").exists():  # else its rows are in the cache too
        for path in (output / "cache").glob("*"):
            if not path.name.startswith(f"{SELF}-"):  # see `train.text.own_text.folder_of`
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    # By renaming, because a link can't be changed in place: a server that starts meanwhile sees the old or the new one.
    scratch = output / "speculator.partial"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(head)
    scratch.replace(output / "speculator")
    if rounds:
        write_page(output, rounds)
    return rounds, head


def _shards(record: Path) -> list[Path]:
    """Return the files of recorded answers in a folder, the oldest first (by name)."""
    names = (".jsonl", ".jsonl.gz")
    files = (file for file in source_files(record) if file.parent in (record, record / "rows"))
    return [file for file in files if file.name.lower().endswith(names)]


def _answer_tokens(shard: Path) -> int:
    """Return the number of tokens with loss in a file of rows; in chats it is estimated, at four characters a token."""
    return _answer_tokens_of_size(shard, shard.stat().st_size)  # a log grows


@cache
def _answer_tokens_of_size(shard: Path, size: int) -> int:
    """`_answer_tokens`, cached by file and size (bytes), so that a grown log is counted again."""
    count = 0
    for _, row, _ in parse_rows(shard):
        with suppress(AttributeError, TypeError):  # a bad row, which the training skips and reports
            answers = [each.get("content") for each in row.get("messages", ()) if each.get("role") == "assistant"]
            count += sum(row.get("loss_mask", ())) + len("".join(map(str, answers))) // 4
    return count


def _wait(arguments: argparse.Namespace, last: Round | None) -> None:
    """Wait for enough new answer tokens, or any after enough time, and for `_LEAST_ANSWERS` different answers.

    `last` is the round since which answers are new; None before the first.
    """
    hint = f"; --every_minutes 0 takes fewer, of at least {_LEAST_ANSWERS} answers" * (arguments.every_minutes is None)
    log(f"waiting for {arguments.every_tokens:,} new answer tokens in {arguments.record}{hint}")
    newest, read, since = "", 0, time.time()
    if last is not None:
        newest, read, since = last.newest, last.newest_tokens, last.finished
    different, few = set[bytes](), False
    said, again = 0, 0.0
    while True:
        count, begun = 0, time.monotonic()
        for shard in _shards(arguments.record):
            try:
                if len(different) < _LEAST_ANSWERS:
                    different.update(digest_of(row) for row in local_files(shard) if "fault" not in row)
                if shard.name < newest:  # names sort by age
                    continue
                count += _answer_tokens(shard)
                # The last round ended inside its newest file, which may have grown.
                count -= read if shard.name == newest else 0
            except (UserError, FileNotFoundError):
                if shard.exists():  # else the server has deleted it: the oldest go first
                    raise
        minutes = (time.time() - since) / 60
        late = arguments.every_minutes is not None and minutes >= arguments.every_minutes
        if count >= arguments.every_tokens or (count > 0 and late):
            if len(different) >= _LEAST_ANSWERS:
                return
            if not few:
                few = True
                log(f"waiting for {_LEAST_ANSWERS} different answers: with fewer, too few are held out to show a gain")
        if count != said and time.monotonic() >= again:
            said, again = count, time.monotonic() + _LOG_SECONDS
            log(f"{max(count, 0):,} of {arguments.every_tokens:,} new answer tokens")
        # A log that has grown is read whole, so reading takes at most a tenth of the time.
        time.sleep(max(_POLL_SECONDS, 9 * (time.monotonic() - begun)))


def _copy_shards(arguments: argparse.Namespace, output: Path) -> None:
    """Copy the recorded answers, which a round trains on, into a new folder `output`, which is a source of training.

    A server's shards become hard links if possible, since it deletes the oldest. Logs, which may grow, are copied.
    """
    with new_folder(output) as scratch:
        make_folder(scratch / "rows")
        write_text(scratch / "manifest.json", json.dumps({"recorded": True, "target": arguments.target}))
        for shard in _shards(arguments.record):
            with suppress(FileNotFoundError):  # the server deletes the oldest shards
                copy = scratch / "rows" / shard.name
                try:
                    (shutil.copyfile if shard.parent == arguments.record else os.link)(shard, copy)
                except OSError:  # a file system without links
                    shutil.copyfile(shard, copy)


def _training_flags(arguments: argparse.Namespace, traffic: Path, head: str) -> list[str]:
    sources = [f"{traffic}@1", *arguments.mix] if arguments.mix else [str(traffic)]
    flags = ["--config", str(arguments.config), "--target.name_or_path", arguments.target]
    return [*flags, "--speculator.warm_start", head, "--data.sources", json.dumps(sources)]


def _round(arguments: argparse.Namespace, folder: Path, old: str, key: str, lock: IO[str]) -> Round:
    """Train a new head, compare it with `old` by `eval gate`, and load it into the server if it is accepted.

    Returns the content of round.json: "outcome" is "in use", or why the new head isn't; "gate" has the figures of
    `eval gate`. `folder` is the round's, `old` that of the head in use. The commands inherit `lock`.
    """
    # Each step leaves a file or folder, and is skipped if that exists: a killed round resumes after its last step.
    traffic, trained, gate = folder / "traffic", folder / "run", folder / "gate.json"
    flags = _training_flags(arguments, traffic, old)
    new = str((trained / "speculator").resolve())
    training = ["-m", "speculator", "train", *flags, "--output_dir", trained]
    training += ["--overwrite_output_dir", "false"]  # a killed round resumes
    try:
        _call(training, lock, SPECULATOR_CACHE=str(arguments.output.resolve() / "cache"))
    except UserError:
        if not (trained / "config.yaml").exists():  # refused: the next try gets the newest answers
            shutil.rmtree(traffic)
        raise
    tuned, copied = Path(old) / TUNED, trained / "speculator" / TUNED
    if tuned.is_file() and not copied.exists():  # so that both heads draft in the same shapes, at the same costs
        write_bytes(copied, tuned.read_bytes())
    if not gate.exists():
        loading = target_flags(parse(flags).target)
        gating = ["-m", "speculator", "eval", "gate", old, new, *loading, "--suite", traffic]
        _call([*gating, "--output", gate, *arguments.gate_flags], lock, accepted=(0, 1))
    figures = read_record(Gate, gate)
    fault = None if figures.accepted else "rejected"
    if figures.accepted and arguments.layout:
        exports = [str((folder / "exported" / name).resolve()) for name in ("new", "old")]
        for head, output in zip((new, old), exports, strict=True):
            if not Path(output).exists():
                exporting = ["--speculator", head, "--format", arguments.layout, "--output", output]
                _call(["-m", "speculator", "export", *exporting], lock)
        fault = VLLMServer(arguments.server, key).try_head(exports[0], exports[1], folder / "before.json")
    elif figures.accepted and arguments.server:
        fault = _ask(arguments.server, key, {"path": new})
    shards = _shards(traffic)
    outcome = Round(
        old=old,
        new=new,
        answer_tokens=sum(map(_answer_tokens, shards)),
        newest=shards[-1].name,
        newest_tokens=_answer_tokens(shards[-1]),
        gate=figures,
        outcome=fault or "in use",
        finished=time.time(),
    )
    write_record(folder / "round.json", outcome)
    return outcome


def _call(argv: Sequence[Any], lock: IO[str], accepted: Sequence[int] = (0,), **variables: str) -> None:
    """Run `python *argv`, a command of this project that prints its own errors, with `variables` in its environment.

    The command inherits `lock`. Raises a UserError unless its exit code is `accepted`.
    """
    path = os.pathsep.join(filter(None, [str(Path(speculator.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment |= {"PYTHONPATH": path, **variables}
    process = subprocess.Popen([sys.executable, *map(str, argv)], env=environment, pass_fds=[lock.fileno()])
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # train.py saves a checkpoint
        process.wait()
        raise
    refuse((code not in accepted, f"{' '.join(map(str, argv[1:4]))} ended with exit code {code}"))


def _ask(server: str, key: str, body: dict[str, str]) -> str | None:
    """Ask the server to load a head; return None if it does, else the reason.

    `body` is {"path": folder of the head}; {} only checks the server. Raises a UserError if the server does not answer,
    rejects the API key, or can't load heads.
    """
    (url,), server = base_urls([server], "--server"), shown(server)
    try:
        answer = httpx.post(
            f"{url}/v1/speculator/load",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(10, read=_LOAD_SECONDS),
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"--server {server}: no answer: {first_line(error)}") from None
    refuse(
        (answer.status_code == 401, f"--server {server}: the API key is missing or wrong: give --api_key"),
        (answer.status_code in (404, 405), f"--server {server} can't load heads: start it with --allow_load"),
    )
    return None if answer.is_success else f"not loaded: {answer.text[:300]}"


def write_page(output: Path, rounds: Sequence[Round]) -> None:
    """Write rounds.html, a page about all rounds, and its plot rounds.svg into a folder."""
    from eval.page import fill_template  # imports matplotlib, for a second
    from eval.plots import plot_rounds

    lines = [("round", "finished", "answer tokens", "gate", "outcome")]
    for number, each in enumerate(rounds, start=1):
        finished = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(each.finished))
        lines.append((str(number), finished, f"{each.answer_tokens:,}", each.gate.line, each.outcome))
    plot_rounds(rounds, output / "rounds.svg")
    write_text(output / "rounds.html", fill_template("rounds.html", lines=lines))
