"""What commands that print share: tables, and how lines, figures and names are written in and beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evo.cli.cells import visible
from evo.evaluation import Timing, within_noise
from evo.store import queries
from evo.store.losses import Losses
from evo.store.store import Store

__all__ = [
    "DISTURBED_NOTE", "make_table", "marked", "natural_width", "say", "say_losses", "short_id", "short_workload", "speedup",
    "tell_losses", "timing_record",
]  # fmt: skip

_WHOLE = frozenset({"best", "candidate", "id", "median us", "speed-up"})
"""Columns that are never folded, however narrow a terminal is: what is in them is to be copied, or read at a glance."""

_LISTED = 5
_LEAST_WIDTH = 4
"""Of the others."""

DISTURBED_NOTE = "! something slowed the device down while this was timed: do not trust the figure"


def marked(figure: str, disturbed: bool) -> str:
    """The figure, with the mark that `DISTURBED_NOTE` explains if it was disturbed."""
    return f"{figure} !" if disturbed else figure


class _Cells(Table):
    """A table in whose texts nothing moves the cursor."""

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        super().add_row(*(visible(c) if isinstance(c, str) else c for c in cells), **how)


def make_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table, the columns named in `right` aligned to that side."""
    table = _Cells(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        whole = heading in _WHOLE
        least = None if whole or not heading.strip() else _LEAST_WIDTH
        table.add_column(visible(heading), justify=justify, overflow="fold", no_wrap=whole, min_width=least)
    return table


def natural_width(table: Table) -> int:
    """How wide a table is in which nothing is folded."""
    console = Console(width=1 << 24, markup=False, emoji=False)
    return Measurement.get(console, console.options, table).maximum


def say(console: Console, text: str, style: str = "") -> None:
    """A line as wide as it is, in which nothing moves the cursor."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def say_losses(console: Console, losses: Mapping[str, Losses | None]) -> None:
    """What runs, by their names, have lost with a damaged file; nothing of those that have not."""
    known = [(name, lost) for name, lost in losses.items() if lost]
    for name, lost in known[:_LISTED]:
        say(console, f"{name}: {lost}", "yellow")
    if len(known) > _LISTED:
        say(console, f"{len(known) - _LISTED} more runs were salvaged, too; --json has them all", "yellow")


def tell_losses(store: Store, runs: Collection[str] | None) -> None:
    """`say_losses` on stderr, for commands whose document has no place for it: what they say of such a run may be wrong.

    runs: as they were named; None for all.
    """
    named = None if runs is None else [queries.run_name(store, name) for name in runs]
    losses = queries.losses_of(store, named)
    for name in list(losses)[:_LISTED]:
        typer.echo(f"evo: {visible(name)}: {visible(str(losses[name]))}", err=True)
    if len(losses) > _LISTED:
        typer.echo(f"evo: {len(losses) - _LISTED} more runs were salvaged, too; evo runs --json has them all", err=True)


def speedup(ratio: float | None, noise: float | None = None) -> str:
    """The reference's time over the candidate's; a tie if that is within the noise floor."""
    if within_noise(ratio, noise):
        return "tie"
    return f"{1 / ratio:.3f}x" if ratio else "-"


def short_id(identifier: str) -> str:
    return identifier[:10]


def short_workload(key: str) -> str:
    """Without the options, which are rarely anything but their defaults."""
    parts = key.split(",")
    last = next((i for i, p in enumerate(parts) if p.startswith("dtype=")), len(parts) - 1)
    return ",".join(parts[: last + 1])


def timing_record(timing: Timing) -> dict[str, Any]:
    """As it was measured: figures are rounded once, where they are printed."""
    record = {
        "median_us": timing.median_us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "samples": len(timing.samples_us),
        "disturbed": timing.disturbed,
    }
    if timing.ratio and timing.ratio_low and timing.ratio_high:
        record |= {
            "ratio": timing.ratio,
            "speedup": 1 / timing.ratio,
            "speedup_low": 1 / timing.ratio_high,
            "speedup_high": 1 / timing.ratio_low,
        }
    return record
