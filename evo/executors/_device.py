"""A device process and its replacement. Whoever is given one finds it open, computing, and holding its data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from evo.errors import DeviceError
from evo.executors import _device_tasks as tasks
from evo.executors._device_tasks import SetUp
from evo.executors._worker import Worker, WorkerDied, WorkerStalled

__all__ = ["Device"]

_OPEN_S = 180.0
_PROBE_S = 30.0
_SET_UP_S = 600.0
_ATTEMPTS = 2

_ROOM = 0.5
"""Of the device's memory has to be free where more than one spare is kept: each takes about half a gigabyte."""


@dataclass(kw_only=True)
class _Process:
    worker: Worker
    due: deque[SetUp | None] = field(default_factory=deque)
    """What it was told to do and has not been asked about: open the device (None), make data."""
    ready: set[SetUp] = field(default_factory=set)
    spare: bool = True
    """No candidate has run in it."""

    def prepare(self, wanted: SetUp) -> None:
        if wanted not in self.ready and wanted not in self.due:
            self.worker.memory_limit = 0
            if self.spare:  # it would hold up the timings for as long as it takes to get ready
                self.worker.post(tasks.set_up, wanted)
            else:
                self.worker.post(tasks.sharing, tasks.set_up, wanted)
            self.due.append(wanted)


class Device:
    """`start` makes a device process. `spares`: how many others to keep ready after the first loss, where opening takes
    longer than a measurement. Used by one thread; `close` and `kill` are for any."""

    def __init__(self, start: Callable[[], Worker], *, spares: int) -> None:
        self._start, self._spares = start, spares
        self._process: _Process | None = None
        self._waiting: list[_Process] = []
        self._wanted: SetUp | None = None
        self._room = 1.0
        self._losses = 0
        self._closed = False
        self._lock = Lock()
        self._ending: deque[Future[int]] = deque()
        self._reaper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evo-reaper")
        self._process = self._begin()

    def expect(self, wanted: SetUp) -> None:
        """Has the present process make its data, if it has not, and those to come: `ready` will ask for them."""
        self._wanted = wanted
        for process in (self._process, *self._waiting):
            if process is not None:
                process.prepare(wanted)

    def ready(self, wanted: SetUp) -> Worker:
        """The device process, with the data of `wanted`. Raises DeviceError if the device does not answer, in a fresh
        process either; UsageError if the data do not fit it; CancelledError when closed."""
        self._wanted = wanted
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

    def lose(self, *, idle: bool = False) -> None:
        """Ends the present process; the next one asked for is another. `idle`: nothing of it can be running on the
        device any more, so that nobody has to wait for its end. Raises DeviceError if it, or one before, cannot be
        ended."""
        with self._lock:
            process, self._process = self._process, None
        while self._ending and self._ending[0].done():
            self._ending.popleft().result()
        if process is None:
            return
        self._losses += 1
        if idle:
            process.worker.kill()
            self._ending.append(self._reaper.submit(process.worker.end))
        else:
            process.worker.end()

    def renew(self) -> None:
        """Likewise, but nothing went wrong."""
        losses = self._losses
        self.lose()
        self._losses = losses

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def worker(self) -> Worker | None:
        """The present process, if there is one."""
        return self._process.worker if self._process is not None else None

    def kill(self) -> None:
        """No process from now on; whoever waits for one sees it die."""
        with self._lock:
            self._closed = True
            processes = [p for p in (self._process, *self._waiting) if p is not None]
        for process in processes:
            process.worker.kill()

    def close(self) -> None:
        self.kill()
        for process in (self._process, *self._waiting):
            if process is not None:
                process.worker.end()
        self._process = None
        self._waiting.clear()
        self._reaper.shutdown()

    def _made_ready(self, wanted: SetUp) -> Worker:
        if self._process is not None and not self._process.worker.alive:
            self.lose()  # between two candidates: neither is to blame
        process = self._process or self._replace()
        process.prepare(wanted)
        while process.due:
            self._settle(process)
        if process.spare:
            # It was made ready before the candidate ran that broke its predecessor, and perhaps the device.
            process.worker.call(tasks.sharing, tasks.probe, limit_s=_PROBE_S)
            process.spare = False
        return process.worker

    def _settle(self, process: _Process) -> None:
        """Waits for the first thing that a process was told to do."""
        told = process.due.popleft()
        if told is None:
            self._room = process.worker.collect(_OPEN_S)
        else:
            process.worker.memory_limit = process.worker.collect(_SET_UP_S)
            process.ready.add(told)

    def _replace(self) -> _Process:
        process = None
        while process is None and self._waiting:
            process = self._waiting.pop(0)
            if not process.worker.alive:
                process.worker.end()
                process = None
        self._process = process = process or self._begin()
        wanted = self._spares if self._room > _ROOM else min(1, self._spares)
        while self._losses and len(self._waiting) < wanted:
            self._waiting.append(self._begin())
        return process

    def _begin(self) -> _Process:
        with self._lock:
            if self._closed:
                raise CancelledError
            worker = self._start()
        worker.post(tasks.open_and_probe)
        process = _Process(worker=worker, due=deque([None]))
        if self._wanted is not None:
            process.prepare(self._wanted)
        return process
