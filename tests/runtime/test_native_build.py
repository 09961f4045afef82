"""The native launcher is built when it is asked for, kept, shared, and done without where it cannot be had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import edit_manifest, request_for
from tests.runtime.conftest import Importer, python, qkv, told

pytestmark = pytest.mark.slow

X = torch.randn(8, 96)


def launched_from_python(module: ModuleType) -> None:
    assert module.explain(X, (96,)).endswith("Python launcher")
    torch.testing.assert_close(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))


def refused(module: ModuleType, cache: Path) -> str:
    """Why it cannot be built, after checking that calls do not need it and that nothing is left behind."""
    with pytest.raises(RuntimeError, match="cannot be built") as error:
        module.build()
    launched_from_python(module)
    assert not [*cache.glob("*.so"), *cache.glob("evo-build-*")]
    return str(error.value)


IMPORT = """
import sys, torch
before = set(sys.modules)
import {name} as module
module.also_serve(measure=False)
print(module.explain(torch.ones(2, 96), (96,)))
print(*(set(sys.modules) - before))
"""


def test_processes_that_build_at_once_build_one_and_later_ones_find_it(
    raced: tuple[list[str], int], exported: Path, copy_of: Path, launchers: Path, cache: Path
) -> None:
    (library,) = {json.loads(out)["native"] for out in raced[0]}
    assert raced[1] <= 1  # none where the run was started with $EVO_KERNELS_CACHE
    builds = launchers.glob("evo-build-*/build.ninja")  # other processes of this run may be building others
    assert not [path for path in builds if str(exported) in path.read_text()]
    environment = {"EVO_KERNELS_CACHE": str(launchers)}
    explanation, loaded = told(python(copy_of, "-c", IMPORT.format(name=copy_of.name), **environment)).splitlines()
    assert explanation.endswith("native launcher")
    assert not {name.partition(".")[0] for name in loaded.split()} & {"setuptools", "ninja", "sympy", "numpy", "evo"}
    assert "torch.utils.cpp_extension" not in loaded
    assert "native launcher: in use" in told(python(copy_of, "-m", copy_of.name, "show", **environment))
    cache.mkdir(mode=0o700)
    (cache / Path(library).name).write_bytes(b"\x7fELF and no more")
    out = told(python(copy_of, "-c", IMPORT.format(name=copy_of.name), EVO_KERNELS_CACHE=str(cache)))
    assert out.splitlines()[0].endswith("Python launcher")


def test_nothing_is_built_unless_it_is_asked_for(copy_of: Path, use: Importer, cache: Path) -> None:
    module = use(copy_of)
    launched_from_python(module)
    assert f"python -m {copy_of.name} build" in module.frontend.NATIVE.reason
    assert not cache.exists()


def test_without_a_compiler_or_with_one_that_fails_calls_are_launched_from_python(
    copy_of: Path, use: Importer, cache: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = use(copy_of)
    failing = 'echo "function.cpp:1: error: no such header" >&2; exit 1'
    compiler(f'case "$*" in *function.cpp*) {failing};; esac')
    assert "error: no such header" in refused(module, cache)
    monkeypatch.setenv("CXX", "no_compiler")
    assert "there is no C++ compiler" in refused(module, cache)
    done = python(copy_of, "-m", copy_of.name, "build")
    assert "cannot be built" in done.communicate(timeout=120)[1]
    assert done.returncode == 1


def test_copies_of_a_package_live_side_by_side(
    native_attention: ModuleType, exported_attention: Path, natively: Importer
) -> None:
    """One library for both, an operator for each, and settings of its own."""
    other, args = natively(exported_attention), [t.requires_grad_() for t in qkv(64)]
    assert native_attention.frontend.NATIVE.operator is not other.frontend.NATIVE.operator
    other.also_serve(gradients=True)
    assert other.explain(*args).startswith("variant")
    assert native_attention.explain(*args).startswith("PyTorch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_built_for_elsewhere(
    tmp_path: Path, use: Importer, launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the image of a container is made."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(launchers))
    out = tmp_path / "layernorm_for_sm_89"
    find_exporter("module").export(request_for("cuda", "sm_89", out, "rows=64,cols=96,dtype=float16"))
    assert Path(json.loads(told(python(out, "-m", out.name, "build", "--json")))["native"]).is_file()
    module = use(out)
    assert module.explain(X, (96,)).startswith("PyTorch: nothing was tuned for float32 on this device (there is cuda sm_89 ")
    assert torch.equal(module.layer_norm(X, (96,)), functional.layer_norm(X, (96,)))


FORKED = """
import os, torch
import {name} as module
module.also_serve(measure=False)
x = torch.randn(512, 96)
torch.set_num_threads(4)
print(module.explain(x, (96,)), flush=True)
module.layer_norm(x, (96,))
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    print(module.explain(x, (96,)), flush=True)
    module.layer_norm(x, (96,))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("launcher", ["native", "Python"])
def test_a_forked_process_does_not_wait_for_threads_that_stayed_behind(
    native: ModuleType, copy_of: Path, launchers: Path, cache: Path, launcher: str
) -> None:
    environment = {"EVO_KERNELS_CACHE": str(launchers if launcher == "native" else cache)}
    before, after = told(python(copy_of, "-c", FORKED.format(name=copy_of.name), **environment)).splitlines()
    assert before.endswith(f"{launcher} launcher")
    assert "this process was forked" in after


def test_a_kernel_of_more_sizes_than_the_launcher_takes_is_launched_from_python(
    exported: Path, native: ModuleType, launchers: Path, use: Importer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "of_many_sizes"))
    more = [f"more{n}" for n in range(9)]

    def change(manifest: dict[str, Any]) -> None:
        manifest["kernel"]["dimensions"] += [{"name": name, "low": 0, "high": 1} for name in more]
        for record in (*manifest["variants"], *manifest["general"]):
            for problem in (record, *record.get("points", ())):
                problem["workload"] += "".join(f",{name}=0" for name in more)

    edit_manifest(folder, change)
    stated, sizes = (folder / "function.py").read_text(), "".join(f'"{name}": "0", ' for name in more)
    (folder / "function.py").write_text(stated.replace("sizes={", f"sizes={{{sizes}"))
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(launchers))
    built = native.frontend.NATIVE._library(create=False)
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "own"))
    module = use(folder)
    shutil.copy(built, module.frontend.NATIVE._library(create=True))  # less its sizes, the same launcher
    number = len(module.PACKAGE.dimensions)
    said = f"the kernel has {number} dimensions and compiled-in options, and the launcher takes 10"
    with pytest.raises(RuntimeError, match=said):
        module.build()
    assert module.frontend._call is None
    launched_from_python(module)
