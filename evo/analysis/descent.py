"""The family of a candidate: its ancestors, its descendants, and what each change gained."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, literal, select

from evo.analysis.candidates import CandidateSummary, Relative, read_relatives, resolve_candidate
from evo.analysis.times import gain_between, gain_fields, search_times
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, Key, candidate_key
from evo.lineage.read import read_artefacts, record_of, rows_of
from evo.lineage.store import Store
from evo.problem.genome import Change, Genome
from evo.problem.space import Value

_c, _p = m.Candidate, m.Parentage
Relation = Literal["ancestor", "self", "descendant"]
_COLUMNS = (_c.id.label("key"), *CandidateSummary.COLUMNS, _c.task, _c.genome, _c.source_sha)


@dataclass(frozen=True, kw_only=True)
class Kin(CandidateSummary):
    """An ancestor or descendant of a candidate, or the candidate itself.

    generation: the fewest steps between the two, negative for ancestors. change: the difference from its first parent. gain:
    that parent's time over its own (above 1: faster; None for a parent on another task), both of the search's cold timing,
    each beside the reference in a race of its own; tie: whether the interval of the gain holds 1. main_line: whether it is
    on the way from a root to the candidate through first parents only. diff: the difference of the source from the first
    parent's, if asked for.
    """

    relation: Relation
    generation: int
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
    """Ancestors from the roots on, the candidate, then its descendants, in the order of their proposal. cut: whether there
    are more descendants than were asked for; the earliest are given.
    """

    members: tuple[Kin, ...]
    cut: bool


def read_family(store: Store, candidate: str, *, descendants: int = 100, diff: bool = False) -> Family:
    """Every ancestor of a candidate, and at most `descendants` of its descendants."""
    with store.reading() as connection:
        key = resolve_candidate(connection, candidate)
        run_id = key // ORDERS_PER_RUN
        up = _reached(connection, key, _p.child_id, _p.parent_id)
        # The first descendants by key are connected with the candidate, because children are later than their parents.
        down = _reached(connection, key, _p.parent_id, _p.child_id, descendants + 1)
        kin = [*up, key, *down[:descendants]]
        parents = read_relatives(connection, kin)
        edges = {child: [candidate_key(run_id, p.order) for p in found] for child, found in parents.items()}
        if any(parent >= child for child, found in edges.items() for parent in found):
            raise ValueError("a parent is not earlier than its child")
        wanted = sorted({*kin, *(keys[0] for keys in edges.values())})
        rows = {row.key: row for row in rows_of(connection, select(*_COLUMNS), wanted, _c.id)}
        times = search_times(connection, run_id, wanted)
        digests = {row.source_sha for row in rows.values() if row.source_sha} if diff else set()
        texts = read_artefacts(connection, digests)
    generations = {key: 0}
    for k in [key, *reversed(up)]:  # every candidate is later than its parents
        for parent in edges.get(k, ()):
            generations[parent] = max(generations.get(parent, generations[k] - 1), generations[k] - 1)
    for k in down[:descendants]:
        generations[k] = 1 + min(generations[parent] for parent in edges[k] if parent >= key and parent in generations)
    main, line = {key}, key
    while line in edges:
        line = edges[line][0]
        main.add(line)
    members = []
    for k in kin:
        row, before, own = rows[k], rows[edges[k][0]] if k in edges else None, times.get(k)
        genome = Genome.from_json(row.genome)
        both: tuple[Any, Any] = (before, row)
        members.append(
            record_of(
                Kin,
                row,
                relation="self" if k == key else "ancestor" if k < key else "descendant",
                generation=generations[k],
                median_us=own.median_us if own else None,
                low_us=own.low_us if own else None,
                high_us=own.high_us if own else None,
                disturbed=bool(own and own.disturbed),
                **gain_fields(gain_between(times.get(before.key), own) if before and before.task == row.task else None),
                parents=parents.get(k, ()),
                change=Genome.from_json(before.genome).difference(genome) if before else {},
                main_line=k in main,
                diff=unified([texts.get(r.source_sha) for r in both], [f"#{r.order}" for r in both]) if before else None,
            )
        )
    return Family(members=tuple(members), cut=len(down) > descendants)


def _reached(connection: Connection, key: int, own: Any, other: Any, most: int | None = None) -> list[int]:
    """The sorted keys that can be reached from a candidate, at most so many. UNION, not UNION ALL, meets an ancestor once
    that is one by a million ways."""
    kin = select(literal(key, Key).label("id")).cte("kin", recursive=True)
    kin = kin.union(select(other).join_from(_p, kin, own == kin.c.id))
    return list(connection.scalars(select(kin.c.id).where(kin.c.id != key).order_by(kin.c.id).limit(most)))


def unified(texts: Sequence[bytes | None], names: Sequence[str]) -> str | None:
    """The unified diff of two texts; empty if they are equal, None if one of them is not kept."""
    known = [text.decode("utf-8", "replace").splitlines() for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    return "\n".join(difflib.unified_diff(known[0], known[1], names[0], names[1], lineterm=""))
