"""`python -m speculator serve`: OpenAI's interface over the engine."""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import torch

from speculator.cli import drafting
from speculator.decoding.engine import Engine
from speculator.drafters import HeadDrafter
from speculator.drafters.ngram import MEMORY
from speculator.drafters.tuned import automatic
from speculator.errors import OneLineParser, UserError, check_secret, refuse, refuse_below
from speculator.tables import gigabytes
from speculator.target.model import Target

HELP = "answer requests of OpenAI's interface"
KEY = "SPECULATOR_API_KEY"
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CONNECTIONS = 2048
_MOST_SECONDS = 1_000_000
_GROWING = 5 / 3  # a cache that grows by half holds what it was and what it becomes
_SWITCH_SECONDS = 0.001  # the engine's thread waits so long at most for the interpreter, beside the event loop's


def add_flags(parser: OneLineParser) -> None:
    """The command's flags."""
    drafting.add_target_flags(parser)

    drafting.add_flags(parser)

    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: 127.0.0.1, this machine")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    parser.add_argument("--max_batch_size", type=int, default=8, help="requests decoded at a time; default: 8")
    parser.add_argument("--max_model_len", type=int, help="tokens of a prompt and its answer; default: the context")
    parser.add_argument("--queue", type=int, default=256, help="requests that may wait for a slot; default: 256")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds from a request to the end of its answer; default: 600"
    )
    parser.add_argument("--api_key", help=f"ask for this key under /v1; default: ${KEY}, else none")


def leave_a_core() -> None:
    """Let torch compute with a thread less, unless OMP_NUM_THREADS says how many.

    Its threads wait for each other by spinning, so one whose core also has the connections to serve holds up all.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def run(arguments: argparse.Namespace) -> None:
    """Load, listen, answer until SIGTERM or Ctrl-C, and then what is in flight."""
    key = _check(arguments)
    listening = _bind(arguments.host, arguments.port)
    leave_a_core()
    target = drafting.load_target(arguments)
    most, context = arguments.max_model_len or target.context_length, target.context_length
    refuse((most > context, f"--max_model_len {most}: the context of {arguments.target} is {context}"))
    target.context_length = most
    drafter = drafting.drafter(arguments, target, memory=MEMORY if arguments.ngram and drafting.walks(arguments) else 0)
    if isinstance(drafter, HeadDrafter) and not drafting.shaped(arguments):
        folder, rows = arguments.speculator, arguments.max_batch_size
        drafter = automatic(folder, target, drafter.head, [0.0, 1.0], rows, MEMORY) or drafter
    make = partial(Engine, target, drafter, slots=arguments.max_batch_size, rule=arguments.rule)

    import uvicorn  # an optional dependency

    from speculator.server.app import create_app
    from speculator.server.guard import Limits, cut_slow_readers
    from speculator.server.worker import Worker

    limits = Limits(queue=arguments.queue, seconds=arguments.timeout)
    app = create_app(target, Worker(make), name=arguments.target, api_key=key, limits=limits)
    cut_slow_readers(listening, limits)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", http="h11", limit_concurrency=_CONNECTIONS
    )
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    print(f"{arguments.target} at {url}, {_memory(target, arguments.max_batch_size)}", file=sys.stderr)
    if arguments.host not in _LOOPBACK and not key:
        print(f"whoever reaches {arguments.host} may use it: there is no --api_key", file=sys.stderr)
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    _listen(listening)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn answers what is in flight, then raises it again
    uvicorn.Server(config).run(sockets=[listening])


def _memory(target: Target, slots: int) -> str:
    """What the KV cache may come to; on a GPU also from what length of texts on it might not fit."""
    cache, longest = target.cache(1, 1), target.context_length
    each = slots * sum(stack.numel() * stack.element_size() for stack in cache.stacks.values()) / cache.capacity
    line = f"KV cache: up to {gigabytes(each * longest)} GB, {slots} slots of {longest:,} tokens"
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else math.inf
    if each * longest * _GROWING > free:
        line += f"; memory may run out once a text has {int(free / each / _GROWING):,}: --max_model_len bounds it"
    return line


def _check(arguments: argparse.Namespace) -> str:
    """Refuse what can't be, before any model is loaded; gives the API key."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    refuse((missing, f"serve needs {', '.join(missing)}: pip install {' '.join(missing)}"))
    refuse_below(arguments, max_batch_size=1, queue=0)
    refuse(
        (not 0 < arguments.timeout <= _MOST_SECONDS, f"--timeout {arguments.timeout:g} is not in 0..{_MOST_SECONDS}")
    )
    longest = arguments.max_model_len
    refuse((longest is not None and longest < 2, "--max_model_len must be at least 2"))
    refuse((arguments.max_batch_size > _CONNECTIONS, f"--max_batch_size: at most the {_CONNECTIONS} connections"))
    refuse((not 0 <= arguments.port < 1 << 16, f"--port {arguments.port} is not in 0..65535"))
    drafting.check(arguments)
    key = os.environ.get(KEY, "") if arguments.api_key is None else arguments.api_key
    check_secret(f"${KEY}" if arguments.api_key is None else "--api_key", key)
    return key


def _bind(host: str, port: int) -> socket.socket:
    """A socket there, that does not listen yet.

    Raises:
        UserError: there can be none.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"can't listen at --host {host} --port {port}: {reason}") from None
    return bound


def _listen(bound: socket.socket) -> None:
    """
    Raises:
        UserError: another was bound there as well, and was faster.
    """
    try:
        bound.listen(_CONNECTIONS)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise UserError(f"can't listen at --host {host} --port {port}: {error.strerror}") from None


def _raise_file_limit() -> None:
    """A connection is an open file, of which a process may often have 1,024 until it asks for more."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _CONNECTIONS
    with suppress(OSError, ValueError):
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard > 0 else wanted, hard))
