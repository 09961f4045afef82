"""evo runs, best, show, lineage: what the database knows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from evo.cli.options import DEFAULT_DB, Db, Json, make_console, print_json
from evo.cli.results import short_id
from evo.cli.screen import format_duration
from evo.errors import UnknownNameError
from evo.run import gate_seeds
from evo.store import Stage, candidates, queries
from evo.store.records import CandidateRecord, Step, TimingRecord
from evo.store.store import Store

__all__ = ["register"]

Candidate = Annotated[str, typer.Argument(help="A candidate's identifier, or a unique beginning of it.")]


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)
    app.command("best")(best)
    app.command("show")(show)
    app.command("lineage")(lineage)


def _table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _speedup(ratio: float | None, noise: float | None = None) -> str:
    if ratio and noise is not None and abs(1 / ratio - 1) <= noise:
        return "tie"
    return f"{1 / ratio:.3f}x" if ratio else "-"


def runs(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """List the runs, the latest first."""
    with Store.open(db, write=False) as store:
        found = queries.runs(store)
        ratios = {r.name: [b.ratio for b in queries.best(store, run=r.name)] for r in found}
    if json:
        print_json([asdict(r) for r in found])
        return
    table = _table(
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
            str(r.passed),
            format_duration(r.elapsed_s),
            _speedup(min(ratios[r.name], default=None)),
            r.created[:16].replace("T", " "),
        )
    make_console().print(table)


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
        table = _table(
            "kernel", "device", "workload", "candidate", "median us", "95% interval", "speed-up", "noise", "timed in", "run",
            right=("median us", "95% interval", "speed-up", "noise"),
        )
        for b in found:
            table.add_row(
                b.kernel,
                b.device,
                _shorter(b.workload),
                short_id(b.id),
                f"{b.median_us:.2f}",
                f"{b.low_us:.2f} to {b.high_us:.2f}",
                _speedup(b.ratio, noise[b.id]),
                f"±{noise[b.id]:.2%}" if noise[b.id] is not None else "-",
                b.stage,
                b.run,
            )
        make_console().print(table)
    if not found:
        typer.echo("evo: nothing has passed the gate in this database yet; start with: evo search", err=True)
        raise typer.Exit(1)


def _shorter(workload: str) -> str:
    """Without the options, which are rarely anything but their defaults."""
    parts = workload.split(",")
    last = next((i for i, p in enumerate(parts) if p.startswith("dtype=")), len(parts) - 1)
    return ",".join(parts[: last + 1])


def show(
    candidate: Candidate,
    source: Annotated[bool, typer.Option("--source", help="Print the rendered source.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show everything that is known of a candidate."""
    with Store.open(db, write=False) as store:
        record = candidates.candidate(store, candidate)
        text = candidates.source(store, candidate) if source else ""
        run = queries.run(store, record.run)
        seeds = gate_seeds(run.options, run.seed)
    if json:
        print_json(asdict(record) | ({"text": text} if source else {}))
        return
    console = make_console()
    if source:
        language = "cuda" if record.target == "cuda" else "cpp"
        if console.is_terminal:
            console.print(Syntax(text, language, theme="ansi_dark"))
        else:
            typer.echo(text)
        return
    _print_candidate(console, record, seeds)


