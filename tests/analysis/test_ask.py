"""Questions as commands: tables for people, JSON for programs, one sentence for what cannot be."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import evo
from evo.errors import UnknownNameError, UsageError
from evo.lineage.store import Store
from evo.problem.genome import Genome
from tests.ended import Ended, run_here
from tests.lineage import landscapes as land
from tests.lineage import samples as s

HOSTILE = "evil\x1b[31m[red]\u202e<b>\r\n"


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run "first" and "second" are random searches; "walk" goes from START to END."""
    path = tmp_path_factory.mktemp("ask") / "lineage.db"
    with Store.open(path, write=True) as store:
        land.searched(store, "first", 120)
        land.searched(store, "second", 80, seed=3)
        middle: land.Point = {**land.START, "vector": 4}
        path_too: land.Point = {**middle, "path": "shared", "stages": 3}
        land.walked(store, [land.START, middle, path_too, {**path_too, "hints": "stream"}, land.END], "walk")
        run = store.create_run(replace(s.SPEC, name="hostile", workloads=(s.SMALL,)), s.ENVIRONMENT)
        ref = land.ref(0, {"mode": HOSTILE}, operator=HOSTILE)
        store.add(run, ref, replace(s.failed(s.Status.CRASH), log=HOSTILE), elapsed_s=1.0)
        store.add(run, land.ref(1, {"mode": HOSTILE + "2"}, 0, operator=HOSTILE), land.timed(1, 0.5), elapsed_s=1.0)
    return str(path)


