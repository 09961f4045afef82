from __future__ import annotations

import random

import pytest

from evo.problem.genome import Genome
from evo.problem.space import Constraint, Ordinal, Space
from evo.search.samplers import Exhausted, Unseen


def drain(unseen: Unseen, rng: random.Random) -> list[Genome]:
    found: list[Genome] = []
    while True:
        try:
            found.append(unseen.propose(rng).genome)
        except Exhausted:
            return found
        unseen.remember(found[-1])


def test_a_large_space_with_few_legal_points_is_walked_from_point_to_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo.search.samplers._RANDOM_ATTEMPTS", 32)  # each is 5,000 draws in vain
    # Too large to enumerate. A staircase of single steps: (0, 0), (1, 0), (1, 1), (2, 1), ...
    chain = Constraint(
        name="chain",
        holds=lambda p: int(p["b"]) <= int(p["a"]) <= min(10, int(p["b"]) + 1),
        reason="the first is as large as the second, or larger by 1, and not above 10",
    )
    values = tuple(range(600))
    space = Space(
        parameters=(Ordinal(name="a", values=values), Ordinal(name="b", values=values)),
        constraints=(chain,),
        default={"a": 0, "b": 0},
    )
    found = drain(Unseen(space), random.Random(0))
    assert {sum(int(v) for _, v in g.items) for g in found} == set(range(21))
    assert len(found) == 21
