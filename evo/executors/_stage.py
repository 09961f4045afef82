"""Runs candidates in a device process, and finds who is to blame when that breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from evo.errors import EngineError, EvoError
from evo.evaluation import Measurement, Status
from evo.executors import MeasureRequest, RaceRequest, RaceResult
from evo.executors import _device_tasks as tasks
from evo.executors._device import Device
from evo.executors._device_tasks import SetUp
from evo.executors._limits import data_bytes
from evo.executors._worker import Worker, WorkerDied, WorkerStalled
from evo.problem.kernel import Workload
from evo.progress import InFlight

__all__ = ["Stage"]

_PATIENCE = 5
"""So many times its limit a candidate may take more, if its process was not given the cores to use it."""

_UNNAMED = "; it hangs, or has a fault that the device takes longer to name, as it does a trap"

_DEVICE_FAULTS = frozenset({Status.ILLEGAL_ADDRESS, Status.MISALIGNED_ADDRESS, Status.TRAP})

_T = TypeVar("_T", Measurement, RaceResult)


@dataclass(frozen=True, kw_only=True)
class _Attempt(Generic[_T]):
    """What came of running a candidate: a result, or how the device process was lost."""

    result: _T | None = None
    status: Status = Status.OK
    log: str = ""
    certain: bool = False
    """That the candidate is to blame is clear from this attempt alone."""
    seconds: float = 0.0
    """What it cost, if it came to nothing."""


@dataclass(frozen=True, kw_only=True)
class _Occupation:
    """What a stage is at. `since_s` by time.monotonic(); `worker`: None while that is made ready."""

    request: MeasureRequest | RaceRequest
    since_s: float
    again: bool
    worker: Worker | None = None


class Stage:
    """What is done with candidates in one kind of device process: `timed`, or otherwise gated. `host_code`: they run on
    the cores. Used by one thread at a time; `kill` is for any."""

    def __init__(
        self, start: Callable[[], Worker], *, spares: int, timed: bool, host_code: bool, memory_bytes: int
    ) -> None:
        self._timed, self._host_code, self._memory_bytes = timed, host_code, memory_bytes
        self._device = Device(start, spares=spares)
        self._at: _Occupation | None = None

    @property
    def worker(self) -> Worker | None:
        """The present process, if there is one."""
        return self._device.worker

    def data(self, kernel: str, target: str, workload: Workload, seed: int) -> SetUp:
        """What this stage needs for candidates of a workload."""
        return SetUp(
            kernel=kernel,
            target=target,
            workload=workload,
            seed=seed,
            timed=self._timed,
            memory_bytes=self._memory_bytes,
        )

    def in_flight(self) -> InFlight | None:
        """The candidate that it is at, if there is one that does not wait for the other stage. For any thread."""
        at = self._at
        if at is None or not isinstance(at.request, MeasureRequest):
            return None
        stage, seconds, left_s = "ready", time.monotonic() - at.since_s, None
        if at.worker is not None:
            ends_at_s = at.worker.ends_at_s
            if ends_at_s is None:
                return None
            stage, seconds = "timing" if self._timed else "gate", seconds - at.worker.waited_s
            left_s = max(0.0, ends_at_s - time.monotonic())
        return InFlight(
            genome=at.request.genome,
            workload=at.request.workload,
            stage=stage,
            seconds=seconds,
            left_s=left_s,
            again=at.again,
        )

    def expect(self, data: SetUp) -> None:
        """Has the process make its data ahead."""
        self._device.expect(data)

    def renew(self) -> None:
        """The next candidate meets a fresh process."""
        self._device.renew()

    def kill(self) -> None:
        self._device.kill()

    def close(self) -> None:
        self._device.close()

    def judge(
        self,
        task: Callable[[Any], _T],
        request: MeasureRequest | RaceRequest,
        limit_s: Callable[[], float],
        failed: Callable[[Status, str], _T],
    ) -> _T:
        """A candidate is blamed for a lost device process if that happens twice, the second time alone in a fresh one.

        In the first process others have run before it, and may have broken what it stumbled over; and its incumbent runs
        beside it, where it is timed. What came to nothing is part of what it has cost.
        """
        first = self._attempt(task, request, limit_s())
        if first.result is not None:
            return first.result
        alone = request
        if self._timed and isinstance(request, MeasureRequest) and request.incumbent is not None:
            alone = replace(request, incumbent=None)
        if first.certain and alone is request:
            return self._costing(failed(first.status, first.log), first.seconds)
        second = self._attempt(task, alone, limit_s(), again=True)
        if second.result is not None:
            return replace(second.result, seconds=second.result.seconds + first.seconds)
        log = f"{second.log} (and again, alone in a fresh process)"
        return self._costing(failed(second.status, log), first.seconds + second.seconds)

    def _costing(self, result: _T, seconds: float) -> _T:
        """What was lost with the process that it was measured in."""
        if isinstance(result, RaceResult):
            return replace(result, seconds=seconds)
        if self._timed:
            return replace(result, seconds=seconds, timing_seconds=seconds)
        return replace(result, seconds=seconds, gate_seconds=seconds)

    def _attempt(
        self,
        task: Callable[[Any], _T],
        request: MeasureRequest | RaceRequest,
        limit_s: float,
        *,
        again: bool = False,
    ) -> _Attempt[_T]:
        """Leaves a process behind that is fit for the next candidate, or none."""
        try:
            self._at = _Occupation(request=request, since_s=time.monotonic(), again=again)
            worker = self._device.ready(self.data(request.kernel, request.target, request.workload, request.seed))
            self._at = at = replace(self._at, since_s=time.monotonic(), worker=worker)
            attempt = self._run(worker, task, request, limit_s)
        finally:
            self._at = None
        return replace(attempt, seconds=time.monotonic() - at.since_s - worker.waited_s)

    def _run(
        self, worker: Worker, task: Callable[[Any], _T], request: MeasureRequest | RaceRequest, limit_s: float
    ) -> _Attempt[_T]:
        """Likewise, in a process that is ready."""
        idle = False
        attempt: _Attempt[_T]
        try:
            worker.post(task, request)
            result: _T = worker.collect(limit_s, _PATIENCE, sleeps=not self._host_code)
        except WorkerStalled as stalled:
            log = f"no result within {stalled.limit_s:.3g} s" + ("" if self._host_code else _UNNAMED)
            attempt = _Attempt(status=Status.TIMEOUT, log=log, certain=stalled.certain)
        except WorkerDied as death:
            attempt = _Attempt(status=death.status, log=f"the device process {death}")
        except EngineError as error:  # where a candidate ran, nothing can be said to be evo's own fault
            attempt = _Attempt(status=Status.CRASH, log=f"in its process {str(error).partition(chr(10))[0]}")
        except EvoError:  # nobody is to blame, but the process may still hold the device
            self._device.renew()
            raise
        else:
            if worker.complaint:
                attempt = _Attempt(status=Status.CRASH, log=f"{worker.complaint}; the process was ended")
            elif tasks.is_lost(result):
                # The device names the fault of the launch it was waiting for, and was well when that began: it has
                # ended all that the process ran.
                idle = _status(result) in _DEVICE_FAULTS
                certain = idle or _status(result) is Status.TIMEOUT  # which the process itself has seen
                attempt = _Attempt(
                    status=_status(result), log=_with(result.log, worker.last_words()), certain=certain
                )
            else:
                if self._has_grown(worker) or result.data_changed:
                    self._device.renew()
                return _Attempt(result=result)
        self._device.lose(idle=idle)
        if self._device.closed:
            raise CancelledError
        return attempt

    def _has_grown(self, worker: Worker) -> bool:
        """Whether a candidate has left too little memory to the next."""
        least = self._memory_bytes // 2
        return bool(worker.memory_limit) and data_bytes(worker.pid) > worker.memory_limit - least


def _status(result: Measurement | RaceResult) -> Status:
    return result.status if isinstance(result, Measurement) else Status.CRASH


def _with(log: str, words: str) -> str:
    return f"{log}: {words}" if words else log
