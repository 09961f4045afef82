"""The clock: how long a call takes, compared with a reference, and how sure that is.

Contenders are prepared once (a CUDA graph of many calls on a GPU, a plain loop on a CPU) and then run in
interleaved rounds whose order alternates (ABBA, then BAAB), so that drifting clocks and other programs affect all alike.
Cold: the cache is filled with other data before every sample, and the calls of a sample walk over sets of inputs
and outputs, each used once, so that every call finds its data in memory. Hot: all calls use one set. A time is the median
over rounds, with a bootstrap interval; a speed-up is the median of the ratios within rounds (Efron & Tibshirani 1993,
ch. 13).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evo.evaluation import BOOTSTRAP_SAMPLES, Gain, Timing

if TYPE_CHECKING:
    from evo.measure.race_check import RaceCheck  # imports PyTorch
    from evo.targets import Replay, Session

COLD_CACHE_MULTIPLE = 3
"""Cold sets together hold at least this many times the last-level cache: the part of a sample's writes that is still in
the cache at its end is small."""
_MAX_SETS = 512
_HOPELESS = 1.1
"""A candidate is let go when every sample of the first pairs is slower than its incumbent by this factor."""
CLOSE = 1.02
"""A candidate within this factor of its incumbent gets twice the rounds, for an interval half as wide."""
OVERTIME, _VAIN = 2.0, 0.3
"""A race with disturbed rounds ends after so many times its limit; one with disturbed rounds alone, after such a share of
it. On a busy machine a pair of rounds can take half a minute."""
_BOOTSTRAP_RESAMPLES = 400
USUAL_RACES, _LEAST_RACES = 64, 8
"""Largest and least number of last races that tell the reference's usual time."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The rules of a race.

    min_rounds, max_rounds: number of rounds; more than the least while the relative interval of a contender's ratio is wider
    than `precision`. sample_us: least duration of a sample, so that fixed costs vanish in it. cold: no call finds its data
    in the cache. limit_s: wall time after which a race ends with the next pair of rounds; on a busy machine a call of
    several threads can take a scheduler's time slice, a hundred times as long as usual. least_rounds: undisturbed rounds
    that are taken however long they last. far: a sample that takes so many times its contender's least disturbs its round.
    pause_s: longest pause after a disturbed pair of rounds, which waits for a burst of load to end.
    """

    name: str
    min_rounds: int
    max_rounds: int
    sample_us: float
    cold: bool = True
    precision: float = 0.01
    limit_s: float = 60.0
    least_rounds: int = 2
    far: float = 2.0
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Microseconds per call, one row a round, one column a contender. discarded: number of disturbed rounds that were taken
    again. disturbed: number of disturbed rounds that were kept, for there were too few others."""

    names: tuple[str, ...]
    us: NDArray[np.float64]
    discarded: int = 0
    disturbed: int = 0


