"""What was timed beside the candidates, and what disturbed it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, select

from evo.analysis.records import CandidateRecord, FinalRace, TimingRecord
from evo.evaluation import FINALIST
from evo.lineage import Stage
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import TIMING_COLUMNS, at_once, resolve_run
from evo.lineage.store import Store

__all__ = ["HeldRace", "baselines", "disturbed", "final_races", "held_races", "noise_floors", "noise_floors_of"]

_c, _r, _t = m.Candidate, m.Run, m.Timing


def baselines(store: Store, run: str) -> tuple[TimingRecord, ...]:
    """Times of a run's baselines that were not taken beside a candidate, in the order they were taken."""
    with store.reading() as connection:
        rows = connection.execute(
            select(_t.task, _t.stage, _t.round, *TIMING_COLUMNS)
            .where(_t.run_id == resolve_run(connection, run), _t.candidate_id.is_(None))
            .order_by(_t.id)
        )
        return tuple(TimingRecord(**row._mapping) for row in rows)


@dataclass(frozen=True)
class HeldRace:
    """Rows of timings that one final recorded: of those whom it raced, then of what ran beside them."""

    finalists: list[Any] = field(default_factory=list)
    beside: list[Any] = field(default_factory=list)


def held_races(
    connection: Connection, run_id: int, task: int, *columns: Any
) -> list[HeldRace]:
    """The finals of a task in the order they were held, with these columns of their timings besides `candidate_id`.

    A final is recorded in one transaction, its finalists before its baselines: by the order of their keys the next one
    begins where a finalist follows a baseline.
    """
    # In parts, each of which is found in the index: of all of a run's timings, few are of its finals.
    raced = select(m.Final.candidate_id).where(m.Final.candidate_id.between(*key_range(run_id)))
    of_finals = (_t.run_id == run_id, _t.task == task, _t.stage == Stage.FINAL.value)
    parts = [_t.candidate_id.is_(None), _t.candidate_id.in_(raced)]
    query = select(_t.id, _t.candidate_id, *columns).where(*of_finals)
    rows = {row.id: row for whose in parts for row in connection.execute(query.where(whose))}
    found: list[HeldRace] = []
    for _, row in sorted(rows.items()):
        if not found or (row.candidate_id is not None and found[-1].beside):
            found.append(HeldRace())
        (found[-1].beside if row.candidate_id is None else found[-1].finalists).append(row)
    return found


def final_races(store: Store, candidate: CandidateRecord) -> tuple[FinalRace, ...]:
    """What each final that timed a candidate timed beside it: the reference, the ceilings, the winner's twin. A final is
    left out where too much is lost to tell whether they ran in its race."""
    with store.reading() as connection:
        key, run_id = connection.execute(select(_c.id, _c.run_id).where(_c.public_id == candidate.id)).one()
        columns = (_t.task, _t.stage, _t.round, *TIMING_COLUMNS)
        held = held_races(connection, run_id, candidate.task, *columns)
    # Its last race of each round.
    races = {row.round: race for race in held for row in race.finalists if row.candidate_id == key}
    found = []
    for round_, race in sorted(races.items()):
        timings = tuple(_timing_of(row, round_) for row in race.beside)
        winners = {row.candidate_id for row in race.finalists if row.contender == FINALIST}
        beside = key in winners if winners else _same_race(_cold(candidate.timings, round_), _cold(timings, round_))
        if timings and beside is not None:
            found.append(FinalRace(round=round_, beside=beside, timings=timings))
    return tuple(found)


def _timing_of(row: Any, round_: int) -> TimingRecord:
    values = {k: v for k, v in row._mapping.items() if k not in ("id", "candidate_id")}
    return TimingRecord(**values | {"round": round_})


def _cold(timings: Iterable[TimingRecord], round_: int) -> TimingRecord | None:
    """None where it is lost."""
    cold = (t for t in timings if t.round == round_ and t.protocol != "hot" and t.contender != FINALIST)
    return next(cold, None)


def _same_race(one: TimingRecord | None, other: TimingRecord | None) -> bool | None:
    """Clocks are read once a race, for all of its contenders; the twin's have the noise floor besides. None where either is
    lost."""
    if one is None or other is None:
        return None
    clocks = [{k: v for k, v in t.clocks.items() if k != "noise_floor"} for t in (one, other)]
    return clocks[0] == clocks[1] and len(one.samples_us) == len(other.samples_us)


def disturbed(store: Store, candidates: Collection[str]) -> frozenset[str]:
    """Those of the candidates (by public id) whose time in the search was taken while something slowed the device."""
    found: set[str] = set()
    with store.reading() as connection:
        for some in at_once(candidates):
            rows = connection.execute(
                select(_c.public_id, _t.clocks)
                .join_from(_c, _t, and_(_t.run_id == _c.run_id, _t.candidate_id == _c.id))
                .where(_c.public_id.in_(some), _t.round == 0, _t.contender == "candidate")
            )
            found.update(name for name, clocks in rows if clocks.get("disturbed"))
    return frozenset(found)


def noise_floors(store: Store, run: str) -> dict[str, float]:
    """By workload, what a winner of the run seemed to gain over a second copy of itself, in the last of its finals: a
    fraction. Workloads without a final are left out."""
    return {t.workload: t.clocks["noise_floor"] for t in baselines(store, run) if "noise_floor" in t.clocks}


def noise_floors_of(store: Store, runs: Collection[str]) -> dict[tuple[str, str], float]:
    """By run and workload, as `noise_floors` has them; for many runs at once."""
    found = {}
    with store.reading() as connection:
        for some in at_once(dict.fromkeys(runs)):
            rows = connection.execute(
                select(_r.name, _t.workload, _t.clocks)
                .join_from(_r, _t, and_(_t.run_id == _r.id, _t.candidate_id.is_(None)))
                .where(_r.name.in_(some), _t.stage == Stage.FINAL.value)
                .order_by(_t.id)
            )
            found.update({(run, workload): c["noise_floor"] for run, workload, c in rows if "noise_floor" in c})
    return found
