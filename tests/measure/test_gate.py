"""The gate refuses what is wrong, says why, and accepts what is right. Mistakes of templates are in test_adversaries.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evo.errors import KernelError, LaunchError
from evo.evaluation import Binary, Check
from evo.measure import FAILING, reference
from evo.measure.cases import far_cases, parse_case
from evo.measure.gate import Gate, argument_values
from evo.measure.reference import expected_outputs
from evo.problem.genome import Genome
from evo.problem.kernel import Case, Launch, Workload
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.runtime.tolerance import Expected, compare
from evo.runtime.tolerance import expected as rule
from evo.targets import Loaded, Session, compile_source, find_target

KERNEL = load_kernel("layernorm")
TARGET = find_target("cpu")
WORKLOAD = KERNEL.workload("cpu", "rows=64,cols=256,dtype=float32")
CASES = KERNEL.cases("cpu", WORKLOAD)


class Candidate:
    """An entry point in Python, right but for what `mistake` does to x, y and bias afterwards. Notes its calls."""

    def __init__(self, mistake: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], object] | None = None) -> None:
        self.mistake = mistake
        self.calls: list[tuple[int, tuple[int, ...], float, float]] = []
        """Address of y, shape and sum of x, and the number behind x, of each call."""
        self.poisoned: list[bool] = []

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        x, _, weight, bias, y = values[:5]
        self.poisoned.append(bool(y.isnan().all()))
        beside = x.as_strided((1,), (1,), x.storage_offset() + x.numel()).item()
        self.calls.append((y.data_ptr(), tuple(x.shape), float(x.sum()), beside))
        wide = [t.double() if isinstance(t, torch.Tensor) else None for t in (x, weight, bias)]
        y.copy_(torch.nn.functional.layer_norm(wide[0], x.shape[1:], wide[1], wide[2], float(values[-1])))  # type: ignore[arg-type]
        if self.mistake is not None:
            self.mistake(x, y, bias)  # type: ignore[arg-type]

    def close(self) -> None:
        return None


def ignores_bias(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is not None:
        y -= bias


def changes_a_nan(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Puts another NaN in place of one, which compares as unequal as itself."""
    x.view(torch.int32)[x.isnan()] ^= 1


def writes_past_the_end(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).zero_()


NAN, INF = float("nan"), float("inf")

MISTAKES = {
    ignores_bias: ("normal", "outside the tolerance"),
    changes_a_nan: ("non_finite", "input x was changed"),
    writes_past_the_end: ("normal", "memory outside output y was written"),
}

Judge = Callable[..., tuple[Check, ...]]


@pytest.fixture(scope="module")
def session() -> Session:
    return TARGET.open()


@pytest.fixture(scope="module")
def gate(session: Session) -> Gate:
    return Gate(KERNEL, "cpu", session, seed=11)


@pytest.fixture(scope="module")
def judge(session: Session, gate: Gate) -> Judge:
    """The checks of an entry point for a workload, by that gate or another."""

    def run(
        loaded: Loaded, workload: Workload = WORKLOAD, cases: Sequence[Case] | None = None, by: Gate = gate
    ) -> tuple[Check, ...]:
        tried = KERNEL.cases("cpu", workload) if cases is None else cases
        return by.run(loaded, {}, tried)

    return run


def test_a_kernel_that_fails_at_a_drawn_case_leaves_it_out_and_at_its_own_is_told(session: Session) -> None:
    def plan(target: str, point: Any, workload: Workload) -> Any:
        if workload.dim("rows") == 7:
            raise KernelError("there is none")
        return KERNEL.plan(target, point, workload)

    gate = Gate(replace(KERNEL, plan=plan), "cpu", session, seed=11)
    seven = parse_case(KERNEL, "cpu", "rows=7,cols=256,dtype=float32,data=normal")
    checks = gate.run(Candidate(), {}, CASES[:1], [gate.prepare(seven, kept=False)])
    assert ([c.passed for c in checks], gate.left_out) == ([True], {seven.name: FAILING})
    with pytest.raises(KernelError, match="there is none"):
        gate.run(Candidate(), {}, (*CASES[:1], seven))


def test_the_gate_accepts_a_kernel_that_is_right(judge: Judge) -> None:
    checks = judge(Candidate())
    assert [c.reason for c in checks if not c.passed] == []
    assert len(checks) == len(CASES)
    assert all(c.error is not None and c.allowed is not None and c.error <= c.allowed for c in checks)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_gate_refuses_a_kernel_and_not_the_next_one_if_it(judge: Judge, mistake: Callable[..., None]) -> None:
    case, reason = MISTAKES[mistake]
    *passed, refused, smallest = judge(Candidate(mistake))
    assert not refused.passed
    assert all(c.passed for c in passed)
    assert case in refused.case
    assert reason in refused.reason
    assert not smallest.passed
    made = parse_case(KERNEL, "cpu", smallest.case)
    fewest = 3 if mistake is changes_a_nan else 1  # of one row, the columns say which number is not finite
    assert (made.name, made.offset, made.workload.dim("rows")) == (smallest.case, 0, fewest)
    assert judge(Candidate())[-1].passed


