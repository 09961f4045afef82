"""The fastest candidates: of each kernel, device and workload over all runs, of each run, of each workload of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from evo.analysis.times import RelativeTime, noise_floors
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.models import key_range, last_refusals, leader_key, unrefused
from evo.lineage.read import at_once, resolve_run
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["UNCONFIRMED", "Best", "best_by_run", "best_of_runs", "find_best", "ranked"]

UNCONFIRMED = "unconfirmed"
"""`Best.finals` of a run whose finals were held to their end without a winner."""

_c, _i, _r, _t = m.Candidate, m.Task, m.Run, m.Timing
# Without the samples, which are most of a timing's bytes.
_TIMING_COLUMNS = (_t.protocol, _t.median_us, _t.low_us, _t.high_us, _t.ratio, _t.ratio_low, _t.ratio_high, _t.clocks)
_PAGE = 256


@dataclass(frozen=True, kw_only=True)
class Best(RelativeTime):
    """The fastest candidate known for a kernel, target, device and workload, with the time of its last final where `stage`
    is "final", else of the search.

    score: what the search found. finals: what those of its run said for its workload: "confirmed" (it is the winner),
    UNCONFIRMED, or "not held" (or not to their end). refused_finalists: how many they refused. noise_floor: of the last
    final.
    """

    PRINTED: ClassVar = ("candidate", "speedup")
    kernel: str
    target: str
    arch: str
    device: str
    workload: str
    dtype: str
    run: str
    id: str
    order: int
    winner: bool
    score: float
    stage: str
    protocol: str
    finals: str
    refused_finalists: int
    noise_floor: float | None
    parameters: dict[str, Value]

    @property
    def candidate(self) -> str:
        return self.id

    @property
    def unconfirmed(self) -> bool:
        """Whether finals were held and confirmed no candidate: this one is what they have not refused, and not a result."""
        return self.finals == UNCONFIRMED


def find_best(
    store: Store,
    kernel: str | None = None,
    *,
    target: str | None = None,
    run: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    workload: str | None = None,
) -> tuple[Best, ...]:
    """The fastest candidate for each kernel, target, device and workload, over all runs or in one.

    A task's candidate is its winner, or else the one with the lowest score; candidates are compared by their last
    measurement, and unconfirmed ones come last. device, workload: a part of the name, in any case of letters.
    Raises UnknownNameError for an unknown run; an unknown kernel has no rows.
    """
    conditions = [
        column == wanted
        for column, wanted in ((_r.kernel, kernel), (_r.target, target), (_i.dtype, dtype))
        if wanted is not None
    ]
    for column, part in ((m.Environment.device, device), (_i.workload, workload)):
        if part is not None:
            conditions.append(func.lower(column).contains(part.lower(), autoescape=True))
    with store.reading() as connection:
        if run is not None:
            conditions.append(_r.id == resolve_run(connection, run))
        found = _leaders(connection, *conditions)
    leaders: dict[tuple[str, ...], Best] = {}
    for record in sorted(found, key=_rank):
        leaders.setdefault((record.kernel, record.target, record.device, record.workload), record)
    return tuple(leaders[group] for group in sorted(leaders))


def best_by_run(connection: Connection) -> dict[str, tuple[Best, ...]]:
    """By name of the run, the leader of each of its workloads, the highest speed-up first; in one query."""
    by_run: dict[str, list[Best]] = defaultdict(list)
    for record in sorted(_leaders(connection), key=_rank):
        by_run[record.run].append(record)
    return {run: tuple(records) for run, records in by_run.items()}


def best_of_runs(connection: Connection, runs: Collection[int]) -> list[Best]:
    """The leader of every workload of runs, by their keys."""
    return _leaders(connection, _r.id.in_(runs))


def ranked(store: Store, run: str, task: int) -> Iterator[str]:
    """Public ids of a task's candidates that have a score and that no final has refused, by score. Read as they are asked
    for.

    Raises UnknownNameError.
    """
    with store.reading() as connection:
        key = resolve_run(connection, run)
    query = select(_c.public_id).where(_c.run_id == key, _c.task == task, _c.score.is_not(None), unrefused())
    query = query.order_by(_c.score, _c.id)
    for offset in range(0, 2**31, _PAGE):
        with store.reading() as connection:
            found = connection.scalars(query.limit(_PAGE).offset(offset)).all()
        yield from found
        if len(found) < _PAGE:
            return


def _leaders(connection: Connection, *conditions: ColumnElement[bool]) -> list[Best]:
    """One for each task that has a timed candidate, by its last measurement.

    In two steps and not in one join, for which a planner may read every timing there is.
    """
    e = m.Environment
    tasks: Any = connection.execute(
        select(_i.run_id, _i.number, _i.workload, _i.dtype, _r.name, _r.kernel, _r.target, _r.arch, e.device)
        .add_columns(_r.status, m.Task.winner_id.label("winner"), leader_key().label("leader"))
        .join_from(_i, _r, _r.id == _i.run_id)
        .join(e, e.id == _r.environment_id)
        .where(*conditions)
    )
    by_leader = {row.leader: row for row in tasks if row.leader is not None}
    newest: dict[int, Any] = {}
    for some in at_once(sorted(by_leader)):
        timings: Any = connection.execute(
            select(_c.id, _c.public_id, _c.order, _c.score, _c.genome)
            .add_columns(_t.workload, _t.stage, _t.round, *_TIMING_COLUMNS)
            .join_from(_c, _t, and_(_t.run_id == _c.run_id, _t.candidate_id == _c.id))
            .where(_c.id.in_(some), _t.contender == "candidate")
            .order_by(_t.id)
        )
        for row in timings:
            if row.workload != by_leader[row.id].workload:
                continue
            if row.id not in newest or _recency(row) > _recency(newest[row.id]):
                newest[row.id] = row
    verdicts = _verdicts(connection, [by_leader[key].run_id for key in newest])
    floors = noise_floors(connection, [by_leader[key].name for key in newest])
    found = []
    for key, timed in newest.items():
        task = by_leader[key]
        refused, floor = verdicts.get((task.run_id, task.number)), floors.get((task.name, task.workload))
        found.append(_best(task, timed, refused, floor))
    return found


def _verdicts(connection: Connection, runs: Collection[int]) -> dict[tuple[int, int], int]:
    """By run and number of the task, how many candidates the last of their finals refused; tasks without finals are left
    out. There may be others than of these runs."""
    if not runs:
        return {}
    final = m.Final
    first, last = key_range(min(runs))[0], key_range(max(runs))[1]
    rows = connection.execute(
        select(_c.run_id, _c.task, func.count(case((last_refusals(), 1))))
        .join_from(final, _c, _c.id == final.candidate_id)
        .where(final.candidate_id.between(first, last))
        .group_by(_c.run_id, _c.task)
    )
    return {(run_id, task): int(n) for run_id, task, n in rows}


def _rank(record: Best) -> tuple[bool, float, int]:
    return record.unconfirmed, record.ratio, record.order


def _recency(row: Any) -> tuple[int, int]:
    """Later rounds are worth more, and in a round the finalists' protocol, then cold."""
    return row.round, {"final": 2, "cold": 1}.get(row.protocol, 0)


