"""Search spaces: ordinal and categorical parameters, conditions, constraints.

A point of a space is a plain dict from parameter name to value. Only the parameters that are active at a
point belong to it, so that two points that mean the same kernel are the same dict.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from evo.errors import SpaceError, UnknownNameError

Value = bool | int | float | str
Point = dict[str, Value]
_D = TypeVar("_D")
_N = TypeVar("_N", int, float)

TEMPLATE = "template"
"""The structural parameter that names a point's template, where a kernel has several for a target."""

_SAMPLE_ATTEMPTS = 5_000
_WALK_ROUNDS = 4
_NEAREST_ATTEMPTS = 2_000


@dataclass(frozen=True, kw_only=True)
class When:
    """A parameter is active only where `parameter` is active and has one of `values`."""

    parameter: str
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A named choice among finitely many values; use `Ordinal` or `Categorical`."""

    name: str
    values: tuple[Value, ...]
    when: tuple[When, ...] = ()
    why: str = ""
    structural: bool = False
    """A structural parameter selects another algorithm or code shape, not a size of the same one."""

    def __post_init__(self) -> None:
        if not self.values:
            raise SpaceError(f"parameter {self.name!r} has no values; give at least one")
        if len(set(map(repr, self.values))) != len(self.values):
            raise SpaceError(f"parameter {self.name!r} lists a value twice: {self.values}")
        if not isinstance(self.when, tuple) or not all(isinstance(w, When) for w in self.when):
            raise SpaceError(
                f"parameter {self.name!r}: `when` must be a tuple of When(parameter=..., values=...), got {self.when!r}"
            )

    def steps_from(self, value: Value) -> tuple[Value, ...]:
        """Values one step away from `value`."""
        return tuple(v for v in self.values if v != value)


class Ordinal(Parameter):
    """Values have an order that matters: 1, 2, 4, 8. One step is the next value up or down."""

    def steps_from(self, value: Value) -> tuple[Value, ...]:
        i = self.values.index(value)
        return self.values[max(i - 1, 0) : i] + self.values[i + 1 : i + 2]


class Categorical(Parameter):
    """Values have no order: "registers", "shared". One step is any other value."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A named predicate over a point. `reason` says, as a sentence, why it must hold.

    The predicate sees only complete points: every active parameter present, inactive ones absent (use
    `point.get`).
    """

    name: str
    holds: Callable[[Mapping[str, Value]], bool]
    reason: str


class Derivation(Generic[_D]):
    """Makes constraints that look at a point and at what follows from it, which is derived once for all of them."""

    def __init__(self, derive: Callable[[Mapping[str, Value]], _D], inactive: Mapping[str, Value]) -> None:
        self._derive, self._inactive = derive, dict(inactive)
        self._latest: tuple[Point, tuple[dict[str, Any], _D]] | None = None

    def constraint(self, name: str, holds: Callable[[dict[str, Any], _D], bool], reason: str) -> Constraint:
        """`holds` is given the point, completed by the values of inactive parameters, and what was derived from it."""
        return Constraint(name=name, holds=lambda point: bool(holds(*self._of(point))), reason=reason)

    def _of(self, point: Mapping[str, Value]) -> tuple[dict[str, Any], _D]:
        if self._latest is None or point != self._latest[0]:
            self._latest = dict(point), ({**self._inactive, **point}, self._derive(point))
        return self._latest[1]


@dataclass(frozen=True, kw_only=True)
class Space:
    """A finite search space with a legal default point.

    Raises SpaceError on construction if names repeat, a condition names a later or unknown parameter, or the
    default is not legal.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...] = ()
    default: Point = field(default_factory=dict)
    """The default point. A parameter that is left out has its first value."""
    initial_points: tuple[Point, ...] = ()
    """Legal points that a sampler tries first, behind the default unless `default_first` is off."""
    default_first: bool = True

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for p in self.parameters:
            if p.name in seen:
                raise SpaceError(f"parameter {p.name!r} is declared twice; names must be unique")
            for w in p.when:
                if w.parameter not in seen:
                    raise SpaceError(
                        f"parameter {p.name!r} depends on {w.parameter!r}, which is not declared before it"
                    )
            seen.add(p.name)
        default = self.complete(self.default)
        if found := self.violations(default):
            raise SpaceError(f"not a legal point of the search space: {'; '.join(found)} (got {default})")

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters}

    @cached_property
    def conditions(self) -> frozenset[str]:
        """Names of parameters that others depend on."""
        return frozenset(w.parameter for p in self.parameters for w in p.when)

    @property
    def cardinality(self) -> int:
        """Points before conditions and constraints: an upper bound."""
        return prod(len(p.values) for p in self.parameters)

    def is_active(self, parameter: Parameter, point: Mapping[str, Value]) -> bool:
        # Most have no condition, and this is asked of every parameter of every point that is drawn.
        return not parameter.when or all(w.parameter in point and point[w.parameter] in w.values for w in parameter.when)

    def complete(self, partial: Mapping[str, Value]) -> Point:
        """`partial` without its inactive parameters, and with missing active ones at their default value.

        Raises UnknownNameError for a name the space does not have.
        """
        for name in partial:
            if name not in self.by_name:
                raise UnknownNameError("parameter", name, self.by_name)
        point: Point = {}
        for p in self.parameters:
            if self.is_active(p, point):
                point[p.name] = partial.get(p.name, self.default.get(p.name, p.values[0]))
        return point

    def violations(self, point: Mapping[str, Value]) -> list[str]:
        """Why `point` is not legal, a sentence each; empty when it is."""
        found = []
        for name in point:
            if name not in self.by_name:
                found.append(f"unknown parameter {name!r}")
        for p in self.parameters:
            active = self.is_active(p, point)
            if active and p.name not in point:
                found.append(f"{p.name} is missing")
            elif not active and p.name in point:
                found.append(f"{p.name} has no effect here and must be left out")
            elif active and not _is_one_of(point[p.name], p.values):
                found.append(f"{p.name}={point[p.name]!r} is not one of {', '.join(map(repr, p.values))}")
        if not found:  # a constraint may rely on a complete point
            found = [f"{c.name}: {c.reason}" for c in self.constraints if not c.holds(point)]
        return found

    def _holds(self, point: Mapping[str, Value]) -> bool:
        """Whether a complete point of the space breaks no constraint."""
        return all(c.holds(point) for c in self.constraints)

    def is_legal(self, point: Mapping[str, Value]) -> bool:
        return not self.violations(point)

    def draw(self, rng: random.Random, partial: Mapping[str, Value] = MappingProxyType({})) -> Point:
        """`partial` without its inactive parameters, and with missing active ones drawn at random: a point that respects
        conditions, not necessarily constraints."""
        point: Point = {}
        for p in self.parameters:
            if self.is_active(p, point):
                point[p.name] = partial[p.name] if p.name in partial else rng.choice(p.values)
        return point

    def sample(self, rng: random.Random) -> Point:
        """A legal point, uniform over the conditional tree and then rejected by constraints.

        Where so few are legal that none is found soon, one at the end of a random walk over legal points from the
        default.
        """
        for _ in range(_SAMPLE_ATTEMPTS):
            point = self.draw(rng)
            if self._holds(point):
                return point
        return self._walk(rng)

    def _walk(self, rng: random.Random) -> Point:
        """A point reached from the default by setting one parameter after the other to a random value, as long as that is
        legal."""
        point = self.complete(self.default)
        for _ in range(_WALK_ROUNDS):
            for p in rng.sample(self.parameters, len(self.parameters)):
                if p.name in point:
                    moved = self.complete({**point, p.name: rng.choice(p.values)})
                    point = moved if self.is_legal(moved) else point
        return point

    def repaired(self, rng: random.Random, point: Mapping[str, Value]) -> Point | None:
        """A legal point near one that is not, where the space knows one, as a recorded sample does; None: search for it."""
        return None

    def neighbours(self, point: Mapping[str, Value], *, far: bool = False) -> Iterator[Point]:
        """Legal points one step away in one parameter (others are dropped or filled in where a condition turns); far: at any
        other value of it."""
        for p in self.parameters:
            if p.name not in point:
                continue
            others = (v for v in p.values if v != point[p.name]) if far else p.steps_from(point[p.name])
            for value in others:
                near = self.complete({**point, p.name: value})
                if self.is_legal(near):
                    yield near

    def nearest(self, base: Mapping[str, Value], name: str, value: Value) -> Point | None:
        """A legal point with `name` = `value`, few changes away from `base`; None if none is found.

        What the parameter is conditional on is met first; then breadth-first over changes of up to two other parameters,
        then random.
        """
        start = self.complete({**self._activating(self.by_name[name], base), name: value})
        near = (p for p in self._around(start, name, value) if p.get(name) == value and self._holds(p))
        return next(near, None)

    def _around(self, start: Point, name: str, value: Value) -> Iterator[Point]:
        yield start
        frontier, seen = [start], {repr(start)}
        for _ in range(2):
            following = []
            for point in frontier:
                for p in self.parameters:
                    for other in p.values if p.name != name else ():
                        near = self.complete({**point, name: value, p.name: other})
                        if repr(near) not in seen:
                            seen.add(repr(near))
                            following.append(near)
                            yield near
            frontier = following
        rng = random.Random(0)
        yield from (self.draw(rng) for _ in range(_NEAREST_ATTEMPTS))

    def _activating(self, parameter: Parameter, base: Mapping[str, Value]) -> Point:
        """`base`, with the first of the values that each of the parameter's conditions asks for where it has another."""
        point = self.complete(base)
        for when in parameter.when:
            point = self._activating(self.by_name[when.parameter], point)
            if point.get(when.parameter) not in when.values:
                point[when.parameter] = when.values[0]
        return point

    def branches(self) -> list[Point]:
        """The default, and near it one legal point for every value of every categorical or structural
        parameter: between them they take every structural branch of a template that can be reached."""
        base = self.complete(self.default)
        found = [base]
        for p in self.parameters:
            if not (isinstance(p, Categorical) or p.structural):
                continue
            for value in p.values:
                point = self.nearest(base, p.name, value)
                if point is not None and point not in found:
                    found.append(point)
        return found

    def ends_and_samples(self, rng: random.Random, number: int) -> list[Point]:
        """Up to so many legal points, without the branches: near the default those with the first and the last value that is
        legal of each parameter that no branch is for; and random ones, of which at least a third are."""
        base, left_out = self.complete(self.default), self.branches()
        ends = [
            (p.name, values) for p in self.parameters if not (isinstance(p, Categorical) or p.structural)
            for values in (p.values, p.values[::-1])
        ]  # fmt: skip
        found = list[Point]()
        for name, values in ends if len(ends) <= number - number // 3 else rng.sample(ends, number - number // 3):
            near = filter(None, (self.nearest(base, name, value) for value in values))
            found += [p for p in (next(near, base),) if p not in (*found, *left_out)]
        for _ in range(4 * number):
            if len(found) < number and (point := self.sample(rng)) not in (*found, *left_out):
                found.append(point)
        return found

    def points(self) -> Iterator[Point]:
        """Every legal point, in declaration order. Only for small spaces."""

        def with_each_value(parameter: Parameter, points: Iterator[Point]) -> Iterator[Point]:
            for point in points:
                if self.is_active(parameter, point):
                    yield from ({**point, parameter.name: value} for value in parameter.values)
                else:
                    yield point

        found: Iterator[Point] = iter([{}])
        for p in self.parameters:
            found = with_each_value(p, found)
        return filter(self._holds, found)

    def adapted(self, point: Mapping[str, Value]) -> Point:
        """A point of another workload or architecture, legal or not: a parameter that this space does not have is left out,
        one that the point lacks has its default."""
        return self.complete({n: v for n, v in point.items() if n in self.by_name})

    def with_initial_points(self, points: Sequence[Mapping[str, Value]], *, default_first: bool = True) -> Space:
        """The same space with those of `points`, adapted, that are legal in it, before its own initial points."""
        legal = (p for p in map(self.adapted, points) if self.is_legal(p))
        return replace(self, initial_points=(*legal, *self.initial_points), default_first=default_first)

    def require(self, name: str, value: Value) -> None:
        """Raises UnknownNameError or SpaceError for a name or value the space does not have."""
        if name not in self.by_name:
            raise UnknownNameError("parameter", name, self.by_name)
        if not _is_one_of(value, self.by_name[name].values):
            known = ", ".join(map(str, self.by_name[name].values))
            raise SpaceError(f"parameter {name} has no value {value!r}; choose one of {known}")

    def restricted(self, fixed: Mapping[str, Value]) -> Space:
        """The same space with the named parameters held at one value each, and its initial points with these values where
        they are legal.

        Raises UnknownNameError or SpaceError for a name or value the space does not have, and for a parameter that has no
        effect at any legal point with the others.
        """
        for name, value in fixed.items():
            self.require(name, value)
        for name in fixed:
            self._require_active(name, fixed)
        default, rng = self.complete({**self.default, **fixed}), random.Random(0)
        for _ in range(_SAMPLE_ATTEMPTS):
            if self._holds(default):
                break
            default = self.draw(rng, fixed)
        else:
            raise SpaceError(
                f"the constraints leave nothing to search with {', '.join(f'{k}={v}' for k, v in fixed.items())}: none of"
                f" {_SAMPLE_ATTEMPTS} random points is legal ({'; '.join(self.violations(default))}); hold fewer parameters"
            )
        for name in (name for name in fixed if name not in default):
            asked = self._conditions_of(name)
            drawn = ({**{n: rng.choice(v) for n, v in asked.items()}, **fixed} for _ in range(_SAMPLE_ATTEMPTS))
            if not any(self._holds(self.draw(rng, partial)) for partial in drawn):
                raise SpaceError(
                    f"parameter {name} cannot be held at {fixed[name]}: none of {_SAMPLE_ATTEMPTS} random points at which it"
                    " has an effect is legal; leave it out, or hold fewer parameters"
                )
        kept = tuple(replace(p, values=(fixed[p.name],)) if p.name in fixed else p for p in self.parameters)
        held = (self.complete({**point, **fixed}) for point in self.initial_points)
        points = tuple(point for point in held if self.is_legal(point))
        return Space(parameters=kept, constraints=self.constraints, default=default, initial_points=points)

    def _conditions_of(self, name: str) -> dict[str, list[Value]]:
        """The values that other parameters must have for this one to be active, by their names."""
        found: dict[str, list[Value]] = {}
        waiting = [name]
        while waiting:
            for when in self.by_name[waiting.pop()].when:
                known = found.get(when.parameter, list(self.by_name[when.parameter].values))
                found[when.parameter] = [v for v in known if _is_one_of(v, when.values)]
                waiting.append(when.parameter)
        return found

    def _require_active(self, name: str, fixed: Mapping[str, Value]) -> None:
        """Raises SpaceError for a parameter that is active at no point with the values of others."""
        for other, values in self._conditions_of(name).items():
            if not values or (other in fixed and not _is_one_of(fixed[other], values)):
                wanted = " or ".join(map(str, values)) or "what it cannot be"
                held = f", which is held at {fixed[other]}" if other in fixed else ""
                raise SpaceError(
                    f"parameter {name} cannot be held at {fixed[name]}: it has an effect only with {other}={wanted}{held};"
                    " leave one of the two out"
                )


