from __future__ import annotations

import random

import pytest
from spaces import outcome, tiled_space

from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Space
from evo.search.samplers.evolution import Surrogate


def taught(space: Space, genomes: list[Genome], scores: list[float | None], seed: int = 0) -> Surrogate:
    surrogate = Surrogate(space, seed)
    for genome, score in zip(genomes, scores, strict=True):
        if surrogate.ready:
            surrogate.merits([genome])  # asked beside being taught, as in a search: it is then that it refits
        surrogate.learn(surrogate.mark_pending(genome), score)
    return surrogate


def samples(space: Space, count: int, seed: int) -> list[Genome]:
    rng = random.Random(seed)
    return [Genome.of(space.sample(rng)) for _ in range(count)]


def test_a_point_that_changes_nothing_has_less_merit_than_one_that_may() -> None:
    space = Space(
        parameters=(Ordinal(name="n", values=tuple(range(24))), Categorical(name="ignored", values=tuple("abcdef")))
    )
    known = [Genome.of({"n": n, "ignored": c}) for n in range(2, 24) for c in "abcde"]
    random.Random(0).shuffle(known)
    surrogate = taught(space, known, [1.0 + 0.1 * int(g.parameters["n"]) for g in known])
    neutral, step = surrogate.merits([Genome.of({"n": 2, "ignored": "f"}), Genome.of({"n": 1, "ignored": "a"})])
    assert step > neutral


def test_what_is_under_evaluation_has_little_left_to_gain() -> None:
    space = tiled_space()
    known = samples(space, 60, 3)
    surrogate = taught(space, known, [outcome(g) for g in known])
    candidate, other = samples(space, 2, 4)
    before = surrogate.merits([candidate, other])
    near = Genome.of({**candidate.parameters, "ignored": "a" if candidate.parameters["ignored"] != "a" else "b"})
    surrogate.mark_pending(near)
    after = surrogate.merits([candidate, other])
    assert after[0] < before[0]
    assert before[0] - after[0] > abs(before[1] - after[1])


def test_it_is_not_ready_before_enough_has_passed() -> None:
    space = tiled_space()
    known = samples(space, 20, 5)
    assert not taught(space, known, [None] * 20).ready
    assert not taught(space, known[:7], [1.0] * 7).ready
    assert taught(space, known[:8], [1.0] * 8).ready


def test_scores_may_be_of_any_size_and_sign() -> None:
    space = tiled_space()
    known, fresh = samples(space, 60, 6), samples(space, 10, 7)
    scores = [outcome(g) for g in known]
    merits = taught(space, known, scores).merits(fresh)
    scaled = taught(space, known, [None if s is None else 1e3 * s - 1e6 for s in scores]).merits(fresh)
    assert scaled == pytest.approx(merits, abs=1e-3)
