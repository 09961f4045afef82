"""The clock's arithmetic: how many sets, calls and rounds, in what order, and what is made of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, cycle, islice
from time import monotonic

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evo.evaluation import Timing
from evo.measure.clock import (
    COLD_CACHE_MULTIPLE,
    Protocol,
    Samples,
    calls_for,
    interval,
    noise_floor,
    race,
    sets_for,
    summarise,
    usual_us,
)

MIB, GIB = 1 << 20, 1 << 30

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


class Device:
    """A session as far as the clock needs one."""

    def __init__(self, log: list[str] | None = None, disturbances: Iterable[str] = ()) -> None:
        self.log = [] if log is None else log
        self.disturbances = iter(disturbances)

    def evict(self) -> None:
        self.log.append("-")

    def disturbance(self) -> str:
        return next(self.disturbances, "")

    def synchronize(self) -> None:
        return None


class Scripted:
    """A replay whose runs last as long as the script says."""

    def __init__(self, name: str, script: Iterator[float], log: list[str]) -> None:
        self.name, self.script, self.log = name, script, log

    def run_us(self) -> float:
        self.log.append(self.name)
        return next(self.script)


def forever(values: Iterable[float]) -> Iterator[float]:
    kept = list(values)
    while True:
        yield from kept


def protocol(low: int, high: int, precision: float = 0.01, *, cold: bool = True) -> Protocol:
    return Protocol(
        name="cold" if cold else "hot",
        min_rounds=low,
        max_rounds=high,
        sample_us=100,
        precision=precision,
        cold=cold,
        far=math.inf,
    )


def run(scripts: dict[str, Iterable[float]], rules: Protocol, reference: str) -> tuple[Samples, list[str]]:
    """The samples, and who ran in what order. Before them each contender runs once, to warm up, and takes a second."""
    log: list[str] = []
    contenders = {name: Scripted(name, chain([1e6], forever(script)), log) for name, script in scripts.items()}
    return race(Device(), contenders, rules, reference), log  # type: ignore[arg-type]


# -- sets and calls -----------------------------------------------------------------------------------------


@relaxed
@given(st.integers(1, 8 * GIB), st.integers(0, 512 * MIB), st.integers(MIB, 200 * GIB))
def test_sets_exceed_the_cache_unless_memory_or_reason_forbids(set_bytes: int, cache: int, memory: int) -> None:
    sets = sets_for(set_bytes, cache, memory)
    assert 2 <= sets <= 512
    beyond_cache = (sets - 1) * set_bytes >= COLD_CACHE_MULTIPLE * cache
    at_the_limit = sets == 512 or (sets + 1) * set_bytes > memory // 4
    assert beyond_cache or at_the_limit
    assert sets == 2 or sets * set_bytes <= memory // 4


@pytest.mark.parametrize(("memory", "walk_bytes", "sets"), [(80 * GIB, 0, 4), (80 * GIB, GIB, 17), (GIB, GIB, 4)])
def test_sets_hold_three_times_the_cache_and_as_much_as_a_walk_takes(memory: int, walk_bytes: int, sets: int) -> None:
    assert sets_for(64 * MIB, 50 * MIB, memory, walk_bytes) == sets


@relaxed
@given(st.integers(1, 512), st.integers(1, 8 * GIB), st.integers(0, 512 * MIB), st.floats(0, 1e6), st.floats(1, 1e6))
def test_a_cold_sample_uses_no_set_twice_and_exceeds_the_cache_if_the_sets_do(
    sets: int, set_bytes: int, cache: int, call_us: float, sample_us: float
) -> None:
    rules = replace(protocol(2, 2), sample_us=sample_us)
    calls = calls_for(rules, call_us, sets=sets, set_bytes=set_bytes, cache_bytes=cache)
    assert 1 <= calls <= sets
    assert calls == sets or calls * set_bytes >= COLD_CACHE_MULTIPLE * cache
    assert calls == sets or calls * call_us >= sample_us or call_us < 1e-3


@relaxed
@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_hot_sample_lasts_as_long_as_wanted_and_not_a_call_longer(call_us: float, sample_us: float) -> None:
    rules = replace(protocol(2, 2, cold=False), sample_us=sample_us)
    calls = calls_for(rules, call_us, sets=1, set_bytes=1, cache_bytes=1)
    assert calls * call_us >= sample_us * (1 - 1e-9)
    assert calls == 1 or (calls - 1) * call_us < sample_us * (1 + 1e-9)


# -- the race -----------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_alternate_in_order_and_each_contender_leads_a_pair_in_turn() -> None:
    _, log = run({"a": [1.0], "b": [2.0], "c": [3.0]}, protocol(8, 8), "b")
    assert "".join(log) == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac" + "abc" + "cba"


def test_samples_are_told_by_contender_whatever_the_order_they_ran_in() -> None:
    samples, _ = run({"a": [1.0, 2.0, 3.0, 4.0], "b": [10.0, 20.0, 30.0, 40.0]}, protocol(4, 4), "b")
    assert samples.names == ("a", "b")
    assert samples.us.tolist() == [[1, 10], [2, 20], [3, 30], [4, 40]]


NOISE = np.random.default_rng(1).lognormal(sigma=1.0, size=200)
DRIFT = np.linspace(1.0, 3.0, 40)


@pytest.mark.parametrize(
    ("own", "reference", "precision", "rounds"),
    [
        ([1.0], [2.0], 0.01, 6),
        (NOISE, [2.0], 0.01, 40),
        (DRIFT, 2 * DRIFT, 0.01, 6),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.1], [1.0], 0.05, 10),  # a bootstrap of six would be too narrow
    ],
    ids=["steady", "noisy", "shared drift", "a few samples"],
)
def test_a_race_ends_when_the_intervals_of_its_ratios_are_narrow(
    own: Iterable[float], reference: Iterable[float], precision: float, rounds: int
) -> None:
    samples, _ = run({"a": own, "b": reference}, protocol(6, 40, precision), "b")
    assert len(samples.us) == rounds


def disturbed_race(disturbances: Iterable[str], rules: Protocol, *, patient: bool = True) -> Samples:
    """One contender that takes 1, 2, 3, ... us. A race asks before each pair of rounds, and after it."""
    device = Device(disturbances=(word for found in disturbances for word in ("", found)))
    counting = iter(float(i) for i in range(1000))
    return race(device, {"a": Scripted("a", counting, [])}, rules, "a", patient=patient)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("disturbances", "patient", "rounds", "discarded", "disturbed"),
    [
        (["", "noise", "", "noise", ""], True, [1, 2, 5, 6, 9, 10], 4, 0),
        (["noise"] * 6, True, range(1, 13), 0, 12),
        (["noise"] * 3, False, range(1, 7), 0, 6),
        (["noise", "", ""], False, range(1, 7), 0, 2),
        (["", "", ""], False, range(1, 7), 0, 0),
    ],
)
def test_rounds_that_something_disturbed_are_taken_again_while_there_is_patience_and_always_told(
    disturbances: list[str], patient: bool, rounds: Iterable[int], discarded: int, disturbed: int
) -> None:
    samples = disturbed_race(disturbances, protocol(6, 6), patient=patient)
    assert samples.us[:, 0].tolist() == [*rounds]
    assert (samples.discarded, samples.disturbed) == (discarded, disturbed)


def rounds_against(incumbent: float | None, ratio: float) -> int:
    noise = np.random.default_rng(3).normal(1.0, 0.02, size=400)
    contenders = {"a": Scripted("a", forever(ratio * noise), []), "b": Scripted("b", forever([1.0]), [])}
    rules = protocol(6, 20, precision=0.001)
    return len(race(Device(), contenders, rules, "b", incumbent=incumbent).us)  # type: ignore[arg-type]


def test_a_candidate_that_is_clearly_worse_than_its_incumbent_is_let_go_after_a_pair_of_rounds() -> None:
    assert rounds_against(incumbent=0.5, ratio=0.7) == 2
    assert rounds_against(incumbent=None, ratio=0.7) == 20


def test_a_candidate_that_is_close_to_its_incumbent_runs_longer() -> None:
    assert rounds_against(incumbent=0.7, ratio=0.7) == 40
    assert rounds_against(incumbent=0.7, ratio=0.5) == 40
    assert rounds_against(incumbent=0.66, ratio=0.7) == 20


class Noting:
    """A check that notes when it is asked."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def before(self, name: str) -> None:
        self.log.append(f"<{name}")

    def after(self, name: str) -> None:
        self.log.append(f"{name}>")


