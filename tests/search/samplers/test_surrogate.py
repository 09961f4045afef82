from __future__ import annotations

import random

import numpy as np
import pytest

from evo.problem.genome import Genome
from evo.problem.space import Categorical, Ordinal, Point, Space
from evo.search.samplers.evolution import Surrogate
from evo.testing.spaces import outcome, tiled_space


def taught(space: Space, genomes: list[Genome], scores: list[float | None], seed: int = 0) -> Surrogate:
    surrogate = Surrogate(space, seed)
    for genome, score in zip(genomes, scores, strict=True):
        if surrogate.ready:
            merits(surrogate, [genome])  # asked beside being taught, as in a search: it is then that it refits
        surrogate.learn(surrogate.mark_pending(genome), score)
    return surrogate


def merits(surrogate: Surrogate, genomes: list[Genome]) -> list[float]:
    found: list[float] = surrogate.merits(np.stack([surrogate.features(g) for g in genomes])).tolist()
    return found


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
    neutral, step = merits(surrogate, [Genome.of({"n": 2, "ignored": "f"}), Genome.of({"n": 1, "ignored": "a"})])
    assert step > neutral


def test_what_is_under_evaluation_has_little_left_to_gain() -> None:
    space = tiled_space()
    known = samples(space, 60, 3)
    surrogate = taught(space, known, [outcome(g) for g in known])
    candidate, other = samples(space, 2, 4)
    before = merits(surrogate, [candidate, other])
    near = Genome.of({**candidate.parameters, "ignored": "a" if candidate.parameters["ignored"] != "a" else "b"})
    surrogate.mark_pending(near)
    after = merits(surrogate, [candidate, other])
    assert after[0] < before[0]
    assert before[0] - after[0] > abs(before[1] - after[1])


def test_it_is_not_ready_before_enough_has_passed() -> None:
    space = tiled_space()
    known = samples(space, 20, 5)
    assert not taught(space, known, [None] * 20).ready
    assert not taught(space, known[:3], [1.0] * 3).ready
    assert taught(space, known[:4], [1.0] * 4).ready


def test_scores_may_be_of_any_size_and_sign() -> None:
    space = tiled_space()
    known, fresh = samples(space, 60, 6), samples(space, 10, 7)
    scores = [outcome(g) for g in known]
    plain = merits(taught(space, known, scores), fresh)
    scaled = merits(taught(space, known, [None if s is None else 1e3 * s - 1e6 for s in scores]), fresh)
    assert scaled == pytest.approx(plain, abs=1e-3)


def test_numbers_are_alike_that_the_same_power_of_two_divides() -> None:
    threads = tuple(range(16, 257, 16))
    space = Space(parameters=(Ordinal(name="threads", values=threads), Ordinal(name="n", values=(1, 2, 3))))
    known = [Genome.of({"threads": t, "n": n}) for t in threads for n in (1, 2, 3) if t not in (192, 208)]
    # Good are multiples of 64; by size alone 208 is nearer to one of them, and 192 as near to what is bad.
    surrogate = taught(space, known, [1.0 if int(g.parameters["threads"]) % 64 == 0 else 2.0 for g in known])
    odd, even = merits(surrogate, [Genome.of({"threads": t, "n": 2}) for t in (208, 192)])
    assert even > odd


def test_distances_are_shares_of_the_range_and_one_where_something_is_missing() -> None:
    space = tiled_space()
    surrogate = Surrogate(space, 0)
    base = space.complete({"path": "async", "stages": 2, "tile": 2})

    def apart(other: Point) -> float:
        a, b = surrogate.features(Genome.of(base)), surrogate.features(Genome.of(other))
        return float(((a - b) ** 2).sum())

    assert apart({**base, "vector": 2}) == pytest.approx(1 / 3)  # of 1, 2, 4, 8, which all are powers of two
    assert apart({**base, "ignored": "b"}) == pytest.approx(1.0)
    # 2 is the second of eight, 12 the seventh; 2 is divided by the second of five powers of two, 12 by the third.
    assert apart({**base, "tile": 12}) == pytest.approx(5 / 7 + 1 / 4)
    without = {name: value for name, value in base.items() if name not in ("stages", "swizzle")}
    # path, hint, swizzle, and stages, which has both distances.
    assert apart({**without, "path": "direct", "hint": "none"}) == pytest.approx(5.0)
