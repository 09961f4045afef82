"""The finals of a run: the candidates that were raced, their times, and which cannot be told from the winner."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import case, func, select

from evo.analysis.candidates import CandidateSummary, TimingRecord
from evo.analysis.runs import RunSummary, TaskSummary, find_run, not_confirmed
from evo.analysis.times import HeldRace, RelativeTime, gain_between, gain_fields, gain_within, held_races
from evo.errors import error_line
from evo.evaluation import AA_CONTROL, UNCHECKED
from evo.lineage import LATEST
from evo.lineage import models as m
from evo.lineage.models import key_range, last_refusals, unrefused
from evo.lineage.read import record_of, resolve_run, rows_of
from evo.lineage.store import Store
from evo.problem.space import Value

_c = m.Candidate
_SHIFT = 0.02
"""Least relative difference of the winner's speed-up between its two races for a remark."""
_MUCH = 1.25
"""Least ratio of the winner's time to the roofline copy's for a remark on the room that is left."""


@dataclass(frozen=True, kw_only=True)
class Finalist(RelativeTime):
    """A candidate that the last final of its workload timed, with its time in the race of all finalists.

    score: its ratio in the search. behind: the winner's speed-up over this candidate in that race, with its interval; None
    for the winner itself, and where there is no winner. tie: whether the interval holds 1.
    """

    id: str
    order: int
    operator: str
    winner: bool
    score: float | None
    behind: float | None
    behind_low: float | None
    behind_high: float | None
    tie: bool | None


@dataclass(frozen=True, kw_only=True)
class RefusedFinalist(CandidateSummary):
    """A candidate that passed the search and was refused by the finals. status, reason: its status and a line of its log
    there."""

    task: int
    reason: str
    parameters: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Confirmation(RelativeTime):
    """The winner's time in the race that confirmed it, which is the time to quote: in a fresh process, on other data, beside
    a second copy of itself and the baselines only. shift: its speed-up there over the one in the race of all finalists,
    where the two do not agree: by the luck of the fastest, or because something beside the candidate was different."""

    shift: float | None


@dataclass(frozen=True, kw_only=True)
class WorkloadFinals:
    """The last final of one workload.

    finalists: the winner, then the others by their speed-up, without the refused. one_race: always true; kept for programs
    that read it. baselines: their cold times in the race that confirmed the winner. hot: the winner's time with all data in
    the cache. ceiling: the fastest baseline that only moves the bytes; times_ceiling: the winner's time over its time.
    claimed_speedup: the winner's speed-up in the search; selection_regret: how much that overstated it. disturbed: whether
    the machine was too busy to measure the winner; nothing is confirmed then. disturbed_us: the winner's time in the race
    that was to confirm it, where that was disturbed. not_confirmed: why the winner's figure is not
    confirmed although its race was held; empty if it is. remarks: sentences on what is unusual about the winner's figures.
    """

    task: int
    workload: str
    winner: str | None
    noise_floor: float | None
    one_race: bool = True
    confirmed: Confirmation | None
    finalists: tuple[Finalist, ...]
    baselines: tuple[TimingRecord, ...]
    hot: TimingRecord | None
    ceiling: str | None
    times_ceiling: float | None
    claimed_speedup: float | None
    selection_regret: float | None
    disturbed: bool
    disturbed_us: float | None
    not_confirmed: str
    discarded_rounds: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CoveredPoint:
    """A workload of a covering run, and what serves it. variant: the number of the winner's variant from 1; None where the
    reference was faster and serves it. speedup: the winner's confirmed one, None where it is not sure. distance: the time of
    what serves it over the least in the race of all finalists, less 1."""

    workload: str
    variant: int | None
    winner: str
    speedup: float | None
    distance: float


@dataclass(frozen=True, kw_only=True)
class Cover:
    """The few variants that serve the workloads of a covering run that have winners; the variant that serves most is first.
    A variant is a genome; it is compiled for each dtype and all else that the workloads compile in. worst, median: the
    largest and the median distance."""

    points: tuple[CoveredPoint, ...]
    variants: int
    worst: float
    median: float


