"""Taking rows away. Keys that are looked up only then have indices only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, delete, text, update

from evo.lineage import models as m
from evo.lineage.columns import key_range

__all__ = ["erase_run", "indexed"]


@contextmanager
def indexed(connection: Connection, *columns: tuple[str, str]) -> Iterator[None]:
    """Indices of (table, column) for the time of this block, within its transaction.

    For each row that goes the database looks for rows that refer to it, and without them reads whole tables; to
    keep them would cost every candidate ever recorded some 300 bytes.
    """
    for table, column in columns:
        connection.execute(text(f"CREATE INDEX tmp_{table}_{column} ON {table} ({column})"))
    yield
    for table, column in columns:
        connection.execute(text(f"DROP INDEX tmp_{table}_{column}"))


def erase_run(connection: Connection, run_id: int) -> None:
    """Takes away all that belongs to a run but the run itself and the artefacts."""
    first, last = key_range(run_id)
    connection.execute(update(m.Task).where(m.Task.run_id == run_id), {"winner_id": None})
    connection.execute(delete(m.Timing).where(m.Timing.run_id == run_id))
    for column in (m.Parentage.child_id, m.Build.candidate_id, m.Check.candidate_id, m.Final.candidate_id):
        connection.execute(delete(column.class_).where(column.between(first, last)))
    with indexed(connection, ("timing", "candidate_id"), ("candidate", "same_code_as_id"), ("task", "winner_id")):
        connection.execute(delete(m.Candidate).where(m.Candidate.id.between(first, last)))
    connection.execute(delete(m.Task).where(m.Task.run_id == run_id))
