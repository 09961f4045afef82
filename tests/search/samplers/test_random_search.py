from __future__ import annotations

from collections import Counter

from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Space, When
from evo.search.samplers.random import SAMPLER as RANDOM
from evo.testing.spaces import play, tiny_space


def test_every_branch_of_the_conditional_tree_is_as_likely_as_its_siblings() -> None:
    space = Space(
        parameters=(
            Categorical(name="path", values=("direct", "async")),
            Ordinal(name="stages", values=(1, 2, 3, 4), when=(When(parameter="path", values=("async",)),)),
        )
    )
    first = Counter(RANDOM(space, seed, {}).ask(0).genome for seed in range(800))
    assert 340 < first[Genome.of({"path": "direct"})] < 460  # half, not a fifth
    assert all(60 < first[Genome.of({"path": "async", "stages": n})] < 140 for n in (1, 2, 3, 4))


def test_results_do_not_sway_it() -> None:
    up, _ = play(RANDOM(tiny_space(), 1, {}), lambda g: float(len(g.to_json())), 13)
    down, _ = play(RANDOM(tiny_space(), 1, {}), lambda g: None, 13)
    assert up == down
    assert {p.operator for p in up} == {"random"}
