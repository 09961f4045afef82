"""evo best, runs, compare: what was found, what was searched, which run was better."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console

from evo.analysis.best import Best, find_best
from evo.analysis.comparison import MILESTONES, ComparedRun, Comparison, SettingDifference
from evo.analysis.comparison import compare as compare_runs
from evo.analysis.runs import ListedRun, list_runs
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.tables import (
    Cells,
    cell,
    factor,
    figure,
    format_duration,
    interval,
    make_table,
    marked,
    print_table,
    say,
    say_disturbed,
    share,
    short_id,
    short_workload,
    speedup,
    visible,
)
from evo.errors import UnknownNameError, UsageError
from evo.lineage import RunStatus
from evo.lineage.store import Store

__all__ = ["register"]

_LISTED = 5


def register(app: typer.Typer) -> None:
    app.command("best")(best)
    app.command("runs")(runs)
    app.command("compare")(compare)


def best(
    kernel: Annotated[str | None, typer.Argument(help="Only this kernel's.")] = None,
    run: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    target: Annotated[str | None, typer.Option(help="Only for this target.")] = None,
    device: Annotated[str | None, typer.Option(help="Only on devices with this in their name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only for this dtype.")] = None,
    workload: Annotated[str | None, typer.Option(help="Only workloads with this in their name, e.g. rows=4096.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the fastest candidate for every kernel, device and workload."""
    with Store.open(db, write=False) as store:
        found = find_best(store, kernel, target=target, run=run, device=device, dtype=dtype, workload=workload)
        searched = () if found else list_runs(store)
    if kernel is not None and not found and kernel not in (kernels := {r.kernel for r in searched}):
        raise UnknownNameError("kernel in this database", kernel, kernels)
    if json:
        print_json(found)
    elif found:
        _print_best(make_console(), found, db)
    if not found:
        reason = f"in this database yet; start with: {command_line(db, 'search', kernel or 'KERNEL')}"
        if any(part is not None for part in (run, target, device, dtype, workload)):
            reason = f"here of what you ask for{_devices(device, {r.device for r in searched})}"
        typer.echo(f"evo: nothing has passed the gate and its timed calls {reason}", err=True)
        raise typer.Exit(1)


def _print_best(console: Console, found: Sequence[Best], db: str) -> None:
    for (kernel, device), group in groupby(found, lambda b: (b.kernel, b.device)):
        say(console, f"{kernel} on {device}", "bold")
        table = make_table(
            "workload", "candidate", "median us", "interval", "speed-up", "noise", "timed in", "run",
            right=("median us", "interval", "speed-up", "noise"),
        )  # fmt: skip
        for b in group:
            table.add_row(
                cell(short_workload(b.workload)),
                short_id(b.id),
                marked(figure(b.median_us), b.disturbed),
                interval(b.low_us, b.high_us, 2),
                _speedup_of(b),
                f"±{b.noise_floor:.2%}" if b.noise_floor is not None else "-",
                b.stage,
                cell(b.run),
            )
        print_table(console, table)
    say(
        console,
        "for each kernel, device and workload, the candidate of all runs with the highest speed-up: the reference"
        " baseline's time over its own, both of one race; interval: 95%, or of fewer than ten samples, as a search may"
        " take, their range",
        "dim",
    )
    _say_unconfirmed(console, found, db)
    say_disturbed(console, *(b.disturbed for b in found))


def _speedup_of(b: Best) -> str:
    return marked(speedup(b.ratio, b.noise_floor), b.disturbed, unconfirmed=b.unconfirmed)


def _say_unconfirmed(console: Console, found: Iterable[Best], db: str) -> None:
    """What the mark means at the figures of unconfirmed candidates: a line for each of them."""
    some = [b for b in found if b.unconfirmed]
    for b in some[:_LISTED]:
        refused = f"{b.refused_finalists} finalist{'' if b.refused_finalists == 1 else 's'}"
        say(
            console,
            f"? unconfirmed: the finals of {b.run} refused {refused} for {short_workload(b.workload)} and have no winner;"
            f" {short_id(b.id)} is the best of what is left:  {command_line(db, 'show', b.run)}",
            "bold red",
        )
    if len(some) > _LISTED:
        say(console, f"? the same holds for {len(some) - _LISTED} more: finals of --json has them", "bold red")


