"""The finals of a run: who was raced, how fast each was there, and who cannot be told from the winner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from evo.analysis.figures import RaceFigures, final_figures
from evo.analysis.gains import Figure, Gain, gain_between, gain_within
from evo.analysis.races import noise_floors
from evo.lineage import models as m
from evo.lineage.models import unrefused
from evo.lineage.read import resolve_run, rows_of
from evo.lineage.store import Store

__all__ = ["QUOTED", "TWO_RACES", "Confirmation", "Finalist", "WorkloadFinals", "finals", "shift_sentence"]

_c, _i = m.Candidate, m.Task
_SHIFT = 0.02
"""By so much the winner's speed-up differs in its two races where it is worth a word, if the noise floor is not larger."""

TWO_RACES = (
    "behind: two races put together, for the evo that held this final kept the winner's time in the race that confirmed it"
    " only; the others' are of the race before, and a machine that was not the same in both is in the difference"
)
"""What is to be said of finalists without `WorkloadFinals.one_race`."""

QUOTED = ("that is the figure to quote", "that would be the figure to quote if nothing had slowed the device down")
"""What a winner's confirming time is; the second, where something disturbed it."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A candidate that the last final of its workload timed.

    score: what the search found. The times are those of the race of all finalists; ratio: over the reference baseline's.
    behind: the winner's speed-up over this one's in that race, with its interval; tie: that holds 1 (see
    `evo.analysis.gains`). None for the winner itself, and where there is none. Where `WorkloadFinals.one_race` is false the
    winner's times are those of the race that confirmed it, and `behind` compares two races.
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
class Confirmation:
    """The winner's time in the race that confirmed it, which is the one to quote: a fresh process, other data, beside a
    second copy of itself and the baselines only. shift: its speed-up there over that of the race of all finalists, where
    the two do not agree: something beside the candidate was not the same."""

    median_us: float | None
    low_us: float | None
    high_us: float | None
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    disturbed: bool
    shift: float | None


@dataclass(frozen=True, kw_only=True)
class WorkloadFinals:
    """finalists: the winner, then the others by their speed-up. Who was refused is not among them: see
    `queries.refused_finalists`. one_race: whether the times of all of them are of one race; they are not where an
    earlier evo has kept the winner's last one only."""

    task: int
    workload: str
    winner: str | None
    noise_floor: float | None
    one_race: bool
    confirmed: Confirmation | None
    finalists: tuple[Finalist, ...]


def finals(store: Store, run: str) -> tuple[WorkloadFinals, ...]:
    """By workload; without finalists where no final has been held.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        key = resolve_run(connection, run)
        name = connection.scalar(select(m.Run.name).where(m.Run.id == key)) or run
        tasks: Any = connection.execute(
            select(_i.number, _i.workload, _i.winner_id).where(_i.run_id == key).order_by(_i.number)
        ).all()
        raced = {
            number: (final_figures(connection, key, number, winner) or [RaceFigures()])[-1]
            for number, _, winner in tasks
        }
        keys = sorted(k for race in raced.values() for k in race.keys)
        about = select(_c.id, _c.public_id, _c.order, _c.operator, _c.score).where(unrefused())
        rows = {row.id: row for row in rows_of(connection, about, keys, _c.id)}
    floors = noise_floors(store, name)
    return tuple(
        _workload_finals(task, raced[task.number], rows, floors.get(task.workload)) for task in tasks
    )


def _workload_finals(task: Any, race: RaceFigures, rows: Mapping[int, Any], floor: float | None) -> WorkloadFinals:
    timed = {k: race.common.get(k) or race.confirmed[k] for k in race.keys if k in rows}
    winner = task.winner_id if task.winner_id in timed else None
    one_race = winner is None or winner in race.common
    compare = gain_within if one_race else gain_between
    gains = {k: compare(own, timed[winner]) for k, own in timed.items() if winner not in (None, k)}
    found = [_finalist(rows[k], own, gains.get(k), winner) for k, own in timed.items()]
    found.sort(key=lambda f: (not f.winner, f.ratio, f.order))
    again = race.confirmed.get(winner) if winner is not None else None
    return WorkloadFinals(
        task=task.number,
        workload=task.workload,
        winner=rows[winner].public_id if winner is not None else None,
        noise_floor=floor,
        one_race=one_race,
        confirmed=_confirmation(again, race.common.get(winner), floor) if again is not None and winner else None,
        finalists=tuple(found),
    )


def _finalist(row: Any, own: Figure, gain: Gain | None, winner: int | None) -> Finalist:
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


def _confirmation(again: Figure, raced: Figure | None, floor: float | None) -> Confirmation:
    change = gain_between(raced, again)
    apart = change is not None and change.tie is False and abs(change.gain - 1) > max(_SHIFT, floor or 0.0)
    return Confirmation(
        median_us=again.median_us,
        low_us=again.low_us,
        high_us=again.high_us,
        ratio=again.ratio,
        ratio_low=again.ratio_low,
        ratio_high=again.ratio_high,
        disturbed=again.disturbed,
        shift=change.gain if change is not None and apart else None,
    )


def shift_sentence(shift: float) -> str:
    """What a `Confirmation.shift` means."""
    more = f"{abs(shift - 1):.0%} {'more' if shift > 1 else 'less'}"
    return (
        f"the winner's two races do not agree: the speed-up was {more} when it was confirmed, beyond both intervals:"
        " the machine, or what else ran there, made that difference; the figure is no surer than that"
    )
