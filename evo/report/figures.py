"""The figures of a report: Vega-Lite specifications, which vl-convert draws as SVG and PNG without a browser.

One function for each figure; it returns None where the run has nothing to show. A colour is written `var(--name)`: a page
defines these names for a light and a dark screen, a file gets the colours of LIGHT. The description of a mark becomes its
`aria-label` in the SVG: screen readers say it, and templates/page.js shows it beside the pointer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import vl_convert
from markupsafe import Markup, escape
from numpy.typing import NDArray

from evo.analysis.descent import Kin
from evo.analysis.outcome import Family, HeatMap, Milestone, WorkloadOutcome
from evo.report.text import clean, counted, duration, interval, percent, short, times, value_text

__all__ = [
    "DARK",
    "LIGHT",
    "Figure",
    "change_text",
    "draw_convergence",
    "draw_failures",
    "draw_families",
    "draw_heat_map",
    "draw_importance",
    "draw_lineage",
    "draw_operators",
    "family_name",
    "gain_text",
    "shade",
    "shown_steps",
]

# Text and marks keep the contrast that WCAG 2 asks for at level AA. s: things without an order, the last one for the rest
# of them; h: little to much, and t: text on these.
LIGHT: Mapping[str, str] = {
    "paper": "#fdfdfb", "ink": "#1b1f24", "muted": "#555c66", "rule": "#d8dad4", "soft": "#f2f3ee", "grid": "#e4e6e0",
    "accent": "#0b5fa5", "warn": "#9f2d13", "good": "#17694b", "dot": "#7d8794", "band": "#bcd5ea",
    "s0": "#0b5fa5", "s1": "#bd560a", "s2": "#17805d", "s3": "#8b3fa8", "s4": "#a8862b", "s5": "#c23b6b",
    "s6": "#3d6f80", "s7": "#868d96",
    "h0": "#eef3f8", "h1": "#d0e1f0", "h2": "#a9cae5", "h3": "#74acd6", "h4": "#2670a8", "h5": "#0b4f87",
    "t0": "#1b1f24", "t1": "#1b1f24", "t2": "#1b1f24", "t3": "#10181f", "t4": "#ffffff", "t5": "#ffffff",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "paper": "#14171a", "ink": "#e7e8e5", "muted": "#a7adb5", "rule": "#363b41", "soft": "#1c2024", "grid": "#2a2f34",
    "accent": "#78b8f2", "warn": "#ff9d80", "good": "#6fd0a5", "dot": "#77818c", "band": "#23435f",
    "s0": "#66aef0", "s1": "#f0944a", "s2": "#4fc597", "s3": "#c88ae0", "s4": "#d9bb5c", "s5": "#f080a6",
    "s6": "#7db3c6", "s7": "#949ba4",
    "h0": "#1e2932", "h1": "#20394f", "h2": "#235078", "h3": "#2f6ea6", "h4": "#79b6ec", "h5": "#b5d9fb",
    "t0": "#e7e8e5", "t1": "#e7e8e5", "t2": "#f2f5f7", "t3": "#ffffff", "t4": "#0d1318", "t5": "#0d1318",
}  # fmt: skip

HALF_PX, WIDE_PX = 500, 1000
"""Widths of figures that stand side by side, and of those that take the whole page."""
PNG_SCALE = 3
"""Pixels of a PNG for each unit of its figure: 300 dots an inch where that is a third of a column wide."""

Spec = dict[str, Any]

_INK, _MUTED, _GRID, _PAPER = "var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)"
_ACCENT, _WARN, _DOT, _BAND = "var(--accent)", "var(--warn)", "var(--dot)", "var(--band)"
# Fonts are larger here than the page shows them on a desktop: its own font may be wider than the one that room is left for.
_CONFIG: Spec = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "text": {"color": _INK, "fontSize": 13},
    "circle": {"opacity": 1, "strokeWidth": 1},
    "point": {"opacity": 1},
    "title": {"color": _MUTED, "fontSize": 13, "fontWeight": "normal", "anchor": "start", "offset": 10},
    # Without aria: the figure's own words say what its axes are.
    "axis": {
        "aria": False, "labelColor": _MUTED, "titleColor": _MUTED, "titleFontWeight": "normal", "titleAnchor": "end",
        "gridColor": _GRID, "domainColor": _MUTED, "tickColor": _MUTED, "labelFontSize": 13, "titleFontSize": 13,
        "titlePadding": 8,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "legend": {"aria": False, "labelColor": _INK, "labelFontSize": 12, "labelLimit": 480, "symbolType": "square"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with what is to be said of it.

    name: of a file. title: what it shows; caption: how it is to be read; alt: what it shows, in words for screen
    readers. spec: Vega-Lite, without what all figures share.
    """

    name: str
    title: str
    caption: str
    alt: str
    spec: Spec
    wide: bool = False

    def inline(self) -> Markup:
        """As a part of a page, whose style has the colours."""
        svg = _shortened(vl_convert.vegalite_to_svg(self._spec(background=None)))
        role = "group" if "href=" in svg else "img"
        head = Markup('class="fig" role="{}" aria-label="{}. {}"').format(role, clean(self.title), clean(self.alt))
        return Markup(svg.replace('class="marks"', head, 1))

    def document(self) -> str:
        """As an SVG file: on white, and without links into a page."""
        svg = re.sub(r"</?a\b[^>]*>", "", vl_convert.vegalite_to_svg(self._spec_for_file()))
        words = f"<title>{_escaped(self.title)}</title><desc>{_escaped(self.alt)} {_escaped(self.caption)}</desc>"
        return svg.replace(">", f">{words}", 1)

    def png(self) -> bytes:
        return vl_convert.vegalite_to_png(self._spec_for_file(), scale=PNG_SCALE)

    def _spec(self, **shared: Any) -> Spec:
        common: Spec = {"autosize": {"type": "fit", "contains": "padding"}, "padding": 2, "config": _CONFIG}
        return {**common, **_with_strings(self.spec, clean), **shared}

    def _spec_for_file(self) -> Spec:
        colours = {**LIGHT, "paper": "#ffffff"}
        spec: Spec = _with_strings(
            self._spec(background="#ffffff"),
            lambda text: re.sub(r"^var\(--(\w+)\)$", lambda found: colours[found[1]], text),
        )
        return spec


