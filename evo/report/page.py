"""A run as one HTML file that needs nothing else, and its figures as files.

The styles, the figures and the small script of the page are inside. A file is written whole or not at all, and replaces
nothing but a report.

Figures are Vega-Lite specifications, which vl-convert draws as SVG and PNG without a browser. Each figure has a function,
which returns None where the run has nothing to show. A colour is written `var(--name)`: a page defines these names for a
light and a dark screen, a file gets the light ones. The description of a mark becomes its `aria-label` in the SVG, which
screen readers say and templates/page.js shows beside the pointer.
"""

import base64
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from evo.analysis.descent import Kin
from evo.analysis.finals import ceiling_note
from evo.analysis.outcome import Milestone, RunOutcome, WorkloadOutcome
from evo.analysis.scores import Score
from evo.errors import UsageError
from evo.lineage.database import check_folder, command_line
from evo.problem.space import Value
from evo.report import sentences
from evo.report.sentences import run_headline, size
from evo.report.text import counted, duration, interval, micro, micros, percent, short, times, value_text, visible

_GENERATOR = "evo report"
_FOLDER = Path(__file__).parent / "templates"
_HEAD_BYTES = 400

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#fdfdfb", "#14171a"), "ink": ("#1b1f24", "#e7e8e5"), "muted": ("#555c66", "#a7adb5"),
    "rule": ("#d8dad4", "#363b41"), "soft": ("#f2f3ee", "#1c2024"), "grid": ("#e4e6e0", "#2a2f34"),
    "accent": ("#0b5fa5", "#78b8f2"), "warn": ("#9f2d13", "#ff9d80"), "good": ("#17694b", "#6fd0a5"),
    "dot": ("#7d8794", "#77818c"), "band": ("#bcd5ea", "#23435f"),
}  # fmt: skip
"""Colours on a light and on a dark screen. Text and marks have the contrast that WCAG 2 asks for at level AA."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            value if isinstance(value, Markup) or not isinstance(value, str) else visible(value, lines=True)
        ),
    )
    environment.filters |= {
        "change": change_text, "counted": counted, "duration": duration, "gain": gain_text, "micro": micro,
        "attributes": vars, "percent": percent, "short": short, "size": size, "times": times, "value": value_text,
    }  # fmt: skip
    environment.globals |= {name: getattr(sentences, name) for name in sentences.__all__}
    environment.globals |= {
        "ceiling_note": ceiling_note, "command_line": command_line, "draw_workload": draw_workload, "interval": interval,
        "micros": micros,
    }  # fmt: skip
    return environment


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _style() -> str:
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in COLOURS.items())
    return (_FOLDER / "style.css").read_text(encoding="utf-8").replace("/*COLOURS*/", colours)


@cache
def _script(live: bool) -> str:
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.js", *(["live.js"] if live else [])))


def policy_of(*, live: bool) -> str:
    """The policy of a page: a browser may use its own style and script, and on a live page ask its own server."""
    style, script = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (_style(), _script(live)))
    own = f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src data:; base-uri 'none'"
    return f"{own}; form-action 'none'" + ("; connect-src 'self'" if live else "")


def render_body(data: RunOutcome, *, live: bool = False) -> str:
    """The body of a page, which a live page exchanges."""
    return render("report.html.j2", data=data, run=data.run, live=live)


def render_page(data: RunOutcome) -> str:
    """The whole HTML file."""
    return render_frame(run_headline(data), render_body(data))


def render_frame(title: str, body: str, *, live: bool = False) -> str:
    """A page around its body, with all that it needs to be shown. live: whether it may ask its server for more."""
    parts = {"style": _style(), "script": _script(live), "body": body}
    marked = {name: Markup(text) for name, text in parts.items()}
    return render("page.html.j2", title=title, generator=_GENERATOR, policy=policy_of(live=live), **marked)


def check_replaceable(out: Path) -> None:
    """Raises UsageError unless `out` can become a report: it does not exist yet, or is a report."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, such as {out / 'report.html'}")
    if not out.is_file():  # nothing, or a pipe or device such as /dev/stdout
        if not out.exists():
            check_folder(out.parent, "--out", f"cannot write {out}")
        return
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read --out {out}: {error.strerror or error}") from error
    if head and f'content="{_GENERATOR}"'.encode() not in head:
        raise UsageError(f"--out {out} is there and is not a report of evo's; it is left as it is: name another file")


