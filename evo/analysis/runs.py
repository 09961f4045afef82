"""Runs: all of them at a glance, the course of one, several side by side; and the fastest candidates by kernel, device and
workload, or by run."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select
from sqlalchemy.orm import aliased

from evo.analysis.candidates import CandidateSummary, Subject, select_candidates
from evo.analysis.times import FIGURES, RelativeTime, gain_between, gain_fields, noise_floors
from evo.errors import EvoError, UsageError
from evo.evaluation import PASSED, is_disturbed
from evo.lineage import LATEST, Environment, RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import GONE, gone
from evo.lineage.models import key_range, last_refusals, leader_key, unrefused
from evo.lineage.read import record_of, resolve_run, rows_of
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import find_kernel
from evo.problem.space import Value

_c, _e, _i, _r, _t = m.Candidate, m.Environment, m.Task, m.Run, m.Timing
MILESTONES = (1.1, 1.3, 1.5, 2.0)
"""Speed-ups over the reference of which a record has the time when they were first reached."""
UNCONFIRMED = "unconfirmed"
"""Value of `Best.finals` for a run whose finals ended without a winner."""
BUSY = "too busy to measure"
"""Value of `Best.finals` for a winner that passed the finals on a machine too busy to time it."""


def lacking(kinds: Collection[str]) -> str:
    """A clause on a gate without cases of these kinds, which the kernel's arguments ask for."""
    return f"the gate has no case of these kinds: {', '.join(kinds)}"


def not_confirmed(options: Mapping[str, Any], workload: str) -> str:
    """Why a winner that the finals named is not confirmed, by the run's options and the workload; empty if it is."""
    kinds = options.get("missing_kinds", {}).get(workload, ())
    return f"not confirmed: {lacking(kinds)}" if kinds else ""


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """A workload of a run. best: the winner if one is named, else the candidate with the lowest score. candidates: their
    number."""

    number: int
    workload: str
    dims: dict[str, int]
    dtype: str
    options: dict[str, Value]
    winner: str | None
    best: str | None
    best_score: float | None
    candidates: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run at a glance. counts: candidates by status, the most frequent first. Times are ISO 8601 in UTC."""

    name: str
    kernel: str
    kernel_digest: str
    target: str
    arch: str
    device: str
    sampler: str
    seed: int
    max_in_flight: int
    options: dict[str, Any]
    budget: dict[str, Any]
    status: str
    stop_reason: str
    created: str
    updated: str
    finished: str | None
    elapsed_s: float
    evaluations: int
    passed: int
    counts: dict[str, int]
    tasks: tuple[TaskSummary, ...]
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Best(Subject, RelativeTime):
    """The fastest candidate known for a kernel, target, device and workload, with its last time.

    stage: "final" or "search", which took that time. score: its ratio in the search; None where that was disturbed. finals:
    the verdict of its run's finals for its workload: "confirmed" or the text of `not_confirmed` for a winner, BUSY,
    UNCONFIRMED, or "not held" (or not to their end). refused_finalists: the number that they refused. noise_floor: that of
    the last final.
    """

    PRINTED: ClassVar = ("candidate", "speedup")
    winner: bool
    score: float | None
    stage: str
    protocol: str
    finals: str
    refused_finalists: int
    noise_floor: float | None
    parameters: dict[str, Value]

    @property
    def candidate(self) -> str:
        return self.id

    @property
    def unconfirmed(self) -> bool:
        """Whether finals were held and this candidate is not confirmed: they named no winner, or the winner's gate lacks
        cases."""
        return _is_unconfirmed(self.finals)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The place among others; the least is the best. Every sure figure comes before disturbed and unconfirmed ones."""
        return self.disturbed, self.unconfirmed, self.ratio


@dataclass(frozen=True, kw_only=True)
class ListedRun(RunSummary):
    """A run with its fastest candidates. refused_in_finals: number of candidates that the last of their finals refused.
    best: one candidate a workload, the highest speed-up first."""

    refused_in_finals: int
    best: tuple[Best, ...]


@dataclass(frozen=True, kw_only=True)
class Point(CandidateSummary):
    """One candidate in the course of a run. elapsed_s: seconds of searching until it was recorded."""

    task: int
    elapsed_s: float


