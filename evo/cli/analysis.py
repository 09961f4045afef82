"""evo operators, importance, compare, pareto: what a run, or several, can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Protocol, TypeVar

import typer
from rich.console import Console

from evo.analysis.comparison import MILESTONES, ComparedRun, Setting
from evo.analysis.credit import OperatorCredit
from evo.analysis.lineage import Lineage
from evo.analysis.pareto import AXES
from evo.analysis.seldom import Seldom, tried_least
from evo.cli.cells import cell, factor, figure, interval, share, visible
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.tables import (
    DISTURBED_NOTE,
    UNCONFIRMED_NOTE,
    Cells,
    make_table,
    marked,
    print_table,
    say,
    short_id,
    speedup,
)
from evo.errors import UsageError

__all__ = ["register"]

RunName = Annotated[str, typer.Argument(help="A run, or a unique beginning of its name; the latest if left out.")]
_BAR = 24


def register(app: typer.Typer) -> None:
    app.command("operators")(operators)
    app.command("importance")(importance)
    app.command("compare")(compare)
    app.command("pareto")(pareto)


class _OfWorkload(Protocol):
    @property
    def workload(self) -> str: ...


_Record = TypeVar("_Record", bound=_OfWorkload)


def _by_workload(records: Iterable[_Record]) -> Iterable[tuple[str, list[_Record]]]:
    """In the order in which the workloads come."""
    groups: dict[str, list[_Record]] = defaultdict(list)
    for record in records:
        groups[record.workload].append(record)
    return groups.items()


def _note(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, soft_wrap=True)


def operators(
    run: RunName = "latest",
    windows: Annotated[int, typer.Option(help="Into how many parts the search time is cut.", min=1, max=1000)] = 5,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what each operator was worth: trials, success, gain a second, and when."""
    with Lineage(db) as known:
        found = known.operators(run, windows=windows)
    if json:
        print_json(found)
        return
    if not found:
        typer.echo("evo: no candidate of this run has been recorded yet", err=True)
        return
    right = ("trials", "passed", "new code", "success", "improved", "gain", "seconds", "gain/s")
    table = make_table("operator", "search time", *right, right=right)
    for c in found:
        total = c.window is None
        table.add_row(
            cell(c.operator if total else ""),
            "all" if total else f"{c.from_s:.0f} to {c.to_s:.0f} s",
            str(c.trials),
            share(c.passed / c.trials),
            share(c.new_code / c.trials),
            share(c.success),
            str(c.improvements),
            factor(c.gain),
            f"{c.seconds:.1f}",
            _rate(c),
            style="bold" if total else "dim",
        )
    console = make_console()
    print_table(console, table)
    _note(
        console,
        "passed, new code: of the trials; success: faster than the faster parent, of the trials with a timed one; improved:"
        " faster than all before; gain: of these together; seconds: building and measuring; gain/s: per cent a second",
    )


def _rate(credit: OperatorCredit) -> str:
    return "-" if credit.gain_rate is None else f"{credit.gain_rate:.3g}%"


def importance(
    run: RunName = "latest",
    quantile: Annotated[float, typer.Option(help="What share of the candidates counts as fast.")] = 0.1,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show which parameters matter for being fast, by workload (PED-ANOVA)."""
    with Lineage(db) as known:
        found = known.importance(run, quantile=quantile)
    if json:
        print_json(found)
        return
    console = make_console()
    for workload, records in _by_workload(found):
        timed = records[0].timed
        say(console, f"{workload}, {timed} timed candidate{'s' * (timed != 1)}")
        table = make_table("parameter", "", "share", "values", "in", "", right=("share", "values", "in"))
        for r in records:
            table.add_row(
                cell(r.parameter),
                "█" * round(_BAR * (r.importance or 0.0)),
                share(r.importance),
                str(r.values),
                f"{r.candidates}" if r.conditional else "all",
                cell(r.note),
            )
        print_table(console, table)
        if least := tried_least(records):
            say(console, f"tried least of what matters most: {', '.join(map(_seldom, least))}")
    _note(
        console,
        f"how much the values of the fastest {quantile:.0%} differ from those of all that were timed; shares sum to 1. A"
        " search that settled a parameter early makes it look unimportant. What a value gains:"
        f" {command_line(db, 'explain', 'CANDIDATE')}. A search with one value only:"
        f" {command_line(db, 'search', 'KERNEL', '--fix', 'NAME=VALUE')}",
    )


def _seldom(least: Seldom) -> str:
    tried = least.tried
    fared = f"best {factor(1 / tried.best)}" if tried.best else "none was timed" if tried.passed else "none passed"
    return f"{least.parameter}={least.value} ({tried.candidates:,} of {least.of:,} candidates, {fared})"


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more, or unique beginnings of their names.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare runs: best, candidates, time to a speed-up, failures, and what was set differently."""
    with Lineage(db) as known:
        found = known.comparison(*runs)
        names = list(dict.fromkeys(row.run for row in found.rows))
        if len(names) < 2:
            raise UsageError(f"there is nothing to compare {', '.join(names) or 'it'} with; name two runs")
    if json:
        print_json(found)
        return
    console = make_console()
    for workload, rows in _by_workload(found.rows):
        devices = {row.device for row in rows}
        say(console, f"{workload} on {rows[0].device}" if len(devices) == 1 else workload, "bold")
        print_table(console, _speed_table(rows, devices))
        print_table(console, _effort_table(rows))
    _note(
        console,
        "speed-up: over the reference baseline, a tie within the noise floor; behind: the first one's speed-up over this"
        " one's, where kernel and device are the same, a tie where the interval of that holds 1; a second: of the search,"
        " without its finals; to 1.1x: seconds of search until the search's own figure was that",
    )
    if any(row.unconfirmed for row in found.rows):
        console.print(UNCONFIRMED_NOTE, style="bold red", highlight=False, soft_wrap=True)
    if any(row.disturbed for row in found.rows):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)
    _print_settings(console, found.settings, names)


