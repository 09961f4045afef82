"""A candidate that is right in the gate can be wrong where it is timed: races check the candidates that they time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from evo.evaluation import Check
from evo.measure import harness
from evo.measure.clock import Protocol
from evo.measure.harness import Contender, TimingHarness
from evo.problem.kernel import Launch, LaunchSequence
from evo.problem.loading import load_kernel
from evo.targets import find_target

KERNEL = load_kernel("layernorm")
WORKLOAD = KERNEL.workload("cpu", "rows=64,cols=256,dtype=float32")
LAUNCH = Launch(grid=(1, 1, 1), block=(1, 1, 1))
ONE = LaunchSequence(launches=(LAUNCH,))
COLD = Protocol(name="cold", min_rounds=4, max_rounds=4, sample_us=1.0, precision=1.0, limit_s=600.0)
HOT = replace(COLD, name="hot", cold=False)

Work = Callable[[], None]
Mistake = Callable[[torch.Tensor, torch.Tensor, Work], None]


class Candidate:
    """An entry point in Python. `mistake` is given x, y and what computes y from x."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        x, _, weight, bias, y = values[:5]

        def work() -> None:
            y.copy_(torch.nn.functional.layer_norm(x, (256,), weight, bias, float(values[-1])))  # type: ignore[arg-type]

        self.mistake(x, y, work)

    def close(self) -> None:
        return None


