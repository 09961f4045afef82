"""What `evo bench` races where it is asked for several architectures. Nothing is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo.analysis.named import is_of
from evo.analysis.runs import list_runs
from evo.cli.check import _contenders, _for_each
from evo.errors import UsageError
from evo.evaluation import Candidate, Proposal
from evo.job.starts import read_starts
from evo.lineage import Environment
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.search.tasks import TaskExecutor
from evo.targets import find_target
from evo.testing.toy_kernel import write_kernel
from tests.landscape import random_search
from tests.lineage import samples as s

KEY = "batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16"


def test_a_genome_goes_without_what_an_architecture_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = load_kernel("attention")
    workload = kernel.workload("cuda", KEY)
    space = kernel.space("cuda", workload, find_target("cuda").limits("sm_90"))
    early = Genome.of(space.complete({"launch": "programmatic", "block_n": 128}))
    large = Genome.of(space.complete({"launch": "plain", "block_n": 256, "k_stages": 2, "v_stages": 2}))
    task = TaskExecutor(
        problem=kernel, executor=idle("cuda"), kernel="attention", target="cuda", arch="sm_90", workload=workload, seed=1
    )
    found = list(_for_each([("early", early), ("large", large)], task, ["sm_90", "compute_89"]))
    assert [(name, arch) for name, arch, _ in found] == [("early", "sm_90"), ("early", "compute_89"), ("large", "sm_90")]
    assert found[0][2] == early
    assert found[1][2].parameters == {n: v for n, v in early.parameters.items() if n not in ("launch", "split_kv")}
    told = capsys.readouterr().err
    assert told.startswith("evo: large is not legal for compute_89 (shared_memory: ")
    assert told.endswith("it is not timed there\n")


def idle(target: str) -> Any:
    """An executor of which nothing is run."""
    return SimpleNamespace(target=find_target(target))


HERE = find_target("cpu").device().name


def toy(folder: Path, mode: str = "honest") -> Kernel:
    return load_kernel(str(write_kernel(folder / "toy", (mode, "exact"))))


def record(db: str, called: str, kernel: Kernel, *, device: str = HERE, mode: str = "exact") -> str:
    """Has a run of a kernel, called so, with one candidate that is the best; its short identifier."""
    spec, workload = random_search(str(kernel.folder), 1), kernel.example("cpu")
    with Store.open(db, write=True) as store:
        run = store.create_run(replace(spec, kernel=called), Environment(device=device, arch="native"))
        proposal = Proposal(genome=Genome.of({"mode": mode, "unroll": 2}), operator="random")
        evaluation = replace(s.passed(0), timings=(s.timing(workload), s.timing(workload, 1.0, contender="torch")))
        store.add(run, Candidate(order=0, task=0, proposal=proposal), evaluation, elapsed_s=1.0)
    return public_id(run.uid, 0)[:10]


def contenders(kernel: Kernel, db: str) -> list[str]:
    place, workload = str(kernel.folder), kernel.example("cpu")
    task = TaskExecutor(
        problem=kernel, executor=idle("cpu"), kernel=place, target="cpu", arch="native", workload=workload, seed=1
    )
    return [name for name, _ in _contenders(task, db)]


def test_what_was_recorded_of_a_kernel_is_timed_whatever_its_folder_was_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    for number, called in enumerate((str(tmp_path / "toy"), "toy", "./toy", "elsewhere/and/gone")):
        db = f"{number}.db"
        assert contenders(kernel, db) == ["default"]
        name = record(db, called, kernel)
        assert contenders(kernel, db) == [name, "default"]
        space = kernel.space("cpu", kernel.example("cpu"), find_target("cpu").limits("native"))
        assert [point for _, point in read_starts([name], kernel, "cpu", [space], db)] == [{"mode": "exact", "unroll": 2}]
    assert capsys.readouterr().err == ""


def test_a_search_begins_with_what_is_shipped() -> None:
    kernel, folder = load_kernel("layernorm"), Path(__file__).parents[2] / "kernels" / "layernorm"
    limits = find_target("cuda").limits("sm_90")
    sizes = [kernel.workload("cuda", f"rows=4096,cols={n},dtype=float16") for n in (1024, 8192)]
    spaces = [kernel.space("cuda", workload, limits) for workload in sizes]
    found = read_starts([str(folder)], kernel, "cuda", spaces, "none.db")
    assert len(found) > 9
    assert {origin for origin, _ in found} == {str(folder)}
    assert {point["threads_per_row"] for _, point in found} >= {64, 256}


@pytest.mark.parametrize("called", ["{folder}", "toy", "../b/toy"])
def test_a_kernel_of_the_same_name_or_relative_path_may_be_another_one(
    called: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, kernel = toy(tmp_path / "a", "wrong"), toy(tmp_path / "b")
    db = str(tmp_path / "lineage.db")
    name = record(db, called.format(folder=there.folder), there)
    monkeypatch.chdir(tmp_path / "b")
    assert contenders(kernel, db) == ["default"]
    nothing = f"no candidate of this kernel as it is now is recorded for 4096 float32 in {db}"
    assert capsys.readouterr().err == f"evo: {nothing}: the template's default is timed\n"
    space = kernel.space("cpu", kernel.example("cpu"), find_target("cpu").limits("native"))
    with pytest.raises(UsageError, match=r"is of kernel .* as it is now .* write its values"):
        read_starts([name], kernel, "cpu", [space], db)


def test_what_was_recorded_by_name_or_whole_path_stays_a_kernels_own_when_its_files_change(tmp_path: Path) -> None:
    kernel = toy(tmp_path)
    db = str(tmp_path / "lineage.db")
    name = record(db, str(kernel.folder), kernel)
    template = kernel.folder / "cpu.cpp.j2"
    template.write_text(template.read_text() + "// changed\n")
    assert contenders(kernel, db) == [name, "default"]
    shipped = load_kernel("layernorm")
    with Store.open(db, write=False) as store:
        run = list_runs(store)[0].name
        assert is_of(store, "layernorm", run, shipped)
        assert not is_of(store, "attention", run, shipped)
        assert not is_of(store, str(tmp_path / "gone"), run, shipped)


def test_why_the_best_that_is_recorded_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = toy(tmp_path)
    db = str(tmp_path / "lineage.db")
    foreign = record(db, str(kernel.folder), kernel, device="Another Machine")
    assert contenders(kernel, db) == ["default"]
    left_out = "found for 4096 float32, is left out"
    said = capsys.readouterr().err
    assert said.startswith(f"evo: {foreign}, {left_out}: it was timed on Another Machine, and this is ")
    gone = record(db, str(kernel.folder), kernel, mode="of old")
    assert contenders(kernel, db) == ["default"]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"evo: {gone}, {left_out}: the kernel's search space does not have it any more")
    assert "'of old'" in first
    assert foreign in second
    mended = record(str(tmp_path / "other.db"), str(kernel.folder), kernel)
    assert contenders(kernel, str(tmp_path / "other.db")) == [mended, "default"]
