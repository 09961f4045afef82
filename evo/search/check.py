"""Checks a kernel as a whole: every structural branch of its template compiled, and gated and timed where it can run.

Or one candidate alone: on its own workload, and on those neighbours that the finals gate it on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from evo.errors import UsageError
from evo.evaluation import Build, Check, Measurement, Status
from evo.executors import BuildRequest, Executor, MeasureRequest
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.space import Point, Value
from evo.progress import InFlight
from evo.targets import find_target

__all__ = [
    "Branch",
    "BranchPlan",
    "Onlooker",
    "Standing",
    "Trial",
    "branch_genomes",
    "check_branches",
    "check_candidate",
    "check_workloads_of",
    "unwatched",
]

_LOOK_S = 0.5

_TIMED = "timed"
"""What the executor calls the case that is the size that is timed."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a check is: `done` of `count`, and what has been under way the longest, with what differs from the default
    there."""

    done: int
    count: int
    work: InFlight | None = None
    changes: Point = field(default_factory=dict)


Onlooker = Callable[[Standing], None]
"""Is told several times a second while something is waited for."""


def unwatched(standing: Standing) -> None:
    """An onlooker that says nothing."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One structural branch for one workload, with what became of it."""

    workload: Workload
    genome: Genome
    changes: Point
    """What differs from the default; empty for the default itself."""
    build: Build
    measurement: Measurement | None = None
    """None if it was only compiled."""
    cases: int = 0
    """How many the gate has. It ends at the first that is refused."""
    timed: bool = False
    """Whether it was to be run at the workload's own size too, as a search times it."""

    @property
    def passed(self) -> bool:
        return self.build.status is Status.OK and (self.measurement is None or self.measurement.status is Status.OK)

    @property
    def tried(self) -> int:
        """How many of the gate's cases were run."""
        return len(self._of_gate)

    @property
    def gated(self) -> int:
        """How many of them passed."""
        return sum(c.passed for c in self._of_gate)

    @property
    def _of_gate(self) -> list[Check]:
        return [c for c in self.measurement.checks if c.case != _TIMED] if self.measurement is not None else []

    @property
    def passed_gate(self) -> bool:
        return self.measurement is not None and (self.passed or self.gated == self.cases)


@dataclass(frozen=True, kw_only=True)
class BranchPlan:
    """What `check_branches` does. `kernel_name`: by which workers find it. `workloads`: those that each branch is built and
    gated for; `timed`: those of them at whose own size it is run, too. `gate`: else it is only compiled."""

    kernel_name: str
    kernel: Kernel
    target: str
    arch: str
    workloads: tuple[Workload, ...]
    timed: frozenset[Workload]
    gate: bool
    seed: int


def check_workloads_of(kernel: Kernel, target: str) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """The kernel's own first workload in every dtype; and its neighbours in the first dtype, which no search times."""
    example = kernel.example(target)
    own = tuple(Workload.of(dict(example.dims), dtype, dict(example.options)) for dtype in kernel.dtypes[target])
    return own, tuple(kernel.neighbours(target, example))


def branch_genomes(kernel: Kernel, target: str, arch: str, workload: Workload) -> list[tuple[Genome, Point]]:
    """(genome, what differs from the default) of every structural branch that is legal for the workload."""
    space = kernel.space(target, workload, find_target(target).limits(arch))
    points = space.branches()
    return [(Genome.of(p), _changes(points[0], p)) for p in points]


