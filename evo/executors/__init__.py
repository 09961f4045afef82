"""Executors: where work runs. One module each, found by its name; it defines `EXECUTOR`, a function of target and
configuration that opens one.

Builds go wide over a pool of processes; on each device one candidate at a time is measured, in a process that dies with the
one that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import psutil

from evo.discovery import find_plugin
from evo.errors import DeviceError, UsageError

if TYPE_CHECKING:  # the server of workers starts before the rest is imported
    from concurrent.futures import Future
    from pathlib import Path

    from evo.evaluation import Build, Evaluation
    from evo.measure import RaceRequest, RaceResult, Request
    from evo.problem.genome import Genome
    from evo.problem.kernel import Limits, Workload
    from evo.sanitize import Sanitized
    from evo.targets import DeviceInfo


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """How many builders, and for how long anything may run."""

    builders: int
    cache_dir: Path
    devices: tuple[str, ...] = ("",)
    """Identities of the devices that measure, as `Target.devices` has them; "" is whichever the target takes by itself.
    Without any, nothing can be measured. For a cluster: a part of the name of their kind."""
    build_timeout_s: float = 120.0
    measure_timeout_s: float = 30.0
    """Longest time of the gate, and of the timing. Work that takes twenty times the median of its kind is ended earlier, but
    not before the floor of its kind."""
    build_floor_s: float = 15.0
    gate_floor_s: float = 1.0
    """A GPU may take a second to name a trap: with less the trap counts as a timeout."""
    timing_floor_s: float = 10.0
    scheduler: str = ""
    """Address of a cluster's scheduler, or a file that describes a cluster to start; empty on this machine."""
    build_memory_bytes: int = field(default_factory=lambda: max(2 << 30, psutil.virtual_memory().total // 8))
    """Memory of a builder, and of each compiler that it starts."""
    candidate_memory_bytes: int = 1 << 30
    """Memory of a candidate on the CPU, beyond twice its data."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Work on a candidate that has begun and is not done.

    stage: "build", "gate" or "timing"; "ready" while the device and the candidate's data are being made ready, which has no
    limit; "asked" if it is on a cluster, where the stage is not known. seconds: in this stage. left_s: seconds until it is
    ended; None without a limit. again: the candidate has cost a process before, and is alone in a fresh one.
    """

    genome: Genome
    workload: Workload
    stage: str
    seconds: float
    left_s: float | None
    again: bool = False


class AskedTarget(Protocol):
    """The answers of `evo.targets.Target` about the devices that measure, wherever they are."""

    name: str

    def device(self) -> DeviceInfo: ...

    def limits(self, arch: str) -> Limits: ...

    def runs(self, arch: str) -> str: ...

    def compiler(self) -> str: ...


def device_name(target: AskedTarget, arch: str) -> str:
    """The name of the device that measures code for `arch`, and for which other one it stands in: times of those do not mix.
    Raises DeviceError."""
    info = target.device()
    same = arch == info.arch or target.limits(arch).capability == target.limits(info.arch).capability
    return info.name if same else f"{info.name} as {arch}"


def device_arch(target: AskedTarget, arch: str) -> str:
    """The architecture of the device that measures, as in `Request`; empty where it is `arch`, or there is no device."""
    with suppress(DeviceError):
        own = target.device().arch
        return own if own != arch else ""
    return ""


class Executor(Protocol):
    """An open executor, safe to use from several threads.

    builders, devices: how many candidates are built, and measured, at once; of several devices one that cannot be used any
    more is left out. losses: processes, or workers of a cluster, that were lost while they had something to do.
    """

    target: AskedTarget
    builders: int
    devices: int
    losses: int

    def build(self, request: Request) -> Future[Build]:
        """Builds a candidate. A fault of the candidate is a Build with another status, not an exception."""
        ...

    def measure(self, request: Request) -> Future[Evaluation]:
        """Gates and times a candidate. If it kills or hangs the device process, the Evaluation says so."""
        ...

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        """Races several candidates. The log of an empty result says what happened."""
        ...

    def sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Future[Sanitized]:
        """Calls `evo.sanitize.sanitize` in a process of its own, beside what is measured. The future has an EvoError where
        that cannot be done."""
        ...

    def in_flight(self) -> tuple[InFlight, ...]:
        """Candidates that are being built, gated or timed at this moment, the oldest first; behind them those that wait for
        a process to be ready."""
        ...

    def renew_device(self) -> None:
        """Has all work that is submitted from now on run in a fresh device process."""
        ...

    def wind_down(self) -> None:
        """Begins nothing more. Builds are ended, and their futures cancelled, as are the futures of waiting measurements;
        the present measurement goes on."""
        ...

    def close(self) -> None:
        """Ends every process; outstanding futures are cancelled."""
        ...


OpenExecutor = Callable[[str, ExecutorConfig], Executor]
"""Opens an executor for a target by name. Its processes start at once."""


def find_executor(name: str) -> OpenExecutor:
    """Raises UnknownNameError; UsageError where what it needs is not installed."""
    try:
        return cast(OpenExecutor, find_plugin("executor", name))
    except ModuleNotFoundError as error:
        raise UsageError(f"executor {name} needs {error.name}: pip install 'evo-kernels[{name}]'") from error
