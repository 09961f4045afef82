"""What a database says, in one sentence of ours. Nothing of a driver's traceback reaches the user."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy.exc import DBAPIError, InvalidRequestError, SQLAlchemyError, StatementError

from evo.errors import EngineError, StoreError
from evo.lineage.backup import damage

__all__ = ["Place", "first_line", "translated"]

# Primary result codes of SQLite (https://www.sqlite.org/rescode.html), the low byte of an extended one.
_DAMAGED = 11
_SQLITE = {
    3: "may not be used by this account; check the permissions of the file and its folder",
    5: "is being written by another program; wait until it is done, or close it",
    6: "is being written by another program; wait until it is done, or close it",
    8: "cannot be written; check the permissions of the file and its folder",
    10: "cannot be read or written by the system (disk I/O error); check the disk and its free space",
    13: "cannot grow because the disk is full; no half record was kept: free some space, then go on",
    14: "cannot be opened; check that its folder exists and may be written, and that the disk is not full",
    26: "is not a SQLite database; name another file with --db",
}
# SQLSTATE codes of PostgreSQL (its manual, appendix A).
_POSTGRES = {
    "25006": "is open for reading only",
    "42501": "does not let this user do that; ask for the rights to create and write tables",
    "53100": "cannot grow because the disk is full; no half record was kept: free some space, then go on",
    "53300": "takes no more connections; close some, or raise its max_connections",
    "57P01": "was shut down by its administrator",
    "40P01": "had two writers waiting for each other (deadlock); nothing was recorded by half: try again",
}
# What PostgreSQL and libpq say where no connection comes about; they give no code for it.
_UNREACHABLE = (
    (
        "password authentication failed",
        "does not take this user and password; correct them in the URL, or in ~/.pgpass",
    ),
    ("no password supplied", "wants a password; give it in ~/.pgpass, in PGPASSWORD, or in the URL"),
    ("does not exist", "is not there ({said}); create it with: createdb NAME"),
    ("connection refused", "cannot be reached: no server listens there; start it, or correct host and port in the URL"),
    ("no such file or directory", "cannot be reached: no server runs on this machine; start it, or name its host"),
    ("resolve host", "cannot be reached: nothing is known of that host; correct it in the URL"),
    ("timeout expired", "cannot be reached: its server does not answer; look whether it runs and lets you in"),
    ("timed out", "cannot be reached: its server does not answer; look whether it runs and lets you in"),
    ("pg_hba.conf", "lets nobody in from here as this user; its administrator can, in pg_hba.conf"),
    ("too many", "takes no more connections; close some, or raise its max_connections"),
    ("starting up", "is just being started; try again in a moment"),
)


class Place(Protocol):
    """A database as sentences name it. path: the file of a SQLite one."""

    def __str__(self) -> str: ...

    @property
    def path(self) -> Path | None: ...


@contextmanager
def translated(place: Place) -> Iterator[None]:
    """Turns whatever the database objects to inside into a StoreError about `place`, or an EngineError where
    only evo itself can be at fault."""
    try:
        yield
    except DBAPIError as error:
        raise _explain(place, error.orig or error, connected=error.statement is not None) from error
    except sqlite3.Error as error:
        raise _explain(place, error, connected=True) from error
    except StatementError as error:  # a value was refused before it reached the database
        if isinstance(error.orig, EngineError):
            raise error.orig from None
        raise EngineError(f"a record cannot be stored: {first_line(error.orig or error)}") from error
    except (ValueError, OverflowError) as error:  # likewise, by the driver
        raise EngineError(f"a record cannot be stored: {first_line(error)}") from error
    except InvalidRequestError as error:
        raise EngineError(f"the lineage database was misused: {first_line(error)}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"{place} cannot be used: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain(place: Place, error: BaseException, *, connected: bool) -> StoreError | EngineError:
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF == _DAMAGED and place.path is not None:
        return damage(place.path)
    if isinstance(code, int) and code & 0xFF in _SQLITE:
        return StoreError(f"{place} {_SQLITE[code & 0xFF]}")
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and state in _POSTGRES:
        return StoreError(f"{place} {_POSTGRES[state]}")
    if not connected and not isinstance(error, sqlite3.Error):
        said = str(error)
        for words, sentence in _UNREACHABLE:
            if words in said.lower():
                return StoreError(f"{place} {sentence.format(said=said.strip().rpartition('FATAL:')[2].strip())}")
    # The classes of PEP 249 have the same names in every driver.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if connected and kinds & {"IntegrityError", "DataError", "ProgrammingError"}:
        return EngineError(f"a record does not fit {place}: {first_line(error)}")
    return StoreError(f"{place} cannot be used: {first_line(error)}")
