"""`evo export --arch`: winners for other architectures than the one they were measured on, out of the database."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.analysis.runs import read_history
from evo.evaluation import Binary, Build, Candidate, Check, Evaluation, Proposal, Status, Timing
from evo.lineage import Environment, RunSpec, RunStatus, StoredRun
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload, load_kernel
from evo.problem.render import render
from evo.problem.space import Value
from evo.targets import find_target

KERNEL = load_kernel("layernorm")
CHECKS = (Check(case="normal", passed=True, error=0.0),)
WORKLOAD = KERNEL.workload("cuda", "rows=64,cols=1024,dtype=float16")
FOUND: tuple[tuple[float, dict[str, Value]], ...] = (
    (0.50, {"launch": "programmatic"}),
    (0.54, {"cluster": 2}),
    (0.52, {"launch": "programmatic", "rows_per_block": 2}),
    (0.53, {"rows_per_block": 2}),
    (0.55, {}),
)
"""Score, and what differs from the default: sm_89 has neither programmatic launches nor clusters."""
SPEC = RunSpec(
    kernel="layernorm",
    kernel_digest=KERNEL.digest,
    target="cuda",
    arch="sm_90",
    sampler="random",
    seed=1,
    max_in_flight=8,
    workloads=(WORKLOAD,),
    options={},
    budget={"evaluations": len(FOUND)},
    name="on_h200",
)


def timing(workload: Workload, protocol: str, ratio: float) -> Timing:
    figures = {"median_us": 9 * ratio, "low_us": 1.0, "high_us": 9.0, "samples_us": (5.0,), "ratio": ratio}
    return Timing(workload=workload.key, contender="candidate", protocol=protocol, **figures)  # type: ignore[arg-type]


def add(store: Store, run: StoredRun, order: int, score: float, values: dict[str, Value]) -> None:
    """A candidate near the kernel's default, as if it had been measured."""
    spec = run.spec
    [workload] = spec.workloads
    space = KERNEL.space(spec.target, workload, find_target(spec.target).limits(spec.arch))
    point = space.complete(space.default)
    for name, value in values.items():
        point = space.nearest(point, name, value) or pytest.fail(f"no legal point has {name}={value}")
    genome = Genome.of(point)
    source = render(KERNEL, spec.target, genome, KERNEL.binding(spec.target, workload), spec.arch)
    built = Build(
        status=Status.OK,
        arch=spec.arch,
        compiler="nvrtc",
        source_digest=source.digest,
        source=source.text,
        binary=Binary(code=b"code", code_hash=f"{order:064}"),
    )
    timed = (timing(workload, "cold", score),)
    with store.transaction():
        store.add(
            run,
            Candidate(order=order, task=0, workload=workload, proposal=Proposal(genome=genome, operator="made")),
            Evaluation(status=Status.OK, build=built, checks=CHECKS, timings=timed),
            elapsed_s=1.0,
        )


