"""evo prune, vacuum, merge and backup, and what every command says of a damaged file and keeps of a password."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import samples as s
from postgres import PASSWORD

from evo.analysis.runs import list_runs, read_history
from evo.errors import DeviceError
from evo.lineage import RunStatus
from evo.lineage.database import newest_backup
from evo.lineage.store import Store
from evo.targets import find_target
from evo.testing.toy_kernel import write_kernel
from tests.ended import Ended, run_here


def evo(capfd: pytest.CaptureFixture[str], *words: object) -> Ended:
    return run_here(capfd, *map(str, words))


def sentence(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line on stderr of a command that fails."""
    ended = evo(capfd, *words)
    assert (ended.code, ended.out) == (2, ""), ended
    return ended.sentence


def fill(where: str | Path, name: str = "mine", number: int = 6) -> None:
    with Store.open(where, write=True) as store:
        run = s.new_run(store, name)
        for order in range(number):
            store.add(
                run, s.ref(order, *range(max(0, order - 1), order)), s.passed(order, 1 / (order + 1)), elapsed_s=1.0
            )
        store.add(run, s.ref(number), s.refused(number), elapsed_s=1.0)
        store.set_winner(run, 0, 1)
        store.set_status(run, RunStatus.FINISHED, reason="time", elapsed_s=2.0)


