"""The native launcher is built when it is asked for, kept, shared, and done without where it cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import FORKED, request_for

pytestmark = pytest.mark.slow

X = torch.randn(8, 96)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing was built yet."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "own"


def launched_from_python(module: ModuleType) -> None:
    assert module.explain(X, (96,)).endswith("Python launcher")
    torch.testing.assert_close(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))


def refused(module: ModuleType) -> str:
    """Why it cannot be built, after checking that calls do not need it."""
    with pytest.raises(RuntimeError, match="cannot be built") as error:
        module.build()
    launched_from_python(module)
    return str(error.value)


def python(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder.parent,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_is_built_unless_it_is_asked_for(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    module = use(copy_of)
    launched_from_python(module)
    assert f"python -m {copy_of.name} build" in module.frontend.NATIVE.reason
    assert not cache.exists()


IMPORT = """
import sys, torch
before = set(sys.modules)
import {name} as module
print(module.explain(torch.ones(2, 96), (96,)))
print(*(set(sys.modules) - before))
"""


def test_processes_that_build_at_once_build_one_and_later_ones_find_it(
    copy_of: Path, cache: Path, tmp_path: Path
) -> None:
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    building = [python(copy_of, "-m", copy_of.name, "build", "--json", CXX=str(compiler)) for _ in range(2)]
    told = [process.communicate(timeout=280) for process in building]
    assert [p.returncode for p in building] == [0, 0], told
    (library,) = {json.loads(out)["native"] for out, _ in told}
    assert sum(" -c " in line for line in log.read_text().splitlines()) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".lock", ".so"]
    assert [str(p) for p in cache.glob("*.so")] == [library]
    later = python(copy_of, "-c", IMPORT.format(name=copy_of.name))
    out, err = later.communicate(timeout=60)
    explanation, loaded = out.splitlines()
    assert explanation.endswith("native launcher"), err
    assert not {name.partition(".")[0] for name in loaded.split()} & {"setuptools", "ninja", "sympy", "numpy", "evo"}
    assert "torch.utils.cpp_extension" not in loaded
    shown, _ = python(copy_of, "-m", copy_of.name, "show").communicate(timeout=60)
    assert "native launcher: in use" in shown
    (cache / Path(library).name).write_bytes(b"\x7fELF and no more")
    out, err = python(copy_of, "-c", IMPORT.format(name=copy_of.name)).communicate(timeout=60)
    assert out.splitlines()[0].endswith("Python launcher"), err


def test_without_a_compiler_calls_are_launched_from_python(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    module = use(copy_of)
    assert "there is no C++ compiler" in refused(module)
    done = python(copy_of, "-m", copy_of.name, "build")
    assert "cannot be built" in done.communicate(timeout=120)[1]
    assert done.returncode == 1
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob("build-*"))


def test_a_compiler_that_fails_is_quoted(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    failing = 'echo "frontend.cpp:1: error: no such header" >&2; exit 1'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *frontend.cpp*) {failing};; esac; exec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "error: no such header" in refused(use(copy_of))


def test_a_missing_ninja_is_named(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = use(copy_of)
    (tmp_path / "bin").mkdir()
    for name in ("g++", "sh"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert "pip install ninja" in refused(module)


def test_a_source_that_was_changed_is_not_built(copy_of: Path, use: Callable[[Path], ModuleType], cache: Path) -> None:
    source = copy_of / "frontend.cpp"
    source.write_text(source.read_text() + "// a line more\n")
    assert "frontend.cpp is not the file that was exported" in refused(use(copy_of))
    assert not list(cache.glob("*.so"))


def test_a_kernel_without_one_is_launched_from_python(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    (copy_of / "frontend.cpp").unlink()
    assert "this package has none" in refused(use(copy_of))


def test_a_folder_that_others_can_write_to_is_not_used(
    copy_of: Path, use: Callable[[Path], ModuleType], cache: Path
) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert "EVO_KERNELS_CACHE" in refused(use(copy_of))
    assert not list(cache.iterdir())


def test_copies_of_a_package_live_side_by_side(
    native: ModuleType, copy_of: Path, use: Callable[[Path], ModuleType], launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One library for both, an operator for each, and settings of its own."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(launchers))
    other = use(copy_of)
    operators = [m.frontend.NATIVE.operator for m in (native, other)]
    assert operators[0] is not operators[1]
    x = torch.randn(3, 96, requires_grad=True)
    other.also_serve(gradients=True)
    assert other.explain(x, (96,)).startswith("variant")
    assert native.explain(x, (96,)).startswith("PyTorch")
    for name in [m for m in sys.modules if m.partition(".")[0] == copy_of.name]:
        del sys.modules[name]
    again = use(copy_of)  # the operator of that name is there already
    assert again.frontend.NATIVE.operator is operators[1]
    assert again.explain(x, (96,)).startswith("PyTorch")
    torch.testing.assert_close(again.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_built_for_elsewhere(
    tmp_path: Path, use: Callable[[Path], ModuleType], launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the image of a container is made."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(launchers))
    out = tmp_path / "layernorm_for_sm_89"
    find_exporter("module").export(request_for("cuda", "sm_89", out, "rows=64,cols=96,dtype=float16"))
    module = use(out)
    assert Path(module.build()).is_file()
    assert "no CUDA driver" in module.frontend.NATIVE.reason
    assert module.explain(X, (96,)) == "PyTorch: nothing was tuned for cpu"
    assert torch.equal(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))
    done = python(out, "-m", out.name, "build", EVO_KERNELS_CACHE=str(launchers))
    assert "not used here: there is no CUDA driver" in done.communicate(timeout=60)[0]
    assert done.returncode == 0


def test_a_forked_process_does_not_wait_for_threads_that_stayed_behind(
    native: ModuleType, copy_of: Path, launchers: Path
) -> None:
    program = FORKED.format(name=copy_of.name)
    process = python(copy_of, "-c", program, str(copy_of.parent), EVO_KERNELS_CACHE=str(launchers))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    before, many, one = out.splitlines()
    assert before.endswith("native launcher")
    assert "this process was forked" in many
    assert one == before
