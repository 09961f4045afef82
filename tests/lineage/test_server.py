"""PostgreSQL: what can be wrong with reaching it, in one sentence without a password; several searches at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
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
from evo.lineage.database import locate, shown
from evo.lineage.store import Store

pytestmark = pytest.mark.slow


def refusal(where: str, *, write: bool = True) -> str:
    with pytest.raises(StoreError) as caught:
        Store.open(where, write=write).close()
    message = str(caught.value)
    assert "\n" not in message
    assert PASSWORD not in message
    assert "correct%2Fhorse" not in message
    return message


class TestReaching:
    @pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
    def test_both_ways_to_write_its_url_are_one(self, postgres_url: str, scheme: str) -> None:
        url = postgres_url.replace("postgresql://", f"{scheme}://")
        with Store.open(url, write=True) as store:
            s.new_run(store, "mine")
        assert locate(url) == locate(postgres_url)
        with Store.open(url, write=False) as store:
            assert store.run("mine").name == "mine"
            assert PASSWORD not in str(store)
            assert str(store) == f"the database {shown(postgres_url)}"

    @pytest.mark.parametrize("write", [False, True])
    def test_a_wrong_password(self, server: Server, write: bool) -> None:
        message = refusal(server.url("postgres", password="hunter2"), write=write)
        assert message.endswith("does not take this user and password; correct them in the URL, or in ~/.pgpass")
        assert "hunter2" not in message

    def test_no_password(self, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
        message = refusal(f"postgresql://evo@127.0.0.1:{server.port}/postgres")
        assert "wants a password; give it in ~/.pgpass, in PGPASSWORD, or in the URL" in message

    def test_a_password_in_the_environment(self, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        Store.open(f"postgresql://evo@{postgres_url.partition('@')[2]}", write=True).close()

    def test_no_such_database(self, server: Server) -> None:
        assert 'is not there (database "nowhere" does not exist); create it with: createdb' in refusal(
            server.url("nowhere")
        )

    def test_no_server(self, server: Server) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        assert "cannot be reached: no server listens there" in refusal(f"postgresql://me:{'x'}@127.0.0.1:{port}/name")

    def test_no_host(self, server: Server) -> None:
        assert "cannot be reached: nothing is known of that host" in refusal("postgresql://me@nowhere.invalid/name")

    def test_a_server_that_says_nothing(self, server: Server) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/name?connect_timeout=2"
            assert "its server does not answer" in refusal(url)

    def test_an_option_that_is_none(self, server: Server) -> None:
        assert 'cannot be used: invalid connection option "nonsense"' in refusal(server.url("postgres") + "?nonsense=1")

    def test_a_reader_without_rights_to_write_can_read(self, server: Server, postgres_url: str) -> None:
        with Store.open(postgres_url, write=True) as store:
            s.new_run(store, "mine")
            with store.writing() as connection:
                connection.exec_driver_sql("DROP ROLE IF EXISTS guest")
                connection.exec_driver_sql("CREATE ROLE guest LOGIN PASSWORD 'welcome'")
                connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
        url = make_url(postgres_url).set(username="guest", password="welcome").render_as_string(hide_password=False)
        with Store.open(url, write=False) as store:
            assert store.run("mine").name == "mine"
        assert "does not let this user do that; ask for the rights" in refusal(url)  # it finds a run to put in order

    def test_a_database_of_something_else(self, server: Server, postgres_url: str) -> None:
        import psycopg

        with psycopg.connect(postgres_url) as other:
            other.execute("CREATE TABLE studies (id INTEGER)")
        assert "belongs to something else (it holds studies, ...)" in refusal(postgres_url)

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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:hunter2@host/name", "postgresql://me:***@host/name"),
        ("postgresql+psycopg://me:hunter2@host:5/name", "postgresql://me:***@host:5/name"),
        ("postgresql://host/name?password=hunter2&user=me", "postgresql://host/name?user=me"),
        ("postgresql://me:hun@ter2@host/name", "postgresql://***@host/name"),
        ("postgresql://me:hunter2@host:x/name", "postgresql://***@host:x/name"),
        ("runs/lineage.db", "runs/lineage.db"),
        ("sqlite:///runs/lineage.db", "sqlite:///runs/lineage.db"),
    ],
)
def test_a_password_is_not_shown(url: str, said: str) -> None:
    assert shown(url) == said


SEARCH = f"""
import sys
sys.path[:0] = [{str(s.CHECKOUT)!r}, {str(Path(s.__file__).parent)!r}]
import samples as s
from evo.lineage.store import Store
with Store.open(sys.argv[1], write=True) as store:
    store.add(s.new_run(store, "elsewhere"), s.ref(0), s.passed(0), elapsed_s=1.0)
    print("searching", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def elsewhere(postgres_url: str) -> Iterator[subprocess.Popen[str]]:
    """Another machine's search in the same database."""
    command = [sys.executable, "-c", SEARCH, postgres_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        yield process
        process.kill()


class TestRunsAreAlive:
    def test_a_second_writer_leaves_a_search_alone(self, postgres_url: str, elsewhere: subprocess.Popen[str]) -> None:
        with Store.open(postgres_url, write=True) as store:
            run = store.run("elsewhere")
            assert run.status is RunStatus.RUNNING
            with pytest.raises(
                StoreError, match="'elsewhere' is being searched by another process, perhaps on another"
            ):
                store.set_status(run, RunStatus.RUNNING, elapsed_s=0.0)
            store.add(s.new_run(store, "mine"), s.ref(0), s.passed(0), elapsed_s=1.0)
            assert {r.name for r in list_runs(store)} == {"mine", "elsewhere"}

    def test_a_reader_tells_a_killed_search_from_one_that_goes_on(
        self, postgres_url: str, elsewhere: subprocess.Popen[str]
    ) -> None:
        with Store.open(postgres_url, write=False) as reader, Store.open(postgres_url, write=True) as writer:
            s.new_run(writer, "mine")
            assert {r.name: r.status for r in list_runs(reader)} == {"mine": "running", "elsewhere": "running"}
            elsewhere.kill()
            elsewhere.wait()
            deadline = time.monotonic() + 30
            while find_run(reader, "elsewhere").status == "running":  # the server notices within moments
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert {r.name: r.status for r in list_runs(reader)} == {"mine": "running", "elsewhere": "interrupted"}

    def test_a_killed_search_can_be_continued_by_another(
        self, postgres_url: str, elsewhere: subprocess.Popen[str]
    ) -> None:
        os.kill(elsewhere.pid, signal.SIGKILL)
        elsewhere.wait()
        deadline = time.monotonic() + 30
        while True:  # the server notices within moments
            with Store.open(postgres_url, write=True) as store:
                run = store.run("elsewhere")
                if run.status is RunStatus.INTERRUPTED:
                    assert run.stop_reason == "its process ended without saying why"
                    store.set_status(run, RunStatus.RUNNING, elapsed_s=1.0)
                    store.add(run, s.ref(1, 0), s.passed(1), elapsed_s=2.0)
                    assert [r.candidate.order for r in store.evaluations(run)] == [0, 1]
                    return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def test_a_closed_store_lets_others_search(self, postgres_url: str) -> None:
        with Store.open(postgres_url, write=True) as first, Store.open(postgres_url, write=True) as second:
            run = s.new_run(first, "handed-over")
            with pytest.raises(StoreError, match="is being searched"):
                second.set_status(run, RunStatus.RUNNING, elapsed_s=0.0)
            first.set_status(run, RunStatus.INTERRUPTED, elapsed_s=1.0)
            first.close()
            second.set_status(run, RunStatus.RUNNING, elapsed_s=1.0)


WRITERS, CANDIDATES, IN_ONE = 10, 120, 40


def write(where: str, number: int, said: multiprocessing.Queue[str]) -> None:
    """One search: its own run, the same kernel as all others, and so the same sources as they."""
    try:
        while True:
            try:
                store = Store.open(where, write=True)
                break
            except EvoError as error:
                if "another search (pid" not in str(error):
                    raise
                time.sleep(0.02)
        with store:
            run = s.new_run(store)  # a name of its own, generated among ten that ask at once
            for first in range(0, CANDIDATES, IN_ONE):
                with store.transaction():
                    for order in sorted(range(first, first + IN_ONE), reverse=number % 2 == 1):
                        store.add(run, s.ref(order), s.passed(order), elapsed_s=float(order))
            store.add_final(run, 3, s.final(0.5), elapsed_s=200.0)
        said.put(run.name)
    except BaseException as error:
        said.put(f"error: {error!r}")
        raise


def test_ten_writers_at_once_lose_and_double_nothing(where: str) -> None:
    """On a server side by side; on one file one after another, the others being told to wait."""
    context = multiprocessing.get_context("spawn")
    said: multiprocessing.Queue[str] = context.Queue()
    writers = [context.Process(target=write, args=(where, i, said)) for i in range(WRITERS)]
    for writer in writers:
        writer.start()
    names = [said.get(timeout=200) for _ in writers]
    for writer in writers:
        writer.join()
    assert len(set(names)) == WRITERS, names
    assert not [name for name in names if name.startswith("error")]
    with Store.open(where, write=False) as store:
        summaries = {r.name: r for r in list_runs(store)}
        assert summaries.keys() == set(names)
        assert {r.evaluations for r in summaries.values()} == {CANDIDATES}
        for name in names:
            stored = store.evaluations(store.run(name))
            assert [e.candidate.order for e in stored] == list(range(CANDIDATES))
            assert stored[7].evaluation == s.without_artefacts(s.passed(7))
        with store.reading() as connection:
            counts = [
                connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()
                for table in ("candidate", "build", "timing", "artefact", "environment")
            ]
        total = WRITERS * CANDIDATES
        assert counts == [total, total, 2 * total + WRITERS, 2 * CANDIDATES, 1]


def test_large_transactions_with_the_same_sources_do_not_block_each_other_for_good(postgres_url: str) -> None:
    """More than fits into one insert, in opposite order: each would wait for what the other has just stored."""
    context = multiprocessing.get_context("spawn")
    said: multiprocessing.Queue[str] = context.Queue()
    Store.open(postgres_url, write=True).close()
    writers = [context.Process(target=write_much, args=(postgres_url, i == 1, said)) for i in range(2)]
    for writer in writers:
        writer.start()
    assert [said.get(timeout=200) for _ in writers] == ["done", "done"]
    for writer in writers:
        writer.join()


def write_much(where: str, reverse: bool, said: multiprocessing.Queue[str]) -> None:
    try:
        with Store.open(where, write=True) as store:
            run = s.new_run(store)
            with store.transaction():
                for order in sorted(range(1200), reverse=reverse):
                    store.add(run, s.ref(order), s.passed(order), elapsed_s=0.0)
        said.put("done")
    except BaseException as error:
        said.put(repr(error))
        raise
