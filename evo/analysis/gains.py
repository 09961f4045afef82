"""How much faster one candidate is than another, from times of one race or of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evo.evaluation import holds_one

__all__ = ["Figure", "Gain", "gain_between", "gain_within"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A candidate's time in one race. ratio: over the reference baseline's, in the same race. timed: key of the
    candidate that was timed: another one of the same machine code, or itself. samples_us: round by round, where the race is
    one of several candidates and they are kept."""

    ratio: float
    ratio_low: float | None = None
    ratio_high: float | None = None
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    disturbed: bool = False
    timed: int | None = None
    samples_us: tuple[float, ...] = ()

    @property
    def distances(self) -> tuple[float, float] | None:
        """Of the ratio from its two limits, as logarithms; None without an interval."""
        if not self.ratio_low or not self.ratio_high or self.ratio_low <= 0:
            return None
        return max(0.0, math.log(self.ratio / self.ratio_low)), max(
            0.0, math.log(self.ratio_high / self.ratio)
        )


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The earlier one's time over the later one's, above 1: faster. No interval where one of the two has none.

    same_code: the two are one measurement, because they are the same machine code: the gain is 1, and no noise in it.
    tie: whether the interval holds 1, so that the gain may be chance; None without an interval.
    """

    gain: float
    low: float | None = None
    high: float | None = None
    same_code: bool = False

    @property
    def tie(self) -> bool | None:
        return None if self.low is None or self.high is None else holds_one(self.low, self.high)


def gain_between(before: Figure | None, after: Figure | None) -> Gain | None:
    """The gain from one to the other; None where either has no time.

    The two were timed in races of their own, each beside the reference. Their intervals are put together by MOVER (Zou and
    Donner 2008, Statistics in Medicine 27:1693), on logarithms because it is a quotient: each side's distance from its
    estimate to its limit counts as if it were a standard error. It takes the two errors for independent.
    """
    if before is None or after is None or before.ratio <= 0 or after.ratio <= 0:
        return None
    if before.timed is not None and before.timed == after.timed:
        return Gain(gain=1.0, low=1.0, high=1.0, same_code=True)
    gain = before.ratio / after.ratio
    one, other = before.distances, after.distances
    if one is None or other is None:
        return Gain(gain=gain)
    down, up = math.hypot(one[0], other[1]), math.hypot(one[1], other[0])
    return Gain(gain=gain, low=gain * math.exp(-down), high=gain * math.exp(up))


def gain_within(before: Figure, after: Figure) -> Gain | None:
    """The gain from one to the other, which ran in the same race: of the same rounds, so that neither the reference's error
    nor what the machine did meanwhile is in it. As `gain_between` where single samples are not kept."""
    one, other = before.samples_us, after.samples_us
    if not one or len(one) != len(other) or min(*one, *other) <= 0:
        return gain_between(before, after)
    from evo.measure.clock import paired_gain  # and with it numpy, which takes longer than most commands

    gain, low, high = paired_gain(one, other)
    return Gain(gain=gain, low=low, high=high)
