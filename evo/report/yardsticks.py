"""What a winner's figures are held against, in sentences: what only moves its bytes, and what the search said of it."""

from __future__ import annotations

__all__ = ["ceiling_note", "ceiling_remark", "regret_remark"]

_MUCH = 1.25
"""A winner that takes so many times as long as the ceiling has room left that is worth a word."""
_LITTLE = 0.01
"""Closer than this to the ceiling nobody is above it or below."""
_REGRET, _NOISE_FLOORS = 0.05, 3.0
"""A selection regret is out of the ordinary above both: this share, and so many noise floors."""


def ceiling_note(ceiling: str) -> str:
    """What a column of times over the ceiling's means. ceiling: the contender that is it."""
    return (
        f"over {ceiling}, the fastest baseline here that only moves the bytes, as PyTorch does it: above 1, slower than"
        " that; below 1, faster"
    )


def ceiling_remark(times_ceiling: float, ceiling: str, noise: float | None) -> str:
    """What a winner's time over the ceiling's says; empty where there is nothing to remark on."""
    if times_ceiling >= _MUCH:
        return (
            f"the winner takes {times_ceiling:.2f} times as long as {ceiling}, which moves as many bytes: up to"
            f" {1 - 1 / times_ceiling:.0%} of its time may be left to gain, by a longer search or another template"
        )
    if times_ceiling < 1 - max(_LITTLE, noise or 0.0):
        return (
            f"the winner takes {1 - times_ceiling:.0%} less time than {ceiling}, which does less work: PyTorch's {ceiling}"
            " is not the fastest that can be had here, so it does not say how much is left to gain"
        )
    return ""


def regret_remark(regret: float, noise: float | None) -> str:
    """What a selection regret says that is far above the noise floor; empty for one that is not."""
    if not noise or abs(regret) <= max(_REGRET, _NOISE_FLOORS * noise):
        return ""
    return (
        f"the selection regret is {abs(regret) / noise:.0f} times the noise floor: search and final do not agree, as where"
        " other programs ran or clocks changed in between; what only the search timed is no surer than that"
    )
