"""What the device process runs, with the faults of candidates told from those of evo and of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from evo.evaluation import Measurement, Status
from evo.executors import MeasureRequest, RaceRequest, RaceResult
from evo.executors import _device_lock as device_lock
from evo.executors._device_lock import DeviceLock
from evo.executors._lifetime import end_with_command
from evo.executors._limits import confine_candidate, data_bytes, limit_data
from evo.measure import tasks as measuring
from evo.measure.tasks import probe
from evo.problem.kernel import Workload
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

_UNLIMITED = 1 << 60

_R = TypeVar("_R")


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
    end_with_command()
    measuring.choose_device(target, index)
    return 0


def open_and_probe() -> float:
    """Opens the device; the share of its memory that is free then (1 for a CPU). Raises DeviceError if there is none, or
    if it does not compute."""
    import torch

    session = measuring.open_device()
    probe()
    if session.device.type == "cpu":
        return 1.0
    free, whole = torch.cuda.mem_get_info(session.device)
    return free / whole


@cache
def set_up(request: SetUp) -> int:
    """Makes the data that all candidates of a workload are judged with, once. No candidate runs meanwhile.

    Returns the limit of the process's memory, 0 for none. Raises UsageError if the data do not fit.
    """
    session = measuring.open_device()
    host_code = session.device.type == "cpu"
    if host_code:
        limit_data(_UNLIMITED)
    measuring.set_up(
        request.kernel, request.target, request.workload, request.seed, gate=not request.timed, timing=request.timed
    )
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
    result = measuring.gate(request)
    if not (is_lost(result) or result.data_changed):  # else nothing is to be timed beside the end of this process
        device_lock.release()
    return result


def clock(request: MeasureRequest) -> Measurement:
    """All of it with the device to itself, also what is not timed: two processes that use a GPU in turns are slower than
    one behind the other."""
    with device_lock.alone():
        return measuring.clock(request)


def race(request: RaceRequest) -> RaceResult:
    with device_lock.alone():
        return measuring.race(request)


def is_lost(result: Measurement | RaceResult) -> bool:
    """Whether the process cannot be used any more."""
    return result.device_lost or (isinstance(result, Measurement) and result.status is Status.OUT_OF_MEMORY)


def lost_measurement(status: Status, log: str) -> Measurement:
    """Of a candidate that has cost the process."""
    return Measurement(status=status, log=log, device_lost=True)


def lost_race(status: Status, log: str) -> RaceResult:
    return RaceResult(log=f"{status}: {log}", device_lost=True)
