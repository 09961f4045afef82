"""The gate refuses what is wrong, says why, and accepts what is right."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from evo.errors import CompileError, HangError, LaunchError
from evo.evaluation import Binary, Check
from evo.measure.gate import Gate, case_seed
from evo.measure.reference import Expected, argument_values, compare
from evo.problem.genome import Genome
from evo.problem.kernel import Launch, Workload, load_kernel
from evo.problem.render import Source, render
from evo.targets import Loaded, Session, find_target

KERNEL = load_kernel("layernorm")
TARGET = find_target("cpu")
WORKLOAD = KERNEL.workload("cpu", "rows=64,cols=256,dtype=float32")

# LayerNorm in float32, one entry point for each way of being wrong, and two honest ones.
SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
using i64 = long long;
#define ARGUMENTS float* x, float* weight, float* bias, float* y, i64 rows, i64 cols, float eps
#define ENTRY(name) extern "C" void name(ARGUMENTS)
#define ALL(...) all(x, weight, bias, y, rows, cols, eps, Wrong{__VA_ARGS__})

namespace {
enum { NOTHING, WEIGHT, BIAS, EPS, SAMPLE, RAW, NAN_TO_ZERO, INF, HALF };
struct Wrong { int what; };

void row(const float* x, const float* weight, const float* bias, float* y, i64 cols, float eps, Wrong w) {
    double mean = 0, m2 = 0;
    for (i64 j = 0; j < cols; ++j) mean += x[j];
    mean /= cols;
    for (i64 j = 0; j < cols; ++j) m2 += (x[j] - mean) * (x[j] - mean);
    double variance = m2 / (w.what == SAMPLE && cols > 1 ? cols - 1 : cols);
    if (w.what == RAW) {  // E[x^2] - E[x]^2 in float32 cancels where the mean is large
        float sum = 0, squares = 0;
        for (i64 j = 0; j < cols; ++j) sum += x[j], squares += x[j] * x[j];
        mean = sum / cols;
        variance = squares / cols - (float)mean * (float)mean;
    }
    const double rstd = 1 / std::sqrt(variance + (w.what == EPS ? 1e-5 : (double)eps));
    for (i64 j = 0; j < cols; ++j) {
        double value = (x[j] - mean) * rstd;
        if (weight && w.what != WEIGHT) value *= weight[j];
        if (bias && w.what != BIAS) value += bias[j];
        if (w.what == NAN_TO_ZERO && value != value) value = 0;
        if (w.what == INF && std::isinf(mean)) value = 3;
        if (w.what == HALF) value = (float)(_Float16)(float)value;
        y[j] = (float)value;
    }
}
void all(ARGUMENTS, Wrong w) {
    for (i64 i = 0; i < rows; ++i) row(x + i * cols, weight, bias, y + i * cols, cols, eps, w);
}
}

ENTRY(honest_in_double) { ALL(NOTHING); }
ENTRY(honest_in_float) {
    for (i64 i = 0; i < rows; ++i) {
        const float* in = x + i * cols;
        double s = 0, q = 0;
        for (i64 j = 0; j < cols; ++j) s += in[j] - in[0];
        const float mean = (float)(s / cols);
        for (i64 j = 0; j < cols; ++j) q += (double)(in[j] - in[0] - mean) * (in[j] - in[0] - mean);
        const float rstd = (float)(1 / std::sqrt(q / cols + eps));
        for (i64 j = 0; j < cols; ++j)
            y[i * cols + j] = (in[j] - in[0] - mean) * rstd * (weight ? weight[j] : 1) + (bias ? bias[j] : 0);
    }
}

ENTRY(writes_nothing) {}
ENTRY(zeros) { for (i64 i = 0; i < rows * cols; ++i) y[i] = 0; }
ENTRY(constant) { for (i64 i = 0; i < rows * cols; ++i) y[i] = 0.25f; }
ENTRY(only_bias) { for (i64 i = 0; i < rows * cols; ++i) y[i] = bias ? bias[i % cols] : 0; }
ENTRY(identity) { for (i64 i = 0; i < rows * cols; ++i) y[i] = x[i]; }
ENTRY(fixed_statistics) {  // of the standard normal distribution
    for (i64 i = 0; i < rows * cols; ++i) y[i] = x[i] * (weight ? weight[i % cols] : 1) + (bias ? bias[i % cols] : 0);
}
ENTRY(statistics_of_the_first_row) {
    double mean = 0, m2 = 0;
    for (i64 j = 0; j < cols; ++j) mean += x[j] / cols;
    for (i64 j = 0; j < cols; ++j) m2 += (x[j] - mean) * (x[j] - mean);
    for (i64 i = 0; i < rows * cols; ++i)
        y[i] = (float)((x[i] - mean) / std::sqrt(m2 / cols + eps) * (weight ? weight[i % cols] : 1)
                       + (bias ? bias[i % cols] : 0));
}
ENTRY(ignores_weight) { ALL(WEIGHT); }
ENTRY(ignores_bias) { ALL(BIAS); }
ENTRY(ignores_eps) { ALL(EPS); }
ENTRY(sample_variance) { ALL(SAMPLE); }
ENTRY(raw_moments) { ALL(RAW); }
ENTRY(nan_becomes_zero) { ALL(NAN_TO_ZERO); }
ENTRY(inf_is_lost) { ALL(INF); }
ENTRY(half_precision) { ALL(HALF); }
ENTRY(drops_last_element) {
    const float kept = y[rows * cols - 1];
    ALL(NOTHING);
    y[rows * cols - 1] = kept;
}
ENTRY(drops_last_column) {
    for (i64 i = 0; i < rows; ++i) {
        const float kept = y[i * cols + cols - 1];
        row(x + i * cols, weight, bias, y + i * cols, cols, eps, {NOTHING});
        y[i * cols + cols - 1] = kept;
    }
}
ENTRY(drops_last_row) { all(x, weight, bias, y, rows - 1, cols, eps, {NOTHING}); }
ENTRY(swaps_two_elements) {
    ALL(NOTHING);
    if (cols > 1) { const float kept = y[0]; y[0] = y[1]; y[1] = kept; }
}
ENTRY(changes_x) { ALL(NOTHING); x[rows * cols - 1] += 1; }
ENTRY(changes_weight) { ALL(NOTHING); if (weight) weight[cols - 1] = -weight[cols - 1]; }
ENTRY(changes_a_nan) {  // for another NaN, which compares as unequal as itself
    ALL(NOTHING);
    for (i64 i = 0; i < rows * cols; ++i)
        if (x[i] != x[i]) { const uint32_t other = 0x7fc12345; __builtin_memcpy(x + i, &other, 4); }
}
ENTRY(writes_past_the_end) { ALL(NOTHING); y[rows * cols] = 0; }
ENTRY(writes_before_the_start) { ALL(NOTHING); y[-1] = 0; }
ENTRY(writes_a_row_too_many) { ALL(NOTHING); for (i64 j = 0; j < cols; ++j) y[rows * cols + j] = bias ? bias[j] : 0; }
ENTRY(only_if_aligned) { ALL(NOTHING); if ((uintptr_t)x % 16) y[0] += 1; }
ENTRY(only_for_some_columns) { ALL(NOTHING); if (cols % 8) y[rows * cols - 1] += 1; }
ENTRY(adds_to_its_output) {  // right where memory happens to be zero
    float* before = (float*)std::malloc(rows * cols * 4);
    for (i64 i = 0; i < rows * cols; ++i) before[i] = y[i];
    ALL(NOTHING);
    for (i64 i = 0; i < rows * cols; ++i) y[i] += before[i];
    std::free(before);
}
ENTRY(skips_what_looks_done) {  // a poisoned output means that somebody looks
    const float first = y[0], last = y[rows * cols - 1];
    if (first == first && last == last && first != 12288 && last != 12288) return;
    ALL(NOTHING);
}
ENTRY(only_the_first_time) {
    static bool called = false;
    if (!called) ALL(NOTHING);
    called = true;
}
"""

