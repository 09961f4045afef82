"""LayerNorm and RMSNorm are one family: right with every option, none of which costs those that leave it out."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from evo.errors import UsageError
from evo.measure.cases import parse_case
from evo.measure.gate import Gate
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.problem.space import Point
from evo.targets import compile_source, find_target

TARGET, CUDA = find_target("cpu"), find_target("cuda")
SESSION = TARGET.open()

DTYPES = ("float32", "bfloat16", "float64")
ALL = {"rmsnorm": ",residual=true,sum=true,rstd=true", "layernorm": ",residual=true,sum=true,mean=true,rstd=true"}
SOME = [(name, options) for name in ALL for options in ("", ",rstd=true", ",residual=true")] + [("layernorm", ",mean=true")]


@pytest.fixture(params=list(ALL))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(request.param))


def of(parameter: str, cases: list[tuple[str, Any]]) -> Any:
    """Cases by the name of their kernel."""
    return pytest.mark.parametrize(("kernel", parameter), cases, indirect=["kernel"], ids=str)


def test_the_reference_is_pytorchs_norm_of_the_rounded_sum_and_its_statistics(kernel: Kernel) -> None:
    problem = kernel.workload("cpu", f"rows=5,cols=33,dtype=bfloat16{ALL[kernel.name]},eps=0.1")
    inputs = kernel.inputs(problem, "normal", torch.Generator().manual_seed(5))
    x, residual, *affine = (t for t in inputs.values() if t is not None)
    found = kernel.reference({n: t.double() if t is not None else None for n, t in inputs.items()}, problem)
    added, affine = (x + residual).double(), [t.double() for t in affine]
    torch.testing.assert_close(found["sum"], added, atol=0, rtol=0)
    if kernel.name == "layernorm":
        y, mean, rstd = torch.native_layer_norm(added, (33,), *affine, 0.1)
        torch.testing.assert_close(found["mean"], mean[:, 0])
        torch.testing.assert_close(found["rstd"], rstd[:, 0])
    else:
        y = torch.nn.functional.rms_norm(added, (33,), *affine, 0.1)
        torch.testing.assert_close(found["rstd"], 1 / (added.square().mean(1) + 0.1).sqrt())
    torch.testing.assert_close(found["y"], y)


def test_a_sum_without_a_residual_is_refused(kernel: Kernel) -> None:
    with pytest.raises(UsageError, match="sum needs residual"):
        kernel.workload("cpu", "rows=5,cols=33,dtype=float32,sum=true")


def refused(
    kernel: Kernel,
    point: Point,
    problem: Workload,
    folder: Path,
    mistake: tuple[str, str] = ("", ""),
    case: str = "",
) -> list[str]:
    """What the gate says against a point. mistake: a part of the source, and what stands for it. case: instead of the
    kernel's own."""
    source = render(kernel, "cpu", Genome.of(point), problem, "native")
    assert mistake[0] in source.text
    source = replace(source, text=source.text.replace(*mistake, 1))
    folder.mkdir(parents=True, exist_ok=True)
    loaded = SESSION.load(compile_source(source, "native", folder), kernel.entry)
    try:
        cases = [parse_case(kernel, "cpu", case)] if case else kernel.cases("cpu", problem)
        checks = gate_for(kernel, problem.dtype).run(loaded, point, cases)
    finally:
        loaded.close()
    return [f"{check.case}: {check.reason}" for check in checks if not check.passed]


_gates: dict[tuple[str, str], Gate] = {}


def gate_for(kernel: Kernel, dtype: str) -> Gate:
    return _gates.setdefault((kernel.name, dtype), Gate(kernel, "cpu", SESSION, seed=11))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_branch_passes_the_gate_on_a_cpu_with_all_options(kernel: Kernel, dtype: str, tmp_path: Path) -> None:
    problem = kernel.workload("cpu", f"rows=67,cols=200,dtype={dtype}{ALL[kernel.name]}")
    for number, point in enumerate(kernel.space("cpu", problem, SESSION.limits).branches()):
        assert not refused(kernel, point, problem, tmp_path / str(number)), point


