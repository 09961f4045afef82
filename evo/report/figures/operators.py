"""What each operator was tried for and what it brought, as the search went on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from evo.report.columns import Candidates
from evo.report.data import WorkloadData
from evo.report.svg import Figure, Scale, fitted, path, tag, text, ticks
from evo.report.text import counted

__all__ = ["OperatorCredit", "credit_operators", "draw_operators"]

_WIDTH, _LEFT, _RIGHT, _TOP, _LANE = 1000, 130, 24, 4, 44
_BINS = 48


@dataclass(frozen=True, kw_only=True)
class OperatorCredit:
    """What an operator did on one task.

    children: candidates it made of parents that have a time; better: those of them that were faster than the fastest of
    their parents; firsts: rows that were faster than everything before them, as `evo operators` counts both. credit: its
    share of all that these gained, in logarithms. seconds: in the device process.
    """

    name: str
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    passed: int
    children: int
    better: np.ndarray[tuple[int], np.dtype[np.int64]]
    firsts: tuple[int, ...]
    credit: float | None
    seconds: float

    @property
    def tried(self) -> int:
        return len(self.rows)


def credit_operators(data: WorkloadData) -> list[OperatorCredit]:
    """The most tried first."""
    some = data.candidates
    if some is None:
        return []
    total = float(some.improvement.sum())
    found = []
    for code, name in enumerate(some.operators):
        rows = np.flatnonzero(some.operator == code)
        found.append(
            OperatorCredit(
                name=name,
                rows=rows,
                passed=int(some.passed[rows].sum()),
                children=int(some.compared[rows].sum()),
                better=rows[some.better[rows]],
                firsts=tuple(int(row) for row in rows[some.improvement[rows] > 0]),
                credit=float(some.improvement[rows].sum()) / total if total > 0 else None,
                seconds=float(some.seconds[rows].sum()),
            )
        )
    return sorted(found, key=lambda c: (-c.tried, c.name))


def draw_operators(data: WorkloadData, credits: list[OperatorCredit]) -> Figure | None:
    """None where nothing was tried."""
    some = data.candidates
    if some is None or not credits or data.number < 2:
        return None
    bins = min(_BINS, data.number)
    edges = np.linspace(0, data.number, bins + 1)
    x = Scale(low=0, high=data.number, start=_LEFT, end=_WIDTH - _RIGHT)
    tallest = max(int(np.histogram(c.rows, edges)[0].max()) for c in credits)
    parts = []
    for lane, credit in enumerate(credits):
        floor = _TOP + (lane + 1) * _LANE - 6
        parts.append(text(_LEFT - 10, floor - 12, fitted(credit.name, _LEFT - 14), "e"))
        parts.append(text(_LEFT - 10, floor + 1, f"{credit.tried:,} tried", "m sm e"))
        parts.append(path([(x.start, floor), (x.end, floor)], "grid"))
        parts += _bars(x, edges, some, credit, float(floor), tallest)
        for row in credit.firsts:
            at = x(row + 0.5)
            diamond = f"M{at:.1f} {floor - 5:.1f}l5 5l-5 5l-5-5z"
            tip = f"{credit.name}: the best so far, #{some.order[row]}"
            parts.append(tag("path", d=diamond, class_="hollow", data_tip=tip))
    bottom = _TOP + len(credits) * _LANE + 4
    parts += [text(x(v), bottom + 14, f"{v:,g}", "m sm c") for v in ticks(0, data.number, 8)]
    parts.append(text(x.end, bottom + 31, "candidates evaluated", "m sm e"))
    return Figure(
        name="operators",
        title="Operators over time",
        caption=(
            "Pale: candidates that the operator made; dark: those that were faster than the fastest of their parents;"
            " diamonds: new bests."
        ),
        alt="; ".join(
            f"{c.name}: {counted(c.tried, 'candidate')}, {len(c.better)} better than their parents,"
            f" {counted(len(c.firsts), 'new best')}"
            for c in credits
        )
        + ".",
        width=_WIDTH,
        height=bottom + 38,
        body=Markup("").join(parts),
    )


def _bars(
    x: Scale,
    edges: np.ndarray[tuple[int], np.dtype[np.float64]],
    some: Candidates,
    credit: OperatorCredit,
    floor: float,
    tallest: int,
) -> list[Markup]:
    made, better = (np.histogram(rows, edges)[0] for rows in (credit.rows, credit.better))
    unit, parts = (_LANE - 16) / max(tallest, 1), []
    for b in np.flatnonzero(made):
        left, width = x(edges[b]) + 0.5, max(x(edges[b + 1]) - x(edges[b]) - 1, 0.8)
        first = some.order[math.ceil(edges[b])]
        tip = f"{credit.name}, from #{first} on\n{made[b]} made, {better[b]} better than their parents"
        for number, kind in ((made[b], "pale"), (better[b], "bar")):
            if number:
                box = {"x": left, "y": floor - number * unit, "width": width, "height": float(number * unit)}
                parts.append(tag("rect", **box, class_=kind, data_tip=tip))
    return parts
