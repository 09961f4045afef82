"""Runs side by side, workload by workload, and what was different about how they were set up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection, case, func, select

from evo.analysis.best import UNCONFIRMED, Best, best_of_runs
from evo.analysis.times import gain_between, noise_floors
from evo.evaluation import PASSED
from evo.lineage import RunStatus, StoredRun
from evo.lineage import models as m
from evo.lineage.liveness import gone
from evo.lineage.models import key_range
from evo.lineage.read import read_run, resolve_run
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
    rows: dict[str, list[tuple[ComparedRun, Best | None]]] = defaultdict(list)
    with store.reading() as connection:
        keys = list(dict.fromkeys(resolve_run(connection, name) for name in runs))
        known = [read_run(connection, key) for key in keys]
        dead = gone(store, connection, {run.id: run.status for run in known})
        known = [replace(run, status=RunStatus.INTERRUPTED) if run.id in dead else run for run in known]
        floors = noise_floors(connection, [run.name for run in known])
        for run in known:
            counts, reached = _counts(connection, run.id), _reached(connection, run.id)
            leaders = {leader.workload: leader for leader in best_of_runs(connection, [run.id])}
            searched = max((n.until_s for n in counts.values()), default=0.0)
            for task, workload in enumerate(run.spec.workloads):
                leader, floor = leaders.get(workload.key), floors.get((run.name, workload.key))
                counted, first_s = counts.get(task, _Counts()), reached.get(task, {})
                row = _row(run, workload.key, leader, floor, counted, searched, first_s)
                rows[workload.key].append((row, leader))
    ranked = [row for workload_key in sorted(rows) for row in _ranked(rows[workload_key])]
    return Comparison(rows=tuple(ranked), settings=tuple(_settings(known)))


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Candidates of a task, those of them that passed, and the seconds of search until the last."""

    candidates: int = 0
    passed: int = 0
    until_s: float = 0.0


def _counts(connection: Connection, run_id: int) -> dict[int, _Counts]:
    """By task."""
    passed = func.sum(case((_c.status.in_(PASSED), 1), else_=0))
    rows = connection.execute(
        select(_c.task, func.count(), passed, func.max(_c.elapsed_s))
        .where(_c.id.between(*key_range(run_id)))
        .group_by(_c.task)
    )
    return {task: _Counts(candidates=int(n), passed=int(p), until_s=until) for task, n, p, until in rows}


def _reached(connection: Connection, run_id: int) -> dict[int, dict[str, float | None]]:
    """By task, when the search's own figure first was a milestone."""
    names = {milestone: f"{milestone}x" for milestone in MILESTONES}
    columns = [
        func.min(case((_c.score <= 1 / milestone, _c.elapsed_s))).label(f"m{i}")
        for i, milestone in enumerate(MILESTONES)
    ]
    rows = connection.execute(
        select(_c.task, *columns)
        .where(_c.id.between(*key_range(run_id)), _c.score.is_not(None))
        .group_by(_c.task)
    )
    return {task: dict(zip(names.values(), times, strict=True)) for task, *times in rows}


def _row(
    run: StoredRun,
    workload: str,
    leader: Best | None,
    noise_floor: float | None,
    counted: _Counts,
    search_s: float,
    reached: Mapping[str, float | None],
) -> ComparedRun:
    return ComparedRun(
        workload=workload,
        run=run.name,
        kernel=run.spec.kernel,
        target=run.spec.target,
        device=run.environment.device,
        status=run.status.value,
        best=leader.id if leader else None,
        stage=leader.stage if leader else None,
        speedup=1 / leader.ratio if leader else None,
        speedup_low=1 / leader.ratio_high if leader and leader.ratio_high else None,
        speedup_high=1 / leader.ratio_low if leader and leader.ratio_low else None,
        median_us=leader.median_us if leader else None,
        low_us=leader.low_us if leader else None,
        high_us=leader.high_us if leader else None,
        disturbed=bool(leader and leader.disturbed),
        finals=leader.finals if leader else None,
        noise_floor=noise_floor,
        behind=None,
        behind_low=None,
        behind_high=None,
        tie=None,
        candidates=counted.candidates,
        passed=counted.passed,
        failures=counted.candidates - counted.passed,
        search_s=search_s,
        candidates_per_s=counted.candidates / search_s if search_s else None,
        reached_s={f"{milestone}x": reached.get(f"{milestone}x") for milestone in MILESTONES},
    )


def _ranked(rows: Sequence[tuple[ComparedRun, Best | None]]) -> list[ComparedRun]:
    """The rows of one workload, the fastest first, with the unconfirmed behind; compared with the first of their own kernel
    and device."""
    ordered = sorted(rows, key=lambda r: (r[0].speedup is None, r[0].unconfirmed, -(r[0].speedup or 0.0), r[0].run))
    first: dict[tuple[str, str], Best | None] = {}
    found = []
    for row, leader in ordered:
        gain = gain_between(leader, first.setdefault((row.kernel, row.device), leader))
        if gain is not None:
            row = replace(row, behind=gain.gain, behind_low=gain.low, behind_high=gain.high, tie=gain.tie)
        found.append(row)
    return found


def _settings(runs: Sequence[StoredRun]) -> list[SettingDifference]:
    flat = {run.name: dict(_flat("", _setup(run))) for run in runs}
    names = dict.fromkeys(name for values in flat.values() for name in values)
    found = []
    for name in names:
        values = {run: settings.get(name) for run, settings in flat.items()}
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            found.append(SettingDifference(name=name, values=values))
    return found


def _setup(run: StoredRun) -> dict[str, Any]:
    spec, environment = run.spec, asdict(run.environment)
    return {
        "kernel": spec.kernel,
        "kernel_digest": spec.kernel_digest,
        "target": spec.target,
        "arch": spec.arch,
        "sampler": spec.sampler,
        "seed": spec.seed,
        "window": spec.max_in_flight,
        "workloads": [w.key for w in spec.workloads],
        "budget": dict(spec.budget),
        "options": dict(spec.options),
        "environment": environment,
    }


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Nested settings by dotted names."""
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [pair for name, inner in value.items() for pair in _flat(f"{prefix}.{name}" if prefix else str(name), inner)]
