"""What can still be read of a damaged SQLite file: cut off, copied while it was written, or with broken pages.

SQLite itself reads it, in the order of the keys. Where it meets a page that it cannot follow, the next key behind
that page is looked for by bisection: a bad page is a range of keys, beyond which reading goes on.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from evo.errors import StoreError
from evo.lineage.dump import TABLES, Block, Header, encode, write_dump

__all__ = ["Salvaged", "is_whole", "salvage"]

_LAST_KEY = 2**63 - 1


@dataclass(kw_only=True)
class Salvaged:
    """written: rows by table. gaps: places, by table, where some could not be read. spoilt: artefacts whose
    bytes are not those that were stored. unread: tables of which nothing at all could be."""

    written: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    spoilt: int = 0
    unread: tuple[str, ...] = ()


def is_whole(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with a file, all of which is read for that."""
    try:
        with closing(_connect(path, trusting=True)) as raw:
            return bool(raw.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return False
        raise


def salvage(path: Path, file: IO[bytes]) -> Salvaged:
    """Writes a dump of what is left. Raises StoreError if nothing is."""
    found = Salvaged()
    with closing(_connect(path, trusting=False)) as raw:
        raw.text_factory = bytes  # what is no UTF-8 is a broken row, not the end of the reading
        revision, tables = _schema(raw, path)
        unread: list[str] = []
        blocks = (Block(table=t.name, columns=tuple(t.types), rows=_rows(raw, t, found, unread)) for t in tables)
        found.written = write_dump(file, Header(schema=revision, salvaged=True), blocks, found.gaps)
    found.unread = tuple(unread)
    if not found.written.get("run"):
        raise StoreError(f"nothing could be read from {path}, not even the list of its runs; restore a backup")
    return found


def _connect(path: Path, *, trusting: bool) -> sqlite3.Connection:
    raw = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    if not trusting:
        # Makes SQLite open a file that is shorter than it should be, or whose schema has mistakes.
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("PRAGMA query_only = ON")
    return raw


@dataclass(frozen=True, kw_only=True)
class _Table:
    """types: of its columns, by name. key: its primary key, or the row's number where that is what orders it."""

    name: str
    types: dict[str, str]
    key: tuple[str, ...]


def _schema(raw: sqlite3.Connection, path: Path) -> tuple[str, list[_Table]]:
    """The revision, and the tables that there are."""
    try:
        revision = raw.execute("SELECT version_num FROM alembic_version").fetchone()
        tables = [table for t in TABLES if (table := _table(raw, t.name)) is not None]
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"nothing can be saved from {path}: its schema, which tells where everything is, cannot be read; restore a"
            " backup"
        ) from error
    if revision is None or not tables:
        raise StoreError(f"nothing can be saved from {path}: no table of evo's is left in it; restore a backup")
    return revision[0].decode("ascii", "replace"), tables


def _table(raw: sqlite3.Connection, name: str) -> _Table | None:
    found = raw.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    info = raw.execute(f'PRAGMA table_info("{name}")').fetchall()
    if found is None or not info:
        return None
    types = {row[1].decode(): row[2].decode() for row in info}
    if b"WITHOUT ROWID" not in found[0]:
        return _Table(name=name, types=types, key=("rowid",))
    return _Table(name=name, types=types, key=tuple(r[1].decode() for r in sorted(info, key=lambda r: r[5]) if r[5]))


def _rows(raw: sqlite3.Connection, of: _Table, found: Salvaged, unread: list[str]) -> Iterator[list[Any]]:
    table, columns = of.name, list(of.types)
    number = 0
    for row in _readable(raw, of, found):
        try:
            values = [_value(value, of.types[column]) for column, value in zip(columns, row, strict=True)]
        except (ValueError, AttributeError, TypeError):  # bytes that are no text, no time, no number
            found.gaps[table] = found.gaps.get(table, 0) + 1
            continue
        if table == "artefact" and not _is_sound(dict(zip(columns, row, strict=True))):
            found.spoilt += 1
            continue
        number += 1
        yield values
    if not number and found.gaps.get(table):
        unread.append(table)


def _readable(raw: sqlite3.Connection, of: _Table, found: Salvaged) -> Iterator[tuple[Any, ...]]:
    """The rows of a table by key, as far as they can be read."""
    table, key = of.name, of.key[0]
    names, order = ", ".join(f'"{c}"' for c in of.types), ", ".join(of.key)
    query = f'SELECT {names}, {key} FROM "{table}" NOT INDEXED WHERE {key} >= ? ORDER BY {order}'
    start = -(2**63)
    while True:
        last = None
        try:
            for row in raw.execute(query, (start,)):
                last = row[-1]
                yield row[:-1]
            return
        except sqlite3.DatabaseError:
            found.gaps[table] = found.gaps.get(table, 0) + 1
        after = _next_readable(raw, query, start if last is None else last + 1)
        if after is None:
            return
        start = after


def _next_readable(raw: sqlite3.Connection, query: str, start: int) -> int | None:
    """The first key from `start` on behind the bad pages there; None if nothing behind them can be read."""

    def readable(at: int) -> bool:
        try:  # the whole row: its end may lie on a page of its own
            raw.execute(f"{query} LIMIT 1", (at,)).fetchone()
        except sqlite3.DatabaseError:
            return False
        return True

    step = 1
    while not readable(start + step):
        step *= 2
        if start + step > _LAST_KEY:
            return None
    low, high = start + step // 2, start + step  # the first is not readable, or is where the search began
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if readable(middle) else (middle, high)
    return high


def _value(value: Any, type_: str) -> Any:
    """As a dump has it. Raises ValueError for what the column cannot hold."""
    if value is None:
        return None
    if type_ == "BLOB":
        return encode(bytes(value))
    if type_ == "DATETIME":
        return datetime.fromisoformat(value.decode()).replace(tzinfo=UTC).isoformat()
    if isinstance(value, bytes):
        return value.decode()
    return encode(value)


def _is_sound(row: dict[str, Any]) -> bool:
    try:
        return bool(hashlib.sha256(zlib.decompress(row["data"])).hexdigest().encode() == row["sha256"])
    except (zlib.error, TypeError):
        return False
