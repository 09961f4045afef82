"""Finding a candidate by its public id, and naming its relatives."""

from __future__ import annotations

import string
from typing import Any

from sqlalchemy import Connection, select

from evo.analysis.records import Relative
from evo.errors import StoreError, UnknownNameError, UsageError
from evo.lineage import models as m

__all__ = ["RELATIVE_COLUMNS", "read_relative", "resolve_candidate"]

_c, _p = m.Candidate, m.Parentage
RELATIVE_COLUMNS = (_c.public_id, _c.order, _p.role, _c.operator, _c.status, _c.score)
_SHORTEST = 3  # digits that a mistyped id must have right for its neighbours to be offered


def resolve_candidate(connection: Connection, prefix: str) -> int:
    """The key of the candidate whose public id begins so.

    Raises UnknownNameError, StoreError for the beginning of several, or UsageError for what is not a text at all.
    """
    if not isinstance(prefix, str):
        raise UsageError(f"{prefix!r} is not the name of a candidate; give names one by one, as texts")
    prefix = prefix.strip().lower()
    found = _beginning(connection, prefix) if prefix and set(prefix) <= set(string.hexdigits) else []
    if not found:
        near = _beginning(connection, prefix[:_SHORTEST]) if len(prefix) > _SHORTEST else []
        latest = connection.scalars(select(_c.public_id).order_by(_c.id.desc()).limit(3))
        raise UnknownNameError("candidate", prefix, [name for _, name in near] or list(latest))
    if len(found) > 1:
        several = ", ".join(name for _, name in found[:3])
        raise StoreError(f"several candidates begin with {prefix!r} ({several}, ...); write more digits")
    return found[0][0]


def _beginning(connection: Connection, prefix: str) -> list[tuple[int, str]]:
    # A range and not LIKE, which no index helps with; "g" comes after every hexadecimal digit.
    rows = connection.execute(
        select(_c.id, _c.public_id)
        .where(_c.public_id >= prefix, _c.public_id < prefix + "g")
        .order_by(_c.public_id)
        .limit(4)
    )
    return [(key, name) for key, name in rows]


def read_relative(row: Any) -> Relative:
    """From values of RELATIVE_COLUMNS."""
    public_id, order, role, operator, status, score = row
    return Relative(id=public_id, order=order, role=role, operator=operator, status=status, score=score)