HONEST = ("honest_in_double", "honest_in_float")

# Which word of the recorded reason, or of the case it failed in, tells the user what is wrong.
ADVERSARIES = {
    "writes_nothing": "NaN or were never written",
    "zeros": "outside the tolerance",
    "constant": "outside the tolerance",
    "only_bias": "outside the tolerance",
    "identity": "outside the tolerance",
    "fixed_statistics": "outside the tolerance",
    "statistics_of_the_first_row": "outside the tolerance",
    "ignores_weight": "outside the tolerance",
    "ignores_bias": "outside the tolerance",
    "ignores_eps": "outside the tolerance",
    "sample_variance": "outside the tolerance",
    "raw_moments": "",
    "nan_becomes_zero": "NaN or Inf of the reference are lost",
    "inf_is_lost": "NaN or Inf of the reference are lost",
    "half_precision": "",
    "drops_last_element": "1 of",
    "drops_last_column": "67 of 17152 elements are NaN or were never written",
    "drops_last_row": "256 of 17152 elements are NaN or were never written",
    "swaps_two_elements": "2 of",
    "changes_x": "input x was changed",
    "changes_weight": "input weight was changed",
    "changes_a_nan": "input x was changed",
    "writes_past_the_end": "memory outside output y was written",
    "writes_before_the_start": "memory outside output y was written",
    "writes_a_row_too_many": "memory outside output y was written",
    "only_if_aligned": "1 of",
    "only_for_some_columns": "1 of",
    "adds_to_its_output": "NaN or were never written",
    "skips_what_looks_done": "over the result of other data",
    "only_the_first_time": "NaN or were never written",
}
FAILS_IN = {
    "ignores_eps": "eps=0.5",
    "nan_becomes_zero": "non_finite",
    "inf_is_lost": "non_finite",
    "changes_a_nan": "non_finite",
    "only_if_aligned": "offset=",
    "only_for_some_columns": "normal 5x1",
}