@of("workload", [(name, f"dtype={dtype}{options}") for (name, options), dtype in zip(SOME, cycle(DTYPES), strict=False)])
def test_each_option_alone_passes_the_gate_on_a_cpu(kernel: Kernel, workload: str, tmp_path: Path) -> None:
    problem = kernel.workload("cpu", f"rows=67,cols=200,{workload}")
    space = kernel.space("cpu", problem, SESSION.limits)
    chosen = {"rows_in_flight": 4, "stores": "non_temporal", "prefetch_bytes": 512, "prefetch_next": True}
    assert not refused(kernel, space.complete({**space.default, **chosen}), problem, tmp_path)


def test_rows_beside_one_that_is_not_finite_are_as_exact(tmp_path: Path) -> None:
    kernel, case = load_kernel("layernorm"), "rows=30,cols=4096,dtype=float64,data=needle+non_finite"
    problem = kernel.workload("cpu", "rows=67,cols=200,dtype=float64")
    space = kernel.space("cpu", problem, SESSION.limits)
    point = space.complete({**space.default, "rows_in_flight": 4})
    assert not refused(kernel, point, problem, tmp_path, case=case)


MISTAKES = [
    ("sum.part[k] += residual.part[k]", ""),
    ("saved_rstd[r] = rstd[r][0]", "saved_rstd[r] = 1"),
    ("keep(sum + r * cols + j, z)", ""),
    (" + eps;\n        safe", ";\n        safe"),
    ("splat((F)(1 / __builtin_sqrt(variance)))", "splat((F)(1 / __builtin_sqrt(variance)) * 1.01f)"),
]
OF_THE_MEAN = [
    ("saved_mean[r] = in.shift[r] + in.mean[r]", "saved_mean[r] = in.mean[r]"),
    ("*saved_mean = (F)(rstd == rstd ? shift + mean : rstd)", "*saved_mean = (F)(shift + mean)"),
]


@of("mistake", [*((name, m) for name in ALL for m in MISTAKES), *(("layernorm", m) for m in OF_THE_MEAN)])
def test_a_mistake_is_refused(kernel: Kernel, mistake: tuple[str, str], tmp_path: Path) -> None:
    problem = kernel.workload("cpu", f"rows=67,cols=200,dtype=float32{ALL[kernel.name]}")
    assert refused(kernel, kernel.space("cpu", problem, SESSION.limits).default, problem, tmp_path, mistake)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_genome_is_also_gated_with_each_compiled_in_option_the_other_way(kernel: Kernel, target: str) -> None:
    near = kernel.neighbours(target, kernel.example(target))
    statistics = {"mean": 2, "rstd": 2} if kernel.name == "layernorm" else {"rstd": 2}
    wanted = {"residual": 2, "sum": 1, **statistics}
    assert {n: sum(bool(w.option(n)) for w in near) for n in wanted} == wanted
    assert not any(kernel.validate(w) for w in near)


@of("options", [*SOME, *ALL.items()])
def test_points_drawn_at_random_compile_for_gpus(kernel: Kernel, options: str) -> None:
    rng = random.Random(f"{kernel.name} {options}")
    for cols, arch in ((64, "sm_89"), (769, "sm_90"), (1022, "sm_89"), (4096, "sm_90")):
        problem = kernel.workload("cuda", f"rows=64,cols={cols},dtype={rng.choice(kernel.dtypes['cuda'])}{options}")
        point = kernel.space("cuda", problem, CUDA.limits(arch)).sample(rng)
        compile_source(render(kernel, "cuda", Genome.of(point), problem, arch), arch, Path())


def test_options_that_are_left_out_are_parameters_and_no_code(kernel: Kernel) -> None:
    for target, arch in (("cpu", "native"), ("cuda", "sm_89")):
        problem = kernel.example(target)
        point = kernel.space(target, problem, find_target(target).limits(arch)).default
        text = render(kernel, target, Genome.of(point), problem, arch).text
        code = re.sub(rf"{kernel.entry}(_unaligned)?\(const T\* x.*", "", text)
        assert code != text
        assert not re.search(r"residual|saved_|\bsum\b \+ row", code)
