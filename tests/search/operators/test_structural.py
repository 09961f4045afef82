from __future__ import annotations

import random

from spaces import tiled_space

from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Space
from evo.search.operators.structural import OPERATOR as STRUCTURAL


def test_another_shape_is_chosen_and_what_depends_on_it_is_drawn_anew() -> None:
    space = tiled_space()
    parent = Genome.of(space.complete({"path": "async", "stages": 1, "swizzle": False}))
    rng = random.Random(0)
    children = [child for _ in range(400) if (child := STRUCTURAL(rng, space, [parent]))]
    changed = [c.parameters for c in children if c.parameters["path"] != "async"]
    assert {p["path"] for p in changed} == {"direct", "bulk"}
    bulk = [p for p in changed if p["path"] == "bulk"]
    assert {p["stages"] for p in bulk} == {1, 2, 3, 4}
    assert {p["hint"] for p in changed if p["path"] == "direct"} == {"none", "cs", "lu", "na"}
    assert all("stages" not in p for p in changed if p["path"] == "direct")


def test_the_sizes_of_the_parent_are_kept_where_constraints_allow() -> None:
    space = tiled_space()
    parent = Genome.of(space.complete({"reduce": "tree", "path": "bulk"}))
    rng = random.Random(0)
    for _ in range(100):
        child = STRUCTURAL(rng, space, [parent])
        assert child is not None
        if child.parameters["reduce"] != "warp":
            assert child.parameters["tile"] == parent.parameters["tile"]
            assert child.parameters["block"] == parent.parameters["block"]


def test_every_child_differs_in_a_structural_parameter() -> None:
    space, rng = tiled_space(), random.Random(1)
    structural = {p.name for p in space.parameters if p.structural}
    for _ in range(100):
        parent = Genome.of(space.sample(rng))
        child = STRUCTURAL(rng, space, [parent])
        assert child is None or structural & set(parent.difference(child))


def test_a_space_without_structure_has_no_structural_swap() -> None:
    space = Space(parameters=(Ordinal(name="a", values=(1, 2, 3)),))
    assert STRUCTURAL(random.Random(0), space, [Genome.of({"a": 1})]) is None
