"""An executor for one task: the candidates of a kernel for one workload, and the data that they are judged with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic, sleep
from typing import TypeVar

from evo.evaluation import Build, Evaluation
from evo.executors import Executor, device_arch
from evo.executors._worker import run_with_kernel
from evo.lineage import RunSpec, Stage, StoredRun, gate_seeds
from evo.lineage.store import Store
from evo.measure import Incumbent, RaceRequest, RaceResult, Request, TaskData
from evo.measure.cases import far_cases, random_cases
from evo.measure.clock import OVERTIME
from evo.problem.genome import Genome
from evo.problem.kernel import Case, Kernel, Limits, Workload
from evo.problem.space import Space
from evo.sanitize import Sanitized

RANDOM_CASES, _LEAST_CASES = 64, 4
"""The random cases of a finalist, over all tasks of a run; and of each task, at least."""
_FINALIST_SANITIZED_S, _WINNER_SANITIZED_S, _WINNERS_SANITIZED_S = 180.0, 5.0, 60.0
"""Seconds of the memory checker for a finalist, where that is asked for; for a winner; for all winners of a run."""
_LEAST_SANITIZING_S = 1.0
"""A memory checker does not start in less."""
_PAUSE_S, _CHECKED_EVERY_S = 1.0, 1.0
"""Pause before a disturbed race is held again, doubled each time; and the interval of calls of `TaskExecutor.check`."""
_LEAST_RACE_S = 1.0
"""The least limit of a race that is held again: with less it would have no rounds."""
_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class Patience:
    """The seconds that all races of finals together may still wait for a quiet machine. tell: called with the workload and
    the seconds left when a wait begins."""

    left_s: float
    tell: Callable[[Workload, float], None]


@dataclass(frozen=True, kw_only=True)
class TaskExecutor(TaskData):
    """Asks an executor for what is wanted of one task's candidates."""

    problem: Kernel
    """The kernel that workers load by its name."""
    executor: Executor
    finals_cases: int = RANDOM_CASES
    """Random ones that a finalist is gated on; the winner meets more."""
    sanitized: bool = False
    """Whether all finalists are run under the device's memory checker, and not the winner alone."""
    sanitizing_s: float = _FINALIST_SANITIZED_S
    """The seconds that this may take."""
    gates_s: float = math.inf
    """The seconds after which finals gate no further finalist, once one has passed."""
    race_s: float = math.inf
    """The seconds that a race takes at most."""
    reference_us: float = math.inf
    """The reference's usual time, as in `RaceRequest`."""
    patience: Patience | None = None
    """The patience with which a disturbed race is held again; without it, no race is."""
    begin: Callable[[Workload, str, str], None] = lambda workload, kind, text: None
    """Is called when a step of finals begins, with its kind and what is said of it."""
    check: Callable[[], None] = lambda: None
    """Is called while a result is waited for: what it raises ends the waiting."""

    @cached_property
    def limits(self) -> Limits:
        return self.executor.target.limits(self.arch)

    @cached_property
    def space(self) -> Space:
        return self.problem.space(self.target, self.workload, self.limits)

    def with_neighbours(self, genome: Genome) -> list[TaskExecutor]:
        """This one, and one for each neighbouring workload that the genome is legal for: for others it is of no use."""
        near = [replace(self, workload=workload) for workload in self.problem.neighbours(self.target, self.workload)]
        return [self, *(task for task in near if task.space.is_legal(genome.parameters))]

    def request(self, genome: Genome) -> Request:
        return Request(**vars(self.data), device_arch=self._device_arch, genome=genome)

    @cached_property
    def _device_arch(self) -> str:
        return device_arch(self.executor.target, self.arch)

    def build(self, genome: Genome) -> Future[Build]:
        return self.executor.build(self.request(genome))

    def measure(
        self,
        genome: Genome,
        build: Build,
        *,
        time: bool,
        incumbent: Incumbent | None = None,
        cases: tuple[Case, ...] = (),
    ) -> Future[Evaluation]:
        """Gates a build, also on these cases, and times it if that is asked for."""
        request = replace(self.request(genome), build=build, time=time, incumbent=incumbent, cases=cases)
        return self.executor.measure(request)

    def check_memory(self, genome: Genome) -> Future[Sanitized] | None:
        """Runs it under the device's memory checker; None where that has too little time."""
        if self.sanitizing_s < _LEAST_SANITIZING_S:
            return None
        return self.executor.sanitize(self.request(genome), (), self.sanitizing_s)

    def awaited(self, result: Future[_Result]) -> _Result:
        """The result, when it is there. Raises what `check` raises."""
        while not wait([result], _CHECKED_EVERY_S).done:
            self.check()
        return result.result()

    def random_cases(self, number: int) -> tuple[Case, ...]:
        """Random cases: so many, but at least those that every finalist meets, which come first. A smaller number gives the
        first of a larger one's."""
        if number not in self._drawn:
            self._drawn[number] = self._run(random_cases, self.seed, number)
        return tuple(self._drawn[number])

    @cached_property
    def _drawn(self) -> dict[int, list[Case]]:
        return {}

    def far_cases(self) -> tuple[Case, ...]:
        """The far cases for a candidate of this workload that has won."""
        return self._run(far_cases)

    def _run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        kernel, digest = self.kernel, self.kernel_digest
        return run_with_kernel(function, kernel, digest, self.target, self.workload, *arguments)

    def race(
        self, contenders: Sequence[tuple[str, Genome, Build]], baselines: Sequence[str] = (), *, hot: bool = False
    ) -> RaceResult:
        """Waits for the end of the race; while there is patience, for one that nothing disturbs. A race that is held again
        is limited by the patience that is left."""
        request = RaceRequest(
            **vars(self.data),
            contenders=tuple(contenders),
            baselines=tuple(baselines),
            hot=hot,
            limit_s=self.race_s,
            reference_us=self.reference_us,
        )
        result, pause_s = self.awaited(self.executor.race(request)), _PAUSE_S
        while result.timings and result.timings[0].disturbed and self.patience and self.patience.left_s > 0:
            ends_s = monotonic() + self.patience.left_s
            self.patience.tell(self.workload, self.patience.left_s)
            paused_s = monotonic() + min(pause_s, self.patience.left_s)
            while (left_s := paused_s - monotonic()) > 0:
                self.check()
                sleep(min(left_s, _CHECKED_EVERY_S))
            limit_s = max(_LEAST_RACE_S, (ends_s - monotonic()) / OVERTIME)
            again = replace(request, limit_s=min(self.race_s, limit_s))
            result, pause_s = self.awaited(self.executor.race(again)), 2 * pause_s
            self.patience.left_s = ends_s - monotonic()
        return result


