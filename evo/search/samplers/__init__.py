"""Samplers decide what to try next. One module each, found by its name; it defines `SAMPLER`, a class.

A sampler is deterministic: its seed and the sequence of `ask` and `tell` calls decide every proposal. It reads
no clock and imports no target, gate or timing. The search asks with several proposals outstanding, and tells
results in the order of the proposals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from evo.discovery import find_plugin, plugin_names
from evo.errors import UnknownNameError, UsageError
from evo.evaluation import Proposal
from evo.problem.space import Space

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Exhausted",
    "Sampler",
    "SamplerFactory",
    "at_least",
    "find_sampler",
    "read_options",
    "sampler_names",
]

Config = TypeVar("Config", bound="DataclassInstance")


class Exhausted(Exception):
    """Raised by `ask` when the whole space has been proposed, or nothing new could be found."""


class Sampler(Protocol):
    def ask(self, order: int) -> Proposal:
        """A genome never proposed before, to be known as `order`. Parents are orders told before.

        Raises Exhausted.
        """
        ...

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        """The result of one proposal; called once each, in order.

        score: what is minimised (time relative to the baseline); None for a candidate that did not pass.
        duplicate_of: order of an earlier candidate with equal machine code; the score is that one's.
        """
        ...


SamplerFactory = Callable[[Space, int, Mapping[str, object]], Sampler]


def sampler_names() -> list[str]:
    return plugin_names(sys.modules[__name__])


def find_sampler(name: str) -> SamplerFactory:
    """Raises UnknownNameError."""
    return cast(SamplerFactory, find_plugin(sys.modules[__name__], "sampler", name))


def read_options(sampler: str, config: type[Config], options: Mapping[str, object]) -> Config:
    """`config` with its defaults replaced by `options`, whose values must have the defaults' types.

    Raises UnknownNameError or UsageError.
    """
    defaults = {f.name: f.default for f in fields(config)}
    for name, value in options.items():
        if name not in defaults:
            raise UnknownNameError(f"option of sampler {sampler}", name, defaults)
        wanted = type(defaults[name])
        # A bool is an int, and an int will do for a float: TOML writes 0 for 0.0.
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits:
            raise UsageError(
                f"option {name!r} of sampler {sampler} must be of type {wanted.__name__}, such as"
                f" {defaults[name]}; got {value!r}"
            )
    return config(**options)


def at_least(config: DataclassInstance, low: float, *names: str, high: float = float("inf")) -> None:
    """Raises UsageError if one of the named fields is not within low to high."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            bounds = f"at least {low}" if high == float("inf") else f"{low} to {high}"
            raise UsageError(f"sampler option {name!r} must be {bounds}, got {value}")
