"""Values as users write them: seeds, NAME=VALUE, points of a search space, options of a sampler."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evo.discovery import file_digests, full_path
from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.space import Point, Space, Value, parse_number


def check_seed(seed: int | None) -> int | None:
    """The seed, if given. Raises UsageError for a number that no database keeps or that generators reduce to another."""
    if seed is not None and not 0 <= seed < 2**63:
        raise UsageError(f"seed must be a whole number from 0 to {2**63 - 1}, got {seed}")
    return seed


def draw_seed(seed: int | None) -> int:
    """The given seed, or else a random one."""
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def read_values(written: Mapping[str, Value], space: Space) -> dict[str, Value]:
    """Values of parameters, which may be written as text, as the parameters have them. Raises UnknownNameError or
    SpaceError."""
    values: dict[str, Value] = {}
    for name, value in written.items():
        parameter = space.by_name.get(name)
        same = (v for v in (parameter.values if parameter else ()) if str(v).lower() == str(value).lower())
        values[name] = next(same, value)
        space.require(name, values[name])
    return values


def parse_point(text: str, space: Space, option: str) -> Point:
    """The point that NAME=VALUE,... describes: the space's default with these values. It may break constraints. option: the
    option's name, for messages. Raises what `split_pairs` and `read_values` raise, and UsageError for a parameter that is
    named twice or has no effect."""
    parts = [part for part in text.split(",") if part]
    values = read_values(split_pairs(parts, option), space)
    if len(values) < len(parts):
        raise UsageError(f"{option} {text!r} names a parameter twice")
    point = space.complete({**space.default, **values})
    if idle := [name for name in values if name not in point]:
        raise UsageError(f"{option} {text!r}: with these values {' and '.join(idle)} has no effect; leave it out")
    return point


def parse_legal(text: str, space: Space, option: str) -> Genome:
    """The genome of `parse_point`. Raises UsageError for a point that is not legal, too."""
    point = parse_point(text, space, option)
    if broken := space.violations(point):
        raise UsageError(f"{option} {text!r} is not legal here: {'; '.join(broken)}")
    return Genome.of(point)


def split_pairs(texts: Iterable[str], option: str) -> dict[str, Any]:
    """The two texts of each NAME=VALUE. Raises UsageError."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {text!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def prefix_of(sampler: str) -> str:
    """What stands before the names of a sampler's options where there are several; a file of one's own is named without
    its ending."""
    return f"{Path(sampler).stem if sampler.endswith('.py') else sampler}."


def read_sampler_options(written: Mapping[str, object]) -> dict[str, object]:
    """Options of a sampler; texts that can be read as numbers are numbers, lists are joined by commas. The sampler checks
    names and values."""
    options = dict(written)
    for name, value in written.items():
        if isinstance(value, list | tuple | str):
            options[name] = ",".join(map(full_path, value.split(",") if isinstance(value, str) else map(str, value)))
        if not isinstance(value, str):
            continue
        for kind in (float, int):
            with suppress(ValueError):
                options[name] = parse_number(value, kind)
    return options


def own_files(sampler: str, options: Mapping[str, object]) -> dict[str, str]:
    """The digests of the files of one's own that a sampler with these options consists of, by path. Raises UsageError."""
    named = [part for value in options.values() if isinstance(value, str) for part in value.split(",")]
    return file_digests("sampler", [sampler]) | file_digests("operator", named)
