"""Values out of a database as cells of a table: nothing in them is markup, and none of them moves the cursor."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from evo.search.edits import Change

__all__ = ["cell", "change_text", "factor", "figure", "format_duration", "interval", "share", "visible"]


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with every character that does not print (control characters, changes of direction) as its escape. lines:
    but line ends and tabs as they are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def cell(value: Any, style: str = "") -> Text:
    """Any value as it is to be read; "-" for None."""
    return Text(visible(_text(value)), style=style)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    return "-" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def format_duration(seconds: float) -> str:
    whole = int(max(seconds, 0))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value == 0 or value >= 0.1 else f"{value:.1%}"


def change_text(change: Change) -> str:
    """What changed, as "name: before -> after"."""
    parts = (f"{name}: {'-' if a is None else a} -> {'-' if b is None else b}" for name, (a, b) in change.items())
    return visible(", ".join(parts)) or "none"