@dataclass(frozen=True, kw_only=True)
class RunFinals(RunSummary):
    """A run with its finals. finals: the last one of each workload, without finalists where none was held.
    refused_in_finals: the candidates that passed the search and that the last of their finals refused, by order. cover: None
    unless few variants are to serve all workloads."""

    finals: tuple[WorkloadFinals, ...]
    refused_in_finals: tuple[RefusedFinalist, ...]
    cover: Cover | None


def read_run_finals(store: Store, name: str = LATEST, ceilings: Collection[str] = ("copy",)) -> RunFinals:
    """A run with its finals. ceilings: names of the baselines that only move the bytes."""
    run = find_run(store, name)
    final = m.Final
    with store.reading() as connection:
        key = resolve_run(connection, run.name)
        races = {task.number: (held_races(connection, key, task.number) or [HeldRace()])[-1] for task in run.tasks}
        keys = sorted({row.candidate_id for race in races.values() for row in race.finalists})
        about = select(_c.id.label("key"), *CandidateSummary.COLUMNS, _c.genome).where(unrefused())
        rows = {row.key: row for row in rows_of(connection, about, keys, _c.id)}
        query = (
            select(_c.public_id.label("id"), _c.order, _c.operator, final.status, _c.score, _c.task, _c.genome, final.log)
            .join_from(final, _c, _c.id == final.candidate_id)
            .where(_c.id.between(*key_range(key)), last_refusals())
            .order_by(_c.id)
        )
        last_logs = select(final.candidate_id, final.log).where(final.candidate_id.between(*key_range(key)))
        logs = {row.candidate_id: row.log for row in connection.execute(last_logs.order_by(final.round))}
        refused = [record_of(RefusedFinalist, row, reason=error_line(row.log)) for row in connection.execute(query)]
    finals = tuple(_workload_finals(run, task, races[task.number], rows, ceilings, logs) for task in run.tasks)
    genomes = {row.id: row.genome for row in rows.values()}
    return RunFinals(
        **vars(run),
        finals=finals,
        cover=_cover(finals, genomes) if run.options.get("cover") else None,
        refused_in_finals=tuple(refused),
    )


def read_costs(store: Store, name: str) -> tuple[float, float, float, float]:
    """A candidate's seconds, on average: of building without the cache, in the device process, of its gate and timing there.
    """
    with store.reading() as connection:
        own = _c.id.between(*key_range(resolve_run(connection, name)))
        mean = select(func.avg(_c.seconds), func.avg(_c.gate_seconds), func.avg(_c.timing_seconds)).where(own)
        built = func.sum(case((m.Build.cached, 0.0), else_=m.Build.seconds)) / func.count()
        building = connection.scalar(select(built).select_from(_c).join(m.Build, m.Build.candidate_id == _c.id).where(own))
        device, gate, timing = connection.execute(mean).one()
    return float(building or 0.0), float(device or 0.0), float(gate or 0.0), float(timing or 0.0)