def right(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    work()


def zeros(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    y.zero_()


def leaves_the_last_row(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    kept = y[-1].clone()
    work()
    y[-1] = kept


def keeps_the_larger(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    """A NaN is never the larger: with such poison alone it would seem right."""
    before = y.clone()
    work()
    torch.fmax(before, y, out=y)


def caches_by_pointer() -> Mistake:
    results: dict[int, torch.Tensor] = {}

    def cached(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
        if x.data_ptr() in results:
            y.copy_(results[x.data_ptr()])
            return
        work()
        results[x.data_ptr()] = y.clone()

    return cached


def wrong_now_and_then() -> Mistake:
    """Every fifth call."""
    calls = [0]

    def mistake(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
        work()
        calls[0] += 1
        if calls[0] % 5 == 0:
            y[3, 3] += 1

    return mistake


def changes_x(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    work()
    x[5, 5] = 0


def writes_far_beyond(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    work()
    y.as_strided((3000,), (1,), y.storage_offset() + y.numel()).zero_()


MISTAKES: dict[str, tuple[Callable[[], Mistake], str]] = {
    "writes zeros": (lambda: zeros, "outside the tolerance (in a timed call)"),
    "leaves the last row": (lambda: leaves_the_last_row, "some elements are NaN or were never written (in a timed call)"),
    "keeps the larger": (lambda: keeps_the_larger, "in a timed call"),
    "caches by pointer": (caches_by_pointer, "outside the tolerance (in a timed call)"),
    "is wrong now and then": (wrong_now_and_then, "in a timed call"),
    "changes x": (lambda: changes_x, "input x was changed (in a timed call)"),
    "writes far beyond y": (lambda: writes_far_beyond, "memory outside output y was written"),
}


@pytest.fixture
def bench() -> Iterator[TimingHarness]:
    with torch.no_grad():
        made = TimingHarness(KERNEL, "cpu", WORKLOAD, find_target("cpu").open(), seed=3)
        vars(made)["set_count"] = 8  # not the hundreds that a small problem gets
        yield made


def against_torch(bench: TimingHarness, mistake: Mistake) -> dict[str, Contender]:
    return {
        "candidate": bench.candidate(Candidate(mistake), ONE),
        "torch": bench.baseline(KERNEL.reference_baseline),
    }


def raced(bench: TimingHarness, mistake: Mistake, protocol: Protocol = COLD) -> Check:
    return bench.time(against_torch(bench, mistake), protocol, "torch", checked=("candidate",))[1]["candidate"]


IN_RACES = [(mistake, COLD) for mistake in MISTAKES] + [(m, HOT) for m in MISTAKES if m != "is wrong now and then"]
"""Mistakes and protocols. A hot sample calls one set, so that only the output of its last call can be examined."""


@pytest.mark.parametrize(("mistake", "protocol"), IN_RACES, ids=lambda given: getattr(given, "name", given))
def test_a_race_refuses_a_candidate_that(bench: TimingHarness, mistake: str, protocol: Protocol) -> None:
    make, reason = MISTAKES[mistake]
    entries = {
        "candidate": bench.candidate(Candidate(make()), ONE),
        "incumbent": bench.candidate(Candidate(right), ONE),  # whose right results are in the same outputs
        "torch": bench.baseline(KERNEL.reference_baseline),
    }
    _, checks = bench.time(entries, protocol, "torch", checked=("candidate", "incumbent"))
    check = checks["candidate"]
    assert not check.passed
    assert reason in check.reason
    assert bench.data_changed == ("was written" in reason or "was changed" in reason)
    if not bench.data_changed:
        assert checks["incumbent"].passed


def test_the_first_pair_of_rounds_is_enough_for_most_mistakes(bench: TimingHarness) -> None:
    """After it a candidate that is far behind its incumbent is let go."""
    for make in (lambda: leaves_the_last_row, lambda: keeps_the_larger, caches_by_pointer, lambda: changes_x):
        assert not raced(bench, make(), replace(COLD, min_rounds=2, max_rounds=2)).passed


def test_sets_that_are_not_compared_have_to_agree_bit_for_bit(
    bench: TimingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_LONG_SAMPLE_US", 1e9)  # a sample calls all sets, however slow the machine is
    calls = [0]

    def last_bit_wanders(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
        work()
        calls[0] += 1
        if x.data_ptr() != first and calls[0] % 3 == 0:
            y.view(torch.int32)[7, 7] ^= 1

    x = bench.data.arena.sets[0].inputs["x"]
    first = x.data_ptr()
    assert raced(bench, last_bit_wanders).reason == "another result on the same data (in a timed call)"


@pytest.mark.parametrize("protocol", [COLD, HOT], ids=lambda protocol: protocol.name)
def test_a_candidate_that_is_right_is_not_refused(bench: TimingHarness, protocol: Protocol) -> None:
    check = raced(bench, right, protocol)
    assert check.passed, check.reason
    assert check.error <= check.allowed
    assert bench.data.changed() == ""


def test_of_a_large_output_rows_from_the_first_to_the_last_are_compared(
    bench: TimingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_target("cpu"), "compared_elements", 256 * 8)

    def wrong_at(row: int) -> Mistake:
        def mistake(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
            work()
            y[row] += 1

        return mistake

    refused = {row: not raced(bench, wrong_at(row), HOT).passed for row in (0, 1, 8, 9, 62, 63)}
    assert refused == {0: True, 1: False, 8: False, 9: True, 62: False, 63: True}
    assert not raced(bench, leaves_row_five, HOT).passed  # by its poison


def leaves_row_five(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
    kept = y[5].clone()
    work()
    y[5] = kept


class LateWriter:
    """A stand-in for a GPU's hazards: it writes when the candidate waits for its inputs, or else when it has ended."""

    def __init__(self) -> None:
        self.written: list[Callable[[], object]] = []

    @contextmanager
    def end_late(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor | None]], byte: int
    ) -> Iterator[Callable[[], bool]]:
        found: list[bool] = []

        def look_and_write() -> None:
            for to, source in pieces:
                found.append(bool((to != byte).any()))
                if source is not None:
                    to.copy_(source)

        self.written.append(look_and_write)
        yield lambda: any(found)


BEGINS = {"when it may": "", "with its reads": "read an input", "with its writes": "wrote an output"}


@pytest.mark.parametrize("begins", BEGINS)
def test_a_candidate_that_may_begin_early_has_to_wait_at_the_timed_size(bench: TimingHarness, begins: str) -> None:
    writer = LateWriter()
    bench._session.hazards = writer  # type: ignore[misc, assignment]

    def begins_early(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
        before, early = y.clone(), None
        if begins == "with its reads":
            work()
            early = y.clone()
            y.copy_(before)
        elif begins == "with its writes":
            y[0] = 1.0
        while writer.written:
            writer.written.pop()()
        if early is not None:
            y.copy_(early)
        else:  # also where something was written before, all is right in the end
            work()

    early = LaunchSequence(launches=(replace(LAUNCH, programmatic=True),))
    found = bench.begins_early(bench.candidate(Candidate(begins_early), early))
    assert ("before the kernel before it had ended" in found) == (begins != "when it may")
    assert found.startswith(BEGINS[begins])
    assert bench.data.changed() == ""
    assert bench.begins_early(bench.candidate(Candidate(begins_early), ONE)) == ""


def test_what_may_begin_early_has_its_workspace_between_whole_guards_afterwards() -> None:
    """The races that follow judge it by these."""
    kernel, writer = load_kernel("layernorm_backward"), LateWriter()
    workload, sizes = kernel.workload("cpu", "rows=64,cols=256,dtype=float32"), (("partial", 512),)
    places = [n for n, a in enumerate(kernel.arguments) if a.kind == "output"]

    def begins_when_it_may(values: Sequence[object], launch: Launch) -> None:
        while writer.written:
            writer.written.pop()()
        for place in places:
            values[place].fill_(1)  # type: ignore[attr-defined]

    for early in ((True,), (False, True), (True, True)):
        launches = tuple(replace(LAUNCH, programmatic=programmatic) for programmatic in early)
        with torch.no_grad():
            bench = TimingHarness(kernel, "cpu", workload, find_target("cpu").open(), seed=3)
            vars(bench)["set_count"] = 2
            bench._session.hazards = writer  # type: ignore[misc, assignment]
            sequence = LaunchSequence(launches=launches, workspace=sizes)
            candidate = bench.candidate(begins_when_it_may, sequence)  # type: ignore[arg-type]
            assert bench.begins_early(candidate) == ""
            assert candidate.invocation is not None
            assert candidate.invocation.workspace.tensors
            assert candidate.invocation.workspace.changed() == ""


def test_every_set_has_inputs_of_its_own_and_races_draw_others(bench: TimingHarness) -> None:
    data = bench.data
    inputs = [m.inputs["x"] for m in data.arena.sets] + [data.inputs["x"]]
    data.draw()
    sums = [float(x.double().sum()) for x in (*inputs, data.inputs["x"]) if x is not None]
    assert len(set(sums)) == bench.set_count + 2


def test_what_is_wrong_in_any_one_set_is_found_sooner_or_later(bench: TimingHarness) -> None:
    """Consistently wrong results differ from no earlier ones."""
    first = bench.data.arena.sets[0].outputs["y"].data_ptr()

    def right_in_the_first_set(x: torch.Tensor, y: torch.Tensor, work: Work) -> None:
        work()
        if y.data_ptr() != first:
            y[3, 3] += 1

    refused = [raced(bench, right_in_the_first_set).reason for _ in range(3)]
    assert any("outside the tolerance" in reason for reason in refused)
