"""Keeping a database small, and reading one of an older evo without changing it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from evo.errors import EngineError
from evo.lineage.database import locate
from evo.lineage.faults import translated
from evo.lineage.schema import OlderSchemaError
from evo.lineage.store import Store

__all__ = ["Vacuumed", "open_current", "size_of", "vacuum"]


@contextmanager
def open_current(where: str | Path) -> Iterator[Store]:
    """A database to be read whole, also one of an older evo: a copy of that file is brought up to date instead.

    Raises StoreError as `Store.open` does, and for an older one on a server.
    """
    try:
        store = Store.open(where, write=False)
    except OlderSchemaError:
        location = locate(where)
        if location.path is None:
            raise
        with tempfile.TemporaryDirectory(prefix="evo-copy-") as folder:
            copy = Path(folder) / location.path.name
            with (
                translated(location),
                closing(sqlite3.connect(f"{location.path.as_uri()}?mode=ro", uri=True)) as old,
                closing(sqlite3.connect(copy)) as new,
            ):
                old.backup(new)
            Store.open(copy, write=True).close()
            with Store.open(copy, write=False) as store:
                yield store
        return
    with store:
        yield store


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