def write_figures(folder: Path, data: RunOutcome) -> list[Path]:
    """Writes every figure as SVG and as PNG; names begin with the workload's number where a run has several.

    Raises UsageError where a file cannot be written.
    """
    written = []
    for number, workload in enumerate(data.workloads, 1):
        for figure in draw_workload(workload).values():
            name = f"w{number}-{figure.name}" if len(data.workloads) > 1 else figure.name
            written += write_figure(folder / name, figure)
    return written


def write_file(out: Path, content: bytes) -> None:
    """Writes a file, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():  # a device or a pipe is written to, never replaced
            out.write_bytes(content)
            return
        out = out.resolve()
        part = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error


# -- the figures ---------------------------------------------------------------------------------------------------

HALF_PX, WIDE_PX = 420, 1000
"""Widths of figures that stand side by side or fill a phone, and of those that take a whole page."""
PNG_SCALE = 3
"""Pixels of a PNG for each unit of its figure: 300 dots an inch where that is a third of a column wide."""

Spec = dict[str, Any]

_NEEDLESS = re.compile(
    r' (?:aria-roledescription="[^"]*"|font-family="[^"]*"|opacity="1"|pointer-events="none")'
    r'|<path class="(?:background|foreground)"[^>]*/>'
)
"""Parts of a drawing that a page does not need."""
_VEGA_BASE = 'xlink:href="https://vega.github.io/vega-datasets/#'
"""The text that Vega makes of a link within the page."""

_INK, _MUTED, _GRID, _PAPER = "var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)"
_ACCENT, _WARN, _DOT, _BAND = "var(--accent)", "var(--warn)", "var(--dot)", "var(--band)"
# Fonts are larger here than the page shows them on a desktop: its own font may be wider than the one that room is left for.
_CONFIG: Spec = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "text": {"color": _INK, "fontSize": 13},
    "circle": {"opacity": 1, "strokeWidth": 1},
    "point": {"opacity": 1},
    # Without aria: the figure's own words say what its axes are.
    "axis": {
        "aria": False, "labelColor": _MUTED, "titleColor": _MUTED, "titleFontWeight": "normal", "titleAnchor": "end",
        "gridColor": _GRID, "domainColor": _MUTED, "tickColor": _MUTED, "labelFontSize": 13, "titleFontSize": 13,
        "titlePadding": 8,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6, "titleAngle": 0, "titleAlign": "left", "titleX": -34,
              "titleY": -9, "titleBaseline": "bottom"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with its words.

    name: a file's name. title: the subject; caption: how to read it; alt: what it shows, for screen readers. layers: layers
    of Vega-Lite; those without data are left out. height: the plot's height in pixels. upright: the same for a phone.
    """

    name: str
    title: str
    caption: str
    alt: str
    layers: Sequence[Spec]
    height: int
    wide: bool = False
    upright: "Figure | None" = None

    def inline(self) -> Markup:
        """The figure as a part of a page, whose style has the colours."""
        svg = _NEEDLESS.sub("", self._svg()).replace(_VEGA_BASE, 'href="#')
        role = "group" if "href=" in svg else "img"
        head = Markup('class="fig" role="{}" aria-label="{}. {}"').format(role, visible(self.title), visible(self.alt))
        return Markup(svg.replace('class="marks"', head, 1))

    def document(self) -> str:
        """The figure as an SVG file on white, without links into a page."""
        svg = re.sub(r"</?a\b[^>]*>", "", self._svg()).replace(_PAPER, "#ffffff")
        svg = re.sub(r"var\(--(\w+)\)", lambda found: COLOURS[found[1]][0], svg)
        words = Markup("<title>{}</title><desc>{} {}</desc>").format(visible(self.title), visible(self.alt), self.caption)
        return svg.replace(">", f'>{words}<rect width="100%" height="100%" fill="#ffffff"/>', 1)

    def png(self) -> bytes:
        return vl_convert.svg_to_png(self.document(), scale=PNG_SCALE)

    def _svg(self) -> str:
        spec = {
            "width": WIDE_PX if self.wide else HALF_PX,
            "height": self.height,
            "autosize": {"type": "fit", "contains": "padding"},
            "padding": {"left": 10, "top": 2, "bottom": 2, "right": 24},
            "background": None,
            "config": _CONFIG,
            "layer": [layer for layer in self.layers if layer["data"]["values"]],
        }
        text = json.dumps(spec, ensure_ascii=False).encode("utf-8", "replace").decode()
        return visible(vl_convert.vegalite_to_svg(text), lines=True)


