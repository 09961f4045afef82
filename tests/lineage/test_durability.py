"""Killed, shut out, out of space: what was recorded stays, and nothing is there by half."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import samples as s
from sqlalchemy import Engine, event

from evo.analysis.runs import find_run, list_runs
from evo.errors import StoreError
from evo.lineage import RunStatus
from evo.lineage.store import Store

WRITER = """
path, size = sys.argv[1], int(sys.argv[2])
with Store.open(path, write=True) as store:
    try:
        run = store.run("killed")
    except Exception:
        run = s.new_run(store, "killed")
    order = len(store.evaluations(run))
    while True:
        with store.transaction():
            for order in range(order, order + size):
                parents = (order - 1, order // 2) if order > 1 else ()
                evaluation = s.same_code(order, order - 1) if order % 3 == 2 else s.passed(order)
                store.add(run, s.ref(order, *parents), evaluation, elapsed_s=float(order))
        order += 1
        print(order, flush=True)  # recorded up to here
"""


WHOLE = """
    SELECT count(*) FROM candidate c WHERE 1 = (SELECT count(*) FROM build b WHERE b.candidate_id = c.id)
    AND 1 = (SELECT count(*) FROM detail d WHERE d.candidate_id = c.id)
    AND 2 = (SELECT count(*) FROM timing t WHERE t.candidate_id = c.id)
    AND (2 = (SELECT count(*) FROM parentage p WHERE p.child_id = c.id) OR "order" < 2)
"""
"""Candidates of the writer that have all that belongs to them."""


@pytest.mark.parametrize("size", [1, 40])
def test_a_writer_killed_at_any_moment_leaves_whole_records_only(path: Path, size: int) -> None:
    rng = random.Random(size)
    recorded = 0
    for _ in range(2):
        with subprocess.Popen(s.program(WRITER, path, size), stdout=subprocess.PIPE, text=True) as writer:
            said = int(writer.stdout.readline())  # it writes by now
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(writer.pid, signal.SIGKILL)
            said = max([said, *map(int, writer.stdout.read().split())])
        with Store.open(path, write=False) as store:
            read = store.evaluations(store.run("killed"))
            assert s.rows(store, "PRAGMA integrity_check") == [("ok",)]
            assert s.rows(store, "PRAGMA foreign_key_check") == []
            assert s.rows(store, WHOLE) == [(len(read),)]
        assert [e.candidate.order for e in read] == list(range(len(read)))
        assert len(read) % size == 0
        assert said <= len(read) <= said + size  # at most the transaction that it could not tell of
        assert len(read) > recorded  # the next writer went on where this one ended
        recorded = len(read)
        assert read[0].evaluation == s.without_artefacts(s.passed(0))
    with Store.open(path, write=True) as store:
        assert store.run("killed").status is RunStatus.INTERRUPTED
        assert store.run("killed").stop_reason == "its process ended without saying why"


HOLDER = """
with Store.open(sys.argv[1], write=True) as store:
    run = s.new_run(store, "held")
    print("open", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to the database."""
    with s.running(HOLDER, path) as process:
        yield process


def test_a_reader_tells_a_run_whose_process_was_killed_from_one_that_is_being_searched(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    with Store.open(path, write=False) as reader:
        assert (find_run(reader, "held").status, find_run(reader, "held").stop_reason) == ("running", "")
        holder.kill()
        holder.wait()
        for found in (find_run(reader, "held"), list_runs(reader)[0]):
            assert (found.status, found.stop_reason) == ("interrupted", "its process ended without saying why")
        assert reader.run("held").status is RunStatus.RUNNING, "it is only read"
    path.with_name(path.name + ".lock").unlink()  # a copy that was taken elsewhere comes without it
    with Store.open(path, write=False) as reader:
        assert find_run(reader, "held").status == "interrupted"


def test_more_writers_are_refused_and_readers_are_not(path: Path, holder: subprocess.Popen[str]) -> None:
    link = path.with_name("link.db")  # a second name of the file is the same database
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(StoreError) as caught:
            Store.open(name, write=True)
        assert str(caught.value) == (
            f"another search (pid {holder.pid}) writes to this database ({path}); wait for it to end, or use --db FILE"
            " for a second one"
        )
    with Store.open(path, write=False) as first, Store.open(path, write=False) as second:
        assert first.run("held").name == second.run("latest").name == "held"
        assert first.run("held").status is RunStatus.RUNNING


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_store_that_was_closed_makes_way_although_a_worker_of_it_lives(path: Path) -> None:
    """Builders may be forked while the store is open, and outlive a killed search for a moment."""
    first = Store.open(path, write=True)
    with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        Store.open(path, write=True)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        first.close()
        first.close()
        Store.open(path, write=True).close()
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()


def test_a_reader_sees_one_state_while_a_writer_goes_on(store: Store, where: str) -> None:
    run = s.new_run(store)
    store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
    with Store.open(where, write=False) as reader:
        with reader.reading() as connection:
            count = "SELECT count(*) FROM candidate"
            assert connection.exec_driver_sql(count).scalar() == 1
            store.add(run, s.ref(1), s.passed(1), elapsed_s=0.0)
            assert connection.exec_driver_sql(count).scalar() == 1
        assert len(reader.evaluations(run)) == 2


def test_a_full_disk_costs_the_candidate_in_flight_only(path: Path) -> None:
    def limit(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA max_page_count = 80")  # SQLite then fails as it does when the disk takes no more

    event.listen(Engine, "connect", limit)
    number = 0
    try:
        with Store.open(path, write=True) as store:
            run = s.new_run(store, "large")
            with suppress(StoreError):
                for number in range(1000):
                    store.add(run, s.ref(number), s.passed(number), elapsed_s=number)
            with pytest.raises(StoreError, match="disk is full"):
                store.add(run, s.ref(number), s.passed(number), elapsed_s=number)
            assert [r.candidate.order for r in store.evaluations(run)] == list(range(number))
    finally:
        event.remove(Engine, "connect", limit)
    assert number > 3
    with Store.open(path, write=True) as store:  # and it goes on where there is room
        store.add(run, s.ref(number), s.passed(number), elapsed_s=number)
        assert len(store.evaluations(run)) == number + 1


def test_a_database_held_by_another_program_is_said_to_be(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evo.lineage import database

    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    with Store.open(path, write=True) as store:
        shell = sqlite3.connect(path, isolation_level=None)
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is being written by another program"):
            s.new_run(store)
        shell.execute("ROLLBACK")
        shell.close()
        s.new_run(store)
