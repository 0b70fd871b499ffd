"""`speculator serve`: a server with OpenAI's API."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speculator.checkpoints.files import read_config
from speculator.cli import model_flags
from speculator.decoding.drafter import Drafter
from speculator.decoding.engine import Engine
from speculator.device import dtype_name
from speculator.drafters.ngram import MEMORY
from speculator.errors import UserError, read_secret, refuse, refuse_below
from speculator.files import check_output_folder
from speculator.kernels.linear import bfloat16_pays
from speculator.tables import gigabytes
from speculator.target.fingerprint import similar_target
from speculator.target.model import Target
from speculator.terminal import log
from speculator.workshop import is_installed

KEY_VARIABLE = "SPECULATOR_API_KEY"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_RECORD_SHARE, _RECORD_MAX = 0.1, 10.0  # GB
_SWITCH_SECONDS = 0.001  # longest wait of the engine's thread for the interpreter, which the event loop shares


def run(arguments: argparse.Namespace) -> None:
    """Load the models, then serve until SIGTERM or Ctrl-C; requests in flight are answered before the exit."""
    key = _check(arguments)
    listening = _bind(arguments.host, arguments.port)  # before the target is loaded: a taken port is an error at once
    leave_a_core()
    started = time.monotonic()
    log(f"loading {arguments.target}")
    target = model_flags.load_target(arguments)
    slots = arguments.max_num_seqs
    if most := arguments.max_model_len:
        context = target.context_length
        refuse((most > context, f"--max_model_len: the context of {target.name} is {context} tokens"))
        target.limit(most)
    # A fixed n-gram draft may search other requests only if the text does not depend on the draft.
    memory = 0 if arguments.ngram and not model_flags.coupled(arguments) else MEMORY
    make_drafter = partial(model_flags.drafter, target=target, temperatures=[0.0, 1.0], batch_size=slots, memory=memory)

    import uvicorn  # an optional dependency

    from speculator.server.app import create_app
    from speculator.server.recorder import Recorder
    from speculator.server.worker import Worker

    recorder = None
    if arguments.record:
        recorder = Recorder(arguments.record, target, arguments.record_share, 1e9 * arguments.record_max)
    worker = Worker(
        partial(Engine, target, slots=slots, rule=arguments.rule), make_drafter(arguments), arguments.speculator
    )
    with _port_errors(arguments.host, arguments.port):  # another server may have begun to listen meanwhile
        listening.listen()  # no client and no probe waits for the models
    load = partial(_load, arguments, target, make_drafter) if arguments.allow_load else None
    host, port = listening.getsockname()[:2]
    loopback = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    app = create_app(
        target,
        worker,
        name=arguments.served_model_name or arguments.target,
        api_key=key,
        max_queue=arguments.queue,
        recorder=recorder,
        load_drafter=load,
        allowed_origins=arguments.allowed_origins,
        hosts=(host, "127.0.0.1", "::1", "localhost") if loopback and not key else (),
    )
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    took = f"ready after {time.monotonic() - started:.0f} s"
    log(f"serving {arguments.target} at {url}, {took}: {_memory(target, slots)}")
    if not loopback and not key:
        print("warning: anyone who reaches this address can use the server: there is no --api_key", file=sys.stderr)
    if recorder:
        line = f"recording {arguments.record_share:.0%} of the requests to {arguments.record}"
        print(f"{line}, at most {arguments.record_max:g} GB; clients opt out with store: false", file=sys.stderr)
    sys.setswitchinterval(_SWITCH_SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn handles it, then raises it again
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_keep_alive=arguments.timeout_keep_alive,
        timeout_graceful_shutdown=arguments.timeout_graceful_shutdown,
    )
    server = uvicorn.Server(config)
    stop = server.handle_exit

    def handle_exit(number: int, frame: Any) -> None:
        server.force_exit = server.should_exit
        if not server.should_exit and worker.load:
            with suppress(OSError, ValueError, RuntimeError):  # nobody reads stderr, or it is being written to
                limit = f"for at most {arguments.timeout_graceful_shutdown} s"
                log(f"answering {worker.load} requests, {limit}; a second signal ends at once")
        stop(number, frame)

    server.handle_exit = handle_exit  # type: ignore[method-assign, assignment]
    server.run(sockets=[listening])


def _load(arguments: argparse.Namespace, target: Target, make_drafter: Callable[..., Any], folder: str) -> Drafter:
    """Create the drafter that the flags describe, but with the head in another folder."""
    trained_for = read_config(Path(folder)).get("base_model_fingerprint")
    if trained_for and not similar_target(trained_for, target.fingerprint):
        raise UserError(f"{folder} was trained for another target than {target.name}")
    return make_drafter(argparse.Namespace(**{**vars(arguments), "speculator": folder, "speculator_revision": None}))


def leave_a_core() -> None:
    """Reduce torch's threads by one, unless OMP_NUM_THREADS is set: they spin, so one on a shared core slows all."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _memory(target: Target, slots: int) -> str:
    """Return the KV cache's largest size in words, sources included, with a warning if the GPU may not hold it."""
    cache, longest = target.cache(1, 1), target.context_length
    size = slots * (cache.bytes_per_token * longest + cache.cross.bytes_per_token * target.room(0)[0])
    weights = sum(weight.nbytes for weight in target.model.parameters())
    line = f"weights of {gigabytes(weights)} GB in {dtype_name(target.dtype)}"
    if target.dtype == torch.float32 and target.device.type == "cpu" and bfloat16_pays():
        line += " (--dtype bfloat16 takes half)"
    line += f", {slots} slots of {longest:,} tokens, KV cache up to {gigabytes(size)} GB"
    if target.device.type == "cuda" and size > (free := torch.cuda.mem_get_info(target.device)[0]):
        line += f"; only {gigabytes(free)} GB are free: lower --max_model_len or --max_num_seqs"
    return line