def _speed_table(rows: Sequence[ComparedRun], devices: Collection[str]) -> Cells:
    """Who is how fast. devices: of all the rows."""
    right = ("speed-up", "median us", "behind")
    several = len(devices) > 1
    table = make_table(
        "run", *["device"] * several, "best", "speed-up", "interval", "median us", "behind", "interval ", right=right
    )
    for r in rows:
        first = r.behind is None or r.behind == 1
        table.add_row(
            cell(r.run),
            *[cell(r.device)] * several,
            short_id(r.best) if r.best else "-",
            marked(speedup(1 / r.speedup if r.speedup else None, r.noise_floor), r.disturbed, unconfirmed=r.unconfirmed),
            interval(r.speedup_low, r.speedup_high),
            figure(r.median_us),
            "" if first else "tie" if r.tie else factor(r.behind),
            "" if first else interval(r.behind_low, r.behind_high),
        )
    return table


def _effort_table(rows: Sequence[ComparedRun]) -> Cells:
    """What it took."""
    reached = tuple(f"to {m}x" for m in MILESTONES)
    right = ("candidates", "a second", "failures", *reached)
    table = make_table("run", *right, right=right)
    for r in rows:
        table.add_row(
            cell(r.run),
            str(r.candidates),
            figure(r.candidates_per_s, 1),
            f"{r.failures} ({share(r.failures / r.candidates)})" if r.candidates else "-",
            *(f"{t:.1f} s" if t is not None else "-" for t in r.reached_s.values()),
        )
    return table


def _print_settings(console: Console, settings: Sequence[Setting], names: Sequence[str]) -> None:
    if not settings:
        _note(console, "they were set up alike")
        return
    table = make_table("what differs", *map(visible, names))
    for setting in settings:
        table.add_row(cell(setting.name), *(cell(_short(setting.values.get(name))) for name in names))
    console.print()
    print_table(console, table)


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) and len(value) == 64 else value


def pareto(
    run: RunName = "latest",
    axes: Annotated[str, typer.Option(help="What to trade, separated by commas.")] = ",".join(AXES),
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the candidates that no other beats in time, registers, spills, shared memory and accuracy at once."""
    chosen = [axis.strip() for axis in axes.split(",") if axis.strip()]
    with Lineage(db) as known:
        found = known.pareto(run, chosen)
    if json:
        print_json(found)
        return
    console = make_console()
    for workload, records in _by_workload(found):
        say(console, workload)
        right = ("speed-up", "median us", "registers", "spilled", "shared", "error", "equal")
        table = make_table("candidate", *right, right=right)
        for r in records:
            table.add_row(
                f"{short_id(r.id)} #{r.order}",
                marked(factor(1 / r.ratio), r.disturbed),
                marked(figure(r.median_us), r.disturbed),
                cell(r.registers),
                cell(r.spill_bytes),
                cell(r.smem_bytes),
                share(r.error),
                str(r.equal or ""),
                style="bold" if r.fastest else "",
            )
        print_table(console, table)
    if any(r.disturbed for r in found):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)
    if not found:
        console.print("no candidate of this run was timed")
    _note(
        console,
        f"no other candidate is better in one of {', '.join(chosen)} and as good in the rest; spilled, shared: bytes; error:"
        " the largest, of what the gate allows; equal: others with these very figures. All times are of the search",
    )
