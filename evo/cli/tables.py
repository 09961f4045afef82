"""What commands that print share: tables, and how lines, figures and names are written in and beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from evo.analysis import queries
from evo.analysis.records import Best
from evo.cli.cells import visible
from evo.cli.options import command_line
from evo.evaluation import Timing, within_noise
from evo.lineage.losses import Losses
from evo.lineage.store import Store

__all__ = [
    "DISTURBED_NOTE", "UNCONFIRMED_NOTE", "Cells", "make_table", "marked", "natural_width", "print_records", "print_table",
    "say", "say_losses", "say_unconfirmed", "short_id", "short_workload", "speedup", "tell_losses", "timing_record",
]  # fmt: skip

_WHOLE = frozenset({"behind", "best", "candidate", "gain", "id", "interval", "median us", "noise", "speed-up"})
"""Columns that are never folded, however narrow a terminal is: what is in them is to be copied, or read at a glance."""

_LISTED = 5
_LEAST_WIDTH = 4
"""Of the others."""
_LEAST_INTERVAL = 9
"""Of one that has to be folded: no number is."""
_LONG_WORD = 10
"""Longer ones may be folded."""
_INDENT = 4

DISTURBED_NOTE = "! something slowed the device down while this was timed: do not trust the figure"
UNCONFIRMED_NOTE = "? no result: the finals of that run confirmed nobody, and nothing has confirmed the figure"


def marked(figure: str, disturbed: bool, *, unconfirmed: bool = False) -> str:
    """The figure, with the mark that `DISTURBED_NOTE` explains if it was disturbed, and that of `say_unconfirmed`."""
    return f"{figure}{' ?' if unconfirmed else ''}{' !' if disturbed else ''}"


def say_unconfirmed(console: Console, found: Iterable[Best], db: str) -> None:
    """What the mark means at figures of candidates whose run's finals confirmed nobody: a line for each of the runs."""
    some = [b for b in found if b.unconfirmed]
    for b in some[:_LISTED]:
        shown = command_line(db, "show", b.run)
        refused = f"{b.refused_finalists} finalist{'' if b.refused_finalists == 1 else 's'}"
        said = (
            f"? no result: the finals of {b.run} confirmed nobody and refused {refused} for {short_workload(b.workload)};"
            f" {short_id(b.id)} is the best of what is left, by a figure that nothing has confirmed:  {shown}"
        )
        say(console, said, "bold red")
    if len(some) > _LISTED:
        say(console, f"? the same holds for {len(some) - _LISTED} more: finals of --json has them", "bold red")


Row = tuple[tuple[Text, ...], StyleType]