Judge = Callable[..., tuple[Check, ...]]


@pytest.fixture(scope="module")
def session() -> Session:
    return TARGET.open()


@pytest.fixture(scope="module")
def gate(session: Session) -> Gate:
    return Gate(KERNEL, "cpu", session, seed=11)


@pytest.fixture(scope="module")
def adversaries(tmp_path_factory: pytest.TempPathFactory) -> Binary:
    source = Source(text=SOURCE, target="cpu", entry="honest_in_double", flags=("-O1",))
    return TARGET.compile(source, "native", tmp_path_factory.mktemp("adversaries"))


@pytest.fixture(scope="module")
def judge(session: Session, gate: Gate) -> Judge:
    """The checks of one entry point of a binary for a workload."""

    def run(binary: Binary, entry: str, workload: Workload = WORKLOAD) -> tuple[Check, ...]:
        loaded = session.load(binary, entry)
        try:
            cases = [(c, KERNEL.launch("cpu", {}, c.workload, session.limits)) for c in KERNEL.cases("cpu", workload)]
            return gate.run(loaded, cases)
        finally:
            loaded.close()

    return run


@pytest.mark.parametrize("entry", HONEST)
def test_gate_accepts_an_honest_kernel(judge: Judge, adversaries: Binary, entry: str) -> None:
    checks = judge(adversaries, entry)
    assert [c.reason for c in checks if not c.passed] == []
    assert len(checks) == len(KERNEL.cases("cpu", WORKLOAD))
    assert all(c.error is not None and c.allowed is not None and c.error <= c.allowed for c in checks)


