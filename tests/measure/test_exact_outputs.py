"""Outputs of integers and bool are right exactly, and positions of equal elements by the rule that a kernel states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from evo.errors import KernelError
from evo.measure.buffers import sum_of
from evo.measure.cases import far_cases
from evo.measure.far import far_checks
from evo.measure.gate import Gate
from evo.problem.kernel import Argument, Baseline, Kernel, Launch, LaunchPlan, Tensors, Workload
from evo.problem.space import Ordinal, Space
from evo.runtime.tolerance import compare, expected_exactly
from evo.targets import find_target

NAN = float("nan")
WRONG = "elements are wrong or were never written"
DTYPES = {
    torch.bool: [0, 1],
    torch.uint8: [0, 255],
    torch.int8: [-128, 5],
    torch.int16: [300, -2],
    torch.int32: [1 << 30, 0],
    torch.int64: [(1 << 53) + 1, -1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_an_integer_counts(dtype: torch.dtype) -> None:
    right = torch.tensor(DTYPES[dtype], dtype=dtype)
    wanted = expected_exactly("y", right, right)
    assert (compare(right.clone(), wanted), wanted.torch_error) == ((None, ""), 0)
    wrong = right.clone()
    first = wrong.view(torch.uint8)[0]
    first ^= 1
    value, instead = (int(t.view(torch.uint8 if dtype == torch.bool else dtype)[0]) for t in (wrong, right))
    assert compare(wrong, wanted) == (None, f"1 of 2 {WRONG}: {value} at [0] instead of {instead}")
    assert expected_exactly("y", right, wrong).torch_error == 1


def test_true_is_1_and_nothing_else() -> None:
    written = torch.tensor([1, 2, 255], dtype=torch.uint8).view(torch.bool)
    reason = compare(written, expected_exactly("y", torch.ones(3, dtype=torch.bool), None))[1]
    assert reason == f"2 of 3 {WRONG}: 2 at [1] instead of 1"


ROWS = torch.tensor([[3.0, 1.0, 3.0, 2.0], [NAN, 1.0, NAN, NAN], [0.0, -0.0, -1.0, -2.0]])


@pytest.mark.parametrize(
    ("positions", "wrong"),
    [
        ([0, 0, 0], ""),
        ([2, 3, 1], ""),
        ([1, 0, 0], "1 at [0] instead of 0"),
        ([0, 1, 0], "1 at [1] instead of 0"),
        ([0, 0, 2], "2 at [2] instead of 0"),
        ([0, -1, 0], "-1 at [1] instead of 0"),
        ([0, 0, 4], "4 at [2] instead of 0"),
    ],
)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_position_of_an_equal_element_is_right_where_that_is_stated(positions: list[int], wrong: str, axis: int) -> None:
    elements, found = ROWS if axis else ROWS.T.contiguous(), torch.tensor(positions, dtype=torch.int32)
    wanted = expected_exactly("y", torch.zeros(3, dtype=torch.int32), None, (elements, axis))
    reason = f"1 of 3 {WRONG}: {wrong} or another position of an equal element" if wrong else ""
    assert compare(found, wanted) == (None, reason)


@pytest.mark.parametrize(
    ("reference", "positions", "wrong"),
    [
        ([[0, 2, 3, 1]], [[2, 0, 3, 1]], ""),
        ([[0, 2, 3, 1]], [[2, 2, 3, 1]], "2 at [0, 0], which stands there more than once"),
        ([[0, 2, 3, 1]], [[2, 0, 1, 3]], "1 at [0, 2] instead of 3 or another position of an equal element"),
        ([[0, 0, 2, 2]], [[2, 2, 2, 2]], ""),  # as of a running maximum
    ],
)
def test_no_position_is_there_twice_where_the_reference_has_none_twice(
    reference: list[list[int]], positions: list[list[int]], wrong: str
) -> None:
    wanted = expected_exactly("y", torch.tensor(reference), None, (ROWS[:1], 1))
    reason = compare(torch.tensor(positions), wanted)[1]
    assert reason.partition(": ")[2] == wrong
    assert compare(torch.tensor(positions, dtype=torch.int16), wanted)[1] == reason


def test_bytes_of_any_shape_are_summed() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    assert int(sum_of([memory[:24].view(8, 3)])) == sum(range(24))
    for part in (memory.view(16, 4)[:, :2], memory[3:11], memory.view(8, 8).T, memory > 5, memory[::2]):
        assert int(sum_of([part])) != int(sum_of([part.clone().fill_(0)]))


# -- the gate -------------------------------------------------------------------------------------------------------

KERNEL = Kernel(
    name="flags",
    dtypes={"cpu": ("float32",)},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="at", kind="output", dtype="int32", shape=("rows",), ties=("x", -1)),
        Argument(name="low", kind="output", dtype="uint8", shape=("rows", "cols")),
    ),
    reference=lambda inputs, workload: {"at": inputs["x"].argmax(1), "low": inputs["x"] < 1},  # type: ignore[union-attr, operator]
    workloads={"cpu": ("rows=8,cols=5,dtype=float32",)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)


def call(values: Sequence[Any], launch: Launch) -> None:
    x, at, low = values[:3]
    at.copy_(x.shape[1] - 1 - x.flip(1).argmax(1))
    low.copy_(x < 1)


def judged(kernel: Kernel, mistake: Any = lambda at, low: None) -> list[str]:
    def entry(values: Sequence[Any], launch: Launch) -> None:
        before = values[1].clone(), values[2].clone()
        call(values, launch)
        mistake(*(zip(before, values[1:3], strict=True)))

    gate = Gate(kernel, "cpu", find_target("cpu").open(), seed=4)
    checks = gate.run(entry, {"unroll": 1}, kernel.cases("cpu", kernel.example("cpu")))
    assert {(c.error, c.allowed, c.torch_error) for c in checks} == {(None, None, None)}
    return [check.reason for check in checks if not check.passed]


def unwritten(which: int, element: int) -> Any:
    """Leaves an element of an output as it was."""

    def mistake(*outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        before, after = (t.view(-1) for t in outputs[which])
        place = element % max(1, len(after))
        after[place : place + 1] = before[place : place + 1]

    return mistake


def test_the_gate_passes_what_is_right_and_tells_which_element_is_not() -> None:
    assert judged(KERNEL) == []
    assert "repeated" in KERNEL.data
    strict = replace(KERNEL, arguments=tuple(replace(a, ties=None) for a in KERNEL.arguments))
    assert judged(strict)[0].startswith("at: ")


@pytest.mark.parametrize("element", [0, 3, -1])
@pytest.mark.parametrize("which", [0, 1])
def test_an_integer_that_is_never_written_shows_in_the_first_launch(which: int, element: int) -> None:
    """There is no integer that no kernel writes."""
    refused = judged(KERNEL, unwritten(which, element))[0]
    assert f"1 of {(8, 40)[which]} {WRONG}: " in refused
    assert "launch" not in refused


def test_pytorchs_own_integers_must_be_the_references() -> None:
    first = Baseline(name="mine", role="reference", call=lambda t, w: {"at": t["x"].argmax(1) * 0})  # type: ignore[union-attr]
    wrong = replace(KERNEL, same_dtype=None, baselines=(first,))
    case = wrong.cases("cpu", wrong.example("cpu"))[0]
    with pytest.raises(KernelError) as caught:
        Gate(wrong, "cpu", find_target("cpu").open(), seed=1).prepare(case, repeated=True)
    assert "the reference baseline 'mine' gives another at than reference does in float64, in " in str(caught.value)
    assert "state `ties` if any position of equal elements will do" in str(caught.value)


def test_a_position_of_the_reference_that_is_none_is_its_authors_mistake() -> None:
    wrong = replace(KERNEL, reference=lambda i, w: {"at": i["x"].argmax(1) + 5, "low": i["x"] < 1})  # type: ignore[union-attr, operator]
    with pytest.raises(KernelError, match=r"returns \d in 'at' for .*, which is no position in the 5 of axis -1"):
        judged(wrong)


def by_columns(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    x = KERNEL.inputs(workload, data, generator)["x"]
    assert x is not None
    return {"x": x.t().contiguous().t()}


STRIDED = replace(
    KERNEL,
    inputs=by_columns,
    arguments=(
        *(replace(a, dtype="bool") if a.name == "low" else a for a in KERNEL.arguments),
        *(Argument(name=f"{t}_row", kind="scalar", dtype="int64", stride_of=(t, 0)) for t in ("x", "low")),
    ),
)


def takes_rows_for_dense(before: tuple[torch.Tensor, torch.Tensor], low: tuple[torch.Tensor, torch.Tensor]) -> None:
    low[1].copy_(low[1].t().reshape(low[1].shape))


def test_integers_are_right_whatever_the_strides_are() -> None:
    assert judged(STRIDED) == []
    assert WRONG in judged(STRIDED, takes_rows_for_dense)[0]
    assert WRONG in judged(STRIDED, unwritten(1, 3))[0]


@pytest.mark.parametrize("wrong", [None, "at", "low"])
def test_integers_far_apart_are_right_or_refused(wrong: str | None) -> None:
    """An element that an offset of 32 bits does not reach is left unchanged, and that is no right integer."""

    def entry(values: Sequence[Any], launch: Launch) -> None:
        right = [torch.empty(t.shape, dtype=t.dtype) for t in values[1:3]]
        call((values[0], *right), launch)
        for name, output, found in zip(("at", "low"), values[1:3], right, strict=True):
            written = len(output) - (name == wrong and max(values[3:]) >= 1 << 20)
            output[:written].copy_(found[:written])

    gate = Gate(STRIDED, "cpu", find_target("cpu").open(), seed=4)
    cases = far_cases(STRIDED, "cpu", STRIDED.example("cpu"))
    checks = [*far_checks(gate, entry, {"unroll": 1}, cases)]
    assert gate.left_out == {}
    if wrong is None:
        assert [check.passed for check in checks] == [True] * 4
        assert {check.case.partition(",far=")[2] for check in checks} == {"x_row", "low_row"}
    else:
        assert [check.passed for check in checks] == [False]
        assert checks[0].reason.startswith(f"{wrong}: ")
        assert WRONG in checks[0].reason
