"""Few variants for many points: which of them, so that each point is served almost as fast as it can be.

Choosing the fewest is set cover; the greedy choice is used, which is within a factor of ln(points) of that (Chvatal 1979).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

WITHIN = 0.03
"""How much longer than the fastest variant that is known for a point the one that serves it may take."""
MOST = 12
"""Variants for one dtype."""

Variant = TypeVar("Variant", bound=Hashable)


def choose(times: Sequence[Mapping[Variant, float]], *, within: float = WITHIN, most: int = MOST) -> list[Variant]:
    """The variants to keep, of those that have times at some points, one mapping a point.

    Each point has one that takes at most 1 + `within` times its least time, unless that would need more than `most`: then
    points that are served by none take the nearest to that, as far as there is one for them. A variant is kept that serves
    the most points that none serves yet; of equal ones that with the least time over the points' least, summed over its
    points.
    """
    least = [min(known.values(), default=0.0) for known in times]
    excess = [{v: t / low - 1 for v, t in known.items()} for known, low in zip(times, least, strict=True)]
    waiting, chosen = {i for i, known in enumerate(times) if known}, list[Variant]()
    while waiting and len(chosen) < most:
        serves: dict[Variant, list[float]] = {}
        for i in sorted(waiting):
            for v, more in excess[i].items():
                if more <= within:
                    serves.setdefault(v, []).append(more)
        best = min(serves, key=lambda v: (-len(serves[v]), sum(serves[v])))
        chosen.append(best)
        waiting = {i for i in waiting if best not in excess[i] or excess[i][best] > within}
    return chosen