def test_prune_says_what_would_go_and_then_what_went(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(where)
    parts = ("--drop", "failed", "--drop", "samples", "--db", where)
    ended = evo(capfd, "prune", "mine", "--dry-run", *parts)
    assert ended.code == 0
    assert "1 sources, 0 binaries and the samples of 8 timings would go from 1 run; 1 stored files" in ended.out
    assert "2 candidates keep everything" in ended.out
    assert "the file becomes smaller" not in ended.out
    record = evo(capfd, "prune", "mine", "--json", *parts).document
    assert (record["sources"], record["samples"], record["dry_run"]) == (1, 8, False)
    assert "went from 0 runs" in evo(capfd, "prune", "--older-than", "1d", "--db", where).out
    assert "name the runs to prune, or give --older-than" in sentence(capfd, "prune", "--db", where)
    assert "--older-than 'soon' is not a duration" in sentence(capfd, "prune", "--older-than", "soon", "--db", where)
    assert "unknown run 'yours'" in sentence(capfd, "prune", "yours", "--db", where)
    ended = evo(capfd, "vacuum", "--db", where)
    assert ended.code == 0
    assert re.fullmatch(r"[\d.]+ .?B before, [\d.]+ .?B now\n", ended.out)


def test_a_backup_is_made_beside_the_database_while_it_is_written(
    path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(path)
    with Store.open(path, write=True) as store:
        expected = store.evaluations(store.run("mine"))
        ended = evo(capfd, "backup", "--db", path)
        s.new_run(store, "later")
        second = evo(capfd, "backup", "--json", "--db", path).document
    assert ended.code == 0
    first = Path(ended.out.partition(": ")[0])
    assert re.fullmatch(path.stem + r"\.backup-\d{8}T\d{12}Z\.db", first.name)
    assert (first.parent, newest_backup(path)) == (path.parent, Path(second["file"]))
    assert second["bytes"] == Path(second["file"]).stat().st_size
    with Store.open(first, write=False) as store:
        assert store.evaluations(store.run("mine")) == expected
        assert [r.name for r in list_runs(store)] == ["mine"]
    with Store.open(second["file"], write=True) as store:
        assert {r.name for r in list_runs(store)} == {"mine", "later"}
    assert {p.name for p in tmp_path.rglob(".*")} <= {".gitignore"}, "no half copy is left"


def test_vacuum_makes_no_database(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "there is no database" in sentence(capfd, "vacuum", "--db", tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_what_backup_refuses(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "://" in where:
        said = sentence(capfd, "backup", "--db", where)
        assert "is on a server; back it up with: pg_dump --file FILE " in said
        return
    fill(where)
    before = Path(where).read_bytes()
    assert "is there already" in sentence(capfd, "backup", "--db", where, "--out", where)
    assert Path(where).read_bytes() == before
    assert "cannot write in the folder" in sentence(capfd, "backup", "--db", where, "--out", tmp_path / "no" / "x")
    assert "there is no database" in sentence(capfd, "backup", "--db", tmp_path / "no.db")
    (tmp_path / "notes.txt").write_text("what I wanted to remember")
    assert "is not a SQLite database" in sentence(capfd, "backup", "--db", tmp_path / "notes.txt")
    assert not list(tmp_path.rglob("*.backup-*"))


def test_merge_and_its_refusals(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.db"
    fill(where)
    fill(other, "mine", 3)
    ended = evo(capfd, "merge", other, "--db", where)
    assert ended.code == 0
    assert "1 run added, 0 continued, 0 there already; 4 candidates copied\nmine is called mine-" in ended.out
    assert "0 runs added, 0 continued, 1 there already" in evo(capfd, "merge", other, "--db", where).out
    assert "is the database itself" in sentence(capfd, "merge", where, "--db", where)
    assert "there is no database" in sentence(capfd, "merge", tmp_path / "none.db", "--db", where)
    (tmp_path / "notes.txt").write_text("remember the milk")
    assert "is not a SQLite database" in sentence(capfd, "merge", tmp_path / "notes.txt", "--db", where)


@pytest.fixture
def half_copied(tmp_path: Path) -> Path:
    whole, half = tmp_path / "whole.db", tmp_path / "it's half.db"  # a name that a shell would cut
    fill(whole, number=60)
    shutil.copy(whole, half)
    os.truncate(half, half.stat().st_size * 6 // 10)
    return half


READERS = [
    ["runs"], ["show", "abc"], ["query", "SELECT 1"], ["export", "mine", "--out", "out"], ["resume", "mine"],
    ["check", "abcdef"], ["prune", "mine"], ["vacuum"], ["merge", "OTHER"], ["backup"],
    ["search", "layernorm", "--target", "cpu"],
]  # fmt: skip


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_every_command_says_that_a_file_is_half_copied(
    half_copied: Path, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And how to save what can be read of this very file, as a line for a shell."""
    fill(tmp_path / "other.db")
    names = {"OTHER": str(tmp_path / "other.db"), "out": str(tmp_path / "out")}
    words = [names.get(word, word) for word in command]
    said = sentence(capfd, *words, "--db", half_copied)
    assert said == (
        f"evo: the database {half_copied} is damaged; there is no backup beside it; what can still be read is saved by:"
        f" sqlite3 {shlex.quote(str(half_copied))} .recover | sqlite3 NEW.db"
    )


def test_of_a_damaged_file_the_newest_backup_is_named(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(path, number=60)
    assert evo(capfd, "backup", "--db", path).code == 0
    (backup,) = path.parent.glob("*.backup-*")
    with path.open("r+b") as file:  # a page of a table that is not read when the file is opened
        file.seek(path.stat().st_size - 4096)
        file.write(os.urandom(4096))
    assert f"is damaged; its newest backup is {backup}; " in sentence(capfd, "backup", "--db", path)
    assert list(path.parent.glob("*.backup-*")) == [backup]


@pytest.mark.slow
def test_no_password_is_printed_or_stored(
    postgres_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole search with a password in its --db, then everything that was said, written and recorded."""
    try:
        find_target("cpu").device()
    except DeviceError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    kernel = write_kernel(tmp_path / "toy")
    said = ""
    for words in (
        ["search", kernel, "--target", "cpu", "--evaluations", "1", "--budget", "5s", "--name", "secret"],
        ["best", "--json"], ["resume", "secret"], ["show", "zzz"], ["search", kernel, "--budget", "x"],
        ["backup"], ["vacuum"], ["merge", "postgresql://me:hunter2@host:x/name"],
        ["prune", "nobody"], ["report", "secret", "--out", tmp_path / "page.html"],
        ["query", "SELEC"], ["query", "SELECT * FROM run"],
    ):  # fmt: skip
        ended = evo(capfd, *words, "--db", postgres_url)
        said += ended.out + ended.err
    with Store.open(postgres_url, write=False) as store, store.reading() as connection:
        for table in ("run", "environment", "task", "candidate", "build", "timing"):
            said += str(connection.exec_driver_sql(f'SELECT * FROM "{table}"').all())
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    said += "".join(p.read_bytes().decode("latin-1") for p in files)
    assert "secret" in said
    assert "***" in said
    for hidden in (PASSWORD, "correct%2Fhorse", "hunter2"):
        assert hidden not in said


def test_a_source_that_was_pruned_is_said_to_be(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(where)
    assert evo(capfd, "prune", "mine", "--drop", "sources", "--db", where).code == 0
    with Store.open(where, write=False) as store:
        names = [p.id for p in read_history(store, "mine")]
    said = sentence(capfd, "show", names[3], "--source", "--db", where)
    assert said == f"evo: candidate {names[3]} has no source: it was dropped by evo prune"
    assert "the source of one of the two was not kept" in evo(capfd, "diff", names[1], names[3], "--db", where).out
    unasked = evo(capfd, "diff", names[1], names[3], "--no-source", "--db", where).out
    assert "was not kept" not in unasked
