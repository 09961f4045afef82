"""Opening a database: where it may be, and one sentence for everything that can be wrong with it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import samples as s

from evo.analysis.runs import list_runs
from evo.analysis.sql import select_sql
from evo.errors import EvoError, StoreError
from evo.lineage.store import Store

PRELUDE = f"""
import sys
sys.path[:0] = [{str(s.CHECKOUT)!r}, {str(Path(s.__file__).parent)!r}]
import samples as s
from evo.analysis.runs import list_runs
from evo.errors import EvoError
from evo.lineage.store import Store
"""


def run_python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def without_privileges() -> tuple[str, ...]:
    """What makes the file permissions count for root too; skips where that cannot be had."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv to give that up")
    return ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


def refusal(where: str | Path, *, write: bool) -> str:
    with pytest.raises(StoreError) as caught:
        Store.open(where, write=write).close()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300 + len(str(where)) * 2
    return message


def filled(path: Path, candidates: int = 3) -> Path:
    with Store.open(path, write=True) as store:
        run = s.new_run(store)
        with store.transaction():
            for order in range(candidates):
                store.add(run, s.ref(order), s.passed(order), elapsed_s=0.0)
    return path


@pytest.mark.parametrize("form", [str, Path, lambda p: f"sqlite:///{p}", lambda p: f"sqlite+pysqlite:///{p}"])
def test_writing_makes_the_folder_and_the_file(tmp_path: Path, form: Callable[[Path], str | Path]) -> None:
    path = tmp_path / "a new" / "folder" / "line#age 100%?.db"
    if "?" in str(form(path)) and "://" in str(form(path)):
        path = path.with_name("lineage.db")
    with Store.open(form(path), write=True) as store:
        s.new_run(store, "mine")
    assert path.is_file()
    with Store.open(form(path), write=False) as store:
        assert store.run("mine").name == "mine"


def test_a_relative_url_is_under_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open("sqlite:///runs/lineage.db", write=True).close()
    assert (tmp_path / "runs" / "lineage.db").is_file()


def test_an_empty_file_becomes_a_database_when_written(tmp_path: Path) -> None:
    path = tmp_path / "touched.db"
    path.touch()
    assert "is empty; run a search first" in refusal(path, write=False)
    filled(path)
    with Store.open(path, write=False) as store:
        assert len(store.evaluations(store.run("latest"))) == 3


def test_the_file_is_in_wal_mode_and_enforces_keys(tmp_path: Path) -> None:
    path = filled(tmp_path / "lineage.db")
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    raw.close()
    with Store.open(path, write=True) as store, store.reading() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("foreign_keys", "synchronous")]
    assert pragmas == [1, 1]  # on; NORMAL


def test_reading_does_not_change_a_byte(tmp_path: Path) -> None:
    path = filled(tmp_path / "lineage.db")
    before = path.read_bytes()
    with Store.open(path, write=False) as store:
        list_runs(store)
        with pytest.raises(EvoError, match="readonly"):
            select_sql(store, "DELETE FROM parentage")
    assert path.read_bytes() == before