@pytest.mark.parametrize(
    ("cold", "checked", "seen"),
    [(True, False, "-a-b-a-b-b-a"), (False, False, "ababba"), (True, True, "<a-aa><b-bb><a-aa><b-bb><b-bb><a-aa>")],
)
def test_the_cache_is_filled_before_every_cold_sample_and_no_hot_one_and_not_between_a_check_and_its_sample(
    cold: bool, checked: bool, seen: str
) -> None:
    log: list[str] = []
    contenders = {name: Scripted(name, forever([1.0]), log) for name in "ab"}
    rules, check = protocol(2, 2, cold=cold), Noting(log) if checked else None
    race(Device(log), contenders, rules, "b", check=check)  # type: ignore[arg-type]
    assert "".join(log) == seen


def test_the_noise_floor_is_what_a_kernel_seems_to_gain_over_itself() -> None:
    rng = np.random.default_rng(4)
    first, second = (rng.normal(10.0, 0.1, size=40).tolist() for _ in range(2))
    assert 0.0005 < noise_floor(first, second) < 0.01
    assert noise_floor(first, first) == 0.0
    assert noise_floor([10.0] * 20, [10.5] * 20) == pytest.approx(0.5 / 10.5)


# -- the interval -------------------------------------------------------------------------------------------

samples_us = st.lists(st.floats(0.1, 1e6), min_size=2, max_size=60)


