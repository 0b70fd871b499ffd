"""What a user can do something about: shown as one line, without a traceback."""

from __future__ import annotations

import argparse
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import Any, NoReturn


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to do."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")


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


def check_text(where: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and a shell can pass on, but no tokenizer takes.

    Raises:
        UserError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start + 1} is half of a surrogate pair, so not text") from None


def run_command(name: str, work: Callable[[], int | None]) -> int:
    """Run a command; gives its exit code: what the work says, or 0.

    One line on stderr and 2 for a UserError, and for a file that can't be read or written. Ctrl-C and a reader that has
    gone, `head` for one, are 130 and 141, as a shell has them, without a word.
    """
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{name}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has no reader
        return 141
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
