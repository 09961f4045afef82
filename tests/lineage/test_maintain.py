"""evo prune, vacuum, merge, dump and load, and what every command says of a damaged file and keeps of a password."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import samples as s
from postgres import PASSWORD

from evo.analysis import queries
from evo.cli import run as run_command
from evo.errors import DeviceError
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.targets import find_target
from tests.toy_kernel import write_kernel


def evo(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capfd.readouterr()
    code = run_command([str(word) for word in words])
    out, err = capfd.readouterr()
    return code, out, err


def sentence(capfd: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """The one line on stderr of a command that fails."""
    found, out, err = evo(capfd, *words)
    assert (found, out) == (code, ""), (found, out, err)
    assert err.startswith("evo: ")
    assert len(err.splitlines()) == 1, err
    return err


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
    code, out, _ = evo(capfd, "prune", "mine", "--dry-run", "--drop", "failed", "--drop", "samples", "--db", where)
    assert code == 0
    assert "1 sources, 1 binaries and the samples of 8 timings would go from 1 run; 2 stored files" in out
    assert "2 candidates keep everything" in out
    assert "the file becomes smaller" not in out
    code, out, _ = evo(capfd, "prune", "mine", "--json", "--drop", "failed", "--drop", "samples", "--db", where)
    record = json.loads(out)
    assert (code, record["sources"], record["samples"], record["dry_run"]) == (0, 1, 8, False)
    code, out, _ = evo(capfd, "prune", "--older-than", "1d", "--db", where)
    assert "went from 0 runs" in out


def test_prune_wants_to_know_what(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(where)
    assert "name the runs to prune, or give --older-than" in sentence(capfd, "prune", "--db", where)
    assert "--older-than 'soon' is not a duration" in sentence(capfd, "prune", "--older-than", "soon", "--db", where)
    assert "unknown run 'yours'" in sentence(capfd, "prune", "yours", "--db", where)


def test_vacuum_tells_both_sizes(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(where)
    code, out, _ = evo(capfd, "vacuum", "--db", where)
    assert code == 0
    assert re.fullmatch(r"[\d.]+ .?B before, [\d.]+ .?B now\n", out)


def test_vacuum_does_not_make_a_database(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "there is no database" in sentence(capfd, "vacuum", "--db", tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_no_upkeep_makes_a_database_of_an_empty_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    for words in (["vacuum"], ["prune", "--older-than", "1d"]):
        assert f"{empty} is empty; run a search first" in sentence(capfd, *words, "--db", empty)
    assert empty.stat().st_size == 0


def test_dump_says_of_a_text_that_it_is_no_database(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("what I wanted to remember")
    said = sentence(capfd, "dump", "--db", text, "--out", tmp_path / "my.dump")
    assert f"{text} is not a SQLite database" in said


def test_load_says_where_it_may_not_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a.db")
    assert evo(capfd, "dump", "--db", tmp_path / "a.db", "--out", tmp_path / "a.dump")[0] == 0

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    said = sentence(capfd, "load", tmp_path / "a.dump", "--db", tmp_path / "new.db")
    assert said == f"evo: cannot write in the folder {tmp_path}: Permission denied; choose another with --db\n"


def test_merge_and_its_refusals(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.db"
    fill(where)
    fill(other, "mine", 3)
    code, out, _ = evo(capfd, "merge", other, "--db", where)
    assert code == 0
    assert "1 run added, 0 continued, 0 there already; 4 candidates copied\nmine is called mine-" in out
    assert "0 runs added, 0 continued, 1 there already" in evo(capfd, "merge", other, "--db", where)[1]
    assert "is the database itself" in sentence(capfd, "merge", where, "--db", where)
    assert "there is no database" in sentence(capfd, "merge", tmp_path / "none.db", "--db", where)
    (tmp_path / "notes.txt").write_text("remember the milk")
    assert "is not a SQLite database" in sentence(capfd, "merge", tmp_path / "notes.txt", "--db", where)


def test_dump_and_load_between_kinds_of_databases(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(where)
    file, copy = tmp_path / "mine.dump", tmp_path / "copy" / "lineage.db"
    code, out, _ = evo(capfd, "dump", "--db", where, "--out", file)
    assert code == 0
    assert out.startswith(f"1 run, 7 candidates in {file} (")
    code, out, _ = evo(capfd, "load", file, "--db", copy)
    assert (code, out) == (0, "1 run added, 0 continued, 0 there already; 7 candidates loaded\n")
    assert sorted(p.name for p in copy.parent.iterdir()) == ["lineage.db", "lineage.db.lock"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    with Store.open(where, write=False) as one, Store.open(copy, write=False) as other:
        assert one.evaluations(one.run("mine")) == other.evaluations(other.run("mine"))


def test_a_dump_goes_through_a_pipe(path: Path, tmp_path: Path) -> None:
    fill(path)
    command = [sys.executable, "-m", "evo"]
    with subprocess.Popen([*command, "dump", "--db", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as dump:
        loaded = subprocess.run(
            [*command, "load", "-", "--db", tmp_path / "copy.db"], stdin=dump.stdout, capture_output=True, text=True
        )
        assert dump.stderr is not None
        assert dump.stderr.read() == b"1 run, 7 candidates\n"
    assert loaded.stdout == "1 run added, 0 continued, 0 there already; 7 candidates loaded\n", loaded.stderr


def test_what_dump_and_load_refuse(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(path)
    before = path.read_bytes()
    assert "is there and is not a dump" in sentence(capfd, "dump", "--db", path, "--out", path)
    assert path.read_bytes() == before
    assert "is a folder" in sentence(capfd, "dump", "--db", path, "--out", tmp_path)
    assert "cannot write in the folder" in sentence(capfd, "dump", "--db", path, "--out", tmp_path / "no" / "x")
    assert "there is no database" in sentence(capfd, "dump", "--db", tmp_path / "no.db", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert "--json goes to standard output" in sentence(capfd, "dump", "--db", path, "--json")
    assert "cannot read" in sentence(capfd, "load", tmp_path / "none.dump", "--db", path)
    assert "is not a dump of a lineage database" in sentence(capfd, "load", path, "--db", path)


@pytest.fixture
def half_copied(tmp_path: Path) -> Path:
    whole, half = tmp_path / "whole.db", tmp_path / "it's half.db"  # a name that a shell would cut
    fill(whole, number=60)
    shutil.copy(whole, half)
    os.truncate(half, half.stat().st_size * 6 // 10)
    return half


READERS = [
    ["runs"], ["best"], ["show", "abc"], ["lineage", "abc"], ["failures", "mine"], ["query", "SELECT 1"],
    ["export", "mine", "--out", "out"], ["resume", "mine"], ["check", "abcdef"], ["sanitize", "abcdef"],
    ["prune", "mine"], ["prune", "mine", "--dry-run"], ["vacuum"], ["merge", "OTHER"], ["load", "DUMP"],
]  # fmt: skip


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_every_command_says_that_a_file_is_half_copied(
    half_copied: Path, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And how to save what can be read of this very file, as a line for a shell."""
    fill(tmp_path / "other.db")
    assert evo(capfd, "dump", "--db", tmp_path / "other.db", "--out", tmp_path / "other.dump")[0] == 0
    names = {"OTHER": str(tmp_path / "other.db"), "DUMP": str(tmp_path / "other.dump"), "out": str(tmp_path / "out")}
    words = [names.get(word, word) for word in command]
    said = sentence(capfd, *words, "--db", half_copied)
    assert "is damaged; restore a backup, or save what can still be read with: " in said
    rescue = shlex.split(said.rpartition("with: ")[2].replace("FILE", str(tmp_path / "rest.dump")))
    assert rescue == ["evo", "dump", "--out", str(tmp_path / "rest.dump"), "--db", str(half_copied)]
    assert evo(capfd, *rescue[1:])[0] == 1
    assert (tmp_path / "rest.dump").stat().st_size


