"""When a search stops."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evo.errors import UsageError

__all__ = ["Budget", "StopReason"]


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