def _workload_finals(
    run: RunSummary,
    task: TaskSummary,
    race: HeldRace,
    rows: Mapping[int, Any],
    ceilings: Collection[str],
    logs: Mapping[int, str],
) -> WorkloadFinals:
    """The last final of one workload. rows: those of the finalists that were not refused, by key. logs: the logs of their
    last finals, by key."""
    raced = {k: time for k, time in race.common.items() if k in rows}
    winner = next((k for k in raced if rows[k].id == task.winner), None)
    first, again = raced.get(winner or 0), race.confirmed.get(winner or 0)
    busy = again is not None and again.disturbed
    disturbed_us, again = (again.median_us, None) if again is not None and busy else (None, again)
    finalists = []
    for k, time in raced.items():
        sure = first is not None and not first.disturbed and k != winner
        gain = gain_within(time, first) if first is not None and sure else None
        told = {**time.figures(), **gain_fields(gain, "behind")}
        finalists.append(record_of(Finalist, rows[k], **told, winner=k == winner))
    finalists.sort(key=lambda f: (not f.winner, f.ratio, f.order))
    beside = [record_of(TimingRecord, row) for row in race.beside]
    cold = [t for t in beside if t.protocol != "hot"]
    floor = next((t.clocks["noise_floor"] for t in cold if "noise_floor" in t.clocks), None)
    bound = min((t for t in cold if t.contender in ceilings), key=lambda t: t.median_us, default=None)
    claimed = rows[winner].score if winner is not None and again is not None else None
    over_bound = again.median_us / bound.median_us if again is not None and bound is not None else None
    hot = next((row for row in race.finalists if row.candidate_id == winner and row.protocol == "hot"), None)
    change = None if first is None or first.disturbed else gain_between(first, again)
    shifted = change is not None and change.tie is False and abs(change.gain - 1) > max(_SHIFT, floor or 0.0)
    shift = change.gain if change is not None and shifted else None
    remarks = []
    if bound is not None and over_bound is not None and over_bound >= _MUCH:
        remarks.append(
            f"the winner takes {over_bound:.2f} times as long as {bound.contender}, which moves as many bytes: up to"
            f" {1 - 1 / over_bound:.0%} of its time may be left to gain, by a longer search or another template"
        )
    log = logs.get(winner, "") if winner is not None else ""
    remarks += [f"the winner was {line}" for line in log.splitlines() if line.startswith(UNCHECKED)]
    if shift is not None:
        remarks.append(
            f"the winner's two races do not agree: the speed-up was {abs(shift - 1):.0%} {'more' if shift > 1 else 'less'}"
            " when it was confirmed, beyond both intervals. The fastest of several is partly the luckiest, what runs before"
            " it matters, and so does the rest of the machine; the figure is no surer than that"
        )
    return WorkloadFinals(
        task=task.number,
        workload=task.workload,
        winner=rows[winner].id if winner is not None else None,
        noise_floor=floor,
        confirmed=Confirmation(**again.figures(), shift=shift) if again is not None else None,
        finalists=tuple(finalists),
        baselines=tuple(t for t in cold if t.contender != AA_CONTROL),
        hot=record_of(TimingRecord, hot) if hot is not None else None,
        ceiling=bound.contender if bound is not None else None,
        times_ceiling=over_bound,
        claimed_speedup=1 / claimed if claimed else None,
        selection_regret=again.ratio / claimed - 1 if again is not None and claimed else None,
        disturbed=busy or any(t.disturbed for t in cold),
        disturbed_us=disturbed_us,
        not_confirmed=not_confirmed(run.options, task.workload) if winner is not None else "",
        discarded_rounds=int(max((t.clocks.get("discarded", 0.0) for t in beside), default=0.0)),
        remarks=tuple(remarks),
    )


def _cover(finals: Collection[WorkloadFinals], genomes: Mapping[str, str]) -> Cover | None:
    """The cover of a run's workloads; None without a winner. genomes: those of the winners by public id."""
    if not (served := [(held, held.winner, held.confirmed) for held in finals if held.winner is not None]):
        return None
    lost = {held.task for held, _, time in served if time is not None and (time.ratio_low or 0.0) > 1}
    counts = Counter(genomes[winner] for held, winner, _ in served if held.task not in lost)
    numbers = {variant: n for n, (variant, _) in enumerate(counts.most_common(), 1)}
    points = []
    for held, winner, confirmed in served:
        own = next(f.ratio for f in held.finalists if f.winner)
        taken = 1.0 if held.task in lost else own
        points.append(
            CoveredPoint(
                workload=held.workload,
                variant=None if held.task in lost else numbers[genomes[winner]],
                winner=winner,
                speedup=None if held.disturbed else 1 / (confirmed.ratio if confirmed is not None else own),
                distance=taken / min(taken, *(f.ratio for f in held.finalists)) - 1,
            )
        )
    points.sort(key=lambda p: p.variant or len(points))
    far = [p.distance for p in points]
    return Cover(points=tuple(points), variants=len(numbers), worst=max(far), median=median(far))


def ceiling_note(ceiling: str) -> str:
    """The meaning of a column of times over the time of `ceiling`, a baseline."""
    return (
        f"over {ceiling}, the fastest baseline here that only moves the bytes, as PyTorch does it: above 1, slower than"
        " that; below 1, faster"
    )