def sets_for(set_bytes: int, cache_bytes: int, memory_bytes: int, walk_bytes: int = 0) -> int:
    """Number of buffer sets for a cold race: several times the cache and at least `walk_bytes`, so that a walk over them
    lasts long enough to be timed, within a quarter of the memory."""
    wanted = -(-max(COLD_CACHE_MULTIPLE * cache_bytes, walk_bytes, 1) // max(set_bytes, 1)) + 1
    affordable = max(2, memory_bytes // 4 // max(set_bytes, 1))
    return int(max(2, min(wanted, affordable, _MAX_SETS)))


def calls_for(
    protocol: Protocol, call_us: float, *, sets: int, set_bytes: int, cache_bytes: int, longest_us: float = math.inf
) -> int:
    """Number of calls in a sample that lasts as long as the protocol wants. A cold sample uses no set twice, and walks over
    several times the cache, as far as there are sets for it and that takes no longer than `longest_us`."""
    call_us = max(call_us, 1e-3)
    wanted = max(1, math.ceil(protocol.sample_us / call_us))
    if not protocol.cold:
        return wanted
    walk = -(-COLD_CACHE_MULTIPLE * cache_bytes // max(set_bytes, 1)) + 1
    if walk * call_us > longest_us:
        walk = max(2, math.ceil(longest_us / call_us))
    return min(sets, max(walk, wanted))


def usual_us(medians_us: Sequence[float]) -> float:
    """Time of an undisturbed reference, by its medians in races: one in ten is less. Infinite where too few are known."""
    last = sorted(medians_us[-USUAL_RACES:])
    return last[len(last) // 10] if len(last) >= _LEAST_RACES else math.inf


def race(
    session: Session,
    contenders: Mapping[str, Replay],
    protocol: Protocol,
    reference: str,
    *,
    incumbent: float | None = None,
    check: RaceCheck | None = None,
    patient: bool = True,
    reference_us: float = math.inf,
) -> Samples:
    """Runs the contenders in interleaved rounds, a pair of rounds at a time, forth and back (ABBA); the next pair begins
    with the next contender. The race ends when the intervals of the ratios to `reference` are narrow enough.

    incumbent: the ratio that the first contender has to beat; a contender that is clearly worse is let go after the first
    pair, one that is close runs longer. check: examines the samples, untimed, and before the cache is filled with other
    data. patient: disturbed pairs are taken again, as long as the race has time for it; otherwise they count as others do. A
    pair is disturbed if the session says so, or if one of its samples is far from its contender's least: the least of this
    race or, for the reference, `reference_us`, its usual time on this machine.
    """
    names = tuple(contenders)
    began = time.monotonic()
    usual = np.array([reference_us if name == reference else math.inf for name in names])

    def sample_us(name: str) -> float:
        if check is not None:
            check.before(name)
        if protocol.cold:
            session.evict()
        us = contenders[name].run_us()
        if check is not None:
            check.after(name)
        return us

    for name in names:  # warm up
        sample_us(name)
    session.synchronize()
    rounds: list[list[float]] = []
    quiet: list[bool] = []
    order, most, precision, pause_s = names, protocol.max_rounds, protocol.precision, 0.0
    while True:
        session.disturbance()  # forgets earlier disturbances
        for turn in (order, order[::-1]):  # whole pairs, in which all have the same mean place
            sample = {name: sample_us(name) for name in turn}
            rounds.append([sample[name] for name in names])
        order = order[1:] + order[:1]  # the first of a pair runs on a device that has waited
        quiet += [not session.disturbance()] * 2
        taken = np.array(rounds)
        near = (taken <= protocol.far * np.minimum(taken.min(axis=0), usual)).all(axis=1)
        clean = np.array(quiet) & near.reshape(-1, 2).all(axis=1).repeat(2)
        us = taken[clean] if patient else taken
        limits = (time.monotonic() - began) / max(protocol.limit_s, 1e-9)
        if len(taken) >= 2 * most or len(us) >= most or (limits >= 1 and len(us) >= protocol.least_rounds):
            break
        if limits >= (math.inf if clean.all() else OVERTIME if clean.any() else _VAIN):
            break
        pause_s = 0.0 if clean[-1] or not patient else min(max(2 * pause_s, protocol.pause_s / 64), protocol.pause_s)
        if pause_s:
            time.sleep(pause_s)
        if not len(us):
            continue
        if incumbent is not None:
            ratios = us[:, 0] / us[:, names.index(reference)]
            if ratios.min() > _HOPELESS * incumbent:
                break
            close = bool(np.median(ratios) <= CLOSE * incumbent)
            most = protocol.max_rounds * (2 if close else 1)
            precision = protocol.precision / (2 if close else 1)
        if len(us) >= protocol.min_rounds and _widest(us, names, reference) <= precision:
            break
    # Without patience the race ended when there were enough of both: all of them count.
    spoilt = len(taken) - int(clean.sum())
    wanted = max(min(protocol.min_rounds, spoilt), protocol.least_rounds)
    enough = len(us) >= wanted if patient else not spoilt
    return Samples(
        names=names,
        us=us if enough else taken,
        discarded=spoilt if enough else 0,
        disturbed=0 if enough else spoilt,
    )


def summarise(
    samples: Samples,
    name: str,
    *,
    workload: str,
    protocol: str,
    reference: str,
    calls: int,
    sets: int,
    clocks: Mapping[str, float],
) -> Timing:
    """The Timing of one contender of a race. Its `clocks` include the numbers of discarded and of disturbed rounds."""
    own = samples.us[:, samples.names.index(name)]
    low, high = interval(own)
    ratio = ratio_low = ratio_high = None
    if reference != name:
        ratios = own / samples.us[:, samples.names.index(reference)]
        ratio = float(np.median(ratios))
        ratio_low, ratio_high = interval(ratios)
    return Timing(
        workload=workload,
        contender=name,
        protocol=protocol,
        median_us=float(np.median(own)),
        low_us=low,
        high_us=high,
        samples_us=tuple(round(float(v), 4) for v in own),
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        calls_per_sample=calls,
        sets=sets,
        clocks={**clocks, "discarded": float(samples.discarded), "disturbed": float(samples.disturbed)},
    )


def noise_floor(first_us: Sequence[float], second_us: Sequence[float]) -> float:
    """The speed-up that a kernel seems to have over itself: the distance from 1 that the 95% interval of the ratio of its
    two times, round by round in one race (A/A), reaches."""
    low, high = interval(np.array(first_us) / np.array(second_us))
    return max(abs(low - 1.0), abs(high - 1.0))


def paired_gain(before_us: Sequence[float], after_us: Sequence[float]) -> Gain:
    """One contender's time over another's, with its interval; above 1, the other is faster. Both come from the same rounds
    of one race, so that drift cancels."""
    logs = np.log(np.asarray(before_us, dtype=np.float64)) - np.log(np.asarray(after_us, dtype=np.float64))
    low, high = interval(logs)
    return Gain(gain=math.exp(float(np.median(logs))), low=math.exp(low), high=math.exp(high))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Interval of the median, with the confidence that `Timing` names: the whole range of few samples, for which a bootstrap
    would be too narrow; a percentile bootstrap of more, seeded, so that equal samples agree.

    The bootstrap draws blocks of successive samples, from a circle: noise that lasts longer than a round correlates
    neighbours, and single draws would take them for independent (Politis & Romano 1992).
    """
    n = len(values)
    if n < BOOTSTRAP_SAMPLES:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(0)
    length = block_length(values)
    starts = rng.integers(0, n, size=(_BOOTSTRAP_RESAMPLES, -(-n // length)))
    picks = (starts[:, :, None] + np.arange(length)).reshape(_BOOTSTRAP_RESAMPLES, -1)[:, :n] % n
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return float(low), float(high)


def block_length(values: NDArray[np.float64]) -> int:
    """Number of samples in a block, by the correlation of neighbours: 1 where they are independent. Carlstein (1986), for
    autoregressive noise of first order; from ranks, so that an outlier does not hide the correlation."""
    n = len(values)
    ranks = np.argsort(np.argsort(values)) - (n - 1) / 2
    correlation = float((ranks[:-1] * ranks[1:]).sum() / max((ranks**2).sum(), 1e-9))
    correlation = min(correlation, 0.95)
    if correlation <= 1 / math.sqrt(n):  # no more than chance makes of independent samples
        return 1
    wanted = float((math.sqrt(6) * correlation / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3))
    return max(1, min(math.ceil(wanted), n // 3))


def _widest(us: NDArray[np.float64], names: Sequence[str], reference: str) -> float:
    """The widest relative interval among the contenders' ratios."""
    widest = 0.0
    for i, name in enumerate(names):
        if name != reference:
            ratios = us[:, i] / us[:, names.index(reference)]
            low, high = interval(ratios)
            widest = max(widest, (high - low) / float(np.median(ratios)))
    return widest
