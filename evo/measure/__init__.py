"""Whether a candidate is right, how fast it is, and how sure that is: the gate, the clock, references, buffers.

A worker process is asked by a `Request` or a `RaceRequest`: names and frozen data only, for the worker loads the kernel
itself. `evo.measure.harness` answers both in a device process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from evo.evaluation import Build, Timing
from evo.problem.genome import Genome
from evo.problem.kernel import Case, Workload

NO_MEMORY, NO_TIME, FAILING = "no memory", "no time left", "a function of kernel.py fails"
UNLAUNCHABLE, NOT_FAR = "a grid that cannot be launched is left to PyTorch", "none of its data can lie far apart"
"""Reasons why a case is left out."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The data that all candidates of a workload are judged with.

    kernel: its name, or the path of its folder, by which workers find it. kernel_digest: the digest that it must have there;
    empty for any. seed: draws the data. arch: architecture of the candidates, beside which PyTorch has what there is on it;
    empty for the device's own.
    """

    kernel: str
    kernel_digest: str = ""
    target: str
    workload: Workload
    seed: int = 0
    arch: str = ""

    @property
    def data(self) -> TaskData:
        """These fields alone, without those of a request."""
        return TaskData(**{f.name: getattr(self, f.name) for f in fields(TaskData)})


@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """The best candidate so far. `ratio`: its time over the reference's. Without a `build` only the ratio is known."""

    genome: Genome
    build: Build | None
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Request(TaskData):
    """Build one candidate for one workload. A request with a `build`: gate it and, if it passes and `time` is set, time it
    beside the reference; and beside the incumbent, if it comes close to that. cases: gate cases beyond the kernel's own.
    device_arch: architecture of the device that measures, where `arch` is of another; else empty."""

    arch: str
    device_arch: str = ""
    genome: Genome
    build: Build | None = None
    time: bool = True
    incumbent: Incumbent | None = None
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RaceRequest(TaskData):
    """Time several gated binaries and the kernel's baselines for one workload, interleaved in one race.

    contenders: (name, genome, build). baselines: names; the kernel's reference is always among them. hot: a second race with
    all calls on one set, if that fits half the cache. limit_s: each race ends then, once it has rounds for an interval.
    reference_us: the reference's usual time with cold caches, as far as it is known; a time far from it is disturbed.
    """

    contenders: tuple[tuple[str, Genome, Build], ...]
    baselines: tuple[str, ...]
    hot: bool = False
    limit_s: float = math.inf
    reference_us: float = math.inf


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """Timings of every contender and baseline, by protocol; or, as `log`, the reason why there are none. refused: (name,
    reason) of contenders that could not be loaded, and of contenders and baselines whose output was wrong. device_lost: as
    in `evo.evaluation.Evaluation`."""

    timings: tuple[Timing, ...] = ()
    log: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    device_lost: bool = False
