"""User errors, shown as one line without a traceback, and the frame of every command."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to do."""


REMOVED = {
    "rejected_token_weight": "weighting tokens after rejected drafts made heads worse with every seed",
    "min_confidence": "ending drafts by their confidence gained less than 3%",
    "hybrid": "one tree of a head's draft and a lookup path was slower than lookup alone",
    "lstm": "an LSTM head accepted as much as an MLP head and cost more",
    "early_exit": "drafting with the target's first layers was slower than plain decoding",
}
"""Names of flags and settings that are gone, and why. docs/results.md has the figures."""


def removed(name: str) -> str | None:
    """Return the message for a flag or setting, such as "stage2.min_p", that is gone; None for any other."""
    why = REMOVED.get(re.split(r"[-. ]", name)[-1])
    return why and f"{name} is gone: {why} (docs/results.md, measured and left out)"


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that prints one-line errors, and rejects abbreviated flags and empty paths."""

    def __init__(self, *positional: Any, **settings: Any):
        super().__init__(*positional, **{"allow_abbrev": False, **settings})

    def print_help(self, file: Any = None) -> None:
        """Print the help; one that can't be written is an error, which argparse ignores or shows as a traceback."""
        if code := run_command(self.prog, lambda: print(self.format_help(), end="", file=file)):
            self.exit(code)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if arg_string == "" and action.type is Path:  # otherwise the current folder
            self.error(f"{(action.option_strings or [action.dest])[0]} is empty")
        return super()._get_value(action, arg_string)  # type: ignore[misc]

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            if gone := removed(unknown[1]):
                self.fail(gone)
            if near := get_close_matches(unknown[1], self._option_string_actions, n=1):
                self.fail(f"{message}: did you mean {near[0]}?")
        self.fail(f"{message} (--help explains)")

    def fail(self, message: str) -> NoReturn:
        """Print the message as one line on stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: {printable(' '.join(message.split()))}\n")


def refuse(*faults: tuple[Any, str]) -> None:
    """Raise a UserError with the message of the first true condition, given pairs (condition, message)."""
    for wrong, message in faults:
        if wrong:
            raise UserError(message)


def refuse_below(arguments: argparse.Namespace, **least: int) -> None:
    """Raise a UserError for the first flag whose number is below its minimum; `least` maps names to minima."""
    refuse(*((getattr(arguments, name) < n, f"--{name} must be at least {n}") for name, n in least.items()))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Return a text with control characters escaped, except tab and line end: they could steer a terminal."""
    harmless = (c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in text)
    return "".join(c if so else c.encode("unicode_escape").decode() for c, so in zip(text, harmless, strict=True))


def show(text: str) -> None:
    print(safe(text), flush=True)


def safe(text: str) -> str:
    """Return the text to write to stdout: escaped by `printable` on a terminal, unchanged in a file or pipe."""
    return printable(text) if sys.stdout.isatty() else text


def as_text(typed: str) -> str:
    """Return an argument or a line of stdin as text: in the POSIX locale Python leaves its UTF-8 as surrogates."""
    with suppress(UnicodeError):
        return os.fsencode(typed).decode()
    return typed


def check_text(where: str, text: str) -> None:
    """Raise a UserError that begins with `where` for an unpaired surrogate: JSON can hold one, tokenizers reject it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start + 1} is an unpaired surrogate, which is not text") from None


def start() -> None:
    """Prepare a process before slow imports: Ctrl-C exits with 130; output escapes what it can't encode."""
    # A closed stream, as by `>&-`, is None: what is printed there goes nowhere.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home folder that it can't write to
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: Any) -> None:
    os._exit(130)


def check_secret(where: str, secret: str) -> None:
    """Raise a UserError for a key that no HTTP header can contain: libraries would print it in their errors."""
    if not re.fullmatch(r"[!-~]*", secret):
        raise UserError(f"{where} contains a space, a line end or another character that a key can't contain")


def read_secret(variable: str, flag: str = "", given: str | None = None) -> str:
    """Return the API key that a flag has `given`, or else that of an environment variable; "" without either.

    Raises a UserError for an empty key: a variable that was to be filled in would open a server to everyone.
    """
    where, secret = (f"${variable}", os.environ.get(variable)) if given is None else (flag, given)
    if secret is None:
        return ""
    refuse((not secret.strip(), f"{where} is empty: give a key, or leave it out"))
    check_secret(where, secret.strip())
    return secret.strip()


def hide(text: str, *secrets: str) -> str:
    """Return a text with all secrets of four characters or more replaced by ***."""
    for secret in secrets:
        if len(secret) >= 4:  # a shorter one would occur in other words
            text = text.replace(secret, "***")
    return text


def run_command(name: str, work: Callable[[], int | None]) -> int:
    """Run the command `work` and return its exit code: the one that it returns, or 0 for None.

    User errors, unreadable or unwritable files, and full memory or disks print one line on stderr, which begins
    with `name`, and return 2. Ctrl-C and a closed pipe return 130 and 141, as in a shell, and print nothing. Any other
    exception is a defect and is raised.
    """
    started = signal.getsignal(signal.SIGINT) is _leave
    if started:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if started:
            _leave()  # does not wait for the threads of libraries
        return 130
    except BrokenPipeError:
        _print_nowhere()
        return 141
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        with suppress(OSError):
            print(f"{name}: {printable(' '.join(line.split()))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # its disk is full: Python would say so again at the end
            _print_nowhere()
        return 2
    finally:
        if started:
            signal.signal(signal.SIGINT, _leave)


def _print_nowhere() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def line_of(error: Exception) -> str | None:
    """Return the line for the user; None for a defect, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    full = os.strerror(errno.ENOSPC)
    if full in str(error) or (isinstance(error, OSError) and error.errno == errno.EDQUOT):  # also safetensors' errors
        return f"can't write: {full}"
    # torch has no class of its own for a CPU without memory.
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate memory" in str(error):
        # torch adds the memory of every process on the GPU, and advice about its allocator: a paragraph.
        return "out of memory: " + ". ".join(first_line(error).split(". ")[:3])
    return None
