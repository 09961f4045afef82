"""How SQLite goes about what is asked of a database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine, event

from evo.lineage.models import public_id
from evo.lineage.store import Store

LARGE = ("candidate", "parentage", "build", "check", "timing", "artefact")
"""Tables that grow with every candidate."""
Question = Callable[[Store, str], object]
"""Of a store and a candidate's public id; its answer must not be empty."""


def plans(path: Path, ask: Question) -> list[str]:
    """The steps of every query that a question, about the run "two" and a candidate in it, comes to."""
    asked: list[tuple[str, object]] = []

    def note(connection: object, cursor: object, sql: str, parameters: object, *rest: object) -> None:
        asked.append((sql, parameters))

    with Store.open(path, write=False) as store:
        name = public_id(store.run("two").uid, 100)
        event.listen(Engine, "before_cursor_execute", note)
        try:
            assert ask(store, name)
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        found = []
        with store.reading() as connection:
            for sql, parameters in asked:
                if sql.lstrip().startswith(("SELECT", "WITH")):
                    rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)  # type: ignore[arg-type]
                    found += [row[3] for row in rows]
    assert found
    return found


def large_scans(found: list[str]) -> list[str]:
    """Of these steps, those that read a large table from end to end."""
    return [plan for plan in found for table in LARGE if plan.startswith(f"SCAN {table}")]
