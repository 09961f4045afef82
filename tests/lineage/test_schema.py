"""A new database is made from the models; one of an older schema is brought up to date, and backed up before."""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import samples as s
from sqlalchemy import event, inspect, text

from evo.analysis.candidates import CandidateRecord, read_candidate, read_source
from evo.errors import StoreError
from evo.evaluation import Evaluation, Status
from evo.lineage import StoredEvaluation
from evo.lineage.database import newest_backup
from evo.lineage.models import Base, candidate_key
from evo.lineage.schema import MIGRATIONS
from evo.lineage.store import Store


def test_a_database_whose_making_is_cut_off_is_empty(path: Path) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    event.listen(Base.metadata, "after_create", fail)  # when all tables have been made
    try:
        with pytest.raises(KeyboardInterrupt):
            Store.open(path, write=True)
    finally:
        event.remove(Base.metadata, "after_create", fail)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    with Store.open(path, write=True) as store:
        s.new_run(store)


def test_an_older_schema_is_refused_to_read_and_upgraded_to_write(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(where, write=True) as store:
        run = s.filled(store, "old")
        store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=0.0)
        before = store.evaluations(run)
    notes = ("ALTER TABLE candidate ADD COLUMN note TEXT DEFAULT 'x'", "ALTER TABLE run ADD COLUMN note TEXT")
    monkeypatch.setitem(MIGRATIONS, "0004", ("ALTER TABLE candidate RENAME COLUMN log TO said",))
    monkeypatch.setitem(MIGRATIONS, "0005", ("ALTER TABLE candidate RENAME COLUMN said TO log", *notes))
    with pytest.raises(StoreError, match="of an older evo"):
        Store.open(where, write=False)
    for _ in range(2):
        with Store.open(where, write=True) as store:
            run = store.run("old")
            assert store.evaluations(run)[:2] == before
            store.add(run, s.ref(len(store.evaluations(run)), 1), s.passed(2), elapsed_s=0.0)
    with Store.open(where, write=False) as store, store.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*), max(note) FROM candidate").one() == (4, "x")
        assert connection.exec_driver_sql("SELECT count(*) FROM v_lineage").scalar() == 4
    monkeypatch.undo()
    if "://" not in where:
        backup = newest_backup(Path(where))
        with Store.open(backup, write=False) as store:
            assert store.evaluations(store.run("old")) == before


OF_THE_FIRST = (
    'CREATE TABLE "check" (candidate_id BIGINT, round INTEGER, position INTEGER, stage TEXT, "case" TEXT, passed BOOLEAN,'
    " error DOUBLE PRECISION, allowed DOUBLE PRECISION, torch_error DOUBLE PRECISION, reason TEXT, seed BIGINT)",
    "ALTER TABLE build ADD COLUMN log TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE build ADD COLUMN binary_log TEXT",
    "ALTER TABLE candidate ADD COLUMN genome_digest VARCHAR(64) NOT NULL DEFAULT ''",
    "ALTER TABLE artefact DROP COLUMN base_sha",
    "DROP TABLE detail",
    "UPDATE alembic_version SET version_num = '0001'",
)
"""What makes a database of the last schema one of 0001, without what was in it."""


def everything(store: Store) -> tuple[list[StoredEvaluation], list[CandidateRecord], list[str]]:
    found = store.evaluations(store.run("old"))
    records = [read_candidate(store, e.public_id) for e in found]
    return found, records, [read_source(store, record.id) for record in records if record.source]


def of_that_time(evaluation: Evaluation) -> Evaluation:
    """An evaluation whose build has nothing of its launch, which no build had."""
    if (build := evaluation.build) is None or build.binary is None:
        return evaluation
    return replace(evaluation, build=replace(build, binary=replace(build.binary, launch={})))


def test_what_the_first_schema_had_in_a_table_of_checks_and_in_builds_is_packed(where: str, tmp_path: Path) -> None:
    with Store.open(where, write=True) as store:
        run = s.new_run(store, "old")
        given = [s.passed(0), s.refused(1), s.not_compiled(2), s.failed(Status.CRASH), s.same_code(4, 0), s.passed(5, 0.4)]
        given = [of_that_time(evaluation) for evaluation in given]
        for order, evaluation in enumerate(given):
            store.add(run, s.ref(order, *range(min(order, 1))), evaluation, elapsed_s=1.0)
        store.add_final(run, 5, s.final(0.4), elapsed_s=2.0)
        before = everything(store)
        with store.transaction() as connection:
            for statement in OF_THE_FIRST:
                connection.exec_driver_sql(statement)
            for record, evaluation in zip(before[1], given, strict=True):
                key = candidate_key(run.id, record.order)
                for position, check in enumerate(record.checks):
                    names = ":key, :round, :position, :stage, :case, :passed, :error, :allowed, :torch_error, :reason, :seed"
                    row = {"key": key, "position": position, **vars(check)}
                    connection.execute(text(f'INSERT INTO "check" VALUES ({names})'), row)
                if record.build and evaluation.build:
                    row = {"key": key, "log": record.build.log, "remarks": record.build.remarks or None}
                    update = "UPDATE build SET log = :log, binary_log = :remarks WHERE candidate_id = :key"
                    connection.execute(text(update), row)
                    row = {"sha256": record.source, "data": zlib.compress(evaluation.build.source.encode())}
                    connection.execute(text("UPDATE artefact SET data = :data WHERE sha256 = :sha256"), row)
    assert "of an older evo" in s.refusal(where, write=False)
    with Store.open(where, write=True) as store, Store.open(tmp_path / "new.db", write=True) as new:
        assert everything(store) == before
        with store.reading() as old, new.reading() as fresh:
            tables = sorted(inspect(fresh).get_table_names())
            assert sorted(inspect(old).get_table_names()) == tables
            for table in tables:
                columns = [{c["name"]: c["nullable"] for c in inspect(c).get_columns(table)} for c in (old, fresh)]
                assert columns[0] == columns[1]
        store.add(run, s.ref(6), s.passed(6), elapsed_s=3.0)
        assert s.rows(store, "SELECT count(*), count(base_id) > 0 FROM detail") == [(7, True)]
