"""Outputs and inputs of 8-bit floating point, with scales of float32: judged by the tolerance of their own dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evo.measure.gate import Gate
from evo.problem.kernel import Launch
from evo.problem.loading import load_kernel
from evo.runtime.tolerance import compare, expected
from evo.targets import find_target

KERNEL = load_kernel(str(Path(__file__).parents[1] / "quantised"))
DTYPES = KERNEL.choices["y_dtype"]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


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
        made = KERNEL.reference({"x": x, "gain": gain}, workload)
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
