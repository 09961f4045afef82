"""Making a salvaged database hold together: what refers to lost rows is left out, or told apart from what is known."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from evo.lineage.columns import PASSED_VALUES
from evo.lineage.losses import LOST, Losses
from evo.lineage.tally import ELSEWHERE, count_losses, note_losses

__all__ = ["Mended", "mend"]


@dataclass(frozen=True, kw_only=True)
class Mended:
    """Rows left out and rows standing in for lost ones, by table; what runs have lost, by name."""

    left_out: dict[str, int] = field(default_factory=dict)
    stand_ins: dict[str, int] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)


def mend(raw: sqlite3.Connection, unreadable: Collection[str] | None = None) -> Mended:
    """Makes the rest hold together, and notes with each run what it lacks. For a database with the newest schema.

    unreadable: tables of which parts could not be read; None if nobody knows.
    """
    tally = count_losses(raw, unreadable)
    left_out, stand_ins = _drop_orphans(raw), _stand_in(raw)
    return Mended(left_out=left_out, stand_ins=stand_ins, losses=note_losses(raw, tally))


def _drop_orphans(raw: sqlite3.Connection) -> dict[str, int]:
    """Takes away what refers to rows that are lost, until the rest holds together.

    A reference that a row can be without, such as a source's, is dropped instead.
    """
    left_out = _drop_strays(raw)
    while broken := raw.execute('SELECT DISTINCT "table", fkid FROM pragma_foreign_key_check').fetchall():
        for table, number in broken:
            links = [row for row in raw.execute(f'PRAGMA foreign_key_list("{table}")') if row[0] == number]
            required = {row[1]: row[3] for row in raw.execute(f'PRAGMA table_info("{table}")')}
            lost = _missing(table, links)
            if len(links) == 1 and not required[links[0][3]] and table != "timing":
                raw.execute(f'UPDATE "{table}" SET "{links[0][3]}" = NULL WHERE {lost}')
            else:
                deleted = raw.execute(f'DELETE FROM "{table}" WHERE {lost}').rowcount
                left_out[table] = left_out.get(table, 0) + deleted
    return left_out


def _drop_strays(raw: sqlite3.Connection) -> dict[str, int]:
    """Takes away what refers to candidates of other runs."""
    left_out: dict[str, int] = {}
    for (table, column), elsewhere in ELSEWHERE.items():
        if table != "parentage":
            raw.execute(f'UPDATE "{table}" AS t SET "{column}" = NULL WHERE {elsewhere}')
        elif deleted := raw.execute(f'DELETE FROM "{table}" AS t WHERE {elsewhere}').rowcount:
            left_out[table] = deleted
    return left_out


def _missing(table: str, links: Sequence[Sequence[Any]]) -> str:
    """The condition that a row breaks a foreign key, of which `links` has the columns."""
    parent = links[0][2]
    match = " AND ".join(f'p."{row[4]}" = "{table}"."{row[3]}"' for row in links)
    present = " AND ".join(f'"{table}"."{row[3]}" IS NOT NULL' for row in links)
    return f'{present} AND NOT EXISTS (SELECT 1 FROM "{parent}" p WHERE {match})'


def _stand_in(raw: sqlite3.Connection) -> dict[str, int]:
    """A candidate that passed has a build and checks: where they are lost, its own row still says that it passed."""
    builds = raw.execute(
        "INSERT INTO build (candidate_id, arch, compiler, status, seconds, cached, log, source_digest, code_hash)"
        " SELECT c.id, r.arch, '', 'ok', 0, 0, ?, '', '' FROM candidate c JOIN run r ON r.id = c.run_id"
        f" WHERE c.status IN ({PASSED_VALUES}) AND NOT EXISTS (SELECT 1 FROM build b WHERE b.candidate_id = c.id)",
        (LOST,),
    ).rowcount
    checks = raw.execute(
        'INSERT INTO "check" (candidate_id, round, position, stage, "case", passed, reason, seed)'
        f" SELECT c.id, 0, 0, 'search', ?, 1, '', 0 FROM candidate c WHERE c.status IN ({PASSED_VALUES})"
        " AND EXISTS (SELECT 1 FROM timing t WHERE t.run_id = c.run_id AND t.candidate_id = c.id AND t.round = 0)"
        ' AND NOT EXISTS (SELECT 1 FROM "check" k WHERE k.candidate_id = c.id AND k.round = 0)',
        (LOST,),
    ).rowcount
    raw.execute(
        "UPDATE candidate SET status = 'ok', log = 'the candidate whose code it shares was ' || ?"
        " WHERE status = 'same_code' AND same_code_as_id IS NULL",
        (LOST,),
    )
    return {table: n for table, n in (("build", builds), ("check", checks)) if n}
