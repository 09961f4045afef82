"""Runs work on this machine: builders, and two disposable processes on the device, for the gate and for timing.

What is decided here is the order of things: one measurement at a time, a fresh process after a broken one, who is to
blame for what broke, and turns where building and timing would share cores.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from evo.errors import EngineError
from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest, RaceRequest, RaceResult
from evo.executors import _device_tasks as tasks
from evo.executors._builders import Builders
from evo.executors._device import Device
from evo.executors._device_tasks import SetUp
from evo.executors._limits import SCRATCH, data_bytes
from evo.executors._pace import Pace
from evo.executors._server import start_server, worker_context
from evo.executors._worker import Worker, WorkerDied, WorkerStalled
from evo.kernel import Workload
from evo.targets import find_target

__all__ = ["LocalExecutor"]

_PATIENCE = 5
"""So many times its limit a candidate may take more, if its process was not given the cores to use it."""

_GATE_FLOOR_S = {False: 0.3, True: 0.5}
"""The least limit of a gate, by whether the target shares its cores."""

_UNNAMED = "; it hangs, or has a fault that the device takes longer to name, as it does a trap"

_SPARES = 4
"""A process takes a second from its start until it can gate: longer than most faults. But processes that open the device
hold up those that use it."""

_DEVICE_FAULTS = frozenset({Status.ILLEGAL_ADDRESS, Status.MISALIGNED_ADDRESS, Status.TRAP})

_T = TypeVar("_T", Measurement, RaceResult)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Something to be done in turn, and the future that waits for it, if one does."""

    run: Callable[[], None]
    future: Future[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Attempt(Generic[_T]):
    """What came of running a candidate: a result, or how the device process was lost."""

    result: _T | None = None
    status: Status = Status.OK
    log: str = ""
    certain: bool = False
    """That the candidate is to blame is clear from this attempt alone."""


class LocalExecutor:
    """See `evo.executors.Executor`."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        self._target, self._config = target, config
        self._turns = find_target(target).shares_cores
        start_server()
        self._context = worker_context()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        self._jobs: deque[_Job] = deque()
        self._held_builds: deque[_Job] = deque()
        self._outstanding: set[Future[Any]] = set()
        self._paces: dict[tuple[str, Workload, str], Pace] = {}
        self._building = 0
        self._measuring = False
        self._closed = False
        self._changed = threading.Condition()
        self._gate = Device(self._start_device, spares=0 if self._turns else _SPARES)
        self._timer = Device(self._start_device, spares=0)
        self._builders = Builders(self._start, target, config, self._scratch)
        self._dispatcher = threading.Thread(target=self._dispatch, name="evo-device", daemon=True)
        self._dispatcher.start()

    def _start(self, prepare: Callable[..., int], arguments: tuple[Any, ...]) -> Worker:
        return Worker(self._context, self._scratch, prepare, arguments)

    def _start_device(self) -> Worker:
        return self._start(tasks.prepare, (self._target, self._config.device_index, self._scratch))

    # -- builds ---------------------------------------------------------------------------------------------

    def build(self, request: BuildRequest) -> Future[Build]:
        future: Future[Build] = Future()
        self._expect(future)

        def start() -> None:
            self._builders.submit(request, lambda result: self._built(result, future))

        with self._changed:
            if self._turns and (self._measuring or self._jobs):
                self._held_builds.append(_Job(run=start, future=future))
                return future
            self._building += 1
        start()
        return future

    def _built(self, result: Build | BaseException, future: Future[Build]) -> None:
        with self._changed:
            self._building -= 1
            self._changed.notify_all()
        _deliver(future, result)

    # -- the device -----------------------------------------------------------------------------------------

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        """The gate has a process of its own, which has little to lose; what passes is timed in another."""
        gating, timing = self._pace(request, "gate"), self._pace(request, "timing")

        def evaluate() -> Measurement:
            if request.time:
                self._timer.expect(self._data(request, timed=True))
            gated = self._judge(self._gate, tasks.gate, request, gating.limit_s, tasks.lost_measurement)
            if gated.status is not Status.OK:
                return gated
            gating.note(gated.load_seconds + gated.gate_seconds)
            if not request.time:
                return gated
            timed = self._judge(self._timer, tasks.clock, request, timing.limit_s, tasks.lost_measurement)
            if timed.status is Status.OK:
                timing.note(timed.seconds)
            return replace(
                timed,
                checks=gated.checks + timed.checks,
                seconds=gated.seconds + timed.seconds,
                load_seconds=gated.load_seconds + timed.load_seconds,
                gate_seconds=gated.gate_seconds + timed.gate_seconds,
            )

        return self._enqueue(evaluate)

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        limit_s = self._config.measure_timeout_s * (len(request.contenders) + len(request.baselines) + 1)
        return self._enqueue(lambda: self._judge(self._timer, tasks.race, request, lambda: limit_s, tasks.lost_race))

    def renew_device(self) -> None:
        def renew() -> None:
            for device in (self._gate, self._timer):
                device.renew()

        self._submit(_Job(run=renew))

    def _pace(self, request: MeasureRequest, stage: str) -> Pace:
        """A hang shows in the gate, whose time varies little; a race waits for a quiet machine, up to its own limit."""
        floor_s = self._config.timing_floor_s
        if stage == "gate":
            floor_s = _GATE_FLOOR_S[self._turns] if self._config.gate_floor_s is None else self._config.gate_floor_s
        fresh = Pace(floor_s=floor_s, ceiling_s=self._config.measure_timeout_s)
        return self._paces.setdefault((request.kernel, request.workload, stage), fresh)

    def _judge(
        self,
        device: Device,
        task: Callable[[Any], _T],
        request: MeasureRequest | RaceRequest,
        limit_s: Callable[[], float],
        failed: Callable[[Status, str], _T],
    ) -> _T:
        """A candidate is blamed for a lost device process if that happens twice, the second time alone in a fresh one.

        In the first process others have run before it, and may have broken what it stumbled over.
        """
        first = self._attempt(device, task, request, limit_s())
        if first.result is not None:
            return first.result
        if first.certain:
            return failed(first.status, first.log)
        second = self._attempt(device, task, request, limit_s())
        if second.result is not None:
            return second.result
        return failed(second.status, f"{second.log} (and again, alone in a fresh process)")

    def _attempt(
        self, device: Device, task: Callable[[Any], _T], request: MeasureRequest | RaceRequest, limit_s: float
    ) -> _Attempt[_T]:
        """Leaves a process behind that is fit for the next candidate, or none."""
        worker = device.ready(self._data(request, timed=device is self._timer))
        idle = False
        attempt: _Attempt[_T]
        try:
            worker.post(task, request)
            result: _T = worker.collect(limit_s, _PATIENCE, sleeps=not self._turns)
        except WorkerStalled as stalled:
            log = f"no result within {stalled.limit_s:.3g} s" + ("" if self._turns else _UNNAMED)
            attempt = _Attempt(status=Status.TIMEOUT, log=log, certain=stalled.certain)
        except WorkerDied as death:
            attempt = _Attempt(status=death.status, log=f"the device process {death}")
        except EngineError as error:  # where a candidate ran, nothing can be said to be evo's own fault
            attempt = _Attempt(status=Status.CRASH, log=f"in its process {str(error).partition(chr(10))[0]}")
        else:
            if worker.complaint:
                attempt = _Attempt(status=Status.CRASH, log=f"{worker.complaint}; the process was ended")
            elif result.device_lost or _status(result) is Status.OUT_OF_MEMORY:
                # The device names the fault of the launch it was waiting for, and was well when that began: it has
                # ended all that the process ran.
                idle = certain = _status(result) in _DEVICE_FAULTS
                attempt = _Attempt(
                    status=_status(result), log=_with(result.log, worker.last_words()), certain=certain
                )
            else:
                if self._has_grown(worker) or result.data_changed:
                    device.renew()
                return _Attempt(result=result)
        device.lose(idle=idle)
        if self._closed:
            raise CancelledError
        return attempt

    def _data(self, request: MeasureRequest | RaceRequest, *, timed: bool) -> SetUp:
        return SetUp(
            kernel=request.kernel,
            target=request.target,
            workload=request.workload,
            seed=request.seed,
            timed=timed,
            memory_bytes=self._config.candidate_memory_bytes,
        )

    def _has_grown(self, worker: Worker) -> bool:
        """Whether a candidate has left too little memory to the next."""
        least = self._config.candidate_memory_bytes // 2
        return bool(worker.memory_limit) and data_bytes(worker.pid) > worker.memory_limit - least

    def _enqueue(self, evaluate: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._expect(future)

        def run() -> None:
            if not future.cancelled():
                _deliver(future, evaluate())

        self._submit(_Job(run=run, future=future))
        return future

    def _expect(self, future: Future[Any]) -> None:
        with self._changed:
            if self._closed:
                future.cancel()
            self._outstanding.add(future)
        future.add_done_callback(self._settled)

    def _settled(self, future: Future[Any]) -> None:
        with self._changed:
            self._outstanding.discard(future)

    def _submit(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _dispatch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._jobs or (self._turns and self._building)):
                    self._changed.wait()
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._measuring = True
            try:
                job.run()
            except BaseException as error:  # what breaks evo itself is told to whoever waits
                if job.future is not None:
                    _deliver(job.future, error)
            with self._changed:
                self._measuring = False
                held = list(self._held_builds) if not (self._jobs or self._closed) else []
                if held:
                    self._held_builds.clear()
                self._building += len(held)
            for build in held:
                build.run()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            outstanding = list(self._outstanding)
            self._jobs.clear()
            self._held_builds.clear()
            self._changed.notify_all()
        for future in outstanding:
            future.cancel()
        for device in (self._gate, self._timer):
            device.kill()
        self._builders.close()
        self._dispatcher.join()
        for device in (self._gate, self._timer):
            device.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _status(result: Measurement | RaceResult) -> Status:
    return result.status if isinstance(result, Measurement) else Status.CRASH


def _with(log: str, words: str) -> str:
    return f"{log}: {words}" if words else log


def _deliver(future: Future[Any], result: object) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        if isinstance(result, CancelledError):
            future.cancel()
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
