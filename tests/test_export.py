"""`evo export`: winners of the finals, or what is named, for the architecture they were measured on and for others; the
manifest tells which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.analysis.runs import find_run, read_history
from evo.evaluation import FINALIST, Evaluation, Status
from evo.lineage import Environment, RunStatus, StoredRun
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.problem.space import Value
from evo.targets import find_target
from tests.ended import run_here
from tests.export.exports import manifest_of, near
from tests.landscape import random_search
from tests.lineage import samples as s

KERNEL = load_kernel("layernorm")
WORKLOADS = tuple(KERNEL.workload("cpu", f"rows=8,cols={cols},dtype=float32") for cols in (32, 48))
ON_GPU = KERNEL.workload("cuda", "rows=64,cols=1024,dtype=float16")
FOUND: tuple[tuple[float, dict[str, Value]], ...] = (
    (0.50, {"cluster": 2, "reduction": "shuffle"}),
    (0.54, {"cluster": 2}),
    (0.52, {"cluster": 2, "reduction": "shuffle", "launch": "programmatic"}),
    (0.53, {"rows_per_block": 2}),
    (0.55, {}),
)
"""Score, and what differs from the default: sm_89 has no clusters."""


def new_run(store: Store, name: str, target: str, arch: str, workloads: Sequence[Workload]) -> StoredRun:
    spec = replace(random_search("layernorm", 2, name), target=target, arch=arch, workloads=tuple(workloads))
    device = "an H200" if target == "cuda" else "a CPU"
    return store.create_run(spec, Environment(device=device, arch=arch, compiler="c", torch="2", python="3", evo="0"))


def add(store: Store, run: StoredRun, order: int, task: int = 0, score: float = 0.5, **values: Value) -> str:
    """A candidate near the kernel's default, as if it had been measured; its identifier."""
    spec, workload = run.spec, run.spec.workloads[task]
    space = KERNEL.space(spec.target, workload, find_target(spec.target).limits(spec.arch))
    point = near(space, values)
    source = render(KERNEL, spec.target, Genome.of(point), workload, spec.arch)
    built = replace(s.build(order), arch=spec.arch, source_digest=source.digest, source=source.text)
    evaluation = replace(s.passed(order), build=built, timings=(s.timing(workload, score),))
    store.add(run, s.ref(order, task=task, point=point), evaluation, elapsed_s=1.0)
    return public_id(run.uid, order)


def end(store: Store, run: StoredRun, winners: Sequence[int] = (), refused: Sequence[int] = ()) -> None:
    """The finals: won by `winners`, in the order of tasks where there are several."""
    with store.transaction():
        for order in refused:
            store.add_final(run, order, Evaluation(status=Status.WRONG, log="for 33 columns: y is NaN"), elapsed_s=2.0)
        for order in winners:
            task = order % len(run.spec.workloads)
            own = replace(s.timing(run.spec.workloads[task], 0.5), protocol="final")
            raced = replace(own, contender=FINALIST, ratio=0.6)
            final = replace(s.passed(order), build=None, timings=(own, raced))
            store.add_final(run, order, final, elapsed_s=2.0)
            store.set_winner(run, task, order)
    store.set_status(run, RunStatus.FINISHED, reason="evaluations done", elapsed_s=2.0)


def export(db: Path, *names: str) -> list[dict[str, Any]]:
    """The variants in the manifest."""
    out = db.parent / "module"
    assert cli.run(["export", *names, "--out", str(out), "--db", str(db)]) == 0
    return manifest_of(out)["variants"]


def refusal(db: Path, capsys: pytest.CaptureFixture[str], *names: str) -> str:
    """The one sentence of a request that cannot be carried out."""
    ended = run_here(capsys, "export", *names, "--out", str(db.parent / "module"), "--db", str(db))
    assert ended.code == 2
    assert not (db.parent / "module").exists()
    return ended.sentence


# -- which candidates ---------------------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A run of two workloads on a CPU, each with a candidate that passed; stopped before its finals."""
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = new_run(store, "made", "cpu", "native", WORKLOADS)
        for order in range(len(WORKLOADS)):
            add(store, run, order, order)
        store.set_status(run, RunStatus.INTERRUPTED, reason="interrupted", elapsed_s=1.0)
    return tmp_path / "lineage.db"


