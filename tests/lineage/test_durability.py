"""Killed, shut out, out of space: what was recorded stays, and nothing is there by half."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import samples as s
from sqlalchemy import Engine, event

from evo.analysis.runs import find_run, list_runs
from evo.errors import EngineError, StoreError
from evo.lineage import RunStatus, database, liveness
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
    run = s.filled(store)
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


def _moved(path: Path, other: Path) -> None:
    path.rename(path.with_name("moved.db"))


LOSSES: dict[str, Callable[[Path, Path], object]] = {
    "was deleted or moved": lambda path, other: path.unlink(),
    "was deleted or moved ": _moved,
    "was deleted or moved  ": lambda path, other: shutil.rmtree(path.parent),
    "was replaced by another file": lambda path, other: Path(shutil.copy(other, path.with_name("copy"))).rename(path),
    "was overwritten by another program": lambda path, other: path.write_bytes(other.read_bytes()),
    "was overwritten by another program ": lambda path, other: os.truncate(path, 0),
}


@pytest.mark.parametrize("log_is_lost_before", [False, True])
@pytest.mark.parametrize("fault", LOSSES)
def test_a_file_that_is_lost_under_its_writer_is_saved_elsewhere_and_no_other_file_is_written_to(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, log_is_lost_before: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    other = tmp_path / "other.db"
    with Store.open(other, write=True) as theirs:
        s.new_run(theirs, "theirs")
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "mine")
        for order in range(30):
            store.add(run, s.ref(order), s.passed(order), elapsed_s=order)
        if log_is_lost_before:
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink()
            store.check()
        LOSSES[fault](path, other)
        there = path.read_bytes() if path.exists() else None
        with pytest.raises(StoreError) as raised:
            store.add(run, s.ref(30), s.passed(30), elapsed_s=30.0)
        (saved,) = tmp_path.rglob("lineage.recovered-*.db")
        assert str(raised.value) == (
            f"the database {path} {fault.strip()} while it was written to; all that was recorded is in {saved}, go on with:"
            f" evo resume mine --db {saved}"
        )
        store.set_status(run, RunStatus.INTERRUPTED, elapsed_s=30.0)  # as a search does that ends
    assert (path.read_bytes() if path.exists() else None) == there
    assert not path.with_name(path.name + "-wal").exists(), "it would be taken for the other file's"
    with Store.open(saved, write=False) as store:
        found = store.run("mine")
        assert found.status is RunStatus.INTERRUPTED
        assert [e.candidate.order for e in store.evaluations(found)] == list(range(31))
        assert s.rows(store, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("fault", [fault for fault in LOSSES if "deleted" in fault])
def test_a_file_that_is_lost_while_its_lost_log_is_made_anew_is_saved(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    connect = sqlite3.connect

    def lose_first(*words: Any, **options: Any) -> sqlite3.Connection:
        monkeypatch.setattr(sqlite3, "connect", connect)
        LOSSES[fault](path, path)
        return connect(*words, **options)

    with Store.open(path, write=True) as store:
        run = s.filled(store, "mine")
        path.with_name(path.name + "-wal").unlink()
        monkeypatch.setattr(sqlite3, "connect", lose_first)
        with pytest.raises(StoreError, match=r"was deleted or moved .* all that was recorded is in "):
            store.add(run, s.ref(1), s.passed(1), elapsed_s=1.0)
    assert not path.exists()
    (saved,) = tmp_path.rglob("lineage.recovered-*.db")
    with Store.open(saved, write=False) as store:
        assert [e.candidate.order for e in store.evaluations(store.run("mine"))] == [0, 1]


def test_a_file_that_is_overwritten_while_a_transaction_is_open_is_not_taken_for_its_own(path: Path) -> None:
    with Store.open(other := path.with_name("other.db"), write=True) as theirs:
        s.new_run(theirs, "theirs")
    with Store.open(path, write=True) as store:
        run = s.filled(store, "mine")
        with store.transaction():
            path.write_bytes(there := other.read_bytes())
            store.set_budget(run, {"seconds": 9.0})
        with pytest.raises(StoreError, match=r"was overwritten by another program .* all that was recorded is in "):
            store.add(run, s.ref(1), s.passed(1), elapsed_s=1.0)
    assert path.read_bytes() == there


def test_a_file_that_can_be_saved_nowhere_is_not_written_to_any_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    with Store.open(other := path.with_name("other.db"), write=True) as theirs:
        s.new_run(theirs, "theirs")
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "mine")
        there = other.read_bytes()
        other.rename(path)
        monkeypatch.setattr(database, "_copy", lambda source, path, out: Path("/none/at/all").touch())
        monkeypatch.setattr(Path, "home", nowhere)
        with pytest.raises(StoreError, match=r"was replaced by another file .* can be read or saved nowhere$"):
            store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        with pytest.raises(EngineError, match="was opened for reading only"):
            store.set_status(run, RunStatus.INTERRUPTED, elapsed_s=0.0)
    assert path.read_bytes() == there


def test_a_lock_that_another_has_taken_meanwhile_is_asked_for_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PAUSE_S", 0.0)
    lock = liveness.WriterLock(path)
    path.with_name(path.name + ".lock").unlink()
    other = liveness.WriterLock(path)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"another search .* writes to this database"):
            lock.renew()
    other.release()
    lock.renew()
    lock.release()


def test_a_file_that_is_made_read_only_is_not_written_to_any_more(path: Path) -> None:
    with Store.open(path, write=True) as store:
        run = s.filled(store, "mine")
        path.chmod(0o444)
        with pytest.raises(StoreError, match=rf"was made read-only .*; all that was recorded is in it: chmod u\+w {path}"):
            store.add(run, s.ref(1), s.passed(1), elapsed_s=1.0)
    path.chmod(0o644)
    with Store.open(path, write=True) as store:
        assert [e.candidate.order for e in store.evaluations(store.run("mine"))] == [0]


@pytest.mark.parametrize("name", ["-wal", "-shm", ".lock"])
def test_a_file_beside_the_database_that_is_deleted_costs_nothing(path: Path, name: str) -> None:
    with Store.open(path, write=True) as store:
        run = s.filled(store, "mine")
        path.with_name(path.name + name).unlink()
        store.check()
        store.add(run, s.ref(1), s.passed(1), elapsed_s=1.0)
        with subprocess.Popen(s.program(READER, path), stdout=subprocess.PIPE, text=True) as reader:
            assert reader.communicate()[0].split() == ["2", "refused"]


READER = """
with Store.open(sys.argv[1], write=False) as store:
    print(len(store.evaluations(store.run("mine"))))
