from __future__ import annotations

import random
import statistics

from spaces import tiled_space

from evo.problem.genome import Genome
from evo.search.operators.jump import OPERATOR as JUMP
from evo.search.operators.mutation import OPERATOR as MUTATION


def test_a_jump_goes_further_than_a_mutation_and_not_all_the_way() -> None:
    space, rng = tiled_space(), random.Random(0)
    jumps, mutations, strangers = [], [], []
    for _ in range(200):
        parent = Genome.of(space.sample(rng))
        jump, mutation = JUMP(rng, space, [parent]), MUTATION(rng, space, [parent])
        if jump is not None and mutation is not None:
            jumps.append(len(parent.difference(jump)))
            mutations.append(len(parent.difference(mutation)))
            strangers.append(len(parent.difference(Genome.of(space.sample(rng)))))
    assert statistics.mean(mutations) < statistics.mean(jumps) < statistics.mean(strangers)
