"""`evo export`: winners of the finals, or what is named; and the manifest tells which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evo import cli
from evo.analysis.runs import find_run
from evo.evaluation import (
    FINALIST,
    Binary,
    Build,
    Candidate,
    Check,
    Evaluation,
    Proposal,
    Status,
    Timing,
)
from evo.lineage import Environment, RunSpec, RunStatus, StoredRun
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload, load_kernel
from evo.problem.render import render
from evo.targets import find_target

KERNEL = load_kernel("layernorm")
WORKLOADS = tuple(KERNEL.workload("cpu", f"rows=8,cols={cols},dtype=float32") for cols in (32, 48))
ENVIRONMENT = Environment(device="a CPU", arch="native", compiler="g++", torch="2", python="3", evo="0")
SPEC = RunSpec(
    kernel="layernorm",
    kernel_digest=KERNEL.digest,
    target="cpu",
    arch="native",
    sampler="random",
    seed=1,
    max_in_flight=8,
    workloads=WORKLOADS,
    options={},
    budget={"evaluations": 2},
    name="made",
)
CHECKS = (Check(case="normal", passed=True, error=0.0),)


def timing(workload: Workload, protocol: str) -> Timing:
    figures = {"median_us": 5.0, "low_us": 5.0, "high_us": 5.0, "samples_us": (5.0,), "ratio": 0.5}
    return Timing(workload=workload.key, contender="candidate", protocol=protocol, **figures)  # type: ignore[arg-type]


def add_candidate(store: Store, run: StoredRun, order: int, task: int | None = None) -> None:
    """The kernel's default, as if it had been measured."""
    task = order if task is None else task
    workload = WORKLOADS[task]
    space = KERNEL.space("cpu", workload, find_target("cpu").limits("native"))
    genome = Genome.of(space.complete(space.default))
    source = render(KERNEL, "cpu", genome, KERNEL.binding("cpu", workload), "native")
    built = Build(
        status=Status.OK,
        arch="native",
        compiler="g++",
        source_digest=source.digest,
        source=source.text,
        binary=Binary(code=b"code", code_hash="0" * 64),
    )
    evaluation = Evaluation(status=Status.OK, build=built, checks=CHECKS, timings=(timing(workload, "cold"),))
    ref = Candidate(
        order=order, task=task, workload=workload, proposal=Proposal(genome=genome, operator="default")
    )
    with store.transaction():
        store.add(run, ref, evaluation, elapsed_s=1.0)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A run of two workloads, each with a candidate that passed; stopped before its finals."""
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = store.create_run(SPEC, ENVIRONMENT)
        for order in range(len(WORKLOADS)):
            add_candidate(store, run, order)
        store.set_status(run, RunStatus.INTERRUPTED, reason="interrupted", elapsed_s=1.0)
    return tmp_path / "lineage.db"


def end_run(db: Path, *winners: int) -> None:
    """The finals, won by `winners`, each on its own workload."""
    with Store.open(db, write=True) as store:
        run = store.run("made")
        with store.transaction():
            for order in winners:
                task = order % len(WORKLOADS)
                own = timing(WORKLOADS[task], "final")
                raced = replace(own, contender=FINALIST, ratio=0.6)
                final = Evaluation(status=Status.OK, checks=CHECKS, timings=(own, raced))
                store.add_final(run, order, final, elapsed_s=2.0)
                store.set_winner(run, task, order)
        store.set_status(run, RunStatus.FINISHED, reason="evaluations done", elapsed_s=2.0)


def export(db: Path, *names: str) -> tuple[int, list[dict[str, object]]]:
    """(exit code, what the manifest records of each variant)"""
    out = db.parent / "module"
    code = cli.run(["export", *names, "--out", str(out), "--db", str(db)])
    if code:
        assert not out.exists()
        return code, []
    return code, [v["record"] for v in json.loads((out / "manifest.json").read_text())["variants"]]


def test_a_run_without_finals_is_not_exported_and_the_remedy_named(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(db, "made") == (2, [])
    assert "run 'made' is interrupted and has not named its winners" in capsys.readouterr().err
    with Store.open(db, write=False) as store:
        assert store.run("made").status is RunStatus.INTERRUPTED


def test_a_run_of_which_nothing_passed_the_finals_is_not_exported(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end_run(db)
    assert export(db, "made") == (2, [])
    assert "run 'made' has no winner" in capsys.readouterr().err


def test_a_candidate_without_finals_is_exported_and_recorded_as_that(db: Path) -> None:
    with Store.open(db, write=False) as store:
        name = find_run(store, "made").tasks[0].best
    assert name is not None
    code, [record] = export(db, name)
    assert code == 0
    assert (record["winner"], record["timed_in"]) == (False, "search")


def refuse(db: Path, *orders: int) -> None:
    """The finals of the first workload refuse these, and the run ends."""
    with Store.open(db, write=True) as store:
        run = store.run("made")
        for order in orders:
            wrong = Evaluation(status=Status.WRONG, log="for 33 columns: y is NaN")
            store.add_final(run, order, wrong, elapsed_s=2.0)
        store.set_status(run, RunStatus.FINISHED, reason="evaluations done", elapsed_s=2.0)


def test_a_candidate_that_no_final_looked_at_is_exported_with_that_said(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(db, write=True) as store:
        run = store.run("made")
        name = public_id(run.uid, 0)
    assert export(db, name)[0] == 0
    assert f"evo: {name[:10]}: no finals of run made have been held for its workload" in capsys.readouterr().err
    with Store.open(db, write=True) as store:
        add_candidate(store, run, 2, task=0)
    end_run(db, 2)
    assert export(db, name)[0] == 0
    told = capsys.readouterr().err
    assert f"evo: {name[:10]}: no final has looked at it" in told
    assert f"the winner of its workload is {public_id(run.uid, 2)[:10]}" in told
    assert export(db, public_id(run.uid, 2))[0] == 0
    assert capsys.readouterr().err == ""


def test_a_candidate_of_a_run_whose_finals_confirmed_nobody_is_exported_with_that_said(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(db, write=True) as store:
        run = store.run("made")
        add_candidate(store, run, 2, task=0)
    refuse(db, 2)
    name = public_id(run.uid, 0)
    assert export(db, name)[0] == 0
    told = capsys.readouterr().err
    assert f"evo: {name[:10]}: unconfirmed: the finals of run made have no winner" in told
    assert "refused 1 finalist" in told
    assert "evo check" in told


@pytest.mark.parametrize("over", [True, False])
def test_a_finalist_that_passed_where_nobody_was_confirmed_is_exported_with_that_said(
    db: Path, capsys: pytest.CaptureFixture[str], over: bool
) -> None:
    """As where the race that was to confirm the first of them died."""
    with Store.open(db, write=True) as store:
        run = store.run("made")
        add_candidate(store, run, 2, task=0)
        raced = Evaluation(status=Status.OK, checks=CHECKS, timings=(timing(WORKLOADS[0], "final"),))
        store.add_final(run, 0, raced, elapsed_s=2.0)
    refuse(db, 2)
    name = public_id(run.uid, 0)
    if not over:
        with Store.open(db, write=True) as store:
            store.set_status(run, RunStatus.INTERRUPTED, reason="interrupted", elapsed_s=2.0)
    assert export(db, name)[0] == 0
    told = capsys.readouterr().err
    assert "it passed the gate of the finals and their race, and nothing has confirmed its time" in told
    assert "neighbouring sizes" not in told
    assert "no finals of run made have been held" not in told
    assert ("unconfirmed" in told) is over
    assert ("the finals of run made are not over for its workload" in told) is not over


def test_a_candidate_that_the_finals_refused_is_exported_only_if_that_is_asked_for(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(db, 0)
    with Store.open(db, write=False) as store:
        name = public_id(store.run("made").uid, 0)
    assert export(db, name) == (2, [])
    told = capsys.readouterr().err
    assert f"candidate {name} was refused by the finals of run made (wrong: for 33 columns: y is NaN)" in told
    assert "--refused" in told
    code, [record] = export(db, name, "--refused")
    assert code == 0
    assert f"evo: {name[:10]}: the finals refused it (wrong: for 33 columns: y is NaN)" in capsys.readouterr().err
    assert record["refused"] == "wrong: for 33 columns: y is NaN"


def test_winners_are_exported_with_the_figures_of_the_finals(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(db, 0, 1)
    code, records = export(db, "made")
    assert code == 0
    assert "python -m module build" in capsys.readouterr().out
    assert [(r["winner"], r["timed_in"], r["order"]) for r in records] == [(True, "final", 0), (True, "final", 1)]
    assert [[(t["contender"], t["ratio"]) for t in r["timings"]] for r in records] == [[("candidate", 0.5)]] * 2  # type: ignore[attr-defined]


def test_a_workload_without_a_winner_is_left_out_and_named(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(db, 1)
    code, [record] = export(db, "made")
    assert (code, record["order"]) == (0, 1)
    assert f"evo: nothing won for {WORKLOADS[0].key}: it is left to PyTorch" in capsys.readouterr().err
