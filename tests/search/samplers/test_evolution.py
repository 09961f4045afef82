from __future__ import annotations

import statistics
from itertools import combinations

from evo.discovery import plugin_names
from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Space
from evo.search.samplers import SamplerFactory
from evo.search.samplers.evolution import SAMPLER as EVOLUTION
from evo.search.samplers.random import SAMPLER as RANDOM
from evo.testing.spaces import outcome, play, tiled_space
from tests.landscape import best_score

MADE = {*plugin_names("operator"), "surround"}


def test_the_default_comes_first_then_points_apart_then_children() -> None:
    space = tiled_space()
    proposals, _ = play(EVOLUTION(space, 1, {"seeding": 10}), outcome, 80)
    operators = [p.operator for p in proposals]
    assert proposals[0].genome == Genome.of(space.complete({}))
    assert operators[:10] == ["default"] + 9 * ["random"]
    assert set(operators[10:]) <= {*MADE, "random"}
    assert all(bool(p.parents) == (p.operator in MADE) for p in proposals)
    assert sum(bool(p.parents) for p in proposals[10:]) > 50


def test_the_first_points_differ_in_most_parameters() -> None:
    def differing(sampler: SamplerFactory) -> float:
        found = [play(sampler(tiled_space(), s, {}), outcome, 6)[0] for s in range(5)]
        pairs = [(a.genome, b.genome) for made in found for a, b in combinations(made, 2)]
        return statistics.mean(len(a.difference(b)) for a, b in pairs)

    assert differing(EVOLUTION) > differing(RANDOM) + 0.5


def test_a_space_without_a_legal_default_is_begun_at_random() -> None:
    proposals, _ = play(EVOLUTION(tiled_space().restricted({"reduce": "warp"}), 1, {}), outcome, 5)
    assert all(p.genome.parameters["reduce"] == "warp" for p in proposals)


def test_it_finds_better_points_than_chance() -> None:
    seeds = range(3)
    found = [best_score(play(EVOLUTION(tiled_space(), s, {}), outcome, 120, window=6)[1]) for s in seeds]
    chance = [best_score(play(RANDOM(tiled_space(), s, {}), outcome, 120, window=6)[1]) for s in seeds]
    assert max(found) < min(chance)
    assert statistics.mean(found) < 0.56  # 0.501 is the best there is


def test_a_neutral_mutation_is_nobodys_parent() -> None:
    neutral = ["ignored", "accumulators", "hint", "min_blocks"]
    proposals, results = play(EVOLUTION(tiled_space(), 3, {}), outcome, 200, window=4, same_code=neutral)
    assert {p.operator for p in proposals if p.parents} <= MADE
    assert sum(r.duplicate_of is not None for r in results) > 5
    for proposal in proposals:
        for parent in proposal.parents:
            assert results[parent.order].duplicate_of is None


def test_a_best_one_that_stands_is_surrounded_by_its_neighbours_however_far() -> None:
    """The best value of `far` is 22 places from what stands, which a step or two never reach."""
    space = Space(
        parameters=(
            Ordinal(name="far", values=tuple(range(32, 257, 8))),
            *(Categorical(name=name, values=tuple(range(6))) for name in "abcd"),
        ),
        default={"far": 240},
    )

    def score(genome: Genome) -> float:
        point = genome.parameters
        away = 0.0 if point["far"] == 64 else 0.2 + abs(int(point["far"]) - 240) / 100
        return 1.0 + away + sum(point[name] != 3 for name in "abcd")

    proposals, results = play(EVOLUTION(space, 2, {}), score, 300)
    scores = [r.score or 9.0 for r in results]
    surrounding = [i for i, p in enumerate(proposals) if p.operator == "surround"]
    assert surrounding
    for i in surrounding:
        (parent,) = proposals[i].parents
        assert len(proposals[i].genome.difference(proposals[parent.order].genome)) == 1
    assert min(scores) == 1.0
    first = surrounding[0]
    assert min(scores[first - 25 : first]) >= min(scores[: first - 25]), "nothing better for 25 results before"
