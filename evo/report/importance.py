"""Which parameters mattered for a workload, as the pages show it: what `evo.analysis.importance` says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evo.analysis import importance as asked
from evo.analysis.seldom import Seldom, important, tried_least
from evo.errors import SpaceError
from evo.problem.space import Space, Value
from evo.report.parameters import KnownParameter

__all__ = ["Importance", "weigh_parameters"]

_SURE = 50


@dataclass(frozen=True, kw_only=True)
class Importance:
    """shares: of each parameter, the largest first; they sum to 1. quantile: the best that were told from the rest.

    least: values of the most important ones that were hardly tried; never: those not tried at all, as far as the space is
    known.
    number: of timed candidates that it is from. reason: why there are no shares, where there are none.
    """

    shares: tuple[tuple[KnownParameter, float], ...] = ()
    least: tuple[Seldom, ...] = ()
    never: tuple[tuple[str, Value], ...] = ()
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


def weigh_parameters(
    known: Sequence[asked.Importance], parameters: tuple[KnownParameter, ...], space: Space | None = None
) -> Importance:
    """Of one workload. space: its own, where it is still what it was for the run."""
    by_name = {p.name: p for p in parameters}
    shares = [
        (by_name[i.parameter], i.importance) for i in known if i.importance is not None and i.parameter in by_name
    ]
    number = max((i.timed for i in known), default=0)
    if shares:
        return Importance(
            shares=tuple(shares), number=number, least=tuple(tried_least(known)), never=_never(known, space)
        )
    notes = list(dict.fromkeys(i.note for i in known if i.note))
    return Importance(number=number, reason="; ".join(notes) or "no candidate has a time")


def _never(known: Sequence[asked.Importance], space: Space | None) -> tuple[tuple[str, Value], ...]:
    """Values that some legal point has."""
    found = []
    for record in important(known):
        parameter = space.by_name.get(record.parameter) if space is not None else None
        tried = {repr(t.value) for t in record.tried}
        untried = [v for v in parameter.values if repr(v) not in tried] if parameter is not None else []
        found += [(record.parameter, value) for value in untried if _is_possible(space, record.parameter, value)]
    return tuple(found)


def _is_possible(space: Space | None, name: str, value: Value) -> bool:
    try:
        return space is not None and bool(space.restricted({name: value}).default)
    except SpaceError:
        return False
