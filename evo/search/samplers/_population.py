"""The best candidates so far, one for each machine code."""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field

from evo.problem.genome import Genome

__all__ = ["Individual", "Population"]


@dataclass(frozen=True, kw_only=True, order=True)
class Individual:
    """A candidate that passed. Ordered by score, then by age."""

    score: float
    order: int
    genome: Genome = field(compare=False)


class Population:
    """At most `capacity` individuals, best first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._members: list[Individual] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def best(self) -> Individual | None:
        return self._members[0] if self._members else None

    def add(self, individual: Individual) -> bool:
        """Takes the individual in if it is among the best; whether it was."""
        insort(self._members, individual)
        if len(self._members) > self._capacity:
            return self._members.pop() is not individual
        return True

    def select(self, rng: random.Random, tournament: int) -> Individual:
        """The best of `tournament` drawn at random (with replacement)."""
        return self._members[min(rng.randrange(len(self._members)) for _ in range(tournament))]

    def shrink(self, survivors: int) -> None:
        """Lets all but the best `survivors` go."""
        del self._members[survivors:]
