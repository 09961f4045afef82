"""Of a package's builds for several architectures, the one that a device takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from evo.errors import DeviceError
from evo.export.module import ModuleExporter
from evo.runtime.choice import rank_on_gpu
from evo.targets import find_target
from evo.targets.cpu import compiler_path, extra_features
from tests.export.exports import edit_manifest, request_for

MODULE = ModuleExporter()
SHIPPED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "compute_80", "compute_90", "compute_90a", "compute_100f")


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((7, 5), ""),
        ((8, 0), "sm_80 compute_80"),
        ((8, 6), "sm_86 sm_80 compute_80"),
        ((8, 7), "sm_86 sm_80 compute_80"),
        ((8, 9), "sm_89 sm_86 sm_80 compute_80"),
        ((9, 0), "sm_90 sm_90a compute_90 compute_90a compute_80"),
        ((10, 0), "compute_100f compute_90 compute_80"),
        ((10, 3), "compute_100f compute_90 compute_80"),
        ((12, 0), "compute_90 compute_80"),
    ],
)
def test_a_gpu_takes_its_own_code_then_its_generations_then_ptx(capability: tuple[int, int], order: str) -> None:
    ranks = {arch: rank_on_gpu(arch, capability) for arch in SHIPPED}
    runs = [arch for arch in SHIPPED if ranks[arch] is not None]
    assert sorted(runs, key=lambda arch: ranks[arch]) == order.split()


def levels() -> list[str]:
    """Levels of x86-64 that this CPU has, the highest first."""
    path = compiler_path(None)
    return [level for level in ("x86-64-v4", "x86-64-v3", "x86-64-v2") if not extra_features(path, level)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured for the plainest x86-64, and compiled for what this CPU has more."""
    try:
        find_target("cpu").limits("x86-64")
    except DeviceError:
        pytest.skip("this CPU is no x86-64")
    if len(levels()) < 2:
        pytest.skip("this CPU has no level of x86-64 above the second")
    out = tmp_path_factory.mktemp("export") / "for_cpus"
    request = request_for("cpu", "x86-64", out, "rows=64,cols=96,dtype=float32", "rows=64,cols=1024,dtype=float32")
    MODULE.export(replace(request, builds=("x86-64", *levels()[:2])))
    return out


def taken(module: ModuleType) -> str:
    """The way of a call, after checking what it gives."""
    x = torch.randn(64, 96)
    torch.testing.assert_close(module.layer_norm(x, (96,)), functional.layer_norm(x, (96,)))
    return str(module.explain(x, (96,)))


def test_a_cpu_takes_the_code_that_uses_most_of_it(on_cpu: Path, use: Callable[[Path], ModuleType]) -> None:
    module = use(on_cpu)
    way = taken(module)
    assert way.startswith(f"variant 2 (cpu {levels()[0]}, float32, tuned for 64x96 on x86-64)")
    dispatch = module.frontend.DISPATCH
    assert [dispatch.taken(i) for i in range(6)] == [2, 3] * 3
    for index in range(6):
        with dispatch.only(index):
            assert taken(module).startswith(f"variant {index} ")


def test_what_cannot_be_loaded_gives_way_to_the_next_build(
    on_cpu: Path, use: Callable[[Path], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")  # or it would be built again here
    folder = tmp_path / "damaged_for_cpus"
    folder.mkdir()
    for path in on_cpu.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            (folder / path.relative_to(on_cpu)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(on_cpu)).write_bytes(path.read_bytes())
    best = json.loads((folder / "manifest.json").read_text())["variants"][2]
    (folder / best["binary"]).write_bytes(b"damaged")
    module = use(folder)
    assert taken(module).startswith(f"variant 4 (cpu {levels()[1]}, ")
    assert module.frontend.DISPATCH.taken(2) == 4
    assert "is not the file that was exported" in module.frontend.DISPATCH.unavailable(2)


def test_a_cpu_without_the_instructions_takes_the_measured_code(
    on_cpu: Path, use: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    folder = tmp_path / "modest_cpus"
    MODULE.export(
        replace(
            request_for("cpu", "x86-64", folder, "rows=64,cols=96,dtype=float32"), builds=("x86-64", *levels()[:1])
        )
    )
    edit_manifest(folder, lambda m: m["variants"][1]["needs"]["features"].append("avx9000"))
    assert taken(use(folder)).startswith("variant 0 (cpu x86-64, float32, tuned for 64x96)")


@pytest.mark.slow
def test_the_native_launcher_takes_what_the_one_from_python_takes(
    use: Callable[[Path], ModuleType],
    tmp_path: Path,
    launchers: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a package has variants for GPUs and there is none."""
    if len(levels()) < 1:
        pytest.skip("this CPU is no x86-64 of the second level")
    monkeypatch.setenv("EVO_KERNELS_CACHE", str(launchers))
    out = tmp_path / "natively_for_several"
    cpu = request_for("cpu", "x86-64", out, "rows=64,cols=96,dtype=float32")
    gpu = request_for("cuda", "sm_90", out, "rows=64,cols=768,dtype=bfloat16")
    MODULE.export_together([gpu, replace(cpu, builds=("x86-64", levels()[0]))])
    module = use(out)
    way = taken(module)
    assert way.endswith(", Python launcher") or way.endswith(", native launcher"), way
    module.build()
    assert taken(module) == f"{way.rpartition(', ')[0]}, native launcher"
    assert f"(cpu {levels()[0]}, float32, tuned for 64x96 on x86-64)" in way


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", folder.name, *arguments]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_packages_own_commands_say_which_build_is_taken(on_cpu: Path) -> None:
    shown = run(on_cpu, "show").stdout
    best, next_best = levels()[:2]
    assert f"  2 {best}: compiled, candidate test/0: runs here" in shown
    assert "found on x86-64 and never timed on this architecture" in shown
    assert "  0 x86-64: candidate test/0: variant 2 is taken in its place" in shown
    checked = run(on_cpu, "check", "--seed", "3")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(re.findall(rf"{best} \(compiled\) +right: ", checked.stdout)) == 2
    assert f"other builds are taken here: 2 for x86-64, 2 for {next_best}" in checked.stdout
    every = json.loads(run(on_cpu, "check", "--all", "--seed", "3", "--json").stdout)
    assert [v["right"] for v in every] == [True] * 6
    assert [v["taken"] for v in every] == [2, 3] * 3
    assert [v["standing"] for v in every] == ["measured"] * 2 + ["compiled"] * 4
    timed = json.loads(run(on_cpu, "bench", "--rounds", "2", "--json").stdout)
    assert ["timings" in v for v in timed] == [False, False, True, True, False, False]
