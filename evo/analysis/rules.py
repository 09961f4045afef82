"""Which rule, a value that is forbidden or two together, would have spared a run its failures, and at what cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from evo.evaluation import PASSED
from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["Rule", "Tried", "Violations", "find_rules", "spent"]

_GOOD_SHARE = 0.25
"""Of a task's timed candidates, the fastest of which count as good."""
_LEAST_AVOIDED = 2
_KEPT_RULES = 50
_TOGETHER = 8

Violations = Callable[[Mapping[str, Value], str], Sequence[str]]
"""The names of the constraints of the space that a point breaks, for a workload of that key."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a constraint that forbids `rule` would have done in this run.

    kind: "new", or "existing" for one of the space as it is now, which this run did not have. more: of the avoided, those
    that no rule listed before it avoids; the first rules are listed such that they are worth having together. good_lost: of
    the passing ones it forbids, those among the fastest quarter of their workload. best_lost: the fastest of a workload is
    among them. seconds: what building and measuring the avoided ones cost.
    """

    kind: str
    rule: str
    avoided: int
    avoided_share: float
    more: int
    passed_lost: int
    good_lost: int
    best_lost: bool
    seconds: float


def spent(row: Any) -> float:
    """Seconds that a candidate cost; a cached build cost nothing."""
    return float(row.seconds + (0.0 if row.cached or row.build_seconds is None else row.build_seconds))


class Tried:
    """A run's candidates as sets of bits: which have a value, which were refused, which were good."""

    def __init__(self, rows: Sequence[Any]) -> None:
        refused: list[int] = []
        self.having: dict[tuple[str, str], int] = defaultdict(int)
        self.values: dict[tuple[str, str], Value] = {}
        self.present: dict[str, int] = defaultdict(int)
        scores: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for number, row in enumerate(rows):
            if row.status not in PASSED:
                refused.append(number)
            elif row.score is not None:
                scores[row.task].append((row.score, number))
        members: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            for name, value in Genome.from_json(row.genome).items:
                members[name, repr(value)].append(number)
                self.values[name, repr(value)] = value
        for pair, numbers in members.items():
            self.having[pair] = _bits(numbers, len(rows))
            self.present[pair[0]] |= self.having[pair]
        self.refused = _bits(refused, len(rows))
        self.passed = ((1 << len(rows)) - 1) & ~self.refused
        ranked = [sorted(timed) for timed in scores.values()]
        good = [number for timed in ranked for _, number in timed[: max(1, round(_GOOD_SHARE * len(timed)))]]
        self.good = _bits(good, len(rows))
        self.best = _bits([timed[0][1] for timed in ranked], len(rows))


def _bits(numbers: Sequence[int], size: int) -> int:
    """Set bits of these numbers; by bytes, because a shift of a long integer copies it."""
    data = bytearray(size // 8 + 1)
    for number in numbers:
        data[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(data, "little")


def find_rules(
    tried: Tried, rows: Sequence[Any], violations: Violations | None, *, pairs: bool
) -> list[Rule]:
    if not tried.refused:
        return []
    candidates = [("new", _text(tried, [pair]), bits) for pair, bits in tried.having.items()]
    if pairs:
        # Only values that break something on their own account can do so together.
        suspects = [
            (p, b) for p, b in tried.having.items() if (b & tried.refused).bit_count() >= _LEAST_AVOIDED
        ]
        for (p, a), (q, b) in combinations(suspects, 2):
            both = a & b
            avoided = (both & tried.refused).bit_count()
            # A pair has to spare more of what passed than it lets through of what did not.
            if (
                p[0] != q[0]
                and avoided >= _LEAST_AVOIDED
                and _spares(tried, both, a)
                and _spares(tried, both, b)
            ):
                candidates.append(("new", _text(tried, [p, q]), both))
    if violations is not None:
        broken: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            for name in violations(Genome.from_json(row.genome).parameters, row.workload):
                broken[name].append(number)
        candidates += [("existing", name, _bits(numbers, len(rows))) for name, numbers in broken.items()]
    useful = [
        (kind, rule, bits)
        for kind, rule, bits in candidates
        if (bits & tried.refused).bit_count() >= (_LEAST_AVOIDED if kind == "new" else 1)
    ]
    useful.sort(key=lambda r: (-_worth(tried, r[2], 0), r[0], len(r[1]), r[1]))
    found, avoided, chosen = [], 0, set()
    for _ in range(min(_TOGETHER, len(useful))):  # whichever adds most to those before it
        best = max((r for r in useful if r[1] not in chosen), key=lambda r: _worth(tried, r[2], avoided))
        if _worth(tried, best[2], avoided) <= 0:
            break
        found.append(_rule(tried, rows, *best, avoided))
        chosen.add(best[1])
        avoided |= best[2]
    for kind, rule, bits in useful[:_KEPT_RULES]:
        if rule not in chosen:
            found.append(_rule(tried, rows, kind, rule, bits, avoided))
    return found


def _spares(tried: Tried, both: int, one: int) -> bool:
    left_out = one & ~both
    return (left_out & tried.passed).bit_count() > (left_out & tried.refused).bit_count()


def _worth(tried: Tried, bits: int, avoided: int) -> float:
    """Share of the failures that it avoids beyond `avoided`, less the share of what passed and of what was good that
    goes with them."""
    refused, passed, good = (max(1, kind.bit_count()) for kind in (tried.refused, tried.passed, tried.good))
    lost = (bits & tried.passed).bit_count() / passed + (bits & tried.good).bit_count() / good
    return (bits & tried.refused & ~avoided).bit_count() / refused - lost


def _text(tried: Tried, pairs: Sequence[tuple[str, str]]) -> str:
    return " and ".join(f"{name}={tried.values[name, text]}" for name, text in pairs)


def _rule(tried: Tried, rows: Sequence[Any], kind: str, rule: str, bits: int, before: int) -> Rule:
    avoided = bits & tried.refused
    return Rule(
        kind=kind,
        rule=rule,
        avoided=avoided.bit_count(),
        avoided_share=avoided.bit_count() / tried.refused.bit_count(),
        more=(avoided & ~before).bit_count(),
        passed_lost=(bits & tried.passed).bit_count(),
        good_lost=(bits & tried.good).bit_count(),
        best_lost=bool(bits & tried.best),
        seconds=sum(spent(rows[number]) for number in _numbers(avoided)),
    )


def _numbers(bits: int) -> list[int]:
    return [number for number, digit in enumerate(reversed(bin(bits))) if digit == "1"]
