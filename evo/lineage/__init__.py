"""The lineage: every candidate of every run, with its parents, its build, its checks and its times.

This module has the frozen records that a search stores and gets back. `evo.lineage.store.Store` is the database, and
`evo.analysis` asks it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from evo.evaluation import Candidate, Evaluation
from evo.problem.kernel import Workload

LATEST = "latest"
"""Name that stands for the run created last; no run may be called this."""


class RunStatus(StrEnum):
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Stopped before its budget was spent, by a signal or a crash; can be resumed."""
    FINISHED = "finished"


class Stage(StrEnum):
    """Part of a run that a check or a timing belongs to: the search, or its finals."""

    SEARCH = "search"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The device and the versions that a run was measured with. Nothing in it names the machine or its user."""

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
    """Further values that JSON can hold, such as clocks and limits as the driver tells them."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The set-up of a run: all that is needed, beside its evaluations, to continue it.

    workloads: task i searches workloads[i].
    max_in_flight: candidates in flight at most before the sampler waits for the oldest.
    options, budget: values that JSON can hold.
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
    """A run as the database has it. Times are ISO 8601 in UTC.

    id: the database's own number. uid: a random text from which its candidates' public ids follow.
    elapsed_s: seconds of searching recorded so far, those before a resume included.
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
    """One recorded candidate, as a resumed search needs it: without source text and binary code.

    elapsed_s: the run's seconds of searching when it was recorded.
    """

    public_id: str
    candidate: Candidate
    evaluation: Evaluation
    elapsed_s: float


_FINAL_STEP = 7_919
"""Difference between the seeds with which the finals and the search draw their data."""


def gate_seeds(options: Mapping[str, Any], seed: int) -> dict[Stage, int]:
    """The seed by stage with which a run's data are drawn; `evo check CANDIDATE --seed` repeats a verdict with it.

    options, seed: the run's own. A run whose options have no gate_seed draws its data with `seed`.
    """
    drawn = int(options.get("gate_seed", seed))
    return {Stage.SEARCH: drawn, Stage.FINAL: drawn + _FINAL_STEP}