def tied(spaces: Mapping[str, Space]) -> Space:
    """The space of a kernel with several templates: `TEMPLATE`, whose values are their names, and the parameters of each,
    active where it is chosen. A parameter that several have is one, with the values that the chosen template's has.

    Raises SpaceError for one that is conditional on something else in another template, or ordinal there and here not.
    """
    known: dict[str, Parameter] = {}
    of: dict[str, dict[str, tuple[Value, ...]]] = {}
    for template, space in spaces.items():
        for p in space.parameters:
            first = known.setdefault(p.name, p)
            if (type(first), first.when) != (type(p), p.when):
                raise SpaceError(
                    f"parameter {p.name!r} of template {template!r} has another condition or kind than that of"
                    f" {next(iter(of[p.name]))!r}: give it a name of its own"
                )
            of.setdefault(p.name, {})[template] = p.values
            values = dict.fromkeys((*first.values, *p.values))
            known[p.name] = replace(first, values=tuple(sorted(values) if isinstance(p, Ordinal) else values))
    choice = Categorical(name=TEMPLATE, values=tuple(spaces), why="another algorithm, or language", structural=True)
    parts = (replace(p, when=(When(parameter=TEMPLATE, values=tuple(of[n])), *p.when)) for n, p in known.items())
    first_values = {p.name: p.values[0] for space in reversed([*spaces.values()]) for p in space.parameters}
    defaults = {name: value for space in reversed([*spaces.values()]) for name, value in space.default.items()}
    own = [(template, point) for template, space in spaces.items() for point in space.initial_points]
    others = [(template, space.complete(space.default)) for template, space in [*spaces.items()][1:]]
    return Space(
        parameters=(choice, *parts),
        constraints=tuple(c for template, space in spaces.items() for c in _constraints_of(template, space, of)),
        default={**first_values, **defaults},
        initial_points=tuple({TEMPLATE: template, **point} for template, point in (*others, *own)),
    )


