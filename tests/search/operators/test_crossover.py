from __future__ import annotations

import random

from spaces import tiled_space

from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Space, When
from evo.search.operators.crossover import OPERATOR as CROSSOVER


def test_every_value_comes_from_a_parent_where_no_constraint_interferes() -> None:
    space = Space(parameters=tuple(Ordinal(name=f"p{i}", values=tuple(range(8))) for i in range(10)))
    rng = random.Random(0)
    for _ in range(50):
        a, b = Genome.of(space.sample(rng)), Genome.of(space.sample(rng))
        child = CROSSOVER(rng, space, [a, b])
        assert child is not None
        for name, value in child.items:
            assert value in (a.parameters[name], b.parameters[name])
        assert child.difference(a)
        assert child.difference(b)


def test_a_dependent_parameter_is_inherited_from_the_parent_that_has_it() -> None:
    staged = When(parameter="path", values=("async",))
    space = Space(
        parameters=(
            Categorical(name="path", values=("direct", "async"), structural=True),
            Ordinal(name="stages", values=(1, 2, 3, 4), when=(staged,)),
            Ordinal(name="tile", values=(1, 2, 4, 8)),
        )
    )
    a = Genome.of({"path": "direct", "tile": 1})
    b = Genome.of({"path": "async", "stages": 3, "tile": 8})
    rng = random.Random(0)
    children = {CROSSOVER(rng, space, [a, b]) for _ in range(50)}
    assert children == {
        Genome.of({"path": "async", "stages": 3, "tile": 1}),
        Genome.of({"path": "direct", "tile": 8}),
    }


def test_parents_that_differ_in_one_parameter_have_no_child_of_their_own() -> None:
    space = tiled_space()
    a = Genome.of(space.complete({}))
    b = Genome.of({**a.parameters, "ignored": "d"})
    assert CROSSOVER(random.Random(0), space, [a, b]) is None
