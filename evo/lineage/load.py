"""Reading a dump back. It first becomes a SQLite file of its own, with the tables it was made from.

So a dump of an older schema goes through the ordinary migrations, and nothing reaches a database that is in use
before all of the dump has been read and found whole.
"""

from __future__ import annotations

import base64
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from sqlalchemy import create_engine

from evo.errors import StoreError
from evo.lineage.database import locate, make_folder
from evo.lineage.dump import Block, Dump
from evo.lineage.faults import translated
from evo.lineage.lock import WriterLock
from evo.lineage.losses import Losses
from evo.lineage.mending import Mended, mend
from evo.lineage.merge import Merged, merge
from evo.lineage.schema import create_schema
from evo.lineage.store import Store

__all__ = ["Loaded", "load"]

_ROWS_AT_ONCE = 5000


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Of a salvaged dump also, by table: left_out, rows that referred to what was lost; stand_ins, rows that stand
    for builds and checks that were lost. losses: what each run lacks, by its name in the dump."""

    merged: Merged
    left_out: dict[str, int]
    stand_ins: dict[str, int]
    losses: dict[str, Losses]


def load(file: IO[bytes], name: str, where: str | Path) -> Loaded:
    """Adds what a dump holds to a database, which is made if it is not there: everything, or nothing.

    Raises StoreError for a dump that is none, damaged, incomplete or newer, and as `merge` does.
    """
    dump, location = Dump(file, name), locate(where)
    if location.path is not None:
        make_folder(location.path)
    beside = location.path.parent if location.path is not None else None
    with _folder(beside) as folder:
        staged = folder / "lineage.db"
        with translated(f"the loading of {name}"):
            _stage(dump, staged, name)
            Store.open(staged, write=True).close()  # brings it up to date
            mended = _make_sound(staged, name, dump)
        with Store.open(staged, write=False) as source:
            if location.path is None or location.path.exists():
                with Store.open(where, write=True) as target:
                    merged = merge(target, source)
                return Loaded(merged=merged, left_out=mended.left_out, stand_ins=mended.stand_ins, losses=mended.losses)
            merged = _counted(source)
        _move(staged, location.path)
        return Loaded(merged=merged, left_out=mended.left_out, stand_ins=mended.stand_ins, losses=mended.losses)


@contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """For as long as the loading takes."""
    try:
        made = tempfile.TemporaryDirectory(prefix=".evo-load-", dir=beside)
    except OSError as error:
        what = f"cannot write in the folder {beside or tempfile.gettempdir()}: {error.strerror or error}"
        raise StoreError(f"{what}; {'choose another with --db' if beside else 'name another in TMPDIR'}") from error
    with made as name:
        yield Path(name)


def _counted(store: Store) -> Merged:
    with store.reading() as connection:
        runs = tuple(connection.exec_driver_sql("SELECT name FROM run ORDER BY id").scalars())
        candidates = connection.exec_driver_sql("SELECT count(*) FROM candidate").scalar()
    return Merged(added=runs, candidates=int(candidates or 0))


def _move(staged: Path, path: Path) -> None:
    """Puts a finished file where no database is yet."""
    lock = WriterLock(path.resolve())
    try:
        if path.exists():
            raise StoreError(f"{path} was made by another program in the meantime; load the dump again")
        staged.rename(path)
    finally:
        lock.release()


def _stage(dump: Dump, path: Path, name: str) -> None:
    """The dump as a file, with the schema that it was made from."""
    engine = create_engine(f"sqlite:///{path}")
    try:
        with engine.begin() as connection:
            create_schema(connection, dump.header.schema, name)
    finally:
        engine.dispose()
    raw = sqlite3.connect(path, isolation_level=None)
    try:
        # Nobody needs this file if the process ends before it is whole.
        raw.execute("PRAGMA journal_mode = OFF")
        raw.execute("PRAGMA synchronous = OFF")
        raw.execute("BEGIN")
        for block in dump.blocks():
            _insert(raw, block, name)
        raw.execute("COMMIT")
    finally:
        raw.close()


def _make_sound(path: Path, name: str, dump: Dump) -> Mended:
    raw = sqlite3.connect(path, isolation_level=None)
    try:
        raw.execute("BEGIN")
        mended = mend(raw, dump.unreadable) if dump.header.salvaged else Mended()
        broken = raw.execute("PRAGMA foreign_key_check").fetchone()
        if broken is not None:
            raise StoreError(
                f"{name} is damaged: a row of {broken[0]!r} refers to one of {broken[2]!r} that is not there"
            )
        raw.execute("COMMIT")
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it in the one file that may be moved
    finally:
        raw.close()
    return mended


def _insert(raw: sqlite3.Connection, block: Block, name: str) -> None:
    types = {row[1]: row[2] for row in raw.execute(f'PRAGMA table_info("{_word(block.table, name)}")')}
    if not types or not set(block.columns) <= types.keys():
        raise StoreError(f"{name} is damaged: its schema has no table {block.table!r} with these columns")
    readers = [_reader(types[column]) for column in block.columns]
    columns = ", ".join(f'"{column}"' for column in block.columns)
    statement = f'INSERT INTO "{block.table}" ({columns}) VALUES ({", ".join("?" * len(block.columns))})'
    rows = iter(block.rows)
    try:
        while some := [_decode(row, readers) for row in islice(rows, _ROWS_AT_ONCE)]:
            raw.executemany(statement, some)
    except (sqlite3.IntegrityError, ValueError, TypeError) as error:
        raise StoreError(f"{name} is damaged: a row of {block.table!r} cannot be stored ({error})") from error


def _word(table: str, name: str) -> str:
    if not table.isidentifier():
        raise StoreError(f"{name} is damaged: it names a table {table[:40]!r}")
    return table


def _decode(row: Sequence[Any], readers: Sequence[Callable[[Any], Any] | None]) -> list[Any]:
    return [
        read(value) if read is not None and isinstance(value, str) else value
        for value, read in zip(row, readers, strict=True)
    ]


def _reader(type_: str) -> Callable[[str], Any] | None:
    """What makes of a text in a dump the value that a column of SQLite's holds."""
    if type_ == "BLOB":
        return base64.b64decode
    if type_ == "DOUBLE":
        return float
    if type_ == "DATETIME":
        return _time
    return None


def _time(text: str) -> str:
    return datetime.fromisoformat(text).astimezone(UTC).replace(tzinfo=None).isoformat(" ", timespec="microseconds")