def list_runs(store: Store) -> tuple[ListedRun, ...]:
    """Every run, the latest first."""
    with store.reading() as connection:
        best: dict[str, list[Best]] = defaultdict(list)
        for leader in leaders(connection):
            best[leader.run].append(leader)
        summaries = _summaries(store, connection, None)
        refused: dict[int, int] = defaultdict(int)
        for (key, _), number in refusals(connection, summaries).items():
            refused[key] += number
        return tuple(
            ListedRun(**vars(run), refused_in_finals=refused[key], best=tuple(best[run.name]))
            for key, run in summaries.items()
        )


def find_run(store: Store, name: str) -> RunSummary:
    """The summary of the named run."""
    with store.reading() as connection:
        key = resolve_run(connection, name)
        return _summaries(store, connection, key)[key]


def read_history(store: Store, run: str = LATEST) -> tuple[Point, ...]:
    """The course of a run: every candidate by order."""
    with store.reading() as connection:
        rows = connection.execute(
            select(*CandidateSummary.COLUMNS, _c.task, _c.elapsed_s)
            .where(_c.id.between(*key_range(resolve_run(connection, run))))
            .order_by(_c.id)
        )
        return tuple(Point(**row._mapping) for row in rows)


def _summaries(store: Store, connection: Connection, run_id: int | None) -> dict[int, RunSummary]:
    """The summaries of one run, or of all if none is given, by id; the latest run first."""
    by_status = _counts(connection, run_id)
    tasks = _tasks(connection, run_id)
    environments = {e.id: asdict(record_of(Environment, e)) for e in connection.execute(select(m.Environment.__table__))}
    query = select(_r.__table__).order_by(_r.id.desc())
    rows: Any = connection.execute(query if run_id is None else query.where(_r.id == run_id)).all()
    dead = gone(store, connection, {row.id: row.status for row in rows})
    found = {}
    for row in rows:
        counts = by_status.get(row.id, {})
        found[row.id] = record_of(
            RunSummary,
            row,
            device=environments[row.environment_id]["device"],
            status=RunStatus.INTERRUPTED.value if row.id in dead else row.status,
            stop_reason=GONE if row.id in dead else row.stop_reason,
            evaluations=sum(counts.values()),
            passed=sum(n for status, n in counts.items() if status in PASSED),
            counts=counts,
            tasks=tuple(tasks.get(row.id, ())),
            environment=environments[row.environment_id],
        )
    return found


def _counts(connection: Connection, run_id: int | None) -> dict[int, dict[str, int]]:
    """The number of candidates by run and status, the most frequent status first."""
    number = func.count()
    query = select(_c.run_id, _c.status, number).group_by(_c.run_id, _c.status).order_by(number.desc(), _c.status)
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for key, status, n in connection.execute(query if run_id is None else query.where(_c.run_id == run_id)).all():
        found[key][status] = n
    return found


def _tasks(connection: Connection, run_id: int | None) -> dict[int, list[TaskSummary]]:
    leader, winner = aliased(_c), aliased(_c)
    number = select(func.count()).where(_c.run_id == _i.run_id, _c.task == _i.number).correlate(_i).scalar_subquery()
    query = (
        select(_i.run_id, _i.number, _i.workload, _i.dims, _i.dtype, _i.options)
        .add_columns(leader.public_id.label("best"), leader.score.label("best_score"), winner.public_id.label("winner"))
        .add_columns(number.label("candidates"))
        .join_from(_i, leader, leader.id == leader_key(), isouter=True)
        .join(winner, winner.id == m.Task.winner_id, isouter=True)
        .order_by(_i.run_id, _i.number)
    )
    found: dict[int, list[TaskSummary]] = defaultdict(list)
    for row in connection.execute(query if run_id is None else query.where(_i.run_id == run_id)).all():
        found[row.run_id].append(record_of(TaskSummary, row))
    return found


# -- the fastest candidates --------------------------------------------------------------------------------------


