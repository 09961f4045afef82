"""Exported packages to try out, and a way to import one from wherever it lies."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from evo.export import find_exporter
from tests.export.exports import request_for

Importer = Callable[[Path], ModuleType]
_BUILT = os.environ.get("EVO_KERNELS_CACHE")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package for this CPU: float32 tuned at 96 and 1024 columns, bfloat16 at 256."""
    out = tmp_path_factory.mktemp("export") / "exported_layernorm"
    workloads = (
        "rows=64,cols=96,dtype=float32",
        "rows=64,cols=1024,dtype=float32",
        "rows=64,cols=256,dtype=bfloat16",
    )
    find_exporter("module").export(request_for("cpu", "native", out, *workloads))
    return out


_serial = count()


@pytest.fixture(scope="session", autouse=True)
def _no_launcher_of_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this user has built must not change what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("EVO_KERNELS_CACHE", raising=False)
        yield


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where native launchers are kept once they are built, for all processes of this run: a build takes half a minute.
    Those that were built before are found if the run was started with $EVO_KERNELS_CACHE."""
    if _BUILT:
        return Path(_BUILT)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "launchers"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def native(
    exported: Path, launchers: Path, use: Importer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModuleType]:
    """The package with its native launcher in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVO_KERNELS_CACHE", str(launchers))
        module = use(Path(shutil.copytree(exported, tmp_path_factory.mktemp("native") / f"native_{next(_serial)}")))
        module.build()
        yield module


@pytest.fixture
def copy_of(exported: Path, tmp_path: Path) -> Path:
    """The package moved elsewhere, under a name that nothing has been imported by."""
    return Path(shutil.copytree(exported, tmp_path / f"moved_{next(_serial)}"))


@pytest.fixture(scope="module")
def use() -> Iterator[Importer]:
    """Imports the package that lies in a folder; forgets it afterwards."""
    names, places = [], []

    def load(folder: Path) -> ModuleType:
        sys.path.insert(0, str(folder.parent))
        places.append(str(folder.parent))
        names.append(folder.name)
        importlib.invalidate_caches()
        return importlib.import_module(folder.name)

    yield load
    for place in places:
        sys.path.remove(place)
    for name in [m for m in sys.modules if m.partition(".")[0] in names]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def attention_of_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package for this CPU: attention in float32 with one head size, without and with a causal mask."""
    out = tmp_path_factory.mktemp("export") / "attention_of_64"
    sizes = "batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64,dtype=float32"
    find_exporter("module").export(request_for("cpu", "native", out, sizes, f"{sizes},causal=true", kernel="attention"))
    return out


@pytest.fixture
def attention_copy(attention_of_64: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies of it, under names that nothing has been imported by."""
    return lambda: Path(shutil.copytree(attention_of_64, tmp_path / f"attention_{next(_serial)}"))


@pytest.fixture
def attention(attention_copy: Callable[[], Path], use: Importer) -> ModuleType:
    """One in which nothing is loaded yet."""
    return use(attention_copy())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nothing was built yet."""
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "own"


@pytest.fixture
def compilations(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the compiler has compiled since."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return lambda: sum(" -o " in line for line in log.read_text().splitlines()) if log.exists() else 0
