"""A database that somebody has edited by hand: each command that looks at it answers, or says in one sentence which row is
wrong; nothing in it moves the cursor of a terminal."""

from __future__ import annotations

import os
import pty
import re
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.runs import find_best
from evo.lineage.database import locate
from evo.lineage.faults import explain
from evo.lineage.store import Store
from evo.testing.toy_kernel import write_kernel
from tests.ended import EVO, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a small search on the processor."""
    folder = tmp_path_factory.mktemp("searched")
    kernel = write_kernel(folder / "toy", ("honest", "wrong")) / "kernel.py"
    kernel.write_text(kernel.read_text().replace("values=(1, 2, 4, 8)", "values=tuple(range(1, 33))"))
    words = "search ./toy --target cpu --evaluations 12 --seed 5 --sampler evolution --sampler-option seeding=3"
    words += " --db lineage.db --name theirs"
    ended = run_python(folder, *EVO, *words.split())
    assert ended.returncode == 0, ended.stderr
    with sqlite3.connect(folder / "lineage.db") as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return folder / "lineage.db"


CHANGES = {
    "an infinite time": "UPDATE timing SET median_us = 9e999, low_us = 9e999, high_us = 9e999",
    "a time that is a word": "UPDATE timing SET median_us = 'fast'",
    "a time of 0": "UPDATE timing SET median_us = 0, low_us = 0, high_us = 0",
    "no ratio": "UPDATE timing SET ratio = NULL",
    "half a ratio": "UPDATE timing SET ratio_low = NULL",
    "a ratio that is a word": "UPDATE timing SET ratio = 'x', ratio_low = 'x', ratio_high = 'x'",
    "a ratio of 0": "UPDATE timing SET ratio = 0, ratio_low = 0, ratio_high = 0",
    "samples that are words": "UPDATE timing SET samples_us = '[\"a\", null]'",
    "no samples": "UPDATE timing SET samples_us = '[]'",
    "clocks that are a list": "UPDATE timing SET clocks = '[1]'",
    "clocks that are words": "UPDATE timing SET clocks = '{\"disturbed\": \"x\"}'",
    "a timing of nothing": "UPDATE timing SET candidate_id = -7",
    "a score that is a word": "UPDATE candidate SET score = 'x'",
    "a score of 0": "UPDATE candidate SET score = 0",
    "a cycle of parents": "UPDATE parentage SET parent_id = child_id",
    "a longer cycle": "INSERT OR REPLACE INTO parentage SELECT parent_id, 0, child_id, 'parent' FROM parentage",
    "a later parent": "UPDATE parentage SET parent_id = (SELECT max(id) FROM candidate)",
    "no parent": "UPDATE parentage SET parent_id = 12345",
    "a role of bytes": "UPDATE parentage SET role = x'ff00'",
    "dims that are no JSON": "UPDATE task SET dims = '{'",
    "dims below 0": "UPDATE task SET dims = '{\"n\": -5}'",
    "dims that are words": "UPDATE task SET dims = '{\"n\": \"x\"}'",
    "other dims": "UPDATE task SET dims = '{\"rows\": 5}'",
    "a workload of no kernel": "UPDATE task SET workload = '?'",
    "a dtype of no kernel": "UPDATE task SET dtype = 'float7'",
    "options that are a list": "UPDATE task SET options = '[1]'",
    "a run's options that are a list": "UPDATE run SET options = '[1]'",
    "a run's options of words": "UPDATE run SET options = '{\"gate_seed\": \"x\", \"origins\": 5, \"fixed\": 1}'",
    "missing kinds that are a number": "UPDATE run SET options = '{\"missing_kinds\": 3}'",
    "a budget that is a list": "UPDATE run SET budget = '[1]'",
    "a budget of words": "UPDATE run SET budget = '{\"seconds\": \"x\"}'",
    "a run's unknown status": "UPDATE run SET status = 'won'",
    "a run that failed": "UPDATE run SET status = 'failed'",
    "an unknown status": "UPDATE candidate SET status = 'splendid'",
    "an unknown status of a build": "UPDATE build SET status = 'splendid'",
    "an unknown operator": "UPDATE candidate SET operator = 'magic'",
    "an unknown sampler": "UPDATE run SET sampler = 'magic'",
    "an unknown target": "UPDATE run SET target = 'abacus'",
    "another kernel": "UPDATE run SET kernel = 'nothing'",
    "a run below 0": "UPDATE run SET id = -1",
    "no run": "DELETE FROM run",
    "no task": "DELETE FROM task",
    "no environment": "DELETE FROM environment",
    "no build": "DELETE FROM build",
    "no detail": "DELETE FROM detail",
    "no timing": "DELETE FROM timing",
    "no artefact": "DELETE FROM artefact",
    "a candidate below 0": 'UPDATE candidate SET id = -id, "order" = -"order"',
    "another run's candidates": "UPDATE candidate SET run_id = 7",
    "a task that is a word": "UPDATE candidate SET task = 'x'",
    "a task that is not there": "UPDATE candidate SET task = 9",
    "a genome that is no JSON": "UPDATE candidate SET genome = '{'",
    "a genome of other parameters": "UPDATE candidate SET genome = '{\"parameters\":{\"q\":1}}'",
    "a time of day": "UPDATE candidate SET created = 'yesterday'",
    "a run's time of day": "UPDATE run SET created = 5, updated = 'x'",
    "seconds that are words": "UPDATE candidate SET elapsed_s = 'x', seconds = 'x'",
    "infinite seconds": "UPDATE candidate SET elapsed_s = 9e999, seconds = 9e999",
    "a run's infinite seconds": "UPDATE run SET elapsed_s = 9e999",
    "a seed that is a word": "UPDATE run SET seed = 'x'",
    "bytes for texts": "UPDATE candidate SET log = x'ff41', operator = x'ff'",
    "no UTF-8": "UPDATE candidate SET log = CAST(x'ff41' AS TEXT)",
    "an identifier of bytes": "UPDATE candidate SET public_id = CAST(id AS BLOB)",
    "the same code in a ring": "UPDATE candidate SET same_code_as_id = id, status = 'same_code'",
    "details that are none": "UPDATE detail SET data = x'00'",
    "a source packed against itself": "UPDATE artefact SET base_sha = sha256",
    "sources that are none": "UPDATE artefact SET data = x'00'",
    "a winner of nothing": "UPDATE task SET winner_id = 77",
    "a winner that is a word": "UPDATE task SET winner_id = 'x'",
    "registers that are words": "UPDATE build SET registers = 'x', occupancy = 'y'",
    "an environment of a list": "UPDATE environment SET details = '[1]'",
    "a round that is a word": "UPDATE final SET round = 'x'",
}
"""Statements that make a database other than evo records it."""

LOOKS = (
    ("best",),
    ("best", "--json"),
    ("runs",),
    ("show", "theirs"),
    ("show", "CANDIDATE"),
    ("show", "CANDIDATE", "--source"),
    ("lineage", "CANDIDATE", "--diff"),
    ("diff", "CANDIDATE", "OTHER"),
    ("explain", "CANDIDATE"),
    ("failures", "theirs"),
    ("failures", "--all"),
    ("operators", "theirs"),
    ("importance", "theirs"),
    ("pareto", "theirs"),
    ("compare", "theirs", "theirs"),
    ("report", "theirs", "--out", "page.html"),
    ("watch", "theirs"),
    ("query", "SELECT * FROM v_best"),
    ("replay", "--run", "theirs"),
    ("export", "theirs", "--format", "t4", "--out", "t4"),
    ("check", "CANDIDATE", "--compile-only"),
    ("prune", "theirs", "--dry-run"),
)


def edited(searched: Path, path: Path, *statements: str) -> list[str]:
    """Copies the database and edits the copy. The best candidate's id, and another's."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(searched.read_bytes())
    with Store.open(path, write=False) as store:
        (best,) = find_best(store)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        last = "SELECT public_id FROM candidate WHERE id = (SELECT max(child_id) FROM parentage)"
        other = connection.execute(last).fetchone()[0]
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement
    connection.close()
    return [best.id, other]