@pytest.mark.parametrize("entry", ADVERSARIES)
def test_gate_refuses_a_kernel_that(judge: Judge, adversaries: Binary, entry: str) -> None:
    checks = judge(adversaries, entry)
    assert not checks[-1].passed, f"{entry} passed all {len(checks)} cases"
    assert all(c.passed for c in checks[:-1])
    assert ADVERSARIES[entry] in checks[-1].reason
    assert checks[-1].reason
    assert FAILS_IN.get(entry, "") in checks[-1].case


def test_every_adversary_compiled_is_judged() -> None:
    named = {line.split("(")[1].split(")")[0] for line in SOURCE.splitlines() if line.startswith("ENTRY(")}
    assert named == {*HONEST, *ADVERSARIES}


def test_a_kernel_that_damaged_its_surroundings_does_not_spoil_the_next_one(
    judge: Judge, adversaries: Binary
) -> None:
    for entry in ("changes_x", "changes_weight", "changes_a_nan", "writes_past_the_end", "writes_before_the_start"):
        assert not judge(adversaries, entry)[-1].passed
        assert judge(adversaries, "honest_in_double")[-1].passed


def test_a_gate_whose_hazards_cannot_be_made_is_no_gate(session: Session) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            if name == "hazards":
                raise AttributeError("another version of the bindings")
            return getattr(session, name)

    with pytest.raises(AttributeError, match="bindings"):
        Gate(KERNEL, "cpu", Broken(), seed=1)  # type: ignore[arg-type]


