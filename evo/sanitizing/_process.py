"""A sanitized process: started in a group of its own, and ended whole when its time is over."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WORKER", "Ended", "run_process", "with_source_lines"]

WORKER = (sys.executable, "-P", str(Path(__file__).with_name("_worker.py")))
"""The child's command, short of its arguments."""


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
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        code = None
    finally:
        _end(process)
    words = [*(f"{name}={value}" for name, value in environment.items()), *command]
    return Ended(command=shlex.join(words), code=code, output=output, seconds=time.perf_counter() - started)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def with_source_lines(message: str, source: str) -> str:
    """The message with the text of the first line of the candidate's source that it points to."""
    found = re.search(r"candidate\.(?:cpp|cu):(\d+)", message)
    lines = source.splitlines()
    number = int(found.group(1)) if found else 0
    return f"{message} | {lines[number - 1].strip()}" if 0 < number <= len(lines) else message
