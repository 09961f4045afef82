"""The candidates of one workload of a run, the best first."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import select

from evo.lineage import models as m
from evo.lineage.models import unrefused
from evo.lineage.read import resolve_run
from evo.lineage.store import Store

__all__ = ["ranked"]

_PAGE = 256


def ranked(store: Store, run: str, task: int) -> Iterator[str]:
    """Public ids of those that have a score and that no final has refused, by score. Read as they are asked for.

    Raises UnknownNameError.
    """
    c = m.Candidate
    with store.reading() as connection:
        key = resolve_run(connection, run)
    query = select(c.public_id).where(c.run_id == key, c.task == task, c.score.is_not(None), unrefused())
    query = query.order_by(c.score, c.id)
    for offset in range(0, 2**31, _PAGE):
        with store.reading() as connection:
            found = connection.scalars(query.limit(_PAGE).offset(offset)).all()
        yield from found
        if len(found) < _PAGE:
            return
