"""evo runs, best, lineage: what the database knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from evo.cli.options import DEFAULT_DB, CandidateName, Db, Json, command_line, make_console, print_json
from evo.cli.recorded import named_candidate
from evo.cli.results import DISTURBED_NOTE, make_table, marked, short_id, speedup
from evo.cli.screen import format_duration
from evo.errors import UnknownNameError
from evo.store import candidates, queries
from evo.store.records import Step
from evo.store.store import Store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)
    app.command("best")(best)
    app.command("lineage")(lineage)


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = queries.runs(store)
        leaders = {r.name: sorted(queries.best(store, run=r.name), key=lambda b: b.ratio) for r in found}
        refused = {r.name: len(queries.refused_finalists(store, r.name)) for r in found}
    if json:
        records = [
            asdict(r)
            | {
                "refused_in_finals": refused[r.name],
                "best": [
                    {
                        "candidate": b.id,
                        "workload": b.workload,
                        "speedup": round(1 / b.ratio, 4),
                        "stage": b.stage,
                        "disturbed": b.disturbed,
                    }
                    for b in leaders[r.name]
                ],
            }
            for r in found
        ]
        print_json(records)
        return
    table = make_table(
        "run", "kernel", "device", "status", "candidates", "passed", "time", "best", "started",
        right=("candidates", "passed", "time", "best"),
    )
    for r in found:
        table.add_row(
            r.name,
            f"{r.kernel} ({r.target})",
            r.device,
            r.status,
            str(r.evaluations),
            str(r.passed - refused[r.name]),
            format_duration(r.elapsed_s),
            marked(speedup(leaders[r.name][0].ratio), leaders[r.name][0].disturbed) if leaders[r.name] else "-",
            r.created[:16].replace("T", " "),
        )
    console = make_console()
    console.print(table)
    console.print("passed: not refused, by the search or its finals; best: the run's highest speed-up", style="dim")
    _explain_mark(console, any(bs and bs[0].disturbed for bs in leaders.values()))


def _explain_mark(console: Console, disturbed: bool) -> None:
    if disturbed:
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def best(
    kernel: Annotated[str | None, typer.Argument(help="Only this kernel's.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the fastest candidate for every kernel, device and workload."""
    with Store.open(db, write=False) as store:
        searched = {r.kernel for r in queries.runs(store)}
        if kernel is not None and kernel not in searched:
            raise UnknownNameError("kernel in this database", kernel, searched)
        found = queries.best(store, kernel)
        noise = {b.id: queries.noise_floors(store, b.run).get(b.workload) for b in found}
    if json:
        print_json([{"candidate": b.id, **asdict(b), "noise_floor": noise[b.id]} for b in found])
    else:
        table = make_table(
            "kernel", "device", "workload", "candidate", "median us", "interval", "speed-up", "noise", "timed in", "run",
            right=("median us", "interval", "speed-up", "noise"),
        )
        for b in found:
            table.add_row(
                b.kernel,
                b.device,
                _shorter(b.workload),
                short_id(b.id),
                marked(f"{b.median_us:.2f}", b.disturbed),
                f"{b.low_us:.2f} to {b.high_us:.2f}",
                marked(speedup(b.ratio, noise[b.id]), b.disturbed),
                f"±{noise[b.id]:.2%}" if noise[b.id] is not None else "-",
                b.stage,
                b.run,
            )
        console = make_console()
        console.print(table)
        console.print(
            "for each kernel, device and workload, the candidate of all runs with the highest speed-up: the reference"
            " baseline's time over its own, both of one race; interval: 95%, or of fewer than ten samples, as a search may"
            " take, their range",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
        _explain_mark(console, any(b.disturbed for b in found))
    if not found:
        start = command_line(db, "search", kernel or "KERNEL")
        typer.echo(f"evo: nothing has passed the gate in this database yet; start with: {start}", err=True)
        raise typer.Exit(1)


def _shorter(workload: str) -> str:
    """Without the options, which are rarely anything but their defaults."""
    parts = workload.split(",")
    last = next((i for i, p in enumerate(parts) if p.startswith("dtype=")), len(parts) - 1)
    return ",".join(parts[: last + 1])


def lineage(candidate: CandidateName, db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Show how a candidate came about: every ancestor with its operator, change and gain."""
    with Store.open(db, write=False) as store:
        record = named_candidate(store, candidate, db)
        steps = candidates.ancestry(store, record.id)
        disturbed = queries.disturbed(store, [s.id for s in steps])
    if json:
        print_json([asdict(s) | {"disturbed": s.id in disturbed} for s in steps])
        return
    console = make_console()
    console.print(
        f"{record.kernel}, {_shorter(record.workload)} on {record.device}: {len(steps)}"
        f" candidate{'' if len(steps) == 1 else 's, from the first ancestor'} to {short_id(record.id)}",
        highlight=False,
        soft_wrap=True,
    )
    table = make_table(
        "", "candidate", "operator", "parents", "change", "median us", "speed-up", "gain",
        right=("median us", "speed-up", "gain"),
    )
    for step in steps:
        table.add_row(
            "*" if step.main_line else "",
            f"{short_id(step.id)} #{step.order}",
            step.operator,
            " ".join(f"#{p.order}" for p in step.parents) or "-",
            _change(step),
            marked(f"{step.median_us:.2f}", step.id in disturbed) if step.median_us is not None else "-",
            speedup(step.score),
            _gain(step),
            style="" if step.main_line else "dim",
        )
    console.print(table)
    console.print(
        "* the main line: first parents. All figures are of the search's own timing; gain: over the first parent, a tie"
        " where the intervals of the two overlap.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    _explain_mark(console, bool(disturbed))


def _gain(step: Step) -> str:
    if step.gain is None:
        return ""
    return "tie" if step.tie or step.gain == 1 else f"{100 * (step.gain - 1):+.1f}%"


def _change(step: Step) -> str:
    if not step.parents:
        return " ".join(f"{k}={v}" for k, v in step.parameters.items())
    shown = []
    for name, (before, after) in step.change.items():
        shown.append(f"{name}: {'-' if before is None else before} -> {'-' if after is None else after}")
    return ", ".join(shown) or "none"
