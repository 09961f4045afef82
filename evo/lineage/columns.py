"""Column types that read the same on SQLite and PostgreSQL, and the key of a candidate."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Dialect, Integer, String, TypeDecorator

from evo.errors import EngineError
from evo.evaluation import PASSED

__all__ = [
    "ORDERS_PER_RUN",
    "PASSED_VALUES",
    "PUBLIC_ID_DIGITS",
    "Digest",
    "JsonObject",
    "Key",
    "UtcDateTime",
    "candidate_key",
    "key_range",
    "public_id",
]

ORDERS_PER_RUN = 2**32
PASSED_VALUES = ", ".join(f"'{status}'" for status in PASSED)
"""For SQL that is written out: the status of a candidate is among them if it passed."""
PUBLIC_ID_DIGITS = 16
"""64 bits: among a million candidates, two share an id with a chance of 3e-8, and are refused if they do."""


def candidate_key(run_id: int, order: int) -> int:
    """The primary key of a candidate. Raises EngineError for an order outside 0 to 2**32 - 1."""
    if not 0 <= order < ORDERS_PER_RUN:
        raise EngineError(f"candidate order {order} is outside 0 to {ORDERS_PER_RUN - 1}")
    return run_id * ORDERS_PER_RUN + order


def key_range(run_id: int) -> tuple[int, int]:
    """The first and last primary key that candidates of a run may have."""
    return candidate_key(run_id, 0), candidate_key(run_id, ORDERS_PER_RUN - 1)


def public_id(run_uid: str, order: int) -> str:
    """What people call a candidate by: hexadecimal, the same for the same run and order."""
    return hashlib.sha256(f"{run_uid}:{order}".encode()).hexdigest()[:PUBLIC_ID_DIGITS]


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time, kept as UTC; SQLite, which has no time zones, gets it without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise EngineError(f"the time {value.isoformat()} has no time zone; record aware times only")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# SQLite makes a column its row id, which needs no index of its own, only if the type reads INTEGER.
Key = BigInteger().with_variant(Integer, "sqlite")
Digest = String(64)
JsonObject = dict[str, Any]
