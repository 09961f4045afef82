"""Executors: where work runs. Builds go wide over a pool of processes; measurements run one at a time per
device, in a process that dies with the candidate that breaks it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evo.evaluation import Build, Measurement, Timing
from evo.genome import Genome
from evo.kernel import Workload

__all__ = ["BuildRequest", "Executor", "ExecutorConfig", "MeasureRequest", "RaceRequest", "RaceResult"]


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """How many builders, and for how long anything may run."""

    builders: int
    cache_dir: Path
    build_timeout_s: float = 30.0
    measure_timeout_s: float = 30.0
    device_index: int = 0


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Names and plain data only: the worker loads the kernel itself."""

    kernel: str
    """Name, or path of its folder."""
    target: str
    arch: str
    genome: Genome
    workload: Workload


@dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """Gate one binary for one workload and, if it passes and `time` is set, time it beside the reference."""

    kernel: str
    target: str
    genome: Genome
    workload: Workload
    build: Build
    seed: int = 0
    time: bool = True


@dataclass(frozen=True, kw_only=True)
class RaceRequest:
    """Time several gated binaries and the kernel's baselines for one workload, interleaved in one race.

    `contenders`: (name, genome, build). `baselines`: names; the kernel's reference is always among them.
    """

    kernel: str
    target: str
    workload: Workload
    contenders: tuple[tuple[str, Genome, Build], ...]
    baselines: tuple[str, ...]
    seed: int = 0
    hot: bool = False
    """Also with all calls on one set, if that fits half the cache."""


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """Timings of every contender and baseline, by protocol; or the reason why there are none."""

    timings: tuple[Timing, ...] = ()
    log: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    """(name, reason) of contenders and baselines whose output was wrong in the race itself."""
    seconds: float = 0.0
    device_lost: bool = False


class Executor(Protocol):
    def build(self, request: BuildRequest) -> Future[Build]:
        """Never fails for a fault of the candidate: that is a Build with another status."""
        ...

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        """Likewise; a candidate that kills or hangs the device process is a Measurement that says so."""
        ...

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        """Likewise; the log of an empty result says what happened."""
        ...

    def renew_device(self) -> None:
        """Work submitted from now on runs in a fresh device process."""
        ...

    def close(self) -> None:
        """Ends every process; outstanding futures are cancelled."""
        ...
