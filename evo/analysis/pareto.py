"""Candidates that no other beats in everything at once: time against registers, spills, shared memory and accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, select

from evo.analysis.times import read_disturbed
from evo.errors import UnknownNameError, UsageError
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["AXES", "Nondominated", "read_pareto"]

_c, _i, _b, _k, _t = m.Candidate, m.Task, m.Build, m.Check, m.Timing

AXES = ("time", "registers", "spills", "shared", "error")
"""What can be traded, each the less the better. time: over the reference's; shared: bytes a block, static and dynamic;
error: the largest of a gate case, over what was allowed."""


@dataclass(frozen=True, kw_only=True)
class Nondominated:
    """A candidate of the front of its workload. An axis that the target does not have is None for all. equal: how many
    further candidates have the same figures on every axis. fastest: of its workload. disturbed: something slowed the device
    down while it was timed."""

    workload: str
    id: str
    order: int
    ratio: float
    median_us: float | None
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    error: float | None
    equal: int
    fastest: bool
    disturbed: bool
    parameters: dict[str, Value]


def read_pareto(store: Store, run: str, axes: Sequence[str] = AXES) -> list[Nondominated]:
    """By workload and time. Raises UnknownNameError, or StoreError for an ambiguous prefix, UsageError without an axis.

    All figures are the search's own: two candidates closer than its noise may both be here.
    """
    for axis in axes:
        if axis not in AXES:
            raise UnknownNameError("axis", axis, AXES)
    if not axes:
        raise UsageError(f"a front needs axes; choose among {', '.join(AXES)}")
    with store.reading() as connection:
        key = resolve_run(connection, run)
        rows = _rows(connection, key)
        errors = _errors(connection, key) if "error" in axes else {}
        disturbed = read_disturbed(connection, key)
    tasks: dict[int, list[_Point]] = defaultdict(list)
    for row in rows:
        point = _point(row, errors.get(row.id))
        tasks[row.task].append(point)
    found = []
    for task in sorted(tasks):
        found += _front(tasks[task], axes, disturbed)
    return found


@dataclass(frozen=True)
class _Point:
    row: Any
    figures: dict[str, float | None]


def _rows(connection: Connection, run_id: int) -> list[Any]:
    return list(
        connection.execute(
            select(
                _c.id, _c.public_id, _c.order, _c.task, _c.score, _c.genome, _i.workload, _t.median_us, _b.registers,
                _b.spill_bytes, _b.smem_static_bytes, _b.smem_dynamic_bytes,
            )
            .join_from(_c, _i, and_(_i.run_id == _c.run_id, _i.number == _c.task))
            .join(_b, _b.candidate_id == _c.id, isouter=True)
            .join(
                _t,
                and_(
                    _t.run_id == _c.run_id,
                    _t.candidate_id == _c.id,
                    _t.round == 0,
                    _t.contender == "candidate",
                    _t.protocol == "cold",
                ),
                isouter=True,
            )
            .where(_c.id.between(*key_range(run_id)), _c.score.is_not(None))
            .order_by(_c.id)
        )
    )  # fmt: skip


def _errors(connection: Connection, run_id: int) -> dict[int, float]:
    """Largest error over what was allowed, of the search's cases that have both."""
    rows = connection.execute(
        select(_k.candidate_id, func.max(_k.error / _k.allowed))
        .where(_k.candidate_id.between(*key_range(run_id)), _k.round == 0, _k.allowed > 0)
        .group_by(_k.candidate_id)
    )
    return {key: worst for key, worst in rows if worst is not None}


def _point(row: Any, error: float | None) -> _Point:
    parts = (row.smem_static_bytes, row.smem_dynamic_bytes)
    shared = None if parts == (None, None) else sum(part or 0 for part in parts)
    figures = {
        "time": row.score,
        "registers": row.registers,
        "spills": row.spill_bytes,
        "shared": shared,
        "error": error,
    }
    return _Point(row, figures)


def _front(points: list[_Point], axes: Sequence[str], disturbed: Collection[int]) -> list[Nondominated]:
    """Sorted by all axes, a point can only be dominated by one before it. A figure that is not known is the worst there
    is, so that nothing is beaten by what nobody knows."""

    def place(point: _Point) -> tuple[float, ...]:
        return tuple(float("inf") if (v := point.figures[axis]) is None else float(v) for axis in axes)

    front: dict[tuple[float, ...], list[_Point]] = {}
    for point in sorted(points, key=lambda p: (place(p), p.row.order)):
        own = place(point)
        if own in front:
            front[own].append(point)
        elif not any(all(a <= b for a, b in zip(other, own, strict=True)) for other in front):
            front[own] = [point]
    best = min(point.row.score for point in points)
    kept = [(group[0], len(group) - 1) for group in front.values()]
    kept.sort(key=lambda pair: (pair[0].row.score, pair[0].row.order))
    return [
        _record(point, equal, fastest=point.row.score == best, disturbed=point.row.id in disturbed) for point, equal in kept
    ]


def _record(point: _Point, equal: int, *, fastest: bool, disturbed: bool) -> Nondominated:
    row, figures = point.row, point.figures
    shared = figures["shared"]
    return Nondominated(
        workload=row.workload,
        id=row.public_id,
        order=row.order,
        ratio=row.score,
        median_us=row.median_us,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        smem_bytes=None if shared is None else int(shared),
        error=figures["error"],
        equal=equal,
        fastest=fastest,
        disturbed=disturbed,
        parameters=Genome.from_json(row.genome).parameters,
    )
