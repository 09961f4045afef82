"""Asking for many rows by their keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import TypeVar

__all__ = ["at_once"]

_AT_ONCE = 400  # SQLite takes 999 variables in a query at least
_Key = TypeVar("_Key")


def at_once(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    """The keys in their order, as many at a time as one query may name."""
    left = iter(keys)
    while some := list(islice(left, _AT_ONCE)):
        yield some
