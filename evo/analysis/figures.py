"""What candidates are compared by: the times that the search and the finals took of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, select

from evo.analysis.gains import Figure
from evo.analysis.races import HeldRace, held_races
from evo.evaluation import AA_CONTROL, FINALIST, Status
from evo.lineage import models as m
from evo.lineage.read import rows_of

__all__ = ["RaceFigures", "final_figures", "search_figures"]

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


@dataclass(frozen=True)
class RaceFigures:
    """The cold times of one final, by the candidates' keys.

    common: of the race of all finalists; without the winner's where that was not kept. confirmed: the
    winner's, of the race that confirmed it.
    """

    common: dict[int, Figure] = field(default_factory=dict)
    confirmed: dict[int, Figure] = field(default_factory=dict)

    @property
    def keys(self) -> list[int]:
        return list({**self.confirmed, **self.common})


def final_figures(
    connection: Connection, run_id: int, task: int, winner: int | None
) -> list[RaceFigures]:
    """Of the finals of a task that timed somebody, in the order they were held. winner: key of the task's."""
    columns = (_t.contender, _t.protocol, *_FIGURE, _t.samples_us)
    found = []
    for race in held_races(connection, run_id, task, *columns):
        rows = [row for row in race.finalists if row.protocol != "hot" and row.ratio]
        won, figures = _confirmed(race, rows, winner), RaceFigures()
        for row in rows:
            apart = row.contender != FINALIST and row.candidate_id == won
            figure = replace(_figure(row), samples_us=tuple(row.samples_us))
            (figures.confirmed if apart else figures.common)[row.candidate_id] = figure
        if rows:
            found.append(figures)
    return found


def _confirmed(race: HeldRace, rows: Sequence[Any], winner: int | None) -> int | None:
    """Key of the candidate that a final confirmed. In older records only the winner's last race was kept: it stands first
    where a twin ran, and is the task's winner where none did."""
    for row in rows:
        if row.contender == FINALIST:
            return int(row.candidate_id)
    if rows and any(t.contender == AA_CONTROL for t in race.beside):
        return int(rows[0].candidate_id)
    return winner if any(row.candidate_id == winner for row in rows) else None


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
