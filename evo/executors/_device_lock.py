"""Who may use the device now: a process that times has it to itself, all others share it.

The lock is one on a file (flock). It belongs to the open file, which a worker and the command both hold. So it goes from
worker to worker without a word to the command, and it outlives the worker: one that was ended with it still has the
device until its context is gone, and the command gives it back then.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from evo.executors._worker import not_counted

__all__ = ["DeviceLock", "acquire", "adopt", "alone", "release"]


class DeviceLock:
    """One process's part in the lock. Made by the command, and handed to that process when it starts. All that lock out
    each other name the same file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def __reduce__(self) -> tuple[Callable[..., DeviceLock], tuple[Any, ...]]:
        """To a process that starts goes another descriptor of the same open file."""
        return _received, (reduction.DupFd(self._descriptor),)

    def acquire(self, *, alone: bool, wait: bool) -> bool:
        """Whether it has been acquired."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Whichever process has acquired it. Nothing happens if none has."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """When the process that it was for is gone."""
        self.release()
        os.close(self._descriptor)


def _received(descriptor: Any) -> DeviceLock:
    lock = DeviceLock.__new__(DeviceLock)
    lock._descriptor = descriptor.detach()
    return lock


_own: list[DeviceLock] = []


def adopt(lock: DeviceLock | None) -> None:
    """In a worker: its part. None where nobody else uses the device at the same time; what follows does nothing then."""
    _own[:] = [] if lock is None else [lock]


def acquire(*, alone: bool) -> None:
    """In a task: the device, to itself or beside others that do not want it to themselves. Limits of time count from
    here. A task that leaves its process unfit for another keeps it, and it is given back when the process is gone."""
    for lock in _own:
        if not lock.acquire(alone=alone, wait=False):
            with not_counted():
                lock.acquire(alone=alone, wait=True)


def release() -> None:
    for lock in _own:
        lock.release()


@contextmanager
def alone() -> Iterator[None]:
    """The device to itself, for as long as this lasts."""
    acquire(alone=True)
    try:
        yield
    finally:
        release()
