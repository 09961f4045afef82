"""Genome: what varies between two candidates of one kernel, frozen and hashable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from evo.errors import SpaceError
from evo.problem.space import Point, Value

Change = dict[str, tuple[Value | None, Value | None]]
"""Differences of two genomes, as {name: (value in the first, value in the second)}; None where absent."""


@lru_cache(maxsize=None, typed=True)
def _item(name: str, value: Value) -> tuple[str, Value]:
    """(name, value), the same object each time: genomes share what they have in common."""
    return name, value


@dataclass(frozen=True, slots=True)
class Genome:
    """Parameters, sorted by name."""

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Value]) -> Genome:
        return cls(tuple(_item(*item) for item in sorted(parameters.items())))

    @classmethod
    def from_json(cls, text: str) -> Genome:
        """Raises SpaceError if `text` is not the canonical form of a genome."""
        try:
            return cls.of(json.loads(text)["parameters"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SpaceError(f"not a genome: {text[:80]!r} ({error})") from error

    @property
    def parameters(self) -> Point:
        return dict(self.items)

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces, so that equal genomes are equal text."""
        return json.dumps({"parameters": self.parameters}, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def difference(self, other: Genome) -> Change:
        """Parameters whose value differs, by name."""
        a, b = self.parameters, other.parameters
        return {n: (a.get(n), b.get(n)) for n in sorted(a.keys() | b.keys()) if a.get(n) != b.get(n)}

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.items)
