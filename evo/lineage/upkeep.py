"""Keeping a database small."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from evo.errors import EngineError
from evo.lineage.faults import translated
from evo.lineage.store import Store

__all__ = ["Vacuumed", "size_of", "vacuum"]


@dataclass(frozen=True, kw_only=True)
class Vacuumed:
    """Bytes of the database."""

    before: int
    after: int


def size_of(store: Store) -> int:
    """Bytes of the database as it lies on disk."""
    with store.reading() as connection:
        if store.path is not None:
            beside = store.path.with_name(store.path.name + "-wal")
            return store.path.stat().st_size + (beside.stat().st_size if beside.exists() else 0)
        return int(connection.scalar(select(func.pg_database_size(func.current_database()))) or 0)


def vacuum(store: Store) -> Vacuumed:
    """On SQLite the file becomes as small as it can be, for which it needs as much room again meanwhile; on
    PostgreSQL free room inside its files can be used anew, and others work on meanwhile."""
    if not store.writes:
        raise EngineError(f"{store} was opened for reading only")
    before = size_of(store)
    with translated(store), store.unbound() as driver:
        if store.path is not None:
            driver.execute("VACUUM")
            driver.execute("ANALYZE")
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            driver.execute("VACUUM (ANALYZE)")
    return Vacuumed(before=before, after=size_of(store))
