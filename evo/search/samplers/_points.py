"""Points that every sampler starts with, and the memory that keeps it from repeating itself."""

from __future__ import annotations

import random
from collections.abc import Iterator

from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.samplers import Exhausted

__all__ = ["Unseen", "first_proposals", "given_proposals"]

_RANDOM_ATTEMPTS = 256
"""Random points that must all be known before the rest of the space is walked instead."""
_ENUMERABLE = 1 << 18
"""Upper bound of points up to which walking the whole space takes seconds at worst, all told."""


class Unseen:
    """Which genomes of `space` have been proposed, and where a new one can still be had."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._proposed: set[Genome] = set()
        self._sequence: list[Genome] = []
        self._rest: Iterator[Point] | None = None

    def __contains__(self, genome: Genome) -> bool:
        """Whether it is still unseen."""
        return genome not in self._proposed

    def remember(self, genome: Genome) -> None:
        self._proposed.add(genome)
        self._sequence.append(genome)

    def propose(self, rng: random.Random) -> Proposal:
        """A legal genome never proposed, at random as long as random points are mostly new.

        Then what is left of a small space in declaration order, of a large one what neighbours the points
        proposed so far. Raises Exhausted when that yields nothing either.
        """
        if self._rest is None:
            for _ in range(_RANDOM_ATTEMPTS):
                genome = Genome.of(self._space.sample(rng))
                if genome in self:
                    return Proposal(genome=genome, operator="random")
            self._rest = self._walk()
        for point in self._rest:
            genome = Genome.of(point)
            if genome in self:
                return Proposal(genome=genome, operator="random")
        raise Exhausted(f"all {len(self._proposed)} legal points that could be found have been proposed")

    def _walk(self) -> Iterator[Point]:
        if self._space.cardinality <= _ENUMERABLE:
            yield from self._space.points()
            return
        yield self._space.complete(self._space.default)
        for genome in self._sequence:  # grows while it is walked
            yield from self._space.neighbours(genome.parameters)


def first_proposals(space: Space) -> list[Proposal]:
    """The default, and what is given."""
    first = Proposal(genome=Genome.of(space.complete(space.default)), operator="default")
    return [first, *(p for p in given_proposals(space) if p.genome != first.genome)]


def given_proposals(space: Space) -> list[Proposal]:
    """Each point once."""
    return [Proposal(genome=g, operator="start") for g in dict.fromkeys(Genome.of(p) for p in space.initial_points)]