def test_a_failed_launch_names_its_case(judge: Judge) -> None:
    def broken(values: object, launch: object) -> None:
        raise LaunchError("the device is on fire")

    with pytest.raises(LaunchError, match=r"case normal: the device is on fire"):
        judge(broken)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_the_gate_refuses_no_genome_of_the_search_space(session: Session, judge: Judge, dtype: str, tmp_path: Path) -> None:
    workload = KERNEL.workload("cpu", f"rows=64,cols=256,dtype={dtype}")
    space = KERNEL.space("cpu", workload, TARGET.limits("native"))
    rng = random.Random(20)
    genomes = {g.digest: g for g in [Genome.of(space.complete(space.default))]}
    while len(genomes) < 20:
        genome = Genome.of(space.sample(rng))
        genomes[genome.digest] = genome

    def compiled(genome: Genome) -> Binary:
        source = render(KERNEL, "cpu", genome, workload, "native")
        folder = tmp_path / genome.digest
        folder.mkdir()
        return compile_source(source, "native", folder)

    with ThreadPoolExecutor(2) as pool:
        binaries = list(pool.map(compiled, genomes.values()))
    for genome, binary in zip(genomes.values(), binaries, strict=True):
        loaded = session.load(binary, KERNEL.entry)
        last = judge(loaded, workload)[-1]
        loaded.close()
        assert last.passed, (last.case, last.reason, dict(genome.parameters))


# -- launches -----------------------------------------------------------------------------------------------


def test_the_first_case_is_repeated_in_other_memory_and_on_other_data(judge: Judge) -> None:
    noted = Candidate()
    assert [c.passed for c in judge(noted, cases=CASES[:3])] == [True] * 3
    main = [call for call in noted.calls if call[1] == (64, 256)][:5]
    addresses, _, sums, beside = zip(*main, strict=True)
    assert [a == addresses[0] for a in addresses] == [True, False, True, False, True]
    assert [s == sums[0] for s in sums] == [True, True, False, True, True]
    assert [b != b for b in beside] == [True, False, False, True, False]  # NaN, or not
    assert len(noted.calls) == 5 + 2  # the other cases are launched once
    assert noted.poisoned == [True] * 4 + [False] + [True] * 2  # once there is another result in its place


@pytest.mark.parametrize("mistake", [ignores_bias, writes_past_the_end], ids=lambda m: m.__name__)
def test_a_verdict_is_had_again_from_kernel_and_seed(judge: Judge, session: Session, mistake: Callable[..., None]) -> None:
    gates = [Gate(KERNEL, "cpu", session, seed) for seed in (4, 4, 5)]
    first, again, other = (judge(Candidate(mistake), cases=CASES[:1], by=g)[0] for g in gates)
    assert not first.passed
    assert first == again
    assert first.seed != other.seed
    assert first.error != other.error


def test_data_that_a_stray_write_has_changed_judge_nobody_else(judge: Judge, session: Session) -> None:
    own = Gate(KERNEL, "cpu", session, seed=12)
    assert all(c.passed for c in judge(Candidate(), by=own))
    assert not own.data_changed
    prepared = own.prepare(CASES[2])
    for strayed in (prepared.trials[0].expected[0].allowed, prepared.trials[0].image.bytes, prepared.trials[0].inputs["x"]):
        kept = strayed.clone()
        strayed.view(-1)[5] += 1
        assert not judge(Candidate(), by=own)[-1].passed
        assert own.data_changed
        strayed.copy_(kept)
        assert judge(Candidate(), by=own)[-1].passed


# -- compare ------------------------------------------------------------------------------------------------


def expected(reference: list[float], *, dtype: torch.dtype = torch.float32, allowed: float = 0.1) -> Expected:
    wide = torch.tensor(reference, dtype=torch.float64)
    finite = wide.to(dtype).isfinite()
    return Expected(
        name="y",
        reference=wide,
        finite=finite,
        allowed=torch.full_like(wide, allowed),
        torch_error=0.05,
        largest_allowed=0.15,
        all_finite=bool(finite.all()),
    )


def verdict(output: list[float], reference: list[float], *, allowed: float = 0.1) -> tuple[float | None, str]:
    return compare(torch.tensor(output, dtype=torch.float32), expected(reference, allowed=allowed))


OUTSIDE = "1 of 2 elements are outside the tolerance: "


