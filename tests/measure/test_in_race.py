"""What happens to a candidate that is honest in the gate and not under the clock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from evo.measure import harness
from evo.measure.clock import Protocol
from evo.measure.harness import TimingHarness
from evo.problem.kernel import Launch, load_kernel
from evo.targets import find_target

KERNEL = load_kernel("layernorm")
WORKLOAD = KERNEL.workload("cpu", "rows=64,cols=256,dtype=float32")
LAUNCH = Launch(grid=(1, 1, 1), block=(1, 1, 1))
PROTOCOL = Protocol(name="cold", min_rounds=6, max_rounds=6, sample_us=1.0, precision=1.0, limit_s=600.0)

Call = Callable[[torch.Tensor, torch.Tensor], None]


class Candidate:
    """An entry point in Python. `cheat` may do the work, or not: it is given x, y and what does it."""

    def __init__(self, cheat: Callable[[torch.Tensor, torch.Tensor, Callable[[], None]], None]) -> None:
        self.cheat = cheat

    def __call__(self, values: Sequence[object], launch: Launch) -> None:
        x, weight, bias, y = values[:4]
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)

        def work() -> None:
            y.copy_(torch.nn.functional.layer_norm(x, (256,), weight, bias, float(values[6])))  # type: ignore[arg-type]

        self.cheat(x, y, work)

    def close(self) -> None:
        return None


def honest(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    work()


def skips_what_looks_done(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    ends = y[0, 0].item(), y[-1, -1].item()
    if any(end != end or end == 12288 for end in ends):
        work()


def remembers_samples() -> Callable[..., None]:
    seen: dict[int, torch.Tensor] = {}

    def cheat(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        def look() -> torch.Tensor:
            return torch.cat([x.flatten()[::1100], y.flatten()[::1100]])

        if y.data_ptr() in seen and torch.equal(seen[y.data_ptr()], look()):
            return
        work()
        seen[y.data_ptr()] = look()

    return cheat


def skips_some_rows() -> Callable[..., None]:
    """An eighth of them, where it has been before and what it sees of them is what it left."""
    seen: dict[int, torch.Tensor] = {}

    def cheat(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        def look() -> torch.Tensor:
            return torch.cat([x[:8, ::85].flatten(), y[:8, ::85].flatten()])

        kept = y[:8].clone() if y.data_ptr() in seen and torch.equal(seen[y.data_ptr()], look()) else None
        work()
        if kept is not None:
            y[:8] = kept
        seen[y.data_ptr()] = look()

    return cheat


def remembers_all_inputs() -> Callable[..., None]:
    """Which costs half of the traffic, and is right until somebody changes an output."""
    seen: dict[int, torch.Tensor] = {}

    def cheat(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        if y.data_ptr() in seen and torch.equal(seen[y.data_ptr()], x):
            return
        work()
        seen[y.data_ptr()] = x.clone()

    return cheat


def wrong_now_and_then() -> Callable[..., None]:
    calls = [0]

    def cheat(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        work()
        calls[0] += 1
        if calls[0] % 5 == 0:
            y[3, 3] += 1

    return cheat


def leaves_the_last_row(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    kept = y[-1].clone()
    work()
    y[-1] = kept


def changes_x(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    work()
    x[5, 5] = 0


def writes_after(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    work()
    y.as_strided((64,), (1,), y.storage_offset() + y.numel()).zero_()


def writes_far(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
    work()
    y.as_strided((3000,), (1,), y.storage_offset() + y.numel()).zero_()


CHEATS: dict[str, tuple[Callable[[], Callable[..., None]], str]] = {
    "skips_what_looks_done": (lambda: skips_what_looks_done, "in a timed call"),
    "remembers_samples": (remembers_samples, "in a timed call"),
    "remembers_all_inputs": (remembers_all_inputs, "in a timed call"),
    "wrong_now_and_then": (wrong_now_and_then, "in a timed call"),
    "leaves_the_last_row": (lambda: leaves_the_last_row, "in a timed call"),
    "changes_x": (lambda: changes_x, "input x was changed"),
    "writes_after": (lambda: writes_after, "memory outside output y was written"),
    "writes_far": (lambda: writes_far, "memory outside output y was written"),
}


@pytest.fixture
def bench() -> Iterator[TimingHarness]:
    with torch.no_grad():
        made = TimingHarness(KERNEL, "cpu", WORKLOAD, find_target("cpu").open(), seed=3)
        vars(made)["set_count"] = 40  # not the hundreds that a small problem gets
        yield made


@pytest.mark.parametrize("pick", range(3))
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_finalist_is_refused_that(bench: TimingHarness, cheat: str, pick: int) -> None:
    make, reason = CHEATS[cheat]
    check = bench.try_witnesses(bench.candidate("a", Candidate(make()), LAUNCH), pick)
    assert not check.passed
    assert reason in check.reason
    assert check.data_changed == (cheat in ("changes_x", "writes_after", "writes_far"))


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_race_refuses_a_candidate_that(bench: TimingHarness, cheat: str) -> None:
    make, reason = CHEATS[cheat]
    entries = [
        bench.candidate("candidate", Candidate(make()), LAUNCH),
        bench.candidate("incumbent", Candidate(honest), LAUNCH),  # whose right results are in the same outputs
        bench.baseline(KERNEL.reference_baseline),
    ]
    bench.time(entries, PROTOCOL, "torch", sets=8, examined=("candidate", "incumbent"))
    check = bench.complaint("candidate")
    assert not check.passed
    assert reason in check.reason
    if not check.data_changed:
        assert bench.complaint("incumbent", ran_last=False).passed


@pytest.mark.parametrize("incumbent", [None, 1e6], ids=["alone", "close to an incumbent"])
@pytest.mark.parametrize("cheat", ["skips_what_looks_done", "remembers_samples", "remembers_all_inputs", "skips_some_rows"])
def test_one_look_is_enough_where_races_are_short(bench: TimingHarness, cheat: str, incumbent: float | None) -> None:
    make = CHEATS[cheat][0] if cheat in CHEATS else skips_some_rows
    entries = [
        bench.candidate("candidate", Candidate(make()), LAUNCH),
        bench.baseline(KERNEL.reference_baseline),
    ]
    bench.time(entries, PROTOCOL, "torch", sets=12, examined=("candidate",), share=0.0, incumbent=incumbent)
    assert not bench.complaint("candidate").passed


def test_nobody_finds_his_results_when_he_is_timed(bench: TimingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is always right: the lowest bits of its output say of which inputs it is the result. Where they do
    it would return at once."""
    monkeypatch.setattr(harness, "_LONG_SAMPLE_US", 1e9)  # a sample calls all sets, however slow the machine is
    spared, called, first = [0], [0], bench.data.arena.sets[0].inputs["x"]  # which is called to guess the time of a call
    assert first is not None

    def remembers_in_the_output(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        words, bits = y.view(torch.int32).flatten(), torch.arange(32, dtype=torch.int32)

        def digest() -> torch.Tensor:
            seen = hash((x.numpy().tobytes(), (words & ~1).numpy().tobytes()))
            return torch.tensor(seen & 0xFFFFFFFF, dtype=torch.int64).bitwise_right_shift(bits).int() & 1

        called[0] += 1
        if x.data_ptr() != first.data_ptr() and torch.equal(words[:32] & 1, digest()) and not (words[32:] & 1).any():
            spared[0] += 1
            return
        work()
        words &= ~1
        words[:32] |= digest()

    entries = [
        bench.candidate("candidate", Candidate(remembers_in_the_output), LAUNCH),
        bench.candidate("incumbent", Candidate(remembers_in_the_output), LAUNCH),
        bench.baseline(KERNEL.reference_baseline),
    ]
    for share in (None, 0.0):
        bench.time(entries, PROTOCOL, "torch", examined=("candidate",), share=share)
        check = bench.complaint("candidate")
        assert check.passed, check.reason
    assert called[0] > 1000
    assert spared[0] == 3 * (bench.set_count - 1)  # in the warm-ups, which are not timed: all but the very first


@pytest.mark.parametrize("pick", range(6))
def test_a_single_write_beside_one_buffer_set_is_found_at_once(bench: TimingHarness, pick: int) -> None:
    witnesses = {w.index for w in bench.data.witnesses}
    struck = [m.inputs["x"] for i, m in enumerate(bench.data.arena.sets[:12]) if i not in witnesses][pick]
    assert struck is not None

    def writes_beside_one(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        work()
        if x.data_ptr() == struck.data_ptr():
            y.as_strided((1,), (1,), y.storage_offset() + y.numel()).zero_()

    entries = [
        bench.candidate("candidate", Candidate(writes_beside_one), LAUNCH),
        bench.baseline(KERNEL.reference_baseline),
    ]
    rules = replace(PROTOCOL, sample_us=1e6)  # every set is called
    bench.time(entries, rules, "torch", sets=12, examined=("candidate",), pick=pick)
    check = bench.complaint("candidate")
    assert check.data_changed
    assert bench.complaint("candidate") is check


@pytest.mark.parametrize("pick", range(5))
def test_an_honest_candidate_is_not_refused(bench: TimingHarness, pick: int) -> None:
    entry = bench.candidate("candidate", Candidate(honest), LAUNCH)
    assert bench.try_witnesses(entry, pick).passed
    entries = [entry, bench.baseline(KERNEL.reference_baseline)]
    for sets in (8, 1):
        bench.time(entries, PROTOCOL, "torch", sets=sets, examined=("candidate",), pick=pick)
        check = bench.complaint("candidate")
        assert check.passed, check.reason
        assert check.error is not None


class LateWriter:
    """In place of a GPU's: writes before the next call, as that has to see it, or `early`, after it."""

    def __init__(self) -> None:
        self.written: list[Callable[[], object]] = []

    @contextmanager
    def write_late(self, to: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
        self.written.append(lambda: to.copy_(source))
        yield


@pytest.mark.parametrize("waits", [True, False])
def test_who_may_begin_early_has_to_wait_for_its_inputs_at_the_timed_size(bench: TimingHarness, waits: bool) -> None:
    writer = LateWriter()
    bench._session.hazards = writer  # type: ignore[misc, assignment]

    def begins_early(x: torch.Tensor, y: torch.Tensor, work: Callable[[], None]) -> None:
        if not waits:
            work()
        while writer.written:
            writer.written.pop()()
        if waits:
            work()

    entry = bench.candidate("a", Candidate(begins_early), replace(LAUNCH, programmatic=True))
    reason = bench.reads_early(entry)
    assert ("read an input before" in reason) == (not waits)
    assert bench.data.changed() == ""
    assert bench.reads_early(replace(entry, programmatic=False)) == ""


def test_work_that_is_not_done_when_a_call_returns_is_refused(bench: TimingHarness) -> None:
    jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def serve() -> None:
        while (job := jobs.get()) is not None:
            time.sleep(0.005)
            job()

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        entry = bench.candidate("a", Candidate(lambda x, y, work: jobs.put(work)), LAUNCH)
        check = bench.try_witnesses(entry, 1)
    finally:
        jobs.put(None)
        worker.join()
    assert not check.passed


def test_a_walk_takes_the_sets_in_an_order_of_chance_with_the_witnesses_among_them(bench: TimingHarness) -> None:
    witnesses = {w.index for w in bench.data.witnesses}
    walks = [bench._walk(bench.set_count, 20) for _ in range(10)]
    assert len(set(walks)) == 10
    assert all(witnesses <= set(walk) and len(set(walk)) == len(walk) == 20 for walk in walks)
    for walk in walks:  # the others are neighbours: only of such can many be looked at
        others = set(range(bench.set_count)) - witnesses
        assert len({i - sum(w < i for w in witnesses) - n for n, i in enumerate(sorted(set(walk) & others))}) == 1


def test_timed_tensors_lie_between_guards(bench: TimingHarness) -> None:
    data = bench.data
    tensors = [t for m in data.arena.sets[:3] for t in (*m.inputs.values(), *m.outputs.values()) if t is not None]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(start - end >= 16 << 10 for (_, end), (start, _) in pairwise(spans))
    assert data.changed() == ""


def test_one_slice_of_a_witness_is_enough_to_tell_old_results_from_new(bench: TimingHarness) -> None:
    fresh, block = (w.versions[0] for w in bench.data.witnesses)
    assert not fresh.slices
    assert len(block.slices) == 1
    (parts,) = block.parts.values()
    assert 1 <= len(parts[0].expected.reference) <= 64
