"""Sizes that `validate` refuses are repaired, and no gate is emptied by it without saying so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evo.errors import KernelError
from evo.measure.cases import count_kinds, draw_inputs, far_cases, random_cases, required_cases, simpler
from evo.problem.kernel import Argument, Case, Cost, Dimension, Kernel, Tensors, Workload
from evo.problem.loading import load_kernel
from evo.problem.repair import is_legal, repaired
from evo.search.check import cost_faults
from tests.adversaries.trial import FOLDER

FLAT = load_kernel(str(FOLDER / "flat"))
OWN = FLAT.example("cpu")


def _with(validate: str, **changed: object) -> Kernel:
    return replace(FLAT, validate=lambda w: "" if eval(validate, {**dict(w.dims)}) else "refused", **changed)


def _missing(kernel: Kernel, target: str = "cpu", workload: Workload = OWN) -> list[str]:
    return [kind for kind, number in count_kinds(kernel, target, workload).items() if not number]


RULES = ["n % cols == 0", "n % cols == 0 and cols % 8 == 0", "n % (16 * cols) == 0", "n % cols == 0 and cols % 2"]


@pytest.mark.parametrize("rule", RULES[:3])
def test_a_kernel_with_rules_between_sizes_has_cases_of_every_kind(rule: str) -> None:
    kernel = _with(rule)
    cases = kernel.cases("cpu", OWN)
    assert {case.data for case in cases} == {*kernel.data}
    assert all(is_legal(kernel, case.workload) for case in cases)
    assert len({case.workload for case in cases}) > 10
    wanting = {"one row"} if "16" in rule else set()
    assert {*_missing(kernel)} == wanting


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rule", "own", "longest"),
    [
        ("rows == cols", {"rows": 128, "cols": 128}, {"rows": 1024, "cols": 1024}),
        ("n == 2 * m", {"rows": 64, "m": 128, "n": 256}, {"rows": 65_537, "m": 65_537, "n": 65_537}),
    ],
)
def test_a_kernel_of_equal_sizes_has_cases_of_every_kind_and_at_each_end(
    rule: str, own: dict[str, int], longest: dict[str, int], target: str
) -> None:
    workload, last = Workload.of(own, "float32"), [*own][-1]
    kernel = replace(
        _with(rule),
        dimensions=tuple(Dimension(name=name, low=1, high=1 << 20) for name in own),
        arguments=(
            Argument(name="x", kind="input", shape=("rows", last)),
            Argument(name="y", kind="output", shape=("rows", [*own][1])),
        ),
        reference=lambda inputs, w: {"y": inputs["x"][:, : w.dim([*own][1])]},  # type: ignore[index]
        workloads={"cpu": (workload,), "cuda": (workload,)},
    )
    cases = [*kernel.cases(target, workload), *required_cases(kernel, target, workload)]
    assert all(is_legal(kernel, case.workload) for case in cases)
    assert _missing(kernel, target, workload) == []
    assert {name: max(c.workload.dim(name) for c in cases) >= least for name, least in longest.items()} == dict.fromkeys(
        own, True
    )
    most = {"cpu": 1 << 24, "cuda": 1 << 28}[target]
    assert max(kernel.cost(c.workload).bytes for c in cases) <= most, "a repair makes no case much larger"
    drawn = random_cases(kernel, target, workload, seed=1, number=64)
    assert len({c.workload for c in drawn if is_legal(kernel, c.workload)}) > 25


def test_a_kernels_own_case_may_have_two_distributions_or_one_that_cannot_be_drawn() -> None:
    """It is then of no kind; the others are of theirs."""

    def inputs(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
        if data == "huge":
            raise RuntimeError("out of range")
        return FLAT.inputs(workload, data, generator)

    def cases(target: str, workload: Workload) -> list[Case]:
        return [Case(data, OWN, data) for data in ("normal", "huge", "tiny+outlier", "non_finite", "of my own")]

    kernel = replace(FLAT, inputs=inputs, cases=cases)
    counts = count_kinds(kernel, "cpu", OWN)
    assert counts["outliers"] >= 1
    assert counts["nan"] == counts["inf"] == 1


def test_random_cases_of_such_a_kernel_are_as_diverse_as_others() -> None:
    drawn = random_cases(FLAT, "cpu", OWN, seed=1, number=64)
    widths, rows = zip(*((w.dim("cols"), w.dim("n") // w.dim("cols")) for w in (c.workload for c in drawn)), strict=True)
    assert len(drawn) == 64
    assert all(is_legal(FLAT, case.workload) for case in drawn)
    assert min(len({*widths}), len({*rows})) > 25
    assert widths.count(1) < 12
    assert max(widths) > 65_536 < max(rows)


def test_a_gate_that_cannot_be_filled_says_what_it_lacks() -> None:
    one = _with(f"n == {OWN.dim('n')} and cols == {OWN.dim('cols')}")
    assert {"one row", "no power of two"} <= {*_missing(one)}
    assert {"nan", "inf"} <= {*_missing(replace(FLAT, data=("normal",)))}


def test_a_kernels_own_case_that_it_refuses_is_repaired_or_told() -> None:
    def cases(target: str, workload: Workload) -> list[Case]:
        return [Case("odd", Workload.of({"n": 100, "cols": 7}, "float32"), "normal")]

    made = repaired(FLAT, cases("cpu", OWN)[0].workload)
    assert made is not None
    assert is_legal(FLAT, made)
    from evo.problem.repair import legal_cases

    assert [case.workload for case in legal_cases(FLAT, "cpu", OWN, cases("cpu", OWN))] == [made]
    with pytest.raises(KernelError, match="`cases` gives 'odd'"):
        legal_cases(_with("False"), "cpu", OWN, cases("cpu", OWN))


def test_smaller_cases_are_legal_and_smaller() -> None:
    (case,) = (c for c in FLAT.cases("cpu", OWN) if c.name == "non_finite")
    found = [c for c in simpler(FLAT, "cpu", case) if c.data == case.data]
    assert found
    assert all(is_legal(FLAT, c.workload) for c in found)


@pytest.mark.parametrize(
    ("target", "kernel"),
    [("cpu", "layernorm"), ("cuda", "layernorm"), ("cpu", "softmax"), ("cuda", "layernorm_backward")],
)
def test_a_finalist_meets_more_rows_than_a_counter_of_16_bits_has(target: str, kernel: str) -> None:
    """Or, where they would take long or much memory, the winner."""
    problem = load_kernel(kernel)
    own = problem.example(target)
    required, far = required_cases(problem, target, own), far_cases(problem, target, own)
    rows = [c.workload.dim("rows") for c in (*required, *far)]
    assert max(rows) > 65_536
    assert all(problem.cost(c.workload).bytes <= 1 << 28 for c in required)
    assert min(rows[len(required) :], default=65_601) == 65_601, "where there is no memory for 2^31 elements"


def test_a_reference_that_loops_over_items_has_no_case_of_very_many() -> None:
    def reference(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        assert x is not None
        return {"y": torch.cat([row - row[0] for row in x.reshape(-1, workload.dim("cols"))])}

    looping = replace(FLAT, reference=reference)
    rows = [c.workload.dim("n") // c.workload.dim("cols") for c in required_cases(looping, "cpu", OWN)]
    assert 512 <= max(rows) < 8192
    drawn = random_cases(looping, "cpu", OWN, seed=1, number=64)
    assert max(c.workload.dim("n") // c.workload.dim("cols") for c in drawn) < 8192


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_small_workload_is_gated_on_many_rows_too(target: str) -> None:
    small = Workload.of({"n": 4096, "cols": 512}, "float32")
    assert max(c.workload.dim("n") // c.workload.dim("cols") for c in FLAT.cases(target, small)) > 512


def test_what_is_derived_follows_a_kernel_that_is_replaced() -> None:
    other = replace(FLAT, data=("normal", "huge"), reference=lambda inputs, workload: {"y": inputs["x"]})
    assert {case.data for case in other.cases("cpu", OWN)} == {"normal", "huge"}
    assert other.baselines[0].call({"x": 5}, OWN) == {"y": 5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("cost", "said"),
    [(Cost(bytes=4, flops=0), "its outputs alone have"), (Cost(bytes=1 << 40, flops=0), "all its tensors have")],
)
def test_a_cost_that_cannot_be_is_told(cost: Cost, said: str) -> None:
    (fault,) = cost_faults(replace(FLAT, cost=lambda workload: cost), [OWN])
    assert said in fault
    assert not cost_faults(FLAT, [OWN])


def _one_axis(out: str) -> Kernel:
    tensors = (Argument(name="x", kind="input", shape=("n",)), Argument(name="y", kind="output", shape=(out,)))
    return replace(
        FLAT,
        dimensions=(Dimension(name="n", low=1, high=2**31 - 1), Dimension(name="one", low=1, high=1)),
        arguments=tensors,
        compile_time_dims={"cpu": ("one",), "cuda": ("one",)},
        workloads={"cpu": ("n=100003,one=1,dtype=float32",), "cuda": ("n=4194304,one=1,dtype=float32",)},
        validate=lambda w: "",
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("out", "alone"), [("n", False), ("one", True)], ids=["elementwise", "sum"])
def test_a_kernel_of_one_axis_meets_nan_and_both_infinities(out: str, alone: bool, seed: int) -> None:
    kernel = _one_axis(out)
    own = kernel.example("cpu")
    assert not _missing(kernel, "cpu", own)
    met = list[tuple[bool, bool, bool]]()
    for case in (c for c in kernel.cases("cpu", own) if c.data == "non_finite"):
        x = draw_inputs(kernel, case, torch.Generator().manual_seed(seed))["x"]
        assert x is not None
        met.append((bool(x.isnan().any()), bool(x.isposinf().any()), bool(x.isneginf().any())))
    assert {*met} == ({(True, False, False), (False, True, False), (False, False, True)} if alone else {(True, True, True)})