def test_dump_saves_what_is_left_of_a_half_copied_file(
    half_copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rest.dump"
    code, out, err = evo(capfd, "dump", "--db", half_copied, "--out", file)
    assert code == 1  # not all of it was saved
    assert re.match(r"1 run, \d+ candidates? in ", out)
    assert re.fullmatch(r"evo: \S+ is damaged: .*; what could be read was saved\n", err.replace(str(half_copied), "X"))
    assert evo(capfd, "load", file, "--db", tmp_path / "restored.db")[0] == 0
    with Store.open(tmp_path / "restored.db", write=False) as store:
        assert queries.runs(store)[0].name == "mine"
        assert len(store.evaluations(store.run("mine"))) > 5


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
        ["search", kernel, "--target", "cpu", "--evaluations", "3", "--budget", "60s", "--name", "secret",
         "--export", tmp_path / "exported"],
        ["runs"], ["best"], ["resume", "secret"], ["show", "zzz"], ["doctor"], ["search", kernel, "--budget", "x"],
        ["dump", "--out", tmp_path / "my.dump"], ["vacuum"], ["merge", "postgresql://me:hunter2@host:x/name"],
        ["load", tmp_path / "my.dump"], ["prune", "nobody"], ["report", "secret", "--out", tmp_path / "page.html"],
        ["query", "SELEC"], ["query", "SELECT * FROM run"],
    ):  # fmt: skip
        for form in ([], ["--json"]):
            if form and words[0] not in ("best", "doctor", "query", "vacuum"):
                continue
            _, out, err = evo(capfd, *words, *form, "--db", postgres_url)
            said += out + err
    with Store.open(postgres_url, write=False) as store, store.reading() as connection:
        for table in ("run", "environment", "task", "candidate", "build", "timing"):
            said += str(connection.exec_driver_sql(f'SELECT * FROM "{table}"').all())
    assert evo(capfd, "dump", "--db", postgres_url, "--out", tmp_path / "my.dump")[0] == 0
    import gzip

    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    said += gzip.decompress((tmp_path / "my.dump").read_bytes()).decode()
    said += "".join(p.read_bytes().decode("latin-1") for p in files)
    assert "secret" in said
    assert "***" in said
    for hidden in (PASSWORD, "correct%2Fhorse", "hunter2"):
        assert hidden not in said


def test_a_source_that_was_pruned_is_said_to_be(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    fill(where)
    assert evo(capfd, "prune", "mine", "--drop", "sources", "--db", where)[0] == 0
    with Store.open(where, write=False) as store:
        names = [p.id for p in queries.history(store, "mine")]
    said = sentence(capfd, "show", names[3], "--source", "--db", where)
    assert said == f"evo: candidate {names[3]} has no source: it was dropped by evo prune\n"
    assert "the source of one of the two was not kept" in evo(capfd, "diff", names[1], names[3], "--db", where)[1]
    unasked = evo(capfd, "diff", names[1], names[3], "--no-source", "--db", where)[1]
    assert "was not kept" not in unasked
