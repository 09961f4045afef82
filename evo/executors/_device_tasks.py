"""What the device process runs, with the faults of candidates told from those of evo and of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from evo.errors import DeviceError
from evo.evaluation import Measurement, Status
from evo.executors import MeasureRequest, RaceRequest, RaceResult
from evo.executors import _device_lock as device_lock
from evo.executors import _tasks as tasks
from evo.executors._device_lock import DeviceLock
from evo.executors._faults import classify
from evo.executors._limits import confine_candidate, data_bytes, limit_data
from evo.executors._rehearsal import rehearse
from evo.problem.kernel import Workload, load_kernel
from evo.targets import find_target

__all__ = [
    "SetUp",
    "clock",
    "gate",
    "is_lost",
    "lost_measurement",
    "lost_race",
    "open_and_probe",
    "prepare",
    "probe",
    "race",
    "set_up",
    "sharing",
]

_PROBE_ELEMENTS = 1 << 16

_UNLIMITED = 1 << 60

_R = TypeVar("_R")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """For what the device process makes its data."""

    kernel: str
    target: str
    workload: Workload
    seed: int
    timed: bool
    """For timing; otherwise for the gate."""
    memory_bytes: int
    """What a candidate may take beyond the data, where its memory is limited."""


def prepare(target: str, index: int, scratch: Path, lock: DeviceLock | None) -> int:
    device_lock.adopt(lock)
    confine_candidate(scratch, host_code=find_target(target).shares_cores)
    tasks.prepare_device(target, index)
    return 0


def open_and_probe() -> float:
    """Opens the device; the share of its memory that is free then (1 for a CPU). Raises DeviceError if there is none, or
    if it does not compute."""
    import torch

    session = tasks._session()
    probe()
    if session.device.type == "cpu":
        return 1.0
    free, whole = torch.cuda.mem_get_info(session.device)
    return free / whole


def probe() -> None:
    """A small computation whose result is known. Raises DeviceError if the device does not give it."""
    import torch

    session = tasks._session()
    try:
        found = torch.arange(_PROBE_ELEMENTS, dtype=torch.int64, device=session.device).square().sum().item()
        session.synchronize()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{session.info.name} does not answer: {reason}") from error
    n = _PROBE_ELEMENTS - 1
    if found != n * (n + 1) * (2 * n + 1) // 6:
        raise DeviceError(f"{session.info.name} computes wrong sums: {found} for the squares up to {n}")


@cache
def set_up(request: SetUp) -> int:
    """Makes the data that all candidates of a workload are judged with, once. No candidate runs meanwhile.

    Returns the limit of the process's memory, 0 for none. Raises UsageError if the data do not fit.
    """
    session = tasks._session()
    host_code = session.device.type == "cpu"
    if host_code:
        limit_data(_UNLIMITED)
    bench = tasks._bench(request.kernel, request.target, request.workload, request.seed)
    if request.timed:
        bench.prepare()
    else:
        rehearse(load_kernel(request.kernel), request.target, request.workload, bench.gate)
    session.synchronize()
    # Baselines return outputs of their own, and those of a whole sample are kept: as much again as the data.
    return limit_data(data_bytes() + request.memory_bytes) if host_code else 0


def sharing(task: Callable[..., _R], *arguments: object) -> _R:
    """Runs one of the tasks above while nothing is timed."""
    device_lock.acquire(alone=False)
    try:
        return task(*arguments)
    finally:
        device_lock.release()


def gate(request: MeasureRequest) -> Measurement:
    device_lock.acquire(alone=False)
    result = _judged(tasks.gate, request, lost_measurement)
    if not (is_lost(result) or result.data_changed):  # else nothing is to be timed beside the end of this process
        device_lock.release()
    return result


def clock(request: MeasureRequest) -> Measurement:
    """All of it with the device to itself, also what is not timed: two processes that use a GPU in turns are slower than
    one behind the other."""
    with device_lock.alone():
        return _judged(tasks.clock, request, lost_measurement)


def race(request: RaceRequest) -> RaceResult:
    with device_lock.alone():
        return _judged(tasks.race, request, lost_race)


def is_lost(result: Measurement | RaceResult) -> bool:
    """Whether the process cannot be used any more."""
    return result.device_lost or (isinstance(result, Measurement) and result.status is Status.OUT_OF_MEMORY)


def lost_measurement(status: Status, log: str) -> Measurement:
    """Of a candidate that has cost the process."""
    return Measurement(status=status, log=log, device_lost=True)


def lost_race(status: Status, log: str) -> RaceResult:
    return RaceResult(log=f"{status}: {log}", device_lost=True)


def _judged(task: Callable[..., _T], request: object, failed: Callable[[Status, str], _T]) -> _T:
    """A candidate's fault may first show in a call of PyTorch: an allocation that fails, an error of the device."""
    try:
        return task(request)
    except (RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        status = classify("OUT OF MEMORY" if isinstance(error, MemoryError) else text, Status.OK)
        if status is Status.OK:
            try:
                probe()
            except DeviceError:
                return failed(Status.LAUNCH_ERROR, text)
            raise
        return failed(status, text)
