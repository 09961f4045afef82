"""Structural swap: another algorithm or code shape, with everything that depends on it drawn anew."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evo.problem.genome import Genome
from evo.problem.space import Space
from evo.search.operators._repair import repair

__all__ = ["OPERATOR", "Structural"]

_ATTEMPTS = 8


class Structural:
    """Gives one structural parameter another value. The sizes that suited the old shape seldom suit the new
    one, so the parameters that exist because of it are not inherited."""

    name = "structural"
    arity = 1
    weight = 1.0

    def __call__(self, rng: random.Random, space: Space, parents: Sequence[Genome]) -> Genome | None:
        parent = parents[0]
        start = parent.parameters
        blocks = [p for p in space.parameters if p.structural and p.name in start and len(p.values) > 1]
        if not blocks:
            return None
        for _ in range(_ATTEMPTS):
            block = rng.choice(blocks)
            value = rng.choice([v for v in block.values if v != start[block.name]])
            dependent = {block.name}
            for p in space.parameters:
                if any(w.parameter in dependent for w in p.when):
                    dependent.add(p.name)
            kept = {n: v for n, v in start.items() if n not in dependent}
            child = repair(rng, space, space.draw(rng, {**kept, block.name: value}), keep={block.name})
            if child is not None:
                return Genome.of(child)
        return None


OPERATOR = Structural()
