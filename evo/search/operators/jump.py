"""Jump: two parameters to half of them drawn anew, the rest kept: leaves a local optimum behind."""

import random
from collections.abc import Collection, Sequence

from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.operators import Operator, free


def draw(rng: random.Random, space: Space, parents: Sequence[Genome]) -> tuple[Point, Collection[str]] | None:
    start = parents[0].parameters
    names = [p.name for p in free(space, start)]
    if not names:
        return None
    count = rng.randint(min(2, len(names)), max(2, len(names) // 2))
    forgotten = rng.sample(names, min(count, len(names)))
    return space.draw(rng, {n: v for n, v in start.items() if n not in forgotten}), ()


OPERATOR = Operator(name="jump", arity=1, weight=1.0, draw=draw)
