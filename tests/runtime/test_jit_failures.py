"""What cannot be compiled for a size that nothing was tuned for, or is wrong, is left to PyTorch, and said. On a CPU, where
attention has its head size compiled in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.runtime.head_sizes import qkv, refused, served


def test_a_size_that_the_kernel_does_not_take_is_pytorchs(
    attention: ModuleType, cache: Path, compilations: Callable[[], int]
) -> None:
    attention.also_serve(untuned=True)
    assert "none here can be compiled for them" in refused(attention, 40)
    args = qkv(512)
    assert "head_dim=512 is not within" in attention.explain(*args)
    assert compilations() == 0




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
