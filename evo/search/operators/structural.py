"""Structural swap: another algorithm or code shape.

The sizes that suited the old shape seldom suit the new one, so the parameters that exist because of it are not inherited.
"""

import random
from collections.abc import Collection, Sequence

from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.operators import Operator, free


def draw(rng: random.Random, space: Space, parents: Sequence[Genome]) -> tuple[Point, Collection[str]] | None:
    start = parents[0].parameters
    blocks = [p for p in free(space, start) if p.structural]
    if not blocks:
        return None
    block = rng.choice(blocks)
    value = rng.choice([v for v in block.values if v != start[block.name]])
    dependent = {block.name}
    for p in space.parameters:
        if any(w.parameter in dependent for w in p.when):
            dependent.add(p.name)
    kept = {n: v for n, v in start.items() if n not in dependent}
    return space.draw(rng, {**kept, block.name: value}), {block.name}


OPERATOR = Operator(name="structural", arity=1, weight=1.0, draw=draw)
