"""A candidate's whole family: where it came from, what came of it, and what each change gained."""

from __future__ import annotations

import difflib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, literal, select, union_all

from evo.analysis.candidates import Relative, read_artefacts, read_parents, resolve_candidate
from evo.analysis.times import gain_between, search_times
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, Key
from evo.lineage.read import rows_of
from evo.lineage.store import Store
from evo.problem.genome import Change, Genome
from evo.problem.space import Value

__all__ = ["Family", "Kin", "read_family", "unified"]

_c, _p = m.Candidate, m.Parentage
_UP, _DOWN = "ancestor", "descendant"
_DIFF_LINES = 3
Relation = Literal["ancestor", "self", "descendant"]
_RELATIONS: tuple[Relation, ...] = ("ancestor", "self", "descendant")
_COLUMNS = (_c.id, _c.public_id, _c.order, _c.operator, _c.status, _c.score, _c.genome, _c.source_sha)


@dataclass(frozen=True, kw_only=True)
class Kin:
    """An ancestor or descendant of a candidate, or itself.

    generation: the fewest steps between the two, negative for ancestors. change and the gains: against its own first
    parent. gain: the parent's time over its own (above 1: faster), both of the search's cold timing, each beside the
    reference in a race of its own; tie: the interval of the gain holds 1. main_line: on the way from a root to the
    candidate through first parents only. diff: of the source against the first parent's, if asked for.
    """

    id: str
    relation: Relation
    generation: int
    order: int
    operator: str
    status: str
    score: float | None
    median_us: float | None
    low_us: float | None
    high_us: float | None
    disturbed: bool
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    tie: bool | None
    parents: tuple[Relative, ...]
    change: Change
    parameters: dict[str, Value]
    main_line: bool
    diff: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Ancestors from the roots on, the candidate, its descendants, each in the order they were proposed.

    cut: there are more descendants than were asked for; those proposed first are given.
    """

    members: tuple[Kin, ...]
    cut: bool


def read_family(store: Store, prefix: str, *, descendants: int = 100, diff: bool = False) -> Family:
    """Every ancestor of a candidate, and up to so many of its descendants.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        key = resolve_candidate(connection, prefix)
        relations, cut = _relations(connection, key, descendants)
        edges = _parent_keys(connection, sorted(relations))
        parents = read_parents(connection, sorted(relations))
        wanted = sorted({*relations, *(keys[0] for keys in edges.values())})
        rows = {row.id: row for row in rows_of(connection, select(*_COLUMNS), wanted, _c.id)}
        times = search_times(connection, key // ORDERS_PER_RUN, wanted)
        digests = {row.source_sha for row in rows.values() if row.source_sha} if diff else set()
        texts = {k: v.decode("utf-8", "surrogatepass") for k, v in read_artefacts(connection, digests).items()}
    main = {key}
    line = key
    while line in edges:
        line = edges[line][0]
        main.add(line)
    generations = _generations(key, relations, edges)
    members = []
    for k in sorted(relations, key=lambda k: (_RELATIONS.index(relations[k]), k)):
        row, before = rows[k], rows[edges[k][0]] if k in edges else None
        own = times.get(k)
        gain = gain_between(times.get(before.id), own) if before else None
        genome = Genome.from_json(row.genome)
        members.append(
            Kin(
                id=row.public_id,
                relation=relations[k],
                generation=generations[k],
                order=row.order,
                operator=row.operator,
                status=row.status,
                score=row.score,
                median_us=own.median_us if own else None,
                low_us=own.low_us if own else None,
                high_us=own.high_us if own else None,
                disturbed=bool(own and own.disturbed),
                gain=gain.gain if gain else None,
                gain_low=gain.low if gain else None,
                gain_high=gain.high if gain else None,
                tie=gain.tie if gain else None,
                parents=parents.get(k, ()),
                change=Genome.from_json(before.genome).difference(genome) if before else {},
                parameters=genome.parameters,
                main_line=k in main,
                diff=_diff(before, row, texts) if diff and before else None,
            )
        )
    return Family(members=tuple(members), cut=cut)


def _relations(connection: Connection, key: int, descendants: int) -> tuple[dict[int, Relation], bool]:
    """Keys of the family, by one recursive query up and one down; UNION, not UNION ALL, so that an ancestor by a
    million ways is met once."""
    up = select(literal(key, Key).label("id")).cte("up", recursive=True)
    up = up.union(select(_p.parent_id).join_from(_p, up, _p.child_id == up.c.id))
    down = select(literal(key, Key).label("id")).cte("down", recursive=True)
    down = down.union(select(_p.child_id).join_from(_p, down, _p.parent_id == down.c.id))
    # Children are later than their parents, so the first of the descendants by key are a connected part of the family.
    first = select(down.c.id).where(down.c.id != key).order_by(down.c.id).limit(descendants + 1).subquery()
    found: dict[int, Relation] = {}
    query = union_all(select(literal(_UP), up.c.id), select(literal(_DOWN), first.c.id))
    later = []
    for relation, member in connection.execute(query):
        if relation == _UP:
            found[member] = "ancestor"
        else:
            later.append(member)
    found |= dict.fromkeys(sorted(later)[:descendants], "descendant")
    found[key] = "self"
    return found, len(later) > descendants


def _parent_keys(connection: Connection, keys: Sequence[int]) -> dict[int, list[int]]:
    """Keys of the parents of every candidate that has any, in their order."""
    found: dict[int, list[int]] = defaultdict(list)
    query = select(_p.child_id, _p.parent_id).order_by(_p.child_id, _p.position)
    for child, parent in rows_of(connection, query, keys, _p.child_id):
        found[child].append(parent)
    return dict(found)


def _generations(key: int, relations: Mapping[int, Relation], parents: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Fewest steps to each member; breadth first, upwards and downwards."""
    children: dict[int, list[int]] = defaultdict(list)
    for child, found in parents.items():
        for parent in found:
            children[parent].append(child)
    distance = {key: 0}
    for edges, step, relation in ((parents, -1, _UP), (children, 1, _DOWN)):
        waiting = deque([key])
        while waiting:
            one = waiting.popleft()
            for other in edges.get(one, ()):
                if other not in distance and relations.get(other) == relation:
                    distance[other] = distance[one] + step
                    waiting.append(other)
    return distance


def _diff(before: Any, after: Any, texts: Mapping[str, str]) -> str | None:
    """Unified; empty for equal sources, None where one has none."""
    if before.source_sha not in texts or after.source_sha not in texts:
        return None
    return unified(texts[before.source_sha], texts[after.source_sha], f"#{before.order}", f"#{after.order}")


def unified(before: str, after: str, one: str, other: str) -> str:
    """The difference of two texts as a unified diff; empty if there is none."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), one, other, n=_DIFF_LINES, lineterm=""
    )
    return "\n".join(lines)