def test_a_run_without_winners_is_not_exported_and_the_remedy_named(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "run 'made' is interrupted and has not named its winners" in refusal(db, capsys, "made")
    with Store.open(db, write=True) as store:
        assert store.run("made").status is RunStatus.INTERRUPTED
        end(store, store.run("made"))
    assert "run 'made' has no winner" in refusal(db, capsys, "made")


def test_a_candidate_that_no_final_confirmed_is_exported_with_that_said(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(db, write=True) as store:
        run = store.run("made")
        name = find_run(store, "made").tasks[0].best
    [variant] = export(db, name)
    assert (variant["record"]["winner"], variant["record"]["timed_in"]) == (False, "search")
    unconfirmed = f"evo: {name[:10]}: the finals of run made have not confirmed it"
    told = capsys.readouterr().err
    assert told.startswith(unconfirmed)
    assert f"to gate it on fresh data: evo check {name[:10]}" in told
    with Store.open(db, write=True) as store:
        winner = add(store, run, 2)
        end(store, run, winners=[2])
    export(db, name)
    told = capsys.readouterr().err
    assert told.startswith(unconfirmed)
    assert f"the winner of its workload is {winner[:10]}" in told
    export(db, winner)
    assert capsys.readouterr().err == ""


def test_a_candidate_that_the_finals_refused_is_exported_only_if_that_is_asked_for(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(db, write=True) as store:
        run = store.run("made")
        end(store, run, refused=[0])
    name = public_id(run.uid, 0)
    told = refusal(db, capsys, name)
    assert f"candidate {name} was refused by the finals of run made (wrong: for 33 columns: y is NaN)" in told
    assert "--refused" in told
    [variant] = export(db, name, "--refused")
    assert f"evo: {name[:10]}: the finals refused it (wrong: for 33 columns: y is NaN)" in capsys.readouterr().err
    assert variant["record"]["refused"] == "wrong: for 33 columns: y is NaN"


def test_winners_are_exported_with_the_figures_of_the_finals(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(db, write=True) as store:
        end(store, store.run("made"), winners=[0, 1])
    records = [v["record"] for v in export(db, "made")]
    assert "python -m module build" in capsys.readouterr().out
    assert [(r["winner"], r["timed_in"], r["order"]) for r in records] == [(True, "final", 0), (True, "final", 1)]
    assert [[(t["contender"], t["ratio"]) for t in r["timings"]] for r in records] == [[("candidate", 0.5)]] * 2


def test_a_workload_without_a_winner_is_left_out_and_named(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(db, write=True) as store:
        end(store, store.run("made"), winners=[1])
    assert [v["record"]["order"] for v in export(db, "made")] == [1]
    assert f"evo: nothing won for {WORKLOADS[0].key}: no variant of it is exported" in capsys.readouterr().err


# -- for which architectures --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A database with a run on an H200 whose winner and next best need sm_90; the best of the others was refused in the
    finals. And one on a CPU, of the same kernel."""
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = new_run(store, "on_h200", "cuda", "sm_90", [ON_GPU])
        for order, (score, values) in enumerate(FOUND):
            add(store, run, order, score=score, **values)
        end(store, run, winners=[0], refused=[3])
        run = new_run(store, "on_cpu", "cpu", "native", WORKLOADS[:1])
        add(store, run, 0)
        end(store, run, winners=[0])
    return tmp_path / "lineage.db"


def orders(variants: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(v["arch"], v["record"]["order"]) for v in variants]


def test_an_export_has_ptx_for_newer_gpus_beside_the_measured_code(gpu: Path) -> None:
    variants = export(gpu, "on_h200")
    assert orders(variants) == [("sm_90", 0), ("compute_90", 0)]
    assert [v["standing"] for v in variants] == ["measured", "compiled"]
    assert variants[0]["record"]["timed_in"] == "final"
    assert "timings" not in variants[1]["record"]


def test_the_best_candidate_that_an_architecture_takes_is_built_for_it(
    gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = export(gpu, "on_h200", "on_cpu", "--arch", "sm_90", "--arch", "sm_89")
    assert orders(variants) == [("sm_90", 0), ("native", 0), ("sm_89", 4), ("compute_89", 4)]
    assert [v["record"]["run"] for v in variants] == ["on_h200", "on_cpu", "on_h200", "on_h200"]
    said = capsys.readouterr()
    for arch, sentence in zip(("sm_89", "compute_89"), said.err.splitlines(), strict=True):
        assert sentence.startswith(f"evo: {ON_GPU.key}: what is built for {arch} is ")
        assert "(there is no cluster=2)" in sentence
    assert "built for sm_90: 1 measured; native: 1 measured; sm_89: 1 compiled; compute_89: 1 compiled" in said.out


def test_a_named_candidate_has_the_others_of_its_run_to_take_its_place(gpu: Path) -> None:
    with Store.open(gpu, write=False) as store:
        names = [point.id for point in read_history(store, "on_h200")]
    assert orders(export(gpu, names[1], "--arch", "sm_90", "--arch", "sm_89"))[:2] == [("sm_90", 1), ("sm_89", 4)]
    assert orders(export(gpu, names[3], "--refused", "--arch", "sm_89"))[0] == ("sm_89", 3), "it is what was asked for"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["on_cpu", "--arch", "sm_89"], "--arch sm_89 is none of target cpu"),
        (["on_h200", "--arch", "sm89"], "--arch sm89 is none of target cuda"),
        (["on_h200", "--arch", "sm_42"], "limits of 'sm_42' are not known"),
        (["on_cpu", "--arch", "pentium9"], "knows no CPU architecture 'pentium9'"),
        (["on_h200", "on_cpu", "--format", "huggingface"], "export them to folders of their own"),
        (["on_h200", "--format", "huggingface", "--arch", "sm_89"], "leave out --arch"),
        (["on_h200", "--format", "t4", "--arch", "sm_89"], "leave out --arch"),
        (["on_h200", "on_h200x"], "on_h200x"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(
    gpu: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in refusal(gpu, capsys, *arguments)
