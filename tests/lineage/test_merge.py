"""Merge: everything arrives, once, from either kind of database in either; nothing arrives by half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import samples as s

from evo.analysis.candidates import read_candidate
from evo.analysis.finals import read_run_finals
from evo.analysis.runs import list_runs
from evo.errors import StoreError
from evo.evaluation import Parent, Status
from evo.lineage import RunStatus, Stage, read
from evo.lineage import merge as merging
from evo.lineage.merge import merge
from evo.lineage.models import public_id
from evo.lineage.store import Store


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
    monkeypatch.setattr(merging, "_ROWS_AT_ONCE", 7)
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
