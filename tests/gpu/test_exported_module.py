"""An exported module on a GPU: PyTorch's results on any stream, in graphs, from threads, on several GPUs."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.problem.space import Value
from evo.targets import find_target
from tests.ended import run_python
from tests.gpu.conftest import Launched, agree, export

pytestmark = pytest.mark.gpu

ITEMS: list[tuple[str, dict[str, Value]]] = [
    ("rows=64,cols=1024,dtype=float16", {}),
    ("rows=4096,cols=1024,dtype=float16", {"grid": "persistent"}),
    ("rows=64,cols=768,dtype=bfloat16", {}),
    ("rows=64,cols=1000,dtype=float32", {}),
    ("rows=64,cols=769,dtype=float32", {}),
    ("rows=64,cols=16384,dtype=float32", {"row_store": "shared"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a variant that needs more than 48 KB of shared memory and, where there are clusters, one of those."""
    clusters = find_target("cuda").device().arch >= "sm_90"
    items = [*ITEMS, ("rows=64,cols=8192,dtype=float16", {"cluster": 2})] if clusters else ITEMS
    out = export("layernorm", tmp_path_factory.mktemp("export") / "layernorm_for_gpu", items)
    launches = [v["launch"] for v in json.loads((out / "manifest.json").read_text())["variants"]]
    assert any(launch.get("smem_bytes", 0) > 48 * 1024 for launch in launches)
    assert not clusters or launches[-1]["cluster"] == 2
    return out


@pytest.fixture(scope="module", params=["Python", "native"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def module(folder: Path, launcher: str, launched: Launched) -> ModuleType:
    return launched(folder, launcher)


@pytest.fixture
def fresh(folder: Path, launcher: str, launched: Launched) -> ModuleType:
    """A copy in which nothing is loaded yet."""
    return launched(folder, launcher)


def arguments(rows: int = 64, cols: int = 1024, dtype: torch.dtype = torch.float16, device: str = "cuda") -> Any:
    x = 2 * torch.randn(rows, cols, device=device, dtype=dtype) + 1
    weight, bias = torch.randn(2, cols, device=device, dtype=dtype)
    return x, (cols,), weight, bias, 1e-5


def on_variant(module: ModuleType, args: Any) -> torch.Tensor:
    assert module.explain(*args).startswith("variant"), module.explain(*args)
    own = module.layer_norm(*args)
    agree(own, functional.layer_norm(*args))
    return own


def test_every_variant_passes_its_own_check(module: ModuleType) -> None:
    verdicts_of = importlib.import_module(f"{module.__name__}.runtime.trial").verdicts
    for index, variant in enumerate(module.variants()):
        verdicts = list(verdicts_of(module.frontend, index, seed=7))
        assert [v for v in verdicts if v.reason] == [], variant["workload"]["key"]
        assert sum(v.on_variant for v in verdicts) >= 20


def test_any_number_of_rows_is_served_by_the_nearest(module: ModuleType) -> None:
    for rows, index in ((1, 0), (63, 0), (300, 0), (900, 1), (70_001, 1)):
        args = arguments(rows)
        on_variant(module, args)
        assert module.explain(*args).startswith(f"variant {index} ")


def test_what_nobody_measured_is_raced_also_within_a_capture(
    fresh: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "kept"))
    fresh.also_serve(measure=True, slower=True)
    args = arguments(77)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = fresh.layer_norm(*args)
        assert ", raced here at 77x1024: " in fresh.explain(*args)
    graph.replay()
    agree(own, functional.layer_norm(*args))
    on_variant(fresh, args)
    for rows in (77, 79):
        assert ", raced here at 77x1024: " in fresh.explain(*arguments(rows))


def test_a_race_on_a_cpu_too_busy_for_it_decides_for_pytorch(
    fresh: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(f"{fresh.__name__}.runtime.trial._LEAD", 0)  # the GPU is given nothing to wait for
    fresh.also_serve(measure=True)
    assert "this machine's CPU was too busy to keep the GPU at work" in fresh.explain(*arguments(77))
    assert not list((tmp_path / "kept").glob("race-*"))


def test_calls_follow_the_current_stream(module: ModuleType) -> None:
    args = arguments(4096)
    expected = functional.layer_norm(*args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # were the call on another stream, it would read x before it is written
        x = torch.empty_like(args[0])
        x.copy_(args[0])
        own = module.layer_norm(x, *args[1:])
    side.synchronize()
    agree(own, expected)


def test_a_captured_call_reads_what_is_there_at_each_replay(module: ModuleType) -> None:
    for variant in module.variants():
        dims = variant["workload"]["dims"]
        args = arguments(dims["rows"], dims["cols"], getattr(torch, variant["workload"]["dtype"]))
        on_variant(module, args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = module.explain(*args)
            own = module.layer_norm(*args)
        assert captured.startswith("variant")
        for _ in range(2):
            args[0].copy_(torch.randn_like(args[0]))
            own.zero_()
            graph.replay()
            agree(own, functional.layer_norm(*args))


def test_a_first_call_within_a_capture_is_served(fresh: ModuleType) -> None:
    args = arguments()
    functional.layer_norm(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = fresh.layer_norm(*args)
        assert fresh.explain(*args).startswith("variant")
    own.zero_()
    graph.replay()
    agree(own, functional.layer_norm(*args))


def test_threads_that_never_used_cuda_may_call(fresh: ModuleType) -> None:
    args = [arguments(64 + i) for i in range(8)]
    expected = [functional.layer_norm(*a) for a in args]
    torch.cuda.synchronize()
    faults: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(100):
                assert fresh.explain(*args[i]).startswith("variant")
                agree(fresh.layer_norm(*args[i]), expected[i])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(args))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize(("claimed", "reason"), [(False, "sha256 differs"), (True, "does not load: CUDA_ERROR_INVALID")])
def test_a_damaged_binary_leaves_the_call_to_pytorch(fresh: ModuleType, claimed: bool, reason: str) -> None:
    """Also where it is what the manifest says."""
    record = fresh.frontend.DISPATCH._variants[0].record
    (Path(str(fresh.__file__)).parent / record["binary"]).write_bytes(b"no machine code")
    if claimed:
        fresh.PACKAGE.manifest["files"][record["binary"]] = hashlib.sha256(b"no machine code").hexdigest()
    args = arguments()
    assert reason in fresh.explain(*args)
    assert torch.equal(fresh.layer_norm(*args), functional.layer_norm(*args))


def test_a_launch_that_fails_leaves_this_call_and_the_next_to_pytorch(fresh: ModuleType) -> None:
    variant = fresh.frontend.DISPATCH._variants[0]
    variant.plans = (replace(variant.plans[0], threads=4096),)
    args = arguments()
    assert torch.equal(fresh.layer_norm(*args), functional.layer_norm(*args))
    assert "a launch failed: CUDA_ERROR_INVALID_VALUE" in fresh.explain(*args)
    assert torch.equal(fresh.layer_norm(*args), functional.layer_norm(*args))
    torch.cuda.synchronize()


def test_every_gpu_has_its_own_copy(module: ModuleType) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (1, 0):
                own = on_variant(module, arguments(device=f"cuda:{index}"))
                assert (own.device.index, torch.cuda.current_device()) == (index, current)


def test_the_benchmark_times_every_variant(folder: Path, launchers: Path) -> None:
    bench = ("-W", "ignore", "-m", folder.name, "bench", "--rounds", "4")
    done = run_python(folder.parent, *bench, timeout_s=120, EVO_KERNELS_CACHE=str(launchers))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  graph  ") == done.stdout.count("  call   ") == len(list(folder.glob("*.cubin")))