def find_best(
    store: Store,
    kernel: str | None = None,
    *,
    target: str | None = None,
    run: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    workload: str | None = None,
) -> tuple[Best, ...]:
    """The fastest candidate for each kernel, target, device and workload, over all runs or in one.

    A task's candidate is its winner, or else the one with the lowest score; candidates are compared by their last
    measurement, and disturbed or unconfirmed ones come last. device, workload: a part of the name, in any case of letters.
    An unknown kernel has no rows.
    """
    names = ((_r.kernel, kernel), (_r.target, target), (_i.dtype, dtype))
    parts = ((_e.device, device), (_i.workload, workload))
    conditions = [column == name for column, name in names if name is not None]
    conditions += [func.lower(column).contains(part.lower(), autoescape=True) for column, part in parts if part is not None]
    with store.reading() as connection:
        if run is not None:
            conditions.append(_r.id == resolve_run(connection, run))
        found = leaders(connection, *conditions)
    first: dict[tuple[str, ...], Best] = {}
    for record in found:
        first.setdefault((record.kernel, record.target, record.device, record.workload), record)
    return tuple(first[group] for group in sorted(first))


def find_alike(
    store: Store, kernel: Kernel, target: str, device: str, workloads: Sequence[Workload]
) -> Iterator[Best]:
    """The fastest candidates of a kernel's earlier runs, of distinct genomes: for each of `workloads` the one whose workload
    is most like it (see `_unlike`), then the next ones, and at last those with disturbed times.

    A run is one of this kernel if its recorded name or path is the kernel's folder, seen from here, or if it had the same
    files.
    """
    with store.reading() as connection:
        names = [name for name in connection.scalars(select(_r.kernel).distinct()) if _is_folder(name, kernel.folder)]
        found = leaders(connection, _r.target == target, or_(_r.kernel.in_(names), _r.kernel_digest == kernel.digest))
    known: list[tuple[Workload, Best]] = []
    for best in found:
        with suppress(UsageError):  # the kernel may have changed
            known.append((kernel.workload(target, best.workload), best))

    def rank(wanted: Workload) -> list[tuple[Workload, Best]]:
        return sorted(known, key=lambda pair: (pair[1].disturbed, _unlike(pair[0], wanted) + (pair[1].device != device)))

    ranks = [rank(wanted) for wanted in workloads]
    seen: set[Genome] = set()
    for _, best in (pair for rank in zip(*ranks, strict=True) for pair in rank):
        if (genome := Genome.of(best.parameters)) not in seen:
            seen.add(genome)
            yield best


def _is_folder(kernel: str, folder: Path) -> bool:
    with suppress(EvoError):  # the kernel may not be here
        return find_kernel(kernel).resolve() == folder.resolve()
    return False


def find_nearly_as_fast(store: Store, candidates: Iterable[str]) -> dict[Genome, str]:
    """Genomes of distinct code, each with its candidate, that took at most 15% longer in the search than one of these
    candidates on the same task: task by task, the fastest first, at most 100 of each."""
    found: dict[Genome, str] = {}
    best = aliased(_c)
    query = select(_c.genome, _c.public_id).join(best, and_(best.run_id == _c.run_id, best.task == _c.task))
    query = query.where(_c.score <= 1.15 * best.score, _c.same_code_as_id.is_(None), unrefused())
    query = query.order_by(_c.score, _c.id).limit(100)
    with store.reading() as connection:
        for candidate in candidates:
            for row in connection.execute(query.where(best.public_id == candidate)):
                found.setdefault(Genome.from_json(row.genome), row.public_id)
    return found


def _unlike(one: Workload, other: Workload) -> float:
    """The distance of two workloads: doublings from size to size, and 1 for each other dtype or option."""
    dims, options = dict(other.dims), dict(other.options)
    sizes = sum(abs(math.log2(max(1, size) / max(1, dims[name]))) for name, size in one.dims)
    return sizes + (one.dtype != other.dtype) + sum(value != options[name] for name, value in one.options)


def ranked(store: Store, run: str, task: int) -> Sequence[str]:
    """Public ids of a task's candidates that have a score and that no final has refused, by score."""
    with store.reading() as connection:
        of_task = (_c.run_id == resolve_run(connection, run), _c.task == task)
        query = select(_c.public_id).where(*of_task, _c.score.is_not(None), unrefused())
        return connection.scalars(query.order_by(_c.score, _c.id)).all()


