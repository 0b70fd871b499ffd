"""What a user can do something about: shown as one line, without a traceback."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to do."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, and that takes flags by their whole names only."""

    def __init__(self, *positional: Any, **settings: Any):
        super().__init__(*positional, **{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if "\0" in word:
                self.error(f"{word!r}: no text or path, there is a NUL in it")
        return super().parse_known_args(words, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # An empty name would be taken for no name, an empty path for the current folder.
        name = (action.option_strings or [action.dest])[0]
        named = action.type in (None, Path) and action.nargs != argparse.PARSER
        if not arg_string and named and action.dest != "prompt":
            self.error(f"{name} is empty")
        value = super()._get_value(action, arg_string)  # type: ignore[misc]
        if isinstance(value, int) and not abs(value) < 2**62:
            self.error(f"{name} must be below 2**62 in size")
        return value

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(' '.join(message.split()))} (--help explains)\n")


def refuse(*faults: tuple[Any, str]) -> None:
    """Raise the message of the first that is so.

    Raises:
        UserError: one of them is.
    """
    for wrong, message in faults:
        if wrong:
            raise UserError(message)


def refuse_below(arguments: argparse.Namespace, **least: int) -> None:
    """Raise for the first of these counts that is too small.

    Raises:
        UserError: one of them is.
    """
    refuse(*((getattr(arguments, name) < n, f"--{name} must be at least {n}") for name, n in least.items()))


def first_line(error: Exception) -> str:
    """What an error says in its first line, or what it is called."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Text that is safe on a terminal: control characters but tab and line end as their escapes, such as \\x1b."""
    harmless = (c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in text)
    return "".join(c if so else c.encode("unicode_escape").decode() for c, so in zip(text, harmless, strict=True))


def safe(text: str) -> str:
    """What stdout gets of a text: on a terminal nothing that would steer it, in a file or pipe the text as it is."""
    return printable(text) if sys.stdout.isatty() else text


def show(text: str) -> None:
    """Print on stdout what is `safe`."""
    print(safe(text), flush=True)


def check_text(where: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and a shell can pass on, but no tokenizer takes.

    Raises:
        UserError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start + 1} is half of a surrogate pair, so not text") from None


def start() -> None:
    """Prepare a process for a command, before its imports, which take seconds.

    Until `run_command` and after it Ctrl-C ends the process at once with 130. A standard stream that is closed becomes
    /dev/null, else the next file to be opened would take its place; characters that one can't encode are escaped.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: Any) -> None:
    os._exit(130)


def check_secret(where: str, secret: str) -> None:
    """Refuse a key that no header can hold: libraries would show it when they complain.

    Raises:
        UserError: it has a line end, space or other such character.
    """
    refuse(
        (
            not re.fullmatch(r"[!-~]*", secret),
            f"{where} has a line end, a space or another character in it that no key has: set it anew",
        )
    )


def hide(text: str, *secrets: str) -> str:
    """A text without these, to be shown."""
    for secret in secrets:
        if len(secret) >= 4:  # a shorter one would take other words with it
            text = text.replace(secret, "***")
    return text


def run_command(name: str, work: Callable[[], int | None]) -> int:
    """Run a command; gives its exit code: what the work says, or 0.

    One line on stderr and 2 for a UserError, for a file that can't be read or written, and where memory or disk are
    full. Ctrl-C and a reader that has gone, `head` for one, are 130 and 141, as a shell has them, without a word.
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
            _leave()  # what was under way has cleaned up; the libraries' threads need not be waited for
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has no reader
        return 141
    except Exception as error:
        line = _line(error)
        if line is None:
            raise
        with suppress(OSError):
            print(f"{name}: {printable(' '.join(line.split()))}", file=sys.stderr)
        return 2
    finally:
        if started:
            signal.signal(signal.SIGINT, _leave)


def _line(error: Exception) -> str | None:
    """What to tell the user of an error; None for a defect."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"can't write: {error.strerror}"
    # What torch raises on a CPU has no class of its own.
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate memory" in str(error):
        return f"out of memory: {first_line(error)}"
    return None
