"""All that a report says of a run, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from evo.analysis import candidates as recorded
from evo.analysis import importance as asked
from evo.analysis import queries
from evo.analysis.figures import search_figures
from evo.analysis.finalists import Confirmation, Finalist, finals
from evo.analysis.records import CandidateRecord, Failure, FinalRace, RunSummary, Step, TaskSummary, TimingRecord
from evo.evaluation import AA_CONTROL, within_noise
from evo.lineage.columns import key_range, public_id
from evo.lineage.store import Store
from evo.report.columns import Candidates, read_candidates
from evo.report.importance import Importance, weigh_parameters
from evo.report.parameters import KnownParameter, Problem, known_parameters, read_problem

__all__ = ["Milestone", "RunData", "WorkloadData", "read_run_data"]

_REASONS = 5_000
"""Failures whose reasons are read."""


@dataclass(frozen=True, kw_only=True)
class Milestone:
    """A candidate that was faster than all before it on its task. row: in the columns. evaluated: how many were
    tried there by then, itself included."""

    row: int
    order: int
    id: str
    evaluated: int
    elapsed_s: float
    speedup: float
    low: float
    high: float
    median_us: float | None
    refused: bool
    """By the finals, later."""
    disturbed: bool
    """As all times of the workload were: there is nothing better to show."""


@dataclass(frozen=True, kw_only=True)
class WorkloadData:
    """One workload of a run.

    leader: the winner, or else the best of the search, which no final has confirmed. race: what the leader's last final
    timed beside it. finalists: all whom that final timed, by the race that all of them ran in if `one_race`;
    confirmation: the winner in the race that confirmed it. steps: its ancestors and itself. disturbed: those of them whose
    search timing was.
    reference: the name of the baseline that speed-ups are over, if a final timed it.
    """

    task: TaskSummary
    candidates: Candidates | None
    parameters: tuple[KnownParameter, ...]
    milestones: tuple[Milestone, ...]
    leader: CandidateRecord | None
    race: FinalRace | None
    finalists: tuple[Finalist, ...]
    steps: tuple[Step, ...]
    disturbed: frozenset[str]
    failures: tuple[Failure, ...]
    refused: tuple[Failure, ...]
    noise: float | None
    importance: Importance
    roles: dict[str, str]
    one_race: bool = True
    confirmation: Confirmation | None = None

    @property
    def number(self) -> int:
        return 0 if self.candidates is None else len(self.candidates)

    @property
    def confirmed(self) -> bool:
        """Whether finals have named the leader winner."""
        return self.leader is not None and self.task.winner == self.leader.id

    @property
    def timing(self) -> TimingRecord | None:
        """The leader's, of its last race: with cold caches."""
        return self._last(lambda t: t.protocol != "hot")

    @property
    def hot(self) -> TimingRecord | None:
        return self._last(lambda t: t.protocol == "hot")

    def _last(self, wanted: Any) -> TimingRecord | None:
        timings = self.leader.timings if self.leader else ()
        latest = max((t.round for t in timings), default=0)
        return next((t for t in timings if t.round == latest and t.contender == "candidate" and wanted(t)), None)

    @property
    def baselines(self) -> tuple[TimingRecord, ...]:
        """Of the leader's race, cold, without its twin."""
        timings = self.race.timings if self.race else ()
        return tuple(t for t in timings if t.protocol != "hot" and t.contender != AA_CONTROL)

    @property
    def twin(self) -> TimingRecord | None:
        timings = self.race.timings if self.race else ()
        return next((t for t in timings if t.contender == AA_CONTROL), None)

    @property
    def reference(self) -> TimingRecord | None:
        named = [t for t in self.baselines if self.roles.get(t.contender) == "reference"]
        return next(iter(named or [t for t in self.baselines if t.ratio is None]), None)

    @property
    def ceiling(self) -> TimingRecord | None:
        """The fastest of the baselines that only move the bytes."""
        bounds = [t for t in self.baselines if self.roles.get(t.contender, t.contender) in ("ceiling", "copy")]
        return min(bounds, key=lambda t: t.median_us, default=None)

    @property
    def tie(self) -> bool:
        """Whether the speed-up is within the noise floor."""
        return self.timing is not None and within_noise(self.timing.ratio, self.noise)

    @property
    def regret(self) -> float | None:
        """By how much the search overstated the winner."""
        timing, leader = self.timing, self.leader
        if not (self.confirmed and timing and timing.ratio and leader and leader.score) or timing.stage != "final":
            return None
        return timing.ratio / leader.score - 1


