"""What every database behind the store must do: `Recorder`, as a search uses it.

SQLite always; PostgreSQL where EVO_TEST_POSTGRESQL holds the URL of a database that may be emptied.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, create_engine

from evo.analysis.best import find_best
from evo.analysis.candidates import read_candidate, read_candidate_build
from evo.analysis.descent import read_family
from evo.analysis.failures import list_failures
from evo.analysis.runs import find_run, list_runs, read_history
from evo.analysis.sql import select_sql
from evo.errors import EngineError, StoreError, UnknownNameError
from evo.evaluation import Binary, Build, Candidate, Check, Evaluation, Measurement, Parent, Proposal, Status, Timing
from evo.lineage import Environment, Recorder, RunSpec, RunStatus, Stage, StoredRun
from evo.lineage.models import Base, public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from tests.lineage.samples import baselines

POSTGRESQL = os.environ.get("EVO_TEST_POSTGRESQL", "")

WORKLOADS = (
    Workload.of({"rows": 64, "cols": 32}, "float32", {"weight": True, "eps": 1e-5}),
    Workload.of({"zeta": 3, "alpha": 2**40}, "float16"),
)
SPEC = RunSpec(
    kernel="layernorm",
    kernel_digest="0" * 64,
    target="cpu",
    arch="x86-64-v3",
    sampler="random",
    seed=2**63 - 1,
    max_in_flight=4,
    workloads=WORKLOADS,
    options={"deep": {"list": [1, 2.5, None, True], "text": "µ\ud800\0"}},
    budget={"seconds": 1e-3},
)
ENVIRONMENT = Environment(device="CPU", arch="x86-64-v3", details={"cores": 2})


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'lineage.db'}"
    if not POSTGRESQL:
        pytest.skip("EVO_TEST_POSTGRESQL names no database")
    engine = create_engine(POSTGRESQL)
    tables = MetaData()
    tables.reflect(engine)
    tables.drop_all(engine)
    engine.dispose()
    return POSTGRESQL


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, write=True) as opened:
        yield opened


def ref(order: int, *parents: int, task: int = 0) -> Candidate:
    proposal = Proposal(
        genome=Genome.of({"tile": order, "half": 0.5, "on": True, "mode": "µ"}),
        operator="crossover" if len(parents) > 1 else "mutation",
        parents=tuple(Parent(p, f"parent {i}") for i, p in enumerate(parents)),
    )
    return Candidate(order=order, task=task, workload=WORKLOADS[task], proposal=proposal)


def evaluation(order: int, ratio: float = 0.5, *, task: int = 0, log: str = "") -> Evaluation:
    binary = Binary(code=b"\0\xff" * 100 + bytes([order % 256]), code_hash=f"{order:064x}", log="remarks", registers=7)
    build = Build(
        status=Status.OK,
        arch="x86-64-v3",
        compiler="g++ 12",
        source_digest="1" * 64,
        source=f"int x = {order}; // µ",
        log=log,
        binary=binary,
        occupancy=1 / 3,
    )
    timing = Timing(
        workload=WORKLOADS[task].key,
        contender="candidate",
        protocol="cold",
        median_us=ratio / 3,
        low_us=1e-300,
        high_us=1e300,
        samples_us=(0.1 + 0.2, 5e-324),
        ratio=ratio,
        clocks={"mhz": 3000.0},
    )
    check = Check(case="normal", passed=True, error=1e-9, allowed=float("inf"), seed=2**62)
    return Evaluation(status=Status.OK, build=build, checks=(check,), timings=(timing,), log=log, seconds=1 / 3)


def failure(status: Status = Status.WRONG) -> Evaluation:
    check = Check(case="zeros", passed=False, error=float("inf"), reason="Infinity")
    return Evaluation(status=status, checks=(check,), log="µ\n" * 3)


def lean(evaluation: Evaluation) -> Evaluation:
    """Without source and code, which come back as artefacts."""
    if evaluation.build is None or evaluation.build.binary is None:
        return evaluation
    binary = dataclasses.replace(evaluation.build.binary, code=b"")
    return dataclasses.replace(evaluation, build=dataclasses.replace(evaluation.build, source="", binary=binary))


def start(store: Recorder, name: str | None = None) -> StoredRun:
    return store.create_run(dataclasses.replace(SPEC, name=name), ENVIRONMENT)


def test_a_run_is_continued_by_another_process_as_it_was_left(url: str) -> None:
    recorded = [
        (ref(0), evaluation(0, log="µ")),
        (ref(1, 0, task=1), evaluation(1, task=1)),
        (ref(2, 0, 1), failure()),
        (ref(3, 0, 0), dataclasses.replace(evaluation(3), status=Status.SAME_CODE, same_code_as=0)),
        (ref(4), failure(Status.CRASH)),
    ]
    with Store.open(url, write=True) as store:
        run = start(store, "r")
        for elapsed, (candidate, outcome) in enumerate(recorded):
            store.add(run, candidate, outcome, elapsed_s=elapsed / 3)
        store.set_status(run, RunStatus.INTERRUPTED, reason="signal", elapsed_s=2.5)
    with Store.open(url, write=True) as store:
        again = store.run("r")
        assert (again.spec, again.environment, again.uid) == (run.spec, ENVIRONMENT, run.uid)
        assert again.spec.workloads == WORKLOADS
        assert again.spec.options == SPEC.options
        assert (again.status, again.stop_reason, again.elapsed_s) == (RunStatus.INTERRUPTED, "signal", 2.5)
        read = store.evaluations(again)
        assert [(e.candidate, e.evaluation) for e in read] == [(r, lean(e)) for r, e in recorded]
        assert read_candidate_build(store, read[0].public_id) == recorded[0][1].build
        store.set_status(again, RunStatus.RUNNING, elapsed_s=2.5)
        store.add(again, ref(5, 4), evaluation(5), elapsed_s=3.0)
        assert len(store.evaluations(again)) == 6


def test_a_whole_search_is_recorded_and_answers_questions(store: Store) -> None:
    run = start(store)
    store.add_baselines(run, 0, evaluation(0).timings)
    for order, ratio in ((1, 0.7), (0, 0.9), (3, 0.4), (2, 0.8)):
        store.add(run, ref(order), evaluation(order, ratio), elapsed_s=1.0)
    store.add(run, ref(4, 3, 0), failure(), elapsed_s=2.0)
    final = Measurement(
        status=Status.OK,
        checks=evaluation(0).checks,
        timings=(dataclasses.replace(evaluation(0, 0.45).timings[0], protocol="final"),),
    )
    with store.transaction():
        store.add_final(run, 3, final, elapsed_s=3.0)
        store.add_final(run, 1, Measurement(status=Status.WRONG, checks=failure().checks), elapsed_s=3.0)
        store.add_baselines(run, 0, evaluation(0).timings, stage=Stage.FINAL)
        store.set_winner(run, 0, 3)
    store.set_status(run, RunStatus.FINISHED, reason="evaluations done", elapsed_s=4.0)

    names = [public_id(run.uid, order) for order in range(5)]
    summary = find_run(store, "latest")
    assert (summary.counts, summary.status, summary.elapsed_s) == ({"ok": 4, "wrong": 1}, "finished", 4.0)
    assert (summary.tasks[0].winner, summary.tasks[1].best) == (names[3], None)
    (best,) = find_best(store, "layernorm", target="cpu")
    assert (best.id, best.ratio, best.stage, best.winner) == (names[3], 0.45, "final", True)
    assert [step.id for step in read_family(store, names[4][:8], descendants=0).members] == [names[0], names[3], names[4]]
    assert [child.id for child in read_candidate(store, names[0]).children] == [names[4]]
    assert [f.reason for f in list_failures(store, run.name)] == ["zeros: Infinity"]
    assert [t.stage for t in baselines(store, run.name)] == ["search", "final"]
    assert [p.score for p in read_history(store, run.name)] == [0.9, 0.7, 0.8, 0.4, None]


def add_together(store: Recorder, run: StoredRun, *orders: int) -> None:
    with store.transaction():
        for order in orders:
            store.add(run, ref(order), evaluation(order), elapsed_s=9.0)


def test_what_must_not_be_is_refused_and_changes_nothing(store: Store) -> None:
    run = start(store, "r")
    store.add(run, ref(0), evaluation(0), elapsed_s=1.0)
    for wrong, outcome in (
        (ref(0), evaluation(9, 0.1)),
        (ref(2, 1), evaluation(2)),
        (ref(2), dataclasses.replace(evaluation(2), status=Status.SAME_CODE, same_code_as=1)),
    ):
        with pytest.raises(EngineError, match=r"candidate [02] of run 'r'"):
            store.add(run, wrong, outcome, elapsed_s=9.0)
    with pytest.raises(EngineError, match="candidate 0 of run 'r' is recorded already"):
        add_together(store, run, 1, 0)
    with pytest.raises(StoreError, match="there is a run 'r' already"):
        start(store, "r")
    with pytest.raises(UnknownNameError):
        store.run("s")
    assert [e.evaluation for e in store.evaluations(run)] == [lean(evaluation(0))]
    assert store.run("r").elapsed_s == 1.0


def test_many_candidates_of_two_runs_do_not_mix(store: Store) -> None:
    first, second = start(store), start(store)
    with store.transaction():
        for order in range(700):
            store.add(first, ref(order, *([order - 1] if order else [])), evaluation(order), elapsed_s=0.0)
            if order % 7 == 0:
                store.add(second, ref(order), failure(), elapsed_s=0.0)
    assert [e.candidate.order for e in store.evaluations(first)] == list(range(700))
    assert [e.candidate.order for e in store.evaluations(second)] == list(range(0, 700, 7))
    assert {e.evaluation.status for e in store.evaluations(second)} == {Status.WRONG}
    assert find_run(store, first.name).counts == {"ok": 700}


def test_ten_writers_at_once_write_whole_runs_or_are_refused(url: str) -> None:
    """A server takes them all, from an empty database on; a file takes one."""
    together = threading.Barrier(10)

    def write(number: int) -> str:
        together.wait()
        try:
            store = Store.open(url, write=True)
        except StoreError as error:
            together.wait()
            return str(error)
        with store:
            together.wait()
            run = start(store)
            for order in range(5):  # the same sources and code in every run
                store.add(run, ref(order, *range(order)), evaluation(order), elapsed_s=0.0)
            assert [e.evaluation for e in store.evaluations(run)] == [lean(evaluation(o)) for o in range(5)]
            return run.name

    with ThreadPoolExecutor(10) as pool:
        outcomes = list(pool.map(write, range(10)))
    with Store.open(url, write=False) as store:
        runs = {run.name: run.evaluations for run in list_runs(store)}
    refused = [outcome for outcome in outcomes if outcome not in runs]
    assert set(runs.values()) == {5}
    assert (len(runs), len(refused)) == ((1, 9) if url.startswith("sqlite") else (10, 0))
    assert all(outcome.startswith("another search (pid ") for outcome in refused)


def test_the_schema_is_that_of_the_models(store: Store) -> None:
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_readers_cannot_write(store: Store, url: str) -> None:
    run = start(store)
    with Store.open(url, write=False) as reader:
        with pytest.raises(EngineError, match="for reading only"):
            reader.add(run, ref(0), evaluation(0), elapsed_s=0.0)
        found = select_sql(reader, "SELECT name, seed FROM run WHERE name LIKE '%-%'")
        assert found.rows == ((run.name, 2**63 - 1),)
        for sql in ("DELETE FROM run", "CREATE TABLE x (y INTEGER)", "SELEC"):
            with pytest.raises(Exception, match="the query cannot be run"):
                select_sql(reader, sql)
        assert reader.run("latest").name == run.name
