"""Evolutionary operators: how a genome is made from its parents. One module each; it defines `OPERATOR`.

An operator is a pure function of its random generator, the space and the parents. It returns a legal genome
that differs from every parent, or None when it has nothing to offer here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from evo.discovery import find_plugin, plugin_names
from evo.problem.genome import Genome
from evo.problem.space import Space

__all__ = ["Operator", "find_operator", "operator_names"]


class Operator(Protocol):
    name: str
    arity: int
    """Parents it needs: 1 or 2."""
    weight: float
    """Prior share of proposals among the operators."""

    def __call__(self, rng: random.Random, space: Space, parents: Sequence[Genome]) -> Genome | None: ...


def operator_names() -> list[str]:
    return plugin_names(sys.modules[__name__])


def find_operator(name: str) -> Operator:
    """Raises UnknownNameError."""
    return cast(Operator, find_plugin(sys.modules[__name__], "operator", name))