@pytest.mark.parametrize("name", CHANGES)
def test_no_command_ends_in_a_traceback(here: Any, searched: Path, tmp_path: Path, name: str) -> None:
    """What raises in a command raises here, too."""
    path = tmp_path / "runs" / "lineage.db"
    best, other = edited(searched, path, CHANGES[name])
    failed = []
    for words in LOOKS:
        try:
            ended = here(*({"CANDIDATE": best, "OTHER": other}.get(word, word) for word in words))
        except Exception as error:
            failed.append(f"{words}: {error!r}")
            continue
        told = [line for line in ended.err.splitlines() if line.startswith("evo: ")]
        assert ended.code in (0, 1, 2), (words, ended.err)
        assert ended.code == 0 or told, (words, ended.err)
    assert not failed, "\n".join(failed)


SAID = [
    ("a time that is a word", ("best",), "has the median_us 'fast', which is no number"),
    ("a cycle of parents", ("lineage", "OTHER"), "names a parent that is not earlier"),
    ("dims that are no JSON", ("report", "theirs", "--out", "page.html"), "task 0 cannot be read"),
    ("a run's options that are a list", ("show", "theirs"), "has the options [1], which is no object"),
    ("a ratio that is a word", ("explain", "CANDIDATE"), "has the ratio 'x', which is no number"),
    ("a run's infinite seconds", ("runs",), "has the elapsed_s inf, which is no finite number"),
]


