"""Candidates that no other beats in everything at once: time against registers, spills, shared memory and accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, func, select

from evo.analysis.times import RelativeTime, search_times
from evo.errors import UnknownNameError, UsageError
from evo.lineage import LATEST
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["AXES", "Nondominated", "read_pareto"]

_c, _i, _b, _k = m.Candidate, m.Task, m.Build, m.Check

_FIELDS = {"time": "ratio", "registers": "registers", "spills": "spill_bytes", "shared": "smem_bytes", "error": "error"}
AXES = tuple(_FIELDS)
"""What can be traded, each the less the better. time: over the reference's; shared: bytes a block, static and dynamic;
error: the largest of a gate case, over what was allowed."""


@dataclass(frozen=True, kw_only=True)
class Nondominated(RelativeTime):
    """A candidate of the front of its workload. An axis that the target does not have is None for all. equal: how many
    further candidates have the same figures on every axis. fastest: of its workload."""

    workload: str
    id: str
    order: int
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    error: float | None
    equal: int
    fastest: bool
    parameters: dict[str, Value]


def read_pareto(store: Store, run: str = LATEST, axes: Sequence[str] = AXES) -> list[Nondominated]:
    """By workload and time. Raises UnknownNameError, or StoreError for an ambiguous prefix, UsageError without an axis.

    All figures are the search's own: two candidates closer than its noise may both be here.
    """
    for axis in axes:
        if axis not in AXES:
            raise UnknownNameError("axis", axis, AXES)
    if not axes:
        raise UsageError(f"a front needs axes; choose among {', '.join(AXES)}")
    query = (
        select(_c.id, _c.public_id, _c.order, _c.task, _c.genome, _i.workload, _b.registers, _b.spill_bytes)
        .add_columns(_b.smem_static_bytes, _b.smem_dynamic_bytes)
        .join_from(_c, _i, and_(_i.run_id == _c.run_id, _i.number == _c.task))
        .join(_b, _b.candidate_id == _c.id, isouter=True)
        .order_by(_c.id)
    )
    tasks: dict[int, list[Nondominated]] = defaultdict(list)
    with store.reading() as connection:
        key = resolve_run(connection, run)
        rows: Any = connection.execute(query.where(_c.id.between(*key_range(key)), _c.score.is_not(None))).all()
        errors, times = _errors(connection, key), search_times(connection, key, [row.id for row in rows])
    for row in rows:
        tasks[row.task].append(_record(row, times[row.id], errors.get(row.id)))
    return [record for task in sorted(tasks) for record in _front(tasks[task], [_FIELDS[axis] for axis in axes])]


def _errors(connection: Connection, run_id: int) -> dict[int, float]:
    """Largest error over what was allowed, of the search's cases that have both."""
    rows = connection.execute(
        select(_k.candidate_id, func.max(_k.error / _k.allowed))
        .where(_k.candidate_id.between(*key_range(run_id)), _k.round == 0, _k.allowed > 0)
        .group_by(_k.candidate_id)
    )
    return {key: worst for key, worst in rows if worst is not None}


def _record(row: Any, time: RelativeTime, error: float | None) -> Nondominated:
    """As if nothing were equal to it, or faster."""
    shared = [part for part in (row.smem_static_bytes, row.smem_dynamic_bytes) if part is not None]
    return Nondominated(
        **time.figures(),
        workload=row.workload,
        id=row.public_id,
        order=row.order,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        smem_bytes=sum(shared) if shared else None,
        error=error,
        equal=0,
        fastest=False,
        parameters=Genome.from_json(row.genome).parameters,
    )


def _front(records: Sequence[Nondominated], fields: Sequence[str]) -> list[Nondominated]:
    """Sorted by all axes, a record can only be dominated by one before it. A figure that is not known is the worst there
    is, so that nothing is beaten by what nobody knows."""

    def place(record: Nondominated) -> tuple[float, ...]:
        figures = (getattr(record, name) for name in fields)
        return tuple(float("inf") if figure is None else float(figure) for figure in figures)

    front: dict[tuple[float, ...], list[Nondominated]] = {}
    for record in sorted(records, key=lambda r: (place(r), r.order)):
        own = place(record)
        if own in front:
            front[own].append(record)
        elif not any(all(a <= b for a, b in zip(other, own, strict=True)) for other in front):
            front[own] = [record]
    best = min(record.ratio for record in records)
    kept = [replace(group[0], equal=len(group) - 1, fastest=group[0].ratio == best) for group in front.values()]
    return sorted(kept, key=lambda record: (record.ratio, record.order))