class TestRefusals:
    @pytest.mark.parametrize("write", [False, True])
    def test_a_folder(self, tmp_path: Path, write: bool) -> None:
        assert refusal(tmp_path, write=write) == (
            f"{tmp_path} is a folder; name a file in it, such as {tmp_path / 'lineage.db'}"
        )

    def test_a_missing_file_to_read(self, tmp_path: Path) -> None:
        assert "there is no database" in refusal(tmp_path / "a" / "none.db", write=False)
        assert not (tmp_path / "a").exists()

    @pytest.mark.parametrize("write", [False, True])
    def test_a_file_that_is_no_database(self, tmp_path: Path, write: bool) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("remember the milk\n" * 100)
        assert "is not a SQLite database; name another file with --db" in refusal(path, write=write)
        assert path.read_text().startswith("remember the milk")
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("write", [False, True])
    def test_a_database_of_something_else(self, tmp_path: Path, write: bool) -> None:
        path = tmp_path / "other.db"
        with sqlite3.connect(path) as other:  # Optuna's storage has a version table of alembic too
            other.execute("CREATE TABLE studies (id INTEGER)")
            other.execute("CREATE TABLE alembic_version (version_num TEXT)")
        other.close()
        before = path.read_bytes()
        assert "belongs to something else (it holds alembic_version, studies, ...)" in refusal(path, write=write)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("write", [False, True])
    def test_a_newer_schema(self, tmp_path: Path, write: bool) -> None:
        path = filled(tmp_path / "lineage.db")
        with sqlite3.connect(path) as raw:
            raw.execute("UPDATE alembic_version SET version_num = '9999'")
        raw.close()
        assert "has the schema 9999, which this evo does not know" in refusal(path, write=write)

    @pytest.mark.parametrize("write", [False, True])
    def test_a_truncated_file(self, tmp_path: Path, write: bool) -> None:
        path = filled(tmp_path / "lineage.db", candidates=50)
        os.truncate(path, path.stat().st_size // 2)
        assert "is damaged; there is no backup beside it" in refusal(path, write=write)

    def test_a_page_of_noise(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "lineage.db", candidates=300)
        with path.open("r+b") as file:
            for page in range(path.stat().st_size // 8192, path.stat().st_size // 4096):
                file.seek(page * 4096)
                file.write(os.urandom(4096))
        with Store.open(path, write=False) as store, pytest.raises(StoreError, match="is damaged; there is no backup"):
            store.evaluations(store.run("latest"))

    @pytest.mark.parametrize("path", ["/proc/lineage.db", "/proc/no/lineage.db"])
    def test_a_folder_that_takes_no_files(self, path: str) -> None:
        assert "choose another with --db" in refusal(path, write=True)

    def test_a_file_where_a_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "choose another with --db" in refusal(tmp_path / "file" / "lineage.db", write=True)

    def test_a_device(self) -> None:
        assert "is a device and not a file" in refusal("/dev/null", write=True)

    def test_a_folder_or_file_without_permission(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "kept" / "lineage.db")
        script = """
            for where in sys.argv[1:]:
                try:
                    Store.open(where, write=True).close()
                except EvoError as error:
                    print(error)
            """
        path.chmod(0o444)
        first = run_python(script, path, prefix=without_privileges())
        path.parent.chmod(0o555)
        try:
            second = run_python(script, path.parent / "new.db", path.parent / "a" / "b.db", prefix=without_privileges())
        finally:
            path.parent.chmod(0o755)
        assert first.stdout.splitlines() == [
            f"{path} cannot be written; check its permissions, or name another file with --db"
        ], first.stderr
        assert second.stdout.splitlines() == [
            f"cannot write in the folder {path.parent}: Permission denied; choose another with --db",
            f"cannot make the folder {path.parent / 'a'}: Permission denied; choose another with --db",
        ], second.stderr

    @pytest.mark.parametrize("left", ["nothing", "files of a reader", "files of a killed writer"])
    def test_only_writing_needs_permission(self, tmp_path: Path, left: str) -> None:
        path = filled(tmp_path / "kept" / "lineage.db")
        if left == "files of a reader":
            Store.open(path, write=False).close()
        elif left == "files of a killed writer":
            run_python("store = Store.open(sys.argv[1], write=True); s.new_run(store); import os; os._exit(9)", path)
        for file in path.parent.iterdir():
            file.chmod(0o444)
        path.parent.chmod(0o555)
        try:
            read = run_python(
                """
                with Store.open(sys.argv[1], write=False) as store:
                    print(sum(run.passed for run in list_runs(store)))
                """,
                path,
                prefix=without_privileges(),
            )
        finally:
            path.parent.chmod(0o755)
        assert read.stdout == "3\n", read.stderr

    @pytest.mark.parametrize(
        ("url", "sentence"),
        [
            ("sqlite:/x.db://", "is not a database URL"),
            ("://", "is not a database URL"),
            ("nonsense://host/name", "is not a database URL"),
            ("postgresql+psycopg://host:port/name", "is not a database URL; its port is not a number"),
            ("postgres://host/name", "is not a database URL; write postgresql:// instead of postgres://"),
            ("sqlite://", "names no file, so nothing would be kept"),
            ("sqlite:///:memory:", "names no file, so nothing would be kept"),
            ("sqlite:///x.db?timeout=3", "options after '?' are not understood"),
            ("sqlite+aiosqlite:///x.db", "evo does not work with sqlite+aiosqlite databases"),
            ("mysql://host/name", "evo does not work with mysql databases"),
            ("postgresql+asyncpg://host/name", "evo does not work with postgresql+asyncpg databases"),
            ("postgresql+pg8000://host/name", "evo does not work with postgresql+pg8000 databases"),
            ("postgresql://me:p@w@host/name", "as %40 for '@'"),
            ("postgresql:/me:hunter2@host/name", "a database on a server is named by a URL"),
            ("host=db user=me password=hunter2", "a database on a server is named by a URL"),
            ("", "the database has no name"),
        ],
    )
    @pytest.mark.parametrize("write", [False, True])
    def test_a_url_that_leads_nowhere(self, url: str, sentence: str, write: bool) -> None:
        assert sentence in refusal(url, write=write)

    def test_no_message_shows_a_password(self) -> None:
        for url in (
            "mysql://me:hunter2@host/name",
            "nonsense://me:hunter2@host/name",
            "postgresql+pg8000://me:hunter2@host/name",
            "postgresql+psycopg://me:hunter2@host:port/name",
            "postgresql://me:7/hunter2@host/name",
            "postgresql://me:1@hunter2@host/name",
            "postgresql://host:port/name?password=hunter2",
            "postgresql+asyncpg://host/name?password=hunter2&sslpassword=hunter2",
            "postgresql:/me:hunter2@host/name",
            "host=db user=me password=hunter2",
        ):
            assert "hunter2" not in refusal(url, write=True)
