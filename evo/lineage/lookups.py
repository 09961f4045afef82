"""Asking for many rows by their keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection

__all__ = ["at_once", "rows_of"]

_AT_ONCE = 400  # SQLite takes 999 variables in a query at least
_Key = TypeVar("_Key")


def at_once(keys: Collection[_Key]) -> Iterator[list[_Key]]:
    """The keys in their order, as many at a time as one query may name."""
    left = iter(keys)
    while some := list(islice(left, _AT_ONCE)):
        yield some


def rows_of(connection: Connection, query: Any, keys: Collection[Any], column: Any) -> Iterator[Any]:
    """The rows in which the column is one of the keys."""
    for some in at_once(keys):
        yield from connection.execute(query.where(column.in_(some)))
