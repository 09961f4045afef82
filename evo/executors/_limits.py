"""What a worker may take: time, memory, files, the terminal. All but the first is called in the worker itself.

These limits hold accidents, not attackers: a candidate is code that runs as the user.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import statistics
import sys
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path

__all__ = [
    "SCRATCH",
    "AdaptiveTimeout",
    "SideEffectCheck",
    "adopt_orphans",
    "confine",
    "identity",
    "limit_data",
    "reap_child",
    "write_output_to",
]

SCRATCH = "evo-work-"
"""How folders for temporary files are called; the number of the command's process follows."""

_FILE_BYTES = 1 << 30
"""The largest file that a compiler may write, or a candidate on the CPU."""

_OOM_SCORE = 500
"""When memory runs out, the system ends a worker before the command and the user's own programs."""

_SET_CHILD_SUBREAPER = 36
_ANY_CHILD = 0x40000000
"""__WALL: also children that were not made by fork."""


_FACTOR = 20.0
"""A candidate that takes this many times the median of those that passed is not worth waiting for."""

_REMEMBERED = 64


class AdaptiveTimeout:
    """How long something may take: 20 times the median of what has passed, so that a hang costs little. Never less than
    `floor_s`, for the machine may be busy; `ceiling_s` at most, and before anything is known. Safe to use from several
    threads: a deque takes one more, and is copied, in one step."""

    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = floor_s, ceiling_s
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, seconds: float) -> None:
        """Of something that went well."""
        self._seconds.append(seconds)

    def limit_s(self) -> float:
        if not self._seconds:
            return self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, _FACTOR * statistics.median(list(self._seconds))))


def write_output_to(path: Path) -> None:
    """Points the standard output and error at a file, for this process and its children."""
    target = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)


def adopt_orphans() -> None:
    """Processes below this one whose parents are gone become its own children, not the system's (Linux)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def confine(scratch: Path, *, limit_files: bool) -> None:
    """For a worker and what it starts: temporary files lie in `scratch`, and are of limited size where that is asked for.
    Not in the driver's own process of a GPU."""
    _limit(resource.RLIMIT_CORE, 0)
    if limit_files:
        _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    # Python has this signal ignored, and compilers are not to inherit that it is not.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)  # what a killed worker leaves goes with the folder


def limit_data(further_bytes: int, *, times_held: int = 1) -> None:
    """Lets this process, and each of its children, have `further_bytes` beyond so many times what it holds now.

    Data, not address space: mapped libraries are gigabytes that nobody pays for. There is no limit where the system does not
    tell what a process holds (not Linux).
    """
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split(None, 1)[0]) << 10  # asked for, touched or not
        _limit(resource.RLIMIT_DATA, times_held * held + further_bytes)


def _limit(what: int, value: int) -> None:
    """Soft limits: the engine raises them again where it needs more."""
    hard = resource.getrlimit(what)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class SideEffectCheck:
    """What a candidate that runs in its process must leave as it found it: the standard descriptors and `pipe`, the working
    directory, and no processes. Made in the process that it watches."""

    def __init__(self, pipe: int) -> None:
        self._folder = Path.cwd().stat()
        self._files = {d: identity(d) for d in (0, 1, 2, pipe)}

    def found(self) -> str:
        """What was done that no computation does, in a few words; empty if nothing was. Ends no process."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if closed := [str(d) for d, file in self._files.items() if identity(d) != file]:
            return f"closed file descriptor {', '.join(closed)} of its process"
        try:
            moved = not os.path.samestat(Path.cwd().stat(), self._folder)
        except OSError:
            moved = True
        if moved:
            return "changed the working directory of its process"
        return "started another process" if reap_child() else ""


def identity(descriptor: int) -> tuple[int, int] | None:
    """Which file an open descriptor stands for; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def reap_child() -> bool:
    """Whether this process has a child, running or just ended; one that has ended is taken note of."""
    for options in (os.WNOHANG | _ANY_CHILD, os.WNOHANG):
        try:
            os.waitpid(-1, options)
            return True
        except ChildProcessError:
            return False
        except OSError:  # not Linux: without the first option
            continue
    return False
