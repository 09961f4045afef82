"""The device process and its replacement. Whoever is given one finds it open, computing, and holding its data."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from threading import Lock

from evo.errors import DeviceError
from evo.executors import _device_tasks as tasks
from evo.executors._device_tasks import SetUp
from evo.executors._worker import Worker, WorkerDied, WorkerStalled

__all__ = ["Device"]

_OPEN_S = 180.0
_PROBE_S = 30.0
_SET_UP_S = 120.0
_ATTEMPTS = 2


class Device:
    """`start` makes a device process. `spares`: how many others to keep open after the first loss, where opening takes
    longer than a measurement: a broken candidate uses up two. Used by one thread; `close` and `kill` are for any."""

    def __init__(self, start: Callable[[], Worker], *, spares: int) -> None:
        self._start, self._spares = start, spares
        self._worker: Worker | None = None
        self._waiting: list[Worker] = []
        self._open = False
        self._ready: set[SetUp] = set()
        self.timed: set[SetUp] = set()
        """For what the present process has data to time with: for its user to keep."""
        self._losses = 0
        self._closed = False
        self._lock = Lock()
        self._worker = self._begin()

    def ready(self, wanted: SetUp) -> Worker:
        """The device process, with the data of `wanted`. Raises DeviceError if the device does not answer, in a fresh
        process either; UsageError if the data do not fit it; CancelledError when closed."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._made_ready(wanted)
            except (WorkerDied, WorkerStalled, DeviceError) as error:
                self.lose()
                if self._closed:
                    raise CancelledError from None
                if attempt + 1 == _ATTEMPTS:
                    if isinstance(error, DeviceError):
                        raise
                    reason = f"its process {error}" if isinstance(error, WorkerDied) else "it gives no answer"
                    raise DeviceError(
                        f"the device cannot be used ({reason}), in a fresh process either, before any candidate ran in it;"
                        " what was found so far is kept: see that the device works, then resume"
                    ) from error
        raise AssertionError

    def lose(self) -> None:
        """Ends the present process; the next one asked for is another. Raises DeviceError if it cannot be ended."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            self._losses += 1
            worker.end()

    def renew(self) -> None:
        """Likewise, but nothing went wrong."""
        losses = self._losses
        self.lose()
        self._losses = losses

    def kill(self) -> None:
        """No process from now on; whoever waits for one sees it die."""
        with self._lock:
            self._closed = True
            processes = [w for w in (self._worker, *self._waiting) if w is not None]
        for worker in processes:
            worker.kill()

    def close(self) -> None:
        self.kill()
        for worker in (self._worker, *self._waiting):
            if worker is not None:
                worker.end()
        self._worker = None
        self._waiting.clear()

    def _made_ready(self, wanted: SetUp) -> Worker:
        if self._worker is not None and not self._worker.alive:
            self.lose()  # between two candidates: neither is to blame
        worker = self._worker or self._replace()
        if not self._open:
            worker.collect(_OPEN_S)
            # A spare was opened before the candidate ran that broke its predecessor, and perhaps the device.
            worker.call(tasks.probe, limit_s=_PROBE_S)
            self._open = True
        if wanted not in self._ready:
            worker.memory_limit = 0
            worker.memory_limit = worker.call(tasks.set_up, wanted, limit_s=_SET_UP_S)
            self._ready.add(wanted)
        return worker

    def _replace(self) -> Worker:
        worker = None
        while worker is None and self._waiting:
            worker = self._waiting.pop(0)
            if not worker.alive:
                worker.end()
                worker = None
        worker = worker or self._begin()
        self._worker, self._open = worker, False
        self._ready.clear()
        self.timed.clear()
        while self._losses and len(self._waiting) < self._spares:
            self._waiting.append(self._begin())
        return worker

    def _begin(self) -> Worker:
        with self._lock:
            if self._closed:
                raise CancelledError
            worker = self._start()
        worker.post(tasks.open_and_probe)
        return worker
