"""Evolutionary operators: how a genome is made from its parents. One module each; it defines `OPERATOR`, an `Operator`.

An operator's point is made legal here, by moving the parameters that the operator does not insist on.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from evo.discovery import find_plugin, plugin_names
from evo.errors import UnknownNameError, UsageError
from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Parameter, Point, Space, Value

_ATTEMPTS = 8
_SIDEWAYS = 0.25
"""Share of the moves without an effect of their own that are still tried: they pass two rules that block each other."""
_FAR = 0.02
"""Weight of every value of an ordinal whatever its distance, so that none is out of reach."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A pure function of its random generator, the space and the parents.

    arity: number of parents, 1 or 2. weight: prior share of proposals among the operators. draw: a complete point, which
    need not be legal, and the parameters that a repair must not touch; None where the operator has nothing to offer.
    """

    name: str
    arity: int
    weight: float
    draw: Callable[[random.Random, Space, Sequence[Genome]], tuple[Point, Collection[str]] | None]

    def __call__(self, rng: random.Random, space: Space, parents: Sequence[Genome]) -> Genome | None:
        """A legal genome that differs from every parent; None if there is none, or a few attempts find none."""
        known = [parent.parameters for parent in parents]
        for _ in range(_ATTEMPTS):
            if (drawn := self.draw(rng, space, parents)) is None:
                return None
            child = repair(rng, space, *drawn)
            if child is not None and child not in known:
                return Genome.of(child)
        return None


def find_operator(name: str) -> Operator:
    """name: of a plug-in, or the path of a file. Raises UnknownNameError, and UsageError for what is no operator."""
    found = find_plugin("operator", name)
    if not isinstance(found, Operator):
        raise UsageError(f"{name}: OPERATOR must be an evo.search.operators.Operator, got {found!r}")
    return found


ALL = "all"


def weigh_operators(names: str, weights: Mapping[str, object]) -> dict[Operator, float]:
    """The operators of these names, separated by commas, or ALL, each with its own weight or the one given here by its name.
    Raises UnknownNameError or UsageError."""
    found = [find_operator(name) for name in dict.fromkeys(plugin_names("operator") if names == ALL else names.split(","))]
    known = {operator.name: operator for operator in found}
    if len(known) < len(found):
        raise UsageError(f"of the operators {names} two have one name ({', '.join(o.name for o in found)}): rename one")
    for name, weight in weights.items():
        if name not in known:
            raise UnknownNameError("operator to weigh", name, known)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise UsageError(f"option 'weights.{name}' must be a number of at least 0, got {weight!r}")
    weighed = {operator: float(cast(float, weights.get(operator.name, operator.weight))) for operator in found}
    if not any(weighed.values()):
        raise UsageError(f"all operators ({', '.join(known)}) have the weight 0: leave one on")
    return weighed


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


def change(rng: random.Random, space: Space, point: Point, moved: Mapping[str, Value]) -> Point:
    """`point`, which must be complete, with the values of `moved`; conditions are followed as by `Space.draw`."""
    changed = {**point, **moved}
    if not space.conditions.isdisjoint(moved):
        return space.draw(rng, changed)
    return changed


def repair(
    rng: random.Random, space: Space, point: Point, keep: Collection[str] = (), steps: int = 24
) -> Point | None:
    """A legal point near `point`, which must be complete; parameters in `keep` are not touched, unless the space repairs it.

    Min-conflicts search (Minton et al. 1992): moves one free parameter at a time and takes the move unless it
    breaks more constraints than before. None if that finds nothing within `steps` moves.
    """
    constraints = range(len(space.constraints))
    broken = _broken(space, point, constraints, len(space.constraints))
    if broken and (near := space.repaired(rng, point)) is not None:
        return near
    movable = free(space, point, keep)
    kept = {name: point[name] for name in keep if name in point}
    for _ in range(steps):
        if not broken or not movable:
            break
        p = rng.choice(movable)
        # A kept parameter that one move turned off has its value again when another turns it on.
        known = {**kept, **point} if p.name in space.conditions else point
        moved = change(rng, space, known, {p.name: move(rng, p, point[p.name])})
        # The broken rules first: most moves mend none of them, and then the others need no look.
        still = _broken(space, moved, broken, len(broken))
        if len(still) == len(broken) and rng.random() >= _SIDEWAYS:
            continue
        whole = (i for i in constraints if i not in broken)
        after = still + _broken(space, moved, whole, len(broken) - len(still) + 1)
        if len(after) <= len(broken):
            point, broken, movable = moved, after, free(space, moved, keep)
    return None if broken else point


def _broken(space: Space, point: Point, which: Iterable[int], at_most: int) -> list[int]:
    """Indices, among `which`, of constraints that do not hold; the search ends when there are `at_most`."""
    return list(islice((i for i in which if not space.constraints[i].holds(point)), at_most))


def free(space: Space, point: Point, keep: Collection[str] = ()) -> list[Parameter]:
    """Parameters that are active in the point, are not to be kept, and have another value."""
    return [p for p in space.parameters if p.name in point and p.name not in keep and len(p.values) > 1]