def write_figure(out: Path, figure: Figure) -> list[Path]:
    """Writes a figure as OUT.svg and OUT.png. Raises UsageError where a file cannot be written."""
    files = {f"{out}.svg": figure.document().encode(), f"{out}.png": figure.png()}
    for name, content in files.items():
        write_file(Path(name), content)
    return [*map(Path, files)]


def draw_workload(data: WorkloadOutcome, anchor: str = "") -> dict[str, Figure]:
    """All figures of a workload by name. anchor: the name of its section, for links."""
    if not data.number:
        return {}
    drawn = (
        draw_convergence(data, "evaluations"),
        draw_convergence(data, "seconds"),
        draw_lineage(data, anchor),
        _draw_importance(data),
        *_draw_pairs(data),
    )
    return {figure.name: figure for figure in drawn if figure is not None}


def _layer(rows: Sequence[Spec], mark: str, encoding: Spec, **properties: Any) -> Spec:
    """A mark for each row, described by the row's `tip`. Without a tip, or with aria=False, screen readers skip it."""
    aria = properties.pop("aria", bool(rows) and "tip" in rows[0])
    return {
        "data": {"values": list(rows)},
        "mark": {"type": mark, "aria": aria, **properties},
        "encoding": {**encoding, **({"description": {"field": "tip"}} if aria else {})},
    }


def _number(field: str, title: str | None, domain: tuple[float, float], **axis: Any) -> Spec:
    """A channel of numbers. domain: the limits of its scale; a number outside is drawn at the edge."""
    scale = {"domain": list(domain), "nice": False, "zero": False, "clamp": True}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _word(field: str, words: Sequence[str], title: str | None = None, **axis: Any) -> Spec:
    """A channel of words in a given order."""
    return {"field": field, "type": "nominal", "scale": {"domain": list(words)}, "title": title, "axis": axis}


def _speedup(speedups: Sequence[float]) -> Spec:
    """A channel of these speed-ups. It begins at zero, so that a gain of a tenth looks like a tenth."""
    top = 1.08 * max(1.0, *speedups)
    return _number("y", "speed-up over the reference", (0.0, top), labelExpr="datum.label + '×'", tickCount=6)


# Convergence: the best so far, over candidates and time

_MOST_DOTS, _MOST_STROKES = 1_500, 200


