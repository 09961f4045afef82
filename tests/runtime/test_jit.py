"""A size that is compiled in and that no variant has is compiled when it is first met, tried before it is used, and kept.
On a CPU, where attention has its head size compiled in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.runtime.conftest import Importer, not_tuned, qkv

pytestmark = pytest.mark.slow

torchs = functional.scaled_dot_product_attention


def served(module: ModuleType, dim: int, **options: Any) -> str:
    """How a call is explained that a variant serves and that is right."""
    args = qkv(dim)
    own = module.scaled_dot_product_attention(*args, **options)
    torch.testing.assert_close(own, torchs(*args, **options), rtol=1e-4, atol=1e-4)
    way: str = module.explain(*args, **options)
    assert way.startswith("variant"), way
    return way


def test_a_cpu_compiles_only_if_asked_and_later_processes_find_it(
    attention_copy: Callable[[], Path], use: Importer, cache: Path, compilations: Callable[[], int]
) -> None:
    attention = use(attention_copy())
    assert "also_serve(untuned=True)" in not_tuned(attention, 32)
    assert compilations() == 0
    assert not cache.exists()
    attention.also_serve(untuned=True)
    way = served(attention, 32)
    assert way.startswith("variant 0 ")
    assert "compiled here for head_dim=32" in way
    attention.also_serve(untuned=False)
    assert "also_serve" in not_tuned(attention, 32)
    attention.also_serve(untuned=True)
    served(attention, 32)
    later = use(attention_copy())
    later.also_serve(untuned=True)
    assert served(later, 32) == way
    assert compilations() == 1
    assert served(later, 32, is_causal=True).startswith("variant 1 ")  # the one for the same mask
    assert compilations() == 2
    for kept in cache.iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])
    later = use(attention_copy())
    later.also_serve(untuned=True)
    assert served(later, 32) == way
    assert compilations() == 3


def test_a_long_compilation_is_said(
    attention: ModuleType, compiler: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    compiler("sleep 1")
    attention.also_serve(untuned=True)
    served(attention, 32)
    assert "compiling variant 0 " in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["Python", "native"])
def test_calls_are_pytorchs_while_a_variant_is_compiled_beside_them_and_then_that_ones(
    exported_attention: Path, use: Importer, natively: Importer, raced: object, cache: Path, tmp_path: Path,
    compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, launcher: str,
) -> None:  # fmt: skip
    attention, go, args = (natively if launcher == "native" else use)(exported_attention), tmp_path / "go", qkv(32)
    monkeypatch.setattr(importlib.import_module(f"{attention.__name__}.runtime.dispatch"), "_PATIENCE_S", 0.0)
    compiler(f"while [ ! -e {go} ]; do sleep 0.02; done")
    attention.also_serve(untuned=True, wait=False)
    for _ in range(3):
        assert "compiled beside the calls" in attention.explain(*args)
        assert torch.equal(attention.scaled_dot_product_attention(*args), torchs(*args))
    assert attention.explain(*qkv(64)).startswith("variant")  # others are served meanwhile
    go.touch()
    (work,) = attention.frontend.DISPATCH._jit._work.values()
    work.result(60)
    way = served(attention, 32)
    assert f"{launcher} launcher" in way
    assert "compiled here for head_dim=32" in way


def test_the_callers_settings_neither_disturb_the_trial_nor_are_disturbed(attention: ModuleType, cache: Path) -> None:
    attention.also_serve(untuned=True)
    args = qkv(32)
    torch.set_default_dtype(torch.float64)
    try:
        state, threads = torch.get_rng_state(), torch.get_num_threads()
        with torch.inference_mode():
            assert attention.explain(*args).startswith("variant")
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_native_launcher_and_the_operator_serve_it_and_tracing_compiles_nothing(
    exported_attention: Path, natively: Importer, raced: object, cache: Path
) -> None:
    attention = natively(exported_attention)
    assert "also_serve(untuned=True)" in not_tuned(attention, 32)
    attention.also_serve(untuned=True, compiled=True)
    dispatch, args = attention.frontend.DISPATCH, qkv(32)
    torch.compiler.reset()
    own = torch.compile(attention.scaled_dot_product_attention, backend="eager", fullgraph=True)(*args)
    torch.testing.assert_close(own, torchs(*args), rtol=1e-4, atol=1e-4)
    assert not dispatch
    assert not cache.exists()
    assert served(attention, 32).endswith("native launcher")
    torch.testing.assert_close(attention.frontend.NATIVE.operator(*args), torchs(*args), rtol=1e-4, atol=1e-4)
    dispatch.retire(len(attention.variants()), -1, "a launch failed")
    assert served(attention, 32).startswith("variant for any size")  # the next source, as with builds
    dispatch.retire(len(attention.variants()) + 1, -1, "a launch failed")
    assert "a launch failed" in attention.explain(*args)
    assert torch.equal(attention.scaled_dot_product_attention(*args), torchs(*args))


def test_what_does_not_compile_is_not_tried_again(
    attention: ModuleType, compiler: Callable[[str], None], tmp_path: Path
) -> None:
    log = tmp_path / "failures"
    failing = f'echo x >>{log}; echo "variant.cpp:1: error: no such thing" >&2; exit 1'
    compiler(f'case "$*" in *" -o "*) {failing};; esac')
    attention.also_serve(untuned=True)
    for _ in range(2):
        assert "no such thing" in not_tuned(attention, 32)
        assert len(log.read_text().splitlines()) == 2  # the variant's source, and the general one
        attention.frontend.DISPATCH.clear()


def test_a_size_that_is_not_taken_or_not_tried_or_one_too_many_is_pytorchs(
    attention: ModuleType, cache: Path, compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    attention.also_serve(untuned=True)
    assert "none here can be compiled for them" in not_tuned(attention, 40)
    assert "head_dim=512 is not within" in attention.explain(*qkv(512))
    assert compilations() == 0
    monkeypatch.setattr(importlib.import_module(f"{attention.__name__}.runtime.trial"), "compare", no_memory)
    assert "no memory is left" in not_tuned(attention, 32)
    assert compilations() == 2  # the variant's source, and the general one
    monkeypatch.setattr(importlib.import_module(f"{attention.__name__}.runtime.jit"), "_MOST_SIZES", 2)
    assert "2 sizes were compiled in this process" in not_tuned(attention, 96)
    assert compilations() == 2
