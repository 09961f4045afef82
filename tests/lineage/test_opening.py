"""Opening a database: where it may be, and one sentence for everything that can be wrong with it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import samples as s

from evo.analysis.runs import list_runs
from evo.analysis.sql import select_sql
from evo.errors import EvoError
from evo.lineage.database import locate
from evo.lineage.faults import explain
from evo.lineage.store import Store


def run_python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = s.program(script, *arguments, prefix=prefix)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def without_privileges() -> tuple[str, ...]:
    """What makes the file permissions count for root too; skips where that cannot be had."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv to give that up")
    return ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


def filled(path: Path, candidates: int = 3) -> Path:
    with Store.open(path, write=True) as store:
        s.filled(store, "filled", candidates)
    return path


@pytest.mark.parametrize(
    ("form", "name"),
    [(str, "line#age 100%?.db"), (Path, "a.db"), (lambda p: f"sqlite:///{p}", "a.db")],
)
def test_writing_makes_the_folder_and_the_file(
    tmp_path: Path, form: Callable[[Path], str | Path], name: str
) -> None:
    path = tmp_path / "a new" / "folder" / name
    with Store.open(form(path), write=True) as store, store.reading() as connection:
        s.new_run(store, "mine")
        pragmas = [connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("foreign_keys", "synchronous")]
    assert pragmas == [1, 1]  # on; NORMAL
    assert path.is_file()
    with Store.open(form(path), write=False) as store:
        assert store.run("mine").name == "mine"
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    raw.close()


def test_a_relative_url_is_under_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open("sqlite:///runs/lineage.db", write=True).close()
    assert (tmp_path / "runs" / "lineage.db").is_file()


def test_an_empty_file_becomes_a_database_when_written(tmp_path: Path) -> None:
    path = tmp_path / "touched.db"
    path.touch()
    assert "is empty; run a search first" in s.refusal(path, write=False)
    filled(path)
    with Store.open(path, write=False) as store:
        assert len(store.evaluations(store.run("latest"))) == 3


def test_a_database_that_is_gone_does_not_hide_the_error_that_is_explained(tmp_path: Path) -> None:
    assert explain(TypeError("the first error"), locate(tmp_path / "gone.db")) is None


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
    def test_what_is_no_database_of_evo_stays_as_it_is(self, tmp_path: Path, write: bool) -> None:
        notes, other = tmp_path / "notes.txt", tmp_path / "other.db"
        notes.write_text("remember the milk\n" * 100)
        with sqlite3.connect(other) as raw:  # Optuna's storage has a version table of alembic too
            raw.execute("CREATE TABLE studies (id INTEGER)")
            raw.execute("CREATE TABLE alembic_version (version_num TEXT)")
        raw.close()
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert "is not a SQLite database; name another file with --db" in s.refusal(notes, write=write)
        assert "belongs to something else (it holds alembic_version, studies, ...)" in s.refusal(other, write=write)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        assert s.refusal(tmp_path, write=write) == f"{tmp_path} is a folder or a device; name a file with --db"

    @pytest.mark.parametrize("write", [False, True])
    def test_a_newer_schema_and_half_a_file(self, tmp_path: Path, write: bool) -> None:
        path = filled(tmp_path / "lineage.db", candidates=50)
        with sqlite3.connect(path) as raw:
            raw.execute("UPDATE alembic_version SET version_num = '9999'")
        raw.close()
        assert "has the schema 9999, which this evo does not know" in s.refusal(path, write=write)
        os.truncate(path, path.stat().st_size // 2)
        assert "is damaged; there is no backup beside it" in s.refusal(path, write=write)

    def test_a_place_that_takes_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in ("/proc/lineage.db", "/proc/no/lineage.db", tmp_path / "file" / "lineage.db"):
            assert "choose another with --db" in s.refusal(path, write=True)
        assert "is a folder or a device" in s.refusal("/dev/null", write=True)

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
            f"the database {path} cannot be written; check the permissions of the file and its folder, or name another with"
            " --db"
        ], first.stderr
        assert second.stdout.splitlines() == [
            f"cannot write in the folder {path.parent}: Permission denied; choose another with --db",
            f"cannot write in the folder {path.parent / 'a'}: Permission denied; choose another with --db",
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
                    print(len(store.evaluations(store.run("filled"))))
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
            ("://", "is not a database URL"),
            ("postgres://me:hunter2@host/name", "is not a database URL; write a file, sqlite:///FILE or postgresql://"),
            ("sqlite:///:memory:", "names no file"),
            ("sqlite:///x.db?timeout=3", "more than a file"),
            ("sqlite+aiosqlite:///x.db", "evo does not work with sqlite+aiosqlite databases"),
            ("postgresql+asyncpg://host/name?password=hunter2&sslpassword=hunter2", "evo does not work with"),
            ("postgresql://me:hunter2@w@host/name", "as %40 for '@'"),
            ("postgresql://me:7/hunter2@host/name", "host"),
            ("host=db user=me password=hunter2", "a database on a server is named by a URL"),
            ("", "the database has no name"),
        ],
    )
    def test_a_url_that_leads_nowhere_is_said_without_its_password(self, url: str, sentence: str) -> None:
        assert sentence in s.refusal(url, write=True)