def _devices(part: str | None, known: set[str]) -> str:
    """Those there are, if none of them has that part in its name."""
    if part is None or not known or any(part.lower() in name.lower() for name in known):
        return ""
    return f"; no device has {visible(part)!r} in its name; known: {visible(', '.join(sorted(known)))}"


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = list_runs(store)
    if json:
        print_json(found)
    elif found:
        _print_runs(make_console(), found, db)
    else:
        start = command_line(db, "search", "KERNEL")
        typer.echo(f"evo: no run has been recorded in this database yet; start one with: {start}", err=True)


def _print_runs(console: Console, found: Sequence[ListedRun], db: str) -> None:
    table = make_table(
        "run", "kernel", "device", "status", "candidates", "passed", "time", "best", "started",
        right=("candidates", "passed", "time", "best"),
    )  # fmt: skip
    for r in found:
        table.add_row(
            cell(r.name),
            cell(f"{r.kernel} ({r.target})"),
            cell(r.device),
            r.status,
            str(r.evaluations),
            str(r.passed - r.refused_in_finals),
            format_duration(r.elapsed_s),
            _speedup_of(r.best[0]) if r.best else "-",
            r.created[:16].replace("T", " "),
        )
    print_table(console, table)
    say(console, "passed: not refused, by the search or its finals; best: the run's highest speed-up", "dim")
    if stopped := [r.name for r in found if r.status == RunStatus.INTERRUPTED]:
        more = "" if len(stopped) == 1 else f" (or another of the {len(stopped)} that were)"
        say(console, f"to continue what was interrupted:  {command_line(db, 'resume', stopped[0])}{more}", "dim")
    leaders = [r.best[0] for r in found if r.best]
    _say_unconfirmed(console, leaders, db)
    say_disturbed(console, *(b.disturbed for b in leaders))


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more, or unique beginnings of their names.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare runs: best, candidates, time to a speed-up, failures, and what was set differently."""
    with Store.open(db, write=False) as store:
        found = compare_runs(store, runs)
    names = list(dict.fromkeys(row.run for row in found.rows))
    if len(names) < 2:
        raise UsageError(f"there is nothing to compare {', '.join(names) or 'it'} with; name two runs")
    if json:
        print_json(found)
    else:
        _print_comparison(make_console(), found, names)


def _print_comparison(console: Console, found: Comparison, names: Sequence[str]) -> None:
    for workload, group in groupby(found.rows, lambda row: row.workload):
        rows = list(group)
        devices = {row.device for row in rows}
        say(console, f"{workload} on {rows[0].device}" if len(devices) == 1 else workload, "bold")
        print_table(console, _speed_table(rows, devices))
        print_table(console, _effort_table(rows))
    say(
        console,
        "speed-up: over the reference baseline, a tie within the noise floor; behind: the first one's speed-up over this"
        " one's, where kernel and device are the same, a tie where the interval of that holds 1; a second: of the search,"
        " without its finals; to 1.1x: seconds of search until the search's own figure was that",
        "dim",
    )
    if any(row.unconfirmed for row in found.rows):
        note = "? unconfirmed: the finals of that run have no winner, and nothing has confirmed the figure"
        say(console, note, "bold red")
    say_disturbed(console, *(row.disturbed for row in found.rows))
    _print_settings(console, found.settings, names)


def _speed_table(rows: Sequence[ComparedRun], devices: Collection[str]) -> Cells:
    """Which run is how fast. devices: of all the rows."""
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
    right = ("candidates", "a second", "failures", *(f"to {m}x" for m in MILESTONES))
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


def _print_settings(console: Console, settings: Sequence[SettingDifference], names: Sequence[str]) -> None:
    if not settings:
        say(console, "they were set up alike", "dim")
        return
    table = make_table("what differs", *map(visible, names))
    for setting in settings:
        table.add_row(cell(setting.name), *(cell(_short(setting.values.get(name))) for name in names))
    console.print()
    print_table(console, table)


def _short(value: object) -> object:
    """Digests are cut."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else value
