"""compute-sanitizer sees what leaves a result right: one element too far, a missing barrier, memory nobody wrote."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.errors import DeviceError
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Value
from evo.sanitize import Sanitized, choose_tools, sanitize
from evo.targets import find_target
from evo.targets._sanitizers import find_compute_sanitizer
from evo.testing.toy_kernel import write_kernel
from tests.ended import run_python


def has_sanitizer() -> bool:
    with suppress(DeviceError):
        return bool(find_compute_sanitizer())
    return False

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_sanitizer(), reason="compute-sanitizer is not installed"),
]

MODES = ("honest", "writes beyond", "reads beyond", "reads before", "race", "unset", "divergent")
TEMPLATE = """
extern "C" __global__ void twice(const float* x, float* y, long long n) {
    __shared__ float held[256];
    const long long base = blockIdx.x * 256ll, i = base + threadIdx.x;
    {% if p.mode == "unset" %}
    if (i < n) { float was = *(volatile float*)(y + i); (void)was; }
    {% endif %}
    if (i < n) held[threadIdx.x] = 2 * x[i];
    {% if p.mode != "race" %}
    __syncthreads();
    {% endif %}
    const int other = threadIdx.x ^ 32;  // of another warp
    if (base + other < n) y[base + other] = held[other];
    {% if p.mode == "writes beyond" %}
    if (i == 0) y[n] = 0;
    {% elif p.mode == "reads beyond" %}
    if (i == 0) { float next = *(volatile const float*)(x + n); (void)next; }
    {% elif p.mode == "reads before" %}
    if (i == 0) { float next = *(volatile const float*)(x - 1); (void)next; }
    {% elif p.mode == "divergent" %}
    if (threadIdx.x >= 17) __syncwarp(1);  // by threads that are not in the mask
    {% endif %}
}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kernels") / "toy"
    return str(write_kernel(folder, MODES, template=TEMPLATE, target="cuda"))


def run_tools(kernel: str, genome: Genome, tools: tuple[str, ...], workload: Workload | None = None) -> Sanitized:
    request = Request(
        kernel=kernel,
        target="cuda",
        arch=find_target("cuda").device().arch,
        genome=genome,
        workload=workload or load_kernel(kernel).example("cuda"),
        seed=1,
    )
    return sanitize(request, tools, 60.0)


def found_by(sanitized: Sanitized) -> dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]:
    return {r.tool: (r.errors, r.messages, r.wrong) for r in sanitized.reports if not r.clean}


FOUND = {
    "writes beyond": ("memcheck", "Invalid __global__ write of size 4 bytes", "y[n] = 0;"),
    "reads beyond": ("memcheck", "Invalid __global__ read of size 4 bytes", "volatile const float"),
    "race": ("racecheck", "Race reported between", "held["),
    "unset": ("initcheck", "Uninitialized __global__ memory read of size 4 bytes", "volatile float*"),
    "divergent": ("synccheck", "Barrier error detected", "__syncwarp(1)"),
}


@pytest.mark.parametrize("mode", FOUND)
def test_a_fault_that_leaves_the_result_right_is_found_by_its_tool_with_its_line(toy: str, mode: str) -> None:
    tool, what, line = FOUND[mode]
    (report,) = run_tools(toy, Genome.of({"mode": mode, "unroll": 1}), (tool,)).reports
    assert report.errors >= 1
    assert any(what in m and line in m for m in report.messages), report.messages
    assert not report.clean


def test_an_honest_candidate_is_clean_under_every_tool(toy: str) -> None:
    found = run_tools(toy, Genome.of({"mode": "honest", "unroll": 1}), choose_tools("cuda", "all"))
    assert not found_by(found)


BARRIERS: dict[str, dict[str, Value]] = {
    "half of the warps out of step": {"stagger": "half", "warps_m": 8, "block_n": 64, "k_stages": 2, "v_stages": 3},
    "columns of warps": {"warps_m": 2, "warps_n": 2, "barrier": "column", "block_n": 64, "k_parts": 2},
    "columns that merge beside": {"rows": "ends", "warps_m": 2, "warps_n": 4, "barrier": "column", "merge": "beside"},
    "a cluster": {"split_kv": 2, "warps_m": 2, "block_n": 64, "k_stages": 2, "v_stages": 2},
    "columns in a cluster, for two heads": {"split_kv": 2, "warps_m": 1, "warps_n": 2, "heads_a_tile": 2, "block_n": 64},
}


