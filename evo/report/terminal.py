"""Tables, lines, figures and names as all commands print them, and the handling of signals.

Values come out of databases and files: nothing in them is markup, and none of them moves the cursor.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evo.analysis.times import RelativeTime
from evo.errors import EvoError
from evo.evaluation import Timing, sure_speedup, within_noise
from evo.problem.genome import Change
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import recorded_kernel
from evo.report.text import span, timed, visible

_WHOLE = frozenset({"behind", "best", "candidate", "gain", "id", "interval", "median", "noise", "speed-up"})
"""Columns that are never folded, because their values are copied or read at a glance."""

_FOLDED_WIDTH = 9
"""Least width of a folded column."""

_FILE_WIDTH = 200
"""Number of characters of a line in a file or pipe."""

_DISTURBED = "! too busy: other programs or throttling disturbed this time, so that its speed-up is not known"


def marked(figure: str, disturbed: bool, *, unconfirmed: bool = False) -> str:
    """A figure, with the mark that `say_disturbed` explains if it was disturbed, and another if it is unconfirmed."""
    return f"{figure}{' ?' if unconfirmed else ''}{' !' if disturbed else ''}"


def median(us: float | None, disturbed: bool) -> str:
    """A time, with the mark that `say_disturbed` explains if it was disturbed."""
    return "-" if us is None else marked(timed(us, disturbed), disturbed)


def unless_busy(gain: str, disturbed: bool) -> str:
    """A speed-up or a gain; words and a mark in its place if it was disturbed."""
    return marked("too busy", disturbed) if disturbed else gain


def say(text: object, *, err: bool = False) -> None:
    """Prints a line on standard output or standard error; a character that does not print is shown as its escape."""
    typer.echo(visible(str(text), lines=True), err=err)


def notice(text: str) -> None:
    """A line on the standard error stream that says what a user did not ask for and should know."""
    say(f"evo: {text}", err=True)


def cell(value: Any) -> Text:
    """Any value as text; "-" for None."""
    if value is None:
        return Text("-")
    if isinstance(value, bytes):
        return Text(f"<{len(value):,} bytes>")
    return Text(visible(f"{value:.6g}" if isinstance(value, float) else str(value)))


def figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def interval(low: float | None, high: float | None, disturbed: bool = False) -> str:
    return "" if disturbed else "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value == 0 or value >= 0.1 else f"{value:.1%}"


def change_text(change: Change) -> str:
    """A change as "name: before -> after"."""
    parts = (f"{name}: {'-' if a is None else a} -> {'-' if b is None else b}" for name, (a, b) in change.items())
    return visible(", ".join(parts)) or "none"


def make_table(*headings: str, fold: bool = True) -> Table:
    """An empty table. A column is aligned right if its heading begins with >. fold: whether columns may be folded."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        name = heading.removeprefix(">")
        whole = not fold or name.strip() in _WHOLE  # columns of one name differ in spaces
        table.add_column(visible(name), justify="left" if name == heading else "right", overflow="fold", no_wrap=whole)
    return table


