"""Which parameters mattered for a workload, as the pages show it: what `evo.store.importance` says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evo.report.parameters import KnownParameter
from evo.store import importance as asked

__all__ = ["Importance", "weigh_parameters"]

_SURE = 50


@dataclass(frozen=True, kw_only=True)
class Importance:
    """shares: of each parameter, the largest first; they sum to 1. quantile: the best that were told from the rest.

    number: of timed candidates that it is from. reason: why there are no shares, where there are none.
    """

    shares: tuple[tuple[KnownParameter, float], ...] = ()
    quantile: float = 0.1
    number: int = 0
    reason: str = ""

    @property
    def rough(self) -> bool:
        """Whether so few are among the best that chance may have chosen them."""
        return self.number < _SURE

    @property
    def names(self) -> list[str]:
        return [p.name for p, _ in self.shares]


def weigh_parameters(known: Sequence[asked.Importance], parameters: tuple[KnownParameter, ...]) -> Importance:
    """Of one workload."""
    by_name = {p.name: p for p in parameters}
    shares = [
        (by_name[i.parameter], i.importance) for i in known if i.importance is not None and i.parameter in by_name
    ]
    number = max((i.timed for i in known), default=0)
    if shares:
        return Importance(shares=tuple(shares), number=number)
    notes = list(dict.fromkeys(i.note for i in known if i.note))
    return Importance(number=number, reason="; ".join(notes) or "no candidate has a time")