class Cells(Table):
    """A table in whose texts nothing moves the cursor. It keeps what it was made of, so that it can be laid out anew."""

    def __init__(self, headings: Sequence[str], right: Collection[str]) -> None:
        super().__init__(box=None, header_style="dim", padding=(0, 2, 0, 0))
        self.headings, self.right = headings, right
        self.given: list[Row] = []
        for heading in headings:
            justify: Literal["left", "right"] = "right" if heading in right else "left"
            whole = heading.strip() in _WHOLE  # columns of one name differ in spaces
            least = None if whole or not heading.strip() else _LEAST_WIDTH
            self.add_column(visible(heading), justify=justify, overflow="fold", no_wrap=whole, min_width=least)

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Texts and strings only."""
        texts = tuple(c if isinstance(c, Text) else Text(visible(str(c or ""))) for c in cells)
        self.given.append((texts, style or ""))
        super().add_row(*texts, style=style, end_section=end_section)


def make_table(*headings: str, right: tuple[str, ...] = ()) -> Cells:
    """An empty table, the columns named in `right` aligned to that side."""
    return Cells(headings, right)


def print_table(console: Console, table: Cells, *aside: str, above: bool = False) -> None:
    """The table, if it has rows. Where a terminal is too narrow for it, the columns headed `aside` go to a line of their own
    below their row, or above it; what is left is set closer together if need be; and what even so would lose figures is
    printed row by row."""
    if not table.given:
        return
    if not console.is_terminal or natural_width(table) <= console.width:
        console.print(table)
        return
    apart = [i for i, heading in enumerate(table.headings) if heading in aside]
    kept = [i for i, heading in enumerate(table.headings) if heading not in aside]
    widths = _widths(table, kept, console.width)
    if widths is None:
        print_records(console, table.headings, [cells for cells, _ in table.given])
        return
    part = partial(_part, table, kept, widths, gap=2 if sum(widths) + 2 * len(kept) <= console.width else 1)
    if not apart:
        console.print(part(table.given))
        return
    console.print(part([]))
    for cells, style in table.given:
        row = part([(cells, style)])
        row.show_header = False
        line = Text(", ").join(cells[i] for i in apart if cells[i].plain)
        line.stylize(style)
        shown = [line, row] if above else [row, Padding(line, (0, 0, 0, _INDENT))]
        for one in shown if line.plain else [row]:
            console.print(one)


def _part(table: Cells, kept: Sequence[int], widths: Sequence[int], rows: Iterable[Row], *, gap: int) -> Cells:
    """These columns and rows of a table, each column as wide as that: those of several such tables stay in line."""
    some = Cells([table.headings[i] for i in kept], table.right)
    some.padding = (0, gap, 0, 0)
    for column, width in zip(some.columns, widths, strict=True):
        column.width, column.min_width, column.no_wrap = width, None, False
    for cells, style in rows:
        some.add_row(*(cells[i] for i in kept), style=style)
    return some


def _widths(table: Cells, kept: Sequence[int], room: int) -> list[int] | None:
    """Of these columns, set close together: the widest gives way first, and no number is folded; intervals are only where
    there is no other way. None if there is none. Rich's own way lets columns fall off the edge."""
    texts = [[cells[i] for cells, _ in table.given] for i in kept]
    headings = [table.headings[i] for i in kept]
    natural = [max(cell_len(h), *(t.cell_len for t in ts)) for h, ts in zip(headings, texts, strict=True)]
    for interval in (None, _LEAST_INTERVAL):
        least = [_least(*column, interval) for column in zip(headings, texts, natural, strict=True)]
        widths = list(natural)
        while sum(widths) + len(widths) > room:
            widest = max((i for i, width in enumerate(widths) if width > least[i]), key=widths.__getitem__, default=None)
            if widest is None:
                break
            widths[widest] -= 1
        else:
            return widths
    return None


def _least(heading: str, texts: Sequence[Text], natural: int, interval: int | None) -> int:
    """How wide a column must be at least. interval: one of intervals, None: as wide as these are."""
    if heading.strip() in _WHOLE:
        return natural if interval is None or heading.strip() != "interval" else min(natural, interval)
    words = (word for text in (heading, *(t.plain for t in texts)) for word in text.split())
    return min(natural, max(_LEAST_WIDTH, min(_LONG_WORD, max(map(cell_len, words), default=0))))


def print_records(console: Console, headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """A line for each column, which the terminal folds where it must, and a rule between rows."""
    names = [visible(heading).rstrip() for heading in headings]
    width = max(map(cell_len, names))
    for i, row in enumerate(rows):
        if i:
            console.rule(style="dim")
        for name, value in zip(names, row, strict=True):
            padding = " " * (width - cell_len(name))
            console.print(Text.assemble((f"{name}: " if name.strip() else "  ", "dim"), padding, value), soft_wrap=True)


def natural_width(table: Table) -> int:
    """How wide a table is in which nothing is folded."""
    console = Console(width=1 << 24, markup=False, emoji=False)
    return Measurement.get(console, console.options, table).maximum


def say(console: Console, text: str, style: str = "") -> None:
    """A line as wide as it is, in which nothing moves the cursor."""
    console.print(Text(visible(text), style=style), soft_wrap=True)


def say_losses(console: Console, losses: Mapping[str, Losses | None]) -> None:
    """What runs, by their names, have lost with a damaged file; nothing of those that have not."""
    for line in _lines({name: lost for name, lost in losses.items() if lost}, "--json"):
        say(console, line, "yellow")


def tell_losses(store: Store, runs: Collection[str] | None) -> None:
    """`say_losses` on stderr, for commands whose document has no place for it: what they say of such a run may be wrong.

    runs: as they were named; None for all.
    """
    named = None if runs is None else [queries.run_name(store, name) for name in runs]
    for line in _lines(queries.losses_of(store, named), "evo runs --json"):
        typer.echo(f"evo: {visible(line)}", err=True)


def _lines(losses: Mapping[str, Losses | None], everything: str) -> Iterable[str]:
    """everything: what tells of the runs that are too many to be listed."""
    known = [f"{name}: {lost}" for name, lost in losses.items()]
    yield from known[:_LISTED]
    if len(known) > _LISTED:
        yield f"{len(known) - _LISTED} more runs were salvaged, too; {everything} has them all"


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
