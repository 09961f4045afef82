"""Pruning: dropping the sources, machine code and single samples of a run's candidates.

The candidates themselves always stay, with their genomes, parents, builds, checks and times, from which a run is resumed
and its lineage shown. Winners, finalists, the leader of each task, all their ancestors, and the originals of duplicate
binaries among these keep everything. A stored text is deleted when nothing refers to it and nothing is packed against it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Delete, Select, Text, Update, and_, cast, delete, func, or_, select, update

from evo.errors import StoreError
from evo.evaluation import PASSED
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.liveness import write_alone
from evo.lineage.models import key_range, leader_key
from evo.lineage.read import at_once, resolve_run
from evo.lineage.store import Store

_c, _b, _t, _p, _a = m.Candidate, m.Build, m.Timing, m.Parentage, m.Artefact


class Part(StrEnum):
    """Something of a candidate that can be dropped."""

    FAILED = "failed"
    """Sources and machine code of candidates that did not pass."""
    SOURCES = "sources"
    """Sources of all candidates that are not kept."""
    BINARIES = "binaries"
    """Machine code of all candidates that are not kept."""
    SAMPLES = "samples"
    """Single samples of the search's timings; medians and intervals stay. An interrupted run keeps them, because its
    continuation decides by them again."""


_STORED: tuple[tuple[Part, Any, Any], ...] = (
    (Part.SOURCES, _c.id, _c.source_sha),
    (Part.BINARIES, _b.candidate_id, _b.binary_sha),
)
"""Parts that are stored by digest, with the columns of the candidate's key and of the digest."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The number of things that were dropped, or would be. kept: candidates of the chosen runs that keep everything.

    sources, binaries: candidates that lose theirs; samples: timings that lose theirs. artefacts: stored texts and binaries
    that no candidate refers to any more. bytes: the size of these artefacts and of the samples.
    """

    runs: tuple[str, ...]
    kept: int
    sources: int
    binaries: int
    samples: int
    artefacts: int
    bytes: int


def chosen_runs(store: Store, names: Sequence[str], before: datetime | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the runs to prune (the named ones, or all last written to before a time), and of the runs among them
    that are left alone because they are being searched.

    Raises UnknownNameError, and StoreError for a named run that is being searched.
    """
    with store.reading() as connection:
        r = m.Run
        keys = [resolve_run(connection, name) for name in names]
        query = select(r.name, r.status).order_by(r.id)
        if names:
            query = query.where(r.id.in_(keys))
        if before is not None:
            query = query.where(r.updated < before)
        rows = connection.execute(query).all()
    busy = tuple(name for name, status in rows if status == RunStatus.RUNNING)
    if names and busy:
        raise StoreError(f"run {busy[0]!r} is being searched; prune it when it has ended")
    return tuple(name for name, status in rows if status != RunStatus.RUNNING), busy


def prune(store: Store, runs: Sequence[str], parts: Sequence[Part], *, dry: bool) -> Pruned:
    """Drops parts of runs. dry: only counts what would be dropped. Raises UnknownNameError."""
    wanted = frozenset(parts)
    kept = samples = size = 0
    lost: Counter[Part] = Counter()
    released: Counter[str] = Counter()
    changes: list[Update | Delete] = []
    with store.reading() if dry else store.transaction() as connection:
        if not dry:
            write_alone(connection)
            store.bases.forget()
        for name in runs:
            key = resolve_run(connection, name)
            status = connection.scalar(select(m.Run.status).where(m.Run.id == key))
            spared = _spared(key)
            kept += connection.scalar(select(func.count()).select_from(spared.subquery())) or 0
            unspared = select(_c.id).where(_c.id.between(*key_range(key)), _c.id.not_in(spared))
            for part, owner, digest in _STORED:
                if part in wanted or Part.FAILED in wanted:
                    losers = unspared if part in wanted else unspared.where(_c.status.not_in(PASSED))
                    where = and_(owner.in_(losers), digest.is_not(None))
                    digests = connection.scalars(select(digest).where(where)).all()
                    released.update(digests)
                    lost[part] += len(digests)
                    changes.append(update(digest.class_).where(where).values({digest.key: None}))
            if Part.SAMPLES in wanted and status != RunStatus.INTERRUPTED:
                length = func.length(cast(_t.samples_us, Text))
                where = and_(_t.run_id == key, _t.round == 0, _t.candidate_id.not_in(spared), length > len("[]"))
                number, letters = connection.execute(select(func.count(), func.sum(length)).where(where)).one()
                samples, size = samples + number, size + int(letters or 0)
                changes.append(update(_t).where(where).values(samples_us=[]))
        unneeded, stored = _unneeded(connection, released)
        changes += [delete(_a).where(_a.sha256.in_(some)) for some in at_once(unneeded)]
        for change in changes if not dry else ():
            connection.execute(change)
    return Pruned(
        runs=tuple(runs),
        kept=kept,
        sources=lost[Part.SOURCES],
        binaries=lost[Part.BINARIES],
        samples=samples,
        artefacts=len(unneeded),
        bytes=size + stored,
    )


def _spared(run_id: int) -> Select[int]:
    """Keys of the candidates of a run that lose nothing."""
    first, last = key_range(run_id)
    leaders = select(leader_key()).where(m.Task.run_id == run_id)
    raced = select(m.Final.candidate_id).where(m.Final.candidate_id.between(first, last))
    line = select(_c.id).where(_c.id.between(first, last), or_(_c.id.in_(leaders), _c.id.in_(raced)))
    parents = select(_p.child_id.label("id"), _p.parent_id.label("needs")).where(_p.child_id.between(first, last))
    originals = select(_c.id, _c.same_code_as_id).where(_c.id.between(first, last), _c.same_code_as_id.is_not(None))
    needed = parents.union_all(originals).subquery("needed")
    spared = line.cte("spared", recursive=True)
    spared = spared.union(select(needed.c.needs).join_from(needed, spared, needed.c.id == spared.c.id))
    return select(spared.c.id)


def _unneeded(connection: Connection, released: Counter[str]) -> tuple[list[str], int]:
    """Digests and total bytes of the artefacts that only candidates which lose them refer to, and that no remaining artefact
    is packed against. released: the number of candidates that lose an artefact, by its digest."""
    packed = select(_a.base_sha, func.count()).where(_a.base_sha.is_not(None)).group_by(_a.base_sha)
    based = {digest: int(n) for digest, n in connection.execute(packed)} if released else {}
    gone: dict[str, int] = {}
    asked = set(released)
    while asked:
        bases: Counter[str] = Counter()
        for some in at_once(sorted(asked)):
            known = Counter({digest: based.get(digest, 0) for digest in some})
            for _, _, column in _STORED:
                counted = connection.execute(select(column, func.count()).where(column.in_(some)).group_by(column))
                known.update({digest: n for digest, n in counted if digest})
            free = [digest for digest in some if known[digest] == released[digest]]
            stored = select(_a.sha256, _a.base_sha, func.length(_a.data)).where(_a.sha256.in_(free))
            for digest, base, size in connection.execute(stored):
                gone[digest] = size
                if base is not None:
                    bases[base] += 1
        released.update(bases)
        asked = bases.keys() - gone.keys()
    return list(gone), sum(gone.values())