@pytest.mark.parametrize(("name", "words", "said"), SAID)
def test_the_sentence_names_the_file_the_run_the_row_and_what_to_do(
    here: Any, searched: Path, tmp_path: Path, name: str, words: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "runs" / "lineage.db"
    best, other = edited(searched, path, CHANGES[name])
    ended = here(*({"CANDIDATE": best, "OTHER": other}.get(word, word) for word in words))
    assert ended.code == 2
    assert said in ended.sentence
    assert f"the database {path} holds what evo does not record there: run 'theirs'" in ended.sentence
    assert "correct or delete that row, go back to a backup, or name another database with --db" in ended.sentence


def test_a_fault_of_evo_itself_is_told_as_such(searched: Path, tmp_path: Path) -> None:
    """No row is blamed in a database where every row is right."""
    path = tmp_path / "lineage.db"
    edited(searched, path)
    assert explain(ZeroDivisionError(), locate(path)) is None
    edited(searched, path, CHANGES["a time that is a word"])
    assert "'fast'" in str(explain(ZeroDivisionError(), locate(path)))


SPOILT = {
    f"{table}.{column}": f"UPDATE {table} SET {column} = {column} || '{table}.{column}' || char(27) || '[2J' || char(27)"
    " || ']0;owned' || char(7, 155) || '31m'"
    for table, column in (
        ("run", "name"),
        ("run", "kernel"),
        ("run", "stop_reason"),
        ("run", "arch"),
        ("environment", "device"),
        ("candidate", "operator"),
        ("candidate", "log"),
        ("timing", "contender"),
    )
}
"""By the column that is spoilt, whose name stands before the escapes."""


def test_nothing_in_a_database_moves_the_cursor(here: Any, searched: Path, tmp_path: Path) -> None:
    together = ["run.kernel", "run.stop_reason", "environment.device", "candidate.operator"]
    for names in (together, *([name] for name in SPOILT if name not in together)):
        shown = ""
        best, other = edited(searched, tmp_path / "runs" / "lineage.db", *(SPOILT[name] for name in names))
        for words in LOOKS:
            ended = here(*({"CANDIDATE": best, "OTHER": other}.get(word, word) for word in words))
            assert not set(ended.out + ended.err) & set("\x1b\x07\x9b"), words
            shown += ended.out + ended.err
        assert all((f"{name}\\x1b[2J" if names is together else "\\x1b[2J") in shown for name in names), names


def test_on_a_terminal_only_colours_are_escapes(searched: Path, tmp_path: Path) -> None:
    best, _ = edited(searched, tmp_path / "runs" / "lineage.db", *SPOILT.values())
    for words in (("runs",), ("show", best), ("show", "nothing\x1b[2J"), ("lineage", best)):
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            ended = subprocess.run(
                [sys.executable, "-m", "evo", *words], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
                env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "300"}, check=False, timeout=60,
            )  # fmt: skip
            os.close(theirs)
            shown = b""
            with suppress(OSError):  # the end, of a terminal that nobody has open
                while some := terminal.read(65536):
                    shown += some
        assert b"Traceback" not in shown, shown
        assert ended.returncode in (0, 1, 2)
        assert b"\\x1b[2J" in shown, (words, shown)
        assert not {b"\x1b[2J", b"\x1b]0", b"\x07"} & {*re.findall(rb"\x1b\[2J|\x1b\]0|\x07", shown)}, words
