"""Scalable drawings, made of tags. Every text and attribute is escaped where it is put in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from evo.report.palette import LIGHT, figure_css
from evo.report.text import clean

__all__ = ["Figure", "Frame", "Scale", "fitted", "number", "path", "tag", "text", "thinned", "ticks"]

_MARGIN = 12
"""Around a figure that is a file of its own."""

_CHARACTER_PX = 6.4
"""Of a letter of 12 px, on average; figures only need to know whether a label will do."""


def number(value: float) -> str:
    """A coordinate, with no more digits than a screen can show."""
    written = f"{value:.1f}"
    return written.removesuffix(".0") if written != "-0.0" else "0"


def tag(name: str, /, *content: str | Markup, **attributes: object) -> Markup:
    """An element. Attributes: `class_` for class, underscores for hyphens; None leaves one out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.strip("_").replace("_", "-"), _plain(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(c if isinstance(c, Markup) else escape(clean(c)) for c in content)
    return (
        Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inside) if inside else Markup(f"<{name}{written}/>")
    )


def _plain(value: object) -> str:
    return number(value) if isinstance(value, float) else clean(value)


def text(x: float, y: float, words: str, class_: str | None = None, **attributes: object) -> Markup:
    return tag("text", words, x=float(x), y=float(y), class_=class_, **attributes)


def path(points: Iterable[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    """A line through the points."""
    joined = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return tag("path", d=f"M{joined}{'Z' if closed else ''}", class_=class_) if joined else Markup("")


def fitted(words: str, width: float) -> str:
    """`words`, cut to about as many letters as fit `width`."""
    most = max(1, int(width / _CHARACTER_PX))
    return words if len(words) <= most else words[: max(1, most - 1)].rstrip() + "…"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with what is to be said of it.

    name: of a file. title: what it shows; caption: how it is to be read; alt: what is to be seen in it, for those who
    cannot. body: what is inside the svg element. interactive: it has parts that can be reached by keyboard. height,
    width: of its own coordinates; `wide` ones take a whole column.
    """

    name: str
    title: str
    caption: str
    alt: str
    width: int
    height: int
    body: Markup
    interactive: bool = False

    @property
    def wide(self) -> bool:
        return self.width > 600

    def inline(self, *, fixed: bool = False) -> Markup:
        """As a part of a page, whose style has the colours. fixed: as large as its coordinates say, not as its place."""
        role = "group" if self.interactive else "img"
        size: dict[str, object] = {"width": self.width, "height": self.height} if fixed else {}
        return self._svg(self.body, margin=0, class_="fig", role=role, aria_label=f"{self.title}. {self.alt}", **size)

    def document(self) -> str:
        """As a file of its own, on white."""
        style = tag("style", Markup(figure_css({**LIGHT, "paper": "#ffffff"})))
        width, height = self.width + 2 * _MARGIN, self.height + 2 * _MARGIN
        paper = tag("rect", x=-_MARGIN, y=-_MARGIN, width=width, height=height, fill="#ffffff")
        described = tag("title", self.title) + tag("desc", f"{self.alt} {self.caption}")
        whole = self._svg(
            described + style + paper + self.body,
            margin=_MARGIN, class_="fig", xmlns="http://www.w3.org/2000/svg", width=width, height=height,
        )  # fmt: skip
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}\n'

    def _svg(self, inside: Markup, /, *, margin: int = 0, **attributes: object) -> Markup:
        box = f"{-margin} {-margin} {self.width + 2 * margin} {self.height + 2 * margin}"
        return tag("svg", inside, viewBox=box, **attributes)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values of a range laid out between two coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        share = (value - self.low) / span
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values from `low` to `high`, about as many as wanted."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / max(wanted, 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The axes of a figure, and what is drawn before its marks."""

    x: Scale
    y: Scale

    def axes(self, x_title: str, y_title: str, *, unit: str = "") -> Markup:
        """Lines for round values, their labels, the axes' names."""
        x, y = self.x, self.y
        parts = []
        for value in ticks(y.low, y.high):
            parts.append(path([(x.start, y(value)), (x.end, y(value))], "grid"))
            parts.append(text(x.start - 7, y(value) + 4, f"{value:g}{unit}", "m sm e"))
        for value in ticks(x.low, x.high):
            parts.append(path([(x(value), y.start), (x(value), y.start + 4)], "axis"))
            parts.append(text(x(value), y.start + 17, f"{value:,g}", "m sm c"))
        parts.append(path([(x.start, y.start), (x.end, y.start)], "axis"))
        parts.append(text(x.end, y.start + 34, x_title, "m sm e"))
        parts.append(text(0, y.end - 12, y_title, "m sm"))
        return Markup("").join(parts)


def thinned(number_of: int, most: int) -> Sequence[int]:
    """Indices of at most `most` of so many things, evenly spread."""
    step = max(1, -(-number_of // most))
    return range(0, number_of, step)
