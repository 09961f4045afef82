"""What an onlooker sees of a running search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from evo.evaluation import Status

__all__ = ["Observer", "Progress"]


@dataclass(kw_only=True)
class Progress:
    """What an onlooker sees of a running search. Owned by the search; read it, do not keep it."""

    asked: int = 0
    finished: int = 0
    building: int = 0
    measuring: int = 0
    by_status: dict[Status, int] = field(default_factory=dict)
    best: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """By island: order, ratio to the reference, median microseconds."""
    improvements: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(elapsed seconds, island, order, ratio)"""
    build_seconds: float = 0.0
    """Of all builders together, which work beside each other."""
    device_seconds: float = 0.0
    load_seconds: float = 0.0
    gate_seconds: float = 0.0
    timing_seconds: float = 0.0
    first_measured_s: float | None = None
    elapsed_s: float = 0.0


class Observer(Protocol):
    def update(self, progress: Progress) -> None: ...
