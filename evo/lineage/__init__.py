"""The lineage: every candidate of every run, with its parents, its build, its checks and its times.

This module holds what a search hands over and gets back: plain and frozen. `evo.lineage.store.Store` is the database;
`evo.analysis` asks it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from evo.evaluation import Candidate, Evaluation
from evo.problem.kernel import Workload

LATEST = "latest"
"""Stands for the run created last wherever a run is named; no run may be called this."""


class RunStatus(StrEnum):
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Stopped before its budget was spent, by a signal or a crash; can be resumed."""
    FINISHED = "finished"


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
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
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
