from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from evo.errors import SpaceError, UnknownNameError
from evo.problem.genome import Genome
from evo.problem.space import Categorical, Constraint, Ordinal, Space, Value, When, parse_number
from evo.testing.spaces import tiny_space


def test_points_of_a_small_space_are_exactly_the_legal_combinations() -> None:
    found = [(p["tile"], p["store"], p.get("pad"), p["unroll"]) for p in tiny_space().points()]
    expected = [
        (tile, store, pad, unroll)
        for tile in (1, 2, 4)
        for store in ("registers", "shared")
        for pad in ((None,) if store == "registers" else (False, True))
        for unroll in (1, 2)
        if tile * unroll * (2 if pad else 1) <= 8 and not (pad and tile < 2) and not (tile == 1 and unroll == 1)
    ]
    assert found == expected
    assert len(found) == 13


def test_ends_of_a_space_come_before_random_points_and_none_breaks_a_constraint() -> None:
    space = replace(
        tiny_space(),
        constraints=(Constraint(name="few", holds=lambda p: p["tile"] * p["unroll"] <= 4, reason="registers"),),
        default={"tile": 2, "store": "registers", "unroll": 1},
    )
    found = space.ends_and_samples(random.Random(1), 6)
    assert [p["tile"] for p in found[:2]] == [1, 4]
    assert found[2] == {"tile": 2, "store": "registers", "unroll": 2}
    assert len(found) == 6
    assert all(space.is_legal(p) and p not in space.branches() for p in found)
    assert found == space.ends_and_samples(random.Random(1), 6), "by the seed"
    assert space.ends_and_samples(random.Random(1), 0) == []


def test_a_point_is_completed_from_the_default_and_has_no_inactive_parameter() -> None:
    space = tiny_space()
    assert "pad" not in space.complete({"store": "registers", "pad": True})
    assert space.complete({"tile": 4}) == {"tile": 4, "store": "shared", "pad": False, "unroll": 1}


def test_a_condition_on_an_inactive_parameter_is_not_met() -> None:
    space = Space(
        parameters=(
            Categorical(name="a", values=(0, 1)),
            Categorical(name="b", values=(0, 1), when=(When(parameter="a", values=(1,)),)),
            Categorical(name="c", values=(0, 1), when=(When(parameter="b", values=(0, 1)),)),
        )
    )
    assert space.complete({"a": 0, "b": 1, "c": 1}) == {"a": 0}
    assert space.complete({"a": 1, "b": 1, "c": 1}) == {"a": 1, "b": 1, "c": 1}


def test_where_hardly_a_point_is_legal_samples_are_found_from_the_default() -> None:
    names = [f"p{i}" for i in range(10)]
    rule = Constraint(
        name="nearly_equal",
        holds=lambda p: max(int(p[n]) for n in names) - min(int(p[n]) for n in names) <= 1,
        reason="no two may differ by more than 1",
    )
    space = Space(
        parameters=tuple(Ordinal(name=n, values=tuple(range(1, 9))) for n in names),
        constraints=(rule,),
        default=dict.fromkeys(names, 4),
    )
    samples = [space.sample(random.Random(seed)) for seed in range(8)]
    assert all(space.is_legal(p) for p in samples)
    assert len({tuple(p.values()) for p in samples}) > 4


def test_samples_are_legal_reach_every_point_and_follow_from_the_generator() -> None:
    space = tiny_space()
    samples, again = ([space.sample(rng) for _ in range(500)] for rng in (random.Random(0), random.Random(0)))
    assert samples == again
    assert all(space.is_legal(p) for p in samples)
    assert {Genome.of(p) for p in samples} == {Genome.of(p) for p in space.points()}


def test_neighbours_of_a_point_are_legal_and_one_step_away() -> None:
    space = tiny_space()
    start = {"tile": 2, "store": "shared", "pad": True, "unroll": 1}
    near = list(space.neighbours(start))
    assert near == [
        {"tile": 4, "store": "shared", "pad": True, "unroll": 1},
        {"tile": 2, "store": "registers", "unroll": 1},
        {"tile": 2, "store": "shared", "pad": False, "unroll": 1},
        {"tile": 2, "store": "shared", "pad": True, "unroll": 2},
    ]


@pytest.mark.parametrize(
    ("point", "found"),
    [
        ({"tile": 3, "unroll": 1, "colour": "red"}, ["unknown parameter 'colour'", "tile=3 is not one of 1, 2, 4"]),
        ({"tile": 2, "unroll": True}, ["unroll=True is not one of 1, 2"]),
        ({"tile": 2, "unroll": 1, "pad": True}, ["pad has no effect here and must be left out"]),
        ({"tile": 1, "unroll": 1}, ["narrow_tiles_are_unrolled: a narrow tile alone is too little work"]),
        ({"tile": 1, "unroll": 2}, []),
    ],
)
def test_what_a_point_violates_is_named_with_what_it_may_be_or_why(point: dict[str, Value], found: list[str]) -> None:
    assert tiny_space().violations({**point, "store": "registers"}) == found


def test_a_branch_behind_many_conditions_is_reached() -> None:
    many = [Categorical(name=f"c{i}", values=tuple(range(40))) for i in range(5)]  # hit by chance once in 40 ** 5
    behind = Categorical(name="behind", values=("no", "yes"), when=tuple(When(parameter=c.name, values=(7,)) for c in many))
    space = Space(parameters=(*many, behind))
    assert {**{c.name: 7 for c in many}, "behind": "yes"} in space.branches()


