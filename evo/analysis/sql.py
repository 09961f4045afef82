"""Queries in SQL from anybody: one statement, which cannot change anything, run for ever or fill the memory."""

import re
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from evo.analysis.frame import frame
from evo.errors import EngineError, UsageError
from evo.lineage.database import first_line
from evo.lineage.models import VIEWS
from evo.lineage.store import Store

_STEPS = 2000
"""Steps of SQLite's virtual machine between two looks at the clock: less than a millisecond."""
_LONGEST_BYTES = 64 << 20
"""Largest text or blob that a query may make: as much as a whole run's sources, and no more than a process can spare."""
_QUESTION = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:(?:select|with|values|table|explain|show)\b|pragma\s+[\w.]+\s*(?:\([^;=]*\))?\s*;?\s*$)",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The answer to a query in SQL. cut: whether there are more rows than were asked for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    cut: bool = False

    def df(self) -> Any:
        """A pandas DataFrame. Raises UsageError where pandas is missing."""
        return frame(self.rows, self.columns)


def select_sql(store: Store, sql: str, *, limit: int = 1000, timeout_s: float = 30.0) -> Selection:
    """The answer to one statement of SQL, which cannot change anything.

    limit: rows at most. timeout_s: seconds that the whole answer may take.
    Raises UsageError for a statement that the database does not understand, that would write or that takes too long, and
    EngineError if the store is open for writing.
    """
    if store.writes:
        raise EngineError("SQL from outside needs a store that was opened for reading only")
    if not sql.strip():
        raise UsageError("the query is empty; write one such as: SELECT name, kernel FROM run")
    if "\0" in sql:
        raise UsageError("the query has a NUL character in it; leave that out")
    if limit < 0:
        raise UsageError(f"a limit of {limit} rows cannot be; give 0 or more")
    if not 0 < timeout_s < 1e6:
        raise UsageError(f"a time limit of {timeout_s:g} seconds cannot be kept; give one above 0")
    if not _QUESTION.match(sql):
        raise UsageError(
            f"the query cannot be run: {sql.split()[0][:20]} is no question, and this connection is readonly; ask with"
            " SELECT, WITH, VALUES, TABLE, EXPLAIN, SHOW or PRAGMA NAME"
        )
    with store.reading() as connection:
        ask = _ask_sqlite if connection.dialect.name == "sqlite" else _ask_server
        try:
            columns, rows = ask(connection, sql, limit + 1, timeout_s)
        except (DBAPIError, connection.dialect.loaded_dbapi.Error) as error:
            cause = error.orig or error if isinstance(error, DBAPIError) else error
            raise UsageError(_sentence(cause, timeout_s)) from error
    return Selection(columns=columns, rows=tuple(rows[:limit]), cut=len(rows) > limit)


_Answer = tuple[tuple[str, ...], list[tuple[Any, ...]]]
"""The names of the columns, and the rows."""


def _ask_sqlite(connection: Connection, sql: str, wanted: int, timeout_s: float) -> _Answer:
    """Asks SQLite, which looks at the clock and at the size of values meanwhile."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    deadline = time.monotonic() + timeout_s
    longest = driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
    driver.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS)
    try:
        cursor = connection.execution_options(no_parameters=True).exec_driver_sql(sql)
        if not cursor.returns_rows:
            return (), []
        rows = [tuple(row) for row in islice(cursor, wanted)]
        columns = tuple(cursor.keys())
        cursor.close()
    finally:
        driver.set_progress_handler(None, 0)
        driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
    return columns, rows


def _ask_server(connection: Connection, sql: str, wanted: int, timeout_s: float) -> _Answer:
    """Asks PostgreSQL in a transaction that cannot write. A second statement could end it, so there must be only one."""
    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
    # The protocol itself allows a stream one statement only; and rows that nobody wants are not read into memory.
    cursor: Any = connection.connection.cursor()
    with closing(cursor), closing(cursor.stream(sql)) as stream:
        rows = [tuple(row) for row in islice(stream, wanted)]
        return tuple(column[0] for column in cursor.description or ()), rows


def _sentence(error: BaseException, timeout_s: float) -> str:
    """The fault of a statement, by SQLite's result code or PostgreSQL's SQLSTATE (57014: stopped by the time limit)."""
    said = first_line(error)
    code, state = getattr(error, "sqlite_errorcode", 0) & 0xFF, str(getattr(error, "sqlstate", None) or "")
    if code == sqlite3.SQLITE_INTERRUPT or state == "57014":
        return (
            f"the query was not done after {timeout_s:g} s and was stopped; name a run or a candidate in it, or allow it"
            " more time with --timeout"
        )
    if code == sqlite3.SQLITE_READONLY or state == "25006":
        return f"the query cannot be run: it would write, and this command only reads ({said})"
    if state == "42601" and "multiple commands" in said:
        return "the query cannot be run: one statement at a time"
    if "no such table" in said or state == "42P01":
        said += f"; there are the views {', '.join(VIEWS)}"
    return f"the query cannot be run: {said}"