try:
    Store.open(sys.argv[1], write=True)
except Exception:
    print("refused")
"""


def test_a_file_that_others_touch_or_write_to_is_still_the_same(path: Path) -> None:
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "mine")
        os.utime(path)
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        with closing(sqlite3.connect(path, isolation_level=None)) as shell:
            shell.execute("CREATE TABLE notes (text)")
            shell.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.add(run, s.ref(1), s.passed(1), elapsed_s=1.0)
        assert len(store.evaluations(run)) == 2


def test_the_last_connection_of_another_program_leaves_the_log_of_a_writer_alone(path: Path) -> None:
    ask = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM candidate').fetchone()"
    with Store.open(path, write=True) as store:
        run = s.filled(store, "mine")
        store.vacuum()  # moves the log's records into the file, as SQLite does by itself when the log is long
        for order in (1, 2):
            store.add(run, s.ref(order), s.passed(order), elapsed_s=1.0)
            subprocess.run([sys.executable, "-c", ask, path], check=True)
            assert path.with_name(path.name + "-wal").exists()


def test_a_database_that_another_program_holds_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evo.lineage import database

    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    with Store.open(path, write=True) as store:
        run = s.new_run(store, "mine")
        shell = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        shell.execute("BEGIN IMMEDIATE")
        threading.Timer(0.5, lambda: shell.execute("ROLLBACK")).start()
        store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
        shell.close()
        assert len(store.evaluations(run)) == 1
        assert store.connections_lost == 0