def _print_candidate(console: Console, record: CandidateRecord, seeds: dict[Stage, int]) -> None:
    facts = Table.grid(padding=(0, 2))
    rows = {
        "candidate": f"{record.id}{'  (winner of its run)' if record.winner else ''}",
        "run": f"{record.run}, candidate {record.order}, {record.elapsed_s:.1f} s into the search",
        "kernel": f"{record.kernel}, {record.workload}",
        "device": f"{record.device} ({record.arch})",
        "status": record.status + (f" ({short_id(record.same_code_as)})" if record.same_code_as else ""),
        "made by": _made_by(record),
        "children": str(len(record.children)),
        "genome": " ".join(f"{k}={v}" for k, v in record.parameters.items()),
    }
    if record.build:
        b = record.build
        rows["build"] = f"{b.status} in {b.seconds:.2f} s{' (cached)' if b.cached else ''}, {b.compiler}"
        if b.registers is not None:
            rows["resources"] = (
                f"{b.registers} registers, {b.spill_bytes} bytes spilled, shared memory {b.smem_static_bytes} +"
                f" {b.smem_dynamic_bytes} bytes" + (f", occupancy {b.occupancy:.0%}" if b.occupancy is not None else "")
            )
    failed = [c for c in record.checks if not c.passed]
    rows["gate"] = f"{len(record.checks) - len(failed)} of {len(record.checks)} cases passed"
    if stages := dict.fromkeys(c.stage for c in record.checks):
        commands = (f"evo check {short_id(record.id)} --seed {seeds[Stage(s)]} ({s})" for s in stages)
        rows["repeat"] = "; ".join(commands)
    if record.log:
        rows["log"] = record.log.strip()
    for name, value in rows.items():
        facts.add_row(f"[dim]{name}[/]", value.replace("[", r"\["))
    console.print(facts, highlight=False)
    for check in failed:
        console.print(f"refused: {check.case}: {check.reason} (seed {check.seed})", style="red", highlight=False)
    if record.timings:
        console.print(_timings(record.timings))


def _made_by(record: CandidateRecord) -> str:
    parents = " and ".join(f"{short_id(p.id)} (#{p.order}, {_speedup(p.score)})" for p in record.parents)
    return record.operator + (f" of {parents}" if parents else "")


def _timings(timings: tuple[TimingRecord, ...]) -> Table:
    table = _table(
        "timed in", "contender", "median us", "95% interval", "speed-up", "95% interval ", "samples", "calls", "sets",
        right=("median us", "95% interval", "speed-up", "95% interval ", "samples", "calls", "sets"),
    )
    for t in timings:
        interval = f"{1 / t.ratio_high:.3f} to {1 / t.ratio_low:.3f}" if t.ratio_low and t.ratio_high else ""
        table.add_row(
            t.stage,
            t.contender,
            f"{t.median_us:.2f}",
            f"{t.low_us:.2f} to {t.high_us:.2f}",
            _speedup(t.ratio),
            interval,
            str(len(t.samples_us)),
            str(t.calls_per_sample),
            str(t.sets),
        )
    return table


def lineage(candidate: Candidate, db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Show how a candidate came about: every ancestor with its operator, change and gain."""
    with Store.open(db, write=False) as store:
        record = candidates.candidate(store, candidate)
        steps = candidates.ancestry(store, candidate)
        noise = queries.noise_floors(store, record.run).get(record.workload, 0.0)
    if json:
        print_json([asdict(s) for s in steps])
        return
    console = make_console()
    console.print(
        f"{record.kernel}, {_shorter(record.workload)} on {record.device}: {len(steps)} candidates from the first"
        f" ancestor to {short_id(record.id)}",
        highlight=False,
        soft_wrap=True,
    )
    table = _table(
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
            f"{step.median_us:.2f}" if step.median_us is not None else "-",
            _speedup(step.score),
            _gain(step, noise),
            style="" if step.main_line else "dim",
        )
    console.print(table)
    floor = f" Within the noise floor of ±{noise:.2%} it is a tie." if noise else ""
    console.print(
        f"* the main line: first parents. gain: over the first parent, by the search's own timing.{floor}", style="dim"
    )


def _gain(step: Step, noise: float) -> str:
    if step.gain is None:
        return ""
    return "tie" if abs(step.gain - 1) <= noise else f"{100 * (step.gain - 1):+.1f}%"


def _change(step: Step) -> str:
    if not step.parents:
        return " ".join(f"{k}={v}" for k, v in step.parameters.items())
    shown = []
    for name, (before, after) in step.change.items():
        shown.append(f"{name}: {'-' if before is None else before} -> {'-' if after is None else after}")
    return ", ".join(shown) or "none"
