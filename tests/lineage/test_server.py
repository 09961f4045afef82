"""PostgreSQL: what can be wrong with reaching it, in one sentence without a password; several searches at once."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples as s
from postgres import PASSWORD, Server
from sqlalchemy import make_url

from evo.analysis.runs import find_run, list_runs
from evo.errors import EvoError, StoreError
from evo.lineage import RunStatus
from evo.lineage.store import Store

pytestmark = pytest.mark.slow


class TestReaching:

    def test_what_keeps_it_from_being_reached_is_said(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
        with socket.socket() as silent, socket.socket() as probe:
            for one in (silent, probe):
                one.bind(("127.0.0.1", 0))
            silent.listen()
            nobody = probe.getsockname()[1]  # does not listen
            said = {
                server.url("postgres", password="hunter2"): 'password authentication failed for user "evo"',
                f"postgresql://evo@127.0.0.1:{server.port}/postgres": "no password supplied",
                server.url("nowhere"): 'database "nowhere" does not exist',
                f"postgresql://me:hunter2@127.0.0.1:{nobody}/name": "Connection refused",
                "postgresql://me@nowhere.invalid/name": "nowhere.invalid",
                f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/name?connect_timeout=2": "timeout expired",
                server.url("postgres") + "?nonsense=1": 'invalid connection option "nonsense"',
            }
            for url, words in said.items():
                message = s.refusal(url, write=True)
                assert "cannot be reached: " in message
                assert words in message
                assert "check host, port, database and user in the URL, the password in ~/.pgpass" in message

    def test_a_password_in_the_environment(self, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        Store.open(f"postgresql+psycopg://evo@{postgres_url.partition('@')[2]}", write=True).close()
        with Store.open(postgres_url, write=False) as store:
            assert PASSWORD not in str(store)

    def test_a_reader_without_rights_to_write_can_read(self, postgres_url: str) -> None:
        with Store.open(postgres_url, write=True) as store:
            s.new_run(store, "mine")
            with store.transaction() as connection:
                connection.exec_driver_sql("DROP ROLE IF EXISTS guest")
                connection.exec_driver_sql("CREATE ROLE guest LOGIN PASSWORD 'welcome'")
                connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
        url = make_url(postgres_url).set(username="guest", password="welcome").render_as_string(hide_password=False)
        with Store.open(url, write=False) as store:
            assert store.run("mine").name == "mine"
        said = s.refusal(url, write=True)  # it finds a run to put in order
        assert "does not let this user do that; ask for the rights" in said

    def test_a_connection_that_is_lost_is_said_in_one_sentence(self, server: Server, postgres_url: str) -> None:
        with Store.open(postgres_url, write=True) as store:
            run = s.new_run(store, "cut")

            def interrupted() -> None:
                with store.transaction():
                    store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)
                    server.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                        f" AND datname = '{make_url(postgres_url).database}'"
                    )

            with pytest.raises(StoreError) as caught:
                interrupted()
            assert "\n" not in str(caught.value)
            assert PASSWORD not in str(caught.value)
            store.add(run, s.ref(0), s.passed(0), elapsed_s=0.0)  # the next one connects anew
            assert len(store.evaluations(run)) == 1


SEARCH = """
with Store.open(sys.argv[1], write=True) as store:
    store.add(s.new_run(store, "elsewhere"), s.ref(0), s.passed(0), elapsed_s=1.0)
    print("searching", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def elsewhere(postgres_url: str) -> Iterator[subprocess.Popen[str]]:
    """Another machine's search in the same database."""
    with s.running(SEARCH, postgres_url) as process:
        yield process


def test_a_second_writer_leaves_a_search_alone_and_continues_one_that_was_killed(
    postgres_url: str, elsewhere: subprocess.Popen[str]
) -> None:
    with Store.open(postgres_url, write=False) as reader, Store.open(postgres_url, write=True) as writer:
        with pytest.raises(StoreError, match="'elsewhere' is being searched by another process, perhaps on another"):
            writer.set_status(writer.run("elsewhere"), RunStatus.RUNNING, elapsed_s=0.0)
        run = s.filled(writer, "mine")
        assert {r.name: r.status for r in list_runs(reader)} == {"mine": "running", "elsewhere": "running"}
        elsewhere.kill()
        elsewhere.wait()
        deadline = time.monotonic() + 30
        while find_run(reader, "elsewhere").status == "running":  # the server notices within moments
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert {r.name: r.status for r in list_runs(reader)} == {"mine": "running", "elsewhere": "interrupted"}
    with Store.open(postgres_url, write=True) as store:
        run = store.run("elsewhere")
        assert run.stop_reason == "its process ended without saying why"
        store.set_status(run, RunStatus.RUNNING, elapsed_s=1.0)
        store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=2.0)
        assert [r.candidate.order for r in store.evaluations(run)] == [0, 1]


CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'evo_tests' AND pid <> pg_backend_pid()"


def test_a_connection_that_is_lost_is_made_again_and_the_run_stays_its_searchs(postgres_url: str, server: Server) -> None:
    def admit(yes: bool) -> None:
        server.execute(f"ALTER DATABASE evo_tests ALLOW_CONNECTIONS {yes}")

    with Store.open(postgres_url, write=True) as store:
        run = s.filled(store, "mine")
        server.execute(CUT)
        store.add(run, s.ref(1), s.passed(1), elapsed_s=2.0)
        admit(False)
        server.execute(CUT)
        back = threading.Timer(2.0, admit, [True])
        back.start()
        try:
            store.add(run, s.ref(2), s.passed(2), elapsed_s=3.0)
        finally:
            back.join()
        assert store.connections_lost in (1, 2)  # the first may be made again unnoticed
        assert [r.candidate.order for r in store.evaluations(run)] == [0, 1, 2]
        with Store.open(postgres_url, write=True) as other:
            assert other.run("mine").status is RunStatus.RUNNING
            with pytest.raises(StoreError, match="'mine' is being searched by another process"):
                other.set_status(other.run("mine"), RunStatus.RUNNING, elapsed_s=0.0)


WRITERS, CANDIDATES, IN_ONE = 2, 600, 550


def write(where: str, number: int) -> str:
    """One search: its own run, the same kernel as all others, and so the same sources as they."""
    while True:
        try:
            store = Store.open(where, write=True)
            break
        except EvoError as error:
            if "another search (pid" not in str(error):
                raise
            time.sleep(0.02)
    with store:
        run = s.new_run(store)  # a name of its own, generated among several that ask at once
        for first in range(0, CANDIDATES, IN_ONE):
            with store.transaction():
                for order in sorted(range(CANDIDATES)[first : first + IN_ONE], reverse=number % 2 == 1):
                    store.add(run, s.ref(order), s.passed(order), elapsed_s=float(order))
        store.add_final(run, 3, s.final(0.5), elapsed_s=200.0)
    return run.name


def test_several_writers_at_once_lose_and_double_nothing(where: str) -> None:
    """Writers work side by side on a server, with the same sources in opposite order, each waiting for what another has just
    stored; on one file they work one after another, the others being told to wait."""
    with multiprocessing.get_context("spawn").Pool(WRITERS) as pool:
        names = pool.starmap_async(write, [(where, i) for i in range(WRITERS)], chunksize=1).get(timeout=200)
    with Store.open(where, write=False) as store:
        summaries = {r.name: r for r in list_runs(store)}
        assert summaries.keys() == set(names)
        assert {r.evaluations for r in summaries.values()} == {CANDIDATES}
        for name in names:
            stored = store.evaluations(store.run(name))
            assert [e.candidate.order for e in stored] == list(range(CANDIDATES))
            assert stored[7].evaluation == s.without_artefacts(s.passed(7))
        tables = ("candidate", "build", "timing", "artefact", "environment")
        counts = [s.rows(store, f"SELECT count(*) FROM {table}")[0][0] for table in tables]
    total = WRITERS * CANDIDATES
    first = 2  # whose code is stored, all being equally fast: the first of those that begin at either end
    assert counts == [total, total, 2 * total + WRITERS, CANDIDATES + first, 1]
