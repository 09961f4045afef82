"""Crossover: every parameter from one parent or the other; what only one of them has comes from that one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.operators._repair import repair

__all__ = ["OPERATOR", "Crossover"]

_ATTEMPTS = 8


class Crossover:
    """Uniform crossover that follows conditions: parameters are inherited in declaration order, so that a
    dependent one is only asked for where the inherited structure has it."""

    name = "crossover"
    arity = 2
    weight = 2.0

    def __call__(self, rng: random.Random, space: Space, parents: Sequence[Genome]) -> Genome | None:
        first, second = parents[0], parents[1]
        a, b = first.parameters, second.parameters
        if len(first.difference(second)) < 2:
            return None  # every child would be one of its parents
        for _ in range(_ATTEMPTS):
            inherited: Point = {}
            for p in space.parameters:
                if not space.is_active(p, inherited):
                    continue
                source, other = (a, b) if rng.random() < 0.5 else (b, a)
                if p.name in source or p.name in other:
                    inherited[p.name] = source[p.name] if p.name in source else other[p.name]
                else:
                    inherited[p.name] = rng.choice(p.values)
            child = repair(rng, space, space.draw(rng, inherited))
            if child is not None and child not in (a, b):
                return Genome.of(child)
        return None


OPERATOR = Crossover()
