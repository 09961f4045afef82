"""What a statement leaves out is derived, and refuses what a hand-written gate would."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from evo.errors import KernelError
from evo.measure.cases import random_cases
from evo.measure.gate import Gate
from evo.measure.reference import expected_outputs
from evo.problem.genome import Genome
from evo.problem.kernel import DATA, Cost, draw
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.targets import compile_source, find_target

STATEMENT = """
from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Ordinal, Space

KERNEL = Kernel(
    name="scaled",
    dtypes={"cpu": ("float32",)},
    options={"bias": True, "eps": 1e-6},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="bias", kind="input", shape=("cols",), optional=True),
        Argument(name="y", kind="output", shape=("rows", "cols")),
    ),
    reference=lambda i, w: i["x"] / (i["x"].abs().amax(1, True) + w.option("eps")) + (0 if i["bias"] is None else i["bias"]),
    workloads={"cpu": ("rows=300,cols=1000,dtype=float32",)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2)),), default={"unroll": 1}),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
SOURCE = """
#include <cmath>
extern "C" void scaled(const float* x, const float* bias, float* y, long long rows, long long cols, float eps) {
    for (long long r = 0; r < rows; ++r) {
        float most = 0;
        for (long long c = 0; c < cols; ++c)
            if (!(std::fabs(x[r * cols + c]) <= most) && most == most) most = std::fabs(x[r * cols + c]);
        for (long long c = 0; c < cols; ++c) y[r * cols + c] = x[r * cols + c] / (most + eps) + (bias ? bias[c] : 0);
    }
}
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("", ""), ("+ eps", "+ 1e-6f"), ("r < rows", "r < rows / 2 * 2"), ("? bias[c] : 0", "? bias[c] : 1"), ("bias[c]", "1"),
     ("c < cols; ++c) y", "c < cols / 4 * 4; ++c) y"), (" && most == most", ""), ("most = 0", "most = 9")],
)  # fmt: skip
def test_the_derived_gate_passes_what_is_right_alone(tmp_path: Path, right: str, wrong: str) -> None:
    (tmp_path / "kernel.py").write_text(STATEMENT)
    (tmp_path / "cpu.cpp.j2").write_text(SOURCE.replace(right, wrong) if right else SOURCE)
    kernel, target = load_kernel(str(tmp_path)), find_target("cpu")
    workload, session = kernel.example("cpu"), target.open()
    assert kernel.cost(workload) == Cost(bytes=4 * (2 * 300 * 1000 + 1000), flops=0)
    source = render(kernel, "cpu", Genome.of({"unroll": 1}), workload, "native")
    loaded = session.load(compile_source(source, "native", tmp_path), "scaled")
    cases = kernel.cases("cpu", workload)
    others = {"normal rows=0", "normal rows=3 offset=1", "normal rows=17 bias=False", "tiny rows=64 eps=4e-06"}
    assert others < {case.name for case in cases}
    checks = Gate(kernel, "cpu", session, seed=3).run(loaded, {"unroll": 1}, cases)
    assert all(check.passed for check in checks) == (not right), checks


def test_a_reference_alone_bounds_errors_as_it_does_in_float32(tmp_path: Path) -> None:
    """In float16 its squares overflow, and all results would be 0: whatever is as wrong would pass."""
    largest = 'i["x"].abs().amax(1, True)'
    text = STATEMENT.replace(largest, 'i["x"].square().mean(1, True).sqrt()').replace("float32", "float16")
    (tmp_path / "kernel.py").write_text(text)
    kernel = load_kernel(str(tmp_path))
    inputs = {"x": 300 * torch.randn(3, 1000).half(), "bias": None}
    (found,) = expected_outputs(kernel, inputs, kernel.workload("cpu", "rows=3,cols=1000,dtype=float16,bias=false"))
    assert 0 < found.torch_error < 0.002


def test_an_output_of_a_dtype_without_a_tolerance_is_one_sentence(tmp_path: Path) -> None:
    text = STATEMENT.replace('kind="output"', 'kind="output", dtype="float64"').replace("import ", "import TOLERANCE, ", 1)
    one = 'tolerance={"float32": TOLERANCE["float32"]}'
    (tmp_path / "kernel.py").write_text(text.replace("    reference=", f"    {one}, reference="))
    kernel = load_kernel(str(tmp_path))
    with pytest.raises(KernelError, match=r"`tolerance` has none for float64, of which output 'y' is stated: give it one"):
        expected_outputs(kernel, {"x": torch.ones(300, 1000), "bias": None}, kernel.example("cpu"))


@pytest.mark.parametrize(("dtype", "more"), [("float64", set()), ("int8", {"repeated"})])
def test_few_numbers_many_times_are_drawn_where_an_output_is_of_integers(tmp_path: Path, dtype: str, more: set[str]) -> None:
    (tmp_path / "kernel.py").write_text(STATEMENT.replace('kind="output"', f'kind="output", dtype="{dtype}"'))
    kernel = load_kernel(str(tmp_path))
    assert {*kernel.data} - {*DATA} == more == {case.data for case in kernel.cases("cpu", kernel.example("cpu"))} - {*DATA}
    x = draw("repeated", 64, 300, torch.float16, torch.Generator().manual_seed(1))
    rows = {frozenset(row.unique().nan_to_num(7.0, 8.0, -8.0).tolist()) for row in x}
    assert rows == {frozenset(kept) for kept in ((0, 1, 2, -2), (0, 1, 2, -2, 8, -8), (0, 1, 2, -2, 8, -8, 7), (0,))}
    assert (x == 0).any()
    assert bool(x[x == 0].signbit().any())


def test_whole_numbers_that_no_case_varies_vary_in_random_ones(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(STATEMENT.replace('"eps": 1e-6', '"eps": 1e-6, "shift": 3'))
    kernel = load_kernel(str(tmp_path))
    drawn = random_cases(kernel, "cpu", kernel.example("cpu"), seed=1, number=64)
    assert {case.workload.option("shift") for case in drawn} == {2, 3, 4, 6}


@pytest.mark.parametrize(("stated", "signs"), [("", {-1.0, 1.0}), ('option_min={"eps": 1e-6},', {1.0})])
def test_a_number_that_may_be_negative_is_in_random_cases(tmp_path: Path, stated: str, signs: set[float]) -> None:
    (tmp_path / "kernel.py").write_text(STATEMENT.replace("    reference=", f"    {stated}reference="))
    kernel = load_kernel(str(tmp_path))
    drawn = random_cases(kernel, "cpu", kernel.example("cpu"), seed=1, number=64)
    assert {math.copysign(1.0, float(case.workload.option("eps"))) for case in drawn} == signs


def test_an_input_without_a_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(STATEMENT.replace('kind="input", shape=("cols",)', 'kind="input"'))
    with pytest.raises(KernelError, match="input 'bias' has no shape; give it one, or the kernel its own"):
        load_kernel(str(tmp_path))


COUNTED = """
import torch

