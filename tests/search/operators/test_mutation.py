from __future__ import annotations

import random
from collections import Counter

from spaces import tiled_space

from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Space
from evo.search.operators.mutation import OPERATOR as MUTATION


def test_most_mutations_move_one_parameter() -> None:
    space = Space(parameters=tuple(Ordinal(name=f"p{i}", values=tuple(range(8))) for i in range(10)))
    rng, parent = random.Random(0), Genome.of(dict.fromkeys(space.by_name, 4))
    moved = Counter(len(parent.difference(child)) for _ in range(400) if (child := MUTATION(rng, space, [parent])))
    assert moved[1] > 200
    assert moved[2] + moved[3] > 50
    assert 0 not in moved


def test_ordinals_mostly_move_by_a_step_but_reach_every_value() -> None:
    space = Space(parameters=(Ordinal(name="n", values=(1, 2, 4, 8, 16, 32, 64, 128)),))
    rng, parent = random.Random(0), Genome.of({"n": 8})
    reached = Counter(child.parameters["n"] for _ in range(800) if (child := MUTATION(rng, space, [parent])))
    assert set(reached) == {1, 2, 4, 16, 32, 64, 128}
    assert reached[4] + reached[16] > 400
    assert reached[4] > 3 * reached[1]


def test_a_broken_constraint_is_mended_by_moving_something_else() -> None:
    space = tiled_space()
    # Any change of a warp-reduced block size needs the rows, or the reduction, to follow.
    parent = Genome.of(space.complete({"block": 64, "rows": 2, "reduce": "warp"}))
    space.validate(parent.parameters)
    rng = random.Random(0)
    children = [child for _ in range(300) if (child := MUTATION(rng, space, [parent]))]
    blocks = {c.parameters["block"] for c in children}
    assert {32, 128} <= blocks
    assert all(space.is_legal(c.parameters) for c in children)
