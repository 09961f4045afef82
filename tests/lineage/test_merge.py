"""Merge: everything arrives, once, from either kind of database in either; nothing arrives by half."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import samples as s

from evo.analysis.candidates import read_candidate
from evo.analysis.finals import read_run_finals
from evo.analysis.runs import list_runs
from evo.errors import StoreError
from evo.evaluation import Parent, Status
from evo.lineage import RunStatus, Stage, faults, read
from evo.lineage.merge import merge
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.search.loop import Budget


def record(store: Store, name: str, numbers: range) -> None:
    """A run, or more of it, with a record of every kind."""
    if numbers[0]:
        run = store.run(name)
        store.set_status(run, RunStatus.RUNNING, elapsed_s=1.0)
    else:
        run = s.new_run(store, name)
        store.add_baselines(run, 0, [s.timing(contender="torch", ratio=1.0)])
    for order in numbers:
        parents = () if order == 0 else (Parent(order - 1, "parent"), Parent(order // 2, "mate"))
        made = s.passed(order, 0.9 / (order + 1))
        made = {3: s.same_code(order, order - 1), 4: s.refused(order), 5: s.failed(Status.CRASH)}.get(order % 6, made)
        store.add(run, s.ref(order, *parents), made, elapsed_s=float(order))
    store.add_final(run, numbers[-1], s.final(0.1), elapsed_s=50.0)
    store.set_winner(run, 0, numbers[-1])
    store.set_status(run, RunStatus.FINISHED, reason="all done", elapsed_s=60.0)


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merge") / "full.db"
    with Store.open(path, write=True) as store:
        record(store, "first", range(9))
        record(store, "second", range(5))
    return path


@pytest.fixture
def filled(recorded_once: Path, tmp_path: Path) -> Path:
    """A SQLite database of two runs."""
    return Path(shutil.copy(recorded_once, tmp_path))


@pytest.fixture
def full(filled: Path) -> Iterator[Store]:
    with Store.open(filled, write=True) as store:
        yield store


WRONG = """
no JSON | candidate 1 | genome = '{"parameters": {' | candidate 1 has a genome that cannot be
no genome | candidate 1 | genome = '[1]' | candidate 1 has a genome that cannot be read
an unknown status | candidate 1 | status = 'splendid' | candidate 1 has the unknown status
a build's status | build 2 | status = '' | a build of candidate 2 has the unknown
a final's status | final | status = 'won' | a final of candidate 8 has the unknown status 'won'
a refused winner | final | status = 'wrong' | candidate 8 has the time of a final that it did not pass
a winner without times | timing 8 | contender = 'torch' | candidate 8, the winner of task 0, has no time
a winner that is not there | task | winner_id = winner_id + 900 | the winner of task 0, has no time
another run's winner | task | winner_id = winner_id + 4294967296 | of another run
a wrong one with a time | candidate 1 | status = 'wrong', score = NULL | candidate 1 of run 'first'
nothing in flight | run | max_in_flight = 0 | has 0 candidates in flight at most
a budget of words | run | budget = '{"max_seconds": "long"}' | whose limits are not all numbers
a score of nothing | candidate 1 | score = 0 | candidate 1 has the score 0
a score without passing | candidate 4 | score = 0.1 | candidate 4 has the score 0.1 with status wrong
infinite | candidate 1 | seconds = 9e999 | candidate 1 has the seconds inf, which is no finite
negative | timing 1 | low_us = -1 | a timing of candidate 1 has the low_us -1.0
no time at all | timing 1 | median_us = 0 | a timing of candidate 1 has a time of 0
a word for a time | timing 1 | median_us = 'fast' | a timing of candidate 1
NaN in a sample | timing 1 | samples_us = '[NaN]' | a timing of candidate 1
nothing in a genome | candidate 1 | genome = '{"parameters":{"a":null}}' | a genome whose values are not all
no list of samples | timing 1 | samples_us = '3' | of table 'timing' cannot be read
clocks that are words | timing 1 | clocks = '{"sm": "x"}' | a timing of candidate 1
no parent | parentage 5 | parent_id = parent_id + 4000 | a parentage of candidate 5 refers
a later parent | parentage 5 | parent_id = child_id + 1 | a parentage of candidate 5 names a parent that is not earlier: 6
no original | candidate 3 | same_code_as_id = id + 4000 | candidate 3 refers to candidate
a duplicate of nothing | candidate 3 | same_code_as_id = NULL | candidate 3 has status same_code, and no
no time of day | candidate 1 | created = 'yesterday' | candidate 1 cannot be read
no UTF-8 | candidate 1 | log = CAST(x'ff41' AS TEXT) | candidate 1 cannot be read
a NUL | run | kernel = 'a' || char(0) | which holds a NUL
bytes for text | candidate 1 | log = x'ff41' | which is no str
another identifier | candidate 1 | public_id = 'abc' || run_id | candidate 1 has another identifier
dims that are words | task | dims = '{"rows": "../x"}' | task 0 has dimensions
dims that are a list | task | dims = '[1, 2]' | task 0 has the dims [1, 2], which is no object
options of lists | task | options = '{"eps": [1]}' | task 0 has dimensions
tasks from 1 | task | number = 7 * number | its tasks are numbered [0, 7]
details that are none | detail 0 | data = x'00' | the checks of candidate 0 cannot be read
a source that is another | artefact | data = (SELECT data FROM artefact WHERE base_sha IS NULL AND kind = 'source') | file
a base that goes round | artefact | base_sha = sha256 | is packed against
options that are no JSON | run | options = '{' | row 1 of table 'run' cannot be read
options too deep to read | run | options = replace(hex(zeroblob(50000)), '0', '[') | row 1 of table 'run' cannot be read
a start that is a list | run | options = '{"starts": [[1]]}' | which are no points of a search space
missing kinds that are numbers | run | options = '{"missing_kinds": {"rows=1": [3]}}' | [3]}, which are no lists of words
a limit of no budget | run | budget = '{"joules": 5}' | and a budget has no 'joules'
options with NaN | run | options = '{"a": NaN}' | which is no JSON
a name that is a path | run | name = '../../x' || id | the run has the name '../../x1', which none may have
a run's status | run | status = 'won' | the run has the unknown status 'won'
no environment | run | environment_id = 77 | the run is of environment 77, which is not there
a target that is no name | run | target = '../x' | has the target '../x', which none may be called
a sampler that is no name | run | sampler = '' | has the sampler '', which none may be called
a dtype of no kernel | task | dtype = 'float7' | task 0 has the dtype 'float7', which no kernel has
dims below 0 | task | dims = '{"rows": -5}' | task 0 has dimensions {'rows': -5}
an interval that is upside down | timing 1 | low_us = 9, high_us = 1 | which is not within 9.0 to 1.0
a ratio outside of its interval | timing 1 | ratio = 3 * ratio_high | a timing of candidate 1 has the ratio 1.38
other medians | timing 1 AND contender = 'torch' | ratio = NULL, median_us = 1e6, high_us = 1e7 | medians are
a key of another order | candidate 8 | "order" = 77 | which does not follow from its run
a broken seed | run | seed = 'x' | the run has the seed 'x', which is no number
"""
"""Changes that make a run other than evo records it: a name, the changed table and the order of the row's candidate, what is
set in it, and a part of the sentence that refuses it."""


@pytest.mark.parametrize("line", WRONG.strip().splitlines(), ids=lambda line: line.partition(" | ")[0])
def test_a_run_that_is_not_as_evo_records_one_is_refused_with_its_row_and_nothing_changes(
    filled: Path, tmp_path: Path, line: str
) -> None:
    _, row, change, said = line.split(" | ")
    table, _, order = row.partition(" ")
    key = {"candidate": '"order"', "parentage": "child_id % 4294967296"}.get(table, "candidate_id % 4294967296")
    statement = f"UPDATE {table} SET {change}" + (f" WHERE {key} = {order}" if order else "")
    with sqlite3.connect(filled) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement).rowcount > 0
    connection.close()
    with Store.open(tmp_path / "ours.db", write=True) as target:
        record(target, "mine", range(3))
        expected = contents(target)
        with Store.open(filled, write=False) as source, pytest.raises(StoreError) as caught:
            merge(target, source)
        assert said in str(caught.value)
        assert str(caught.value).endswith("; nothing was changed")
        assert "\n" not in str(caught.value)
        assert contents(target) == expected


def test_the_limits_that_a_record_may_have_are_those_of_a_budget() -> None:
    assert {limit.name for limit in fields(Budget)} == faults.LIMITS


def test_targets_and_samplers_of_another_version_are_taken(full: Store, tmp_path: Path) -> None:
    """They are data: what needs one says that it is not there."""
    assert full.path is not None
    with sqlite3.connect(full.path) as connection:
        connection.execute("UPDATE run SET target = 'npu', sampler = 'annealing', kernel = 'theirs'")
        connection.execute("UPDATE candidate SET operator = 'transplant'")
    connection.close()
    with Store.open(tmp_path / "ours.db", write=True) as target:
        assert merge(target, full).added == ["first", "second"]
        assert (target.run("first").spec.target, target.run("first").spec.sampler) == ("npu", "annealing")


def test_a_refused_candidate_of_a_code_that_was_refused_before_is_taken(full: Store, tmp_path: Path) -> None:
    run = full.run("first")
    full.set_status(run, RunStatus.RUNNING, elapsed_s=1.0)
    full.add(run, s.ref(9), replace(s.refused(9), same_code_as=4), elapsed_s=9.0)
    with Store.open(tmp_path / "ours.db", write=True) as target:
        assert merge(target, full).added == ["first", "second"]
        assert target.evaluations(target.run("first"))[9].evaluation.same_code_as == 4


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "has the schema 9999, which this evo does not know"),
        ("DELETE FROM alembic_version", "has the schema None"),
        ("DROP TABLE parentage", "belongs to something else"),
        ("ALTER TABLE candidate DROP COLUMN log", "its table 'candidate' cannot be read"),
    ],
)
def test_a_schema_that_is_not_evos_is_refused(filled: Path, tmp_path: Path, statement: str, said: str) -> None:
    with sqlite3.connect(filled) as connection:
        for view in ("v_best", "v_lineage", "v_timings"):
            connection.execute(f"DROP VIEW {view}")
        connection.execute(statement)
    connection.close()
    with Store.open(tmp_path / "ours.db", write=True) as target:
        with pytest.raises(StoreError, match=said), Store.open(filled, write=False) as source:
            merge(target, source)
        assert list_runs(target) == ()


def contents(store: Store) -> dict[str, object]:
    """All that can be asked of a database, without the keys in it."""
    found: dict[str, object] = {}
    for summary in list_runs(store):
        run = store.run(summary.name)
        evaluations = store.evaluations(run)
        found[run.uid] = (
            replace(summary, name=""),
            evaluations,
            [(read_candidate(store, e.public_id), s.kept(store, e.public_id)) for e in evaluations],
            s.baselines(store, run.name),
        )
    return found


def test_runs_of_both_are_there_with_everything_and_a_second_time_nothing_changes(
    where: str, full: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there are more candidates than are copied at once."""
    monkeypatch.setattr(faults, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(read, "_AT_ONCE", 5)
    with Store.open(where, write=True) as target:
        record(target, "mine", range(4))
        before = contents(target)
        done = merge(target, full)
        assert done.added == ["first", "second"]
        assert (done.candidates, done.artefacts) == (14, 8 + 6 - 4 - 3)  # of the first four it had the sources, and code
        expected = before | contents(full)
        assert contents(target) == expected
        again = merge(target, full)
        assert (again.added, again.continued, again.candidates) == ([], [], 0)
        assert again.unchanged == ["first", "second"]
        assert contents(target) == expected
        assert merge(full, target).added == ["mine"]
        assert contents(full) == expected


def test_a_name_that_is_taken_is_made_another(where: str, full: Store) -> None:
    with Store.open(where, write=True) as target:
        record(target, "first", range(3))
        uid = full.run("first").uid
        done = merge(target, full)
        assert done.renamed == {"first": f"first-{uid[:4]}"}
        assert target.run(f"first-{uid[:4]}").uid == uid
        assert merge(target, full).unchanged == [f"first-{uid[:4]}", "second"]
        assert len(list_runs(target)) == 3


def test_a_run_that_went_on_elsewhere_is_taken_from_there(where: str, full: Store) -> None:
    with Store.open(where, write=True) as target:
        merge(target, full)
        target.set_winner(target.run("first"), 0, 2)
    record(full, "first", range(9, 12))
    with Store.open(where, write=True) as target:
        done = merge(target, full)
        assert (done.added, done.continued, done.unchanged) == ([], ["first"], ["second"])
        assert contents(target) == contents(full)
        if target.path is None:
            return
        with target.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []


def test_one_that_is_further_here_stays(where: str, full: Store) -> None:
    full.set_status(full.run("second"), RunStatus.RUNNING, elapsed_s=1.0)
    with Store.open(where, write=True) as target:
        merge(target, full)
        assert target.run("second").status is RunStatus.INTERRUPTED
        assert target.run("second").stop_reason == "it was being searched when it was copied"
        record(target, "first", range(9, 12))
        expected = contents(target)
        assert merge(target, full).unchanged == ["first", "second"]
        assert contents(target) == expected


def test_gaps_in_the_order_are_no_contradiction(where: str, tmp_path: Path) -> None:
    """A database copied while candidate 1 was still being measured."""
    with Store.open(tmp_path / "a.db", write=True) as source, Store.open(where, write=True) as target:
        run = s.new_run(source, "run")
        for order in (0, 2):
            source.add(run, s.ref(order), s.passed(order), elapsed_s=1.0)
        merge(target, source)
        source.add(run, s.ref(1), s.same_code(1, 2), elapsed_s=2.0)  # refers to a later one
        assert merge(target, source).continued == ["run"]
        stored = target.evaluations(target.run("run"))
        assert [e.candidate.order for e in stored] == [0, 1, 2]
        assert stored[1].evaluation.same_code_as == 2


def test_one_that_went_on_in_both_is_refused_and_nothing_changes(where: str, full: Store) -> None:
    with Store.open(where, write=True) as target:
        merge(target, full)
        record(target, "second", range(5, 7))
        expected = contents(target)
        record(full, "another", range(3))
        record(full, "second", range(5, 8))
        with pytest.raises(StoreError, match="run 'second' is in both databases and was searched on in each"):
            merge(target, full)
        assert contents(target) == expected


def test_which_final_was_the_last_is_known_after_a_merge(where: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db", write=True) as source:
        run = s.filled(source, "one", 4)
        for turn, (one, other) in enumerate(((0, 1), (2, 3))):
            with source.transaction():
                source.add_final(run, one, s.final(0.4), elapsed_s=1.0)
                source.add_final(run, other, s.final(0.5), elapsed_s=1.0)
                beside = s.timing(ratio=1.0 + turn, contender="torch")
                source.add_baselines(run, 0, (beside,), stage=Stage.FINAL)
        source.set_winner(run, 0, 2)
        source.set_status(run, RunStatus.FINISHED, elapsed_s=1.0)
        with Store.open(where, write=True) as target:
            merge(target, source)
    for path in (tmp_path / "a.db", where):
        with Store.open(path, write=False) as store:
            assert [f.order for f in read_run_finals(store, "one").finals[0].finalists] == [2, 3]
            for order, ratio in ((0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)):
                candidate = read_candidate(store, public_id(store.run("one").uid, order))
                (race,) = candidate.final_races
                assert [t.ratio for t in race.timings] == [ratio]
