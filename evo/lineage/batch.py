"""Rows on their way into the database: gathered for one or many candidates, inserted table by table."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from datetime import datetime

from sqlalchemy import Connection, Table, select, update

from evo.errors import EngineError
from evo.evaluation import Candidate, Evaluation
from evo.lineage import Stage, StoredRun
from evo.lineage import models as m
from evo.lineage.bulk import insert_new, insert_rows
from evo.lineage.columns import ORDERS_PER_RUN
from evo.lineage.lookups import at_once
from evo.lineage.rows import Row, build_row, candidate_row, check_rows, parentage_rows, timing_rows
from evo.lineage.server import write_alone, write_beside

__all__ = ["Batch"]

# Parents before children: the order in which rows satisfy the foreign keys.
_TABLES: tuple[Table, ...] = tuple(
    model.metadata.tables[model.__tablename__] for model in (m.Candidate, m.Parentage, m.Build, m.Check, m.Timing)
)
_CANDIDATE, _PARENTAGE, _BUILD, _CHECK, _TIMING = _TABLES
_ARTEFACT = m.Base.metadata.tables["artefact"]
_RUN = m.Base.metadata.tables["run"]

_COMPRESSION = 6


class Batch:
    """Candidates that are gathered, and inserted together by `flush`."""

    def __init__(self) -> None:
        self._rows: dict[Table, list[Row]] = defaultdict(list)
        self._artefacts: dict[str, tuple[str, bytes]] = {}
        self._progress: dict[int, tuple[float, datetime]] = {}
        self._runs: dict[int, StoredRun] = {}
        self._alone = False  # no other transaction stores artefacts until this one ends

    def __len__(self) -> int:
        """Candidates gathered."""
        return len(self._rows[_CANDIDATE])

    def add(
        self, run: StoredRun, ref: Candidate, evaluation: Evaluation, *, elapsed_s: float, now: datetime
    ) -> None:
        """Raises EngineError for a candidate that contradicts its run."""
        candidate = candidate_row(run, ref, evaluation, elapsed_s=elapsed_s, created=now)
        parentage = parentage_rows(run, ref)
        key = candidate["id"]
        if (build := evaluation.build) is not None:
            row = build_row(key, build)
            if build.source:
                candidate["source_sha"] = self._keep("source", build.source.encode("utf-8", "surrogatepass"))
            if build.binary is not None and build.binary.code:
                kind = "ptx" if build.arch.startswith("compute_") else "binary"
                row["binary_sha"] = self._keep(kind, build.binary.code)
            self._rows[_BUILD].append(row)
        self._rows[_CANDIDATE].append(candidate)
        self._rows[_PARENTAGE] += parentage
        self._rows[_CHECK] += check_rows(key, evaluation.checks, Stage.SEARCH, 0)
        self._rows[_TIMING] += timing_rows(run, ref.task, key, evaluation.timings, Stage.SEARCH, 0)
        self._progress[run.id] = (elapsed_s, now)
        self._runs[run.id] = run

    def _keep(self, kind: str, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        self._artefacts[digest] = (kind, content)
        return digest

    def flush(self, connection: Connection, *, last: bool = False) -> None:
        """Inserts everything and forgets it. What the tables refuse is an IntegrityError: see `explain`.

        last: the transaction ends with this.
        """
        if not self._rows[_CANDIDATE]:
            return
        if self._artefacts and not self._alone:
            self._alone = not last
            (write_beside if last else write_alone)(connection)
        self._insert_artefacts(connection)
        for table in _TABLES:
            insert_rows(connection, table, self._rows[table])
        for run_id, (elapsed_s, now) in self._progress.items():
            connection.execute(update(_RUN).where(_RUN.c.id == run_id), {"elapsed_s": elapsed_s, "updated": now})
        self._rows.clear()
        self._artefacts.clear()
        self._progress.clear()

    def explain(self, connection: Connection) -> None:
        """Raises the EngineError that says which candidate was refused and why, if that can be seen.

        To be asked after the transaction was rolled back, on another one.
        """
        gathered: set[int] = set()
        for row in self._rows[_CANDIDATE]:
            key, name = row["id"], f"candidate {row['order']} of run {self._runs[row['run_id']].name!r}"
            if key in gathered or self._exists(connection, key):
                raise EngineError(f"{name} is recorded already; a candidate is recorded once")
            gathered.add(key)
            needed = [p["parent_id"] for p in self._rows[_PARENTAGE] if p["child_id"] == key]
            needed += [row["same_code_as_id"]] if row["same_code_as_id"] is not None else []
            for other in needed:
                if other not in gathered and not self._exists(connection, other):
                    raise EngineError(
                        f"{name} refers to candidate {other % ORDERS_PER_RUN}, which is not recorded; record it first"
                    )

    @staticmethod
    def _exists(connection: Connection, key: int) -> bool:
        return connection.scalar(select(_CANDIDATE.c.id).where(_CANDIDATE.c.id == key)) is not None

    def _insert_artefacts(self, connection: Connection) -> None:
        known: set[str] = set()
        digests = sorted(self._artefacts)
        for some in at_once(digests):
            known.update(connection.scalars(select(_ARTEFACT.c.sha256).where(_ARTEFACT.c.sha256.in_(some))))
        rows = [
            {
                "sha256": digest,
                "kind": kind,
                "size": len(content),
                "data": zlib.compress(content, _COMPRESSION),
            }
            for digest in digests
            if digest not in known
            for kind, content in (self._artefacts[digest],)
        ]
        if rows:  # another writer to the same server may have stored one since the look-up
            insert_new(connection, _ARTEFACT, rows)
