"""One package for several architectures: what is built for each, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evo.errors import DeviceError, KernelError, UsageError
from evo.export import ExportItem, ExportRequest
from evo.export._package import asked_of, plan_record
from evo.export.module import EXPORTER as MODULE
from evo.export.module import remarks
from evo.problem.genome import Genome
from evo.problem.kernel import Argument, LaunchPlan, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Value
from evo.targets import find_target
from evo.targets.languages.cuda_cpp import run_nvrtc
from tests.ended import run_python
from tests.export.exports import manifest_of, request_for

TEXTS = ("rows=4096,cols=1024,dtype=float16", "rows=64,cols=768,dtype=bfloat16")
BUILDS = ("sm_90", "sm_89", "compute_89")
TIMING = {"contender": "candidate", "protocol": "final", "stage": "final", "median_us": 5.0, "clocks": {}}
TIMED = {
    "run": "demo",
    "device": "an H200",
    "timings": [{**TIMING, "ratio": 0.5, "ratio_low": 0.49, "ratio_high": 0.51}],
    "checks": [{"case": "normal", "passed": True}],
    "lineage": [{"id": "demo/0"}],
}


def changed(item: ExportItem, **values: Value) -> ExportItem:
    return replace(item, genome=Genome.of({**item.genome.parameters, **values}))


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> ExportRequest:
    """Two winners found on sm_90; the second one has clusters, which sm_89 has not."""
    request = request_for("cuda", "sm_90", tmp_path_factory.mktemp("export") / "for_several", *TEXTS, **TIMED)
    plain, other = request.items
    clustered = replace(changed(other, cluster=2, reduction="shuffle"), candidate="test/clustered")
    items = (changed(plain, launch="programmatic"), clustered)
    return replace(request, items=items, builds=BUILDS, environment={"device": "an H200"})


@pytest.fixture(scope="module")
def several(hopper: ExportRequest) -> Path:
    """With a candidate that takes the place of the second winner, and one before it that sm_89 refuses, too."""
    plain, winner = hopper.items
    refused = replace(changed(winner, cluster=4), candidate="test/refused")
    legal = changed(winner, cluster=1, reduction="warp", launch="programmatic")
    second = replace(legal, candidate="test/second", record={"run": "demo"})
    MODULE.export(replace(hopper, items=(plain, replace(winner, alternatives=(refused, second)))))
    return hopper.out


def test_every_winner_is_built_for_every_architecture(several: Path) -> None:
    variants = manifest_of(several)["variants"]
    assert [(v["workload"]["key"].split(",")[1], v["arch"], v["standing"]) for v in variants] == [
        ("cols=1024", "sm_90", "measured"),
        ("cols=768", "sm_90", "measured"),
        ("cols=1024", "sm_89", "compiled"),
        ("cols=768", "sm_89", "compiled"),
        ("cols=1024", "compute_89", "compiled"),
        ("cols=768", "compute_89", "compiled"),
    ]
    for v in variants:
        binary = (several / v["binary"]).read_bytes()
        if v["arch"] == "compute_89":
            assert b".target sm_89" in binary
            assert (v["registers"], v["spill_bytes"]) == (None, None)
        else:
            assert binary.startswith(b"\x7fELF")
            assert v["registers"] > 0
        again = run_nvrtc((several / v["source"]).read_text(), v["arch"], tuple(v["recipe"]["flags"]), (str(several),)).code
        assert again == binary
    assert [v["source"] for v in variants[2:4]] == [v["source"] for v in variants[4:]], "PTX is of the same text"
    assert set(variants[0]["genome"]) - set(variants[2]["genome"]) == {"cluster", "launch"}, "which sm_89 does not have"


def test_what_was_not_measured_there_carries_no_figures(several: Path) -> None:
    variants = manifest_of(several)["variants"]
    assert variants[0]["record"] == TIMED
    assert variants[2]["record"] == {"run": "demo", "device": "an H200"}
    assert {v["measured_arch"] for v in variants} == {"sm_90"}
    assert {v["measured_on"] for v in variants} == {0}
    assert manifest_of(several)["measured_on"] == [{"device": "an H200"}]


def test_where_a_winner_cannot_be_built_the_best_one_that_can_takes_its_place(several: Path) -> None:
    variants = manifest_of(several)["variants"]
    assert [v["candidate"] for v in variants[0::2]] == ["test/0"] * 3
    assert [v["candidate"] for v in variants[1::2]] == ["test/clustered", "test/second", "test/second"]
    assert variants[3]["instead_of"] == {"candidate": "test/clustered", "reason": "there is no cluster=2"}
    assert [v["instead_of"] for v in variants[:3]] == [None] * 3
    told = "is test/second, not test/clustered (there is no cluster=2)"
    assert [r.partition("what is built for ")[2] for r in remarks(several)] == [f"sm_89 {told}", f"compute_89 {told}"]
    assert MODULE.advice(several)[0] == "built for sm_90: 2 measured; sm_89: 2 compiled; compute_89: 2 compiled"


def test_a_workload_that_nothing_can_be_built_for_is_left_out_and_named(hopper: ExportRequest, tmp_path: Path) -> None:
    out = tmp_path / "one"
    MODULE.export(replace(hopper, out=out))
    assert [v["arch"] for v in manifest_of(out)["variants"]] == ["sm_90", "sm_90", "sm_89", "compute_89"]
    for arch, remark in zip(("sm_89", "compute_89"), remarks(out), strict=True):
        assert f"nothing is exported for {arch}; of test/clustered, for one: " in remark
        assert "cols=768" in remark


def test_a_workload_that_a_package_has_no_place_for_is_left_out_and_named(tmp_path: Path) -> None:
    plain, residual = "rows=4,cols=64,dtype=float32", "rows=4,cols=64,dtype=float32,residual=true,sum=true"
    MODULE.export(request_for("cuda", "sm_89", tmp_path / "one", plain, residual, kernel="rmsnorm"))
    assert [v["workload"]["options"]["residual"] for v in manifest_of(tmp_path / "one")["variants"]] == [False]
    (remark,) = remarks(tmp_path / "one")
    assert "residual=true" in remark
    assert "; of test/1, for one: rms_norm adds nothing before it normalises" in remark
    with pytest.raises(UsageError, match=r"nothing here can be exported for sm_89; of test/0, for one: rms_norm adds"):
        MODULE.export(request_for("cuda", "sm_89", tmp_path / "none", residual, kernel="rmsnorm"))


def test_an_architecture_for_which_there_is_nothing_is_refused(hopper: ExportRequest, tmp_path: Path) -> None:
    request = replace(hopper, out=tmp_path / "one", items=hopper.items[1:])
    with pytest.raises(UsageError, match="nothing here can be exported for sm_89; of test/clustered"):
        MODULE.export(request)
    with pytest.raises(DeviceError, match="limits of 'sm_75' are not known"):
        MODULE.export(replace(request, builds=("sm_90", "sm_75")))
    assert not list(tmp_path.iterdir())


def test_what_does_not_compile_elsewhere_gives_way_to_what_does(
    hopper: ExportRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, kernel = hopper.items[0], load_kernel("layernorm")
    chains = 1 if item.genome.parameters["accumulators"] == 2 else 2
    broken = replace(item, genome=Genome.of({**item.genome.parameters, "accumulators": chains}), candidate="test/broken")

    def flags(target: str, point: Mapping[str, Value]) -> tuple[str, ...]:
        return ("--define-macro=COLS=1",) if point["accumulators"] == chains else ()

    monkeypatch.setitem(vars(kernel), "compile_flags", flags)
    MODULE.export(replace(hopper, out=tmp_path / "one", items=(replace(broken, alternatives=[item]),), builds=("sm_89",)))
    [variant] = manifest_of(tmp_path / "one")["variants"]
    assert variant["candidate"] == item.candidate
    assert "it does not compile (" in variant["instead_of"]["reason"]
    assert "error: " in variant["instead_of"]["reason"]


def test_few_variants_of_a_covering_run_serve_other_architectures(hopper: ExportRequest, tmp_path: Path) -> None:
    plain, clustered = hopper.items
    chains = 1 if plain.genome.parameters["accumulators"] == 2 else 2
    shared = changed(clustered, accumulators=chains, cluster=1, reduction="warp").genome
    alike = [replace(item, genome=shared, score=1.05) for item in hopper.items]
    own = replace(changed(clustered, cluster=1, reduction="warp", min_blocks=1), candidate="test/own", score=1.0)
    items = (
        replace(plain, score=1.0, alternatives=(replace(alike[0], candidate="test/shared"),)),
        replace(clustered, score=0.9, alternatives=(own, replace(alike[1], candidate="test/shared too"))),
    )
    MODULE.export(replace(hopper, out=tmp_path / "one", items=items, few=True, builds=("sm_90", "sm_89")))
    elsewhere = [v for v in manifest_of(tmp_path / "one")["variants"] if v["arch"] == "sm_89"]
    assert [v["candidate"] for v in elsewhere] == ["test/shared", "test/shared too"]
    assert elsewhere[0]["genome"] == elsewhere[1]["genome"]
    assert "serves several" in elsewhere[0]["instead_of"]["reason"]
    assert elsewhere[1]["instead_of"]["reason"] == "there is no cluster=2"


@pytest.mark.parametrize(("score", "place", "slowdown"), [(2.4, 1, 1.2), (3.2, 0, None)])
def test_what_pytorch_was_faster_than_is_a_point_of_the_kept_variant_that_was_timed_near_it(
    hopper: ExportRequest, tmp_path: Path, score: float, place: int, slowdown: float | None
) -> None:
    texts = [f"rows={rows},cols=1024,dtype=float16" for rows in (4096, 64, 16384)]
    one, other, long = request_for("cuda", "sm_90", tmp_path / "one", *texts, **TIMED).items
    chains = 1 if one.genome.parameters["accumulators"] == 2 else 2
    other, lost = changed(other, accumulators=chains), changed(long, min_blocks=1)
    timings = [{**TIMING, "ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}]
    kept = replace(long, genome=other.genome, candidate="test/near", score=score)
    lost = replace(lost, score=2.0, record={**TIMED, "timings": timings}, alternatives=(kept,))
    MODULE.export(replace(hopper, out=tmp_path / "one", items=(one, other, lost), few=True, builds=("sm_90",)))
    variants = manifest_of(tmp_path / "one")["variants"]
    assert [len(v["points"]) for v in variants] == [int(n == place) for n in range(2)]
    [point] = variants[place]["points"]
    assert (point["candidate"], point.get("slowdown")) == (lost.candidate, slowdown)


def test_winners_of_several_runs_are_one_package(hopper: ExportRequest, tmp_path: Path) -> None:
    """Each was measured on its own architecture; what neither was measured on is compiled once."""
    ada = request_for("cuda", "sm_89", tmp_path / "one", TEXTS[0])
    cpu = request_for("cpu", "native", tmp_path / "one", "rows=64,cols=96,dtype=float32")
    ada, cpu = replace(ada, environment={"device": "an L4"}), replace(cpu, environment={"device": "a CPU"})
    parts = [replace(hopper, out=tmp_path / "one"), replace(ada, builds=(*BUILDS, "sm_80")), cpu]
    MODULE.export(*(replace(part, items=part.items[:1]) for part in parts))
    variants = manifest_of(tmp_path / "one")["variants"]
    assert [(v["target"], v["arch"], v["standing"], v["measured_on"]) for v in variants] == [
        ("cuda", "sm_90", "measured", 0),
        ("cuda", "sm_89", "measured", 1),
        ("cpu", "native", "measured", 2),
        ("cuda", "compute_89", "compiled", 1),
        ("cuda", "sm_80", "compiled", 1),
    ]
    with pytest.raises(UsageError, match="are both for rows=4096"):
        MODULE.export(parts[0], parts[0])


@pytest.mark.parametrize(
    ("asked", "builds"),
    [
        (("sm_90",), ("sm_90", "compute_90")),
        (("sm_90", "sm_89"), ("sm_90", "sm_89", "compute_89")),
        (("sm_90a", "sm_120"), ("sm_90a", "sm_120", "compute_120")),
        (("sm_90a",), ("sm_90a",)),
        (("sm_90", "compute_80"), ("sm_90", "compute_80")),
        (("native", "x86-64-v3"), ("native", "x86-64-v3")),
    ],
)
def test_newer_gpus_have_the_ptx_of_the_lowest_architecture(asked: tuple[str, ...], builds: tuple[str, ...]) -> None:
    target = "cpu" if "native" in asked else "cuda"
    assert find_target(target).with_intermediate(asked_of(target, [*asked, *asked])) == builds
    assert asked_of("cuda" if target == "cpu" else "cpu", asked) == ()


def test_what_nothing_here_runs_is_said_of_every_variant(several: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    checked = run_python(several.parent, "-W", "ignore", "-m", several.name, "check")
    assert checked.returncode == 1
    lines = checked.stdout.splitlines()
    assert sum("not checked: no CUDA GPU answers to PyTorch" in line for line in lines) == 2 * len(BUILDS)
    assert "no variant of this package runs on this machine" in lines[-1]


@pytest.mark.parametrize(("plan", "size"), [("rows", 4), (1, "rows"), (1, 4)])
def test_launches_that_are_right_for_one_size_only_are_refused(plan: object, size: object) -> None:
    def of(what: object, workload: Workload) -> int:
        return workload.dim(what) if isinstance(what, str) else int(str(what))

    more = Argument(name="more", kind="workspace", dtype="int32", size=lambda target, point, w: (of(size, w), "rows"))
    known = load_kernel("rmsnorm")
    kernel = replace(
        known,
        arguments=(*known.arguments, more),
        plan=lambda target, point, w: LaunchPlan(threads=32, tiles=(("rows", of(plan, w)),)),
    )
    workload = kernel.workload("cuda", "rows=8,cols=64,dtype=float32")
    if (plan, size) == (1, 4):
        assert plan_record(kernel, "cuda", Genome.of({}), workload)["workspace"] == [(16, ["rows"], False)]
    else:
        with pytest.raises(KernelError, match=r"for rows=16 are others than for rows=8, and an export has one for all"):
            plan_record(kernel, "cuda", Genome.of({}), workload)
