"""No question about a run or a candidate reads a large table from end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import landscapes as land
import pytest
import samples as s
from plans import Question, large_scans, plans
from sqlalchemy import Connection

from evo.analysis.best import best_by_run, find_best
from evo.analysis.comparison import compare
from evo.analysis.descent import read_family
from evo.analysis.diff import diff
from evo.analysis.explanation import explain
from evo.analysis.failures import failure_totals, read_failures
from evo.analysis.finals import read_finals
from evo.analysis.importance import read_importance
from evo.analysis.operators import read_operators
from evo.analysis.pareto import read_pareto
from evo.analysis.times import noise_floors
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


def ask_with_connection(store: Store, ask: Callable[[Connection], object]) -> object:
    with store.reading() as connection:
        return ask(connection)


QUESTIONS: dict[str, Question] = {
    "family": lambda store, name: read_family(store, name[:10], diff=True).members,
    "diff": lambda store, name: diff(store, name, name).rows,
    "explain": lambda store, name: explain(store, name),
    "failures": lambda store, name: read_failures(store, "two"),
    "operators": lambda store, name: read_operators(store, "two"),
    "importance": lambda store, name: read_importance(store, "two"),
    "compare": lambda store, name: compare(store, ["one", "two"]).rows,
    "pareto": lambda store, name: read_pareto(store, "two"),
    "best": lambda store, name: find_best(store),
    "best by run": lambda store, name: ask_with_connection(store, best_by_run),
    "finals": lambda store, name: read_finals(store, "two"),
    "ancestry": lambda store, name: read_family(store, name, descendants=0).members,
    "noise": lambda store, name: ask_with_connection(store, lambda c: noise_floors(c, ["one", "two"]) == {}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_goes_by_an_index(large: Path, question: str) -> None:
    assert large_scans(plans(large, QUESTIONS[question])) == []


def test_over_all_runs_failures_are_counted_from_an_index_alone(large: Path) -> None:
    scans = [plan for plan in plans(large, lambda store, name: failure_totals(store)) if plan.startswith("SCAN candidate")]
    assert scans
    assert all("COVERING INDEX" in plan for plan in scans)
