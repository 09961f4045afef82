"""Times of candidates in the races of the search and of the finals, and how much faster one is than another."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from evo.evaluation import FINALIST, Gain, Status, is_disturbed, sure_speedup
from evo.lineage import Stage
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import names_of, record_of, rows_of

_c, _t = m.Candidate, m.Timing


@dataclass(frozen=True, kw_only=True)
class RelativeTime:
    """A candidate's time in one race, and its ratio to the reference baseline's time in the same race.

    disturbed: something slowed the device down while it was timed; it then has no speed-up, because none is sure.
    """

    median_us: float
    low_us: float
    high_us: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    disturbed: bool

    @property
    def speedup(self) -> float | None:
        """The speed-up over the reference; None where it is not sure."""
        return sure_speedup(self.ratio, self.disturbed)

    @property
    def speedup_low(self) -> float | None:
        return sure_speedup(self.ratio_high, self.disturbed)

    @property
    def speedup_high(self) -> float | None:
        return sure_speedup(self.ratio_low, self.disturbed)

    @property
    def distances(self) -> tuple[float, float] | None:
        """Logarithmic distances of the ratio from its two limits; None without an interval."""
        if not self.ratio_low or not self.ratio_high or self.ratio_low <= 0:
            return None
        return max(0.0, math.log(self.ratio / self.ratio_low)), max(0.0, math.log(self.ratio_high / self.ratio))

    def figures(self) -> dict[str, Any]:
        """The fields of this class, for another record that has them."""
        return {name: getattr(self, name) for name in RelativeTime.__dataclass_fields__}


FIGURES = tuple(getattr(_t, name) for name in names_of(RelativeTime, "disturbed"))
"""Columns of a `RelativeTime`, without `disturbed`, which follows from the clocks."""


@dataclass(frozen=True, kw_only=True)
class RaceTime(RelativeTime):
    """A time with what comparing it needs. timed: key of the candidate that the search timed for it, itself or an earlier
    one of the same machine code. samples_us: the samples of a final, round by round."""

    timed: int | None = None
    samples_us: tuple[float, ...] = ()


def gain_fields(gain: Gain | None, name: str = "gain") -> dict[str, Any]:
    """The fields of a record that tell a gain, its limits and whether it is a tie; all None without a gain. name: the field
    of the gain."""
    low, high, tie = (gain.low, gain.high, gain.tie) if gain else (None, None, None)
    return {name: gain.gain if gain else None, f"{name}_low": low, f"{name}_high": high, "tie": tie}


def gain_between(before: RelativeTime | None, after: RelativeTime | None) -> Gain | None:
    """The gain from one time to another of a different race; None where one is missing.

    The intervals are combined by MOVER (Zou and Donner 2008, Statistics in Medicine 27:1693), on logarithms because a gain
    is a quotient: each distance from an estimate to its limit counts as if it were a standard error. The method takes the
    two errors for independent.
    """
    if before is None or after is None or before.ratio <= 0 or after.ratio <= 0:
        return None
    known = [time.timed for time in (before, after) if isinstance(time, RaceTime) and time.timed is not None]
    if len(known) == 2 and known[0] == known[1]:
        return Gain(gain=1.0, low=1.0, high=1.0, same_code=True)
    gain = before.ratio / after.ratio
    one, other = before.distances, after.distances
    if one is None or other is None:
        return Gain(gain=gain)
    down, up = math.hypot(one[0], other[1]), math.hypot(one[1], other[0])
    return Gain(gain=gain, low=gain * math.exp(-down), high=gain * math.exp(up))


def gain_within(before: RaceTime, after: RaceTime) -> Gain | None:
    """The gain from one time to another of the same race, round by round: neither the reference's error nor what the machine
    did meanwhile is in it. Without single samples, it is that of `gain_between`."""
    one, other = before.samples_us, after.samples_us
    if not one or len(one) != len(other) or min(*one, *other) <= 0:
        return gain_between(before, after)
    from evo.measure.clock import paired_gain  # imports numpy, which takes longer than most commands

    return paired_gain(one, other)


def search_times(connection: Connection, run_id: int, keys: Sequence[int]) -> dict[int, RaceTime]:
    """The search's cold time of each candidate of a run that has one, by key. A candidate whose machine code was known
    already has the time of the earlier candidate."""
    timed = case((_c.status == Status.SAME_CODE.value, func.coalesce(_c.same_code_as_id, _c.id)), else_=_c.id)
    query = (
        select(_c.id.label("key"), _t.candidate_id.label("timed"), *FIGURES, _t.clocks)
        .join_from(_c, _t, and_(_t.run_id == _c.run_id, _t.candidate_id == timed))
        .where(_c.id.between(*key_range(run_id)))  # keeps planners from reading all candidates
        .where(_t.round == 0, _t.contender == "candidate", _t.protocol == "cold", _t.ratio > 0)
    )
    return {row.key: _race_time(row) for row in rows_of(connection, query, keys, _c.id)}


@dataclass(frozen=True)
class HeldRace:
    """The records of one final.

    finalists, beside: rows of the timings of finalists, and of what ran beside the winner. common: cold times in the race of
    all finalists, by key. confirmed: the winner's cold time in the race that confirmed it, by key; empty without a winner.
    """

    finalists: list[Any] = field(default_factory=list)
    beside: list[Any] = field(default_factory=list)
    common: dict[int, RaceTime] = field(default_factory=dict)
    confirmed: dict[int, RaceTime] = field(default_factory=dict)


def held_races(connection: Connection, run_id: int, task: int) -> list[HeldRace]:
    """The finals of a task that timed a candidate, in the order they were held.

    A final is recorded in one transaction, its finalists before its baselines: in the order of their keys, the next final
    begins where a finalist follows a baseline.
    """
    # Two queries, each of which an index serves: few of a run's timings are of its finals.
    raced = select(m.Final.candidate_id).where(m.Final.candidate_id.between(*key_range(run_id)))
    of_finals = (_t.run_id == run_id, _t.task == task, _t.stage == Stage.FINAL.value)
    query = select(_t.__table__).where(*of_finals)
    parts = (_t.candidate_id.is_(None), _t.candidate_id.in_(raced))
    rows = {row.id: row for part in parts for row in connection.execute(query.where(part))}
    found: list[HeldRace] = []
    for _, row in sorted(rows.items()):
        if not found or (row.candidate_id is not None and found[-1].beside):
            found.append(HeldRace())
        (found[-1].beside if row.candidate_id is None else found[-1].finalists).append(row)
    for race in found:
        won = {row.candidate_id for row in race.finalists if row.contender == FINALIST}
        for row in race.finalists:
            if row.protocol != "hot" and row.ratio:
                again = row.candidate_id in won and row.contender != FINALIST
                times = race.confirmed if again else race.common
                times[row.candidate_id] = _race_time(row)
    return [race for race in found if race.finalists]


def _race_time(row: Any) -> RaceTime:
    return record_of(RaceTime, row, disturbed=is_disturbed(row.clocks))


def noise_floors(connection: Connection, runs: Collection[int]) -> dict[tuple[int, int], float]:
    """The noise floor of each task's last final, by run and task: what the winner seemed to gain over a second copy of
    itself, as a fraction. Tasks without a final are left out."""
    query = select(_t.run_id, _t.task, _t.clocks).where(_t.candidate_id.is_(None), _t.stage == Stage.FINAL.value)
    rows = rows_of(connection, query.order_by(_t.id), sorted(set(runs)), _t.run_id)
    return {(run, task): clocks["noise_floor"] for run, task, clocks in rows if "noise_floor" in clocks}
