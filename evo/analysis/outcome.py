"""The outcome of a run, workload by workload: the record behind a report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evo.analysis.candidates import CandidateRecord, TimingRecord, read_candidate
from evo.analysis.descent import Kin, read_family
from evo.analysis.failures import FailureReport, present_space, read_failures
from evo.analysis.finals import RefusedFinalist, RunFinals, WorkloadFinals, read_run_finals
from evo.analysis.importance import Importance, read_importance
from evo.analysis.operators import OperatorCredit, compare_with_parents, read_operators
from evo.analysis.runs import RunSummary, TaskSummary, find_run
from evo.analysis.times import RelativeTime
from evo.errors import UsageError
from evo.evaluation import PASSED, within_noise
from evo.lineage.read import record_of, resolve_run
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import recorded_kernel
from evo.problem.space import Parameter, Point, Space, Value


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A run's problem as its kernel states it now, since a database has values and no spaces.

    spaces: search spaces by task. roles: roles by baseline. changed: why this may not be what the kernel said to the run;
    empty if it is.
    """

    spaces: Mapping[int, Space]
    roles: Mapping[str, str]
    changed: str = ""


@dataclass(frozen=True, kw_only=True)
class Milestone(RelativeTime):
    """A candidate that was faster than all before it on its task, in an undisturbed race. evaluated: number of candidates
    tried there by then, itself included. refused: whether the finals refused it later."""

    order: int
    id: str
    evaluated: int
    elapsed_s: float
    refused: bool

    @property
    def low(self) -> float:
        """The lower limit of the speed-up, as `high` is the upper; the speed-up itself without an interval."""
        return 1 / (self.ratio_high or self.ratio)

    @property
    def high(self) -> float:
        return 1 / (self.ratio_low or self.ratio)


