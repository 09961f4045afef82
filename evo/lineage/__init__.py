"""The lineage: every candidate of every run, with its parents, its build, its checks and its times.

This module holds what the search hands over and gets back (plain, frozen), and the protocol `Recorder` that
it writes through. `evo.lineage.store.Store` is the database behind it; `evo.analysis.queries` asks it, and answers
with the records of `evo.analysis.records`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from evo.evaluation import Candidate, Evaluation, Measurement, Timing
from evo.problem.kernel import Workload

__all__ = [
    "LATEST",
    "Environment",
    "Recorder",
    "RunSpec",
    "RunStatus",
    "Stage",
    "StoredEvaluation",
    "StoredRun",
    "gate_seeds",
]

LATEST = "latest"
"""Stands for the run created last wherever a run is named; no run may be called this."""


class RunStatus(StrEnum):
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Stopped before its budget was spent, by a signal or a crash; can be resumed."""
    FINISHED = "finished"
    FAILED = "failed"


class Stage(StrEnum):
    """What a check or a timing belongs to: the cheap protocol of the search, or the finalists' paired one."""

    SEARCH = "search"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a run was measured on and with. Nothing in it names the machine or its user."""

    device: str
    arch: str
    driver: str = ""
    cuda: str = ""
    nvrtc: str = ""
    compiler: str = ""
    torch: str = ""
    python: str = ""
    evo: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    """JSON-able; e.g. clocks and limits as the driver tells them."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """How a run is set up: all that is needed, beside its evaluations, to continue it.

    workloads: task i searches workloads[i].
    max_in_flight: candidates in flight at most before the sampler waits for the oldest.
    options, budget: JSON-able.
    name: None for a generated one, such as layernorm-20261121-3.
    """

    kernel: str
    kernel_digest: str
    target: str
    arch: str
    sampler: str
    seed: int
    max_in_flight: int
    workloads: tuple[Workload, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    budget: Mapping[str, object] = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as the database knows it. Times are ISO 8601 in UTC.

    id: the database's own number. uid: random, and the root of its candidates' public ids.
    elapsed_s: seconds of searching recorded so far, over all the sessions of the run.
    """

    id: int
    uid: str
    name: str
    spec: RunSpec
    environment: Environment
    status: RunStatus
    stop_reason: str
    created: str
    updated: str
    finished: str | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class StoredEvaluation:
    """One recorded candidate, as a resumed search needs it.

    `evaluation.build` has neither source text nor binary code (`evo.analysis.candidates` has both), but its
    `binary.code_hash`. elapsed_s: the run's seconds of searching when it was recorded.
    """

    public_id: str
    candidate: Candidate
    evaluation: Evaluation
    elapsed_s: float


_FINAL_STEP = 7_919
"""Finals draw their data with the seed of the search's gate plus this."""


def gate_seeds(options: Mapping[str, Any], seed: int) -> dict[Stage, int]:
    """What a run's data are drawn with, by stage: a verdict is replayed with `evo check CANDIDATE --seed` of these.

    options, seed: the run's own. A run whose options have no gate_seed draws its data with `seed`.
    """
    drawn = int(options.get("gate_seed", seed))
    return {Stage.SEARCH: drawn, Stage.FINAL: drawn + _FINAL_STEP}


class Recorder(Protocol):
    """What a search writes through. Each call is one transaction: recorded whole, or not at all.

    Every method raises StoreError, in one sentence, where the database cannot take it (disk full, locked,
    gone), and EngineError for a record that must not exist (a second one of an order, an unknown parent).
    """

    def create_run(self, spec: RunSpec, environment: Environment) -> StoredRun:
        """Raises StoreError if the name is taken or not a legal one."""
        ...

    def run(self, name: str) -> StoredRun:
        """By name, unique prefix of a name, or "latest". Raises UnknownNameError."""
        ...

    def add(self, run: StoredRun, ref: Candidate, evaluation: Evaluation, *, elapsed_s: float) -> None:
        """Records one candidate. Orders may arrive in any sequence, but parents and `same_code_as` first."""
        ...

    def add_baselines(
        self, run: StoredRun, task: int, timings: Sequence[Timing], *, stage: Stage = Stage.SEARCH
    ) -> None: ...

    def add_final(self, run: StoredRun, order: int, measurement: Measurement, *, elapsed_s: float) -> None:
        """Records a finalist's re-timing. A later one for the same candidate stands beside the earlier."""
        ...

    def set_winner(self, run: StoredRun, task: int, order: int | None) -> None: ...

    def set_status(self, run: StoredRun, status: RunStatus, *, reason: str = "", elapsed_s: float) -> None: ...

    def evaluations(self, run: StoredRun) -> list[StoredEvaluation]:
        """Everything added so far, sorted by order, with every check and sample."""
        ...

    def evaluation(self, run: StoredRun, order: int) -> StoredEvaluation: ...

    def transaction(self) -> AbstractContextManager[None]:
        """Everything recorded inside is one transaction; faster by far for many candidates at once."""
        ...

    def close(self) -> None: ...
