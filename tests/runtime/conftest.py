"""Exported packages to try out, and a way to import one from wherever it lies."""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.export import find_exporter
from tests.export.exports import request_for

Importer = Callable[[Path], ModuleType]
_BUILT = os.environ.get("EVO_KERNELS_CACHE")
_serial = count()
FUNCTIONS = {
    "layernorm": "layer_norm",
    "rmsnorm": "rms_norm",
    "softmax": "softmax",
    "attention": "scaled_dot_product_attention",
}
"""Of PyTorch, by kernel."""
TRAINED = {"trained_rmsnorm": "rstd=true", "trained_layernorm": "mean=true,rstd=true"}
"""Packages of a norm and its backward, with the options by which the forward gives what the backward takes."""
NORMS = ("rows=64,cols=96,dtype=float32", "rows=64,cols=1024,dtype=float32", "rows=64,cols=256,dtype=bfloat16")
FLOAT64 = "rows=64,cols=96,dtype=float64"


def of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that its workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def of(*packages: str) -> pytest.MarkDecorator:
    """For which packages a test is, where not for all of FUNCTIONS."""
    return pytest.mark.parametrize("module", packages, indirect=True)


def name_of(module: ModuleType) -> str:
    """Of the function that a package is for."""
    (name,) = set(FUNCTIONS.values()) & set(module.__all__)
    return name


def own(module: ModuleType) -> Any:
    """The function that a package is for."""
    return getattr(module, name_of(module))


def theirs(module: ModuleType) -> Any:
    """The one of PyTorch's that it stands in for."""
    return getattr(functional, name_of(module))


def is_of(kernel: str, module: ModuleType) -> bool:
    return name_of(module) == FUNCTIONS[kernel]


def is_trained(module: ModuleType) -> bool:
    return hasattr(module, "backward")


def is_norm(module: ModuleType) -> bool:
    return is_of("layernorm", module) or is_of("rmsnorm", module)


def layer(module: ModuleType) -> type[torch.nn.Module]:
    """The class of modules of a norm's package, derived from PyTorch's."""
    found: type[torch.nn.Module] = module.LayerNorm if hasattr(module, "LayerNorm") else module.RMSNorm
    return found


def fitting(module: ModuleType, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of layer_norm as the function of a norm's package takes them: rms_norm has no bias."""
    return args[:3] + args[4:] if is_of("rmsnorm", module) else args


def serve(module: ModuleType, *, gradients: bool = False, compiled: bool = False) -> None:
    """What else variants serve. Of softmax, calls that record gradients are served always."""
    module.also_serve(compiled=compiled, **({} if is_of("softmax", module) else {"gradients": gradients}))


def agree(result: torch.Tensor, torchs: torch.Tensor, least: int = 0) -> None:
    """least: size of the dimensions whose strides are compared."""
    tolerance = 1e-4 if result.dtype == torch.float32 else 3e-2
    forms = [
        (t.dtype, t.shape, [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n >= least], t.device)
        for t in (result, torchs)
    ]
    assert forms[0] == forms[1]
    torch.testing.assert_close(result, torchs, rtol=tolerance, atol=tolerance, equal_nan=True)


def on_variant(module: ModuleType, *args: Any, **options: Any) -> torch.Tensor:
    """The result of a call that a variant serves, which is compared with PyTorch's. args of a norm: layer_norm's."""
    args = fitting(module, args)
    assert module.explain(*args, **options).startswith("variant"), module.explain(*args, **options)
    result: torch.Tensor = own(module)(*args, **options)
    # What rms_norm of PyTorch has for the stride of a single element, which says nothing, depends on the input's.
    agree(result, theirs(module)(*args, **options), least=2 if is_of("rmsnorm", module) else 0)
    return result


def left_to_pytorch(module: ModuleType, reason: str, *args: Any, **options: Any) -> torch.Tensor:
    """The result of a call that is left to PyTorch, bit for bit its own. args of a norm: layer_norm's."""
    args = fitting(module, args)
    explanation = module.explain(*args, **options)
    assert explanation.startswith("PyTorch: ")
    assert reason in explanation
    result: torch.Tensor = own(module)(*args, **options)
    assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(theirs(module)(*args, **options)))
    return result


def refused_in_pytorchs_words(module: ModuleType, *args: Any, **options: Any) -> None:
    args = fitting(module, args)
    with pytest.raises(Exception) as torchs:  # noqa: PT011 - whatever PyTorch raises is what is asked for
        theirs(module)(*args, **options)
    with pytest.raises(torchs.type) as found:
        own(module)(*args, **options)
    assert str(found.value) == str(torchs.value)


