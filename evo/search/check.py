"""Checks of code before or after a search: built, gated, and timed as a search times it, without a sampler or finals.

`check_kernel` takes every structural branch of a template; `check_candidate` takes one candidate, on its own workload and on
the neighbouring sizes that the finals gate it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from evo.errors import UsageError
from evo.evaluation import Build, Check, Evaluation, Status
from evo.executors import Executor, InFlight, Request
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.space import Point
from evo.targets import find_target

__all__ = [
    "CheckProgress",
    "Checked",
    "branch_requests",
    "check_candidate",
    "check_kernel",
    "check_workloads_of",
    "ignore_progress",
]

_OBSERVE_S = 0.5

_TIMED = "timed"
"""The executor's name for the case that checks the outputs of the timed calls."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CheckProgress:
    """`done` of `count`; and the work that has been in flight the longest, with what differs from the default there."""

    done: int
    count: int
    work: InFlight | None = None
    changes: Point = field(default_factory=dict)


Observe = Callable[[CheckProgress], None]
"""Is called several times a second while something is waited for."""


def ignore_progress(progress: CheckProgress) -> None:
    """For those who print nothing meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One genome at one workload: what became of its build, and the verdicts of gate and timing."""

    workload: Workload
    genome: Genome
    changes: Point
    """What differs from the default; empty for the default itself."""
    cases: tuple[str, ...]
    """Names of the gate's cases, in order. The gate ends at the first that is refused."""
    build: Build
    measurement: Evaluation | None = None
    """None if it was not run: it did not compile, or was only to be compiled."""
    timed: bool = False
    """Whether it was to be run at the workload's own size too, as a search times it."""

    @property
    def passed(self) -> bool:
        return self.build.status is Status.OK and (self.measurement is None or self.measurement.status is Status.OK)

    @property
    def gate_checks(self) -> list[Check]:
        """Of the gate's cases that were run."""
        return [c for c in self.measurement.checks if c.case != _TIMED] if self.measurement is not None else []

    @property
    def cases_passed(self) -> int:
        return sum(c.passed for c in self.gate_checks)

    @property
    def passed_gate(self) -> bool:
        return self.measurement is not None and (self.passed or self.cases_passed == len(self.cases))


def check_workloads_of(kernel: Kernel, target: str) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """The kernel's own first workload in every dtype; and its neighbours in the first dtype, which no search times."""
    example = kernel.example(target)
    own = tuple(Workload.of(dict(example.dims), dtype, dict(example.options)) for dtype in kernel.dtypes[target])
    return own, tuple(kernel.neighbours(target, example))


def branch_requests(
    name: str, kernel: Kernel, target: str, arch: str, workloads: Sequence[Workload]
) -> list[tuple[Request, Point]]:
    """(request, what differs from the default) of every structural branch that is legal for each workload.

    name: of the kernel, or its folder, by which workers find it.
    """
    found = []
    for workload in workloads:
        points = kernel.space(target, workload, find_target(target).limits(arch)).branches()
        for point in points:
            changes = {k: v for k, v in point.items() if points[0].get(k) != v}
            genome = Genome.of(point)
            request = Request(kernel=name, target=target, arch=arch, genome=genome, workload=workload)
            found.append((request, changes))
    return found


def check_kernel(
    executor: Executor,
    kernel: Kernel,
    branches: Sequence[tuple[Request, Point]],
    *,
    timed: frozenset[Workload],
    gate: bool,
    seed: int,
    observe: Observe = ignore_progress,
) -> tuple[list[Checked], dict[Workload, str]]:
    """(results, workloads whose timing data do not fit this machine, each with the reason: they are gated only).

    Builds all `branches`, then gates those that compiled, and times those of the workloads in `timed`. Without `gate`
    nothing is run. Failures are data.
    """
    building = [(request, changes, executor.build(request)) for request, changes in branches]
    changes_of = {(request.genome, request.workload): changes for request, changes in branches}
    results: list[Checked] = []
    too_large: dict[Workload, str] = {}

    def report() -> None:
        work = next(iter(executor.in_flight()), None)
        changes = changes_of.get((work.genome, work.workload), {}) if work else {}
        observe(CheckProgress(done=len(results), count=len(building), work=work, changes=changes))

    for request, changes, future in building:
        build, measurement = _wait(future, report), None
        time = request.workload in timed and request.workload not in too_large
        if gate and build.binary is not None:
            asked = replace(request, build=build, seed=seed)
            try:
                measurement = _wait(executor.measure(replace(asked, time=time)), report)
            except UsageError as error:
                if not time:
                    raise
                time, too_large[request.workload] = False, str(error)
                measurement = _wait(executor.measure(replace(asked, time=False)), report)
        results.append(
            Checked(
                workload=request.workload,
                genome=request.genome,
                changes=changes,
                cases=tuple(case.name for case in kernel.cases(request.target, request.workload)),
                build=build,
                measurement=measurement,
                timed=time and measurement is not None,
            )
        )
    return results, too_large


def check_candidate(
    executor: Executor,
    kernel: Kernel,
    request: Request,
    *,
    gate: bool,
    seed: int,
    observe: Observe = ignore_progress,
) -> list[Checked]:
    """Builds a candidate for its workload and for the neighbours it is legal for, then gates all that compiled.

    With the seed that a search drew its data with, this repeats the search's verdict: as there, the candidate is also timed
    at its own workload and its timed outputs are verified. A refusal at one workload leaves the others to be gated.
    Raises UsageError if the data of its timing do not fit this machine.
    """
    limits = find_target(request.target).limits(request.arch)
    near = kernel.legal_neighbours(request.target, request.genome.parameters, request.workload, limits)
    requests: list[tuple[Request, Point]] = [(replace(request, workload=w), {}) for w in (request.workload, *near)]
    timed = frozenset({request.workload})
    results, too_large = check_kernel(executor, kernel, requests, timed=timed, gate=gate, seed=seed, observe=observe)
    for reason in too_large.values():
        raise UsageError(reason)
    return results


def _wait(future: Future[_T], report: Callable[[], None]) -> _T:
    """The future's result; `report` is called now and then while it is waited for."""
    while True:
        try:
            return future.result(timeout=_OBSERVE_S)
        except TimeoutError:
            if future.done():
                return future.result()
            report()
