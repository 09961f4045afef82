"""Heat maps: what pairs of parameter values led to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from markupsafe import Markup

from evo.report.data import WorkloadData
from evo.report.palette import STEPS
from evo.report.parameters import ABSENT, KnownParameter
from evo.report.svg import Figure, fitted, tag, text
from evo.report.text import counted, value_text

__all__ = ["Cell", "HeatMap", "draw_heat_map", "map_pairs"]

_PARAMETERS = 4
_MOST_VALUES = 12
_CELL_W, _CELL_H, _TOP = 66, 42, 42


@dataclass(frozen=True, kw_only=True)
class Cell:
    """best, median: speed-ups, None where nothing passed."""

    tried: int
    passed: int
    best: float | None
    median: float | None


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """cells[row][column], for the values of `down` and `across`; None among values: has no part in the genome.

    low, high: of the best of all maps of a workload, so that their colours mean the same.
    """

    across: KnownParameter
    down: KnownParameter
    columns: tuple[object, ...]
    rows: tuple[object, ...]
    cells: tuple[tuple[Cell, ...], ...]
    low: float = 0.0
    high: float = 1.0


def map_pairs(data: WorkloadData) -> list[HeatMap]:
    """One for every pair of the parameters that mattered most."""
    some = data.candidates
    if some is None or not np.isfinite(some.score).any():
        return []
    varied = {p.name: p for p in data.parameters if 1 < len(p.values) <= _MOST_VALUES}
    names = [n for n in data.importance.names if n in varied] or list(varied)
    maps = [_map(data, varied[a], varied[b]) for a, b in combinations(names[:_PARAMETERS], 2)]
    bests = [c.best for m in maps for row in m.cells for c in row if c.best is not None]
    return [
        HeatMap(
            across=m.across, down=m.down, columns=m.columns, rows=m.rows, cells=m.cells, low=min(bests), high=max(bests)
        )
        for m in maps
        if bests
    ]


def _map(data: WorkloadData, one: KnownParameter, other: KnownParameter) -> HeatMap:
    across, down = (one, other) if len(one.values) <= len(other.values) else (other, one)
    columns, column_of = _axis(data, across)
    rows, row_of = _axis(data, down)
    return HeatMap(
        across=across,
        down=down,
        columns=columns,
        rows=rows,
        cells=tuple(
            tuple(_cell(data, (row_of == r) & (column_of == c)) for c in range(len(columns))) for r in range(len(rows))
        ),
    )


def _axis(
    data: WorkloadData, parameter: KnownParameter
) -> tuple[tuple[object, ...], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The values in their order, and the place among them of each candidate's."""
    assert data.candidates is not None
    tried, indices = data.candidates.tried[parameter.name], data.candidates.values[parameter.name]
    place = {(type(v), v): i for i, v in enumerate(parameter.values)}
    table = np.array([place[type(v), v] for v in tried] + [len(place)])  # the last stands for an index of -1
    absent = bool((indices == ABSENT).any())
    return (*parameter.values, None) if absent else parameter.values, table[indices]


def _cell(data: WorkloadData, members: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Cell:
    assert data.candidates is not None
    ups = data.candidates.speedup[members]
    known = ups[np.isfinite(ups)]
    return Cell(
        tried=int(members.sum()),
        passed=int(data.candidates.passed[members].sum()),
        best=float(known.max()) if len(known) else None,
        median=float(np.median(known)) if len(known) else None,
    )


def draw_heat_map(heat: HeatMap) -> Figure:
    left = 12 + 7 * max(min(max(len(value_text(v)) for v in heat.rows), 14), 4)
    width, height = left + _CELL_W * len(heat.columns) + 4, _TOP + _CELL_H * len(heat.rows) + 8
    least = max(width, 7 * (len(heat.across.name) + len(heat.down.name) + 8), 230)
    parts = [text(0, 14, f"{heat.down.name} ↓   {heat.across.name} →", "m sm")]
    for c, value in enumerate(heat.columns):
        parts.append(text(left + (c + 0.5) * _CELL_W, _TOP - 8, fitted(value_text(value), _CELL_W), "sm c"))
    for r, value in enumerate(heat.rows):
        parts.append(text(left - 8, _TOP + (r + 0.5) * _CELL_H + 4, fitted(value_text(value), 98), "sm e"))
        parts += [_draw_cell(heat, r, c, left) for c in range(len(heat.columns))]
    best = max((c for row in heat.cells for c in row if c.best), key=lambda c: c.best or 0, default=None)
    return Figure(
        name=f"pair-{_slug(heat.down.name)}-{_slug(heat.across.name)}",
        title=f"{heat.down.name} and {heat.across.name}",
        caption="",
        alt=(
            f"Best speed-up for {len(heat.rows)} by {len(heat.columns)} values"
            + (f"; the best cell has {best.best:.3f}× of {counted(best.tried, 'candidate')}." if best else ".")
        ),
        width=least,
        height=height,
        body=Markup("").join(parts),
    )


def _draw_cell(heat: HeatMap, r: int, c: int, left: int) -> Markup:
    cell = heat.cells[r][c]
    x, y = float(left + c * _CELL_W), float(_TOP + r * _CELL_H)
    box = {"x": x + 1, "y": y + 1, "width": float(_CELL_W - 2), "height": float(_CELL_H - 2), "rx": 2}
    where = f"{heat.down.name}={value_text(heat.rows[r])}, {heat.across.name}={value_text(heat.columns[c])}"
    middle = x + _CELL_W / 2
    if cell.best is None or cell.median is None:
        said = "never tried" if not cell.tried else f"{counted(cell.tried, 'candidate')}, none with a time"
        inside = text(middle, y + 25, f"0 of {cell.tried}", "m sm c") if cell.tried else Markup("")
        return tag("rect", **box, class_="none", data_tip=f"{where}\n{said}") + inside
    span = heat.high - heat.low
    step = STEPS - 1 if span <= 0 else min(STEPS - 1, int((cell.best - heat.low) / span * STEPS))
    tip = (
        f"{where}\nbest {cell.best:.3f}×, median {cell.median:.3f}×\n{counted(cell.tried, 'candidate')},"
        f" {cell.passed} passed"
    )
    return (
        tag("rect", **box, class_=f"h{step}", data_tip=tip)
        + text(middle, y + 18, f"{cell.best:.2f}×", f"b c t{step}", pointer_events="none")
        + text(middle, y + 33, f"{cell.median:.2f} · {cell.tried}", f"sm c t{step}", pointer_events="none")
    )


def _slug(name: str) -> str:
    return "".join(ch if ch.isalnum() and ch.isascii() else "_" for ch in name)[:40]
