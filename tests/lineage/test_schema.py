"""A new database is made from the models; one of an older schema is brought up to date, and backed up before."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import samples as s
from sqlalchemy import event

from evo.errors import StoreError
from evo.lineage.database import newest_backup
from evo.lineage.models import Base
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
        run = s.new_run(store, "old")
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=0.0)
        before = store.evaluations(run)
    notes = ("ALTER TABLE candidate ADD COLUMN note TEXT DEFAULT 'x'", "ALTER TABLE run ADD COLUMN note TEXT")
    monkeypatch.setitem(MIGRATIONS, "0002", ("ALTER TABLE candidate RENAME COLUMN log TO said",))
    monkeypatch.setitem(MIGRATIONS, "0003", ("ALTER TABLE candidate RENAME COLUMN said TO log", *notes))
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
