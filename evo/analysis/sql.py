"""Anybody's question in SQL: one statement, which cannot change anything, cannot run for ever and cannot fill the memory."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from evo.errors import EngineError, UsageError
from evo.lineage.database import first_line
from evo.lineage.store import Store

__all__ = ["Selection", "select_sql"]

_STEPS = 2000
"""Of SQLite's virtual machine between two looks at the clock: less than a millisecond."""
_LONGEST_BYTES = 64 << 20
"""Of one text or blob in a query's working: as much as a whole run's sources, and no more than a process can spare."""
_LOOKS = frozenset(
    {
        *("compile_options", "database_list", "foreign_key_list", "freelist_count", "index_info", "index_list"),
        *("index_xinfo", "page_count", "page_size", "schema_version", "table_info", "table_list", "table_xinfo"),
        "user_version",
    }
)
"""Pragmas that only tell."""
_ELSEWHERE = frozenset({sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT})
_QUESTIONS = ("select", "with", "values", "table", "explain", "show")
_COMMENT = re.compile(r"\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|\(", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The answer to a query in SQL. cut: there are more rows than were asked for."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    cut: bool = False


def select_sql(store: Store, sql: str, *, limit: int | None = None, timeout_s: float | None = None) -> Selection:
    """The answer to one statement of SQL, which cannot change anything.

    limit: rows at most; `Selection.cut` says whether there were more. timeout_s: for all of it.
    Raises UsageError for a statement that the database does not understand, that would write or that takes too long, and
    EngineError if the store is open for writing.
    """
    if store.writes:
        raise EngineError("SQL from outside needs a store that was opened for reading only")
    if not sql.strip():
        raise UsageError("the query is empty; write one such as: SELECT name, kernel FROM run")
    if "\0" in sql:
        raise UsageError("the query has a NUL character in it; leave that out")
    if limit is not None and limit < 0:
        raise UsageError(f"a limit of {limit} rows cannot be; give 0 or more")
    if timeout_s is not None and not 0 < timeout_s < 1e6:
        raise UsageError(f"a time limit of {timeout_s:g} seconds cannot be kept; give one above 0")
    with store.reading() as connection:
        ask = _ask_sqlite if connection.dialect.name == "sqlite" else _ask_server
        try:
            return ask(connection, sql, limit, timeout_s)
        except (UsageError, EngineError):
            raise
        except Exception as error:
            cause = error.orig or error if isinstance(error, DBAPIError) else error
            if sentence := _sentence(cause, timeout_s):
                raise UsageError(sentence) from error
            raise


def _ask_sqlite(connection: Connection, sql: str, limit: int | None, timeout_s: float | None) -> Selection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    if not connection.in_transaction():  # what begins one is refused inside
        connection.begin()
    with _guarded(driver, timeout_s):
        cursor = connection.execution_options(no_parameters=True).exec_driver_sql(sql)
        if not cursor.returns_rows:
            return Selection(columns=(), rows=())
        columns = tuple(cursor.keys())
        rows = [tuple(row) for row in islice(cursor, None if limit is None else limit + 1)]
        cursor.close()
    return _selection(columns, rows, limit)


def _selection(columns: tuple[str, ...], rows: list[tuple[Any, ...]], limit: int | None) -> Selection:
    cut = limit is not None and len(rows) > limit
    return Selection(columns=columns, rows=tuple(rows[:limit] if cut else rows), cut=cut)


@contextmanager
def _guarded(driver: sqlite3.Connection, timeout_s: float | None) -> Iterator[None]:
    """Inside, SQLite looks at the clock, at the size of values, and refuses to leave this database."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def look() -> int:
        return int(deadline is not None and time.monotonic() > deadline)

    def allow(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
        told = action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _LOOKS
        return sqlite3.SQLITE_DENY if told or action in _ELSEWHERE else sqlite3.SQLITE_OK

    longest = driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
    driver.set_progress_handler(look, _STEPS)
    driver.set_authorizer(allow)
    try:
        yield
    finally:
        driver.set_authorizer(None)
        driver.set_progress_handler(None, 0)
        driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)


def _ask_server(connection: Connection, sql: str, limit: int | None, timeout_s: float | None) -> Selection:
    """PostgreSQL, in a transaction that cannot write; which a second statement could end, and so there must be none."""
    if (word := _first_word(sql)) not in _QUESTIONS:
        raise UsageError(
            f"the query cannot be run: this connection is readonly, and {word.upper() or 'it'} is not among"
            f" {', '.join(_QUESTIONS).upper()}"
        )
    if timeout_s is not None:
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
    wanted = None if limit is None else limit + 1
    if connection.dialect.driver == "psycopg":
        # A stream is one statement by the protocol itself, and does not read what nobody wants into memory.
        cursor: Any = connection.connection.cursor()
        try:
            stream = cursor.stream(sql)
            rows = [tuple(row) for row in islice(stream, wanted)]
            columns = tuple(column[0] for column in cursor.description or ())
            stream.close()
        finally:
            cursor.close()
        return _selection(columns, rows, limit)
    if ";" in sql.rstrip().rstrip(";"):
        raise UsageError("the query cannot be run: one statement at a time, without a semicolon in it")
    result = connection.execution_options(no_parameters=True, stream_results=True).exec_driver_sql(sql)
    rows = [tuple(row) for row in islice(result, wanted)]
    return _selection(tuple(result.keys()), rows, limit)


def _first_word(sql: str) -> str:
    place = 0
    while found := _COMMENT.match(sql, place):
        place = found.end()
    word = re.compile(r"[a-z]+", re.IGNORECASE).match(sql, place)
    return word[0].lower() if word else ""


def _sentence(error: BaseException, timeout_s: float | None) -> str:
    """What is wrong with the statement; empty where it is not the statement.

    SQLite's result codes and PostgreSQL's SQLSTATE: classes 42 (syntax, rights), 25 (read only), 22 (a value), 54 (too
    complex), 57014 (ended by the clock).
    """
    said = first_line(error)
    code, state = getattr(error, "sqlite_errorcode", None), getattr(error, "sqlstate", None)
    timed_out = code == sqlite3.SQLITE_INTERRUPT or state == "57014"
    if timed_out and timeout_s is not None:
        return (
            f"the query was not done after {timeout_s:g} s and was stopped; name a run or a candidate in it, or allow it"
            " more time with --timeout"
        )
    if code == sqlite3.SQLITE_AUTH:
        return (
            "the query cannot be run: only questions to this database are answered (SELECT, WITH, VALUES, EXPLAIN, PRAGMA"
            " table_info)"
        )
    if (code is not None and code & 0xFF == sqlite3.SQLITE_READONLY) or state == "25006":
        return f"the query cannot be run: it would write, and this command only reads ({said})"
    if isinstance(code, int) and code & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_NOMEM):
        return f"the query cannot be run: {said}"
    if state == "42601" and "multiple commands" in said:
        return "the query cannot be run: one statement at a time"
    if isinstance(state, str) and state[:2] in ("42", "25", "22", "54", "0A"):
        return f"the query cannot be run: {said}"
    # The driver's own: no statement, or several.
    return f"the query cannot be run: {said}" if type(error).__name__ in ("ProgrammingError", "DataError") else ""
