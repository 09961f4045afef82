"""What cannot be compiled for a size that nothing was tuned for, or is wrong, is left to PyTorch, and said. On a CPU, where
attention has its head size compiled in."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exports import edit_manifest
from head_sizes import qkv, refused, served


def test_a_size_that_the_kernel_does_not_take_is_pytorchs(
    attention: ModuleType, cache: Path, compilations: Callable[[], int]
) -> None:
    attention.also_serve(untuned=True)
    assert "none here can be compiled for them" in refused(attention, 40)
    args = qkv(512)
    assert "head_dim=512 is not within" in attention.explain(*args)
    assert compilations() == 0


def test_without_a_folder_to_keep_it_in_it_is_compiled_for_this_process(
    attention: ModuleType, cache: Path, compilations: Callable[[], int]
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    attention.also_serve(untuned=True)
    served(attention, 32)
    served(attention, 32)
    assert compilations() == 1
    assert not list(cache.iterdir())


def test_without_a_compiler_it_is_pytorchs_and_said(
    attention: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    attention.also_serve(untuned=True)
    assert "compiling it on this machine fails: there is no C++ compiler" in refused(attention, 32)


def test_what_does_not_compile_is_not_tried_again(
    attention: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, compiler = tmp_path / "failures", tmp_path / "compiler"
    failing = f'echo x >>{log}; echo "variant.cpp:1: error: no such thing" >&2; exit 1'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) {failing};; esac; exec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    attention.also_serve(untuned=True)
    assert "no such thing" in refused(attention, 32)
    tried = len(log.read_text().splitlines())
    assert tried == 2  # the variant's source, and the general one
    refused(attention, 32)
    attention.frontend.DISPATCH.clear()
    refused(attention, 32)
    assert len(log.read_text().splitlines()) == tried


def test_a_wrong_result_is_never_given(
    attention_copy: Callable[[], Path], use: Callable[[Path], ModuleType], cache: Path
) -> None:
    """The source is as exported, and what the compiler makes of it is wrong."""
    copy = attention_copy()
    source = copy / next(copy.glob("variant_0_*.cpp")).name
    text = source.read_text()
    assert text.count("1.44269504088896") >= 1
    source.write_text(text.replace("1.44269504088896", "1.44369504088896"))

    def as_exported(manifest: dict[str, Any]) -> None:
        manifest["variants"][0]["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()

    edit_manifest(copy, as_exported)
    module = use(copy)
    module.also_serve(untuned=True)
    assert "its results are not PyTorch's" in refused(module, 32)
    assert "its results are not PyTorch's" in refused(module, 32)
    assert not list(cache.glob("*.so"))
    served(module, 64)


def test_a_source_that_was_changed_is_not_compiled(
    attention_copy: Callable[[], Path], use: Callable[[Path], ModuleType], cache: Path, compilations: Callable[[], int]
) -> None:
    copy = attention_copy()
    for source in copy.glob("*_float32*.cpp"):
        source.write_text(source.read_text() + "// a line more\n")
    module = use(copy)
    module.also_serve(untuned=True)
    assert "is not the file that was exported" in refused(module, 32)
    assert compilations() == 0


def test_one_process_compiles_only_so_many_sizes(
    attention: ModuleType, cache: Path, compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module(f"{attention.__name__}.runtime.jit"), "_MOST_SIZES", 1)
    attention.also_serve(untuned=True)
    served(attention, 32)
    assert "1 sizes were compiled in this process" in refused(attention, 96)
    served(attention, 32)
    assert compilations() == 1


def test_a_fault_in_the_trial_leaves_the_call_to_pytorch(
    attention: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.also_serve(untuned=True)
    trial = importlib.import_module(f"{attention.__name__}.runtime.trial")

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(trial, "compare", no_memory)
    assert "no memory is left" in refused(attention, 32)
