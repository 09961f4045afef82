"""The fastest candidates: of each kernel, device and workload over all runs, of each run, of each workload of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from evo.analysis.candidates import Subject, select_candidates
from evo.analysis.times import FIGURES, RelativeTime, noise_floors
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.models import key_range, last_refusals, leader_key, unrefused
from evo.lineage.read import record_of, resolve_run, rows_of
from evo.lineage.store import Store
from evo.problem.space import Value

UNCONFIRMED = "unconfirmed"
"""`Best.finals` of a run whose finals were held to their end without a winner."""

_c, _e, _i, _r, _t = m.Candidate, m.Environment, m.Task, m.Run, m.Timing


@dataclass(frozen=True, kw_only=True)
class Best(Subject, RelativeTime):
    """The fastest candidate known for a kernel, target, device and workload, with the time of its last final where `stage`
    is "final", else of the search.

    score: what the search found. finals: what those of its run said for its workload: "confirmed" (it is the winner),
    UNCONFIRMED, or "not held" (or not to their end). refused_finalists: how many they refused. noise_floor: of the last
    final.
    """

    PRINTED: ClassVar = ("candidate", "speedup")
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
    names = ((_r.kernel, kernel), (_r.target, target), (_i.dtype, dtype))
    parts = ((_e.device, device), (_i.workload, workload))
    conditions = [column == name for column, name in names if name is not None]
    conditions += [func.lower(column).contains(part.lower(), autoescape=True) for column, part in parts if part is not None]
    with store.reading() as connection:
        if run is not None:
            conditions.append(_r.id == resolve_run(connection, run))
        found = leaders(connection, *conditions)
    first: dict[tuple[str, ...], Best] = {}
    for record in found:
        first.setdefault((record.kernel, record.target, record.device, record.workload), record)
    return tuple(first[group] for group in sorted(first))


def ranked(store: Store, run: str, task: int) -> Sequence[str]:
    """Public ids of a task's candidates that have a score and that no final has refused, by score.

    Raises UnknownNameError.
    """
    with store.reading() as connection:
        of_task = (_c.run_id == resolve_run(connection, run), _c.task == task)
        query = select(_c.public_id).where(*of_task, _c.score.is_not(None), unrefused())
        return connection.scalars(query.order_by(_c.score, _c.id)).all()


def leaders(connection: Connection, *conditions: ColumnElement[bool]) -> list[Best]:
    """The fastest of each task that has a timed candidate, by its last measurement: the highest speed-up first, those that
    nothing has confirmed last.

    In two steps and not in one join, for which a planner may read every timing there is.
    """
    tasks = select(leader_key()).join_from(_i, _r, _r.id == _i.run_id).join(_e, _e.id == _r.environment_id)
    keys = sorted(key for key in connection.scalars(tasks.where(*conditions)) if key is not None)
    query = (
        select_candidates(_c.id.label("key"), _c.task, _c.score, _c.genome, _i.run_id, _i.winner_id, _r.status)
        .add_columns(_t.stage, _t.round, _t.protocol, _t.clocks, *FIGURES)  # not the samples, which are most of its bytes
        .join(_t, and_(_t.run_id == _c.run_id, _t.candidate_id == _c.id, _t.workload == _i.workload))
        .where(_t.contender == "candidate")
        # Later rounds are worth more, and in a round the finalists' protocol, then cold: a candidate's last row is kept.
        .order_by(_t.round, case((_t.protocol == "final", 2), (_t.protocol == "cold", 1), else_=0), _t.id.desc())
    )
    newest = {row.key: row for row in rows_of(connection, query, keys, _c.id)}
    verdicts = refusals(connection, [row.run_id for row in newest.values()])
    floors = noise_floors(connection, [row.run_id for row in newest.values()])
    found = (
        _best(row, verdicts.get((row.run_id, row.task)), floors.get((row.run_id, row.task))) for row in newest.values()
    )
    return sorted(found, key=lambda best: (best.unconfirmed, best.ratio, best.order))


def refusals(connection: Connection, runs: Collection[int]) -> dict[tuple[int, int], int]:
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
    ).all()
    return {(run_id, task): int(n) for run_id, task, n in rows}


def _best(row: Any, refused: int | None, floor: float | None) -> Best:
    """refused: number of refused finalists; None where no final has been held."""
    won = row.winner_id == row.key
    # The finals of a run that is not finished are to come, or to go on.
    held = refused is not None and row.status == RunStatus.FINISHED.value
    return record_of(
        Best,
        row,
        winner=won,
        ratio=row.score if row.ratio is None else row.ratio,
        disturbed=bool(row.clocks.get("disturbed")),
        finals="confirmed" if won else UNCONFIRMED if held else "not held",
        refused_finalists=refused or 0,
        noise_floor=floor,
    )