@dataclass(frozen=True, kw_only=True)
class WorkloadOutcome:
    """One workload of a run.

    points, elapsed_s, speedup, passed: for each candidate by order, its parameters, the seconds of searching until it was
    recorded, its speed-up over the reference (NaN without a time), and whether it passed the search.
    parameters: those tried, each with the values tried. milestones: the new bests.
    leader: the winner, or else the best of the search, which no final has confirmed. steps: the leader's ancestors and
    itself. operators: their credit over the whole search. refused: the finalists that the finals refused. importance: that
    of every parameter, the most important first.
    """

    task: TaskSummary
    points: tuple[Point, ...]
    elapsed_s: NDArray[np.float64]
    speedup: NDArray[np.float64]
    passed: NDArray[np.bool_]
    parameters: tuple[Parameter, ...]
    milestones: tuple[Milestone, ...]
    leader: CandidateRecord | None
    finals: WorkloadFinals
    steps: tuple[Kin, ...]
    failures: FailureReport
    operators: tuple[OperatorCredit, ...]
    refused: tuple[RefusedFinalist, ...]
    importance: tuple[Importance, ...]

    @property
    def number(self) -> int:
        return len(self.points)

    @property
    def important(self) -> list[str]:
        """Names of the parameters whose importance is known, the most important first."""
        return [i.parameter for i in self.importance if i.importance is not None]

    @property
    def confirmed(self) -> bool:
        """Whether finals have named the leader winner, its time is sure, and the gate lacks no kind of cases."""
        won = self.leader is not None and self.task.winner == self.leader.id
        return won and not self.busy and not self.finals.not_confirmed

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy to measure the leader."""
        return self.timing is not None and self.timing.disturbed

    @property
    def timing(self) -> TimingRecord | None:
        """The leader's time with cold caches in its last race."""
        timings = self.leader.timings if self.leader else ()
        latest = max((t.round for t in timings), default=0)
        own = (t for t in timings if t.round == latest and t.contender == "candidate" and t.protocol != "hot")
        return next(own, None)

    @property
    def baselines(self) -> tuple[TimingRecord, ...]:
        """The cold baselines of the leader's last race; none where that was a race of the search."""
        return self.finals.baselines if self.timing is not None and self.timing.stage == "final" else ()

    @property
    def ceiling(self) -> TimingRecord | None:
        """The fastest of the baselines that only move the bytes."""
        return next((t for t in self.baselines if t.contender == self.finals.ceiling), None)

    @property
    def tie(self) -> bool:
        """Whether the speed-up is within the noise floor."""
        return self.timing is not None and not self.busy and within_noise(self.timing.ratio, self.finals.noise_floor)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The outcome of a run. db: the database as commands have to name it; None for the default."""

    run: RunFinals
    db: str | None
    problem: Problem
    workloads: tuple[WorkloadOutcome, ...]


def read_outcome(store: Store, name: str, *, db: str | None = None) -> RunOutcome:
    """The outcome of the named run. db: see `RunOutcome`."""
    problem = read_problem(find_run(store, name))
    run = read_run_finals(store, name, [name for name, role in problem.roles.items() if role == "ceiling"] or ["copy"])
    importance = read_importance(store, run.name)
    workloads = (_read_workload(store, run, task, problem.spaces.get(task.number), importance) for task in run.tasks)
    return RunOutcome(run=run, db=db, problem=problem, workloads=tuple(workloads))


def _read_workload(
    store: Store, run: RunFinals, task: TaskSummary, space: Space | None, importance: Sequence[Importance]
) -> WorkloadOutcome:
    """The outcome of one workload. space: its search space, if the kernel is known. importance: records of all workloads."""
    with store.reading() as connection:
        some = compare_with_parents(connection, resolve_run(connection, run.name), task.number)
    points = tuple(Genome.from_json(one.row.genome).parameters for one in some)
    leading = task.winner or task.best
    operators = read_operators(store, run.name, windows=1, task=task.number)
    refused = tuple(f for f in run.refused_in_finals if f.task == task.number)
    milestones = (
        record_of(
            Milestone,
            one.row,
            **one.time.figures(),
            id=one.row.public_id,
            evaluated=evaluated,
            refused=one.row.public_id in {f.id for f in refused},
        )
        for evaluated, one in enumerate(some, 1)
        if one.best and one.time and not one.time.disturbed
    )
    return WorkloadOutcome(
        task=task,
        points=points,
        elapsed_s=np.array([one.row.elapsed_s for one in some], float),
        speedup=np.array([1 / one.row.score if one.row.score else np.nan for one in some], float),
        passed=np.array([one.row.status in PASSED for one in some], bool),
        parameters=_tried_parameters(points, space),
        milestones=tuple(milestones),
        leader=read_candidate(store, leading) if leading else None,
        finals=run.finals[task.number],
        steps=read_family(store, leading, descendants=0).members if leading else (),
        failures=read_failures(store, run.name, task=task.number),
        operators=tuple(o for o in operators if o.window is None),
        refused=refused,
        importance=tuple(i for i in importance if i.workload == task.workload),
    )


def read_problem(run: RunSummary) -> Problem:
    """The problem as the kernel states it now, if it is here as it was recorded."""
    try:
        kernel = recorded_kernel(run.kernel, run.kernel_digest)
        workloads = {t.number: Workload.of(t.dims, t.dtype, t.options) for t in run.tasks}
        spaces = {n: present_space(kernel, run.target, run.arch, w) for n, w in workloads.items()}
    except Exception as error:  # a kernel.py may raise anything, and the record can still be shown
        gone = f"the kernel cannot be loaded here any more ({type(error).__name__})"
        return Problem(spaces={}, roles={}, changed=str(error) if type(error) is UsageError else gone)
    changed = "" if kernel.digest == run.kernel_digest else "the kernel has changed since this run"
    return Problem(spaces=spaces, roles={b.name: b.role for b in kernel.baselines}, changed=changed)


def _tried_parameters(points: Sequence[Point], space: Space | None) -> tuple[Parameter, ...]:
    """The parameters that were tried, in the kernel's order, then those that it does not have any more. Where the kernel is
    not known, a parameter with only words as values is taken for structural."""
    tried: dict[str, set[Value]] = defaultdict(set)
    for point in points:
        for name, value in point.items():
            tried[name].add(value)
    declared = space.by_name if space else {}
    found = []
    for name in [n for n in declared if n in tried] + sorted(n for n in tried if n not in declared):
        values = tuple(sorted(tried[name], key=lambda value: (isinstance(value, str), value)))
        words = all(isinstance(value, str) for value in values)
        known = declared.get(name) or Parameter(name=name, values=values, structural=words)
        order = dict.fromkeys((*known.values, *values))
        found.append(replace(known, values=tuple(value for value in order if value in tried[name])))
    return tuple(found)
