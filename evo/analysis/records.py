"""Answers of `evo.analysis.queries`: frozen, plain, and JSON-able by `dataclasses.asdict`.

Times are ISO 8601 in UTC. A candidate is named by its public id, an artefact by its sha256, a workload by its
key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo.evaluation import PASSED, Timing
from evo.problem.space import Value
from evo.search.edits import Change

__all__ = [
    "NOBODY",
    "Best",
    "BuildRecord",
    "CandidateRecord",
    "CheckRecord",
    "Failure",
    "FinalRace",
    "FinalRecord",
    "Point",
    "Relative",
    "RunSummary",
    "Selection",
    "Step",
    "TaskSummary",
    "TimingRecord",
]

NOBODY = "nobody confirmed"
"""`Best.finals` of a run whose finals were held to their end, and named no winner."""


@dataclass(frozen=True, kw_only=True)
class TimingRecord(Timing):
    """A contender's time. stage: search or final; round: 0, or the final's."""

    task: int
    stage: str
    round: int


@dataclass(frozen=True, kw_only=True)
class FinalRace:
    """Baselines, and the winner's twin, as one of a candidate's finals timed them. round: that of the candidate's final.

    beside: whether the candidate ran in that very race. The winner did. Of the race of all finalists only their own
    times are kept, the winner's as `evo.evaluation.FINALIST`: the reference, the ceilings and the twin stand as they ran
    beside the winner, right afterwards.
    """

    round: int
    beside: bool
    timings: tuple[TimingRecord, ...]


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """A gate case; see `evo.evaluation.Check`."""

    stage: str
    round: int
    case: str
    passed: bool
    error: float | None
    allowed: float | None
    torch_error: float | None
    reason: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """A compilation; see `evo.evaluation.Build`. binary: sha256 of the code, for `queries.artefact`."""

    status: str
    arch: str
    compiler: str
    seconds: float
    cached: bool
    log: str
    remarks: str
    source_digest: str
    registers: int | None
    spill_bytes: int | None
    smem_static_bytes: int | None
    smem_dynamic_bytes: int | None
    stack_bytes: int | None
    occupancy: float | None
    code_hash: str | None
    binary: str | None


@dataclass(frozen=True, kw_only=True)
class FinalRecord:
    """A finalist's re-timing; its checks and timings are those of the same round."""

    round: int
    status: str
    log: str
    seconds: float
    gate_seconds: float
    timing_seconds: float
    created: str


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A parent or child of a candidate. role: the parent's part in the making of the child."""

    id: str
    order: int
    role: str
    operator: str
    status: str
    score: float | None


@dataclass(frozen=True, kw_only=True)
class CandidateRecord:
    """All there is of one candidate.

    digest: of the genome. source: sha256 of its text, for `queries.artefact`. winner: of its task.
    """

    id: str
    run: str
    kernel: str
    target: str
    arch: str
    device: str
    order: int
    task: int
    workload: str
    dims: dict[str, int]
    dtype: str
    options: dict[str, Value]
    parameters: dict[str, Value]
    digest: str
    source: str | None
    operator: str
    status: str
    score: float | None
    log: str
    same_code_as: str | None
    winner: bool
    seconds: float
    gate_seconds: float
    timing_seconds: float
    elapsed_s: float
    created: str
    build: BuildRecord | None
    checks: tuple[CheckRecord, ...]
    timings: tuple[TimingRecord, ...]
    finals: tuple[FinalRecord, ...]
    parents: tuple[Relative, ...]
    children: tuple[Relative, ...]

    @property
    def refusal(self) -> str:
        """Why the last of its finals refused it: "wrong: for 7 float32: ..."; empty if none did."""
        last = self.finals[-1] if self.finals else None
        if last is None or last.status in PASSED:
            return ""
        reason = next((line.strip() for line in last.log.splitlines() if line.strip()), "")
        return f"{last.status.replace('_', ' ')}{f': {reason}' if reason else ''}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One candidate on the way from the roots to a descendant.

    change: against the first parent; empty for a root. gain: over the first parent, None where either has no time; tie: its
    interval holds 1, so that it may be chance, None where that is not known: as `evo.analysis.gains` has them. main_line:
    reached from the descendant through first parents only. median_us: of the search's cold timing, which the machine
    code's first candidate may have had.
    """

    id: str
    order: int
    operator: str
    status: str
    score: float | None
    median_us: float | None
    gain: float | None
    tie: bool | None
    parents: tuple[Relative, ...]
    change: Change
    parameters: dict[str, Value]
    main_line: bool


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """A workload of a run. best: the winner if one is named, else the candidate of the lowest score."""

    number: int
    workload: str
    dims: dict[str, int]
    dtype: str
    options: dict[str, Value]
    winner: str | None
    best: str | None
    best_score: float | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run at a glance. counts: candidates by status."""

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
class Best:
    """The fastest candidate known for a kernel, target, device and workload.

    score: what the search found. The times are of the last final round where `stage` is "final", else of the
    search; ratio: time over the reference baseline's. disturbed: something slowed the device down while they were
    taken, and they are not to be trusted. finals: what those of its run said for its workload: "confirmed" (it is the
    winner), "nobody confirmed", "not held" (or not to their end);
    refused_finalists: how many they refused.
    """

    kernel: str
    target: str
    arch: str
    device: str
    workload: str
    dtype: str
    run: str
    id: str
    order: int
    winner: bool
    score: float
    stage: str
    protocol: str
    median_us: float
    low_us: float
    high_us: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    disturbed: bool
    finals: str
    refused_finalists: int
    parameters: dict[str, Value]

    @property
    def unconfirmed(self) -> bool:
        """Whether finals were held and confirmed nobody: it is what they have not refused, and not a result."""
        return self.finals == NOBODY


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A candidate that did not pass, the gate of the search or that of the finals. reason: the first line of its log,
    or what the gate said."""

    id: str
    order: int
    task: int
    operator: str
    status: str
    reason: str
    parameters: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One candidate in the course of a run. elapsed_s: seconds of searching until it was recorded."""

    order: int
    id: str
    task: int
    operator: str
    status: str
    score: float | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The answer to a query in SQL. cut: there are more rows than were asked for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    cut: bool = False
