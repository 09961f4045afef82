"""What keeps a million candidates usable: queries by index, small files, fast insertion."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import samples as s
from plans import Question, large_scans, plans
from sqlalchemy import text

from evo.analysis.best import find_best
from evo.analysis.candidates import read_candidate, read_candidate_build, read_source
from evo.analysis.descent import read_family
from evo.analysis.failures import list_failures
from evo.analysis.runs import find_run, list_runs, read_history
from evo.evaluation import Status
from evo.lineage import Stage
from evo.lineage.models import public_id
from evo.lineage.store import Store

NUMBER = 600


@pytest.fixture(scope="module", params=["fresh", "analyzed"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two", "three"):
            run = s.new_run(store, name)
            with store.transaction():
                for order in range(NUMBER // 3):
                    evaluation = s.passed(order, 0.5) if order % 3 else s.refused(order)
                    parents = (order - 1, order // 2) if order > 2 else ()
                    store.add(run, s.ref(order, *parents), evaluation, elapsed_s=0.0)
            store.add_final(run, 1, s.final(0.4), elapsed_s=0.0)
            store.add_baselines(run, 0, [s.timing(contender="torch")], stage=Stage.FINAL)
        if request.param == "analyzed":  # the planner knows what is large, and chooses otherwise
            with store.reading() as connection:
                connection.exec_driver_sql("ANALYZE")
                connection.commit()
    return path


def _finalist(store: Store) -> str:
    return public_id(store.run("two").uid, 1)


QUESTIONS: dict[str, Question] = {
    "evaluations": lambda store, name: store.evaluations(store.run("two")),
    "evaluation": lambda store, name: store.evaluation(store.run("two"), 7),
    "run": lambda store, name: find_run(store, "two"),
    "candidate": lambda store, name: read_candidate(store, name[:10]),
    "ancestry": lambda store, name: read_family(store, name, descendants=0).members,
    "source": lambda store, name: read_source(store, name),
    "build": lambda store, name: read_candidate_build(store, name),
    "best": lambda store, name: find_best(store, "layernorm"),
    "history": lambda store, name: read_history(store, "two"),
    "finalist": lambda store, name: read_candidate(store, _finalist(store)),
    "failures": lambda store, name: list_failures(store, "two"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_reads_a_large_table_from_end_to_end(large: Path, question: str) -> None:
    assert large_scans(plans(large, QUESTIONS[question])) == []


def test_runs_count_all_candidates_from_an_index_alone(large: Path) -> None:
    with Store.open(large, write=False) as store:
        assert [run.evaluations for run in list_runs(store)] == [NUMBER // 3] * 3
        with store.reading() as connection:
            plan = connection.execute(
                text("EXPLAIN QUERY PLAN SELECT run_id, status, count(*) FROM candidate GROUP BY run_id, status")
            ).scalars("detail")
            assert all("COVERING INDEX" in line for line in plan)


def test_the_rate_of_insertion_and_reading(tmp_path: Path) -> None:
    """Printed (pytest -s), not judged: a busy machine is not a broken store."""
    evaluations = [(s.ref(order, *range(max(0, order - 2), order)), s.passed(order)) for order in range(NUMBER)]
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True) as store:
        run = s.new_run(store)
        started = time.perf_counter()
        for ref, evaluation in evaluations[: NUMBER // 4]:
            store.add(run, ref, evaluation, elapsed_s=0.0)
        one_by_one = NUMBER // 4 / (time.perf_counter() - started)
        started = time.perf_counter()
        with store.transaction():
            for ref, evaluation in evaluations[NUMBER // 4 :]:
                store.add(run, ref, evaluation, elapsed_s=0.0)
        together = (NUMBER - NUMBER // 4) / (time.perf_counter() - started)
        started = time.perf_counter()
        read = store.evaluations(run)
        reading = NUMBER / (time.perf_counter() - started)
        assert len(read) == NUMBER
    size = path.stat().st_size / NUMBER
    print(
        f"\ncandidates a second: {one_by_one:,.0f} one by one, {together:,.0f} in a transaction;"
        f" read back {reading:,.0f}; {size:,.0f} bytes each"
    )
    assert {e.evaluation.status for e in read} == {Status.OK}
    assert size < 4096
