"""Where workers come from, and how they end with all that they started.

Workers are forked from a server that has imported what they need, once: that takes seconds, a fork milliseconds. The server
opens no device and starts no thread pool, so that its children may. It says nothing on the terminal, and nor do they.

A process tree is hard to end: children leave their parent's process group (ninja's compilers do), or lose their parent. So
the server takes in orphans (Linux), and what it has for children beside the workers is a stray. When the server ends,
because the command has ended however it did, everything below it ends too: even a stopped process, which could not see to
that itself. Each worker watches the command as well (`end_with_command`).
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil

from evo.executors._limits import SCRATCH, adopt_orphans, write_output_to

__all__ = [
    "STARTING",
    "end_strays",
    "end_tree",
    "end_with_children",
    "end_with_command",
    "known_workers",
    "leave_server",
    "start_server",
    "worker_context",
]

_IMPORTED = [
    "evo.executors._processes",  # first: from then on nothing is said on the terminal
    "evo.cli",
    "evo.executors.local",
    "evo.measure.harness",
]

STARTING = threading.Lock()
"""Held while a worker starts, or its end is taken note of: between the two it is in `known_workers`."""

known_workers: set[int] = set()

_ROUNDS = 50
_PAUSE_S = 0.01


# -- the server ---------------------------------------------------------------------------------------------------


def worker_context() -> BaseContext:
    """What workers are started by."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def start_server() -> None:
    """Starts it ahead of its first worker, so that it gets ready while the command reads its arguments.

    With SIGINT blocked, in it and in all its children: ^C on the terminal goes to every process there, and it is
    for the command alone to decide what becomes of its workers.
    """
    worker_context()
    resource_tracker.ensure_running()  # first, for it leaves SIGINT unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_server() -> None:
    """Done once, when the server imports this module."""
    server, command = os.getpid(), os.getppid()
    write_output_to(Path(os.devnull))
    # A baseline that PyTorch compiles is compiled in its own process: others would be taken for a candidate's.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")  # an orphan has ended
    adopt_orphans()

    def end() -> None:
        if os.getpid() == server:  # and not one of the workers, which have this function too
            _end_all(lambda: _children(server))
            for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{command}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)


def leave_server() -> None:
    """In a worker: closes what the standard library has every worker inherit. Workers would keep the server that they come
    from alive, when the command is gone; and nothing that a candidate writes to should reach another process."""
    for holder, name in (
        (forkserver._forkserver, "_forkserver_alive_fd"),
        (resource_tracker._resource_tracker, "_fd"),
    ):
        with suppress(AttributeError, TypeError, OSError):
            os.close(getattr(holder, name))
            setattr(holder, name, None)


# -- the parent watchdog ------------------------------------------------------------------------------------------


def end_with_command() -> None:
    """From now on this process ends when the command does. It gets a process group of its own, where ^C on the
    terminal reaches neither worker nor compiler: that would look like failures of the candidates they are at."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="evo-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        end_with_children()


def end_with_children() -> None:
    _kill(_descendants(os.getpid()))
    os._exit(1)


# -- the process tree ---------------------------------------------------------------------------------------------


def end_tree(pid: int) -> None:
    """Kills a worker, its process group and its descendants. They may still be ending when this returns."""
    below = _descendants(pid)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    _kill(below)


def end_strays() -> None:
    """Kills what dead workers have left."""
    server: Any = getattr(forkserver._forkserver, "_forkserver_pid", None)

    def find() -> list[psutil.Process]:
        with STARTING:
            return [p for p in _children(server) if p.pid not in known_workers]

    if server is not None:
        _end_all(find)


def _end_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kills what is found and all below it, and what that starts meanwhile."""
    for _ in range(_ROUNDS):
        found = find()
        if not found:
            return
        for process in found:
            _kill([process, *_descendants(process.pid)])
        time.sleep(_PAUSE_S)


def _children(pid: int) -> list[psutil.Process]:
    found = []
    for process in _descendants(pid, recursive=False):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    with suppress(psutil.Error):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=recursive)
        return found
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _become_server()
