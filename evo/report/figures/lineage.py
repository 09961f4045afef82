"""Where the winner came from: its ancestors, by when they were tried and how fast they were."""

from __future__ import annotations

from markupsafe import Markup

from evo.analysis.records import Step
from evo.report.data import WorkloadData
from evo.report.svg import Figure, Scale, path, tag, text, ticks
from evo.report.text import counted, short, value_text

__all__ = ["change_text", "draw_lineage", "gain_text", "shown_steps"]

_WIDTH, _HEIGHT = 1000, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 60, 34, 282
_MOST = 90
_APART = 46, 16
"""Pixels, across and down, between two written gains."""


def shown_steps(data: WorkloadData) -> list[Step]:
    """All ancestors, or of very many the main line and its parents, or the last of these."""
    steps = list(data.steps)
    if len(steps) > _MOST:
        near = {p.id for s in steps if s.main_line for p in s.parents}
        steps = [s for s in steps if s.main_line or s.id in near]
    return [s for s in steps if s.main_line][-_MOST:] if len(steps) > 2 * _MOST else steps


def gain_text(step: Step) -> str:
    if step.gain is None:
        return ""
    return "tie" if step.tie or step.gain == 1 else f"{100 * (step.gain - 1):+.1f}%"


def change_text(step: Step) -> str:
    if not step.parents:
        return "the first of its line"
    parts = [f"{name}: {value_text(a)} → {value_text(b)}" for name, (a, b) in step.change.items()]
    return ", ".join(parts) or "nothing that the genome shows"


def draw_lineage(data: WorkloadData, anchor: str = "") -> Figure | None:
    """None where there is no leader. anchor: what the ids of the list's rows begin with, to be linked to."""
    steps = shown_steps(data)
    if not steps:
        return None
    places = _places(steps)
    main = [s for s in steps if s.main_line]
    edges = [_edge(places, parent.id, s, main=False) for s in steps for parent in s.parents[1:]]
    edges += [_edge(places, s.parents[0].id, s, main=s.main_line) for s in steps if s.parents]
    labelled = _labelled(main, places)
    nodes = [_node(places[s.id], s, anchor, last=s is steps[-1], label=s.id in labelled) for s in steps]
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
        width=_WIDTH,
        height=_HEIGHT,
        body=_axes(steps) + Markup("").join([*edges, *nodes]),
        interactive=True,
    )


def _told_of(main: list[Step]) -> str:
    """What is written at the steps of the main line."""
    gains = [gain_text(s) for s in main if s.gain is not None]
    if gains and all(gain == "tie" for gain in gains):
        return ", each step of which is a tie: its gain may be chance" if len(gains) > 1 else ", whose step is a tie"
    return ", with the gains of steps that are no ties" if gains else ""


def _labelled(main: list[Step], places: dict[str, tuple[float, float]]) -> set[str]:
    """Whose gain is written: the largest, as far as they do not cover each other or the last one's."""
    taken, found = [places[main[-1].id]] if main else [], set()
    for step in sorted(main[:-1], key=lambda s: -abs((s.gain or 1) - 1)):
        x, y = places[step.id]
        free = all(abs(x - u) > _APART[0] or abs(y - v) > _APART[1] for u, v in taken)
        if free and step.gain is not None and not step.tie:
            taken.append((x, y))
            found.add(step.id)
    return found


def _scale(steps: list[Step]) -> Scale:
    ups = [1 / s.score for s in steps if s.score] or [1.0]
    low, high = min(ups), max(ups)
    margin = 0.08 * (high - low) or 0.05 * high
    return Scale(low=max(0.0, low - margin), high=high + margin, start=_BOTTOM - 18, end=_TOP)


def _places(steps: list[Step]) -> dict[str, tuple[float, float]]:
    """Candidates without a time, which only a repaired record can have, stand on the floor."""
    y, wide = _scale(steps), max(len(steps) - 1, 1)
    step = (_WIDTH - _LEFT - _RIGHT - 30) / wide
    first = _LEFT + 15 if len(steps) > 1 else (_LEFT + _WIDTH - _RIGHT) / 2
    return {s.id: (first + i * step, y(1 / s.score) if s.score else float(_BOTTOM)) for i, s in enumerate(steps)}


def _axes(steps: list[Step]) -> Markup:
    y, right = _scale(steps), _WIDTH - _RIGHT
    parts = [text(0, 16, "speed-up over the reference", "m sm")]
    for value in ticks(y.low, y.high):
        parts.append(path([(_LEFT, y(value)), (right, y(value))], "grid"))
        parts.append(text(_LEFT - 7, y(value) + 4, f"{value:g}×", "m sm e"))
    parts.append(path([(_LEFT, _BOTTOM), (right, _BOTTOM)], "axis"))
    places, apart = _places(steps), max(1, -(-len(steps) // 16))
    for i, s in enumerate(steps):
        if i == len(steps) - 1 or (i % apart == 0 and len(steps) - 1 - i >= apart):
            parts.append(text(places[s.id][0], _BOTTOM + 17, f"#{s.order}", "m sm c"))
    parts.append(text(right, _BOTTOM + 36, "ancestors, by when they were tried", "m sm e"))
    return Markup("").join(parts)


def _edge(places: dict[str, tuple[float, float]], parent: str, child: Step, *, main: bool) -> Markup:
    if parent not in places or child.id not in places:
        return Markup("")
    (x, y), (u, v) = places[parent], places[child.id]
    middle = (x + u) / 2
    curve = f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {v:.1f} {u:.1f} {v:.1f}"
    return tag("path", d=curve, class_="main" if main else "edge")


def _node(place: tuple[float, float], step: Step, anchor: str, *, last: bool, label: bool) -> Markup:
    x, y = place
    up = f"{1 / step.score:.3f}×" if step.score else step.status.replace("_", " ")
    gain = gain_text(step)
    told = f"#{step.order} {short(step.id)}: {up}, by {step.operator}"
    lines = [told, change_text(step)] + ([f"gain over its first parent: {gain}"] if gain else [])
    radius = 7.0 if last else 5.5 if step.main_line else 4.0
    mark = tag("circle", cx=x, cy=y, r=radius, class_="mark" if step.main_line else "side")
    target = tag("circle", cx=x, cy=y, r=12.0, fill="transparent")
    written = text(x, y - 11, up if last else gain, f"sm c{' b' if last else ''}") if last or label else Markup("")
    tip = "\n".join(lines)
    if not anchor:
        return mark + written
    return (
        tag("a", target, mark, href=f"#{anchor}{step.order}", aria_label=tip.replace("\n", ". "), data_tip=tip)
        + written
    )
