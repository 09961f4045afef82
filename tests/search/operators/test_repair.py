from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from spaces import tiled_space

from evo.problem.space import Constraint, Ordinal, Space
from evo.search.operators import change, repair

SPACE = tiled_space()


@given(seed=st.integers(0, 2**32))
@example(seed=8042)  # a kept parameter is turned off on the way, and on again
@settings(max_examples=100, deadline=None)
def test_what_is_mended_is_legal_and_kept_parameters_are_not_touched(seed: int) -> None:
    rng = random.Random(seed)
    point = SPACE.draw(rng)
    keep = set(rng.sample(sorted(point), 3))
    mended = repair(rng, SPACE, point, keep=keep)
    if mended is not None:
        SPACE.validate(mended)
        assert all(mended[n] == point[n] for n in keep if n in mended)


def test_most_random_points_can_be_mended() -> None:
    rng = random.Random(0)
    points = [SPACE.draw(rng) for _ in range(200)]
    illegal = [p for p in points if not SPACE.is_legal(p)]
    assert len(illegal) > 100
    assert sum(repair(rng, SPACE, p) is not None for p in illegal) > 0.6 * len(illegal)


def test_a_legal_point_is_left_alone() -> None:
    point = SPACE.complete({})
    assert repair(random.Random(0), SPACE, point) == point


def test_a_point_that_only_kept_parameters_could_mend_is_given_up() -> None:
    rule = Constraint(name="even", holds=lambda p: int(p["a"]) % 2 == 0, reason="odd is wrong")
    space = Space(parameters=(Ordinal(name="a", values=(1, 2)), Ordinal(name="b", values=(1, 2))), constraints=(rule,))
    assert repair(random.Random(0), space, {"a": 1, "b": 1}, keep={"a"}) is None
    assert repair(random.Random(0), space, {"a": 1, "b": 1}, keep={"a", "b"}) is None
    assert repair(random.Random(0), space, {"a": 1, "b": 1}) == {"a": 2, "b": 1}


def test_a_condition_that_turns_on_brings_its_parameters_and_one_that_turns_off_takes_them() -> None:
    rng = random.Random(0)
    point = SPACE.complete({"path": "direct"})
    staged = change(rng, SPACE, point, {"path": "bulk"})
    assert {"stages", "swizzle"} <= set(staged)
    assert "hint" not in staged
    assert SPACE.draw(rng, {**staged, "path": "direct"}).keys() == point.keys()
