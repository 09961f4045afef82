"""Mutation: one parameter, sometimes a few, moved; ordinals mostly by a step."""

import random
from collections.abc import Collection, Sequence

from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.operators import Operator, change, free, move

_ONE_MORE = 0.35
"""Chance of each further parameter: 65% of mutations move one, 23% two, 8% three."""


def draw(rng: random.Random, space: Space, parents: Sequence[Genome]) -> tuple[Point, Collection[str]] | None:
    start = parents[0].parameters
    movable = free(space, start)
    if not movable:
        return None
    count = 1
    while count < len(movable) and rng.random() < _ONE_MORE:
        count += 1
    moved = {p.name: move(rng, p, start[p.name]) for p in rng.sample(movable, count)}
    return change(rng, space, start, moved), moved


OPERATOR = Operator(name="mutation", arity=1, weight=4.0, draw=draw)
