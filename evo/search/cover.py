"""Few variants for many points."""

from collections.abc import Mapping, Sequence

WITHIN = 0.03
"""Largest share by which a variant that serves many tasks may be slower than the fastest one known for a task."""
_MOST_VARIANTS = 12
"""Largest number of variants for one dtype."""
_LEAST_WITHIN = 1e-3
"""The excess that none at all grows to first, where it needs too many variants."""
_FIRST_VARIANTS = 32
"""Number of first variants that the greedy choices are tried with."""


def choose(
    times: Sequence[Mapping[str, float]], within: float = WITHIN, most: int = _MOST_VARIANTS, preferred: Sequence[str] = ()
) -> list[str]:
    """The variants to keep, of those that have times at some points, one mapping a point. Choosing the fewest is set cover;
    the greedy choice is within a factor of ln(points) of that (Chvatal 1979). It is made from several first variants, of
    which one greedy choice would take the best, and the fewest are kept.

    Each point has one that takes at most 1 + `within` times its least time; where that needs more than `most`, `within`
    grows until it does not, and some points have none if they have no variant in common with others. Behind the first, a
    variant is kept that serves the most points that none serves yet; of equal ones a `preferred` one, and that with the
    least time over the points' least, summed over its points.
    """
    least = [min(known.values(), default=0.0) for known in times]
    excess = [{v: t / low - 1 for v, t in known.items()} for known, low in zip(times, least, strict=True)]
    points = frozenset(i for i, known in enumerate(times) if known)
    while True:
        serves: dict[str, dict[int, float]] = {}
        for i in points:
            for v, more in excess[i].items():
                if more <= within:
                    serves.setdefault(v, {})[i] = more

        def rank(v: str, waiting: frozenset[int], serves: dict[str, dict[int, float]] = serves) -> tuple[float, bool, float]:
            new = [more for i, more in serves[v].items() if i in waiting]
            return -len(new), v not in preferred, sum(new)

        chosen: list[str] = []
        for first in sorted(serves, key=lambda v: rank(v, points))[:_FIRST_VARIANTS]:
            found, waiting = [first], points - serves[first].keys()
            while waiting:
                found.append(min(serves, key=lambda v: rank(v, waiting)))
                waiting -= serves[found[-1]].keys()
            if not chosen or len(found) < len(chosen):
                chosen = found
        if len(chosen) <= most or within > 1:
            return chosen[:most]
        within = max(1.1 * within, _LEAST_WITHIN)


def choose_by_dtype(dtypes: Sequence[str], times: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """The variants to keep for each dtype, preferably those that are kept for another. dtypes: one for each point."""
    few: dict[str, list[str]] = {}
    for dtype in dict.fromkeys(dtypes):
        own = [known for known, of in zip(times, dtypes, strict=True) if of == dtype]
        few[dtype] = choose(own, preferred=[v for chosen in few.values() for v in chosen])
    return few
