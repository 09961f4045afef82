"""Outputs and inputs of 8-bit floating point, with scales of float32: judged by the tolerance of their own dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.kernel import Argument, Kernel, Launch, LaunchPlan
from evo.problem.space import Ordinal, Space
from evo.runtime.tolerance import compare, expected
from evo.targets import find_target

DTYPES = ("float8_e4m3fn", "float8_e5m2")
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def reference(inputs: Any, workload: Any) -> dict[str, torch.Tensor]:
    x = inputs["x"] * inputs["gain"].to(inputs["x"].dtype)
    scale = x.abs().amax(1).nan_to_num(1.0).clamp(1e-20, 1e20)
    return {"y": x / scale[:, None] * LARGEST[workload.option("y_dtype")], "scale": scale}


KERNEL = Kernel(
    name="scaled_rows",
    dtypes={"cpu": ("float32",)},
    options={"y_dtype": "float8_e5m2"},
    choices={"y_dtype": DTYPES},
    compile_time_dims={"cpu": ("y_dtype",)},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="gain", kind="input", dtype="float8_e4m3fn", shape=("cols",)),
        Argument(name="y", kind="output", dtype="y_dtype", shape=("rows", "cols")),
        Argument(name="scale", kind="output", dtype="float32", shape=("rows",)),
    ),
    reference=reference,
    workloads={"cpu": tuple(f"rows=64,cols=40,dtype=float32,y_dtype={dtype}" for dtype in DTYPES)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1,)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
Change = Callable[[torch.Tensor], torch.Tensor]


def towards_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    near = values.to(dtype)
    away = near.float().abs() > values.abs()
    return (near.view(torch.uint8) - away.to(torch.uint8)).view(dtype)


def refusal(dtype: str, write: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> str:
    """Why the gate refuses what computes in float32, and writes its results so; empty if it does not."""
    session = find_target("cpu").open()
    gate = Gate(KERNEL, "cpu", session, 0)
    (workload,) = (w for w in KERNEL.workloads["cpu"] if w.option("y_dtype") == dtype)

    def call(values: Sequence[Any], launch: Launch) -> None:
        x, gain, y, scale, *_ = values
        made = reference({"x": x, "gain": gain}, workload)
        scale.copy_(made["scale"])
        y.copy_(write(made["y"], y.dtype))

    checks = gate.run(call, {"unroll": 1}, KERNEL.cases("cpu", workload))
    return next((check.reason for check in checks if not check.passed), "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_that_is_rounded_to_nearest_is_right(dtype: str) -> None:
    assert refusal(dtype, lambda y, to: y.to(to)) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_are_cut_off_or_a_step_away_are_refused(dtype: str) -> None:
    assert "results lean towards 0" in refusal(dtype, towards_zero)
    assert "outside the tolerance" in refusal(dtype, lambda y, to: (1.3 * y).to(to))
    assert "never written" in refusal(dtype, lambda y, to: y.new_full(y.shape, torch.nan).to(to))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_too_large_may_be_the_largest_but_no_other(dtype: str) -> None:
    kind, most = getattr(torch, dtype), LARGEST[dtype]
    right = torch.tensor([1.0, 4 * most, -torch.inf, torch.nan], dtype=torch.float64)
    wanted = expected("y", right, None, kind, (2**-6, 2**-3, 2.0), 0.0, ("rounding",))

    def said(*values: float) -> str:
        return compare(torch.tensor(values).to(kind), wanted)[1]

    assert said(1.0, most, -most, torch.nan) == ""
    assert said(*right.tolist()) == "", "as PyTorch converts"
    assert "1 of 3 NaN or Inf of the reference are lost" in said(1.0, most / 2, -most, torch.nan)
    assert "1 of 3 NaN or Inf of the reference are lost" in said(1.0, most, most, torch.nan)
    assert "1 of 3 NaN or Inf of the reference are lost" in said(1.0, most, -most, 1.0)
    assert "outside the tolerance" in said(1.5, most, -most, torch.nan)