_NEEDLESS = re.compile(
    r' (?:aria-roledescription="[^"]*"|font-family="[^"]*"|opacity="1"|pointer-events="none")'
    r'|<path class="(?:background|foreground)"[^>]*/>'
)
_COORDINATES, _LONG = re.compile(r' (?:transform|d|[xy]2?)="[^"]*"'), re.compile(r"-?\d+\.\d{2,}")
_VEGA_BASE = 'xlink:href="https://vega.github.io/vega-datasets/#'
"""What Vega makes of a link within the page."""


def _shortened(svg: str) -> str:
    """Without what a page does not need: a third of its size, and a report of many workloads is one file."""
    svg = _NEEDLESS.sub("", svg).replace(_VEGA_BASE, 'href="#')
    return _COORDINATES.sub(lambda found: _LONG.sub(lambda digits: f"{float(digits[0]):.1f}", found[0]), svg)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same specification, every string in it changed."""
    if isinstance(value, dict):
        return {key: _with_strings(v, change) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_strings(v, change) for v in value]
    return change(value) if isinstance(value, str) else value


def _escaped(words: str) -> str:
    return str(escape(clean(words)))


def _layer(rows: Sequence[Spec], mark: str, encoding: Spec, **properties: Any) -> Spec:
    """A mark for each row. Without a description it is nothing to screen readers."""
    properties = {"type": mark, "aria": "description" in encoding, **properties}
    return {"data": {"values": list(rows)}, "mark": properties, "encoding": encoding}


_TIP: Spec = {"description": {"field": "tip"}}


def _number(field: str, title: str | None = None, domain: tuple[float, float] | None = None, **axis: Any) -> Spec:
    """A channel of numbers. domain: of its scale; what lies outside is drawn at its edge."""
    channel: Spec = {"field": field, "type": "quantitative", "title": title}
    if domain is not None:
        channel["scale"] = {"domain": list(domain), "nice": False, "zero": False, "clamp": True}
    return {**channel, "axis": axis or {}}


def _word(field: str, **axis: Any) -> Spec:
    """A channel of words, in the order of the rows."""
    return {"field": field, "type": "nominal", "sort": None, "title": None, "axis": axis or None}


def _as_is(field: str) -> Spec:
    """A channel of what is meant itself, such as colours."""
    return {"field": field, "type": "nominal", "scale": None}


# Convergence: how fast the search got how far

_MOST_DOTS, _RUG_PLACES = 2_500, 200


def draw_convergence(data: WorkloadOutcome, against: Literal["evaluations", "seconds"]) -> Figure | None:
    """The best speed-up so far, with its interval, and every candidate."""
    some = data.candidates
    if some is None or not np.isfinite(some.score).any():
        return None
    seconds = against == "seconds"
    positions = some.elapsed_s if seconds else np.arange(1, len(some) + 1, dtype=float)
    last = float(positions.max())
    place = {m.order: m.elapsed_s if seconds else float(m.evaluated) for m in data.milestones}
    bests = _rising(data.milestones, place)
    x_title = "seconds of searching" if seconds else "candidates evaluated"
    x = _number("x", x_title, (0.0, max(last, 1e-9)), tickCount=7)
    y = _number("y", None, _speedups(data), labelExpr="datum.label + '×'")
    spoilt = any(m.disturbed for m in bests)
    steps = [{"x": place[m.order], "y": m.speedup, "low": m.low, "high": m.high} for m in bests]
    if steps:
        steps.append({**steps[-1], "x": last})
    layers = [
        _layer([{"y": 1.0}], "rule", {"y": y}, color=_MUTED, strokeDash=[4, 3]),
        _dots(positions, some.speedup, x, y),
        _layer(_rug(positions[~some.passed], last), "tick", {"x": x, "y": {"value": {"expr": "height - 3"}}},
               orient="vertical", color=_WARN, opacity=0.5, size=6, thickness=1),
        _layer(steps, "area", {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}, interpolate="step-after",
               color=_BAND, opacity=0.75),
        _layer(steps, "line", {"x": x, "y": y}, interpolate="step-after", color=_ACCENT, strokeWidth=2,
               strokeDash=[5, 4] if spoilt else []),
        _layer([_best_row(m, place[m.order]) for m in bests], "circle",
               {"x": x, "y": y, "color": _as_is("fill"), "stroke": _as_is("stroke"), **_TIP}, size=55),
        *_final(data, y),
    ]  # fmt: skip
    caption = (
        "The same against time, which includes compiling. Open red circles: refused by the finals later."
        if seconds
        else "Line: the best so far by the search's own timing, with its interval; dots: candidates that passed; strokes at"
        " the bottom: refused ones. At the right the leader as the finals timed it."
        + (" Broken line: something disturbed every time, and none is to be trusted." if spoilt else "")
    )
    return Figure(
        name=f"convergence-{against}",
        title=f"Convergence against {x_title}",
        caption=caption,
        alt=_course(data, bests, seconds),
        spec={
            "width": HALF_PX,
            "height": 300,
            "padding": {"left": 2, "top": 2, "bottom": 2, "right": 8},
            "title": "speed-up over the reference",
            "layer": layers,
        },
    )


def _rising(milestones: Sequence[Milestone], place: Mapping[int, float]) -> list[Milestone]:
    """Those that were better than all before them in the order of their places, too."""
    found: list[Milestone] = []
    for m in sorted(milestones, key=lambda m: place[m.order]):
        if not found or m.speedup > found[-1].speedup:
            found.append(m)
    return found


def _speedups(data: WorkloadOutcome) -> tuple[float, float]:
    """The range that is shown. Slow outliers may lie on its floor; the line, the reference and nearly all dots do not."""
    assert data.candidates is not None
    known = data.candidates.speedup[np.isfinite(data.candidates.speedup)]
    bottom = min([float(np.quantile(known, 0.02)), *(m.low for m in data.milestones[:1]), 1.0])
    top = max([float(known.max()), *(m.high for m in data.milestones), 1.0])
    if data.timing and data.timing.ratio_low:
        top = max(top, 1 / data.timing.ratio_low)
    return max(0.0, bottom - 0.15 * (top - bottom)), top + 0.08 * (top - bottom or top)


def _dots(positions: NDArray[np.float64], speedup: NDArray[np.float64], x: Spec, y: Spec) -> Spec:
    """All in one path, for a million candidates must not make a million elements: a line that breaks after every point
    and has round ends is a row of dots."""
    rows = np.flatnonzero(np.isfinite(speedup))
    points: list[Spec] = []
    for row in rows[:: max(1, -(-len(rows) // _MOST_DOTS))]:
        points += [{"x": float(positions[row]), "y": float(speedup[row])}, {"x": float(positions[row]), "y": None}]
    values: list[Spec] = [{"place": place, **point} for place, point in enumerate(points)]
    return _layer(
        values, "line", {"x": x, "y": y, "order": {"field": "place"}},
        color=_DOT, strokeWidth=2.6, strokeCap="round", opacity=0.55, invalid="break-paths-filter-domains",
    )  # fmt: skip


def _rug(positions: NDArray[np.float64], last: float) -> list[Spec]:
    places = sorted({round(float(p) / (last or 1.0) * _RUG_PLACES) for p in positions})
    return [{"x": place / _RUG_PLACES * last} for place in places]


def _best_row(m: Milestone, place: float) -> Spec:
    seen = f"#{m.order}: {m.speedup:.3f}× ({m.low:.3f} to {m.high:.3f}) after {duration(m.elapsed_s)}"
    return {
        "x": place,
        "y": m.speedup,
        "tip": f"{seen}; refused by the finals" if m.refused else seen,
        "fill": _PAPER if m.refused else _ACCENT,
        "stroke": _WARN if m.refused else _PAPER,
    }


def _final(data: WorkloadOutcome, y: Spec) -> list[Spec]:
    """The leader's time in the finals, beside the plot."""
    timing = data.timing
    if timing is None or timing.stage != "final" or not (timing.ratio and timing.ratio_low and timing.ratio_high):
        return []
    row = {
        "y": 1 / timing.ratio,
        "low": 1 / timing.ratio_high,
        "high": 1 / timing.ratio_low,
        "text": f"{1 / timing.ratio:.3g}×",
        "tip": f"final: {times(timing.ratio)} ({interval(timing.ratio_low, timing.ratio_high)})",
    }
    beside = {"value": {"expr": "width + 14"}}
    return [
        _layer([row], "rule", {"x": beside, "y": {**y, "field": "low"}, "y2": {"field": "high"}}, color=_ACCENT, size=2),
        _layer([row], "point", {"x": beside, "y": y, **_TIP}, shape="diamond", filled=True, color=_ACCENT, size=110),
        _layer([row], "text", {"x": beside, "y": y, "text": {"field": "text"}}, align="left", dx=-6, dy=-15,
               fontWeight=600),
        _layer([row], "text", {"x": beside, "y": y, "text": {"value": "final"}}, align="left", dx=-6, dy=17,
               color=_MUTED),
    ]  # fmt: skip


