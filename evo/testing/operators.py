"""What every operator must do."""

from __future__ import annotations

import random

import pytest

from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Space
from evo.search.operators import Operator, find_operator
from evo.testing import Suite
from evo.testing.spaces import tight_space, tiled_space, tiny_space

SPACES = {"tiny": tiny_space(), "tiled": tiled_space()}


def parents_of(operator: Operator, space: Space, rng: random.Random) -> list[Genome]:
    """Distinct legal parents, as many as the operator asks for."""
    found: list[Genome] = []
    while len(found) < operator.arity:
        genome = Genome.of(space.sample(rng))
        if genome not in found:
            found.append(genome)
    return found


class OperatorSuite(Suite):
    """What every operator must do."""

    @pytest.fixture
    def operator(self, name: str) -> Operator:
        return find_operator(name)

    @pytest.mark.parametrize("space", SPACES)
    def test_a_child_is_legal_and_differs_from_every_parent(self, operator: Operator, space: str) -> None:
        for rng in map(random.Random, range(60)):
            parents = parents_of(operator, SPACES[space], rng)
            child = operator(rng, SPACES[space], parents)
            if child is not None:
                assert SPACES[space].is_legal(child.parameters)
                assert child not in parents

    def test_most_parents_have_a_child_in_a_space_of_real_size(self, operator: Operator) -> None:
        rng, space = random.Random(5), SPACES["tiled"]
        children = [operator(rng, space, parents_of(operator, space, rng)) for _ in range(100)]
        assert sum(c is not None for c in children) >= 80
        assert len(set(children)) >= 60  # and they are not all the same

    def test_children_follow_from_the_generator_alone(self, operator: Operator) -> None:
        space = SPACES["tiled"]
        parents = parents_of(operator, space, random.Random(1))
        twice = [[operator(rng, space, parents) for _ in range(20)] for rng in (random.Random(2), random.Random(2))]
        assert twice[0] == twice[1]

    def test_where_nothing_can_vary_there_is_no_child(self, operator: Operator) -> None:
        only = Space(parameters=(Ordinal(name="a", values=(1,)), Ordinal(name="b", values=(2,))))
        parent = Genome.of({"a": 1, "b": 2})
        assert operator(random.Random(0), only, [parent] * operator.arity) is None

    def test_an_operator_gives_up_where_legal_points_are_out_of_reach(self, operator: Operator) -> None:
        space = tight_space()  # sixty legal points, five moves apart
        parents = [Genome.of(dict.fromkeys(space.by_name, v)) for v in (5, 6)][: operator.arity]
        for seed in range(5):
            child = operator(random.Random(seed), space, parents)
            assert child is None or space.is_legal(child.parameters)
