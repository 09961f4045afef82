from __future__ import annotations

import random
from collections import Counter

from evo.problem.genome import Genome
from evo.search.operators import find_operator, operator_names
from evo.search.samplers.evolution import Credit, Individual, Population


def individual(order: int, score: float) -> Individual:
    return Individual(order=order, score=score, genome=Genome.of({"n": order}))


def test_the_best_stay_and_the_worst_leaves() -> None:
    population = Population(3)
    assert [population.add(individual(i, s)) for i, s in enumerate([3.0, 2.0, 4.0, 5.0, 1.0])] == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert len(population) == 3
    assert population.best == individual(4, 1.0)
    rng = random.Random(0)
    assert {population.select(rng, 1).score for _ in range(50)} == {1.0, 2.0, 3.0}


def test_of_equal_scores_the_older_stays() -> None:
    population = Population(1)
    assert population.add(individual(0, 1.0))
    assert not population.add(individual(1, 1.0))
    assert population.best == individual(0, 1.0)


def test_larger_tournaments_press_harder_for_the_best() -> None:
    population = Population(10)
    for i in range(10):
        population.add(individual(i, float(i)))
    shares = []
    for tournament in (1, 2, 4):
        rng = random.Random(1)
        shares.append(sum(population.select(rng, tournament).order == 0 for _ in range(1000)))
    assert shares[0] < shares[1] < shares[2]


def test_shrinking_leaves_the_best() -> None:
    population = Population(10)
    for i in range(10):
        population.add(individual(i, float(i)))
    population.shrink(2)
    assert {population.select(random.Random(s), 1).order for s in range(20)} == {0, 1}


def test_credit_goes_to_what_helps_and_nobody_is_forgotten() -> None:
    operators = [find_operator(n) for n in operator_names()]
    credit, rng = Credit(operators), random.Random(0)
    before = Counter(credit.pick(rng).name for _ in range(1000))
    for _ in range(100):
        for operator in operators:
            credit.reward(operator.name, 1.0 if operator.name == "crossover" else 0.0)
        credit.reward("random", 1.0)  # made by no operator: passed over
    after = Counter(credit.pick(rng).name for _ in range(1000))
    assert after["crossover"] > 2 * before["crossover"]
    assert all(after[o.name] > 5 for o in operators)