def draw_convergence(data: WorkloadOutcome, against: Literal["evaluations", "seconds"]) -> Figure | None:
    """The best speed-up so far, with its interval, and every candidate."""
    if not data.milestones:
        return None
    seconds = against == "seconds"
    positions = data.elapsed_s if seconds else np.arange(1, data.number + 1, dtype=float)
    last = max(float(positions.max()), 1e-9)
    bests: list[Spec] = []
    for m in sorted(data.milestones, key=lambda m: m.elapsed_s if seconds else m.evaluated):
        if not bests or 1 / m.ratio > bests[-1]["y"]:
            place = m.elapsed_s if seconds else m.evaluated
            bests.append({"x": place, "y": 1 / m.ratio, "low": m.low, "high": m.high, "tip": _best_tip(m)})
    line = [*bests, {**bests[-1], "x": last}]
    refused = sorted({round(float(p) / last * _MOST_STROKES) for p in positions[~data.passed]})
    x_title = "seconds of searching" if seconds else "candidates evaluated"
    final, highest = _final_row(data), float(data.speedup[np.isfinite(data.speedup)].max())
    x = _number("x", x_title, (0.0, last), tickCount=6)
    y = _speedup([highest, *(m.high for m in data.milestones), *([final["y"]] if final else [])])
    at_bottom = {"value": {"expr": "height - 3"}}
    layers = [
        _layer([{"y": 1.0}], "rule", {"y": y}, color=_MUTED, strokeDash=[4, 3]),
        _layer(dots := _dots(positions, data.speedup), "line", {"x": x, "y": y, "order": {"field": "place"}}, color=_DOT,
               strokeWidth=min(5, max(3, 120 / len(dots) ** 0.5)), strokeCap="round", invalid="break-paths-filter-domains"),
        _layer([{"x": place / _MOST_STROKES * last} for place in refused], "tick", {"x": x, "y": at_bottom},
               orient="vertical", color=_WARN, size=6, thickness=1),
        _layer(line, "area", {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}, interpolate="step-after",
               color=_BAND, opacity=0.75, aria=False),
        _layer(line, "line", {"x": x, "y": y}, interpolate="step-after", color=_ACCENT, strokeWidth=2, aria=False),
        _layer(bests, "circle", {"x": x, "y": y}, color=_ACCENT, stroke=_PAPER, size=55),
    ]  # fmt: skip
    if final is not None:
        beside = {"x": {"value": {"expr": "width + 8"}}, "y": y, "text": {"field": "text"}}
        layers.append(_layer([final], "text", beside, align="left", fontWeight=600, color=_ACCENT))
    caption = "The same against time, which includes compiling." if seconds else (
        "Line: the best so far by the search's own timing, with its interval; dots: candidates that passed; strokes at"
        " the bottom: refused ones; dashed: the reference. At the right: the leader as the finals timed it."
    )
    best, rise = data.milestones[-1], f"from {1 / data.milestones[0].ratio:.3f}× in {counted(len(bests), 'step')}"
    when = duration(best.elapsed_s) if seconds else f"{best.evaluated:,} of {counted(data.number, 'candidate')}"
    alt = f"The best rises {rise} to {1 / best.ratio:.3f}×, reached with #{best.order} after {when}."
    return Figure(
        name=f"convergence-{against}",
        title=f"Convergence against {x_title}",
        caption=caption,
        alt=alt,
        layers=layers,
        height=280,
    )


def draw_scores(name: str, title: str, scores: Sequence[Score]) -> Figure:
    """The curves of samplers on a recorded space, with their intervals; the legend has the scores that the table prints."""
    rows, labels = list[Spec](), list[str]()
    lowest = max(-1.0, min(0.0, *(min(s.curve_low or s.curve or (0.0,)) for s in scores)))
    for s in scores:
        labels.append(f"{s.sampler} {s.score:.3f}" + (f" ({s.low:.3f} to {s.high:.3f})" if s.low is not None else ""))
        curve = s.curve or ()
        for i, limits in enumerate(zip(curve, s.curve_low or curve, s.curve_high or curve, strict=True)):
            middle, low, high = (max(value, lowest) for value in limits)
            rows.append({"x": (i + 0.5) / len(curve), "y": middle, "low": low, "high": high, "who": labels[-1]})
    x = _number("x", "share of the budget", (0.0, 1.0), tickCount=6)
    y = _number("y", "share of the way to the best", (lowest, 1.0), tickCount=6)
    colours = {"domain": labels, "range": [_ACCENT, _WARN, _MUTED, _INK]}
    key = {"orient": "top", "columns": 1, "labelLimit": 0, "labelFontSize": 13, "labelColor": _INK, "symbolType": "stroke",
           "symbolStrokeWidth": 3, "symbolOpacity": 1, "offset": 30, "title": None, "aria": False}  # fmt: skip
    who: Spec = {"field": "who", "type": "nominal", "scale": colours, "legend": key}
    band = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": who}
    return Figure(
        name=name,
        title=title,
        caption="0 is random search, 1 the best configuration. The budget is what random search takes to come 95% of the way"
        " from the median to the best. Line: at the repeats' mean rank; band: its 95% interval; score: the line's mean.",
        alt=f"Scores: {'; '.join(labels)}.",
        layers=[
            _layer([{"y": 0.0}], "rule", {"y": y}, color=_MUTED, strokeDash=[4, 3]),
            _layer(rows, "area", band, opacity=0.18, aria=False),
            _layer(rows, "line", {"x": x, "y": y, "color": who}, strokeWidth=2),
        ],
        height=300 + 20 * len(labels),
    )


