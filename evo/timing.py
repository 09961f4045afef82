"""The clock: how long does a call take, against what, and how sure is that?

Contenders are prepared once (a CUDA graph of many calls on a GPU, a plain loop on a CPU) and then run in
interleaved rounds whose order alternates (ABBA), so that drift of clocks and neighbours hits all of them alike.
Cold: the cache is filled with other data before every sample, and the calls of a sample walk over sets of inputs
and outputs, each used once, so that every call finds its data in memory. Hot: all calls use one set. The figure
is the median over rounds, with a bootstrap interval; the speed-up is the median of the ratios within rounds (Efron &
Tibshirani 1993, ch. 13).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evo.evaluation import Timing

if TYPE_CHECKING:
    from evo.targets import Replay, Session

__all__ = ["COLD_CACHE_MULTIPLE", "Protocol", "Samples", "calls_for", "cold_calls", "race", "sets_for", "summarise"]

COLD_CACHE_MULTIPLE = 3
"""Cold sets together hold at least this many times the last-level cache: what a sample leaves in it unwritten is
a small part of what it moved."""

_MAX_SETS = 512
_BOOTSTRAP_RESAMPLES = 400
_BOOTSTRAP_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a race is run.

    sample_us: time one sample of one contender should take at least, so that fixed costs vanish in it.
    cold: no call finds its data in the cache, whatever ran before and whatever hints it gives the cache.
    rounds: at least `min_rounds`; up to `max_rounds` while the interval of a contender's ratio is wider than
    `precision` (relative).
    """

    name: str
    min_rounds: int
    max_rounds: int
    sample_us: float
    cold: bool = True
    precision: float = 0.01
    limit_s: float = 60.0
    """Wall time after which a race ends with the next pair of rounds. On a machine that others keep busy a call
    of several threads takes a scheduler's time slice, a hundred times what it was when the samples were sized."""
    warmup_rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Microseconds per call, one row a round, one column a contender."""

    names: tuple[str, ...]
    us: NDArray[np.float64]


def sets_for(set_bytes: int, cache_bytes: int, memory_bytes: int, walk_bytes: int = 0) -> int:
    """Buffer sets for a cold race: beyond the cache several times over and `walk_bytes` in all, so that a walk over
    them lasts long enough to be timed, within a quarter of the memory."""
    wanted = -(-max(COLD_CACHE_MULTIPLE * cache_bytes, walk_bytes, 1) // max(set_bytes, 1)) + 1
    affordable = max(2, memory_bytes // 4 // max(set_bytes, 1))
    return int(max(2, min(wanted, affordable, _MAX_SETS)))


def calls_for(call_us: float, sample_us: float, *, least: int, most: int | None) -> int:
    """Calls in a sample: to last `sample_us`, at least `least`, no more than there are sets for (`most`)."""
    wanted = max(least, math.ceil(sample_us / max(call_us, 1e-3)))
    return max(1, wanted if most is None else min(wanted, most))


def cold_calls(sets: int, set_bytes: int, cache_bytes: int) -> int:
    """Calls after which a walk has gone several times through the cache, as far as there are sets for it."""
    return min(sets, -(-COLD_CACHE_MULTIPLE * cache_bytes // max(set_bytes, 1)) + 1)


def race(
    session: Session, contenders: Mapping[str, Replay], protocol: Protocol, reference: str | None
) -> Samples:
    """Runs the contenders in interleaved rounds until the ratios to `reference` are known well enough."""
    names = tuple(contenders)
    deadline = time.monotonic() + protocol.limit_s

    def sample_us(name: str) -> float:
        if protocol.cold:
            session.evict()
        return contenders[name].run_us()

    for _ in range(protocol.warmup_rounds):
        for name in names:
            sample_us(name)
    session.synchronize()
    rows: list[list[float]] = []
    while len(rows) < protocol.max_rounds:
        order = names if len(rows) % 2 == 0 else names[::-1]
        sample = {name: sample_us(name) for name in order}
        rows.append([sample[name] for name in names])
        if len(rows) % 2:
            continue  # whole pairs: else one contender would have run first more often
        if time.monotonic() >= deadline:
            break
        enough = len(rows) >= protocol.min_rounds
        if enough and _widest(np.array(rows), names, reference) <= protocol.precision:
            break
    return Samples(names=names, us=np.array(rows))


def summarise(
    samples: Samples,
    name: str,
    *,
    workload: str,
    protocol: str,
    reference: str | None,
    contender: str | None = None,
    calls: int = 1,
    sets: int = 1,
    clocks: Mapping[str, float] | None = None,
) -> Timing:
    """The Timing of one contender of a race."""
    own = samples.us[:, samples.names.index(name)]
    low, high = interval(own)
    ratio = ratio_low = ratio_high = None
    if reference is not None and reference != name:
        ratios = own / samples.us[:, samples.names.index(reference)]
        ratio = float(np.median(ratios))
        ratio_low, ratio_high = interval(ratios)
    return Timing(
        workload=workload,
        contender=contender or name,
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
        clocks=dict(clocks or {}),
    )


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of the median: by bootstrap, or of fewer than ten samples their whole range.

    A bootstrap of few samples is too narrow. The range of n holds the median with probability 1 - 2^(1 - n):
    94% of five, 97% of six.
    """
    if len(values) < _BOOTSTRAP_SAMPLES:
        return float(values.min()), float(values.max())
    return bootstrap_interval(values)


def bootstrap_interval(values: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the median; the resampling is seeded, so equal samples agree."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), size=(_BOOTSTRAP_RESAMPLES, len(values)))
    medians = np.median(values[picks], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)


def _widest(us: NDArray[np.float64], names: Sequence[str], reference: str | None) -> float:
    """The widest relative interval among the contenders (of ratios where there is a reference)."""
    widest = 0.0
    for i, name in enumerate(names):
        if reference is not None and name == reference:
            continue
        values = us[:, i] / us[:, names.index(reference)] if reference is not None else us[:, i]
        low, high = bootstrap_interval(values)
        widest = max(widest, (high - low) / float(np.median(values)))
    return widest


def estimate_us(call: Callable[[], object], session: Session, calls: int = 2) -> float:
    """A rough time of one call, to size samples by."""
    replay = session.record([call] * calls)
    try:
        replay.run_us()
        return replay.run_us()
    finally:
        replay.close()