def _constraints_of(
    template: str, space: Space, of: Mapping[str, Mapping[str, tuple[Value, ...]]]
) -> Iterator[Constraint]:
    """The constraints of one template's space, where it is chosen; and that shared parameters have its own values."""

    def where_chosen(holds: Callable[[Mapping[str, Value]], bool]) -> Callable[[Mapping[str, Value]], bool]:
        return lambda point: point[TEMPLATE] != template or holds(point)

    for c in space.constraints:
        yield replace(c, holds=where_chosen(c.holds))
    for p in space.parameters:
        if any(values != p.values for values in of[p.name].values()):
            known = ", ".join(map(str, p.values))
            own = where_chosen(partial(_has_value_of, p))
            yield Constraint(name=f"{p.name} of {template}", holds=own, reason=f"template {template} has it at {known}")


def _has_value_of(parameter: Parameter, point: Mapping[str, Value]) -> bool:
    return parameter.name not in point or _is_one_of(point[parameter.name], parameter.values)


_NUMBERS = {int: r"-?[0-9]+", float: r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"}


def parse_number(text: str, kind: type[_N]) -> _N:
    """A number as users write it in workloads, cases, options and job files: digits 0 to 9, with a minus before them, and
    of a float a point and an exponent. Raises ValueError for another text, such as what Python reads besides: 1_000, +5."""
    if not re.fullmatch(_NUMBERS[kind], text):
        raise ValueError(f"{text!r} is no number in digits 0 to 9")
    return kind(text)


def _is_one_of(value: Value, values: Sequence[Value]) -> bool:
    # 1 == True in Python; a genome that says True where 1 is meant is another genome.
    return any(type(v) is type(value) and v == value for v in values)
