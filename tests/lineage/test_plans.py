"""No question about a run or a candidate reads a large table from end to end."""

from __future__ import annotations

from pathlib import Path

import landscapes as land
import pytest
import samples as s
from plans import Question, large_scans, plans

from evo.analysis import queries
from evo.analysis.comparison import compare
from evo.analysis.credit import operators
from evo.analysis.descent import family
from evo.analysis.diff import diff
from evo.analysis.explanation import explain
from evo.analysis.failures import failure_report, failure_totals
from evo.analysis.finalists import finals
from evo.analysis.importance import importance
from evo.analysis.pareto import pareto
from evo.lineage.store import Store

NUMBER = 200


@pytest.fixture(scope="module", params=["fresh", "analyzed"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two", "three"):
            run = land.small_run(store, name)
            with store.transaction():
                for order in range(NUMBER):
                    evaluation = land.timed(order, 0.9 - 0.001 * order) if order % 3 else s.refused(order)
                    parents = (order // 2, order // 3) if order > 2 else ()
                    store.add(run, s.ref(order, *parents), evaluation, elapsed_s=0.0)
            store.add_final(run, 1, s.final(0.4), elapsed_s=0.0)
            store.add_baselines(run, 0, [s.timing(contender="torch")])
        if request.param == "analyzed":  # the planner knows what is large, and chooses otherwise
            with store.reading() as connection:
                connection.exec_driver_sql("ANALYZE")
                connection.commit()
    return path


QUESTIONS: dict[str, Question] = {
    "family": lambda store, name: family(store, name[:10], diff=True).members,
    "diff": lambda store, name: diff(store, name, name).rows,
    "explain": lambda store, name: explain(store, name),
    "failures": lambda store, name: failure_report(store, "two"),
    "operators": lambda store, name: operators(store, "two"),
    "importance": lambda store, name: importance(store, "two"),
    "compare": lambda store, name: compare(store, ["one", "two"]).rows,
    "pareto": lambda store, name: pareto(store, "two"),
    "best": lambda store, name: queries.best(store),
    "best by run": lambda store, name: queries.best_by_run(store),
    "finals": lambda store, name: finals(store, "two"),
    "ancestry": lambda store, name: queries.ancestry(store, name),
    "noise": lambda store, name: queries.noise_floors_of(store, ["one", "two"]) == {},
    "refused": lambda store, name: queries.refused_in_finals(store) == {},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_goes_by_an_index(large: Path, question: str) -> None:
    assert large_scans(plans(large, QUESTIONS[question])) == []


def test_over_all_runs_failures_are_counted_from_an_index_alone(large: Path) -> None:
    scans = [plan for plan in plans(large, lambda store, name: failure_totals(store)) if plan.startswith("SCAN candidate")]
    assert scans
    assert all("COVERING INDEX" in plan for plan in scans)