def tasks_of(spec: RunSpec, kernel: Kernel, executor: Executor, stage: Stage) -> list[TaskExecutor]:
    """The tasks of a run, with what their data are drawn with at this stage."""
    seed, sanitized = gate_seeds(spec.options, spec.seed)[stage], bool(spec.options.get("sanitize_finals"))
    winner_s = min(_WINNER_SANITIZED_S, _WINNERS_SANITIZED_S / len(spec.workloads))
    return [
        TaskExecutor(
            problem=kernel,
            executor=executor,
            kernel=spec.kernel,
            kernel_digest=spec.kernel_digest,
            target=spec.target,
            arch=spec.arch,
            workload=workload,
            seed=seed,
            finals_cases=max(_LEAST_CASES, RANDOM_CASES // len(spec.workloads)),  # many tasks have the same code
            sanitized=sanitized,
            sanitizing_s=_FINALIST_SANITIZED_S if sanitized else winner_s,
        )
        for workload in spec.workloads
    ]


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run with all that carries it out: its kernel, the database that keeps it, the workers."""

    run: StoredRun
    kernel: Kernel
    store: Store
    executor: Executor

    def tasks(self, stage: Stage) -> list[TaskExecutor]:
        return tasks_of(self.run.spec, self.kernel, self.executor, stage)
