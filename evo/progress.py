"""What an onlooker sees of a running search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from evo.evaluation import Costs, Status, Timing
from evo.problem.genome import Genome
from evo.problem.workload import Workload

__all__ = ["Improvement", "InFlight", "Observer", "Progress", "Waiting"]


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Work on a candidate that has begun and is not done, for `seconds` now. `left_s`: until it is ended if there is no
    answer; a process that was not given what it needs is given its time again."""

    genome: Genome
    workload: Workload
    stage: str
    """"build", "gate" or "timing"; or "ready": the device, and the data that it is judged with there, are being made
    ready, which has no limit that is its own."""
    seconds: float
    left_s: float | None
    again: bool = False
    """It has cost a process before, and is alone in a fresh one."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a search waits for: candidate number `order`."""

    order: int
    work: InFlight


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A candidate that was better than all before it on its task. `ratio` is `timing`'s: its time over the
    reference's; `elapsed_s` when it was known, in seconds of searching. `replayed`: that was before the run was resumed."""

    elapsed_s: float
    task: int
    order: int
    ratio: float
    timing: Timing
    replayed: bool = False


@dataclass(kw_only=True)
class Progress:
    """What an onlooker sees of a running search. Owned by the search; read it, do not keep it.

    Of a run that is resumed, candidates and seconds are those of the run as a whole, and costs those since then.
    """

    asked: int = 0
    finished: int = 0
    replayed: int = 0
    """Those of the finished ones that were so before the run was resumed."""
    building: int = 0
    measuring: int = 0
    by_status: dict[Status, int] = field(default_factory=dict)
    best: dict[int, Improvement] = field(default_factory=dict)
    """By task: the last improvement."""
    improvements: list[Improvement] = field(default_factory=list)
    waiting: Waiting | None = None
    """For what has been under way the longest."""
    spent: Costs = field(default_factory=Costs)
    spent_on_finished: Costs = field(default_factory=Costs)
    """The part of it that went into candidates which have a result."""
    first_measured_s: float | None = None
    elapsed_s: float = 0.0


class Observer(Protocol):
    def update(self, progress: Progress) -> None: ...
