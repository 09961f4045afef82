"""Uniform crossover: every parameter from one parent or the other; what only one of them has comes from that one."""

import random
from collections.abc import Collection, Sequence

from evo.problem.genome import Genome
from evo.problem.space import Point, Space
from evo.search.operators import Operator


def draw(rng: random.Random, space: Space, parents: Sequence[Genome]) -> tuple[Point, Collection[str]] | None:
    a, b = (parent.parameters for parent in parents)
    if len(parents[0].difference(parents[1])) < 2:
        return None  # every child would be one of its parents
    inherited: Point = {}
    # In the order of declaration, so that a dependent parameter is only asked for where the inherited structure has it.
    for p in space.parameters:
        if not space.is_active(p, inherited):
            continue
        source, other = (a, b) if rng.random() < 0.5 else (b, a)
        if p.name in source or p.name in other:
            inherited[p.name] = source[p.name] if p.name in source else other[p.name]
        else:
            inherited[p.name] = rng.choice(p.values)
    return inherited, ()


OPERATOR = Operator(name="crossover", arity=2, weight=2.0, draw=draw)