def check_branches(executor: Executor, plan: BranchPlan, tell: Onlooker) -> tuple[list[Branch], dict[Workload, str]]:
    """(branches, why the size of a workload was not timed after all).

    Builds all branches, then gates those that compiled, and times those that passed, as a search would. Failures are data;
    so is a workload whose data do not fit this machine.
    """
    planned: list[tuple[Workload, Genome, Point, Future[Build]]] = []
    for workload in plan.workloads:
        for genome, changes in branch_genomes(plan.kernel, plan.target, plan.arch, workload):
            request = BuildRequest(
                kernel=plan.kernel_name, target=plan.target, arch=plan.arch, genome=genome, workload=workload
            )
            planned.append((workload, genome, changes, executor.build(request)))
    all_changes = {(genome, workload): changes for workload, genome, changes, _ in planned}
    branches: list[Branch] = []
    too_large: dict[Workload, str] = {}

    def look() -> None:
        work = next(iter(executor.in_flight()), None)
        changes = all_changes.get((work.genome, work.workload), {}) if work else {}
        tell(Standing(done=len(branches), count=len(planned), work=work, changes=changes))

    for workload, genome, changes, future in planned:
        build, measurement = _result(future, look), None
        timed = workload in plan.timed and workload not in too_large
        if plan.gate and build.binary is not None:
            asked = MeasureRequest(
                kernel=plan.kernel_name,
                target=plan.target,
                genome=genome,
                workload=workload,
                build=build,
                seed=plan.seed,
                time=timed,
            )
            try:
                measurement = _result(executor.measure(asked), look)
            except UsageError as error:
                if not timed:
                    raise
                timed, too_large[workload] = False, str(error)
                measurement = _result(executor.measure(replace(asked, time=False)), look)
        branches.append(
            Branch(
                workload=workload,
                genome=genome,
                changes=changes,
                build=build,
                measurement=measurement,
                cases=len(plan.kernel.cases(plan.target, workload)),
                timed=timed and measurement is not None,
            )
        )
    return branches, too_large


def _result(future: Future[_T], look: Callable[[], None]) -> _T:
    """The future's, with a look now and then while that is waited for."""
    while True:
        try:
            return future.result(timeout=_LOOK_S)
        except TimeoutError:
            if future.done():
                return future.result()
            look()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate at one workload: what became of its build, and what the gate said."""

    workload: Workload
    cases: tuple[str, ...]
    """Names of the gate's cases, in order. The gate ends at the first that is refused."""
    build: Build
    measurement: Measurement | None = None
    """None if it was not run: it did not compile, or was only to be compiled."""

    @property
    def passed(self) -> bool:
        return self.build.status is Status.OK and (self.measurement is None or self.measurement.status is Status.OK)


def check_candidate(
    executor: Executor,
    kernel: Kernel,
    request: BuildRequest,
    *,
    gate: bool,
    seed: int,
    tell: Onlooker = unwatched,
) -> list[Trial]:
    """Builds a candidate for its workload and for the neighbours it is legal for, then gates all that compiled.

    With the seed that a search drew its data with, this repeats the search's verdict: as there, the candidate is
    also timed at its own workload and its timed outputs are verified. A refusal at one workload leaves the others
    to be gated. Failures are data.
    """
    limits = find_target(request.target).limits(request.arch)
    near = kernel.legal_neighbours(request.target, request.genome.parameters, request.workload, limits)
    builds = [(w, executor.build(replace(request, workload=w))) for w in (request.workload, *near)]
    trials: list[Trial] = []

    def look() -> None:
        tell(Standing(done=len(trials), count=len(builds), work=next(iter(executor.in_flight()), None)))

    for workload, future in builds:
        build, measurement = _result(future, look), None
        if gate and build.binary is not None:
            measure = MeasureRequest(
                kernel=request.kernel,
                target=request.target,
                genome=request.genome,
                workload=workload,
                build=build,
                seed=seed,
                time=workload == request.workload,
            )
            measurement = _result(executor.measure(measure), look)
        cases = tuple(case.name for case in kernel.cases(request.target, workload))
        trials.append(Trial(workload=workload, cases=cases, build=build, measurement=measurement))
    return trials


def _changes(default: Point, point: Point) -> Point:
    changed: dict[str, Value] = {k: v for k, v in point.items() if default.get(k) != v}
    return changed
