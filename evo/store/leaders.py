"""Who leads: the winner of an island, and the fastest candidates over all runs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import aliased

from evo.evaluation import Status
from evo.genome import Genome
from evo.store import models as m
from evo.store.records import Best
from evo.store.rows import TIMING_COLUMNS
from evo.store.runs import resolve_run
from evo.store.store import Store

__all__ = ["best", "last_refusals", "leader_key"]

_PASSED = tuple(status.value for status in Status if status.passed)
_c, _i, _r, _t = m.Candidate, m.Island, m.Run, m.Timing


def last_refusals() -> ColumnElement[bool]:
    """Of `Final`: it is the last one of its candidate, and refused it."""
    final, last = m.Final, aliased(m.Final)
    newest = select(func.max(last.round)).where(last.candidate_id == final.candidate_id).scalar_subquery()
    return and_(final.status.not_in(_PASSED), final.round == newest)


def leader_key() -> ColumnElement[int | None]:
    """Key of an island's winner, or else of its candidate with the lowest score that no final has refused."""
    refused = select(m.Final.candidate_id).where(last_refusals())
    lowest = (
        select(_c.id)
        .where(_c.run_id == _i.run_id, _c.island == _i.number, _c.score.is_not(None), _c.id.not_in(refused))
        .order_by(_c.score, _c.id)
        .limit(1)
        .correlate(_i)
        .scalar_subquery()
    )
    return func.coalesce(_i.winner_id, lowest)


def best(
    store: Store, kernel: str | None = None, *, target: str | None = None, run: str | None = None
) -> tuple[Best, ...]:
    """The fastest candidate for each kernel, target, device and workload, over all runs or in one.

    An island's candidate is its winner, or else the one with the lowest score; candidates are compared by
    their last measurement. Raises UnknownNameError for an unknown run; an unknown kernel has no rows.
    """
    e = m.Environment
    query = (
        select(
            _r.kernel,
            _r.target,
            _r.arch,
            e.device,
            _i.workload.label("island_workload"),
            _i.winner_id,
            _r.name,
            _c.id,
            _c.public_id,
            _c.order,
            _c.score,
            _c.genome,
            _t.stage,
            _t.round,
            *TIMING_COLUMNS,
        )
        .join_from(_i, _r, _r.id == _i.run_id)
        .join(e, e.id == _r.environment_id)
        .join(_c, _c.id == leader_key())
        .join(_t, and_(_t.run_id == _c.run_id, _t.candidate_id == _c.id))
        .where(_t.contender == "candidate", _t.workload == _i.workload)
    )
    if kernel is not None:
        query = query.where(_r.kernel == kernel)
    if target is not None:
        query = query.where(_r.target == target)
    with store.reading() as connection:
        if run is not None:
            query = query.where(_r.id == resolve_run(connection, run))
        rows: list[Any] = list(connection.execute(query))
    # The last measurement of each candidate, then the fastest candidate of each group.
    newest: dict[int, Any] = {}
    for row in rows:
        if row.id not in newest or _recency(row) > _recency(newest[row.id]):
            newest[row.id] = row
    leaders: dict[tuple[str, ...], Best] = {}
    for row in newest.values():
        record = _best(row)
        group = (record.kernel, record.target, record.device, record.workload)
        if group not in leaders or (record.ratio, record.order) < (
            leaders[group].ratio,
            leaders[group].order,
        ):
            leaders[group] = record
    return tuple(leaders[group] for group in sorted(leaders))


def _recency(row: Any) -> tuple[int, int]:
    """Later rounds are worth more, and in a round the finalists' protocol, then cold."""
    return row.round, {"final": 2, "cold": 1}.get(row.protocol, 0)


def _best(row: Any) -> Best:
    genome = Genome.from_json(row.genome)
    return Best(
        kernel=row.kernel,
        target=row.target,
        arch=row.arch,
        device=row.device,
        workload=row.island_workload,
        run=row.name,
        id=row.public_id,
        order=row.order,
        winner=row.winner_id == row.id,
        score=row.score,
        stage=row.stage,
        protocol=row.protocol,
        median_us=row.median_us,
        low_us=row.low_us,
        high_us=row.high_us,
        ratio=row.score if row.ratio is None else row.ratio,
        ratio_low=row.ratio_low,
        ratio_high=row.ratio_high,
        disturbed=bool(row.clocks.get("disturbed")),
        parameters=genome.parameters,
        flags=genome.flags,
    )
