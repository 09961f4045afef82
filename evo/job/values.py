"""Values as users write them: seeds, NAME=VALUE, points of a search space, options of a sampler."""

import os
from collections.abc import Iterable
from contextlib import suppress

from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.space import Point, Space, Value, parse_number


def check_seed(seed: int | None) -> int | None:
    """The seed, if one is given. Raises UsageError for a number that no database keeps or that generators reduce to another."""
    if seed is not None and not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to {2**63 - 1}, got {seed}")
    return seed


def draw_seed(seed: int | None) -> int:
    """The seed given, else a random one."""
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def parse_values(texts: Iterable[str], space: Space, option: str) -> dict[str, Value]:
    """NAME=VALUE pairs; each value is one of the parameter's. Raises UsageError, UnknownNameError or SpaceError."""
    values: dict[str, Value] = {}
    for text in texts:
        name, value = split_pair(text, option)
        parameter = space.by_name.get(name)
        match = next((v for v in parameter.values if str(v).lower() == value.lower()), None) if parameter else None
        values[name] = value if match is None else match
        space.require(name, values[name])
    return values


def parse_point(text: str, space: Space, option: str) -> Point:
    """The default with the values of NAME=VALUE,... Raises what `parse_values` raises, and UsageError for values that
    have no effect. Whether it is legal is another question."""
    parts = [part for part in text.split(",") if part]
    values = parse_values(parts, space, option)
    if len(values) < len(parts):
        raise UsageError(f"{option} {text!r} names a parameter twice")
    point = space.complete({**space.default, **values})
    if idle := [name for name in values if name not in point]:
        raise UsageError(f"{option} {text!r}: with these values {' and '.join(idle)} has no effect; leave it out")
    return point


def parse_legal(text: str, space: Space, option: str) -> Genome:
    """As `parse_point`. Raises UsageError for a point that is not legal."""
    point = parse_point(text, space, option)
    if broken := space.violations(point):
        raise UsageError(f"{option} {text!r} is not legal here: {'; '.join(broken)}")
    return Genome.of(point)


def split_pair(text: str, option: str) -> tuple[str, str]:
    """NAME=VALUE as two texts. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{option} {text!r} is not NAME=VALUE")
    return name, value


def parse_sampler_options(texts: Iterable[str]) -> dict[str, object]:
    """NAME=VALUE pairs; values are numbers where they can be read as such. The sampler checks names and values."""
    options: dict[str, object] = {}
    for text in texts:
        name, value = split_pair(text, "--sampler-option")
        options[name] = value
        for kind in (float, int):
            with suppress(ValueError):
                options[name] = parse_number(value, kind)
    return options
