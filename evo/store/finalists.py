"""The finals of a run: who was raced, how fast each was there, and who cannot be told from the winner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from evo.store import models as m
from evo.store.figures import final_figures
from evo.store.gains import Figure, gain_between
from evo.store.leaders import unrefused
from evo.store.lookups import rows_of
from evo.store.races import held_races, noise_floors
from evo.store.runs import resolve_run
from evo.store.store import Store

__all__ = ["Finalist", "WorkloadFinals", "finals"]

_c, _i = m.Candidate, m.Island


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A candidate that the last final of its workload timed.

    score: what the search found. The times are the final's, the winner's those of the race that confirmed it; ratio: over
    the reference baseline's. behind: the winner's speed-up over this one's, with its interval; tie: that holds 1 (see
    `evo.store.gains`). None for the winner itself, and where there is none.
    """

    id: str
    order: int
    operator: str
    winner: bool
    score: float | None
    median_us: float | None
    low_us: float | None
    high_us: float | None
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    disturbed: bool
    behind: float | None
    behind_low: float | None
    behind_high: float | None
    tie: bool | None


@dataclass(frozen=True, kw_only=True)
class WorkloadFinals:
    """finalists: the winner, then the others by their speed-up. Who was refused is not among them: see
    `evo.store.queries.refused_finalists`."""

    island: int
    workload: str
    winner: str | None
    noise_floor: float | None
    finalists: tuple[Finalist, ...]


def finals(store: Store, run: str) -> tuple[WorkloadFinals, ...]:
    """By workload; without finalists where no final has been held.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        key = resolve_run(connection, run)
        name = connection.scalar(select(m.Run.name).where(m.Run.id == key)) or run
        islands: Any = connection.execute(
            select(_i.number, _i.workload, _i.winner_id).where(_i.run_id == key).order_by(_i.number)
        ).all()
        raced = {island.number: _last_race(connection, key, island.number) for island in islands}
        keys = sorted(k for some in raced.values() for k in some)
        figures = final_figures(connection, key, keys)
        about = select(_c.id, _c.public_id, _c.order, _c.operator, _c.score).where(unrefused())
        rows = {row.id: row for row in rows_of(connection, about, keys, _c.id)}
    floors = noise_floors(store, name)
    found = []
    for number, workload, winner in islands:
        timed = {k: figures[k] for k in raced[number] if k in figures and k in rows}
        some = [_finalist(rows[k], timed, winner) for k in timed]
        some.sort(key=lambda f: (not f.winner, f.ratio, f.order))
        found.append(
            WorkloadFinals(
                island=number,
                workload=workload,
                winner=rows[winner].public_id if winner in timed else None,
                noise_floor=floors.get(workload),
                finalists=tuple(some),
            )
        )
    return tuple(found)


def _last_race(connection: Connection, run_id: int, island: int) -> list[int]:
    """Keys of the candidates that the last final of an island timed."""
    races = [race.finalists for race in held_races(connection, run_id, island) if race.finalists]
    return list(dict.fromkeys(row.candidate_id for row in reversed(races[-1]))) if races else []


def _finalist(row: Any, figures: Mapping[int, Figure], winner: int | None) -> Finalist:
    own = figures[row.id]
    gain = gain_between(own, figures.get(winner)) if winner is not None and winner != row.id else None
    return Finalist(
        id=row.public_id,
        order=row.order,
        operator=row.operator,
        winner=row.id == winner,
        score=row.score,
        median_us=own.median_us,
        low_us=own.low_us,
        high_us=own.high_us,
        ratio=own.ratio,
        ratio_low=own.ratio_low,
        ratio_high=own.ratio_high,
        disturbed=own.disturbed,
        behind=gain.gain if gain else None,
        behind_low=gain.low if gain else None,
        behind_high=gain.high if gain else None,
        tie=gain.tie if gain else None,
    )