def _dots(positions: NDArray[np.float64], speedup: NDArray[np.float64]) -> list[Spec]:
    """The points of one path, because a million candidates must not become a million elements: a line that breaks after
    every point and has round ends looks like dots."""
    rows = np.flatnonzero(np.isfinite(speedup))
    points: list[Spec] = []
    for row in rows[:: max(1, -(-len(rows) // _MOST_DOTS))]:
        points += [{"x": float(positions[row]), "y": float(speedup[row])}, {"x": float(positions[row]), "y": None}]
    return [{"place": place, **point} for place, point in enumerate(points)]


def _best_tip(m: Milestone) -> str:
    seen = f"#{m.order}: {1 / m.ratio:.3f}× ({m.low:.3f} to {m.high:.3f}) after {duration(m.elapsed_s)}"
    return f"{seen}; refused by the finals" if m.refused else seen


def _final_row(data: WorkloadOutcome) -> Spec | None:
    """The leader's speed-up in the finals; None where there is none."""
    timing = data.timing
    if timing is None or timing.stage != "final" or not timing.ratio or timing.disturbed:
        return None
    tip = f"final: {times(timing.ratio)} ({interval(timing.ratio_low, timing.ratio_high)})"
    return {"y": 1 / timing.ratio, "text": f"final {1 / timing.ratio:.2f}×", "tip": tip}


# Lineage: the ancestors of the leader

_MOST_STEPS, _MOST_LABELS = 90, 20


def gain_text(step: Kin) -> str:
    if step.gain is None or not sentences.is_sure(step):
        return ""
    return "tie" if step.tie or step.gain == 1 else f"{100 * (step.gain - 1):+.1f}%"


def change_text(step: Kin) -> str:
    if not step.parents:
        return "the first of its line"
    parts = [f"{name}: {value_text(a)} → {value_text(b)}" for name, (a, b) in step.change.items()]
    return ", ".join(parts) or "nothing that the genome shows"


def draw_lineage(data: WorkloadOutcome, anchor: str, *, upright: bool = False) -> Figure | None:
    """The ancestors in the order of their trial, with their speed-ups; of very many, the last ones of the main line. Marks
    link to the rows of the section's table, whose ids begin with its anchor. upright: one below the other, for a phone."""
    steps = [s for s in data.steps if s.score]
    if len(steps) > _MOST_STEPS:
        steps = [s for s in steps if s.main_line][-_MOST_STEPS:]
    main, left = [s for s in steps if s.main_line], len(data.steps) - len(steps)
    if not main:
        return None
    rows = {s.id: _step_row(s, anchor) for s in steps}
    edges = [
        {"x": rows[parent.id]["x"], "y": rows[parent.id]["y"], "x2": rows[s.id]["x"], "y2": rows[s.id]["y"],
         "main": s.main_line and i == 0}
        for s in steps for i, parent in enumerate(s.parents) if parent.id in rows
    ]  # fmt: skip
    along, up = ("y", "x") if upright else ("x", "y")
    place = {
        along: _word("x", [row["x"] for row in rows.values()], labelAngle=0, labelOverlap=True, domain=False, ticks=False),
        up: _speedup([row["y"] for row in rows.values()]),
    }  # fmt: skip
    place[up]["axis"] |= {"grid": True, "tickCount": 4 if upright else 6}
    ends = {**place, f"{along}2": {"field": "x2"}, f"{up}2": {"field": "y2"}}
    beside = {"aria": False, **({"align": "left", "dx": 11} if upright else {"dy": -14})}
    marks, written = {**place, "href": {"field": "href"}}, {**place, "text": {"field": "text"}}
    told = [s for s in main[:-1] if s.gain is not None and not s.tie and len(steps) <= _MOST_LABELS]
    layers = [
        _layer([{"y": 1.0}], "rule", {up: place[up]}, color=_MUTED, strokeDash=[4, 3]),
        _layer([e for e in edges if not e["main"]], "rule", ends, color=_DOT),
        _layer([e for e in edges if e["main"]], "rule", ends, color=_ACCENT, strokeWidth=2.25),
        _layer([rows[s.id] for s in steps if not s.main_line], "circle", marks, color=_PAPER, stroke=_DOT,
               strokeWidth=1.5, size=55),
        _layer([rows[s.id] for s in main], "circle", marks, color=_ACCENT, stroke=_PAPER, size=105),
        _layer([{**rows[s.id], "text": gain_text(s)} for s in told], "text", written, **beside),
        _layer([{**rows[main[-1].id], "text": times(main[-1].score)}], "text", written, fontWeight=600, **beside),
    ]  # fmt: skip
    return Figure(
        name="lineage",
        title="Lineage of the leader",
        caption=(
            "The ancestors in the order in which they were tried, with their speed-up by the search's own timing. Blue: the"
            " main line, through first parents, with the gains of steps that are no ties; grey: other parents; dashed: the"
            " reference."
            + (f" Left out: {counted(left, 'candidate')} without a time, or further from the leader." if left > 0 else "")
        ),
        alt=(
            f"{counted(len(data.steps), 'candidate')}, {len(main)} of them on the main line, which leads from"
            f" #{main[0].order} to #{main[-1].order}. The table below says what each changed."
        ),
        layers=layers,
        height=min(24 * len(steps), 10 * len(steps) + 280) + 40 if upright else 330,
        wide=not upright,
        upright=None if upright else draw_lineage(data, anchor, upright=True),
    )


def _step_row(step: Kin, anchor: str) -> Spec:
    """The row of a step, which has a time."""
    assert step.score
    tip = f"#{step.order} {short(step.id)}: {times(step.score)}, by {step.operator}\n{change_text(step)}"
    if gain := gain_text(step):
        tip += f"\ngain over its first parent: {gain}"
    return {"x": f"#{step.order}", "y": 1 / step.score, "href": f"#{anchor}-step-{step.order}", "tip": tip}


# Importance of the parameters

_BAR_PX = 24
_MOST_BARS, _LEAST_SHARE, _SURE_OF = 12, 0.005, 50


def _draw_importance(data: WorkloadOutcome) -> Figure | None:
    """The importance of each parameter for being among the best."""
    shown = [(i, share) for i in data.importance if (share := i.importance or 0.0) >= _LEAST_SHARE][:_MOST_BARS]
    if not shown:
        return None
    tried = {p.name: p for p in data.parameters}
    rows = [
        {
            "name": i.parameter,
            "share": share,
            "text": percent(share, 0 if share >= 0.095 else 1),
            "tip": f"{i.parameter}: {percent(share, 1)}\n{tried[i.parameter].why}".strip(),
        }
        for i, share in shown
    ]
    structural = [p.name for p in data.parameters if p.structural]
    bold = {"condition": {"test": {"field": "value", "oneOf": structural}, "value": 600}, "value": 400}
    room = 1.15 * shown[0][1]  # the longest bar's text needs some
    place = {
        "x": {**_number("share", None, (0.0, room)), "axis": None},
        "y": _word("name", [i.parameter for i, _ in shown], domain=False, labelLimit=150, labelColor=_INK,
                   labelFontWeight=bold),
    }  # fmt: skip
    timed = shown[0][0].timed
    return Figure(
        name="importance",
        title="Importance of the parameters",
        caption=(
            f"PED-ANOVA: how far the values among the best 10% of {counted(timed, 'timed candidate')} differ from those of"
            f" all; shares of the sum. Bold: structural choices. Shown: {_MOST_BARS} at most, from {_LEAST_SHARE:.1%} on."
            + (" Rough: so few are among the best that chance may have chosen them." if timed < _SURE_OF else "")
        ),
        alt=", ".join(f"{i.parameter} {percent(share, 1)}" for i, share in shown) + ".",
        layers=[
            _layer(rows, "bar", place, color=_ACCENT, height={"band": 0.7}, minBandSize=2),
            _layer(rows, "text", {**place, "text": {"field": "text"}}, align="left", dx=6, color=_MUTED, aria=False),
        ],
        height=_BAR_PX * len(rows) + 8,
    )


# Pairs: the best with two values together

_PAIRED, _MOST_VALUES, _MOST_ACROSS = 3, 12, 8
_CELL_PX, _LABEL_PX = 26, 100


def _draw_pairs(data: WorkloadOutcome) -> Iterator[Figure]:
    """A map for every pair of the three parameters that mattered most."""
    number = {p.name: len(p.values) for p in data.parameters}
    chosen = [name for name in data.important if 1 < number[name] <= _MOST_VALUES][:_PAIRED]
    for pair in combinations(chosen, 2):
        across, down = sorted(pair, key=lambda name: number[name])
        if number[across] <= _MOST_ACROSS:
            yield _draw_pair(data, down, across)


def _draw_pair(data: WorkloadOutcome, down: str, across: str) -> Figure:
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, point in enumerate(data.points):
        members[value_text(point.get(down)), value_text(point.get(across))].append(number)
    lines, columns = (_names(data, name) for name in (down, across))
    rows: list[Spec] = []
    for (line, column), own in members.items():
        ups = data.speedup[own][np.isfinite(data.speedup[own])]
        tip = f"{down}={line}, {across}={column}\n{data.passed[own].sum()} of {len(own)} passed"
        if len(ups):
            tip += f"\nbest {ups.max():.3f}×, median {np.median(ups):.3f}×"
        best = {"best": float(ups.max()), "text": f"{ups.max():.2f}"} if len(ups) else {"text": "0"}
        rows.append({"x": column, "y": line, "tip": tip, **best})
    timed = [row for row in rows if "best" in row]
    place = {
        "x": _word("x", columns, orient="top", labelAngle=0, labelLimit=(HALF_PX - _LABEL_PX) // len(columns), domain=False,
                   ticks=False),
        "y": _word("y", lines, labelLimit=_LABEL_PX, labelColor=_INK),
    }  # fmt: skip
    top = max((row["best"] for row in timed), default=1.0)
    scale = {"type": "log", "domain": [top / 2, top], "range": [0.04, 0.45], "nice": False, "clamp": True}
    shade = {"field": "best", "type": "quantitative", "legend": None, "scale": scale}
    return Figure(
        name=re.sub("[^A-Za-z0-9-]", "_", f"pair-{down[:40]}-{across[:40]}"),
        title=f"{down} ↓ {across} →",
        caption="The best speed-up with these two values, shaded from half the highest on. 0: none passed; empty: never"
        " tried; –: the parameter has no part.",
        alt=f"Best speed-up for {len(lines)} by {len(columns)} values, in {counted(len(rows), 'cell')} with candidates.",
        layers=[
            _layer(timed, "rect", {**place, "fillOpacity": shade}, color=_ACCENT, stroke=_PAPER, strokeWidth=2),
            _layer(timed, "text", {**place, "text": {"field": "text"}}, fontSize=12, aria=False),
            _layer([row for row in rows if "best" not in row], "text", {**place, "text": {"field": "text"}}, color=_MUTED),
        ],
        height=_CELL_PX * len(lines) + 28,
    )


def _names(data: WorkloadOutcome, parameter: str) -> list[str]:
    """The names of the values that were tried, and a dash for candidates in which the parameter has no part."""
    values: list[Value | None] = [v for p in data.parameters if p.name == parameter for v in p.values]
    absent = [None] if any(parameter not in point for point in data.points) else []
    return [value_text(value) for value in (*values, *absent)]
