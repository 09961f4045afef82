"""Candidates that no other beats in everything at once: time against registers, spills, shared memory and accuracy."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le

from sqlalchemy import and_, func, select

from evo.analysis.times import RelativeTime, search_times
from evo.errors import UnknownNameError, UsageError
from evo.evaluation import Check
from evo.lineage import LATEST
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import read_details, record_of, resolve_run
from evo.lineage.store import Store
from evo.problem.space import Value

_c, _i, _b, _d = m.Candidate, m.Task, m.Build, m.Detail

_FIELDS = {"time": "ratio", "registers": "registers", "spills": "spill_bytes", "shared": "smem_bytes", "error": "error"}
AXES = tuple(_FIELDS)
"""Figures that can be traded, each the less the better. time: the ratio to the reference's; shared: bytes a block, static
and dynamic; error: the largest share of what the gate allows in a case."""


@dataclass(frozen=True, kw_only=True)
class Nondominated(RelativeTime):
    """A candidate of the front of its workload. An axis that the target does not have is None for all. equal: number of
    further candidates with the same figures on every axis. fastest: whether it is the fastest of its workload."""

    workload: str
    id: str
    order: int
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    error: float | None
    parameters: dict[str, Value]
    equal: int = 0
    fastest: bool = False


def read_pareto(store: Store, run: str = LATEST, axes: Sequence[str] = AXES) -> list[Nondominated]:
    """The fronts of a run's workloads, sorted by time. All figures are the search's own: two candidates may both be here
    although they differ by less than its noise. Raises UsageError without an axis."""
    for axis in axes:
        if axis not in AXES:
            raise UnknownNameError("axis", axis, AXES)
    if not axes:
        raise UsageError(f"a front needs axes; choose among {', '.join(AXES)}")
    static, dynamic = _b.smem_static_bytes, _b.smem_dynamic_bytes
    query = (
        select(_c.id.label("key"), _c.task, _c.genome, _c.public_id.label("id"), _c.order, _i.workload, _b.registers)
        .add_columns(_b.spill_bytes, func.coalesce(static + dynamic, static, dynamic).label("smem_bytes"))
        .join_from(_c, _i, and_(_i.run_id == _c.run_id, _i.number == _c.task))
        .join(_b, _b.candidate_id == _c.id, isouter=True)
        .order_by(_c.id)
    )
    tasks: dict[int, list[Nondominated]] = defaultdict(list)
    with store.reading() as connection:
        key = resolve_run(connection, run)
        timed = query.where(_c.id.between(*key_range(key)), _c.score.is_not(None))
        rows = connection.execute(timed).all()
        times = search_times(connection, key, [row.key for row in rows])
        details = read_details(connection, _d.candidate_id.between(*key_range(key)), _d.round == 0)
        errors = {told.candidate_id: _error(told.checks) for told in details}
    for row in rows:
        record = record_of(Nondominated, row, error=errors.get(row.key), **times[row.key].figures())
        tasks[row.task].append(record)
    return [record for task in sorted(tasks) for record in _front(tasks[task], [_FIELDS[axis] for axis in axes])]


def _error(checks: Sequence[Check]) -> float | None:
    return max((c.error / c.allowed for c in checks if c.allowed and c.error is not None), default=None)


def _front(records: Sequence[Nondominated], fields: Sequence[str]) -> list[Nondominated]:
    """The records that no other dominates. In the order of all axes, only an earlier one can dominate a record. An unknown
    figure counts as the worst, so that it beats nothing."""
    alike: dict[tuple[float, ...], list[Nondominated]] = defaultdict(list)
    for record in records:
        figures = (getattr(record, name) for name in fields)
        alike[tuple(float("inf") if figure is None else float(figure) for figure in figures)].append(record)
    front: list[tuple[float, ...]] = []
    for own in sorted(alike):
        if not any(all(map(le, other, own)) for other in front):
            front.append(own)
    best = min(record.ratio for record in records)
    groups = [alike[own] for own in front]
    kept = [replace(group[0], equal=len(group) - 1, fastest=group[0].ratio == best) for group in groups]
    return sorted(kept, key=lambda record: (record.ratio, record.order))