@relaxed
@given(samples_us)
def test_the_interval_holds_the_median_and_stays_within_the_samples(values: list[float]) -> None:
    low, high = interval(np.array(values))
    assert min(values) <= low <= high <= max(values)
    if len(set(values)) == 1:
        assert low == high == values[0]
    if len(values) >= 10:
        assert low <= np.median(values) <= high


def correlated(rng: np.random.Generator, likeness: float, count: int) -> np.ndarray:
    """Noise about 1 that lasts longer than a round."""
    noise = np.zeros(count)
    for i in range(1, count):
        noise[i] = likeness * noise[i - 1] + rng.normal() * np.sqrt(1 - likeness**2)
    return np.exp(0.03 * noise)


def test_noise_that_lasts_longer_than_a_round_makes_the_interval_wider() -> None:
    rng = np.random.default_rng(6)
    held = {0.0: 0, 0.7: 0}
    for likeness in held:
        for _ in range(300):
            low, high = interval(correlated(rng, likeness, 60)[20:])
            held[likeness] += low <= 1.0 <= high
    assert held[0.0] / 300 >= 0.9
    assert held[0.7] / 300 >= 0.75  # single draws: 0.6


@pytest.mark.parametrize(("samples", "confidence"), [(2, 0.5), (4, 0.875), (6, 0.96875), (10, 0.95), (60, 0.95)])
def test_an_interval_says_how_often_it_holds_the_median(samples: int, confidence: float) -> None:
    rng = np.random.default_rng(8)
    held = 0
    for _ in range(500):
        low, high = interval(rng.normal(size=samples))
        held += low <= 0.0 <= high
    assert held / 500 == pytest.approx(confidence, abs=0.06)


# -- the summary --------------------------------------------------------------------------------------------


def summary(us: list[list[float]], name: str) -> Timing:
    samples = Samples(names=("candidate", "torch"), us=np.array(us))
    how = {"calls": 96, "sets": 12, "clocks": {"sm_mhz": 1980.0}}
    return summarise(samples, name, workload="w", protocol="cold", reference="torch", **how)  # type: ignore[arg-type]


def test_the_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    us = [[1.0, 2.0], [10.0, 20.0], [30.0, 40.0]]
    timing = summary(us, "candidate")
    assert timing.ratio == 0.5
    assert timing.median_us == 10.0
    assert 0.5 <= timing.ratio_low <= timing.ratio <= timing.ratio_high <= 0.75
    assert timing.samples_us == (1.0, 10.0, 30.0)


