"""Jump: a random part of the parameters drawn anew, the rest kept: leaves a local optimum behind."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evo.problem.genome import Genome
from evo.problem.space import Space
from evo.search.operators._repair import repair

__all__ = ["OPERATOR", "Jump"]

_ATTEMPTS = 8


class Jump:
    """Draws two parameters to half of them anew."""

    name = "jump"
    arity = 1
    weight = 1.0

    def __call__(self, rng: random.Random, space: Space, parents: Sequence[Genome]) -> Genome | None:
        parent = parents[0]
        start = parent.parameters
        names = [p.name for p in space.parameters if p.name in start and len(p.values) > 1]
        if not names:
            return None
        for _ in range(_ATTEMPTS):
            count = rng.randint(min(2, len(names)), max(2, len(names) // 2))
            forgotten = rng.sample(names, min(count, len(names)))
            kept = {n: v for n, v in start.items() if n not in forgotten}
            child = repair(rng, space, space.draw(rng, kept))
            if child is not None and child != start:
                return Genome.of(child)
        return None


OPERATOR = Jump()
