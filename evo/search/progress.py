"""How far a search is, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from evo.errors import UsageError
from evo.evaluation import Costs, Status, Timing
from evo.executors import InFlight


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop; the first limit reached counts. None: no such limit."""

    seconds: float | None = None
    evaluations: int | None = None
    patience: int | None = None
    """Evaluations in a row without a better candidate."""

    def __post_init__(self) -> None:
        for name, value, unit in (
            ("time", self.seconds, "10m"),
            ("evaluations", self.evaluations, "500"),
            ("patience", self.patience, "200"),
        ):
            if value is not None and value <= 0:
                raise UsageError(f"a budget of {value:g} {name} leaves nothing to do; give more, e.g. {unit}")
        if self.seconds is None and self.evaluations is None and self.patience is None:
            raise UsageError("a search needs a budget: time, evaluations or patience")


class StopReason(StrEnum):
    TIME = "time is up"
    EVALUATIONS = "evaluations done"
    PATIENCE = "no improvement"
    EXHAUSTED = "every point of the space was tried"
    INTERRUPTED = "interrupted"


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
    """What an observer sees of a running search. Owned by the search; read it, do not keep it.

    Of a run that is resumed, candidates and seconds are those of the run as a whole, and costs those since then.
    """

    finished: int = 0
    replayed: int = 0
    """Those of the finished ones that were so before the run was resumed."""
    building: int = 0
    measuring: int = 0
    by_status: dict[Status, int] = field(default_factory=dict)
    best: dict[int, Improvement] = field(default_factory=dict)
    """By task: the last improvement."""
    improvements: list[Improvement] = field(default_factory=list)
    waiting: tuple[int, InFlight] | None = None
    """For the work that has been in flight the longest, which is of the candidate of this order."""
    spent: Costs = field(default_factory=Costs)
    spent_on_finished: Costs = field(default_factory=Costs)
    """The part of it that went into candidates which have a result."""
    first_measured_s: float | None = None
    elapsed_s: float = 0.0


Observer = Callable[[Progress], None]
"""Is called whenever something has happened, and several times a second."""
