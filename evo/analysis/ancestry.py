"""Where a candidate came from: its ancestors, and what each changed."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import Connection, Select, select

from evo.analysis.figures import search_figures
from evo.analysis.gains import gain_between
from evo.analysis.records import Relative, Step
from evo.analysis.relatives import RELATIVE_COLUMNS, read_relative, resolve_candidate
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.search.edits import Change

__all__ = ["ancestry", "genome_change"]

_c, _p = m.Candidate, m.Parentage


def ancestry(store: Store, prefix: str) -> tuple[Step, ...]:
    """Every ancestor of a candidate and itself, from the roots on: in the order they were proposed.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        key = resolve_candidate(connection, prefix)
        line = select(_c.id).where(_c.id == key).cte("line", recursive=True)
        line = line.union(select(_p.parent_id).join_from(_p, line, _p.child_id == line.c.id))
        # IN and no joins: a planner that joins may read the whole of the other table to find a handful.
        members = select(line.c.id)
        parents = _parents(connection, members)
        rows = connection.execute(
            select(_c.id, _c.public_id, _c.order, _c.operator, _c.status, _c.score, _c.genome)
            .where(_c.id.in_(members))
            .order_by(_c.id)
        ).all()
        figures = search_figures(connection, key // ORDERS_PER_RUN, [row.id for row in rows])
    genomes = {row.id: Genome.from_json(row.genome) for row in rows}
    main = {key}
    while parents[key]:
        key = parents[key][0][0]
        main.add(key)
    steps = []
    for row in rows:
        first = parents[row.id][0] if parents[row.id] else None
        own = figures.get(row.id)
        gain = gain_between(figures.get(first[0]), own) if first else None
        steps.append(
            Step(
                id=row.public_id,
                order=row.order,
                operator=row.operator,
                status=row.status,
                score=row.score,
                median_us=own.median_us if own else None,
                gain=gain.gain if gain else None,
                tie=gain.tie if gain else None,
                parents=tuple(parent for _, parent in parents[row.id]),
                change=genome_change(genomes[first[0]], genomes[row.id]) if first else {},
                parameters=genomes[row.id].parameters,
                main_line=row.id in main,
            )
        )
    return tuple(steps)


def genome_change(before: Genome, after: Genome) -> Change:
    """What a change of genome changed."""
    return dict(before.difference(after))


def _parents(connection: Connection, members: Select[int]) -> dict[int, list[tuple[int, Relative]]]:
    """Key and record of the parents of every candidate among `members`, in their order."""
    found: dict[int, list[tuple[int, Relative]]] = defaultdict(list)
    rows = connection.execute(
        select(_p.child_id, _c.id, *RELATIVE_COLUMNS)
        .join_from(_p, _c, _c.id == _p.parent_id)
        .where(_p.child_id.in_(members))
        .order_by(_p.child_id, _p.position)
    )
    for child, parent, *row in rows:
        found[child].append((parent, read_relative(row)))
    return found
