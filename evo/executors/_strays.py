"""Ends processes with everything that they started, wherever it has hidden.

Children leave their parent's process group (ninja's compilers do), or lose their parent. So the server that workers
are forked from takes in orphans (Linux), and what it has for children beside the workers is a stray.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver

import psutil

__all__ = ["STARTING", "end_descendants", "end_strays", "end_tree", "known_workers"]

STARTING = threading.Lock()
"""Held while a worker starts, or its end is taken note of: between the two it is in `known_workers`."""

known_workers: set[int] = set()

_ROUNDS = 50
_PAUSE_S = 0.01


def end_tree(pid: int) -> None:
    """Kills a worker, its process group and its descendants. They may still be ending when this returns."""
    below = _descendants(pid)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _kill(below)


def end_strays() -> None:
    """Kills what dead workers have left. Also what it starts meanwhile."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is None:
        return
    for _ in range(_ROUNDS):
        with STARTING:
            strays = [p for p in _children(server) if p.pid not in known_workers]
        if not strays:
            return
        for stray in strays:
            _kill([stray, *_descendants(stray.pid)])
        time.sleep(_PAUSE_S)


def end_descendants() -> None:
    """Kills all that this process has below it, and what that starts meanwhile."""
    for _ in range(_ROUNDS):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        below = _descendants(os.getpid())
        if not below:
            return
        _kill(below)
        time.sleep(_PAUSE_S)


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        found: list[psutil.Process] = psutil.Process(pid).children()
        return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]
    return []


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
