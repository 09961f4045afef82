from __future__ import annotations

import random
import statistics

import pytest

from evo.errors import UsageError
from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Space
from evo.search.samplers import SamplerFactory
from evo.search.samplers.evolution import SAMPLER as EVOLUTION
from evo.search.samplers.random import SAMPLER as RANDOM
from evo.search.samplers.tpe import SAMPLER as TPE
from evo.search.samplers.tpe import ParzenModel
from evo.testing.spaces import outcome, play, tiled_space
from tests.landscape import best_score


def test_the_default_comes_first_then_chance_then_the_estimator() -> None:
    space = tiled_space()
    proposals, _ = play(TPE(space, 1, {"startup": 6}), outcome, 30)
    operators = [p.operator for p in proposals]
    assert proposals[0].genome == Genome.of(space.complete({}))
    assert operators[:6] == ["default"] + 5 * ["random"]
    assert operators[6:].count("tpe") >= 20


@pytest.mark.parametrize("sampler", [TPE, RANDOM, EVOLUTION])
def test_given_points_come_first_and_once_and_beside_random_ones(sampler: SamplerFactory) -> None:
    space = tiled_space()
    rng = random.Random(3)
    points = [space.sample(rng) for _ in range(20)]
    given = space.with_initial_points([*points, points[0], space.complete({})])
    genomes = list(dict.fromkeys(map(Genome.of, given.initial_points)))
    first = [] if sampler is RANDOM else [Genome.of(space.complete({}))]
    proposals, _ = play(sampler(given, 1, {}), outcome, 60, window=3)
    expected = list(dict.fromkeys([*first, *genomes]))
    assert [p.genome for p in proposals[: len(expected)]] == expected
    assert {p.operator for p in proposals[len(first) : len(expected)]} == {"start"}
    assert len({p.genome for p in proposals}) == len(proposals)
    assert all(not p.parents for p in proposals[: len(expected)])
    assert [p.operator for p in proposals].count("random") >= 4, "they take no random one's place"


@pytest.mark.parametrize("sampler", [TPE, RANDOM, EVOLUTION])
def test_a_given_point_that_came_from_elsewhere_meanwhile_is_not_proposed_again(sampler: SamplerFactory) -> None:
    space = tiled_space()
    point = space.sample(random.Random(3))
    asked = sampler(space.with_initial_points([point]), 1, {})
    asked.adopt(0, Proposal(genome=Genome.of(point), operator="migration"))
    assert Genome.of(point) not in [asked.ask(order).genome for order in range(1, 6)]


def test_it_finds_better_points_than_chance() -> None:
    seeds = range(2)
    tpe = [best_score(play(TPE(tiled_space(), s, {}), outcome, 100, window=4)[1]) for s in seeds]
    chance = [best_score(play(RANDOM(tiled_space(), s, {}), outcome, 100, window=4)[1]) for s in seeds]
    assert statistics.mean(tpe) < statistics.mean(chance) - 0.05


@pytest.mark.parametrize("sampler", [TPE, EVOLUTION])
def test_it_learns_what_fails(sampler: SamplerFactory) -> None:
    def half_fails(genome: Genome) -> float | None:
        return None if genome.parameters["store"] == "shared" else outcome(genome)

    results = play(sampler(tiled_space(), 0, {}), half_fails, 140)[1]
    assert sum(r.score is None for r in results[60:]) < 20  # 40 by chance


def test_its_history_is_bounded_and_keeps_the_best() -> None:
    space = Space(parameters=(Ordinal(name="a", values=tuple(range(50))), Categorical(name="b", values=(1, True, "1"))))
    model = ParzenModel(space, seed=0, history=16)
    points = list(space.points())
    for i, point in enumerate(points):
        model.mark_pending(i, point)
        if i == 20:
            model.mark_pending(-1, points[0])
        model.learn(i, None if i % 5 == 4 else float(i))
        assert len(model._study.get_trials(deepcopy=False)) <= 26
    kept = [t.value for t in model._study.get_trials(deepcopy=False) if t.value is not None]
    assert {0.0, 1.0, 2.0, 3.0} <= set(kept)
    model.learn(-1, 0.5)  # the outstanding one outlived every new beginning
    assert space.is_legal(model.suggest())


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (TPE, {"startup": "many"}, "'startup' of sampler tpe must be of type int, such as 10; got 'many'"),
        (TPE, {"history": True}, "'history' of sampler tpe must be of type int"),
        (TPE, {"suggestions": 0}, "'suggestions' must be at least 1, got 0"),
        (TPE, {"history": 3}, "'history' must be at least 16, got 3"),
        (EVOLUTION, {"population": 1}, "'population' must be at least 2, got 1"),
        (EVOLUTION, {"children": 0}, "'children' must be at least 1"),
        (EVOLUTION, {"pool": 1.5}, "'pool' of sampler evolution must be of type int, such as 100; got 1.5"),
    ],
)
def test_an_option_out_of_range_says_what_is_expected(
    sampler: SamplerFactory, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sampler(tiled_space(), 0, options)
