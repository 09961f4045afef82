"""Making a point legal again: what every operator ends with."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from evo.space import Ordinal, Parameter, Point, Space, Value

__all__ = ["fill", "move", "repair"]

_REPAIR_STEPS = 48
_FAR = 0.02
"""Share of an ordinal's move that ignores distance, so that no value is out of reach."""


def move(rng: random.Random, parameter: Parameter, value: Value) -> Value:
    """Another value of `parameter`: for an ordinal mostly one step up or down, half as often two, and so on.

    `value` itself if the parameter has only one.
    """
    others = [v for v in parameter.values if v != value]
    if not others:
        return value
    if not isinstance(parameter, Ordinal):
        return rng.choice(others)
    here = parameter.values.index(value)
    weights = [0.5 ** abs(i - here) + _FAR for i in range(len(parameter.values)) if i != here]
    return rng.choices(others, weights)[0]


def fill(rng: random.Random, space: Space, partial: Mapping[str, Value]) -> Point:
    """`partial` without its inactive parameters, and with missing active ones drawn at random."""
    point: Point = {}
    for p in space.parameters:
        if space.is_active(p, point):
            point[p.name] = partial[p.name] if p.name in partial else rng.choice(p.values)
    return point


def repair(rng: random.Random, space: Space, point: Point, keep: Collection[str] = ()) -> Point | None:
    """A legal point near `point`, which must be complete; parameters in `keep` are not touched.

    Min-conflicts search (Minton et al. 1992): moves one free parameter at a time and takes the move unless it
    breaks more constraints than before. None if that finds nothing within a bounded number of moves.
    """
    broken = _broken(space, point)
    for _ in range(_REPAIR_STEPS):
        if not broken:
            return point
        free = [p for p in space.parameters if p.name in point and p.name not in keep and len(p.values) > 1]
        if not free:
            return None
        p = rng.choice(free)
        moved = {**point, p.name: move(rng, p, point[p.name])}
        if any(w.parameter == p.name for q in space.parameters for w in q.when):
            moved = fill(rng, space, moved)
        after = _broken(space, moved)
        if after <= broken:
            point, broken = moved, after
    return None if broken else point


def _broken(space: Space, point: Point) -> int:
    return sum(not c.holds(point) for c in space.constraints)
