"""The process that workers are forked from. It imports what they need, once: that takes seconds, a fork none.

The server itself opens no device and starts no thread pool, so that its children may. It ends with its parent, and all
that is below it ends with it.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

__all__ = ["start_server", "worker_context"]

_IMPORTED = [
    "evo.executors._preload",  # first: from then on nothing is said on the terminal
    "evo.cli",
    "evo.executors._builders",
    "evo.executors._device_tasks",
    "evo.measure.harness",
]


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