def python(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """A process beside the package that lies in a folder."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder.parent,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=580)
    assert process.returncode == 0, err
    return out


def qkv(dim: int, length: int = 70) -> tuple[torch.Tensor, ...]:
    """Of attention with a head size that no variant may have."""
    return tuple(torch.randn(2, 4, length, dim) for _ in range(3))


def flash_attentions_rule(module: ModuleType, dtype: torch.dtype, place: torch.device, *, additive: bool) -> None:
    """With masks, errors are at most twice those of PyTorch's plain operations in the same precision."""
    generator = torch.Generator(place).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place).to(dtype)

    for group, q_len, kv_len in ((1, 256, 256), (4, 99, 515), (1, 130, 65), (4, 1, 1024)):
        q, k = draw(2, 4, q_len, 64) * (1 + draw(2, 4, 1, 1).abs()), draw(2, 4 // group, kv_len, 64)
        v = draw(2, 4 // group, kv_len, 64) + draw(2, 4 // group, 1, 1)
        for shape in ((2, 4, q_len, kv_len), (q_len, kv_len), (2, 1, 1, kv_len), (4, q_len, kv_len)):
            seen = draw(*shape) > 0  # any half of the keys, and the first by all queries
            seen[..., 0] = True
            mask = draw(*shape).masked_fill(~seen, -torch.inf) if additive else seen
            args = (q, k, v, mask, 0.0, False, None, group > 1)
            if (way := module.explain(*args)).startswith("PyTorch"):
                pytest.skip(way)
            added = mask if additive else torch.where(mask, 0.0, -torch.inf).to(dtype)
            keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
            plain, exact = (q / 8 @ keys.mT + added).softmax(-1) @ values, module.frontend.exact(*args)
            error, its = (float((result - exact).abs().max()) for result in (module.frontend.SUBJECT(*args), plain))
            assert error <= 2 * its, way


def not_tuned(module: ModuleType, dim: int) -> str:
    """Why a call with such a head size is PyTorch's."""
    args = qkv(dim)
    assert torch.equal(own(module)(*args), theirs(module)(*args))
    way: str = module.explain(*args)
    assert way.startswith("PyTorch: nothing was tuned for "), way
    return way


def exported_once(factory: pytest.TempPathFactory, kernel: str, *workloads: str) -> Path:
    """A package for this CPU. Compiled once for all workers, which takes up to a quarter of a minute; each has a copy to
    import from."""
    shared = of_this_run(factory) / f"exported_{kernel}"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.is_dir():
            find_exporter("module").export(request_for("cpu", "native", shared, *workloads, kernel=kernel))
    return Path(shutil.copytree(shared, factory.mktemp("export") / shared.name))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32 tuned at 96 and 1024 columns, bfloat16 at 256."""
    return exported_once(tmp_path_factory, "layernorm", *NORMS)


@pytest.fixture(scope="session")
def exported_rmsnorm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the other norm."""
    return exported_once(tmp_path_factory, "rmsnorm", *NORMS)


@pytest.fixture(scope="session")
def exported_attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention with one head size and every kind of mask, causal in float32 alone."""
    sizes = "batch=2,heads=4,kv_heads=4,q_len=128,kv_len=128,head_dim=64"
    kinds = ["float32", "float32,causal=true", "bfloat16"]
    kinds += [f"{dtype},attn_mask=true{more}" for dtype in ("float32", "bfloat16") for more in ("", ",additive=true")]
    return exported_once(tmp_path_factory, "attention", *(f"{sizes},dtype={kind}" for kind in kinds))


@pytest.fixture(scope="session")
def exported_softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32 tuned at 96 columns, bfloat16 at 256."""
    return exported_once(tmp_path_factory, "softmax", "rows=64,cols=96,dtype=float32", "rows=64,cols=256,dtype=bfloat16")


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
    folder = of_this_run(tmp_path_factory) / "launchers"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def use() -> Iterator[Importer]:
    """Imports the package that lies in a folder; forgets it afterwards."""
    names, places = [], []

    def forget(*names: str) -> None:
        for name in [m for m in sys.modules if m.partition(".")[0] in names]:
            del sys.modules[name]

    def load(folder: Path) -> ModuleType:
        if Path(getattr(sys.modules.get(folder.name), "__file__", None) or folder / "none").parent != folder:
            forget(folder.name)
        sys.path.insert(0, str(folder.parent))
        places.append(str(folder.parent))
        names.append(folder.name)
        importlib.invalidate_caches()
        found = importlib.import_module(folder.name)
        found.also_serve(measure=False)  # which variant serves a problem depends on no clock
        return found

    yield load
    for place in places:
        sys.path.remove(place)
    forget(*names)


@pytest.fixture(scope="session")
def natively(launchers: Path, use: Importer, tmp_path_factory: pytest.TempPathFactory) -> Importer:
    """Imports a copy of a package with its native launcher in use."""

    def load(folder: Path) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVO_KERNELS_CACHE", str(launchers))
            module = use(Path(shutil.copytree(folder, tmp_path_factory.mktemp("native") / f"native_{next(_serial)}")))
            module.build()
        return module

    return load


@pytest.fixture(scope="session")
def raced(
    exported: Path,
    exported_rmsnorm: Path,
    exported_attention: Path,
    launchers: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[str], int]:
    """What two processes say that build a native launcher at once, for all tests to use; and how often it was compiled.
    Those of the other kernels are built beside it: a compiler takes one core."""
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "log").touch()
    (folder / "compiler").write_text(f'#!/bin/sh\necho "$@" >>{folder}/log\nexec {shutil.which("g++")} "$@"\n')
    (folder / "compiler").chmod(0o755)
    environment = {"EVO_KERNELS_CACHE": str(launchers), "CXX": str(folder / "compiler")}
    packages = (exported, exported, exported_rmsnorm, exported_attention)
    processes = [python(package, "-m", package.name, "build", "--json", **environment) for package in packages]
    found = [process.communicate(timeout=580)[0] for process in processes]
    return found[:2], (folder / "log").read_text().count(f"-c {exported}")


@pytest.fixture(scope="session")
def native(exported: Path, natively: Importer, raced: object) -> ModuleType:
    return natively(exported)


@pytest.fixture(scope="session")
def native_rmsnorm(exported_rmsnorm: Path, natively: Importer, raced: object) -> ModuleType:
    return natively(exported_rmsnorm)


@pytest.fixture(scope="session")
def native_attention(exported_attention: Path, natively: Importer, raced: object) -> ModuleType:
    return natively(exported_attention)


@pytest.fixture(scope="session")
def native_softmax(exported_softmax: Path, natively: Importer) -> ModuleType:
    return natively(exported_softmax)


@pytest.fixture(scope="session")
def trained(natively: Importer, raced: object, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """Packages of TRAINED for this CPU, tuned as the forward alone and in float64; the backward in that and float32.
    Launchers are the forward's."""

    @functools.cache
    def load(name: str) -> ModuleType:
        out, kernel = tmp_path_factory.mktemp("export") / f"exported_{name}", name.removeprefix("trained_")
        workloads = [f"{sizes},{TRAINED[name]}" for sizes in (*NORMS, FLOAT64)]
        forward = request_for("cpu", "native", out, *workloads, kernel=kernel)
        backward = request_for("cpu", "native", out, NORMS[0], FLOAT64, kernel=f"{kernel}_backward")
        find_exporter("module").export(forward, backward)
        return natively(out)

    return load


@pytest.fixture(params=list(FUNCTIONS))
def module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A package of FUNCTIONS or TRAINED, with its native launcher."""
    torch.manual_seed(0)
    name = request.param
    if name in TRAINED:
        found = request.getfixturevalue("trained")(name)
    else:
        found = request.getfixturevalue("native" if name == "layernorm" else f"native_{name}")
    yield found
    serve(found)


@pytest.fixture
def copy_of(exported: Path, tmp_path: Path) -> Path:
    """The package moved elsewhere, under a name that nothing has been imported by."""
    return Path(shutil.copytree(exported, tmp_path / f"moved_{next(_serial)}"))


@pytest.fixture
def attention_copy(exported_attention: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies of it, under names that nothing has been imported by."""
    return lambda: Path(shutil.copytree(exported_attention, tmp_path / f"attention_{next(_serial)}"))


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
def compiler(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts lines of a shell in front of the compiler."""

    def place(lines: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\n{lines}\nexec {shutil.which("g++")} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return place


@pytest.fixture
def compilations(tmp_path: Path, compiler: Callable[[str], None]) -> Callable[[], int]:
    """How often the compiler has compiled since."""
    log = tmp_path / "log"
    compiler(f'echo "$@" >>{log}')
    return lambda: sum(" -o " in line for line in log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def command(
    use: Importer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Exit code and output of `python -m PACKAGE ...`, in this process."""

    def run(folder: Path, *arguments: str) -> tuple[int, str]:
        module = use(folder)
        monkeypatch.setattr(sys, "argv", [folder.name, *arguments])
        main = importlib.import_module(f"{folder.name}.runtime").main
        return main(module.PACKAGE, module.frontend), capsys.readouterr().out

    return run
