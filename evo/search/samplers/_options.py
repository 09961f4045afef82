"""Options of a sampler: names and values checked against its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from evo.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["at_least", "read_options"]

Config = TypeVar("Config", bound="DataclassInstance")


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
