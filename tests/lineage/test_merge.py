"""Merge: everything arrives, once, from either kind of database in either; nothing arrives by half."""

from __future__ import annotations

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


WRONG = {
    "no JSON": (
        "UPDATE candidate SET genome = '{\"parameters\": {' WHERE \"order\" = 1",
        "candidate 1 has a genome that cannot be",
    ),
    "no genome": (
        "UPDATE candidate SET genome = '[1]' WHERE \"order\" = 1",
        "candidate 1 has a genome that cannot be read",
    ),
    "a list in a genome": (
        "UPDATE candidate SET genome = '{\"parameters\":{\"a\":[1]}}' WHERE \"order\" = 1",
        "candidate 1 has a genome that cannot be read",
    ),
    "an unknown status": (
        "UPDATE candidate SET status = 'splendid' WHERE \"order\" = 1",
        "candidate 1 has the unknown status",
    ),
    "a build's status": (
        "UPDATE build SET status = '' WHERE candidate_id % 4294967296 = 2",
        "a build of candidate 2 has the unknown",
    ),
    "a final's status": ("UPDATE final SET status = 'won'", "a final of candidate 8 has the unknown status 'won'"),
    "a refused winner": (
        "UPDATE final SET status = 'wrong'",
        "candidate 8 has the time of a final that it did not pass",
    ),
    "a winner without times": (
        "DELETE FROM timing WHERE candidate_id % 4294967296 = 8",
        "candidate 8, the winner of task 0, has no time",
    ),
    "a winner that is not there": (
        "UPDATE task SET winner_id = winner_id + 900 WHERE winner_id > 0",
        "the winner of task 0, has no time",
    ),
    "another run's winner": ("UPDATE task SET winner_id = winner_id + 4294967296 WHERE run_id = 1", "of another run"),
    "a wrong one with a time": (
        "UPDATE candidate SET status = 'wrong', score = NULL WHERE \"order\" = 1",
        "candidate 1 of run 'first'",
    ),
    "nothing in flight": ("UPDATE run SET max_in_flight = 0", "has 0 candidates in flight at most"),
    "a budget of words": (
        "UPDATE run SET budget = '{\"max_seconds\": \"long\"}'",
        "whose limits are not all numbers",
    ),
    "a score of nothing": ("UPDATE candidate SET score = 0 WHERE \"order\" = 1", "candidate 1 has the score 0"),
    "a score without passing": (
        "UPDATE candidate SET score = 0.1 WHERE status = 'wrong'",
        "candidate 4 has the score 0.1 with status wrong",
    ),
    "infinite": (
        "UPDATE candidate SET seconds = 9e999 WHERE \"order\" = 1",
        "candidate 1 has the seconds inf, which is no finite",
    ),
    "negative": (
        "UPDATE timing SET low_us = -1 WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1 has the low_us -1.0",
    ),
    "no time at all": (
        "UPDATE timing SET median_us = 0 WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1 has a time of 0",
    ),
    "a word for a time": (
        "UPDATE timing SET median_us = 'fast' WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1",
    ),
    "NaN in a sample": (
        "UPDATE timing SET samples_us = '[NaN]' WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1",
    ),
    "nothing in a genome": (
        "UPDATE candidate SET genome = '{\"parameters\":{\"a\":null}}' WHERE \"order\" = 1",
        "candidate 1 has a genome whose values are not all numbers and words",
    ),
    "no list of samples": (
        "UPDATE timing SET samples_us = '3' WHERE candidate_id % 4294967296 = 1",
        "of table 'timing' cannot be read",
    ),
    "clocks that are words": (
        "UPDATE timing SET clocks = '{\"sm\": \"x\"}' WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1",
    ),
    "no parent": (
        "UPDATE parentage SET parent_id = parent_id + 4000 WHERE child_id % 4294967296 = 5",
        "a parentage of candidate 5 refers",
    ),
    "a later parent": (
        "UPDATE parentage SET parent_id = child_id + 1 WHERE child_id % 4294967296 = 5",
        "a parentage of candidate 5 names a parent that is not earlier: 6",
    ),
    "no original": (
        "UPDATE candidate SET same_code_as_id = id + 4000 WHERE \"order\" = 3",
        "candidate 3 refers to candidate",
    ),
    "a duplicate of nothing": (
        "UPDATE candidate SET same_code_as_id = NULL WHERE \"order\" = 3",
        "candidate 3 has status same_code, and no",
    ),
    "no time of day": ("UPDATE candidate SET created = 'yesterday' WHERE \"order\" = 1", "candidate 1 cannot be read"),
    "no UTF-8": ("UPDATE candidate SET log = CAST(x'ff41' AS TEXT) WHERE \"order\" = 1", "candidate 1 cannot be read"),
    "a NUL": ("UPDATE run SET kernel = 'a' || char(0) WHERE name = 'first'", "has the kernel 'a\\x00', which holds a NUL"),
    "bytes for text": (
        "UPDATE candidate SET log = x'ff41' WHERE \"order\" = 1",
        "candidate 1 has the log b'\\xffA', which is no str",
    ),
    "another identifier": (
        "UPDATE candidate SET public_id = 'abc' WHERE id = 4294967297",
        "candidate 1 has another identifier",
    ),
    "dims that are words": ("UPDATE task SET dims = '{\"rows\": \"../x\"}'", "task 0 has dimensions"),
    "dims that are a list": ("UPDATE task SET dims = '[1, 2]'", "task 0 has the dims [1, 2], which is no object"),
    "options of lists": ("UPDATE task SET options = '{\"eps\": [1]}'", "task 0 has dimensions"),
    "tasks from 1": ("UPDATE task SET number = 7 WHERE number = 1", "its tasks are numbered [0, 7]"),
    "details that are none": (
        "UPDATE detail SET data = x'00' WHERE candidate_id % 4294967296 = 0",
        "the checks of candidate 0 cannot be read",
    ),
    "a source that is another": (
        "UPDATE artefact SET data = (SELECT data FROM artefact WHERE base_sha IS NULL AND kind = 'source')",
        "file",
    ),
    "a base that goes round": ("UPDATE artefact SET base_sha = sha256", "is packed against"),
    "options that are no JSON": ("UPDATE run SET options = '{'", "row 1 of table 'run' cannot be read"),
    "options too deep to read": (
        f"UPDATE run SET options = '{'[' * 100_000}{']' * 100_000}'",
        "row 1 of table 'run' cannot be read",
    ),
    "a start that is a list": ("UPDATE run SET options = '{\"starts\": [[1]]}'", "which are no points of a search space"),
    "a start at a list": ("UPDATE run SET options = '{\"starts\": [{\"a\": [1]}]}'", "which are no points of a search"),
    "missing kinds that are numbers": (
        "UPDATE run SET options = '{\"missing_kinds\": {\"rows=1\": [3]}}'",
        "has the option missing_kinds {'rows=1': [3]}, which are no lists of words",
    ),
    "a limit of no budget": ("UPDATE run SET budget = '{\"joules\": 5}'", "and a budget has no 'joules'"),
    "options with NaN": ("UPDATE run SET options = '{\"a\": NaN}'", "which is no JSON"),
    "a name that is a path": (
        "UPDATE run SET name = '../../x' WHERE name = 'first'",
        "the run has the name '../../x', which none may have",
    ),
    "a run's status": ("UPDATE run SET status = 'won' WHERE name = 'first'", "the run has the unknown status 'won'"),
    "no environment": (
        "UPDATE run SET environment_id = 77 WHERE name = 'first'",
        "the run is of environment 77, which is not there",
    ),
    "a final out of nowhere": ("DELETE FROM final", "candidate 8 has the time of a final that it did not pass"),
    "a target that is no name": ("UPDATE run SET target = '../x'", "has the target '../x', which none may be called"),
    "a sampler that is no name": ("UPDATE run SET sampler = ''", "has the sampler '', which none may be called"),
    "a dtype of no kernel": ("UPDATE task SET dtype = 'float7'", "task 0 has the dtype 'float7', which no kernel has"),
    "dims below 0": ("UPDATE task SET dims = '{\"rows\": -5}'", "task 0 has dimensions {'rows': -5}"),
    "an interval that is upside down": (
        "UPDATE timing SET low_us = 9, high_us = 1 WHERE candidate_id % 4294967296 = 1",
        "which is not within 9.0 to 1.0",
    ),
    "a ratio outside of its interval": (
        "UPDATE timing SET ratio = 3 * ratio_high WHERE candidate_id % 4294967296 = 1",
        "a timing of candidate 1 has the ratio 1.38",
    ),
    "a ratio that the medians contradict": (
        "UPDATE timing SET ratio = NULL, median_us = 1e6, high_us = 1e7"
        " WHERE candidate_id % 4294967296 = 1 AND contender = 'torch'",
        "a timing of candidate 1 has the ratio 0.45, and its medians are",
    ),
    "a key of another order": (
        "UPDATE candidate SET \"order\" = 77 WHERE \"order\" = 8",
        "which does not follow from its run",
    ),
    "a broken seed": ("UPDATE run SET seed = 'x' WHERE name = 'first'", "the run has the seed 'x', which is no number"),
}
"""Statements that make a run other than evo records it, with a part of the sentence that refuses it."""


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_is_not_as_evo_records_one_is_refused_with_its_row_and_nothing_changes(
    full: Store, tmp_path: Path, name: str
) -> None:
    statement, said = WRONG[name]
    assert full.path is not None
    theirs = tmp_path / "theirs.db"
    with Store.open(theirs, write=True) as copy:
        merge(copy, full)
    with sqlite3.connect(theirs) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement).rowcount > 0
    connection.close()
    with Store.open(tmp_path / "ours.db", write=True) as target:
        record(target, "mine", range(3))
        expected = contents(target)
        with Store.open(theirs, write=False) as source, pytest.raises(StoreError) as caught:
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
def test_a_schema_that_is_not_evos_is_refused(full: Store, tmp_path: Path, statement: str, said: str) -> None:
    theirs = tmp_path / "theirs.db"
    with Store.open(theirs, write=True) as copy:
        merge(copy, full)
    with sqlite3.connect(theirs) as connection:
        for view in ("v_best", "v_lineage", "v_timings"):
            connection.execute(f"DROP VIEW {view}")
        connection.execute(statement)
    connection.close()
    with Store.open(tmp_path / "ours.db", write=True) as target:
        with pytest.raises(StoreError, match=said), Store.open(theirs, write=False) as source:
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


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Store]:
    """A SQLite database of two runs."""
    with Store.open(tmp_path / "full.db", write=True) as store:
        record(store, "first", range(9))
        record(store, "second", range(5))
        yield store


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
        run = s.new_run(source, "one")
        with source.transaction():
            for order in range(4):
                source.add(run, s.ref(order), s.passed(order), elapsed_s=0.0)
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
