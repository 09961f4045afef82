"""What keeps a million candidates usable: no question about a run or a candidate reads a large table from end to end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import landscapes as land
import pytest
import samples as s
from sqlalchemy import Engine, event

from evo.analysis.candidates import read_candidate, read_source
from evo.analysis.descent import read_family
from evo.analysis.diff import diff
from evo.analysis.explanation import explain
from evo.analysis.failures import failure_totals, read_failures
from evo.analysis.finals import read_run_finals
from evo.analysis.importance import read_importance
from evo.analysis.operators import read_operators
from evo.analysis.pareto import read_pareto
from evo.analysis.runs import compare, find_best, find_run, list_runs, read_history
from evo.analysis.sql import select_sql
from evo.lineage import Stage
from evo.lineage.models import public_id
from evo.lineage.store import Store

NUMBER = 200
LARGE = re.compile(r"SCAN (candidate|parentage|build|detail|timing|artefact|[ctop])\b")
"""Tables that grow with every candidate, also by their names in the views."""
Question = Callable[[Store, str], object]
"""A question to a store with the run "two" and the public id of a candidate in it. Its answer must not be empty."""


@pytest.fixture(scope="module", params=["fresh", "analyzed"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "lineage.db"
    with Store.open(path, write=True) as store:
        for name in ("one", "two", "three"):
            run = land.small_run(store, name)
            with store.transaction():
                for order in range(NUMBER):
                    evaluation = land.timed(order, 0.9 - 0.001 * order) if order % 3 else s.refused(order)
                    parents = (order // 2, order // 3) if order > 2 else ()
                    store.add(run, s.ref(order, *parents), evaluation, elapsed_s=0.0)
            store.add_final(run, 1, s.final(0.4), elapsed_s=0.0)
            store.add_baselines(run, 0, [s.timing(contender="torch")], stage=Stage.FINAL)
        if request.param == "analyzed":  # the planner knows what is large, and chooses otherwise
            with store.reading() as connection:
                connection.exec_driver_sql("ANALYZE")
                connection.commit()
    return path


def large_scans(path: Path, ask: Question) -> list[str]:
    """The steps of all queries of a question in which SQLite reads a large table from end to end."""
    asked: list[tuple[str, object]] = []

    def note(connection: object, cursor: object, sql: str, parameters: object, *rest: object) -> None:
        asked.append((sql, parameters))

    with Store.open(path, write=False) as store:
        name = public_id(store.run("two").uid, 100)
        event.listen(Engine, "before_cursor_execute", note)
        try:
            assert ask(store, name)
        finally:
            event.remove(Engine, "before_cursor_execute", note)
        plans: list[str] = []
        with store.reading() as connection:
            for sql, parameters in asked:
                if sql.lstrip().startswith(("SELECT", "WITH")):
                    rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)  # type: ignore[arg-type]
                    plans += [row[3] for row in rows]
    assert plans
    return [plan for plan in plans if LARGE.match(plan)]


QUESTIONS: dict[str, Question] = {
    "evaluations": lambda store, name: store.evaluations(store.run("two")),
    "run": lambda store, name: find_run(store, "two"),
    "candidate": lambda store, name: read_candidate(store, name[:10]),
    "finalist": lambda store, name: read_candidate(store, public_id(store.run("two").uid, 1)),
    "source": lambda store, name: read_source(store, name),
    "history": lambda store, name: read_history(store, "two"),
    "family": lambda store, name: read_family(store, name[:10], diff=True).members,
    "diff": lambda store, name: diff(store, name, name).rows,
    "explain": lambda store, name: explain(store, name),
    "failures": lambda store, name: read_failures(store, "two"),
    "failures of a task": lambda store, name: read_failures(store, "two", task=0),
    "operators": lambda store, name: read_operators(store, "two"),
    "importance": lambda store, name: read_importance(store, "two"),
    "compare": lambda store, name: compare(store, "one", "two").rows,
    "pareto": lambda store, name: read_pareto(store, "two"),
    "best": lambda store, name: find_best(store),
    "finals": lambda store, name: read_run_finals(store, "two").finals,
    "v_best": lambda store, name: select_sql(store, "SELECT * FROM v_best").rows,
    "v_lineage": lambda store, name: select_sql(store, f"SELECT * FROM v_lineage WHERE child = '{name}'").rows,
    "v_lineage of a run": lambda store, name: select_sql(store, "SELECT * FROM v_lineage WHERE run = 'two'").rows,
    "v_timings": lambda store, name: select_sql(store, "SELECT * FROM v_timings WHERE run = 'two'").rows,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_goes_by_an_index(large: Path, question: str) -> None:
    assert large_scans(large, QUESTIONS[question]) == []


def test_over_all_runs_candidates_are_counted_from_an_index_alone(large: Path) -> None:
    for ask in (lambda store, name: failure_totals(store), lambda store, name: list_runs(store)):
        scans = large_scans(large, ask)
        assert scans
        assert all(scan.startswith("SCAN candidate") and "COVERING INDEX" in scan for scan in scans)
