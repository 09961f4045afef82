"""Which values of the parameters that matter a run has hardly tried: of these it cannot tell whether they are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evo.analysis.importance import Importance, Tried
from evo.problem.space import Value

__all__ = ["Seldom", "important", "tried_least"]

_PARAMETERS = 3
_LEAST_SHARE = 0.05
_SELDOM = 1 / 3
"""Of the candidates that each value would have had if all had been tried alike."""
_TOLD = 3


@dataclass(frozen=True, kw_only=True)
class Seldom:
    """A value and how it fared. of: candidates that have the parameter."""

    parameter: str
    value: Value
    tried: Tried
    of: int


def important(records: Sequence[Importance]) -> list[Importance]:
    """The parameters of one workload that matter most: three at most, none with less than a twentieth."""
    shares = [r for r in records if r.importance is not None and r.importance >= _LEAST_SHARE]
    return sorted(shares, key=lambda r: -(r.importance or 0.0))[:_PARAMETERS]


def tried_least(records: Sequence[Importance]) -> list[Seldom]:
    """Of one workload, the most important parameter first; of each the values with the fewest candidates, three at most."""
    found = []
    for record in important(records):
        of = sum(t.candidates for t in record.tried)
        few = [t for t in record.tried if t.candidates < _SELDOM * of / len(record.tried)]
        found += [Seldom(parameter=record.parameter, value=t.value, tried=t, of=of) for t in few[:_TOLD]]
    return found
