"""Runs side by side, workload by workload, and what was different about how they were set up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select

from evo.analysis.best import UNCONFIRMED, Best, leaders
from evo.analysis.runs import RunSummary, find_run
from evo.analysis.times import Gain, gain_between, gain_fields
from evo.evaluation import PASSED
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import resolve_run
from evo.lineage.store import Store

__all__ = ["MILESTONES", "ComparedRun", "Comparison", "SettingDifference", "compare"]

_c = m.Candidate
MILESTONES = (1.1, 1.3, 1.5, 2.0)
"""Speed-ups over the reference whose first time is told."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run's search for one workload.

    The best's figures are of the last final if `stage` is "final", else of the search; speedup: over the reference
    baseline, None where nothing passed; noise_floor: of the run's last final for this workload, None without one. finals:
    what they said of the best, as `Best` has it; an unconfirmed candidate comes after all others, however fast it was in
    the search. behind: the first run's speed-up over this one's, of the same device; tie: the interval of that, behind_low
    to behind_high, holds 1 (`evo.analysis.times`). candidates, failures: of this workload. search_s: until the
    run's last candidate, which is without its finals; candidates_per_s: by these seconds, which the run's workloads share.
    reached_s: {"1.1x": seconds of search until the search's own figure first was that}.
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
        """Whether finals were held and confirmed no candidate."""
        return self.finals == UNCONFIRMED


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """Something that is not the same in all of the runs: {run: value}, None where a run does not have it."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows by workload, the fastest first; those without a result after all others."""

    rows: tuple[ComparedRun, ...]
    settings: tuple[SettingDifference, ...]


def compare(store: Store, runs: Sequence[str]) -> Comparison:
    """Raises UnknownNameError, or StoreError for an ambiguous prefix. A run named twice counts once."""
    known = {run.name: run for run in (find_run(store, name) for name in runs)}
    searches: dict[str, list[_Search]] = defaultdict(list)
    with store.reading() as connection:
        for run in known.values():
            key = resolve_run(connection, run.name)
            courses = _courses(connection, key)
            fastest = {leader.workload: leader for leader in leaders(connection, m.Run.id == key)}
            searched_s = max((course.until_s for course in courses.values()), default=0.0)
            for task in run.tasks:
                search = (run, fastest.get(task.workload), courses.get(task.number), searched_s)
                searches[task.workload].append(search)
    rows = [row for workload in sorted(searches) for row in _ranked(workload, searches[workload])]
    return Comparison(rows=tuple(rows), settings=tuple(_settings(list(known.values()))))


_Search = tuple[RunSummary, Best | None, Any, float]
"""A run, its leader for one workload, its course there, and the seconds of its search."""


def _courses(connection: Connection, run_id: int) -> dict[int, Any]:
    """By task: its candidates, those that passed, the seconds of search until the last, and until the search's own figure
    first was each milestone."""
    passed = func.sum(case((_c.status.in_(PASSED), 1), else_=0))
    reached = [func.min(case((_c.score <= 1 / milestone, _c.elapsed_s))).label(f"{milestone}x") for milestone in MILESTONES]
    rows = connection.execute(
        select(_c.task, func.count().label("candidates"), passed.label("passed"), func.max(_c.elapsed_s).label("until_s"))
        .add_columns(*reached)
        .where(_c.id.between(*key_range(run_id)))
        .group_by(_c.task)
    )
    return {row.task: row for row in rows}


_OF_BEST = (
    "stage", "speedup", "speedup_low", "speedup_high", "median_us", "low_us", "high_us", "finals", "noise_floor"
)  # fmt: skip
"""The fields of `Best` that a row has, too."""


def _row(workload: str, search: _Search, gain: Gain | None) -> ComparedRun:
    run, leader, course, search_s = search
    candidates, passed = (int(course.candidates), int(course.passed)) if course else (0, 0)
    return ComparedRun(
        workload=workload,
        run=run.name,
        kernel=run.kernel,
        target=run.target,
        device=run.device,
        status=run.status,
        best=leader.id if leader else None,
        **{name: getattr(leader, name, None) for name in _OF_BEST},
        disturbed=bool(leader and leader.disturbed),
        **gain_fields(gain, "behind"),
        candidates=candidates,
        passed=passed,
        failures=candidates - passed,
        search_s=search_s,
        candidates_per_s=candidates / search_s if search_s else None,
        reached_s={f"{milestone}x": course._mapping[f"{milestone}x"] if course else None for milestone in MILESTONES},
    )


def _ranked(workload: str, searches: Sequence[_Search]) -> Iterator[ComparedRun]:
    """The rows of one workload, the fastest first, with the unconfirmed behind; compared with the first of their own kernel
    and device."""
    first: dict[tuple[str, str], Best | None] = {}
    for search in sorted(searches, key=lambda s: (s[1].unconfirmed, s[1].ratio, s[0].name) if s[1] else (2, 0, s[0].name)):
        run, leader, *_ = search
        yield _row(workload, search, gain_between(leader, first.setdefault((run.kernel, run.device), leader)))


def _settings(runs: Sequence[RunSummary]) -> list[SettingDifference]:
    flat = {run.name: dict(_flat("", _setup(run))) for run in runs}
    names = dict.fromkeys(name for values in flat.values() for name in values)
    found = []
    for name in names:
        values = {run: settings.get(name) for run, settings in flat.items()}
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            found.append(SettingDifference(name=name, values=values))
    return found


def _setup(run: RunSummary) -> dict[str, Any]:
    names = ("kernel", "kernel_digest", "target", "arch", "sampler", "seed", "budget", "options", "environment")
    workloads = [task.workload for task in run.tasks]
    return {name: getattr(run, name) for name in names} | {"window": run.max_in_flight, "workloads": workloads}


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Nested settings by dotted names."""
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for name, inner in value.items() for pair in _flat(f"{prefix}.{name}" if prefix else str(name), inner)]