@pytest.mark.parametrize("kind", BARRIERS)
def test_attention_with_barriers_of_its_own_is_clean_under_every_tool(kind: str) -> None:
    kernel, target = load_kernel("attention"), find_target("cuda")
    sizes = "batch=1,heads=2,kv_heads=1,q_len=300,kv_len=400,head_dim=64,dtype=float16,causal=true"
    workload = kernel.workload("cuda", sizes)
    space = kernel.space("cuda", workload, target.limits(target.device().arch))
    wanted = {name: value for name, value in BARRIERS[kind].items() if name in space.by_name}
    if wanted != BARRIERS[kind]:
        pytest.skip("this GPU has no clusters")
    point = space.complete({**space.default, "min_blocks": 1, **wanted})
    assert not space.violations(point)
    assert wanted.items() <= point.items()
    found = run_tools("attention", Genome.of(point), choose_tools("cuda", "all"), workload)
    assert not found_by(found)


def test_a_layernorm_of_a_search_is_clean_under_every_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = str(tmp_path / "lineage.db")
    workload = "rows=512,cols=1000,dtype=float16"
    search = ["search", "layernorm", "--target", "cuda", "--workload", workload, "--evaluations", "4", "--db", db]
    assert cli.run([*search, "--seed", "1", "--name", "gpu", "--json"]) == 0
    capsys.readouterr()
    assert cli.run(["sanitize", "gpu", "--db", db, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert [t["tool"] for t in record["tools"]] == list(choose_tools("cuda", "all"))
    assert any("offset" in c for c in record["cases"])


def search_for(toy: str, mode: str, db: str) -> list[str]:
    search = ["search", toy, "--target", "cuda", "--evaluations", "1", "--finalists", "1", "--db", db]
    return [*search, "--fix", "unroll=1", "--fix", f"mode={mode}", "--name", "checked", "--json"]


@pytest.mark.parametrize("mode", ["reads beyond", "reads before"])
def test_a_winner_that_reads_beyond_its_input_is_refused_though_what_it_reads_is_thrown_away(
    toy: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(search_for(toy, mode, str(tmp_path / "lineage.db"))) == 1
    (refused,) = json.loads(capsys.readouterr().out)["refused_in_finals"]
    assert refused["log"].startswith("under memcheck: Invalid __global__ read of size 4 bytes")


def test_an_honest_winner_is_checked_within_the_time_that_it_has(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(search_for(toy, "honest", str(tmp_path / "lineage.db"))) == 0
    (workload,) = json.loads(capsys.readouterr().out)["workloads"]
    assert not any("not checked" in remark for remark in workload["remarks"]), workload["remarks"]


def found_with(script: str, toy: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and record of a search for an honest candidate by a process that finds this in place of the tool."""
    tool = folder / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    path = os.pathsep.join([str(tool.parent), os.environ["PATH"]])
    ended = run_python(folder, "-m", "evo", *search_for(toy, "honest", str(folder / "lineage.db")), PATH=path)
    return ended.returncode, json.loads(ended.stdout)


def test_errors_that_the_tool_counts_and_does_not_describe_refuse_a_winner(toy: str, tmp_path: Path) -> None:
    skipped = 'while [ "$1" != -P ]; do python=$1; shift; done'  # its own options
    counts = f'{skipped}\n"$python" "$@"\necho "========= ERROR SUMMARY: 3 errors"'
    code, record = found_with(counts, toy, tmp_path)
    assert code == 1
    (refused,) = record["refused_in_finals"]
    assert refused["log"] == "under memcheck: the tool counts 3 errors, and describes none in a way that can be read"


def test_a_tool_that_does_not_work_refuses_no_winner(toy: str, tmp_path: Path) -> None:
    code, record = found_with("echo '========= Error: cannot attach'\nexit 1", toy, tmp_path)
    assert code == 0
    (workload,) = record["workloads"]
    assert any("not checked for memory errors" in remark for remark in workload["remarks"])
