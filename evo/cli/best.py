"""evo best, runs, compare: what was found, what was searched, which run was better."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Annotated

import typer

from evo.analysis.best import Best, find_best
from evo.analysis.runs import ComparedRun, Comparison, ListedRun, SettingDifference, list_runs
from evo.analysis.runs import compare as compare_runs
from evo.cli.options import DEFAULT_DB, Db, Json, answer, command_line
from evo.cli.tables import Terminal, factor, figure, interval, marked, share, short_workload, speedup
from evo.errors import UnknownNameError, UsageError
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.report.text import duration, short, visible


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
    if found or json:
        answer(json, found, _print_best, db)
    if not found:
        reason = f"in this database yet; start with: {command_line(db, 'search', kernel or 'KERNEL')}"
        if any(part is not None for part in (run, target, device, dtype, workload)):
            devices = ", ".join(sorted({r.device for r in searched}))
            reason = f"here of what you ask for; devices that were searched on: {visible(devices) or 'none'}"
        typer.echo(f"evo: nothing has passed the gate and its timed calls {reason}", err=True)
        raise typer.Exit(1)


def _print_best(console: Terminal, found: Sequence[Best], db: str) -> None:
    for (kernel, device), group in groupby(found, lambda b: (b.kernel, b.device)):
        console.say(f"{kernel} on {device}", "bold")
        rows = [
            {
                "workload": short_workload(b.workload),
                "candidate": short(b.id),
                ">median us": marked(figure(b.median_us), b.disturbed),
                ">interval": interval(b.low_us, b.high_us, 2),
                ">speed-up": _speedup_of(b),
                ">noise": f"±{b.noise_floor:.2%}" if b.noise_floor is not None else "-",
                "timed in": b.stage,
                "run": b.run,
            }
            for b in group
        ]
        console.print_rows(rows)
    console.say(
        "for each kernel, device and workload, the candidate of all runs with the highest speed-up: the reference"
        " baseline's time over its own, both of one race; interval: 95%, or of fewer than ten samples, as a search may"
        " take, their range",
        "dim",
    )
    _say_marks(console, found, db)


def _speedup_of(b: Best) -> str:
    return marked(speedup(b.ratio, b.noise_floor), b.disturbed, unconfirmed=b.unconfirmed)


def _say_marks(console: Terminal, found: Sequence[Best | ComparedRun], db: str) -> None:
    """What the marks at the figures mean."""
    if runs := dict.fromkeys(b.run for b in found if b.unconfirmed):
        console.say(
            "? unconfirmed: the finals refused their finalists and have no winner; this is the best of what is left:  "
            + "   ".join(command_line(db, "show", run) for run in runs),
            "bold red",
        )
    console.say_disturbed(*(b.disturbed for b in found))


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = list_runs(store)
    if found or json:
        answer(json, found, _print_runs, db)
    else:
        start = command_line(db, "search", "KERNEL")
        typer.echo(f"evo: no run has been recorded in this database yet; start one with: {start}", err=True)


def _print_runs(console: Terminal, found: Sequence[ListedRun], db: str) -> None:
    rows = [
        {
            "run": r.name,
            "kernel": f"{r.kernel} ({r.target})",
            "device": r.device,
            "status": r.status,
            ">candidates": r.evaluations,
            ">passed": r.passed - r.refused_in_finals,
            ">time": duration(r.elapsed_s),
            ">best": _speedup_of(r.best[0]) if r.best else "-",
            "started": r.created[:16].replace("T", " "),
        }
        for r in found
    ]
    console.print_rows(rows)
    console.say("passed: not refused, by the search or its finals; best: the run's highest speed-up", "dim")
    if stopped := next((r.name for r in found if r.status == RunStatus.INTERRUPTED), None):
        console.say(f"to continue what was interrupted:  {command_line(db, 'resume', stopped)}", "dim")
    _say_marks(console, [r.best[0] for r in found if r.best], db)


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more, or unique beginnings of their names.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare runs: best, candidates, time to a speed-up, failures, and what was set differently."""
    with Store.open(db, write=False) as store:
        found = compare_runs(store, *runs)
    names = list(dict.fromkeys(row.run for row in found.rows))
    if len(names) < 2:
        raise UsageError(f"there is nothing to compare {', '.join(names) or 'it'} with; name two runs")
    answer(json, found, _print_comparison, names, db)


def _print_comparison(console: Terminal, found: Comparison, names: Sequence[str], db: str) -> None:
    for workload, group in groupby(found.rows, lambda row: row.workload):
        rows = list(group)
        devices = {row.device for row in rows}
        console.say(f"{workload} on {rows[0].device}" if len(devices) == 1 else workload, "bold")
        console.print_rows([_speed_cells(r, devices) for r in rows])
        console.print_rows([_effort_cells(r) for r in rows])
    console.say(
        "speed-up: over the reference baseline, a tie within the noise floor; behind: the first one's speed-up over this"
        " one's, where kernel and device are the same, a tie where the interval of that holds 1; a second: of the search,"
        " without its finals; to 1.1x: seconds of search until the search's own figure was that",
        "dim",
    )
    _say_marks(console, found.rows, db)
    _print_settings(console, found.settings, names)


def _speed_cells(r: ComparedRun, devices: Collection[str]) -> dict[str, object]:
    """How fast a run is. devices: of all the runs beside it."""
    first = r.behind is None or r.behind == 1
    gain = speedup(1 / r.speedup if r.speedup else None, r.noise_floor)
    return {
        "run": r.run,
        **({"device": r.device} if len(devices) > 1 else {}),
        "best": short(r.best) if r.best else "-",
        ">speed-up": marked(gain, r.disturbed, unconfirmed=r.unconfirmed),
        "interval": interval(r.speedup_low, r.speedup_high),
        ">median us": figure(r.median_us),
        ">behind": "" if first else "tie" if r.tie else factor(r.behind),
        "interval ": "" if first else interval(r.behind_low, r.behind_high),
    }


def _effort_cells(r: ComparedRun) -> dict[str, object]:
    """What it took."""
    return {
        "run": r.run,
        ">candidates": r.candidates,
        ">a second": figure(r.candidates_per_s, 1),
        ">failures": f"{r.failures} ({share(r.failures / r.candidates)})" if r.candidates else "-",
        **{f">to {gain}": "-" if t is None else f"{t:.1f} s" for gain, t in r.reached_s.items()},
    }


def _print_settings(console: Terminal, settings: Sequence[SettingDifference], names: Sequence[str]) -> None:
    if not settings:
        console.say("they were set up alike", "dim")
        return
    console.print()
    rows = [
        {"what differs": setting.name, **{name: _short(setting.values.get(name)) for name in names}} for setting in settings
    ]
    console.print_rows(rows)


def _short(value: object) -> object:
    """Digests are cut."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else value
