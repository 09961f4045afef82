"""Backups of a SQLite file: made while others read and write it, and named where the file is found to be damaged."""

from __future__ import annotations

import os
import shlex
import sqlite3
import tempfile
from contextlib import closing, suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path

from evo.errors import StoreError

_MARK = ".backup-"


def back_up(path: Path, out: Path | None = None) -> Path:
    """Copies a database with SQLite's online backup, checks the copy, and returns where it is.

    out: the file to make, which must not be there yet; without it one beside the database, named by the time in UTC, so
    that names sort by it.
    The copy appears under its name when it is complete.
    Raises StoreError, also for a database that is damaged, or sqlite3.Error.
    """
    if out is None:
        out = path.with_name(f"{path.stem}{_MARK}{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}{path.suffix}")
    if out.exists():
        raise StoreError(f"{out} is there already; name another file for the backup")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        os.close(handle)
    except OSError as error:
        raise StoreError(f"cannot write in the folder {out.parent}: {error.strerror or error}") from error
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(name)) as copy,
        ):
            source.backup(copy)
            if copy.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise damage(path)
            copy.execute("PRAGMA journal_mode = DELETE")  # the copy is one file; the next writer makes it WAL again
        Path(name).chmod(path.stat().st_mode & 0o666)
        Path(name).rename(out)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            Path(name).unlink()
    return out


def newest_backup(path: Path) -> Path | None:
    """The newest one that `back_up` has put beside a database."""
    found = path.parent.glob(f"{escape(path.stem + _MARK)}*{path.suffix}")
    return max(found, key=lambda p: p.stem, default=None)


def damage(path: Path) -> StoreError:
    """What to do about a damaged file."""
    backup = newest_backup(path)
    restore = f"its newest backup is {backup}" if backup else "there is no backup beside it"
    recover = f"sqlite3 {shlex.quote(str(path))} .recover | sqlite3 NEW.db"
    return StoreError(f"the database {path} is damaged; {restore}; what can still be read is saved by: {recover}")
