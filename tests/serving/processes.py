"""Processes that do not outlive the tests."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def process_group(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A process and its children, which are killed at the end, and also when the tests themselves are killed."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    # The pipe closes when this process ends, however it ends.
    watch = ["sh", "-c", 'read -r end; kill -s KILL -- "-$0" 2> /dev/null', str(process.pid)]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(20)
    process.wait()