def test_a_summary_of_the_reference_has_no_ratio_and_says_how_it_was_come_by() -> None:
    timing = summary([[1.0, 2.0]] * 4, "torch")
    assert (timing.ratio, timing.ratio_low, timing.ratio_high) == (None, None, None)
    assert (timing.workload, timing.protocol, timing.contender) == ("w", "cold", "torch")
    assert (timing.calls_per_sample, timing.sets) == (96, 12)
    assert timing.clocks == {"sm_mhz": 1980.0, "discarded": 0.0, "disturbed": 0.0}


def test_a_race_that_time_ends_has_its_least_number_of_rounds_or_says_what_disturbed_them() -> None:
    rules = replace(protocol(20, 40), limit_s=0.0)
    assert len(disturbed_race([""], rules).us) == 2
    rules = replace(rules, least_rounds=10)  # as many as a bootstrap needs
    samples = disturbed_race(["", "", "", "", ""], rules)
    assert (len(samples.us), samples.discarded, samples.disturbed) == (10, 0, 0)
    samples = disturbed_race(["", "", "noise", "", "noise"], rules)
    assert (len(samples.us), samples.discarded, samples.disturbed) == (6, 0, 2)  # not worth the time of the rest


# Microseconds a call of PyTorch and of two candidates on a 2-core machine, LayerNorm 4096x1024 float32: when it was quiet,
# and while something beside it took the memory's bandwidth, so that no thread waited for a core.
QUIET = {"torch": [1212.4, 1202.9, 1222.0, 1290.8], "two": [981.4, 972.0, 998.1, 1027.3], "one": [1298.1, 1307.5, 1306.7]}
SLOWED = {"torch": [1856.0, 1944.1, 1801.5, 1887.2], "two": [1529.3, 1747.2, 1609.8], "one": [3196.8, 1416.1, 3071.4]}


def mixed(*spells: dict[str, list[float]], reference_us: float = math.inf) -> Samples:
    """A race through spells of 12 rounds each."""
    scripts = {n: [us for spell in spells for us in islice(cycle(spell[n]), 12)] for n in QUIET}
    contenders = {n: Scripted(n, chain(script[:1], script), []) for n, script in scripts.items()}
    rules = replace(protocol(12 * len(spells), 6 * len(spells)), far=1.25)
    return race(Device(), contenders, rules, "torch", reference_us=reference_us)  # type: ignore[arg-type]


def test_rounds_in_which_a_contender_was_far_from_its_best_are_discarded() -> None:
    samples = mixed(QUIET, SLOWED, SLOWED, QUIET)
    ratio = float(np.median(samples.us[:, samples.names.index("one")] / samples.us[:, samples.names.index("torch")]))
    assert samples.discarded == 24
    assert samples.disturbed == 0
    assert ratio == pytest.approx(1.07, rel=0.02)


def test_a_race_that_is_slow_from_end_to_end_is_disturbed_as_far_as_the_usual_time_is_known() -> None:
    even = {n: [us[0]] for n, us in SLOWED.items()}
    assert mixed(even).disturbed == 0
    assert mixed(even, reference_us=usual_us([1212.0] * 10)).disturbed == 12
    assert mixed(even, reference_us=usual_us([1212.0] * 7)).disturbed == 0, "too few to know it"
    assert mixed(QUIET, reference_us=usual_us([1212.0] * 10)).disturbed == 0


def test_one_burst_of_load_is_waited_out() -> None:
    """Half of a second during which every pair of rounds is disturbed, in a race whose rounds take no time."""
    began = monotonic()

    class Bursting(Device):
        def disturbance(self) -> str:
            return "noise" if monotonic() - began < 0.5 else ""

    counting = {n: Scripted(n, forever([us[0]]), []) for n, us in QUIET.items()}
    samples = race(Bursting(), counting, replace(protocol(6, 20), pause_s=0.2), "torch")  # type: ignore[arg-type]
    assert samples.disturbed == 0
    assert samples.discarded >= 2
    assert 0.5 <= monotonic() - began < 5
