"""How fast the search got how far: the best speed-up so far, with its interval, and every candidate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from markupsafe import Markup

from evo.report.data import Milestone, WorkloadData
from evo.report.svg import Figure, Frame, Scale, path, tag, text, thinned
from evo.report.text import counted, duration, interval, times

__all__ = ["draw_convergence"]

_WIDTH, _HEIGHT = 500, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 52, 32, 256
_MOST_DOTS = 2_500


def draw_convergence(data: WorkloadData, against: Literal["evaluations", "seconds"]) -> Figure | None:
    """None where nothing has a time."""
    some = data.candidates
    if some is None or not np.isfinite(some.score).any():
        return None
    seconds = against == "seconds"
    x_of: Callable[[Milestone], float] = (lambda m: m.elapsed_s) if seconds else (lambda m: float(m.evaluated))
    positions = some.elapsed_s if seconds else np.arange(1, len(some) + 1, dtype=float)
    last = float(positions.max())
    frame = _frame(data, last)
    bests = _in_order(data.milestones, x_of)
    parts = [
        _reference(frame),
        frame.axes(
            "seconds of searching" if seconds else "candidates evaluated", "speed-up over the reference", unit="×"
        ),
        _dots(frame, positions, some.speedup),
        _rug(frame, positions[~some.passed]),
        _line(frame, bests, x_of, last),
        _final(frame, data),
    ]
    return Figure(
        name=f"convergence-{against}",
        title=f"Convergence against {'seconds of searching' if seconds else 'candidates evaluated'}",
        caption=(
            "Line: the best so far by the search's own timing, with its interval; dots: candidates that passed; strokes at"
            " the bottom: refused ones. At the right the leader as the finals timed it."
            + (" Broken line: something disturbed every time, and none is to be trusted." if _spoilt(bests) else "")
            if not seconds
            else "The same against time, which includes compiling. Open red circles: refused by the finals later."
        ),
        alt=_alt(data, bests, seconds),
        width=_WIDTH,
        height=_HEIGHT,
        body=Markup("").join(parts),
    )


def _frame(data: WorkloadData, last: float) -> Frame:
    assert data.candidates is not None
    known = data.candidates.speedup[np.isfinite(data.candidates.speedup)]
    # Slow outliers may lie on the floor; the line, the reference and nearly all dots do not.
    bottom = min([float(np.quantile(known, 0.02)) if len(known) else 1.0, *(m.low for m in data.milestones[:1]), 1.0])
    top = max([float(known.max(initial=0.0)), *(m.high for m in data.milestones), 1.0])
    timing = data.timing
    if timing and timing.ratio_low:
        top = max(top, 1 / timing.ratio_low)
    return Frame(
        x=Scale(low=0.0, high=max(last, 1e-9), start=_LEFT, end=_WIDTH - _RIGHT),
        y=Scale(
            low=max(0.0, bottom - 0.15 * (top - bottom)),
            high=top + 0.08 * (top - bottom or top),
            start=_BOTTOM,
            end=_TOP,
        ),
    )


def _in_order(milestones: tuple[Milestone, ...], x_of: Callable[[Milestone], float]) -> list[Milestone]:
    """Those that were better than all before them in this order, too."""
    found: list[Milestone] = []
    for m in sorted(milestones, key=x_of):
        if not found or m.speedup > found[-1].speedup:
            found.append(m)
    return found


def _reference(frame: Frame) -> Markup:
    y = frame.y(1.0)
    return path([(frame.x.start, y), (frame.x.end, y)], "unity")


def _dots(frame: Frame, positions: np.ndarray[tuple[int], np.dtype[np.float64]], speedup: object) -> Markup:
    ups = np.asarray(speedup, float)
    rows = np.flatnonzero(np.isfinite(ups))
    spots = (rows[i] for i in thinned(len(rows), _MOST_DOTS))
    drawn = "".join(f"M{frame.x(positions[r]):.1f} {frame.y(ups[r]):.1f}h0" for r in spots)
    return tag("path", d=drawn, class_="dots") if drawn else Markup("")


def _rug(frame: Frame, positions: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Markup:
    bottom = frame.y.start
    spots = sorted({round(frame.x(x), 1) for x in positions})
    drawn = "".join(f"M{x:g} {bottom - 5:g}v5" for x in spots)
    return tag("path", d=drawn, class_="rug") if drawn else Markup("")


def _line(frame: Frame, bests: list[Milestone], x_of: Callable[[Milestone], float], last: float) -> Markup:
    if not bests:
        return Markup("")
    ends = [*(x_of(m) for m in bests[1:]), last]
    spans = [(m, frame.x(x_of(m)), frame.x(end)) for m, end in zip(bests, ends, strict=True)]
    upper = [(x, frame.y(m.high)) for m, a, b in spans for x in (a, b)]
    lower = [(x, frame.y(m.low)) for m, a, b in spans for x in (a, b)]
    middle = [(x, frame.y(m.speedup)) for m, a, b in spans for x in (a, b)]
    line = "line spoilt" if _spoilt(bests) else "line"
    parts = [path([*upper, *reversed(lower)], "band", closed=True), path(middle, line)]
    for m, x, _ in spans:
        seen = f"#{m.order}: {m.speedup:.3f}× ({m.low:.3f} to {m.high:.3f}) after {duration(m.elapsed_s)}"
        note = f"{seen}; refused by the finals" if m.refused else seen
        parts.append(
            tag("circle", cx=x, cy=frame.y(m.speedup), r=4.0, class_="refused" if m.refused else "mark", data_tip=note)
        )
    return Markup("").join(parts)


def _final(frame: Frame, data: WorkloadData) -> Markup:
    timing = data.timing
    if timing is None or timing.stage != "final" or not (timing.ratio and timing.ratio_low and timing.ratio_high):
        return Markup("")
    x, y = frame.x.end + 14, frame.y(1 / timing.ratio)
    bar = path([(x, frame.y(1 / timing.ratio_low)), (x, frame.y(1 / timing.ratio_high))], "line")
    tip = f"final: {times(timing.ratio)} ({interval(timing.ratio_low, timing.ratio_high)})"
    diamond = tag("path", d=f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6-6z", class_="mark", data_tip=tip)
    label = text(x - 6, max(y - 12, 11), f"{1 / timing.ratio:.3g}×", "b sm")
    return bar + diamond + label + text(x - 6, y + 20, "final", "m sm")


def _spoilt(bests: list[Milestone]) -> bool:
    return any(m.disturbed for m in bests)


def _alt(data: WorkloadData, bests: list[Milestone], seconds: bool) -> str:
    if not bests:
        return f"{counted(data.number, 'candidate')}, none of which has a time to be trusted."
    first, best = bests[0], bests[-1]
    when = duration(best.elapsed_s) if seconds else f"{best.evaluated:,} of {counted(data.number, 'candidate')}"
    return (
        f"The best rises from {first.speedup:.3f}× in {counted(len(bests), 'step')} to {best.speedup:.3f}×, reached with"
        f" #{best.order} after {when}."
    )
