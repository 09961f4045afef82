"""What a damaged file cost each of its runs: counted in what was saved of it, before that is made to hold together.

A row that is lost is known from those that refer to it. Where these are lost too nobody can tell, and that is said.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from evo.lineage.columns import ORDERS_PER_RUN, PASSED_VALUES
from evo.lineage.losses import SALVAGED, WORDS, Losses, Orphans, kept_losses, read_losses, read_orphans, read_standing

__all__ = ["ELSEWHERE", "Tally", "count_losses", "note_losses"]

_RUN = f"/ {ORDERS_PER_RUN}"  # a candidate's key by this is the number of its run
_TOLD_BY = {"final": "timing", "artefact": "build", "task": "candidate", "run": "task", "parentage": ""}
"""What is left of the second tells of every row of the first that is lost."""
_REFERENCES = (
    ("build", "candidate_id"), ("check", "candidate_id"), ("timing", "candidate_id"), ("final", "candidate_id"),
    ("parentage", "child_id"), ("parentage", "parent_id"), ("candidate", "same_code_as_id"), ("task", "winner_id"),
)  # fmt: skip
_STRANGE_WINNER = f"(t.winner_id {_RUN} <> t.run_id)"
_APART = f"(t.child_id {_RUN} <> t.parent_id {_RUN})"
ELSEWHERE = {
    ("parentage", "child_id"): _APART,
    ("parentage", "parent_id"): _APART,
    ("candidate", "same_code_as_id"): f"(t.same_code_as_id {_RUN} <> t.run_id)",
    ("task", "winner_id"): _STRANGE_WINNER,
}
"""Conditions of a reference to a candidate of another run, by table and column: no search makes such, a bad byte does."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """losses: by key of the runs that remain. orphans: keys of candidates that lost parents and were not known to."""

    losses: dict[int, Losses]
    orphans: frozenset[int]


def count_losses(raw: sqlite3.Connection, unreadable: Collection[str] | None) -> Tally:
    """unreadable: tables of which parts could not be read; None if nobody knows. For a database with the newest schema,
    in a transaction."""
    damaged = set(WORDS if unreadable is None else unreadable)
    _find_lost(raw)
    remaining = [key for (key,) in raw.execute("SELECT r.id FROM run r JOIN environment e ON e.id = r.environment_id")]
    options = {key: _read(text) for key, text in raw.execute("SELECT id, options FROM run")}
    orphans = _orphans(raw, options, everywhere="parentage" in damaged)
    counts = {
        "winners": _by_run(raw, f"SELECT run_id, winner_id FROM task t WHERE winner_id IN lost OR {_STRANGE_WINNER}"),
        "finals": _by_run(raw, _FINALS + (_WINNERS_WITHOUT if "final" in damaged else "")),
        "candidates": _by_run(raw, f"SELECT id {_RUN}, id FROM lost"),
        "parents": Counter(key // ORDERS_PER_RUN for key in orphans),
        "builds": _by_run(raw, _WITHOUT_BUILD) if "build" in damaged else {},
        "checks": _by_run(raw, _WITHOUT_CHECKS) if "check" in damaged else {},
        "times": _by_run(raw, _WITHOUT_TIMES) if "timing" in damaged else {},
        "artefacts": _by_run(raw, _ARTEFACTS),
        "workloads": _by_run(raw, _WORKLOADS),
    }
    named = f"SELECT run_id FROM task UNION SELECT id {_RUN} FROM lost UNION SELECT id FROM run"
    runs, more = {key for (key,) in raw.execute(named) if isinstance(key, int)}, _more(damaged)
    unsure = {key for (key,) in raw.execute(_WITHOUT_LINEAGE)} if "parentage" in damaged else set()
    found = {
        key: Losses(
            **_new(counts, key, read_standing(options.get(key, {}))), runs=len(runs - set(remaining)),
            more=(*more, *([WORDS["parentage"]] if key in unsure else ())),
        )
        for key in remaining
    }
    raw.execute("DROP TABLE temp.lost")
    return Tally(losses={key: losses for key, losses in found.items() if losses}, orphans=frozenset(orphans))


def _new(counts: Mapping[str, Mapping[int, int]], run: int, standing: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, by_run.get(run, 0) - standing.get(name, 0)) for name, by_run in counts.items()}


def _standing(raw: sqlite3.Connection) -> dict[int, dict[str, int]]:
    """What a later salvage of the mended database would find lost again, by run."""
    queries = {"finals": _FINALS + _WINNERS_WITHOUT, "checks": _WITHOUT_CHECKS, "times": _WITHOUT_TIMES}
    raw.execute("CREATE TEMP TABLE lost (id INTEGER PRIMARY KEY)")  # nothing refers to lost candidates any more
    found: dict[int, dict[str, int]] = {}
    for name, query in queries.items():
        for run, number in _by_run(raw, query).items():
            found.setdefault(run, {})[name] = number
    raw.execute("DROP TABLE temp.lost")
    return found


def note_losses(raw: sqlite3.Connection, tally: Tally) -> dict[str, Losses]:
    """Keeps them with the runs, beside what these had lost before; all of it by the runs' names."""
    noted, standing = {}, _standing(raw)
    for key, lost in tally.losses.items():
        name, text = raw.execute("SELECT name, options FROM run WHERE id = ?", (key,)).fetchone()
        options = _read(text)
        noted[name] = total = (read_losses(options) or Losses()) + lost
        options[SALVAGED] = kept_losses(total, _all_orphans(raw, key, options, tally.orphans), standing.get(key, {}))
        raw.execute("UPDATE run SET options = ? WHERE id = ?", (json.dumps(options, separators=(",", ":")), key))
    return noted