from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Ordinal, Space

KERNEL = Kernel(
    name="counted",
    dtypes={"cpu": ("float32",)},
    arguments=(Argument(name="y", kind="output", shape=("n",)),),
    options={"start": 1.0},
    reference=lambda inputs, w: {"y": torch.arange(w.dim("n"), dtype=torch.float64) + w.option("start")},
    workloads={"cpu": ("n=1000,dtype=float32",)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
COUNTED_SOURCE = """
extern "C" void counted(float* y, long long n, float start) {
#pragma GCC unroll {{ p.unroll }}
    for (long long i = 0; i < n; ++i) y[i] = start + i;
}
"""


@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_without_inputs_has_a_gate_and_no_copy_to_compare_with(tmp_path: Path, right: bool) -> None:
    (tmp_path / "kernel.py").write_text(COUNTED)
    (tmp_path / "cpu.cpp.j2").write_text(COUNTED_SOURCE if right else COUNTED_SOURCE.replace("start + i", "1 + i"))
    kernel, session = load_kernel(str(tmp_path)), find_target("cpu").open()
    assert kernel.ceilings == ()
    source = render(kernel, "cpu", Genome.of({"unroll": 1}), kernel.example("cpu"), "native")
    loaded = session.load(compile_source(source, "native", tmp_path), "counted")
    checks = Gate(kernel, "cpu", session, seed=3).run(loaded, {"unroll": 1}, kernel.cases("cpu", kernel.example("cpu")))
    assert all(check.passed for check in checks) is right, checks