@pytest.mark.parametrize(
    ("output", "allowed", "found"),
    [
        ([1.0, -2.0], 0.1, (0.0, "")),
        ([1.0625, -2.0], 0.1, (0.0625, "")),
        ([1.125, -2.0], 0.1, (0.125, OUTSIDE + "1.125 at [0] instead of 1 (0.125 off)")),
        ([INF, -2.5], 0.1, (INF, OUTSIDE.replace("1", "2", 1) + "inf at [0] instead of 1")),
        ([1.25, -2.0], 1.0, (0.25, "error 0.25 exceeds 0.15 (PyTorch: 0.05): 1.25 at [0] instead of 1 (0.25 off)")),
        ([1.0, NAN], 0.1, (None, "1 of 2 elements are NaN or were never written")),
    ],
)
def test_an_error_has_to_keep_its_own_bound_and_that_of_pytorch(
    output: list[float], allowed: float, found: tuple[float | None, str]
) -> None:
    assert verdict(output, [1.0, -2.0], allowed=allowed) == found


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_must_be_agreed_upon_exactly(value: float) -> None:
    assert verdict([1.0, value], [1.0, value]) == (0.0, "")
    assert verdict([value, 1.0], [2.0, 1.0])[1]
    for other in {0.0, 3.4e38, -INF, INF, NAN} - {value}:
        if other != other and value != value:
            continue
        lost = f"1 of 1 NaN or Inf of the reference are lost: {other:.6g} at [1] instead of {value:.6g}"
        assert verdict([1.0, other], [1.0, value]) == (None, lost)


def test_a_reference_that_overflows_the_outputs_dtype_expects_inf() -> None:
    wanted = expected([1.0, 1e6], dtype=torch.float16)
    assert compare(torch.tensor([1.0, INF], dtype=torch.float16), wanted) == (0.0, "")
    assert "are lost" in compare(torch.tensor([1.0, 65504.0], dtype=torch.float16), wanted)[1]


def rounded_towards_zero(values: torch.Tensor) -> torch.Tensor:
    nearest = values.to(torch.bfloat16)
    bits = nearest.view(torch.int16) - (nearest.double().abs() > values.abs()).to(torch.int16)
    return bits.view(torch.bfloat16)


NUMBERS = torch.randn(8192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DENORMALS = torch.linspace(1e-6, 6e-5, 32, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kept", "result", "reference", "reason"),
    [
        ("overflow", torch.tensor([65504.0], dtype=torch.float16), torch.tensor([7e4], dtype=torch.float64), "are lost"),
        ("rounding", rounded_towards_zero(NUMBERS), NUMBERS, "results lean towards 0, as if not rounded"),
        ("denormals", torch.zeros(32, dtype=torch.float16), DENORMALS, "100% of the results below the smallest normal"),
        ("zero_sign", torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0], dtype=torch.float64), "1 zeros have the wrong"),
    ],
)
def test_what_a_tolerance_would_let_pass_is_kept_where_that_is_stated(
    kept: str, result: torch.Tensor, reference: torch.Tensor, reason: str
) -> None:
    exact = rule("y", reference, None, result.dtype, (1e-2, 1e-2, 2.0), keeps=(kept,))
    assert reason in compare(result, exact)[1]
    assert compare(reference.to(result.dtype), exact)[1] == ""
    assert compare(result, replace(exact, keeps=()))[1] == ""


def test_small_results_are_held_to_a_tolerance_of_their_own_where_that_is_stated() -> None:
    """A softmax that leaves out what is below exp(-11) of the largest."""
    weights = torch.linspace(0.0, -16.0, 33, dtype=torch.float64).softmax(0)
    pytorchs = weights.to(torch.float16)
    dropped = pytorchs.where(weights > weights[0] * math.exp(-11), 0.0)
    strict, loose = (
        rule("y", weights, pytorchs, torch.float16, (6e-8, 1e-3, 2.0), keeps=keeps) for keeps in (("componentwise",), ())
    )
    assert "elements are outside the tolerance" in compare(dropped, strict)[1]
    assert compare(dropped, loose)[1] == ""
    assert compare(pytorchs, strict)[1] == ""


def test_long_sums_may_lose_the_share_that_their_kernel_states_and_no_more() -> None:
    exact = torch.linspace(1, 2.5, 97, dtype=torch.float64).half().double()
    tolerance = (2e-3, 2e-3, 2.0)
    plain, long = (rule("y", exact, exact.half(), torch.float16, tolerance, of_sums=lost) for lost in (0.0, 2.0**-10))
    once, thrice = ((exact * (1 - steps * 2.0**-10)).half() for steps in (1, 3))
    assert "exceeds" in compare(once, plain)[1]
    assert compare(once, long)[1] == ""
    assert compare(thrice, long)[1]