def end(store: Store, run: StoredRun, winner: int, refused: int | None = None) -> None:
    [workload] = run.spec.workloads
    with store.transaction():
        final = Evaluation(status=Status.OK, checks=CHECKS, timings=(timing(workload, "final", 0.5),))
        store.add_final(run, winner, final, elapsed_s=2.0)
        if refused is not None:
            store.add_final(run, refused, Evaluation(status=Status.WRONG, log="it was wrong"), elapsed_s=2.0)
        store.set_winner(run, 0, winner)
    store.set_status(run, RunStatus.FINISHED, reason="evaluations done", elapsed_s=2.0)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A run on an H200 whose winner and next best need sm_90; the best of the others was refused in the finals. And one
    on a CPU, of the same kernel."""
    environment = Environment(device="an H200", arch="sm_90", compiler="nvrtc", torch="2", python="3", evo="0")
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = store.create_run(SPEC, environment)
        for order, (score, values) in enumerate(FOUND):
            add(store, run, order, score, values)
        end(store, run, winner=0, refused=3)
        workload = KERNEL.workload("cpu", "rows=8,cols=32,dtype=float32")
        spec = replace(SPEC, target="cpu", arch="native", workloads=(workload,), name="on_cpu")
        run = store.create_run(spec, replace(environment, device="a CPU", arch="native"))
        add(store, run, 0, 0.5, {})
        end(store, run, winner=0)
    return tmp_path / "lineage.db"


def export(db: Path, *arguments: str) -> list[dict[str, Any]]:
    out = db.parent / "module"
    assert cli.run(["export", *arguments, "--out", str(out), "--db", str(db)]) == 0
    variants: list[dict[str, Any]] = json.loads((out / "manifest.json").read_text())["variants"]
    return variants


def orders(variants: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(v["arch"], v["record"]["order"]) for v in variants]


def test_an_export_has_ptx_for_newer_gpus_beside_the_measured_code(db: Path) -> None:
    variants = export(db, "on_h200")
    assert orders(variants) == [("sm_90", 0), ("compute_90", 0)]
    assert [v["standing"] for v in variants] == ["measured", "compiled"]
    assert variants[0]["record"]["timed_in"] == "final"
    assert "timings" not in variants[1]["record"]


def test_the_best_candidate_that_an_architecture_takes_is_built_for_it(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = export(db, "on_h200", "--arch", "sm_90", "--arch", "sm_89")
    assert orders(variants) == [("sm_90", 0), ("sm_89", 4), ("compute_89", 4)]
    assert variants[1]["record"]["run"] == "on_h200"
    said = capsys.readouterr()
    [sentence] = said.err.splitlines()
    assert sentence.startswith(f"evo: {WORKLOAD.key}: what is built for sm_89 and compute_89 is ")
    assert "(there is no launch=programmatic)" in sentence
    assert "built for sm_90: 1 measured; sm_89: 1 compiled; compute_89: 1 compiled" in said.out


def test_what_was_measured_need_not_be_in_it(db: Path) -> None:
    assert orders(export(db, "on_h200", "--arch", "sm_89")) == [("sm_89", 4), ("compute_89", 4)]


def test_a_named_candidate_has_the_others_of_its_run_to_take_its_place(db: Path) -> None:
    with Store.open(db, write=False) as store:
        names = [point.id for point in read_history(store, "on_h200")]
    assert orders(export(db, names[1], "--arch", "sm_90", "--arch", "sm_89"))[:2] == [("sm_90", 1), ("sm_89", 4)]
    assert orders(export(db, names[3], "--refused", "--arch", "sm_89"))[0] == ("sm_89", 3), "it is what was asked for"


def test_runs_on_several_targets_are_one_package(db: Path) -> None:
    variants = export(db, "on_h200", "on_cpu", "--arch", "sm_89", "--arch", "sm_90")
    assert [(v["target"], v["arch"]) for v in variants] == [
        ("cuda", "sm_90"),
        ("cpu", "native"),
        ("cuda", "sm_89"),
        ("cuda", "compute_89"),
    ]
    manifest = json.loads((db.parent / "module" / "manifest.json").read_text())
    assert [manifest["measured_on"][v["measured_on"]]["device"] for v in variants[:2]] == ["an H200", "a CPU"]


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
    db: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    out = db.parent / "module"
    assert cli.run(["export", *arguments, "--out", str(out), "--db", str(db)]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert reason in sentence
    assert not out.exists()


def test_an_architecture_that_no_candidate_is_for_is_refused(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(db, write=True) as store:
        run = store.create_run(
            replace(SPEC, name="needs_hopper"),
            Environment(device="an H200", arch="sm_90", compiler="nvrtc", torch="2", python="3", evo="0"),
        )
        add(store, run, 0, 0.5, {"launch": "programmatic"})
        end(store, run, winner=0)
    arguments = ["needs_hopper", "--arch", "sm_90", "--arch", "sm_89", "--out", str(db.parent / "module")]
    assert cli.run(["export", *arguments, "--db", str(db)]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert "nothing here can be built for sm_89" in sentence
    assert "there is no launch=programmatic" in sentence