def _course(data: WorkloadOutcome, bests: Sequence[Milestone], seconds: bool) -> str:
    if not bests:
        return f"{counted(data.number, 'candidate')}, none of which has a time to be trusted."
    first, best = bests[0], bests[-1]
    when = duration(best.elapsed_s) if seconds else f"{best.evaluated:,} of {counted(data.number, 'candidate')}"
    return (
        f"The best rises from {first.speedup:.3f}× in {counted(len(bests), 'step')} to {best.speedup:.3f}×, reached with"
        f" #{best.order} after {when}."
    )


# Lineage: where the leader came from

_MOST_STEPS = 90
_APART = 0.046, 0.06
"""Shares of the figure's width and height between two written gains."""


def shown_steps(data: WorkloadOutcome) -> list[Kin]:
    """All ancestors, or of very many the main line and its parents, or the last of these."""
    steps = list(data.steps)
    if len(steps) > _MOST_STEPS:
        near = {p.id for s in steps if s.main_line for p in s.parents}
        steps = [s for s in steps if s.main_line or s.id in near]
    return [s for s in steps if s.main_line][-_MOST_STEPS:] if len(steps) > 2 * _MOST_STEPS else steps


def gain_text(step: Kin) -> str:
    if step.gain is None:
        return ""
    return "tie" if step.tie or step.gain == 1 else f"{100 * (step.gain - 1):+.1f}%"