def leaders(connection: Connection, *conditions: ColumnElement[bool]) -> list[Best]:
    """The fastest candidate of each task that has a timed one, by its last measurement, in the order of `Best.rank`.

    Two queries and not one join, for which a planner may read all timings of the database.
    """
    tasks = select(leader_key()).join_from(_i, _r, _r.id == _i.run_id).join(_e, _e.id == _r.environment_id)
    keys = sorted(key for key in connection.scalars(tasks.where(*conditions)) if key is not None)
    query = (
        select_candidates(_c.id.label("key"), _c.task, _c.score, _c.genome, _i.run_id, _i.winner_id, _r.status, _r.options)
        .add_columns(_t.stage, _t.round, _t.protocol, _t.clocks, *FIGURES)  # samples are most of a timing's bytes
        .join(_t, and_(_t.run_id == _c.run_id, _t.candidate_id == _c.id, _t.workload == _i.workload))
        .where(_t.contender == "candidate")
        # The last row of a candidate is kept: the latest round, in a round the finalists' protocol before cold.
        .order_by(_t.round, case((_t.protocol == "final", 2), (_t.protocol == "cold", 1), else_=0), _t.id.desc())
    )
    newest = {row.key: row for row in rows_of(connection, query, keys, _c.id)}
    verdicts = refusals(connection, [row.run_id for row in newest.values()])
    floors = noise_floors(connection, [row.run_id for row in newest.values()])
    found = (
        _best(row, verdicts.get((row.run_id, row.task)), floors.get((row.run_id, row.task))) for row in newest.values()
    )
    return sorted(found, key=lambda best: (best.rank, best.order))


def refusals(connection: Connection, runs: Collection[int]) -> dict[tuple[int, int], int]:
    """The number of candidates that the last of their finals refused, by run and task. Tasks without finals are left out;
    there may be tasks of other runs."""
    if not runs:
        return {}
    final = m.Final
    first, last = key_range(min(runs))[0], key_range(max(runs))[1]
    rows = connection.execute(
        select(_c.run_id, _c.task, func.count(case((last_refusals(), 1))))
        .join_from(final, _c, _c.id == final.candidate_id)
        .where(final.candidate_id.between(first, last))
        .group_by(_c.run_id, _c.task)
    ).all()
    return {(run_id, task): int(n) for run_id, task, n in rows}


def _is_unconfirmed(finals: str | None) -> bool:
    return finals is not None and finals.startswith((UNCONFIRMED, "not confirmed"))


def _best(row: Any, refused: int | None, floor: float | None) -> Best:
    """The record of a task's fastest candidate. refused: number of refused finalists; None where no final was held."""
    won, disturbed = row.winner_id == row.key, is_disturbed(row.clocks)
    # A run that is not finished has not held its finals to their end.
    held = refused is not None and row.status == RunStatus.FINISHED.value
    verdict = not_confirmed(row.options, row.workload) or (BUSY if disturbed else "confirmed")
    return record_of(
        Best,
        row,
        winner=won,
        ratio=row.score if row.ratio is None else row.ratio,
        disturbed=disturbed,
        finals=verdict if won else UNCONFIRMED if held else "not held",
        refused_finalists=refused or 0,
        noise_floor=floor,
    )


# -- runs side by side -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run's search for one workload.

    best: its fastest candidate; `stage` to `noise_floor` are as in `Best`, None where nothing passed. behind: the first
    run's speed-up over this one's, on the same device; tie: whether its interval, behind_low to behind_high, holds 1.
    candidates, passed, failures: numbers for this workload. search_s: seconds until the run's last candidate, without its
    finals; candidates_per_s: candidates a second, which the run's workloads share. reached_s: {"1.1x": seconds until the
    search's own figure first was that}.
    """

    workload: str
    run: str
    kernel: str
    target: str
    device: str
    status: str
    best: str | None
    stage: str | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    median_us: float | None
    low_us: float | None
    high_us: float | None
    disturbed: bool
    finals: str | None
    noise_floor: float | None
    behind: float | None
    behind_low: float | None
    behind_high: float | None
    tie: bool | None
    candidates: int
    passed: int
    failures: int
    search_s: float
    candidates_per_s: float | None
    reached_s: dict[str, float | None]

    @property
    def unconfirmed(self) -> bool:
        """Whether finals were held and the best is not confirmed."""
        return _is_unconfirmed(self.finals)


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """A setting that differs between runs. values: {run: value}, None where a run does not have it."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side. rows: by workload, the fastest first, then unconfirmed ones, and those without a result last."""

    rows: tuple[ComparedRun, ...]
    settings: tuple[SettingDifference, ...]


