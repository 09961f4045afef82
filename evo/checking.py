"""Checks a kernel as a whole: every structural branch of its template compiled, and gated where it can run.

Or one candidate alone: on its own workload, and on those neighbours that the finals gate it on.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace

from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, Executor, MeasureRequest
from evo.genome import Genome
from evo.kernel import Kernel, Workload
from evo.space import Point, Value
from evo.targets import find_target

__all__ = ["Branch", "Trial", "branch_genomes", "check_branches", "check_candidate", "check_workloads_of"]


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

    @property
    def passed(self) -> bool:
        return self.build.status is Status.OK and (self.measurement is None or self.measurement.status is Status.OK)


def check_workloads_of(kernel: Kernel, target: str) -> list[Workload]:
    """The kernel's own first workload in every dtype, and its neighbours in the first dtype."""
    example = kernel.example(target)
    found = [Workload.of(dict(example.dims), dtype, dict(example.options)) for dtype in kernel.dtypes[target]]
    return found + list(kernel.neighbours(target, example))


def branch_genomes(kernel: Kernel, target: str, arch: str, workload: Workload) -> list[tuple[Genome, Point]]:
    """(genome, what differs from the default) of every structural branch that is legal for the workload."""
    space = kernel.space(target, workload, find_target(target).limits(arch))
    points = space.branches()
    return [(Genome.of(p), _changes(points[0], p)) for p in points]


def check_branches(
    executor: Executor,
    kernel_name: str,
    kernel: Kernel,
    target: str,
    arch: str,
    workloads: list[Workload],
    *,
    gate: bool,
    seed: int,
) -> list[Branch]:
    """Builds all branches, then gates those that compiled if `gate` is set. Failures are data."""
    planned: list[tuple[Workload, Genome, Point, Future[Build]]] = []
    for workload in workloads:
        for genome, changes in branch_genomes(kernel, target, arch, workload):
            request = BuildRequest(kernel=kernel_name, target=target, arch=arch, genome=genome, workload=workload)
            planned.append((workload, genome, changes, executor.build(request)))
    branches = []
    for workload, genome, changes, future in planned:
        build, measurement = future.result(), None
        if gate and build.binary is not None:
            measurement = executor.measure(
                MeasureRequest(
                    kernel=kernel_name,
                    target=target,
                    genome=genome,
                    workload=workload,
                    build=build,
                    seed=seed,
                    time=False,
                )
            ).result()
        branches.append(
            Branch(workload=workload, genome=genome, changes=changes, build=build, measurement=measurement)
        )
    return branches


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


def check_candidate(executor: Executor, kernel: Kernel, request: BuildRequest, *, gate: bool, seed: int) -> list[Trial]:
    """Builds a candidate for its workload and for the neighbours it is legal for, then gates all that compiled.

    With the seed that a search drew its data with, this repeats the search's verdict: as there, the candidate is
    also timed at its own workload and its timed outputs are verified. A refusal at one workload leaves the others
    to be gated. Failures are data.
    """
    limits = find_target(request.target).limits(request.arch)
    near = kernel.legal_neighbours(request.target, request.genome.parameters, request.workload, limits)
    builds = [(w, executor.build(replace(request, workload=w))) for w in (request.workload, *near)]
    trials = []
    for workload, future in builds:
        build, measurement = future.result(), None
        if gate and build.binary is not None:
            measurement = executor.measure(
                MeasureRequest(
                    kernel=request.kernel,
                    target=request.target,
                    genome=request.genome,
                    workload=workload,
                    build=build,
                    seed=seed,
                    time=workload == request.workload,
                )
            ).result()
        cases = tuple(case.name for case in kernel.cases(request.target, workload))
        trials.append(Trial(workload=workload, cases=cases, build=build, measurement=measurement))
    return trials


def _changes(default: Point, point: Point) -> Point:
    changed: dict[str, Value] = {k: v for k, v in point.items() if default.get(k) != v}
    return changed