def change_text(step: Kin) -> str:
    if not step.parents:
        return "the first of its line"
    parts = [f"{name}: {value_text(a)} → {value_text(b)}" for name, (a, b) in step.change.items()]
    return ", ".join(parts) or "nothing that the genome shows"


def draw_lineage(data: WorkloadOutcome, anchor: str) -> Figure | None:
    """The ancestors, by when they were tried and how fast they were. anchor: what the ids of the rows begin with that the
    marks link to."""
    steps = shown_steps(data)
    if not steps:
        return None
    ups = [1 / s.score for s in steps if s.score] or [1.0]
    margin = 0.08 * (max(ups) - min(ups)) or 0.05 * max(ups)
    low, high = max(0.0, min(ups) - margin), max(ups) + margin
    place = {s.id: (i, 1 / s.score if s.score else low) for i, s in enumerate(steps)}
    main, last = [s for s in steps if s.main_line], steps[-1]
    apart = max(1, -(-len(steps) // 16))
    named = [i for i in range(len(steps)) if i == len(steps) - 1 or (i % apart == 0 and len(steps) - 1 - i >= apart)]
    x = _number("x", "ancestors, by when they were tried", (-0.5, len(steps) - 0.5),
                values=named, labelExpr="'#' + orders[datum.value]")  # fmt: skip
    y = _number("y", None, (low, high), labelExpr="datum.label + '×'")
    curves = {"x": x, "y": y, "detail": {"field": "edge"}, "order": {"field": "point"}}
    marks = {"x": x, "y": y, "href": {"field": "href"}, **_TIP}
    written = {"x": x, "y": y, "text": {"field": "text"}}
    labelled = _labelled(main, place, len(steps), high - low)
    rows = [{**_step_row(s, place[s.id]), "href": f"#{anchor}{s.order}"} for s in steps]
    layers = [
        _layer(_edges(steps, place, main=False), "line", curves, interpolate="basis", color=_DOT, strokeWidth=1,
               opacity=0.65),
        _layer(_edges(steps, place, main=True), "line", curves, interpolate="basis", color=_ACCENT, strokeWidth=2.25),
        _layer([r for r, s in zip(rows, steps, strict=True) if not s.main_line], "circle", marks,
               color=_PAPER, stroke=_DOT, strokeWidth=1.5, size=55),
        _layer([r for r, s in zip(rows, steps, strict=True) if s.main_line], "circle", marks,
               color=_ACCENT, stroke=_PAPER, size=105),
        _layer([{**_at(place[s.id]), "text": gain_text(s)} for s in labelled], "text", written, dy=-13),
        _layer([{**_at(place[last.id]), "text": _speed(last)}], "text", written, dy=-14, fontWeight=600),
    ]  # fmt: skip
    left = len(data.steps) - len(steps)
    return Figure(
        name="lineage",
        title="Lineage of the leader",
        caption=(
            "From left to right the ancestors in the order in which they were tried; height: their speed-up by the search's"
            f" own timing. Blue: the main line, through first parents{_told_of(main)}; grey: other parents."
            + (f" Left out: {counted(left, 'ancestor')} further from the main line." if left > 0 else "")
        ),
        alt=(
            f"{counted(len(data.steps), 'candidate')}, {len(main)} of them on the main line, which leads from"
            f" #{main[0].order} to #{main[-1].order}. The table below says what each changed."
        ),
        spec={
            "width": WIDE_PX,
            "height": 330,
            "params": [{"name": "orders", "value": [s.order for s in steps]}],
            "title": "speed-up over the reference",
            "layer": [layer for layer in layers if layer["data"]["values"]],
        },
        wide=True,
    )


def _told_of(main: Sequence[Kin]) -> str:
    """What is written at the steps of the main line."""
    gains = [gain_text(s) for s in main if s.gain is not None]
    if gains and all(gain == "tie" for gain in gains):
        return ", each step of which is a tie: its gain may be chance" if len(gains) > 1 else ", whose step is a tie"
    return ", with the gains of steps that are no ties" if gains else ""


def _labelled(
    main: Sequence[Kin], place: Mapping[str, tuple[float, float]], wide: int, high: float
) -> list[Kin]:
    """Steps whose gain is written: the largest gains, as far as they do not cover each other or the last step's."""
    taken, found = [place[main[-1].id]], []
    for step in sorted(main[:-1], key=lambda s: -abs((s.gain or 1) - 1)):
        x, y = place[step.id]
        free = all(abs(x - u) > _APART[0] * wide or abs(y - v) > _APART[1] * high for u, v in taken)
        if free and step.gain is not None and not step.tie:
            taken.append((x, y))
            found.append(step)
    return found


def _edges(steps: Sequence[Kin], place: Mapping[str, tuple[float, float]], *, main: bool) -> list[Spec]:
    """Points of curves from parents to children that leave and arrive level."""
    rows = []
    for step in steps:
        for i, parent in enumerate(step.parents):
            if parent.id in place and (step.main_line and i == 0) is main:
                (x, y), (u, v) = place[parent.id], place[step.id]
                points = [(x, y), ((x + u) / 2, y), ((x + u) / 2, v), (u, v)]
                edge = f"{parent.order} {step.order}"
                rows += [{"edge": edge, "point": i, "x": px, "y": py} for i, (px, py) in enumerate(points)]
    return rows


def _speed(step: Kin) -> str:
    return f"{1 / step.score:.3f}×" if step.score else step.status.replace("_", " ")


def _step_row(step: Kin, place: tuple[float, float]) -> Spec:
    lines = [f"#{step.order} {short(step.id)}: {_speed(step)}, by {step.operator}", change_text(step)]
    if gain := gain_text(step):
        lines.append(f"gain over its first parent: {gain}")
    return {**_at(place), "tip": "\n".join(lines)}


def _at(place: tuple[float, float]) -> Spec:
    return {"x": place[0], "y": place[1]}


# Families: what the population was made of as the search went on

_FAMILY_BINS, _COLOURS = 24, 8


def family_name(family: Family) -> str:
    if family.others:
        return counted(family.others, "other family", "other families")
    return " ".join(f"{n}={value_text(v)}" for n, v in family.choices if v is not None) or "none of them"


def _with_gap(edges: NDArray[np.float64], b: int) -> float:
    """Where the bar of a bin ends: a little before the next one."""
    return float(edges[b] + 0.94 * (edges[b + 1] - edges[b]))


def draw_families(data: WorkloadOutcome, families: Sequence[Family]) -> Figure | None:
    if not families or data.number < 2:
        return None
    bins = min(_FAMILY_BINS, data.number)
    edges = np.linspace(0, data.number, bins + 1)
    counts = np.stack([np.histogram(f.rows, edges)[0] for f in families])
    upper = np.cumsum(counts, axis=0) / np.maximum(counts.sum(axis=0), 1)
    keys = [f"{len(f.rows):,} tried, best {times(f.best)}: {family_name(f)}" for f in families]
    rows = [
        {
            "x": float(edges[b]), "x2": _with_gap(edges, b),
            "y": float(upper[i - 1, b]) if i else 0.0, "y2": float(upper[i, b]), "key": keys[i],
            "tip": f"{family_name(family)}\n{counts[i, b]} of {counts[:, b].sum()} candidates from {int(edges[b]) + 1} on",
        }
        for i, family in enumerate(families)
        for b in map(int, np.flatnonzero(counts[i]))
    ]  # fmt: skip
    colours = [f"var(--s{_COLOURS - 1 if f.others else i})" for i, f in enumerate(families)]
    encoding = {
        "x": _number("x", "candidates evaluated", (0, data.number), tickCount=7), "x2": {"field": "x2"},
        "y": _number("y", None, (0, 1), format="%", values=[0, 0.5, 1], grid=False), "y2": {"field": "y2"}, **_TIP,
        "color": {
            "field": "key", "type": "nominal", "scale": {"domain": keys, "range": colours},
            "legend": {"title": None, "orient": "bottom", "columns": 1},
        },
    }  # fmt: skip
    return Figure(
        name="families",
        title="Population over time",
        caption=(
            "Families share the structural choices that mattered most (at most 3). A family that spreads is one that the"
            " sampler found worth trying."
        ),
        alt="; ".join(keys) + ".",
        spec={
            "width": HALF_PX,
            "height": 250 + 16 * len(families),
            "title": "share of the candidates tried",
            **_layer(rows, "rect", encoding),
        },
    )


# Bars: importance of the parameters, kinds of failure

_MOST_BARS, _LEAST_SHARE, _SURE_OF = 12, 0.005, 50


def _bars(rows: Sequence[Spec], colour: str, bold: Sequence[str] = ()) -> Spec:
    """A bar for each row of name, value, text and tip."""
    weight = {"condition": {"test": {"field": "value", "oneOf": list(bold)}, "value": 600}, "value": 400}
    y = _word("name", domain=False, labelLimit=150, labelColor=_INK, labelFontWeight=weight)
    x = {"field": "value", "type": "quantitative", "axis": None}
    return {
        "width": HALF_PX,
        "height": 24 * len(rows) + 8,
        "padding": {"left": 2, "top": 2, "bottom": 2, "right": 4},
        "layer": [
            _layer(rows, "bar", {"x": x, "y": y, **_TIP}, color=colour, height={"band": 0.7}, minBandSize=2),
            _layer(rows, "text", {"x": x, "y": y, "text": {"field": "text"}}, align="left", dx=6, color=_MUTED),
        ],
    }


def draw_importance(data: WorkloadOutcome) -> Figure | None:
    """How much each parameter had to do with being among the best."""
    known = [(i, i.importance) for i in data.importance if i.importance is not None]
    shown = [(i, share) for i, share in known if share >= _LEAST_SHARE][:_MOST_BARS]
    if not shown:
        return None
    tried = data.candidates.parameters if data.candidates else ()
    parameters = {p.name: p for p in tried}
    rows = []
    for i, share in shown:
        why = parameters[i.parameter].why if i.parameter in parameters else ""
        rows.append(
            {
                "name": i.parameter,
                "value": share,
                "text": percent(share, 0 if share >= 0.095 else 1),
                "tip": f"{i.parameter}: {percent(share, 1)}" + (f"\n{why}" if why else ""),
            }
        )
    left, timed = len(known) - len(shown), shown[0][0].timed
    return Figure(
        name="importance",
        title="Importance of the parameters",
        caption=(
            f"PED-ANOVA: how far the values among the best 10% of {counted(timed, 'timed candidate')} differ from those of"
            " all; shares of the sum. Bold: structural choices."
            + (" Rough: so few are among the best that chance may have chosen them." if timed < _SURE_OF else "")
            + (f" {counted(left, 'parameter')} with less {'is' if left == 1 else 'are'} left out." if left else "")
        ),
        alt=", ".join(f"{i.parameter} {percent(share, 1)}" for i, share in shown) + ".",
        spec=_bars(rows, _ACCENT, [p.name for p in tried if p.structural]),
    )


def draw_failures(data: WorkloadOutcome) -> Figure | None:
    found = data.failures
    if not found.kinds:
        return None
    rows = [
        {
            "name": (name := kind.status.replace("_", " ")),
            "value": kind.candidates,
            "text": f"{kind.candidates:,} ({percent(kind.share, 1)})",
            "tip": f"{name}: {kind.candidates}",
        }
        for kind in found.kinds
    ]
    return Figure(
        name="failures",
        title="What was refused",
        caption=f"{found.refused:,} of {counted(data.number, 'candidate')} were refused by the search, by kind.",
        alt=", ".join(f"{row['name']} {row['value']}" for row in rows) + ".",
        spec=_bars(rows, _WARN),
    )


# Operators: what each was tried for and what it brought, as the search went on

_OPERATOR_BINS, _LANE_PX, _TALLEST = 48, 44, 0.68


def draw_operators(data: WorkloadOutcome) -> Figure | None:
    """A lane for each operator."""
    some, credits = data.candidates, data.operators
    if some is None or data.number < 2:
        return None
    bins = min(_OPERATOR_BINS, data.number)
    edges = np.linspace(0, data.number, bins + 1)
    own = [np.flatnonzero(some.operator == c.operator) for c in credits]
    made = [np.histogram(rows, edges)[0] for rows in own]
    tallest = max(int(counts.max()) for counts in made)
    bars: list[Spec] = []
    gains: list[Spec] = []
    firsts: list[Spec] = []
    for lane, (name, rows, counts) in enumerate(zip((c.operator for c in credits), own, made, strict=True)):
        better = np.histogram(rows[some.better[rows]], edges)[0]
        floor = len(credits) - 1.0 - lane
        for b in map(int, np.flatnonzero(counts)):
            first = some.order[int(np.ceil(edges[b]))]
            tip = f"{name}, from #{first} on\n{counts[b]} made, {better[b]} better than their parents"
            bar = {"x": float(edges[b]), "x2": _with_gap(edges, b), "y": floor, "tip": tip}
            bars.append({**bar, "y2": floor + _TALLEST * float(counts[b]) / tallest})
            if better[b]:
                gains.append({**bar, "y2": floor + _TALLEST * float(better[b]) / tallest})
        for row in map(int, rows[some.improvement[rows] > 0]):
            tip = f"{name}: the best so far, #{some.order[row]}"
            firsts.append({"x": row + 0.5, "y": floor, "tip": tip})
    x = _number("x", "candidates evaluated", (0, data.number), tickCount=10)
    y = _number("y", None, (0, len(credits)), values=list(range(len(credits))), labels=False)
    lanes = [
        {"y": len(credits) - 1.0 - i, "name": c.operator, "tried": f"{c.trials:,} tried"} for i, c in enumerate(credits)
    ]
    corners = {"x": x, "x2": {"field": "x2"}, "y": y, "y2": {"field": "y2"}}
    named = {"x": {"value": -10}, "y": y}
    layers = [
        _layer(bars, "rect", {**corners, **_TIP}, color=_BAND),
        _layer(gains, "rect", {**corners, **_TIP}, color=_ACCENT),
        _layer(firsts, "point", {"x": x, "y": y, **_TIP}, shape="diamond", filled=False, fill=_PAPER, stroke=_ACCENT,
               strokeWidth=1.75, size=70),
        _layer(lanes, "text", {**named, "text": {"field": "name"}}, align="right", dy=-15, limit=150),
        _layer(lanes, "text", {**named, "text": {"field": "tried"}}, align="right", dy=1, color=_MUTED),
    ]  # fmt: skip
    return Figure(
        name="operators",
        title="Operators over time",
        caption=(
            "Pale: candidates that the operator made; dark: those that were faster than the fastest of their parents;"
            " diamonds: new bests."
        ),
        alt="; ".join(
            f"{c.operator}: {counted(c.trials, 'candidate')}, {c.better} better than their parents,"
            f" {counted(c.improvements, 'new best')}"
            for c in credits
        )
        + ".",
        spec={
            "width": WIDE_PX,
            "height": _LANE_PX * len(credits) + 44,
            "padding": {"left": 2, "top": 2, "bottom": 2, "right": 14},
            "layer": [layer for layer in layers if layer["data"]["values"]],
        },
        wide=True,
    )


# Heat maps: what pairs of parameter values led to

_CELL_PX = 66, 42
_SHADES = 6


def shade(best: float, heats: Sequence[HeatMap]) -> int:
    """From 0 for the slowest best of all these maps to 5 for the fastest."""
    bests = [c.best for heat in heats for row in heat.cells for c in row if c.best is not None]
    low, high = min(bests), max(bests)
    return _SHADES - 1 if high <= low else min(_SHADES - 1, int((best - low) / (high - low) * _SHADES))


def draw_heat_map(heat: HeatMap, heats: Sequence[HeatMap]) -> Figure:
    """For a file; a page has a table of it. heats: all of the workload, in which the same colours mean the same."""
    rows = []
    for down, cells in zip(heat.rows, heat.cells, strict=True):
        for across, cell in zip(heat.columns, cells, strict=True):
            row = {"down": value_text(down), "across": value_text(across), "fill": "transparent", "ink": _MUTED}
            if cell.tried:
                row["rest"] = f"0 of {cell.tried}"
            if cell.best is not None and cell.median is not None:
                step = shade(cell.best, heats)
                row |= {"fill": f"var(--h{step})", "ink": f"var(--t{step})", "best": f"{cell.best:.2f}×"}
                row["rest"] = f"{cell.median:.2f} · {cell.tried}"
            rows.append(row)
    best = max((c for row in heat.cells for c in row if c.best), key=lambda c: c.best or 0.0, default=None)
    place = {
        "x": {**_word("across", orient="top", labelAngle=0, labelLimit=_CELL_PX[0], domain=False, ticks=False),
              "title": f"{heat.down} ↓   {heat.across} →"},
        "y": _word("down", labelLimit=110, domain=False, ticks=False),
    }  # fmt: skip
    place["x"]["axis"] |= {"titleAnchor": "start", "titleAlign": "left"}
    ink = _as_is("ink")
    with_time = [row for row in rows if "best" in row]
    layers = [
        _layer(rows, "rect", {**place, "color": _as_is("fill")}, stroke=_GRID, strokeWidth=1, cornerRadius=2),
        _layer(with_time, "text", {**place, "text": {"field": "best"}, "color": ink}, dy=-7, fontSize=12, fontWeight=600),
        _layer([row for row in rows if "rest" in row], "text", {**place, "text": {"field": "rest"}, "color": ink},
               dy=9, fontSize=11),
    ]
    return Figure(
        name=f"pair-{_slug(heat.down)}-{_slug(heat.across)}",
        title=f"{heat.down} and {heat.across}",
        caption="",
        alt=(
            f"Best speed-up for {len(heat.rows)} by {len(heat.columns)} values"
            + (f"; the best cell has {best.best:.3f}× of {counted(best.tried, 'candidate')}." if best else ".")
        ),
        spec={
            "width": {"step": _CELL_PX[0]},
            "height": {"step": _CELL_PX[1]},
            "autosize": "pad",
            "layer": [layer for layer in layers if layer["data"]["values"]],
        },
    )


def _slug(name: str) -> str:
    return "".join(ch if ch.isalnum() and ch.isascii() else "_" for ch in name)[:40]