def _check(arguments: argparse.Namespace) -> str:
    """Check the flags before a model is loaded; return the API key or ""."""
    missing = [name for name in _PACKAGES if not is_installed(name)]
    refuse((missing, f"serve needs {', '.join(missing)}: pip install {' '.join(missing)}"))
    refuse_below(arguments, max_num_seqs=1, queue=0, timeout_keep_alive=0, timeout_graceful_shutdown=0)
    refuse((not 0 <= arguments.port < 1 << 16, f"--port {arguments.port} is not in 0..65535"))  # else it wraps around
    refuse((arguments.max_model_len is not None and arguments.max_model_len < 2, "--max_model_len must be at least 2"))
    recording = arguments.record_share is not None or arguments.record_max is not None
    refuse((recording and not arguments.record, "--record_share and --record_max need --record"))
    arguments.record_share = _RECORD_SHARE if arguments.record_share is None else arguments.record_share
    arguments.record_max = _RECORD_MAX if arguments.record_max is None else arguments.record_max
    origin = next(
        (url for url in arguments.allowed_origins if not re.fullmatch(r"\*|null|[a-z+.-]+://[^/]+", url)), None
    )
    refuse(
        (origin, f"--allowed_origins {origin}: name an origin as browsers do, such as http://localhost:3000"),
        (not 0 < arguments.record_share <= 1, f"--record_share {arguments.record_share:g} is not in (0, 1]"),
        (not arguments.record_max > 0, f"--record_max {arguments.record_max:g} is not above 0"),
    )
    if arguments.record:
        check_output_folder("--record", arguments.record)
    model_flags.check(arguments)
    key = read_secret(KEY_VARIABLE, "--api_key", arguments.api_key)
    refuse((arguments.allow_load and not key, "--allow_load needs --api_key: whoever has it can load heads"))
    return key


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet; port 0 takes a free one."""
    with _port_errors(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    return bound


@contextmanager
def _port_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"can't listen on --host {host} --port {port}: {reason}") from None