def test_a_branch_behind_a_condition_of_a_condition_is_reached() -> None:
    first = Categorical(name="first", values=tuple(range(40)))
    second = Categorical(name="second", values=tuple(range(40)), when=(When(parameter="first", values=(7, 8)),))
    third = Categorical(name="third", values=("no", "yes"), when=(When(parameter="second", values=(9,)),))
    spread = [Categorical(name=f"s{i}", values=tuple(range(40))) for i in range(4)]  # more changes than are tried
    space = Space(parameters=(*spread, first, second, third))
    found = space.nearest({"s0": 3, "s1": 3, "s2": 3, "s3": 3}, "third", "yes")
    assert found == {"s0": 3, "s1": 3, "s2": 3, "s3": 3, "first": 7, "second": 9, "third": "yes"}


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter 'tiel'; did you mean tile"):
        tiny_space().complete({"tiel": 2})


def test_a_space_that_makes_no_sense_is_refused() -> None:
    a, later = Ordinal(name="a", values=(1,)), Ordinal(name="c", values=(1,), when=(When(parameter="b", values=(1,)),))
    for parameters, message in (((a, a), "declared twice"), ((a, later), "not declared before it")):
        with pytest.raises(SpaceError, match=message):
            Space(parameters=parameters)
    with pytest.raises(SpaceError, match="not a legal point"):
        Space(parameters=(Ordinal(name="n", values=(1, 2)),), default={"n": 3})
    for values, message in (((), "no values"), ((1, 1), "twice")):
        with pytest.raises(SpaceError, match=message):
            Ordinal(name="n", values=values)
    for when in ({"b": (1,)}, When(parameter="b", values=(1,))):
        with pytest.raises(SpaceError, match=r"'n': `when` must be a tuple of When\(parameter="):
            Ordinal(name="n", values=(1,), when=when)  # type: ignore[arg-type]


def test_restriction_holds_a_parameter_and_keeps_the_default_legal() -> None:
    space = tiny_space().restricted({"store": "registers", "tile": 1})
    points = list(space.points())
    assert points == [{"tile": 1, "store": "registers", "unroll": 2}]
    assert space.default == points[0]  # the old default, unroll=1, would break a constraint here


def chain(*constraints: Constraint) -> Space:
    """c depends on b, b on a."""
    return Space(
        parameters=(
            Ordinal(name="a", values=(1, 2, 3)),
            Ordinal(name="b", values=(1, 2), when=(When(parameter="a", values=(2, 3)),)),
            Ordinal(name="c", values=(1, 2), when=(When(parameter="b", values=(2,)), When(parameter="a", values=(3,)))),
        ),
        constraints=constraints,
    )


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"a": 1, "b": 2}, "parameter b cannot be held at 2: it has an effect only with a=2 or 3, which is held at 1"),
        ({"a": 2, "c": 1}, "parameter c cannot be held at 1: it has an effect only with a=3, which is held at 2"),
        ({"b": 1, "c": 1}, "parameter c cannot be held at 1: it has an effect only with b=2, which is held at 1"),
    ],
)
def test_a_parameter_that_cannot_be_active_beside_the_others_is_not_held(fixed: dict[str, Value], said: str) -> None:
    with pytest.raises(SpaceError, match=said):
        chain().restricted(fixed)


def test_a_parameter_that_constraints_keep_from_being_active_is_not_held() -> None:
    never = Constraint(name="never", holds=lambda p: p.get("c") != 2, reason="on purpose")
    assert chain(never).restricted({"c": 1}).by_name["c"].values == (1,)
    with pytest.raises(SpaceError, match="parameter c cannot be held at 2: none of 5000 random points at which it has an"):
        chain(never).restricted({"c": 2})


def test_own_initial_points_stay_behind_given_ones_and_with_what_is_held() -> None:
    own = ({"a": 3, "b": 1}, {"a": 1}, {"a": 2, "b": 2})
    space = replace(chain(), initial_points=own)
    assert space.with_initial_points([{"a": 3, "b": 2, "c": 2}]).initial_points == ({"a": 3, "b": 2, "c": 2}, *own)
    held = space.restricted({"b": 2})
    assert held.initial_points == ({"a": 3, "b": 2, "c": 1}, {"a": 1}, {"a": 2, "b": 2})
    assert all(map(held.is_legal, held.initial_points))
    assert held.with_initial_points([{"a": 2, "b": 1}, {"a": 2}]).initial_points == ({"a": 2, "b": 2}, *held.initial_points)


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("12", int, 12), ("-3", int, -3), ("007", int, 7), ("1.5", float, 1.5), (".5", float, 0.5), ("5.", float, 5.0),
        ("1e-5", float, 1e-5), ("-2E+3", float, -2000.0), ("7", float, 7.0),
    ],
)  # fmt: skip
def test_a_number_is_digits_0_to_9(text: str, kind: Any, number: float) -> None:
    assert parse_number(text, kind) == number


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "+1", "1_0", "\u0661", "\uff11", "\u00b2", "0x10", "1e", "nan", "inf", "-", ".", "1\n"]
)
@pytest.mark.parametrize("kind", [int, float])
def test_what_else_python_reads_is_no_number(text: str, kind: Any) -> None:
    with pytest.raises(ValueError, match="is no number in digits 0 to 9"):
        parse_number(text, kind)


def test_restriction_to_an_unknown_value_says_what_there_is() -> None:
    with pytest.raises(SpaceError, match="parameter tile has no value 3; choose one of 1, 2, 4"):
        tiny_space().restricted({"tile": 3})
    with pytest.raises(UnknownNameError, match="parameter"):
        tiny_space().restricted({"colour": "red"})
    with pytest.raises(SpaceError, match=r"nothing to search with tile=4, .*store=shared: .* \(fits: a tile"):
        tiny_space().restricted({"tile": 4, "unroll": 2, "pad": True, "store": "shared"})