@dataclass(frozen=True, kw_only=True)
class RunData:
    """db: the database as commands have to name it; None for the one that they take by themselves."""

    run: RunSummary
    db: str | None
    problem: Problem
    workloads: tuple[WorkloadData, ...]


def read_run_data(store: Store, name: str, *, db: str | None = None) -> RunData:
    """db: as commands have to name the database. Raises UnknownNameError, or StoreError for an ambiguous name."""
    stored = store.run(name)
    run = queries.run(store, stored.name)
    problem = read_problem(run)
    noise = queries.noise_floors(store, run.name)
    weights = asked.importance(store, run.name)
    failures = queries.failures(store, run.name, limit=_REASONS)
    refused = queries.refused_finalists(store, run.name)
    columns = read_candidates(store, stored.id)
    out = {f.order for f in refused}
    held = {f.task: f for f in finals(store, run.name)}
    workloads = []
    for task in run.tasks:
        some = columns.get(task.number)
        name_of_leader = task.winner or task.best
        leader = recorded.candidate(store, name_of_leader) if name_of_leader else None
        races = queries.final_races(store, leader) if leader else ()
        steps = queries.ancestry(store, leader.id) if leader else ()
        tried = {n: set(v) for n, v in some.tried.items()} if some else {}
        parameters = known_parameters(problem, task, tried)
        workloads.append(
            WorkloadData(
                task=task,
                candidates=some,
                parameters=parameters,
                importance=weigh_parameters(
                    [w for w in weights if w.workload == task.workload],
                    parameters,
                    None if problem.changed else problem.spaces.get(task.number),
                ),
                milestones=_milestones(store, stored.id, stored.uid, some, out) if some else (),
                leader=leader,
                race=races[-1] if races else None,
                finalists=held[task.number].finalists,
                one_race=held[task.number].one_race,
                confirmation=held[task.number].confirmed,
                steps=steps,
                disturbed=queries.disturbed(store, [s.id for s in steps]),
                failures=tuple(f for f in failures if f.task == task.number),
                refused=tuple(f for f in refused if f.task == task.number),
                noise=noise.get(task.workload),
                roles=dict(problem.roles),
            )
        )
    return RunData(run=run, db=db, problem=problem, workloads=tuple(workloads))


def _milestones(store: Store, run_id: int, uid: str, some: Candidates, refused: set[int]) -> tuple[Milestone, ...]:
    rows = [int(r) for r in np.flatnonzero(some.best)]
    orders = [int(some.order[r]) for r in rows]
    first, _ = key_range(run_id)
    with store.reading() as connection:
        figures = search_figures(connection, run_id, [first + order for order in orders])
    found = []
    for row, order in zip(rows, orders, strict=True):
        ratio, timing = float(some.score[row]), figures.get(first + order)
        low, high = (timing.ratio_low or ratio, timing.ratio_high or ratio) if timing else (ratio, ratio)
        found.append(
            Milestone(
                row=row,
                order=order,
                id=public_id(uid, order),
                evaluated=row + 1,
                elapsed_s=float(some.elapsed_s[row]),
                speedup=1 / ratio,
                low=1 / high,
                high=1 / low,
                median_us=timing.median_us if timing else None,
                refused=order in refused,
                disturbed=timing is not None and timing.disturbed,
            )
        )
    return tuple(found)
