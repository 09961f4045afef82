"""A search from the command to the winner, and every structural branch, on a real GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from evo import cli
from evo.evaluation import Binary, Evaluation
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.lineage.store import Store
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.space import Value
from evo.search.check import check_candidate
from evo.search.tasks import TaskExecutor
from evo.targets import find_target

pytestmark = pytest.mark.gpu

WORKLOADS = {
    "layernorm": "rows=1024,cols=2048,dtype=bfloat16",
    "attention": "batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16",
}
BASELINES = {"layernorm": {"torch", "copy"}, "attention": {"torch"}}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = cli.run([*arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    record = json.loads(captured.out)
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize("kernel", list(WORKLOADS))
def test_a_search_ends_with_a_winner_whose_ancestry_is_known(
    kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(tmp_path / "lineage.db")
    search = ["search", kernel, "--target", "cuda", "--workload", WORKLOADS[kernel], "--evaluations", "80"]
    record = run_json(capsys, *search, "--seed", "3", "--name", "gpu", "--db", db)
    (workload,) = record["workloads"]
    assert workload["winner"]["disturbed"] or workload["winner"]["speedup"] > 1  # other programs may use the GPU
    assert BASELINES[kernel] <= set(workload["baselines"])
    with Store.open(db, write=False) as store:
        evaluations = store.evaluations(store.run("gpu"))
    assert [e.candidate.order for e in evaluations] == list(range(80))
    refused = [e for e in evaluations if not e.evaluation.status.passed]
    assert not refused, [(e.evaluation.status, e.evaluation.log, str(e.candidate.proposal.genome)) for e in refused]


@pytest.mark.parametrize("arch", ["sm_89", "compute_89"])
def test_a_search_for_an_older_gpu_has_nothing_compiled_where_it_is_timed(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = find_target("cuda")
    if target.limits(target.device().arch).capability < 90:
        pytest.skip(f"{target.device().name} is no newer generation than that of sm_89")
    measure, race, loaded = LocalExecutor.measure, LocalExecutor.race, list[Binary | None]()

    def noted_measure(self: LocalExecutor, request: Request) -> Future[Evaluation]:
        loaded.append(request.build and request.build.binary)
        return measure(self, request)

    def noted_race(self: LocalExecutor, request: RaceRequest) -> Future[RaceResult]:
        loaded.extend(build.binary for _, _, build in request.contenders)
        return race(self, request)

    monkeypatch.setattr(LocalExecutor, "measure", noted_measure)
    monkeypatch.setattr(LocalExecutor, "race", noted_race)
    db = str(tmp_path / "lineage.db")
    search = ["search", "attention", "--target", "cuda", "--arch", arch, "--workload", WORKLOADS["attention"]]
    record = run_json(capsys, *search, "--evaluations", "40", "--seed", "3", "--name", "older", "--db", db)
    assert {b.loadable[:4] for b in loaded if b} == {b"\x7fELF"}
    (workload,) = record["workloads"]
    assert workload["winner"]
    assert "cudnn" not in workload["baselines"]
    with Store.open(db, write=False) as store:
        run = store.run("older")
        evaluations = store.evaluations(run)
    assert run.environment.device == f"{target.device().name} as {arch}"
    refused = [e.evaluation for e in evaluations if not e.evaluation.status.passed]
    assert not refused, [(e.status, e.log) for e in refused]


GROUPS = "batch=2,heads=20,kv_heads=2,q_len=3,kv_len=515,head_dim=128,dtype=bfloat16,causal=true,lse=true"


@pytest.mark.parametrize(("kernel", "workload"), [("attention", None), ("attention", GROUPS), ("layernorm", None)])
@pytest.mark.parametrize("arch", [None, "compute_89"])
def test_every_structural_branch_passes_the_gate(
    arch: str | None, kernel: str, workload: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """compute_89: what sm_89 would run, compiled by the driver for the GPU present."""
    more = [*(["--arch", arch] if arch else []), *(["--workload", workload] if workload else [])]
    db = str(tmp_path / "lineage.db")
    cli.run(["check", kernel, "--target", "cuda", *more, "--db", db, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert len(record["branches"]) > (40 if workload else 100)
    wrong = [b for b in record["branches"] if b["gate"] != "ok" or b["timed"] not in ("ok", None)]
    failed = [(b["workload"], b["changes"], b["log"]) for b in wrong]
    assert not failed, f"seed {record['seed']}: {failed}"


STEP = {"stagger": "half", "warps_m": 8, "min_blocks": 1}
OUT_OF_STEP: list[dict[str, Value]] = [
    {**STEP, "block_n": 64, "k_stages": 4, "v_stages": 4, "q_store": "registers"},
    {**STEP, "block_n": 32, "k_stages": 3, "v_stages": 3, "m_tiles": 2, "grid": "persistent", "rescale": "lazy"},
    {**STEP, "block_n": 16, "k_stages": 2, "v_stages": 4, "split_kv": 2, "overlap": "values"},
]
FEW_KEYS = "batch=1,heads=2,kv_heads=1,q_len=700,kv_len=300,head_dim=64,dtype=float16,causal=true"  # rows that see none


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """One for all points: its processes take longer to start than most points to check."""
    with closing(LocalExecutor("cuda", ExecutorConfig(builders=1, cache_dir=tmp_path_factory.mktemp("cache")))) as opened:
        yield opened


def check_attention(wanted: dict[str, Value], sizes: Sequence[str], executor: LocalExecutor) -> None:
    """Gates the default with these values, those left out that this GPU does not have, and its neighbours."""
    kernel, target = load_kernel("attention"), find_target("cuda")
    arch = target.device().arch
    for workload in (kernel.workload("cuda", size) for size in sizes):
        space = kernel.space("cuda", workload, target.limits(arch))
        point = space.complete({**space.default, **{n: v for n, v in wanted.items() if n in space.by_name}})
        if space.violations(point):
            pytest.skip(f"not legal here: {'; '.join(space.violations(point))}")
        task = TaskExecutor(
            problem=kernel, executor=executor, kernel="attention", target="cuda", arch=arch, workload=workload, seed=1
        )
        trials = check_candidate(task, Genome.of(point), gate=True)
        assert all(t.passed for t in trials), [(t.workload.key, t.build.log, t.measurement) for t in trials]


FEW = {"warps_m": 1, "block_n": 64, "k_stages": 2, "v_stages": 2}
HEADS_A_TILE: list[dict[str, Value]] = [
    {**FEW, "heads_a_tile": 4, "warps_n": 4, "split_kv": 4, "mask": "apart"},
    {**FEW, "heads_a_tile": 8, "warps_n": 4, "split_kv": 8, "merge": "beside", "launch": "programmatic"},
    {**FEW, "heads_a_tile": 16, "warps_n": 2, "barrier": "column", "layout": "padding"},
    {"heads_a_tile": 2, "m_tiles": 2, "epilogue": "direct", "order": "heads"},
    {"heads_a_tile": 4, "warps_m": 8, "epilogue": "shuffled", "mask": "apart", "min_blocks": 1},
]


@pytest.mark.parametrize("wanted", HEADS_A_TILE, ids=str)
def test_attention_with_heads_that_share_a_tile_passes_the_gate(wanted: dict[str, Value], executor: LocalExecutor) -> None:
    check_attention(wanted, [GROUPS, GROUPS.replace("q_len=3", "q_len=40").replace("true", "false")], executor)


@pytest.mark.parametrize("wanted", OUT_OF_STEP, ids=str)
def test_attention_with_warps_out_of_step_passes_the_gate(wanted: dict[str, Value], executor: LocalExecutor) -> None:
    check_attention(wanted, [WORKLOADS["attention"], FEW_KEYS, FEW_KEYS.replace("q_len=700", "q_len=1")], executor)


WARPS = [(2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)]
LENGTHS = [(700, 300), (1, 300), (33, 33), (161, 700)]  # 161: an odd number of halves of 16, and of 64
BOTH_ENDS: list[dict[str, Value]] = [
    *({"rows": "ends", "warps_m": m, "warps_n": n, "block_n": 128} for m, n in WARPS),
    {"rows": "ends", "warps_m": 4, "epilogue": "shuffled"},
    {"rows": "ends", "warps_m": 4, "warps_n": 2, "barrier": "column", "merge": "beside", "copies": "looped"},
    {"rows": "ends", "warps_m": 2, "warps_n": 4, "grid": "persistent", "min_blocks": 1, "merge": "beside"},
    {"rows": "ends", "warps_m": 8, "m_tiles": 2, "split_kv": 2, "block_n": 32, "order": "heads"},
]


@pytest.mark.parametrize("wanted", BOTH_ENDS, ids=str)
def test_attention_with_rows_of_both_ends_passes_the_gate(wanted: dict[str, Value], executor: LocalExecutor) -> None:
    sizes = [FEW_KEYS.replace("q_len=700,kv_len=300", f"q_len={q},kv_len={kv}") for q, kv in LENGTHS]
    check_attention(wanted, sizes, executor)


def test_every_peer_that_runs_here_can_be_raced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that PyTorch compiles while the race is held."""
    more = ["--workload", WORKLOADS["attention"], "--against", "flex,math", "--db", str(tmp_path / "lineage.db")]
    record = run_json(capsys, "bench", "attention", "--target", "cuda", *more)
    (workload,) = record["workloads"]
    assert {"torch", "flex", "math", "default"} <= {t["contender"] for t in workload["timings"]}
