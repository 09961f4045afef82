"""A thread that does what it is given, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Job", "Lane", "deliver"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something to be done in turn, and the future that waits for it, if one does."""

    run: Callable[[], None]
    future: Future[Any] | None = None

    def carry_out(self) -> None:
        """What breaks evo itself is told to whoever waits."""
        try:
            self.run()
        except BaseException as error:
            if self.future is not None:
                deliver(self.future, error)


class Lane:
    """While it does one thing, one more may wait."""

    def __init__(self, name: str) -> None:
        self._job: Job | None = None
        self._waiting: Job | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Waits until nothing else waits. Raises CancelledError when closed."""
        with self._changed:
            self._wait_for(lambda: self._waiting is None)
            self._waiting = job
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until all is done. Raises CancelledError when closed."""
        with self._changed:
            self._wait_for(lambda: self._waiting is None and self._job is None)

    def close(self) -> None:
        """Nothing more is begun."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    def _wait_for(self, state: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or state())
        if self._closed:
            raise CancelledError

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._job = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed or self._waiting is None:
                    return
                self._job, self._waiting = self._waiting, None
                self._changed.notify_all()
            self._job.carry_out()


def deliver(future: Future[Any], result: object) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        if isinstance(result, CancelledError):
            future.cancel()
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