def _best(task: Any, timed: Any, refused: int | None, floor: float | None) -> Best:
    """refused: number of refused finalists; None where no final has been held."""
    won = task.winner == timed.id
    return Best(
        kernel=task.kernel,
        target=task.target,
        arch=task.arch,
        device=task.device,
        workload=task.workload,
        dtype=task.dtype,
        run=task.name,
        id=timed.public_id,
        order=timed.order,
        winner=won,
        score=timed.score,
        stage=timed.stage,
        protocol=timed.protocol,
        median_us=timed.median_us,
        low_us=timed.low_us,
        high_us=timed.high_us,
        ratio=timed.score if timed.ratio is None else timed.ratio,
        ratio_low=timed.ratio_low,
        ratio_high=timed.ratio_high,
        disturbed=bool(timed.clocks.get("disturbed")),
        finals=_said(task.status, refused, won=won),
        refused_finalists=refused or 0,
        noise_floor=floor,
        parameters=Genome.from_json(timed.genome).parameters,
    )


def _said(status: str, refused: int | None, *, won: bool) -> str:
    """`Best.finals`. Those of a run that is not finished are to come, or to go on."""
    if won:
        return "confirmed"
    return "not held" if refused is None or status != RunStatus.FINISHED.value else UNCONFIRMED
