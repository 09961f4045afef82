"""Sizes that nothing was tuned for, on a GPU: compiled at first use, also amid a capture, right and kept."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Launched, agree, export
from tests.runtime.conftest import is_of, own, theirs

pytestmark = pytest.mark.gpu

ITEMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "layernorm": [
        ("rows=4096,cols=1024,dtype=float16", {}),
        ("rows=4096,cols=1024,dtype=float32", {}),
        ("rows=4096,cols=1024,dtype=bfloat16", {"grid": "persistent", "load_path": "cp_async", "stages": 2}),
        ("rows=64,cols=16384,dtype=float32", {"row_store": "shared"}),
    ],
    "attention": [
        ("batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64,dtype=float16", {}),
        ("batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64,dtype=float16,causal=true", {}),
    ],
    "softmax": [
        ("rows=4096,cols=1024,dtype=float16", {}),
        ("rows=4096,cols=1024,dtype=float32", {"algorithm": "online", "grid": "persistent"}),
        ("rows=4096,cols=1024,dtype=bfloat16", {"row_store": "shared"}),
    ],
}


@pytest.fixture(scope="module", params=sorted(ITEMS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / f"{request.param}_untuned"
    return export(request.param, out, ITEMS[request.param])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kept") / "cache"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(params=["Python", "native"])
def module(request: pytest.FixtureRequest, folder: Path, kept: Path, launched: Launched) -> Iterator[ModuleType]:
    """Nothing is loaded or compiled in this process yet; what earlier tests compiled is on disk."""
    found = launched(folder, request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(kept))
        yield found


def arguments(module: ModuleType, size: int, dtype: torch.dtype = torch.float16, rows: int = 70) -> Any:
    if is_of("attention", module):
        return tuple(torch.randn(2, 4, rows, size, device="cuda", dtype=dtype) for _ in range(3))
    x = 2 * torch.randn(rows, size, device="cuda", dtype=dtype) + 1
    if is_of("softmax", module):
        return x, -1
    return x, (size,), torch.randn(size, device="cuda", dtype=dtype), torch.randn(size, device="cuda", dtype=dtype)


def served(module: ModuleType, args: Any, **options: Any) -> str:
    result = own(module)(*args, **options)
    agree(result, theirs(module)(*args, **options))
    way: str = module.explain(*args, **options)
    assert way.startswith("variant"), way
    return way


def a_size(module: ModuleType) -> int:
    return 128 if is_of("attention", module) else 1000


SIZES = [1, 5, 31, 64, 96, 100, 769, 1000, 1001, 1025, 1536, 2047, 4097, 5120, 8192, 12288, 16383, 20000, 50257, 65536]


def test_any_size_is_served_and_right(module: ModuleType) -> None:
    importlib.import_module(f"{module.__name__}.runtime.jit")._MOST_SIZES = 1000
    if is_of("attention", module):
        for dim in (32, 96, 128, 256):
            for length in (1, 65, 300):
                for causal in (False, True):
                    args = arguments(module, dim, rows=length)
                    assert "compiled here" in served(module, args, is_causal=causal), (dim, length, causal)
    else:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for cols in SIZES:
                for rows in (1, 67, 700):
                    assert "compiled here" in served(module, arguments(module, cols, dtype, rows)), (dtype, cols, rows)


def test_it_is_on_at_first_and_may_be_turned_off(module: ModuleType) -> None:
    args = arguments(module, a_size(module))
    module.also_serve(untuned=False)
    assert "also_serve(untuned=True)" in module.explain(*args)
    assert torch.equal(own(module)(*args), theirs(module)(*args))
    module.also_serve(untuned=True)
    served(module, args)


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_capture_begins_or_meets_half_compiled_is_in_the_graph(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Nothing is kept from before: it compiles, tries and races."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(importlib.import_module(f"{module.__name__}.runtime.dispatch"), "_PATIENCE_S", 0.0)
    module.also_serve(measure=True, slower=True, wait=False)
    args = arguments(module, a_size(module))
    theirs(module)(*args)
    if begun:
        own(module)(*args)
        assert module.explain(*args).endswith("compiled beside the calls, once on this machine")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = own(module)(*args)
        explanation = module.explain(*args)
    assert "compiled here" in explanation
    assert "raced here" in explanation
    args[0].copy_(torch.randn_like(args[0]))
    captured.zero_()
    graph.replay()
    agree(captured, theirs(module)(*args))


def test_compiling_beside_another_threads_capture_breaks_neither(module: ModuleType, tmp_path: Path) -> None:
    """Nothing is kept from before: it compiles and tries."""
    args = arguments(module, a_size(module))
    expected = theirs(module)(*args)
    torch.cuda.synchronize()
    capturing, compiled, faults = threading.Event(), threading.Event(), []

    def work() -> None:
        try:
            capturing.wait(60)
            agree(own(module)(*args), expected)
            assert module.explain(*args).startswith("variant"), module.explain(*args)
        except BaseException as error:
            faults.append(error)
        finally:
            compiled.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "empty"))
        thread = threading.Thread(target=work)
        thread.start()
        x = torch.ones(100, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x + 1
            capturing.set()
            assert compiled.wait(60)
            y = y * 2
        thread.join()
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 4.0))
    assert not faults


def test_without_the_compiler_it_is_pytorchs(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = importlib.import_module(f"{module.__name__}.runtime.nvrtc")
    monkeypatch.setattr(nvrtc, "places", lambda name: iter(()))
    nvrtc.compiler.cache_clear()
    args = arguments(module, a_size(module))
    assert "NVRTC is not found" in module.explain(*args)
    assert torch.equal(own(module)(*args), theirs(module)(*args))


def test_a_wrong_result_is_never_given(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler makes something else of the source."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "empty"))
    variant = importlib.import_module(f"{module.__name__}.runtime.package").Variant
    text = variant.source
    before, after = {
        "layer_norm": (b"rsqrtf(a)", b"rsqrtf(a * 1.1f)"),
        "scaled_dot_product_attention": (b"1.4426950408889634f", b"1.5f"),
        "softmax": (b"LOG2E = 1.44269504f", b"LOG2E = 1.5f"),
    }[own(module).__name__]

    def changed(self: Any) -> bytes:
        found: bytes = text(self)
        assert before in found
        return found.replace(before, after)

    monkeypatch.setattr(variant, "source", changed)
    args = arguments(module, a_size(module))
    assert torch.equal(own(module)(*args), theirs(module)(*args))
    assert "its results are not PyTorch's" in module.explain(*args)
    assert not list((tmp_path / "empty").glob("compiled-*"))


def test_the_callers_stream_and_random_numbers_are_left_alone(module: ModuleType, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "empty"))
        args = arguments(module, a_size(module))
        state, stream = torch.cuda.get_rng_state(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = own(module)(*args)
            assert torch.cuda.current_stream() == stream
        stream.synchronize()
        assert torch.equal(torch.cuda.get_rng_state(), state)
        agree(result, theirs(module)(*args))