def compare(store: Store, *runs: str) -> Comparison:
    """Runs side by side, by workload, and what differs in their set-up. A run named twice counts once."""
    known = {run.name: run for run in (find_run(store, name) for name in runs)}
    found: list[tuple[Best | None, ComparedRun]] = []
    with store.reading() as connection:
        for run in known.values():
            key = resolve_run(connection, run.name)
            courses = _courses(connection, key)
            fastest = {leader.workload: leader for leader in leaders(connection, m.Run.id == key)}
            search_s = max((course.until_s for course in courses.values()), default=0.0)
            for task in run.tasks:
                best = fastest.get(task.workload)
                found.append((best, _compared_run(run, task, best, courses.get(task.number), search_s)))
    found.sort(key=lambda one: (one[1].workload, one[0] is None, one[0].rank if one[0] else (), one[1].run))
    first: dict[tuple[str, ...], Best | None] = {}
    rows = []
    for best, row in found:
        sure = None if row.disturbed else best
        gain = gain_between(sure, first.setdefault((row.workload, row.kernel, row.device), sure))
        rows.append(replace(row, **gain_fields(gain, "behind")))
    return Comparison(rows=tuple(rows), settings=tuple(_settings(known.values())))


def _courses(connection: Connection, run_id: int) -> dict[int, Any]:
    """The course of each task: the number of candidates that passed, the seconds of search until the last candidate, and
    until the search's own figure first was each milestone."""
    passed = func.sum(case((_c.status.in_(PASSED), 1), else_=0))
    reached = [func.min(case((_c.score <= 1 / milestone, _c.elapsed_s))).label(f"{milestone}x") for milestone in MILESTONES]
    rows = connection.execute(
        select(_c.task, passed.label("passed"), func.max(_c.elapsed_s).label("until_s"), *reached)
        .where(_c.id.between(*key_range(run_id)))
        .group_by(_c.task)
    )
    return {row.task: row for row in rows}


_OF_BEST = (
    "stage", "speedup", "speedup_low", "speedup_high", "median_us", "low_us", "high_us", "finals", "noise_floor"
)  # fmt: skip
"""Fields of `Best` that a compared run has, too."""


def _compared_run(run: RunSummary, task: TaskSummary, best: Best | None, course: Any, search_s: float) -> ComparedRun:
    """The search for one task, not yet compared with others. course: None without candidates."""
    passed = int(course.passed) if course else 0
    return ComparedRun(
        workload=task.workload,
        run=run.name,
        kernel=run.kernel,
        target=run.target,
        device=run.device,
        status=run.status,
        best=best.id if best else None,
        **{name: getattr(best, name, None) for name in _OF_BEST},
        disturbed=bool(best and best.disturbed),
        **gain_fields(None, "behind"),
        candidates=task.candidates,
        passed=passed,
        failures=task.candidates - passed,
        search_s=search_s,
        candidates_per_s=task.candidates / search_s if search_s else None,
        reached_s={f"{milestone}x": getattr(course, f"{milestone}x", None) for milestone in MILESTONES},
    )


_SETUP = ("kernel", "kernel_digest", "target", "arch", "sampler", "seed", "budget", "options", "environment")


def _settings(runs: Collection[RunSummary]) -> Iterator[SettingDifference]:
    """The settings that differ, nested ones by dotted names."""
    flat = {}
    for run in runs:
        further = {"window": run.max_in_flight, "workloads": [task.workload for task in run.tasks]}
        flat[run.name] = dict(_flat("", {name: getattr(run, name) for name in _SETUP} | further))
    names = dict.fromkeys(name for settings in flat.values() for name in settings if name != "options.starts")
    for name in names:  # the starts' origins say it in fewer words
        values = {run: settings.get(name) for run, settings in flat.items()}
        if len(set(map(repr, values.values()))) > 1:
            yield SettingDifference(name=name, values=values)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value
