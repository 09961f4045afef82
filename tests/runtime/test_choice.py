"""Of a package's builds for several architectures, the one that a device takes."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from evo.errors import DeviceError
from evo.export import find_exporter
from evo.runtime import choice
from evo.runtime.choice import rank_on_gpu
from evo.runtime.cuda import numbered
from evo.runtime.manifest import LaunchPlan
from evo.targets import find_target
from evo.targets.languages.cpp import compiler_path, extra_features
from tests.export.exports import edit_manifest, request_for

MODULE = find_exporter("module")
SHIPPED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f")
SHIPPED += ("compute_80", "compute_90", "compute_90a", "compute_100a", "compute_100f")


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((7, 5), ""),
        ((8, 0), "sm_80 compute_80"),
        ((8, 6), "sm_86 sm_80 compute_80"),
        ((8, 7), "sm_86 sm_80 compute_80"),
        ((8, 9), "sm_89 sm_86 sm_80 compute_80"),
        ((9, 0), "sm_90 sm_90a compute_90 compute_90a compute_80"),
        ((10, 0), "sm_100 sm_100a sm_100f compute_100a compute_100f compute_90 compute_80"),
        ((10, 3), "sm_100 sm_100f compute_100f compute_90 compute_80"),
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
    request = request_for("cpu", "x86-64", out, "rows=64,cols=96,dtype=float32")
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
    assert way.startswith(f"variant 1 (cpu {levels()[0]}, float32, tuned for 64x96 on x86-64)")
    dispatch = module.frontend.DISPATCH
    assert [dispatch.taken(i) for i in range(3)] == [1] * 3
    for index in range(3):
        with dispatch.only(index):
            assert taken(module).startswith(f"variant {index} ")


def test_what_cannot_be_loaded_or_run_gives_way_to_the_next_build(
    on_cpu: Path, use: Callable[[Path], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")  # or it would be built again here
    modest = Path(shutil.copytree(on_cpu, tmp_path / "modest_cpus"))
    folder = Path(shutil.copytree(on_cpu, tmp_path / "damaged_for_cpus"))
    best = json.loads((folder / "manifest.json").read_text())["variants"][1]
    (folder / best["binary"]).write_bytes(b"damaged")
    module = use(folder)
    assert taken(module).startswith(f"variant 2 (cpu {levels()[1]}, ")
    assert module.frontend.DISPATCH.taken(1) == 2
    assert "is not the file that was exported" in module.frontend.DISPATCH.unavailable(1)

    def change(manifest: dict[str, Any]) -> None:
        for variant in manifest["variants"][1:]:
            variant["needs"]["features"].append("avx9000")

    edit_manifest(modest, change)
    assert taken(use(modest)).startswith("variant 0 (cpu x86-64, float32, tuned for 64x96)")


def test_the_packages_own_commands_say_which_build_is_taken(on_cpu: Path, command: Any) -> None:
    best = levels()[0]
    shown = command(on_cpu, "show")[1]
    assert re.search(rf"^1 .* {best} \(compiled\)\n  candidate test/0: runs here$", shown, re.MULTILINE)
    assert "found on x86-64 and never timed on this architecture" in shown
    assert re.search("^0 .* x86-64\n  candidate test/0: another build is taken in its place$", shown, re.MULTILINE)
    code, checked = command(on_cpu, "check", "--seed", "3")
    assert code == 0, checked
    assert len(re.findall(rf"{best} \(compiled\)\n  right: ", checked)) == 1
    assert checked.count("not checked: another build is taken in its place") == 2
    every = json.loads(command(on_cpu, "check", "--all", "--seed", "3", "--json")[1])
    assert [v["right"] for v in every] == [True] * 3
    assert [v["taken"] for v in every] == [1] * 3
    assert [v["standing"] for v in every] == ["measured"] + ["compiled"] * 2
    timed = json.loads(command(on_cpu, "bench", "--rounds", "1", "--json")[1])
    assert ["timings" in v for v in timed] == [False, True, False]


CUT = ("a", "b", "c", "a * b", "(a - 7) // 2 + c % 5", "max(a, b) - min(b, 64)", "(3 - a) // 4 * (b - c) % 9", "4")


def test_the_native_launcher_chooses_and_cuts_the_grid_alike(tmp_path: Path) -> None:
    program, draw = tmp_path / "program", random.Random(0)
    source = Path(__file__).with_name("choice_program.cpp")
    folder = Path(choice.__file__).parent
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", f"-I{folder}", source, "-o", program, "-ldl"], check=True)

    def sizes() -> dict[str, int]:  # powers of two make ties
        return {name: draw.choice((1 << draw.randrange(14), draw.randrange(1, 1 << 13))) for name in "abc"}

    for _ in range(40):
        members, plans, lines, races = [], [], [], draw.random() < 0.5
        for _ in range(draw.randrange(1, 6)):
            dims, is_slower, measured = sizes(), draw.random() < 0.3, draw.random() < 0.7
            axes = draw.random() < 0.5
            plan = LaunchPlan(
                threads=32,
                tiles=[(text, draw.choice((1, 4, 64))) for text in draw.sample(CUT, draw.randrange(4))],
                blocks_per_tile=draw.choice((1, 3)),
                blocks_per_multiprocessor=None if axes else draw.choice((None, 1, 4)),
                cluster=draw.choice((1, 2)),
                axes=axes,
            )
            members.append(choice.Member([], dims, measured, "slower" if is_slower else ""))
            plans.append(plan)
            cuts = []
            for text, size in plan.tiles:
                parts = numbered(text, "abc")
                cuts.append(" ".join(map(str, (size, len(parts), *chain(*parts)))))
            numbers = is_slower, measured, plan.blocks_per_tile, plan.most_blocks(132) or 0, axes, plan.cluster
            lines.append(" ".join(map(str, (*dims.values(), *map(int, numbers), len(cuts), *cuts))))
        problems = [*(dict(m.sizes) for m in members), *(sizes() for _ in range(200))]
        lines = ["3", str(int(races)), str(len(members)), *lines, str(len(problems))]
        given = "\n".join([*lines, *(" ".join(map(str, p.values())) for p in problems)])
        found = subprocess.run([program], input=given, capture_output=True, text=True, check=True).stdout.splitlines()
        for problem, answer in zip(problems, found, strict=True):
            member = choice.Family(members).by_distance(problem)[0]
            number, decided = members.index(member), choice.is_measured(member, problem)
            x, y, z = plans[number].grid(problem, 132)
            how = choice.FAR if not decided else choice.EXACT if member.sizes == problem else choice.CLOSE
            if races and not decided:
                assert answer.startswith("ask -1")
            elif member.slower:
                assert answer.startswith("slower -1")
            elif max(y, z) > 65_535 or x > 2**31 - 1:
                assert answer.startswith("ask -1")
            else:
                assert answer == f"serves {number} {x} {y} {z}{how}"
