from __future__ import annotations

import random
import statistics
from collections import Counter

from spaces import best_score, outcome, play, tiled_space

from evo.problem.genome import Genome
from evo.search.operators import find_operator, operator_names
from evo.search.samplers.evolution import SAMPLER as EVOLUTION
from evo.search.samplers.evolution import Credit
from evo.search.samplers.random import SAMPLER as RANDOM


def test_the_default_comes_first_then_seeds_then_children() -> None:
    space = tiled_space()
    proposals, _ = play(EVOLUTION(space, 1, {"seeding": 10}), outcome, 80)
    operators = [p.operator for p in proposals]
    assert proposals[0].genome == Genome.of(space.complete({}))
    assert operators[0] == "default"
    assert set(operators[1:10]) <= {"random", "tpe"}
    assert "tpe" in operators[1:10]
    assert set(operators[10:]) <= {*operator_names(), "random"}
    assert sum(bool(p.parents) for p in proposals[10:]) > 60


def test_a_space_without_a_legal_default_is_begun_at_random() -> None:
    proposals, _ = play(EVOLUTION(tiled_space().restricted({"reduce": "warp"}), 1, {}), outcome, 5)
    assert all(p.genome.parameters["reduce"] == "warp" for p in proposals)


def test_it_finds_better_points_than_chance() -> None:
    seeds = range(3)
    found = [best_score(play(EVOLUTION(tiled_space(), s, {}), outcome, 120, window=6)[1]) for s in seeds]
    chance = [best_score(play(RANDOM(tiled_space(), s, {}), outcome, 120, window=6)[1]) for s in seeds]
    assert max(found) < min(chance)
    assert statistics.mean(found) < 0.56  # 0.501 is the best there is


def test_the_surrogate_saves_evaluations() -> None:
    seeds = range(4)
    screened = [best_score(play(EVOLUTION(tiled_space(), s, {}), outcome, 70)[1]) for s in seeds]
    plain = [best_score(play(EVOLUTION(tiled_space(), s, {"children": 1}), outcome, 70)[1]) for s in seeds]
    assert statistics.mean(screened) < statistics.mean(plain)


def test_a_neutral_mutation_is_nobodys_parent() -> None:
    neutral = ["ignored", "accumulators", "hint", "min_blocks"]
    proposals, results = play(EVOLUTION(tiled_space(), 3, {}), outcome, 200, window=4, same_code=neutral)
    assert {p.operator for p in proposals if p.parents} == set(operator_names())
    assert sum(r.duplicate_of is not None for r in results) > 5
    for proposal in proposals:
        for parent in proposal.parents:
            assert results[parent.order].duplicate_of is None


def test_after_stagnation_it_looks_further_afield() -> None:
    sampler = EVOLUTION(tiled_space(), 5, {"patience": 40, "injection": 0.0})
    proposals, _ = play(sampler, lambda g: 1.0, 200)
    early, late = Counter(p.operator for p in proposals[12:40]), Counter(p.operator for p in proposals[60:])
    assert early["random"] == 0
    assert late["random"] > 5


def test_credit_goes_to_what_helps_and_no_operator_is_forgotten() -> None:
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


def test_a_whole_number_will_do_for_a_share() -> None:
    proposals, _ = play(EVOLUTION(tiled_space(), 0, {"injection": 1, "seeding": 1}), outcome, 10)
    assert [p.operator for p in proposals[1:]] == 9 * ["random"]