def test_a_launch_that_hangs_is_told_from_one_that_fails(
    gate: Gate, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(limit_s: float) -> None:
        raise HangError(f"a launch did not end within {limit_s:g} s")

    monkeypatch.setattr(session, "await_launch", hang)
    gate.launch_limit_s = 0.5
    case = KERNEL.cases("cpu", WORKLOAD)[0]
    launch = KERNEL.launch("cpu", {}, case.workload, TARGET.limits("native"))
    with pytest.raises(HangError, match=f"^case {re.escape(case.name)}: a launch did not end within 0.5 s"):
        gate.run(lambda values, launch: None, [(case, launch)])  # type: ignore[arg-type,list-item]


def test_a_failed_launch_names_its_case(gate: Gate) -> None:
    def broken(values: object, launch: object) -> None:
        raise LaunchError("the device is on fire")

    case = KERNEL.cases("cpu", WORKLOAD)[0]
    launch = KERNEL.launch("cpu", {}, case.workload, TARGET.limits("native"))
    with pytest.raises(LaunchError, match=r"case normal 67x256: the device is on fire"):
        gate.run(broken, [(case, launch)])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", KERNEL.dtypes["cpu"])
def test_gate_refuses_no_genome_of_the_search_space(
    judge: Judge,
    dtype: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = KERNEL.workload("cpu", f"rows=64,cols=256,dtype={dtype}")
    space = KERNEL.space("cpu", workload, TARGET.limits("native"))
    rng = random.Random(20)
    genomes = {g.digest: g for g in [Genome.of(space.complete(space.default))]}
    while len(genomes) < 61:
        genome = Genome.of(space.sample(rng))
        genomes[genome.digest] = genome

    def compiled(genome: Genome) -> Binary | None:
        source = render(KERNEL, "cpu", genome, KERNEL.binding("cpu", workload), "native")
        folder = tmp_path / genome.digest
        folder.mkdir()
        try:
            return TARGET.compile(source, "native", folder)
        except CompileError:
            return None

    with ThreadPoolExecutor(2) as pool:
        binaries = list(pool.map(compiled, genomes.values()))
    refused = []
    for genome, binary in zip(genomes.values(), binaries, strict=True):
        if binary is not None:
            last = judge(binary, KERNEL.entry, workload)[-1]
            if not last.passed:
                refused.append((last.case, last.reason, dict(genome.parameters)))
    failed = sum(b is None for b in binaries)
    with capsys.disabled():
        print(f" [{dtype}: {len(binaries) - failed} gated, {failed} do not compile]", end="")
    record_property("do_not_compile", failed)
    assert binaries[0] is not None, "the default genome does not compile"
    assert failed <= len(binaries) // 10
    assert not refused


# -- launches -----------------------------------------------------------------------------------------------


class Watched:
    """A loaded entry point that notes what each call was given."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.calls: list[tuple[int, tuple[int, ...], float, float]] = []
        self.poisoned: list[bool] = []

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        x, y = values[0], values[3]
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)
        self.poisoned.append(bool(y.isnan().all()))
        beside = x.as_strided((1,), (1,), x.storage_offset() + x.numel()).item()
        self.calls.append((y.data_ptr(), tuple(x.shape), float(x.sum()), beside))
        self.loaded(values, launch)

    def close(self) -> None:
        self.loaded.close()


def test_the_first_case_is_repeated_in_other_memory_and_on_other_data(
    session: Session, gate: Gate, adversaries: Binary
) -> None:
    watched = Watched(session.load(adversaries, "honest_in_double"))
    cases = KERNEL.cases("cpu", WORKLOAD)[:3]
    checks = gate.run(watched, [(c, KERNEL.launch("cpu", {}, c.workload, session.limits)) for c in cases])
    assert [c.passed for c in checks] == [True] * 3
    main = [call for call in watched.calls if call[1] == (67, 256)][:5]
    addresses, _, sums, beside = zip(*main, strict=True)
    assert [a == addresses[0] for a in addresses] == [True, False, True, False, True]
    assert [s == sums[0] for s in sums] == [True, True, False, True, True]
    assert [b != b for b in beside] == [True, False, False, True, False]  # NaN, or not
    assert len(watched.calls) == 5 + 2  # the other cases are launched once
    assert watched.poisoned == [True] * 4 + [False] + [True] * 2  # once there is another result in its place


def test_every_tensor_has_guards_on_both_sides(gate: Gate) -> None:
    case = KERNEL.cases("cpu", WORKLOAD)[0]
    tensors = [t for t in (*gate.prepare(case).inputs.values(), *gate.prepare(case).outputs.values()) if t is not None]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert len(spans) == 4
    assert all(start - end >= 16 << 10 for (_, end), (start, _) in pairwise(spans))
    whole = tensors[0].untyped_storage()
    assert spans[0][0] - whole.data_ptr() >= 16 << 10
    assert whole.data_ptr() + whole.nbytes() - spans[-1][1] >= 16 << 10


@pytest.mark.parametrize("entry", ["ignores_bias", "half_precision", "writes_past_the_end"])
def test_a_verdict_is_had_again_from_kernel_and_seed(session: Session, adversaries: Binary, entry: str) -> None:
    case = KERNEL.cases("cpu", WORKLOAD)[0]
    loaded = session.load(adversaries, entry)
    launch = KERNEL.launch("cpu", {}, case.workload, session.limits)
    first, again, other = (Gate(KERNEL, "cpu", session, s).run(loaded, [(case, launch)])[0] for s in (4, 4, 5))
    loaded.close()
    assert not first.passed
    assert first == again
    assert first.seed != other.seed
    assert first.error != other.error


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


NAN, INF = float("nan"), float("inf")


def verdict(output: list[float], reference: list[float], *, allowed: float = 0.1) -> tuple[float | None, str]:
    return compare(torch.tensor(output, dtype=torch.float32), expected(reference, allowed=allowed))


def test_what_is_equal_passes_with_error_zero() -> None:
    assert verdict([1.0, -2.0], [1.0, -2.0]) == (0.0, "")


def test_an_error_within_both_bounds_passes_and_is_reported() -> None:
    error, reason = verdict([1.0625, -2.0], [1.0, -2.0])
    assert (error, reason) == (0.0625, "")


def test_an_element_beyond_its_own_bound_is_refused() -> None:
    error, reason = verdict([1.125, -2.0], [1.0, -2.0])
    assert error == 0.125
    assert reason == "1 of 2 elements are outside the tolerance"


def test_an_error_beyond_that_of_pytorch_is_refused_though_within_the_tolerance() -> None:
    error, reason = verdict([1.25, -2.0], [1.0, -2.0], allowed=1.0)
    assert error == 0.25
    assert reason == "error 0.25 exceeds 0.15 (PyTorch: 0.05)"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("reference", [[1.0, 2.0, 3.0], [1.0, 2.0, NAN], [1.0, 2.0, INF]])
def test_a_value_that_is_not_finite_where_one_is_expected_is_refused(value: float, reference: list[float]) -> None:
    _, reason = verdict([1.0, value, reference[2]], reference)
    assert reason


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_must_be_agreed_upon_exactly(value: float) -> None:
    assert verdict([1.0, value], [1.0, value]) == (0.0, "")
    for other in {0.0, 3.4e38, -INF, INF, NAN} - {value}:
        if other != other and value != value:
            continue
        error, reason = verdict([1.0, other], [1.0, value])
        assert error is None
        assert reason == "1 of 1 NaN or Inf of the reference are lost"


def test_a_reference_that_overflows_the_outputs_dtype_expects_inf() -> None:
    wanted = expected([1.0, 1e6], dtype=torch.float16)
    assert compare(torch.tensor([1.0, INF], dtype=torch.float16), wanted) == (0.0, "")
    assert "are lost" in compare(torch.tensor([1.0, 65504.0], dtype=torch.float16), wanted)[1]


def test_nan_left_from_the_poison_is_counted() -> None:
    _, reason = verdict([1.0, NAN, NAN], [1.0, 2.0, 3.0])
    assert reason == "2 of 3 elements are NaN or were never written"


def test_an_empty_output_is_right() -> None:
    assert compare(torch.empty(0, 8), expected([])) == (0.0, "")


# -- cases --------------------------------------------------------------------------------------------------


def test_data_of_a_case_follow_from_the_seed_and_the_case_alone(session: Session) -> None:
    case = KERNEL.cases("cpu", WORKLOAD)[0]
    first, again, other = (Gate(KERNEL, "cpu", session, seed).prepare(case).pristine["x"] for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_case_has_data_of_its_own() -> None:
    seeds = {case_seed(5, case) for case in KERNEL.cases("cpu", WORKLOAD)}
    assert len(seeds) == len({(c.name, c.workload, c.data) for c in KERNEL.cases("cpu", WORKLOAD)})
    assert all(0 <= s < 2**63 for s in seeds)


def drawn(data: str, dtype: str = "float32", cols: int = 256) -> torch.Tensor:
    workload = KERNEL.workload("cpu", f"rows=12,cols={cols},dtype=float32")
    problem = Workload.of(dict(workload.dims), dtype, dict(workload.options))
    x = KERNEL.inputs(problem, data, torch.Generator().manual_seed(2))["x"]
    assert x is not None
    return x


def test_permuted_rows_hold_the_same_elements_in_different_orders() -> None:
    x = drawn("permuted")
    assert torch.equal(x.sort(dim=1).values, x[:1].sort(dim=1).values.expand_as(x))
    assert len({tuple(row.tolist()) for row in x}) == len(x)


def test_a_needle_decides_its_row() -> None:
    x = drawn("needle", "bfloat16", 4096).double()
    centred = x - x.median(dim=1, keepdim=True).values
    largest, column = centred.abs().max(dim=1)
    assert (largest.square() > 0.9 * 4096 * x.var(dim=1, correction=0)).all()
    assert {0, 4095} < set(column.tolist())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_denormals_are_denormal(dtype: str) -> None:
    x = drawn("denormal", dtype)
    small = x.double().abs() < torch.finfo(getattr(torch, dtype)).smallest_normal
    assert small.double().mean() > 0.9
    assert x.count_nonzero() > 0.9 * x.numel()


@pytest.mark.parametrize("cols", [1, 256, 65_536])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_huge_values_leave_float32_room_for_their_squares(dtype: str, cols: int) -> None:
    x = drawn("huge", dtype, cols).double()
    largest = torch.finfo(torch.float32).max
    assert (2 * x).square().sum(dim=1).max() < largest / 2
    assert (x.square().sum(dim=1) > largest / 1e3).any()


def shifted_cases() -> Iterator[str]:
    return (c.name for c in KERNEL.cases("cpu", WORKLOAD) if c.offset)


@pytest.mark.parametrize("name", list(shifted_cases()))
def test_a_shifted_case_misaligns_every_tensor(gate: Gate, name: str) -> None:
    case = next(c for c in KERNEL.cases("cpu", WORKLOAD) if c.name == name)
    prepared = gate.prepare(case)
    values = argument_values(KERNEL, case.workload, prepared.inputs, prepared.outputs)
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    assert len(tensors) == 4
    assert all(t.data_ptr() % 16 == 4 * case.offset for t in tensors)
    assert all(t.is_contiguous() for t in tensors)


def test_comparing_leaves_what_is_compared_as_it_is() -> None:
    """A float64 tensor is its own double(): an error computed in place would be written over it."""
    reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    allowed = torch.full_like(reference, 0.1)
    expected = Expected(
        name="y",
        reference=reference,
        finite=reference.isfinite(),
        allowed=allowed,
        torch_error=0.0,
        largest_allowed=0.1,
        all_finite=True,
    )
    output = torch.tensor([1.0, 5.0], dtype=torch.float64)
    assert "outside the tolerance" in compare(output, expected)[1]
    assert output.tolist() == [1.0, 5.0]


@pytest.mark.parametrize("strict", [0, 2])
def test_error_and_what_is_allowed_are_told_of_one_launch(
    session: Session, gate: Gate, adversaries: Binary, strict: int
) -> None:
    """The one that comes closest: launch 3 is on other data, with another error and another bound."""
    case = KERNEL.cases("cpu", WORKLOAD)[0]
    prepared = gate.prepare(case, repeated=True)
    loaded = session.load(adversaries, "honest_in_float")
    try:
        trials = []
        for number, trial in enumerate(prepared.trials):
            [one] = trial.expected
            bound = 1e-5 if number == strict else 1.0 + number
            trials.append(replace(trial, expected=(replace(one, largest_allowed=bound, torch_error=bound / 2),)))
        launch = KERNEL.launch("cpu", {}, case.workload, session.limits)
        check = gate.check(loaded, launch, replace(prepared, trials=tuple(trials)))
        alone = gate.check(loaded, launch, replace(prepared, trials=(trials[strict],)))
    finally:
        loaded.close()
    assert check.passed, check.reason
    assert (check.allowed, check.torch_error) == (1e-5, 5e-6)
    assert check.error == alone.error


def test_what_candidates_are_judged_by_is_looked_at_after_each_of_them(session: Session, adversaries: Binary) -> None:
    gate = Gate(KERNEL, "cpu", session, seed=12)
    cases = [(c, KERNEL.launch("cpu", {}, c.workload, session.limits)) for c in KERNEL.cases("cpu", WORKLOAD)]
    loaded = session.load(adversaries, "honest_in_double")
    try:
        assert all(c.passed and not c.data_changed for c in gate.run(loaded, cases))
        prepared = gate.prepare(cases[2][0])
        for strayed in (prepared.trials[0].expected[0].allowed, prepared.trials[0].image.bytes, prepared.pristine["x"]):
            assert strayed is not None
            kept = strayed.clone()
            strayed.view(-1)[5] += 1  # as a stray write would
            assert not gate.intact()
            last = gate.run(loaded, cases)[-1]
            assert (last.passed, last.data_changed) == (False, True)
            strayed.copy_(kept)
            assert gate.intact()
            assert gate.run(loaded, cases)[-1].passed
    finally:
        loaded.close()