class Terminal(Console):
    """A console whose text comes from databases and files, too: nothing in it is markup, and only rich moves the cursor.

    words: turns a line of evo's own, which is written for the command line, into what its user knows."""

    words: Callable[[str], str] = staticmethod(str)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(visible(part.text, lines=True), part.style)

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, where rich would end the process with exit code 1."""
        raise BrokenPipeError

    def say(self, text: str, style: str = "", *, lines: bool = False) -> None:
        """Prints an unfolded line in which nothing moves the cursor. lines: whether it may have line ends."""
        self.print(Text(visible(self.words(text), lines=lines), style=style), soft_wrap=True)

    def say_disturbed(self, *disturbed: bool) -> None:
        """Explains the mark of disturbed figures, if any figure is disturbed."""
        if any(disturbed):
            self.say(_DISTURBED, "bold red")

    def print_rows(self, rows: Iterable[Mapping[str, object]], styles: Sequence[str] = ()) -> None:
        """Prints rows of cells by heading (see `make_table`) as a table; without rows nothing.

        Headings of one name differ in spaces at their ends. styles: a style for each row.
        """
        known = list(rows)
        if not known:
            return
        table = make_table(*known[0])
        for row, style in zip(known, styles or [""] * len(known), strict=True):
            table.add_row(*map(cell, row.values()), style=style)
        self.print_table(table)

    def print_table(self, table: Table) -> None:
        """Prints a table, if it has rows. On a narrow terminal rich folds its columns; where even that is too wide, each
        field gets a line, as in psql's expanded display. In a file nothing is folded."""
        if not table.row_count:
            return
        natural = [max(cell_len(str(text)) for text in (c.header, *c.cells)) for c in table.columns]
        folded = (w if c.no_wrap else min(w, _FOLDED_WIDTH) for w, c in zip(natural, table.columns, strict=True))
        gaps = len(natural)
        if not self.is_terminal:
            self.width = max(self.width, sum(natural) + 2 * gaps)
        if sum(natural) + 2 * gaps > self.width:
            table.padding = (0, 1, 0, 0)
        if sum(folded) + gaps <= self.width:
            self.print(table)
            return
        names = [f"{c.header}".strip() for c in table.columns]
        width = max(map(cell_len, names)) + 2
        for i, row in enumerate(zip(*(c.cells for c in table.columns), strict=True)):
            if i:
                self.rule(style="dim")
            for name, value in zip(names, row, strict=True):
                padding = " " * (width - cell_len(name) - bool(name))
                self.print(Text.assemble((f"{name}:" if name else "", "dim"), padding, value), soft_wrap=True)


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Makes a handler take these signals inside. Ignored signals, as under nohup, stay ignored, and outside of the main
    thread, where no handler can be installed, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def make_console() -> Terminal:
    """A console as wide as the terminal; for a file or pipe, so wide that no table is folded."""
    console = Terminal(markup=False, emoji=False)  # printed text comes from databases and files, too
    return console if console.is_terminal else Terminal(width=_FILE_WIDTH, markup=False, emoji=False)


def speedup(ratio: float | None, noise: float | None = None, *, disturbed: bool = False) -> str:
    """The reference's time over the candidate's; a tie if that is within the noise floor."""
    gain = "tie" if within_noise(ratio, noise) else f"{1 / ratio:.3f}x" if ratio else "-"
    return unless_busy(gain, disturbed and bool(ratio))


def time_cells(t: Timing | RelativeTime, noise: float | None = None) -> dict[str, object]:
    """Cells of a contender's time and its speed-up over the reference, with intervals. noise: see `speedup`."""
    low, high = (sure_speedup(limit, t.disturbed) for limit in (t.ratio_high, t.ratio_low))
    return {
        ">median": median(t.median_us, t.disturbed),
        ">interval": span(t.low_us, t.high_us, t.disturbed),
        ">speed-up": speedup(t.ratio, noise, disturbed=t.disturbed),
        ">interval ": interval(low, high) if low and high else "",
    }


def short_workload(key: str, kernel: str, digest: str = "") -> str:
    """A workload's key without options at their defaults, as far as the kernel is here to tell them. digest: the recorded
    digest of the kernel's files."""
    usual = ""
    with suppress(EvoError):
        usual = Workload.of({}, "", recorded_kernel(kernel, digest).options).key
    return ",".join(part for part in key.split(",") if part not in usual.split(","))


def brief_workload(workload: Workload, kernel: Kernel) -> str:
    """A workload's sizes, dtype, and options other than the defaults: 4096x4096 float16 rstd eps=0.001."""
    options = [n if v is True else f"{n}={str(v).lower()}" for n, v in workload.options if v != kernel.options.get(n)]
    return " ".join([str(workload), *options])


def timing_record(timing: Timing) -> dict[str, Any]:
    """A timing for --json, with figures as they were measured."""
    names = ("contender", "median_us", "low_us", "high_us", "disturbed")
    record = {name: getattr(timing, name) for name in names} | {"samples": len(timing.samples_us)}
    if timing.ratio and timing.ratio_low and timing.ratio_high:
        record |= {
            "ratio": timing.ratio,
            "speedup": timing.speedup,
            "speedup_low": sure_speedup(timing.ratio_high, timing.disturbed),
            "speedup_high": sure_speedup(timing.ratio_low, timing.disturbed),
        }
    return record
