"""FlashInfer-Bench's own data models read what is exported for it, its builder builds it, its evaluator passes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import flashinfer_bench

from evo.errors import UsageError
from evo.export import find_exporter
from evo.problem.formats import fill
from tests.export.exports import request_for

EXPORTER = find_exporter("flashinfer-bench")
ATTENTION = "batch=1,heads=4,kv_heads=2,q_len=70,kv_len=70,head_dim=64,dtype=float32,causal=true"
LAYERNORM = (
    "rows=64,cols=96,dtype=float32",
    "rows=5,cols=96,dtype=float32",
    "rows=64,cols=256,dtype=bfloat16,weight=false,bias=false,eps=1e-6",
)
TIMING = {"protocol": "cold", "contender": "candidate", "ratio": 0.5, "median_us": 10.0}
RECORD = {
    "timings": [TIMING, {**TIMING, "contender": "torch", "ratio": None, "median_us": 20.0}],
    "checks": [{"error": 1e-6}, {"error": None}],
    "device": "a device",
    "created": "2026-11-21T00:00:00+00:00",
}


@pytest.fixture(scope="module", params=["layernorm", "attention"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dataset") / "fib"
    texts = LAYERNORM if request.param == "layernorm" else (ATTENTION,)
    EXPORTER.export(request_for("cpu", "native", out, *texts, kernel=request.param, **RECORD))
    return out


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    flashinfer_bench()
    from flashinfer_bench.compile import BuilderRegistry

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "built"))
    # No native launcher: it would take half a minute to build.
    monkeypatch.setenv("CXX", "/nowhere/c++")
    found = BuilderRegistry.get_instance()
    yield found
    found.cleanup()


def test_its_trace_set_reads_every_file(dataset: Path) -> None:
    traces = flashinfer_bench().TraceSet.from_path(str(dataset))
    assert traces.definitions
    for name, definition in traces.definitions.items():
        (solution,) = traces.solutions[name]
        assert solution.definition == definition.name
        assert len(traces.workloads[name]) == len(traces.traces[name])
        for trace in traces.traces[name]:
            assert trace.solution == solution.name
            assert trace.evaluation.performance.speedup_factor == 2.0
            assert trace.evaluation.correctness.max_absolute_error == 1e-6


def test_winners_of_one_definition_share_a_solution(tmp_path: Path) -> None:
    EXPORTER.export(request_for("cpu", "native", tmp_path / "fib", *LAYERNORM))
    names = sorted(p.stem for p in (tmp_path / "fib/definitions").rglob("*.json"))
    assert names == ["layernorm_h256_bfloat16_noweight_nobias_eps1e-06", "layernorm_h96_float32"]
    lines = (tmp_path / "fib/workloads/layernorm/layernorm_h96_float32.jsonl").read_text().splitlines()
    assert [json.loads(line)["workload"]["axes"] for line in lines] == [{"batch_size": 64}, {"batch_size": 5}]
    assert not (tmp_path / "fib/traces").exists()  # nothing was measured


def test_its_builder_builds_the_solution_and_the_results_are_the_references(dataset: Path, registry: Any) -> None:
    from flashinfer_bench.bench.utils import gen_inputs

    traces = flashinfer_bench().TraceSet.from_path(str(dataset))
    for name, definition in traces.definitions.items():
        solution = registry.build(definition, traces.solutions[name][0])
        reference = registry.build_reference(definition)
        for trace in traces.workloads[name]:
            inputs = gen_inputs(definition, trace.workload, device="cpu")
            with pytest.raises(RuntimeError, match="float64"), torch.no_grad():  # and does not leave the work to PyTorch
                solution(*(t.double() for t in inputs))
            with torch.no_grad():
                found, expected = solution(*inputs), reference(*inputs)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.allclose(found.float(), expected.float(), atol=1e-2, rtol=1e-2)


def test_machine_code_for_a_gpu_is_among_the_sources(tmp_path: Path) -> None:
    EXPORTER.export(request_for("cuda", "sm_90", tmp_path / "fib", "rows=64,cols=1024,dtype=float16"))
    (file,) = (tmp_path / "fib/solutions").rglob("*.json")
    solution = json.loads(file.read_text())
    assert any(s["path"].endswith(".cubin.b64") for s in solution["sources"])
    assert solution["spec"]["target_hardware"] == ["cuda"]
    flashinfer_bench().Solution(**solution)


def test_a_kernel_without_a_description_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo.problem.formats.FORMATS_FILE", "absent.toml")
    with pytest.raises(UsageError, match=r"no table \[flashinfer-bench\]"):
        EXPORTER.export(request_for("cpu", "native", tmp_path / "fib", LAYERNORM[0]))
    with pytest.raises(UsageError, match="'width' is undefined"):
        fill("{{ width }}", {"cols": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["layernorm", "attention"])
def test_its_evaluator_says_passed(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fib = flashinfer_bench()
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "built"))
    major, minor = torch.cuda.get_device_capability()
    texts = {
        "layernorm": ("rows=256,cols=1024,dtype=float16", "rows=32,cols=4096,dtype=bfloat16"),
        "attention": ("batch=2,heads=8,kv_heads=8,q_len=512,kv_len=512,head_dim=64,dtype=float16",),
    }[kernel]
    EXPORTER.export(request_for("cuda", f"sm_{major}{minor}", tmp_path / "fib", *texts, kernel=kernel))
    config = fib.BenchmarkConfig(num_trials=2, iterations=5, warmup_runs=2, log_dir=str(tmp_path / "logs"))
    results = fib.Benchmark(fib.TraceSet.from_path(str(tmp_path / "fib")), config).run_all(dump_traces=False)
    found = [trace.evaluation for traces in results.traces.values() for trace in traces]
    assert len(found) == len(texts)
    assert [(e.status.value, e.log if e.status.value != "PASSED" else "") for e in found] == [("PASSED", "")] * len(texts)
