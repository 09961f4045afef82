"""Softmax: its gate refuses what is nearly right, and its CPU template is right at every branch and special value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evo.measure.gate import Gate, argument_values
from evo.measure.reference import expected_outputs
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.problem.space import Point
from evo.runtime.tolerance import compare
from evo.targets import compile_source, find_target

KERNEL = load_kernel("softmax")
CPU, CUDA = find_target("cpu"), find_target("cuda")
SESSION = CPU.open()
GATE = Gate(KERNEL, "cpu", SESSION, seed=11)
INF, NAN = float("inf"), float("nan")


def workload(dtype: str = "float32", rows: int = 33, cols: int = 300, target: str = "cpu") -> Workload:
    return KERNEL.workload(target, f"rows={rows},cols={cols},dtype={dtype}")


def branches(dtype: str) -> list[Point]:
    return KERNEL.space("cpu", workload(dtype), SESSION.limits).branches()


BRANCHES = [(dtype, point) for dtype in KERNEL.dtypes["cpu"] for point in branches(dtype)]


def refused(point: Point, problem: Workload, folder: Path, mistake: tuple[str, str] = ("", "")) -> list[str]:
    """What the gate says against a point. mistake: a part of the source, and what stands for it."""
    source = render(KERNEL, "cpu", Genome.of(point), problem, "native")
    assert mistake[0] in source.text
    source = replace(source, text=source.text.replace(*mistake, 1))
    loaded = SESSION.load(compile_source(source, "native", folder), KERNEL.entry)
    try:
        checks = GATE.run(loaded, point, KERNEL.cases("cpu", problem))
    finally:
        loaded.close()
    return [f"{check.case}: {check.reason}" for check in checks if not (check.passed or "data=" in check.case)]


@pytest.mark.parametrize(("dtype", "point"), BRANCHES)
def test_every_structural_branch_for_a_cpu_passes_the_gate(dtype: str, point: Point, tmp_path: Path) -> None:
    assert not refused(point, workload(dtype), tmp_path)


@pytest.mark.parametrize("algorithm", ["two_pass", "online"])
@pytest.mark.parametrize(
    "mistake",
    [
        ("(x - level) * LOG2E", "x * LOG2E"),
        ("(x - level) * LOG2E", "x * LOG2E - level * LOG2E"),
        ("LOWEST = -3.4028234663852886e38f", "LOWEST = -__builtin_inff()"),
        ("LOWEST = -3.4028234663852886e38f", "LOWEST = 0.0f"),
        ("x[at + i] : LEAST", "x[at + i] : 0"),
        ("1.0f / sum", "0.99f / sum"),
    ],
    ids=str,
)
def test_a_mistake_in_the_source_is_refused(mistake: tuple[str, str], algorithm: str, tmp_path: Path) -> None:
    space = KERNEL.space("cpu", workload(), SESSION.limits)
    point = space.complete({**space.default, "algorithm": algorithm, "degree": 6})
    if "-__builtin_inff()" in mistake[1] and algorithm == "two_pass":
        pytest.skip("nothing is less a maximum that has not been found yet")
    assert refused(point, workload(), tmp_path, mistake)


def without_maximum(x: torch.Tensor) -> torch.Tensor:
    return x.exp() / x.exp().sum(dim=1, keepdim=True)


def uniform(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, 1 / x.shape[1])


def off_by_a_hundredth(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(dim=1) / 1.01


@pytest.mark.parametrize("cols", [64, 4096])
@pytest.mark.parametrize("dtype", KERNEL.dtypes["cuda"])
@pytest.mark.parametrize(
    ("wrong", "data"),
    [
        (without_maximum, ("large_mean", "huge", "outlier")),
        (uniform, ("normal", "ramp", "outlier", "masked")),
        (off_by_a_hundredth, ("normal", "constant", "ramp", "large_mean")),
    ],
)
def test_what_is_nearly_a_softmax_is_refused(
    wrong: Callable[[torch.Tensor], torch.Tensor], data: tuple[str, ...], dtype: str, cols: int
) -> None:
    """In float32 rounded once, so that it is nothing but wrong."""
    problem = workload(dtype, rows=67, cols=cols, target="cuda")
    for name in data:
        x = draw(problem, name)
        (expected,) = expected_outputs(KERNEL, {"x": x}, problem)
        right, result = (f(x.float()).to(x.dtype) for f in (lambda t: t.softmax(dim=1), wrong))
        assert compare(right, expected)[1] == "", name
        assert compare(result, expected)[1] != "", name


def with_a_rounded_maximum(x: torch.Tensor) -> torch.Tensor:
    """As one multiply-add for each exponential has it: only the maximum is rounded after it was scaled."""
    level = x.amax(dim=1, keepdim=True) * 1.44269504
    weights = torch.exp2((x.double() * 1.44269504 - level.double()).float())
    return weights / weights.sum(dim=1, keepdim=True)


def up_to_a_billion(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-1e9, 1e9).softmax(dim=1)


@pytest.mark.parametrize("wrong", [with_a_rounded_maximum, up_to_a_billion])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_wrong_for_huge_numbers_is_refused(dtype: str, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = draw(problem := workload(dtype, rows=67, cols=64, target="cuda"), "extreme")
    (expected,) = expected_outputs(KERNEL, {"x": x}, problem)
    assert compare(x.float().softmax(dim=1).to(x.dtype), expected)[1] == ""
    assert compare(wrong(x.float()).to(x.dtype), expected)[1] != ""


def draw(problem: Workload, data: str) -> torch.Tensor:
    x = KERNEL.inputs(problem, data, torch.Generator().manual_seed(5))["x"]
    assert x is not None
    return x


def test_masked_rows_have_any_share_of_infinities() -> None:
    hidden = draw(workload(rows=67), "masked").isneginf().sum(dim=1)
    assert hidden[0] == 0
    assert (hidden == 300).any()
    assert ((hidden > 0) & (hidden < 300)).sum() > 30


@pytest.mark.parametrize("cols", [1, 2, 37])
@pytest.mark.parametrize(("dtype", "point"), BRANCHES)
def test_special_values_are_as_pytorch_has_them(dtype: str, point: Point, cols: int, tmp_path: Path) -> None:
    large = torch.finfo(getattr(torch, dtype)).max
    ends = [(a, b) for a in (0.0, -INF, INF, NAN, large, -large) for b in (0.0, -INF, INF, NAN, large, -large)]
    x = torch.stack([torch.full((cols,), middle) for middle in (0.0, -INF) for _ in ends])
    x[:, -1] = torch.tensor([b for _, b in ends] * 2)
    x[:, 0] = torch.tensor([a for a, _ in ends] * 2)
    x = x.to(getattr(torch, dtype))
    problem = workload(dtype, rows=len(x), cols=cols)
    outputs = {"y": torch.zeros_like(x)}
    source = render(KERNEL, "cpu", Genome.of(point), problem, "native")
    loaded = SESSION.load(compile_source(source, "native", tmp_path), KERNEL.entry)
    try:
        (launch,) = KERNEL.sequence("cpu", point, problem, SESSION.limits).launches
        loaded(argument_values(KERNEL, problem, {"x": x}, outputs), launch)
    finally:
        loaded.close()
    torch.testing.assert_close(outputs["y"], x.softmax(dim=1), equal_nan=True)


@pytest.mark.parametrize("cols", [1, 2, 7, 64, 769, 4096, 16_384, 50_257, 65_535, 65_536])
@pytest.mark.parametrize("dtype", KERNEL.dtypes["cuda"])
def test_the_default_is_legal_for_every_number_of_columns(dtype: str, cols: int) -> None:
    for arch in ("sm_80", "sm_89", "sm_90"):
        space = KERNEL.space("cuda", workload(dtype, cols=cols, target="cuda"), CUDA.limits(arch))
        assert space.is_legal(space.default)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("vector_bytes", [2, 4, 8, 16])
def test_vectors_have_an_entry_point_for_addresses_that_are_not_aligned(dtype: str, vector_bytes: int) -> None:
    problem = workload(dtype, cols=4096, target="cuda")
    space = KERNEL.space("cuda", problem, CUDA.limits("sm_89"))
    point = {**space.default, "vector_bytes": vector_bytes, "threads_per_row": 1024, "rows_per_block": 1}
    if not space.is_legal(point):
        pytest.skip("no such kernel")
    source = render(KERNEL, "cuda", Genome.of(point), problem, "sm_89").text
    alignment = KERNEL.plan("cuda", point, problem).alignment
    assert alignment == (vector_bytes if vector_bytes > (2 if dtype == "float16" else 4) else 1)
    assert ("softmax_unaligned" in source) == (alignment > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cols"),
    [("float16", 1), ("float16", 65_535), ("bfloat16", 37), ("bfloat16", 4096), ("float32", 37), ("float32", 4096)],
)
def test_every_structural_branch_compiles_for_a_gpu(dtype: str, cols: int) -> None:
    problem = workload(dtype, cols=cols, target="cuda")
    for point in KERNEL.space("cuda", problem, CUDA.limits("sm_89")).branches():
        assert compile_source(render(KERNEL, "cuda", Genome.of(point), problem, "sm_89"), "sm_89", Path())
