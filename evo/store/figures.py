"""What candidates are compared by: the times that the search and the finals took of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, select

from evo.evaluation import Status
from evo.store import Stage
from evo.store import models as m
from evo.store.gains import Figure
from evo.store.lookups import rows_of

__all__ = ["final_figures", "search_figures"]

_c, _t = m.Candidate, m.Timing
_FIGURE = (_t.ratio, _t.ratio_low, _t.ratio_high, _t.median_us, _t.low_us, _t.high_us, _t.clocks)
_SAME_CODE = Status.SAME_CODE.value


def search_figures(connection: Connection, run_id: int, keys: Sequence[int]) -> dict[int, Figure]:
    """The cold time that the search took of each candidate of a run, by key, where there is one; of a candidate whose
    machine code was known already, that of the one it was known from."""
    query = select(_t.candidate_id, *_FIGURE).where(
        _t.run_id == run_id, _t.round == 0, _t.contender == "candidate", _t.protocol == "cold"
    )
    known = select(_c.id, _c.same_code_as_id).where(_c.same_code_as_id.is_not(None), _c.status == _SAME_CODE)
    originals = {row.id: row.same_code_as_id for row in rows_of(connection, known, keys, _c.id)}
    found = {
        row.candidate_id: replace(_figure(row), timed=row.candidate_id)
        for row in rows_of(connection, query, sorted({*keys, *originals.values()}), _t.candidate_id)
        if row.ratio is not None
    }
    timed = {key: found.get(key) or found.get(originals.get(key, key)) for key in keys}
    return {key: figure for key, figure in timed.items() if figure is not None}


def final_figures(connection: Connection, run_id: int, keys: Sequence[int]) -> dict[int, Figure]:
    """The cold time that the last final took of each candidate of a run, by key, where there is one."""
    query = (
        select(_t.candidate_id, *_FIGURE)
        .where(_t.run_id == run_id, _t.stage == Stage.FINAL.value, _t.contender == "candidate", _t.protocol != "hot")
        .order_by(_t.round)
    )
    return {row.candidate_id: _figure(row) for row in rows_of(connection, query, keys, _t.candidate_id) if row.ratio}


def _figure(row: Any) -> Figure:
    return Figure(
        ratio=row.ratio,
        ratio_low=row.ratio_low,
        ratio_high=row.ratio_high,
        median_us=row.median_us,
        low_us=row.low_us,
        high_us=row.high_us,
        disturbed=bool(row.clocks.get("disturbed")),
    )
