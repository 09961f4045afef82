"""Which operator to use: each by what its children have been worth lately."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evo.search.operators import Operator

__all__ = ["Credit"]

_ADAPTATION = 0.05
"""Weight of the newest child against all earlier ones: a memory of about 20 children."""
_FLOOR = 0.1
"""Credit that no operator falls below: what does not help now may later."""
_PRIOR = 0.5


class Credit:
    """Probability matching (Thierens 2005): shares proportional to prior weight times quality, with a floor.

    Deterministic: qualities are sums in the order of the rewards.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = list(operators)
        self._quality = {o.name: _PRIOR for o in operators}

    def pick(self, rng: random.Random) -> Operator:
        return rng.choices(self._operators, [o.weight * (_FLOOR + self._quality[o.name]) for o in self._operators])[0]

    def reward(self, name: str, worth: float) -> None:
        """What a child of operator `name` was worth, 0 to 1; names of no operator are passed over."""
        if name in self._quality:
            self._quality[name] += _ADAPTATION * (worth - self._quality[name])
