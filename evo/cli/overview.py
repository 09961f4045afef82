"""evo runs, best: what was searched, what was found."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console

from evo.analysis import queries
from evo.analysis.records import Best
from evo.cli.cells import cell, format_duration, visible
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.tables import (
    DISTURBED_NOTE,
    make_table,
    marked,
    print_table,
    say,
    say_unconfirmed,
    short_id,
    short_workload,
    speedup,
)
from evo.errors import UnknownNameError
from evo.lineage import RunStatus
from evo.lineage.store import Store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)
    app.command("best")(best)


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = queries.runs(store)
        leaders = queries.best_by_run(store)
        refused = queries.refused_in_finals(store)
        noise = queries.noise_floors_of(store, list(leaders))
    if json:
        records = [
            vars(r)
            | {
                "refused_in_finals": refused.get(r.name, 0),
                "best": [
                    {
                        "candidate": b.id,
                        "workload": b.workload,
                        "speedup": 1 / b.ratio,
                        "stage": b.stage,
                        "disturbed": b.disturbed,
                        "finals": b.finals,
                        "refused_finalists": b.refused_finalists,
                    }
                    for b in leaders.get(r.name, ())
                ],
            }
            for r in found
        ]
        print_json(records)
        return
    table = make_table(
        "run", "kernel", "device", "status", "candidates", "passed", "time", "best", "started",
        right=("candidates", "passed", "time", "best"),
    )  # fmt: skip
    for r in found:
        first = next(iter(leaders.get(r.name, ())), None)
        table.add_row(
            cell(r.name),
            cell(f"{r.kernel} ({r.target})"),
            cell(r.device),
            r.status,
            str(r.evaluations),
            str(r.passed - refused.get(r.name, 0)),
            format_duration(r.elapsed_s),
            _best_of(first, noise.get((r.name, first.workload))) if first else "-",
            r.created[:16].replace("T", " "),
        )
    if not found:
        start = command_line(db, "search", "KERNEL")
        typer.echo(f"evo: no run has been recorded in this database yet; start one with: {start}", err=True)
        return
    console = make_console()
    print_table(console, table)
    console.print("passed: not refused, by the search or its finals; best: the run's highest speed-up", style="dim")
    if stopped := [r.name for r in found if r.status == RunStatus.INTERRUPTED]:
        more = "" if len(stopped) == 1 else f" (or another of the {len(stopped)} that were)"
        say(console, f"to continue what was interrupted:  {command_line(db, 'resume', stopped[0])}{more}", "dim")
    say_unconfirmed(console, (leaders[r.name][0] for r in found if leaders.get(r.name)), db)
    _explain_mark(console, any(bs[0].disturbed for bs in leaders.values()))


def _best_of(leader: Best, floor: float | None) -> str:
    return marked(speedup(leader.ratio, floor), leader.disturbed, unconfirmed=leader.unconfirmed)


def _explain_mark(console: Console, disturbed: bool) -> None:
    if disturbed:
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


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
        found = queries.best(
            store, kernel, target=target, run=run, device=device, dtype=dtype, workload=workload
        )
        if kernel is not None and not found:
            searched = {r.kernel for r in queries.runs(store)}
            if kernel not in searched:
                raise UnknownNameError("kernel in this database", kernel, searched)
        devices = {r.device for r in queries.runs(store)} if device is not None and not found else set()
        noise = queries.noise_floors_of(store, [b.run for b in found])
    floors = {b.id: noise.get((b.run, b.workload)) for b in found}
    if json:
        print_json(
            [
                {"candidate": b.id, **asdict(b), "noise_floor": floors[b.id]}
                for b in found
            ]
        )
    elif found:
        console = make_console()
        for (kernel_name, device_name), group in groupby(found, lambda b: (b.kernel, b.device)):
            say(console, f"{kernel_name} on {device_name}", "bold")
            table = make_table(
                "workload", "candidate", "median us", "interval", "speed-up", "noise", "timed in", "run",
                right=("median us", "interval", "speed-up", "noise"),
            )  # fmt: skip
            for b in group:
                floor = floors[b.id]
                table.add_row(
                    cell(short_workload(b.workload)),
                    short_id(b.id),
                    marked(f"{b.median_us:.2f}", b.disturbed),
                    f"{b.low_us:.2f} to {b.high_us:.2f}",
                    _best_of(b, floor),
                    f"±{floor:.2%}" if floor is not None else "-",
                    b.stage,
                    cell(b.run),
                )
            print_table(console, table)
        console.print(
            "for each kernel, device and workload, the candidate of all runs with the highest speed-up: the reference"
            " baseline's time over its own, both of one race; interval: 95%, or of fewer than ten samples, as a search may"
            " take, their range",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        say_unconfirmed(console, found, db)
        _explain_mark(console, any(b.disturbed for b in found))
    if not found:
        narrowed = any(part is not None for part in (run, target, device, dtype, workload))
        start = command_line(db, "search", kernel or "KERNEL")
        asked = f"here of what you ask for{_devices(device, devices)}"
        reason = asked if narrowed else f"in this database yet; start with: {start}"
        typer.echo(f"evo: nothing has passed the gate and its timed calls {reason}", err=True)
        raise typer.Exit(1)


def _devices(part: str | None, known: set[str]) -> str:
    """Those there are, if none of them has that part in its name."""
    if part is None or not known or any(part.lower() in name.lower() for name in known):
        return ""
    return f"; no device has {visible(part)!r} in its name; known: {visible(', '.join(sorted(known)))}"