def _all_orphans(raw: sqlite3.Connection, run: int, options: Mapping[str, Any], found: Collection[int]) -> Orphans:
    """Those of a run that are still there: found now, or by a salvage before."""
    first, known = run * ORDERS_PER_RUN, read_orphans(options)
    if not known.stretches and not any(key // ORDERS_PER_RUN == run for key in found):
        return known
    keys = [key for (key,) in raw.execute("SELECT id FROM candidate WHERE run_id = ? ORDER BY id", (run,))]
    return Orphans.among(
        (key - first for key in keys), {key - first for key in keys if key in found or key - first in known}
    )


def _read(text: str) -> dict[str, Any]:
    """A run's options; none where what stands there is none: then the run can be read at least."""
    try:
        options = json.loads(text)
    except (ValueError, TypeError):
        return {}
    return options if isinstance(options, dict) else {}


def _find_lost(raw: sqlite3.Connection) -> None:
    """Keys of candidates that something refers to and that are not there, or cannot stay without their workload."""
    raw.execute("CREATE TEMP TABLE lost (id INTEGER PRIMARY KEY)")
    for table, column in _REFERENCES:
        within = f" AND NOT {elsewhere}" if (elsewhere := ELSEWHERE.get((table, column))) else ""
        raw.execute(
            f'INSERT OR IGNORE INTO lost SELECT DISTINCT t."{column}" FROM "{table}" t'
            f""" WHERE typeof(t."{column}") = 'integer'{within}"""
            f' AND NOT EXISTS (SELECT 1 FROM candidate c WHERE c.id = t."{column}")'
        )
    raw.execute(
        "INSERT OR IGNORE INTO lost SELECT c.id FROM candidate c WHERE NOT EXISTS"
        " (SELECT 1 FROM task i WHERE i.run_id = c.run_id AND i.number = c.task)"
    )


def _by_run(raw: sqlite3.Connection, query: str) -> dict[int, int]:
    """How many there are, of what the query gives with the run that it is of, each once."""
    return Counter(run for run, *_ in set(raw.execute(query)))


_FINALS = (
    f"SELECT candidate_id {_RUN}, candidate_id, round FROM final WHERE candidate_id IN lost"
    + "".join(
        f' UNION SELECT t.candidate_id {_RUN}, t.candidate_id, t.round FROM "{table}" t WHERE t.round > 0'
        " AND t.candidate_id IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM final f WHERE f.candidate_id = t.candidate_id AND f.round = t.round)"
        for table in ("check", "timing")
    )
)
_WINNERS_WITHOUT = (  # a winner has won a final
    " UNION SELECT i.run_id, i.winner_id, 1 FROM task i WHERE i.winner_id IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM final f WHERE f.candidate_id = i.winner_id)"
    " AND NOT EXISTS (SELECT 1 FROM timing t WHERE t.run_id = i.run_id AND t.candidate_id = i.winner_id AND t.round > 0)"
)
_WITHOUT_BUILD = (
    f"SELECT run_id, id FROM candidate c WHERE c.status IN ({PASSED_VALUES}) AND c.id NOT IN lost"
    " AND NOT EXISTS (SELECT 1 FROM build b WHERE b.candidate_id = c.id)"
)
_SCORED = "c.score IS NOT NULL AND c.status <> 'same_code' AND c.id NOT IN lost"
_WITHOUT_CHECKS = (
    f"SELECT run_id, id FROM candidate c WHERE {_SCORED}"
    ' AND NOT EXISTS (SELECT 1 FROM "check" k WHERE k.candidate_id = c.id AND k.round = 0)'
)
_WITHOUT_TIMES = (
    f"SELECT run_id, id FROM candidate c WHERE {_SCORED}"
    " AND NOT EXISTS (SELECT 1 FROM timing t WHERE t.run_id = c.run_id AND t.candidate_id = c.id AND t.round = 0)"
    " UNION SELECT c.run_id, c.id FROM final f JOIN candidate c ON c.id = f.candidate_id WHERE f.status = 'ok'"
    " AND NOT EXISTS (SELECT 1 FROM timing t WHERE t.run_id = c.run_id AND t.candidate_id = c.id AND t.round = f.round)"
)
_ARTEFACTS = (
    "SELECT c.run_id, c.source_sha FROM candidate c WHERE c.source_sha IS NOT NULL AND c.id NOT IN lost"
    " AND NOT EXISTS (SELECT 1 FROM artefact a WHERE a.sha256 = c.source_sha)"
    f" UNION SELECT b.candidate_id {_RUN}, b.binary_sha FROM build b WHERE b.binary_sha IS NOT NULL"
    " AND b.candidate_id NOT IN lost AND NOT EXISTS (SELECT 1 FROM artefact a WHERE a.sha256 = b.binary_sha)"
)
_WORKLOADS = (
    "SELECT c.run_id, c.task FROM candidate c WHERE NOT EXISTS"
    " (SELECT 1 FROM task i WHERE i.run_id = c.run_id AND i.number = c.task)"
    " UNION SELECT t.run_id, t.task FROM timing t WHERE NOT EXISTS"
    " (SELECT 1 FROM task i WHERE i.run_id = t.run_id AND i.number = t.task)"
)


_WITHOUT_LINEAGE = (  # runs of which nothing is left that tells which operators make candidates from parents
    "SELECT DISTINCT run_id FROM candidate WHERE (run_id, task) NOT IN"
    " (SELECT DISTINCT o.run_id, o.task FROM parentage p JOIN candidate o ON o.id = p.child_id)"
)


def _orphans(raw: sqlite3.Connection, options: Mapping[int, Mapping[str, Any]], *, everywhere: bool) -> set[int]:
    """Keys of candidates that lost parents, but for those that are known to. everywhere: also those whose very references
    are lost, told by their operator, which made others from parents in that run, for that workload."""
    orphans = set(
        raw.execute(
            "SELECT c.id FROM parentage t JOIN candidate c ON c.id = t.child_id"
            f" WHERE (t.parent_id IN lost OR {_APART}) AND c.id NOT IN lost"
        )
    )
    if everywhere:
        orphans |= set(
            raw.execute(
                "SELECT c.id FROM candidate c WHERE c.id NOT IN lost"
                " AND NOT EXISTS (SELECT 1 FROM parentage p WHERE p.child_id = c.id)"
                " AND (c.run_id, c.task, c.operator) IN (SELECT DISTINCT o.run_id, o.task, o.operator"
                "  FROM parentage p JOIN candidate o ON o.id = p.child_id)"
            )
        )
    known = {key: read_orphans(kept) for key, kept in options.items()}
    return {key for (key,) in orphans if key % ORDERS_PER_RUN not in known.get(key // ORDERS_PER_RUN, Orphans())}


def _more(damaged: Collection[str]) -> tuple[str, ...]:
    """Of what more may be lost than what is left can tell; but for parents."""
    unsure = [
        table
        for table in WORDS
        if table in damaged and (table not in _TOLD_BY or _TOLD_BY[table] in damaged)
    ]
    return tuple(WORDS[table] for table in unsure)
