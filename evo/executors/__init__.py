"""Executors: where work runs. One module each, found by its name; it defines `EXECUTOR`, a function of target and
configuration that opens one.

Builds go wide over a pool of processes; on each device one candidate at a time is measured, in a process that dies with the
one that breaks it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import psutil

from evo.discovery import find_plugin
from evo.errors import UsageError
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
    """Identities of those that measure, as `Target.devices` has them; "" is whichever the target takes by itself. Where
    there are none, nothing can be measured. Of a cluster: a part of the name of their kind."""
    build_timeout_s: float = 120.0
    measure_timeout_s: float = 30.0
    """At most, for the gate and for the timing. What has taken twenty times as long as the median of its kind is ended
    before, but not earlier than after its floor."""
    build_floor_s: float = 15.0
    gate_floor_s: float = 1.0
    """A GPU may take a second to name a trap: with less it counts as a timeout."""
    timing_floor_s: float = 10.0
    scheduler: str = ""
    """Of the cluster, where there is one: its address, or a file that describes a cluster to start."""
    build_memory_bytes: int = field(default_factory=lambda: max(2 << 30, psutil.virtual_memory().total // 8))
    """Of a builder, and of each compiler that it starts."""
    candidate_memory_bytes: int = 1 << 30
    """What a candidate on the CPU may take beyond twice its data."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Work on a candidate that has begun and is not done, for `seconds` now. `left_s`: until it is ended if there is no
    answer; None where there is no limit."""

    genome: Genome
    workload: Workload
    stage: str
    """"build", "gate" or "timing"; or "ready": the device, and the data that it is judged with there, are being made
    ready, which has no limit that is its own; "asked": elsewhere, which of these is not known."""
    seconds: float
    left_s: float | None
    again: bool = False
    """It has cost a process before, and is alone in a fresh one."""


class AskedTarget(Protocol):
    """What `evo.targets.Target` answers of the devices that measure, wherever they are."""

    name: str

    def device(self) -> DeviceInfo: ...

    def limits(self, arch: str) -> Limits: ...

    def runs(self, arch: str) -> str: ...

    def compiler(self) -> str: ...


class Executor(Protocol):
    """Safe to use from several threads."""

    target: AskedTarget
    builders: int
    devices: int
    """How many candidates are built at once, and how many measured; of several devices one that cannot be used any more is
    left out."""
    losses: int
    """Processes, or workers of a cluster, that were lost while they had something to do."""

    def build(self, request: Request) -> Future[Build]:
        """Never fails for a fault of the candidate: that is a Build with another status."""
        ...

    def measure(self, request: Request) -> Future[Evaluation]:
        """Likewise; a candidate that kills or hangs the device process is an Evaluation that says so."""
        ...

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        """Likewise; the log of an empty result says what happened."""
        ...

    def sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Future[Sanitized]:
        """See `evo.sanitize.sanitize`; in a process of its own, beside what is measured. What cannot be done there is an
        EvoError of the future."""
        ...

    def in_flight(self) -> tuple[InFlight, ...]:
        """Which candidates are being built, gated or timed at this moment, those first that have been for the longest;
        behind them those that wait for a process to be ready."""
        ...

    def renew_device(self) -> None:
        """Work submitted from now on runs in a fresh device process."""
        ...

    def wind_down(self) -> None:
        """Begins nothing more. Builds are ended, and their futures cancelled, as are those of measurements that wait; what
        is being measured goes on."""
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
