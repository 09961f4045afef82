"""Checks of code before or after a search: built, gated, and timed as a search times it, without a sampler or finals.

`check_kernel` takes every structural branch of a template; `check_candidate` takes one candidate, on its own workload and on
the neighbouring sizes that the finals gate it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from evo.errors import UsageError
from evo.evaluation import Build, Check, Evaluation, Status
from evo.executors import InFlight
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.space import Point
from evo.search.tasks import TaskExecutor

_OBSERVE_S = 0.5

_TIMED = "timed"
"""The executor's name for the case that checks the outputs of the timed calls."""

_T = TypeVar("_T")


Observe = Callable[[int, int, InFlight | None, Point], None]
"""Is called several times a second while something is waited for: how many are done, and of how many; the work that has been
in flight the longest, and what differs from the default there."""

_Subject = tuple[TaskExecutor, Genome, Point]
"""What is checked, and what differs from the default there."""


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
    def passed_gate(self) -> bool:
        return self.measurement is not None and (self.passed or sum(c.passed for c in self.gate_checks) == len(self.cases))


def check_workloads_of(kernel: Kernel, target: str) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """The kernel's own first workload in every dtype; and its neighbours in the first dtype, which no search times."""
    example = kernel.example(target)
    own = tuple(Workload.of(dict(example.dims), dtype, dict(example.options)) for dtype in kernel.dtypes[target])
    return own, tuple(kernel.neighbours(target, example))


def check_kernel(
    task: TaskExecutor,
    workloads: Sequence[Workload],
    *,
    timed: frozenset[Workload],
    gate: bool,
    observe: Observe | None = None,
) -> tuple[list[Checked], dict[Workload, str]]:
    """(results, workloads whose timing data do not fit this machine, each with the reason: they are gated only).

    Builds every structural branch that is legal for each workload, then gates those that compiled, and times those of the
    workloads in `timed`. Without `gate` nothing is run. Failures are data.
    """
    subjects: list[_Subject] = []
    for own in (replace(task, workload=workload) for workload in workloads):
        points = own.space.branches()
        for point in points:
            subjects.append((own, Genome.of(point), {k: v for k, v in point.items() if points[0].get(k) != v}))
    return _check(subjects, timed, gate, observe)


def check_candidate(
    task: TaskExecutor, genome: Genome, *, gate: bool, observe: Observe | None = None
) -> list[Checked]:
    """Builds a candidate for its workload and for the neighbours it is legal for, then gates all that compiled.

    With the seed that a search drew its data with, this repeats the search's verdict: as there, the candidate is also timed
    at its own workload and its timed outputs are verified. A refusal at one workload leaves the others to be gated.
    Raises UsageError if the data of its timing do not fit this machine.
    """
    subjects: list[_Subject] = [(one, genome, {}) for one in task.with_neighbours(genome)]
    results, too_large = _check(subjects, frozenset({task.workload}), gate, observe)
    for reason in too_large.values():
        raise UsageError(reason)
    return results


def _check(
    subjects: Sequence[_Subject], timed: frozenset[Workload], gate: bool, observe: Observe | None
) -> tuple[list[Checked], dict[Workload, str]]:
    executor = subjects[0][0].executor
    building = [(task, genome, changes, task.build(genome)) for task, genome, changes in subjects]
    changes_of = {(genome, task.workload): changes for task, genome, changes in subjects}
    results: list[Checked] = []
    too_large: dict[Workload, str] = {}

    def result_of(future: Future[_T]) -> _T:
        while observe is not None and wait([future], timeout=_OBSERVE_S).not_done:
            work = next(iter(executor.in_flight()), None)
            changes = changes_of.get((work.genome, work.workload), {}) if work else {}
            observe(len(results), len(building), work, changes)
        return future.result()

    for task, genome, changes, future in building:
        workload, build, measurement = task.workload, result_of(future), None
        time = workload in timed and workload not in too_large
        if gate and build.binary is not None:
            try:
                measurement = result_of(task.measure(genome, build, time=time))
            except UsageError as error:
                if not time:
                    raise
                time, too_large[workload] = False, str(error)
                measurement = result_of(task.measure(genome, build, time=False))
        results.append(
            Checked(
                workload=workload,
                genome=genome,
                changes=changes,
                cases=tuple(case.name for case in task.problem.cases(task.target, workload)),
                build=build,
                measurement=measurement,
                timed=time and measurement is not None,
            )
        )
    return results, too_large