@pytest.fixture
def ask(db: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.setenv("COLUMNS", "500")
    return lambda *arguments: run_here(capsys, *arguments, "--db", db)


@pytest.fixture
def lineage(db: str) -> Iterator[evo.Lineage]:
    with evo.Lineage(db) as opened:
        yield opened


@pytest.fixture
def walk(lineage: evo.Lineage) -> list[str]:
    return [point.id for point in lineage.history("walk")]


@pytest.fixture
def ask_narrow(ask: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`ask` on a terminal of 100 columns, without its colours."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("FORCE_COLOR", "1")
        ended = ask(*arguments)
        return replace(ended, out=re.sub(r"\x1b\[[0-9;]*m", "", ended.out))

    return run


# -- the commands ---------------------------------------------------------------------------------------------


def test_lineage_shows_both_directions_and_what_each_step_gained(ask: Any, walk: list[str]) -> None:
    ended = ask("lineage", walk[2][:10], "--diff")
    assert ended.code == 0
    assert "2 ancestors above it and 2 descendants below" in ended.out
    line = next(line for line in ended.out.splitlines() if "path: reread -> shared" in line)
    assert "1.300x" in line
    assert "1.296 to 1.304" in line
    assert "+// candidate 2: μs" in ended.out
    members = ask("lineage", walk[2], "--json").document
    assert [(m["relation"], m["generation"]) for m in members] == [
        ("ancestor", -2), ("ancestor", -1), ("self", 0), ("descendant", 1), ("descendant", 2)
    ]  # fmt: skip
    assert members[2]["gain"] == pytest.approx(1.3)
    assert members[3]["tie"] is True


def test_diff_tells_what_differs_and_who_is_faster(ask: Any, walk: list[str]) -> None:
    ended = ask("diff", walk[0][:12], walk[1][:12])
    assert ended.code == 0
    assert f"{walk[1][:10]} is 1.600x as fast in the search" in ended.out
    assert "-// candidate 0: μs" in ended.out
    words = {line.split()[0] for line in ended.out.splitlines() if line.split()}
    assert "registers" not in words, "what is equal is left out"
    assert "spill_bytes" in ask("diff", walk[0][:12], walk[1][:12], "--all").out
    assert "source" not in ask("diff", walk[0][:12], walk[1][:12], "--no-source").out.replace("source_digest", "")
    found = ask("diff", walk[0], walk[1], "--json").document
    assert {"section": "genome", "name": "vector", "one": 1, "other": 4, "differs": True} in found["rows"]


def test_explain_is_a_story_of_ten_lines(ask: Any, walk: list[str]) -> None:
    ended = ask("explain", walk[-1])
    lines = ended.out.splitlines()
    assert len(lines) <= 10
    assert "over the reference" in lines[0]
    assert "2.184x" in lines[1]
    assert re.match(r"vector: 1 -> 4 +1\.600x +1\.595 to 1\.605 ", lines[3])
    assert re.match(r"path: reread -> shared, stages: - -> 3 +1\.300x +1\.296 to 1\.304 ", lines[4])
    assert re.search(r"(?m)^hints: none -> stream +tie ", ended.out)
    record = json.loads(ask("explain", walk[-1], "--json", "--from", walk[1]).out)
    assert record["base_id"] == walk[1]
    assert record["measured"] is None
    assert record["edits"][0]["change"].keys() == {"path", "stages"}


def test_explain_says_what_was_not_measured_and_how_to_do_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        last = land.walked(store, [land.START, land.END])[-1]  # all edits at once
    out = run_here(capsys, "explain", last, "--db", str(path)).out
    assert " not measured " in out
    assert f"evo explain {last[:10]} --measure --db" in out


def test_failures_find_the_rule(ask: Any) -> None:
    ended = ask("failures", "first")
    assert ended.code == 0
    rule = next(line for line in ended.out.splitlines() if " and " in line and "threads=1024" in line)
    assert "path=registers" in rule
    totals = ask("failures", "--all", "--json").document
    assert {t["status"] for t in totals} == {"ok", "compile_error", "crash"}
    assert "all runs: leave out" not in ask("failures").out
    assert "--all is for every run" in ask("failures", "first", "--all").sentence


def test_operators_importance_and_pareto_have_tables_and_json(ask: Any) -> None:
    assert "mutation" in ask("operators", "first").out
    assert {c["window"] for c in ask("operators", "first", "--windows", "2", "--json").document} == {None, 0, 1}
    assert "vector" in ask("importance", "first").out
    shares = ask("importance", "first", "--json").document
    assert shares[0]["parameter"] == "vector"
    assert "speed-up" in ask("pareto", "first", "--axes", "time,error").out
    assert ask("pareto", "first", "--json").document[0]["fastest"] is True
    assert "unknown axis 'energy'" in ask("pareto", "first", "--axes", "time,energy").sentence


def test_importance_ends_with_the_values_that_were_hardly_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = land.small_run(store, "mine")
        with store.transaction():
            for order in range(60):
                value = 9 if order == 7 else order % 3
                ratio = 0.25 if value == 9 else 0.5 + 0.1 * value
                store.add(run, land.ref(order, {"vector": value}), land.timed(order, ratio), elapsed_s=0.0)
    out = run_here(capsys, "importance", "mine", "--db", str(path)).out
    assert "Tried least of what mattered most: vector=9 (1 of 60, best 4.000×).\n" in out
    assert f"evo search KERNEL --fix NAME=VALUE --db {path}" in out
    (record,) = run_here(capsys, "importance", "mine", "--db", str(path), "--json").document
    expected = {"parameter": "vector", "value": 9, "candidates": 1, "of": 60, "passed": 1, "best": 0.25}
    assert record["tried"][0].items() >= expected.items()


def test_compare_shows_what_was_set_differently(ask: Any) -> None:
    ended = ask("compare", "first", "second")
    assert ended.code == 0
    assert ended.out.count("NVIDIA L4") == 1, "once for both, which ran on one"
    assert "they were set up alike" in ended.out
    found = ask("compare", "first", "second", "--json").document
    assert found["rows"][0]["reached_s"].keys() == {"1.1x", "1.3x", "1.5x", "2.0x"}
    assert "nothing to compare first with" in ask("compare", "first", "first").sentence


def test_query_prints_tables_json_and_csv(ask: Any) -> None:
    sql = 'SELECT "order", status, log FROM candidate ORDER BY id'
    ended = ask("query", sql, "--limit", "2")
    assert len(ended.out.splitlines()) == 3
    assert ended.sentence == "evo: there are more rows than the 2 shown; ask for more with --limit"
    record = json.loads(ask("query", sql, "--format", "json", "--limit", "2").out)
    assert (record["columns"], record["cut"], len(record["rows"])) == (["order", "status", "log"], True, 2)
    rows = list(csv.reader(io.StringIO(ask("query", sql, "--format", "csv").out)))
    assert rows[0] == ["order", "status", "log"]
    assert len(rows) == 1 + 120 + 80 + 5 + 2
    blob = ask("query", "SELECT x'00ff', 9e999, NULL", "--json").document
    assert blob["rows"] == [["00ff", "inf", None]]
    ended = ask("query", "SELECT public_id FROM candidate WHERE 0")
    assert (ended.code, ended.out, ended.sentence) == (0, "", "evo: no rows")


def test_hints_of_the_store_leave_out_the_database_that_commands_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lineage.db"
    Store.open(path, write=True).close()
    ended = run_here(capsys, "show", "latest", "--db", str(path))
    assert (ended.code, f"start one with: evo search KERNEL --db {path}" in ended.err) == (2, True)
    monkeypatch.setenv("EVO_DB", str(path))
    ended = run_here(capsys, "runs")
    assert (ended.code, ended.sentence.endswith("start one with: evo search KERNEL")) == (0, True)


def test_what_is_no_name_at_all_is_said(lineage: evo.Lineage) -> None:
    names: Any = ["first", "second"]
    with pytest.raises(UsageError, match=r"\['first', 'second'\] is not the name of a run; give names one by one"):
        lineage.compare(names)
    with pytest.raises(UsageError, match="3 is not the name of a candidate"):
        lineage.lineage(3)  # type: ignore[arg-type]


def test_what_has_no_rows_has_no_headings_and_says_why(ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = ask("best", "--device", "H200")
    assert (ended.code, ended.out) == (1, "")
    assert ended.sentence.endswith("here of what you ask for; devices that were searched on: NVIDIA L4")
    path = tmp_path / "empty.db"
    Store.open(path, write=True).close()
    for words in (["runs"], ["failures", "--all"]):
        ended = run_here(capsys, *words, "--db", str(path))
        assert (ended.code, ended.out, "has been recorded in this database yet" in ended.err) == (0, "", True)


def test_no_interval_is_folded_on_a_terminal_of_a_hundred_columns(ask_narrow: Any, walk: list[str]) -> None:
    for words in (["lineage", walk[3]], ["best", "--run", "walk"], ["show", walk[3]], ["compare", "first", "second"]):
        lines = ask_narrow(*words).out.splitlines()
        assert not [line for line in lines if re.search(r"[0-9] to *$", line) or re.search(r" to  ", line)], words


WIDE = f"SELECT '{'a' * 150}' AS first, '{'b' * 150}' AS second, 'end' AS third UNION ALL SELECT 'x', 'y', 'z'"


def test_a_table_wider_than_the_terminal_is_printed_row_by_row_and_a_file_gets_all_of_it(
    ask: Any, ask_narrow: Any
) -> None:
    written = ask("query", WIDE).out.splitlines()
    assert written[1].split() == ["a" * 150, "b" * 150, "end"], "nothing is cut in a file"
    lines = ask_narrow("query", WIDE).out.splitlines()
    assert lines[:3] == ["first:  " + "a" * 150, "second: " + "b" * 150, "third:  end"]
    assert set(lines[3]) == {"─"}
    assert lines[4:] == ["first:  x", "second: y", "third:  z"]
    assert ask_narrow("query", "SELECT 1 AS one, 2 AS two").out.split() == ["one", "two", "1", "2"]


# -- bad input ------------------------------------------------------------------------------------------------

BAD = {
    "syntax": (["query", "SELEC 1"], "SELEC is no question"),
    "endless": (
        ["query", "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT count(*) FROM n", "--timeout", "0.2"],
        "was not done after 0.2 s and was stopped",
    ),
    "timeout": (["query", "SELECT 1", "--timeout", "soon"], "--timeout 'soon' is not a duration"),
    "limit": (["query", "SELECT 1", "--limit", "0"], "--limit"),
    "format": (["query", "SELECT 1", "--format", "xml"], "--format"),
    "run": (["failures", "frist"], "unknown run 'frist'; did you mean first?"),
    "compare run": (["compare", "first", "nobody"], "unknown run 'nobody'; known: first, hostile, second, walk"),
    "candidate": (["lineage", "zzz"], "unknown run or candidate 'zzz'"),
    "run for candidate": (["lineage", "walk"], "run 'walk' has no winner; its best candidate: evo show"),
    "explain": (["explain", "abcdefabcdef"], "unknown candidate 'abcdefabcdef'"),
    "seed": (["explain", "abcdef", "--seed", "3"], "--seed is for --measure"),
    "quantile": (["importance", "first", "--quantile", "2"], "the quantile 2 is not between 0 and 1"),
    "windows": (["operators", "first", "--windows", "0"], "--windows"),
    "best": (["best", "sofmax"], "unknown kernel in this database 'sofmax'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_said_in_one_sentence(ask: Any, case: str) -> None:
    arguments, sentence = BAD[case]
    ended = ask(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert sentence in ended.sentence


@pytest.mark.parametrize(
    "words",
    [
        ["runs"],
        ["failures", "hostile"],
        ["operators", "hostile"],
        ["importance", "hostile"],
        ["pareto", "hostile"],
        ["query", "SELECT operator AS \"a\x1b[bold]\", log, genome FROM candidate WHERE operator LIKE 'evil%'"],
        ["lineage", "LAST"],
        ["diff", "LAST", "FIRST"],
        ["explain", "LAST"],
    ],
)
def test_nothing_recorded_moves_the_cursor_or_is_markup(ask: Any, lineage: evo.Lineage, words: list[str]) -> None:
    first, last = (p.id for p in lineage.history("hostile"))
    ended = ask(*({"FIRST": first, "LAST": last}.get(word, word) for word in words))
    assert ended.code == 0
    for character in ("\x1b", "\u202e", "\r"):
        assert character not in ended.out + ended.err
    if words[0] in ("failures", "operators", "query", "lineage", "diff"):
        assert "[red]" in ended.out


# -- the Python API -------------------------------------------------------------------------------------------


def test_evo_is_imported_without_a_database_library() -> None:
    code = "import sys, evo; assert 'sqlalchemy' not in sys.modules; evo.Lineage; assert 'sqlalchemy' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'Linaege'"):
        evo.Linaege  # noqa: B018


def test_each_question_is_a_method_whose_rows_a_table_takes(lineage: evo.Lineage, walk: list[str]) -> None:
    report, comparison = lineage.failures("first"), lineage.compare("first", "second")
    answers: dict[str, Sequence[Any]] = {
        "runs": lineage.runs(),
        "history": lineage.history("walk"),
        "best": lineage.best("layernorm", dtype="float32"),
        "lineage": lineage.lineage(walk[2], diff=True).members,
        "diff": lineage.diff(walk[0], walk[1]).rows,
        "explain": lineage.explain(walk[-1]).edits,
        "operators": lineage.operators("first"),
        "importance": lineage.importance("first"),
        "compare": comparison.rows,
        "finals": lineage.finals("first").finals,
        "pareto": lineage.pareto("first"),
        "totals": lineage.failure_totals(),
        **{f"failures: {name}": getattr(report, name) for name in ("kinds", "reasons", "values", "rules")},
    }
    for name, rows in answers.items():
        assert rows, name
        assert len({type(row) for row in rows}) == 1, name
        assert is_dataclass(rows[0]), name
        assert all(not field.name.startswith("_") for field in fields(rows[0]))
    found = lineage.query("SELECT 1 AS a, 'x' AS b")
    assert (found.columns, found.rows) == (("a", "b"), ((1, "x"),))
    assert lineage.query("SELECT 1", limit=0).cut
    assert lineage.compare("first", "walk").settings == ()
    assert lineage.explain(walk[-1], {**land.START, "vector": 4}).edits[0].change.keys() == {"path", "stages"}
    assert lineage.explain(walk[-1], Genome.of(land.END)).edits == ()
    assert repr(lineage).startswith("<evo.Lineage: the database ")
    with pytest.raises(UnknownNameError):
        lineage.candidate("zzz")
    lineage.close()  # again at the end of its `with`


# -- what programs rely on -------------------------------------------------------------------------------------

GAIN = {"gain", "low", "high"}
TIMES = {"median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high", "disturbed"}
PROBLEM = {"kernel", "target", "arch", "device", "workload"}
KEYS: dict[str, set[str]] = {
    "runs": {
        "name", "kernel", "kernel_digest", "target", "arch", "device", "sampler", "seed", "window", "options", "budget",
        "status", "stop_reason", "created", "updated", "finished", "elapsed_s", "evaluations", "passed", "counts", "islands",
        "environment", "refused_in_finals", "best",
    },
    "best": {
        "candidate", "id", "order", "dtype", "run", "winner", "score", "stage", "protocol", "finals", "refused_finalists",
        "noise_floor", "parameters", *PROBLEM, *TIMES,
    },
    "show RUN": {"name", "islands", "window", "finals", "refused_in_finals"},
    "show CANDIDATE": {
        "id", "run", "order", "island", "dims", "dtype", "options", "parameters", "digest", "source", "operator", "status",
        "score", "log", "same_code_as", "winner", "seconds", "gate_seconds", "timing_seconds", "elapsed_s", "created",
        "build", "checks", "timings", "finals", "final_races", "parents", "children", *PROBLEM,
    },
    "lineage CANDIDATE": {
        "id", "relation", "generation", "order", "operator", "status", "score", "median_us", "low_us", "high_us",
        "disturbed", "gain", "gain_low", "gain_high", "tie", "parents", "change", "parameters", "main_line", "diff",
    },
    "diff CANDIDATE CANDIDATE": {
        "one", "other", "rows", "gain", "gain_low", "gain_high", "tie", "timed_in", "one_race", "same_code", "source", "ptx",
    },
    "explain CANDIDATE": {
        "id", "run", "ratio", "median_us", "disturbed", "base", "base_id", "base_from", "base_us", "product", "rest",
        "edits", "measured_between", "measured", *PROBLEM, *GAIN,
    },
    "failures RUN": {"run", "candidates", "refused", "kinds", "reasons", "values", "rules"},
    "failures --all": {"kernel", "target", "device", "status", "runs", "candidates", "share"},
    "operators RUN": {
        "operator", "window", "from_s", "to_s", "trials", "passed", "new_code", "compared", "better", "success",
        "improvements", "gain", "seconds", "gain_rate",
    },
    "importance RUN": {
        "workload", "parameter", "importance", "candidates", "timed", "values", "conditional", "note", "tried",
    },
    "compare RUN OTHER": {"rows", "settings"},
    "pareto RUN": {
        "workload", "id", "order", "ratio", "median_us", "registers", "spill_bytes", "smem_bytes", "error", "equal",
        "fastest", "disturbed", "parameters",
    },
    "query SELECT": {"columns", "rows", "cut", "limit"},
}  # fmt: skip
"""What scripts outside rely on: no key of these goes or is renamed."""


@pytest.mark.parametrize("command", KEYS)
def test_no_key_of_json_goes(ask: Any, walk: list[str], command: str) -> None:
    names = {"CANDIDATE": walk[1], "RUN": "first", "OTHER": "second", "SELECT": "SELECT 1"}
    ended = ask(*(names.get(word, word) for word in command.split()), "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    record = document[0] if isinstance(document, list) else document
    assert KEYS[command] <= set(record)
    for timing in record["timings"] if command == "show CANDIDATE" else ():
        assert {"island", "stage", "round", "contender", "protocol", "samples_us", "clocks", *TIMES} <= set(timing)
