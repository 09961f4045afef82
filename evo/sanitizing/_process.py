"""A sanitized process: started in a group of its own, and ended whole when its time is over."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["WORKER", "Ended", "run_process", "with_source_lines"]

WORKER = (sys.executable, "-P", str(Path(__file__).with_name("_worker.py")))
"""The child's command, short of its arguments."""

_MARK = "EVO_SANITIZED"
"""A variable of the environment by which all that a run has started is found again."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """`command`: as it could be typed. `code`: the exit code, negative for a signal; None if it was ended for being
    too slow."""

    command: str
    code: int | None
    output: str
    seconds: float


def run_process(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> Ended:
    """`environment` is added to this process's own. The output is that of stdout and stderr together."""
    started = time.perf_counter()
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as said:  # no pipe: what the candidate has left running may hold its end open
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, _MARK: mark},
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, mark)
        said.seek(0)
        output = said.read().decode(errors="replace")
    words = [*(f"{name}={value}" for name, value in environment.items()), *command]
    return Ended(command=shlex.join(words), code=code, output=output, seconds=time.perf_counter() - started)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """With all that it has started, also in sessions of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.environ().get(_MARK) == mark:
                other.kill()


def with_source_lines(message: str, source: str) -> str:
    """The message with the text of the first line of the candidate's source that it points to."""
    found = re.search(r"candidate\.(?:cpp|cu):(\d+)", message)
    lines = source.splitlines()
    number = int(found.group(1)) if found else 0
    return f"{message} | {lines[number - 1].strip()}" if 0 < number <= len(lines) else message
