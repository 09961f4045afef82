"""Samplers decide what to try next. One module each, found by its name; it defines `SAMPLER`, a class.

A sampler is deterministic: its seed and the sequence of `ask` and `tell` calls decide every proposal. It reads
no clock and imports no target, gate or timing. The search asks with several proposals outstanding, and tells
results in the order of the proposals.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from evo.discovery import find_plugin, plugin_names
from evo.evaluation import Proposal, Status
from evo.problem.genome import Genome
from evo.problem.space import Space

__all__ = ["Exhausted", "Result", "Sampler", "SamplerFactory", "find_sampler", "sampler_names"]


class Exhausted(Exception):
    """Raised by `ask` when the whole space has been proposed, or nothing new could be found."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a sampler is told of a proposal.

    score: what is minimised (time relative to the baseline); None for a candidate that did not pass.
    same_code_as: order of an earlier candidate with equal machine code; the score is that one's.
    """

    order: int
    genome: Genome
    status: Status
    score: float | None = None
    same_code_as: int | None = None


class Sampler(Protocol):
    def ask(self, order: int) -> Proposal:
        """A genome never proposed before, to be known as `order`. Parents are orders told before.

        Raises Exhausted.
        """
        ...

    def tell(self, result: Result) -> None:
        """The result of one proposal; called once each, in order."""
        ...


class SamplerFactory(Protocol):
    def __call__(self, space: Space, seed: int, options: Mapping[str, object]) -> Sampler: ...


def sampler_names() -> list[str]:
    return plugin_names(sys.modules[__name__])


def find_sampler(name: str) -> SamplerFactory:
    """Raises UnknownNameError."""
    return cast(SamplerFactory, find_plugin(sys.modules[__name__], "sampler", name))