def test_numbers_that_are_all_rounded_the_same_way_do_not_lean() -> None:
    tenths = torch.full((8192,), 0.1, dtype=torch.float64)
    exact = rule("y", tenths, None, torch.bfloat16, (1e-2, 1e-2, 2.0), keeps=("rounding",))
    assert compare(tenths.to(torch.bfloat16), exact)[1] == ""


def test_sums_of_equal_terms_lean_the_farther_the_longer_a_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 256 threads adds 128 equal squares, and all are rounded the same way."""
    kernel = load_kernel("rmsnorm")
    problem = kernel.workload("cpu", "rows=4,cols=32768,dtype=float32,weight=false")
    inputs = kernel.inputs(problem, "constant", torch.Generator().manual_seed(25))
    x = inputs["x"]
    assert x is not None
    sums = reduce(torch.add, x.square().view(4, 128, 256).unbind(1)).sum(-1, keepdim=True)
    y = x * torch.rsqrt(sums / 32768 + float(problem.option("eps")))
    (wanted,) = expected_outputs(kernel, inputs, problem)
    assert compare(y, wanted)[1] == ""
    monkeypatch.setattr(reference, "input_roundings", lambda given: 8)
    (strict,) = expected_outputs(kernel, inputs, problem)
    assert "exceeds" in compare(y, strict)[1]


def test_what_roundings_may_do_is_known_of_large_problems_too() -> None:
    """A GPU's search has refused a right sum of 512 terms, in 19 million elements."""
    kernel = load_kernel("softmax")
    problem = kernel.workload("cuda", "rows=2100,cols=4096,dtype=float32")
    inputs = kernel.inputs(problem, "normal", torch.Generator().manual_seed(51))
    (wanted,) = expected_outputs(kernel, inputs, problem, "normal")
    eps, scale = torch.finfo(torch.float32).eps, float(wanted.reference.max())
    assert wanted.largest_allowed - 2 * wanted.torch_error > 8 * eps * scale


def test_an_empty_output_is_right() -> None:
    assert compare(torch.empty(0, 8), expected([])) == (0.0, "")


# -- cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.offset], ids=lambda c: c.name)
def test_a_shifted_case_misaligns_every_tensor(gate: Gate, case: Case) -> None:
    prepared = gate.prepare(case)
    memory = prepared.trials[0].memory
    values = argument_values(KERNEL, case.workload, memory.inputs, memory.outputs)
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    assert len(tensors) == 4
    assert all(t.data_ptr() % 16 == 4 * case.offset for t in tensors)
    assert all(t.is_contiguous() for t in tensors)


def test_a_baseline_that_computes_something_else_stops_the_search(session: Any) -> None:
    """A candidate that is twice as wrong as such a baseline would pass."""
    rms = replace(KERNEL.reference_baseline, call=lambda t, w: F.rms_norm(t["x"], t["x"].shape[-1:], t["weight"]))
    wrong = replace(KERNEL, same_dtype=None, baselines=(rms, *(b for b in KERNEL.baselines if b.role != "reference")))
    with pytest.raises(KernelError, match=r"kernel.py: the reference baseline .* gives another y than reference does"):
        Gate(wrong, "cpu", session, seed=1).prepare(CASES[0], repeated=True)


def test_what_comes_by_chance_is_not_blamed_on_memory(judge: Judge) -> None:
    """The same result twice is luck: it is launched several times before anything else is changed."""
    turns = iter([0.0] + [1.0] * 3 + [2.0] * 100)

    def adds_in_some_order(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        y += next(turns)

    refused = next(c for c in judge(Candidate(adds_in_some_order)) if not c.passed)
    assert refused.reason.endswith("another result when launched again"), refused.reason


def test_strides_are_not_stated_in_32_bits() -> None:
    kernel = load_kernel("attention")
    narrow = tuple(replace(a, dtype="int32") if a.name == "k_batch" else a for a in kernel.arguments)
    with pytest.raises(KernelError, match="'k_batch' is of int32, but a stride may be 2\\^31 or more"):
        replace(kernel, arguments=narrow)


def test_a_case_with_a_far_stride_is_read_back_from_its_name() -> None:
    kernel = load_kernel("attention")
    found = far_cases(kernel, "cpu", kernel.example("cpu"))
    assert {case.far for case in found} >= {f"{tensor}_{axis}" for tensor in "qkvo" for axis in ("batch", "head", "seq")}
    assert all(parse_case(kernel, "cpu", case.name) == case for case in found)


def test_a_dense_case_has_more_elements_than_32_bits_count() -> None:
    workload = KERNEL.workload("cuda", "rows=64,cols=512,dtype=float16")
    assert [case.workload.dim("rows") * 512 >> 31 for case in far_cases(KERNEL, "cuda", workload)] == [1, 2]
    assert far_cases(KERNEL, "cpu", WORKLOAD) == ()
