"""evo show."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evo.analysis import candidates, queries
from evo.analysis.records import CandidateRecord, FinalRace, TimingRecord
from evo.cli.cells import visible
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.recorded import named_candidate, unknown
from evo.cli.show_run import RunFinals, print_run, read_run, run_json
from evo.cli.tables import DISTURBED_NOTE, make_table, marked, print_table, short_id, speedup
from evo.errors import UnknownNameError
from evo.evaluation import AA_CONTROL, FINALIST
from evo.lineage import Stage, gate_seeds
from evo.lineage.store import Store

__all__ = ["register"]


_FIGURES = ("median us", "interval", "speed-up", "interval ", "samples", "calls", "sets")


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    name: Annotated[
        str, typer.Argument(metavar="CANDIDATE|RUN", help="Its identifier, a run's name, or a unique beginning of one.")
    ],
    source: Annotated[bool, typer.Option("--source", help="Print the candidate's rendered source.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show everything that is known of a candidate; or of a run its finalists, and which of them tie with the winner."""
    with Store.open(db, write=False) as store:
        record = named_candidate(store, name, db) if source else _named(store, name)
        if isinstance(record, RunFinals):
            print_json(run_json(record)) if json else print_run(make_console(), record, db)
            return
        text = candidates.source(store, record.id) if source else ""
        run = queries.run(store, record.run)
        seeds = gate_seeds(run.options, run.seed)
        races = queries.final_races(store, record)
        noise = queries.noise_floors_of(store, [record.run]).get((record.run, record.workload))
    if json:
        print_json(_record(record, races) | ({"text": text} if source else {}))
        return
    console = make_console()
    if source:
        language = "cuda" if record.target == "cuda" else "cpp"
        if console.is_terminal:
            from rich.syntax import Syntax  # and with it Pygments

            console.print(Syntax(text, language, theme="ansi_dark"))
        else:
            typer.echo(text)
        return
    _print_candidate(console, record, seeds, db)
    _print_timings(console, record, races, noise)


def _named(store: Store, name: str) -> CandidateRecord | RunFinals:
    """The run of this very name, else the candidate whose identifier begins so, else the run whose name does."""
    if queries.has_run(store, name):
        return read_run(store, name)
    try:
        return candidates.candidate(store, name)
    except UnknownNameError as error:
        missing = error
    try:
        return read_run(store, name)
    except UnknownNameError:
        raise missing if set(name.lower()) <= set(string.hexdigits) else unknown(store, name) from None


def _record(record: CandidateRecord, races: Sequence[FinalRace]) -> dict[str, Any]:
    """Everything, with what the finals timed beside it."""
    return asdict(record) | {
        "timings": [_timing(t) for t in record.timings],
        "final_races": [asdict(r) | {"timings": [_timing(t) for t in r.timings]} for r in races],
    }


def _timing(timing: TimingRecord) -> dict[str, Any]:
    return asdict(timing) | {"disturbed": timing.disturbed}


def _print_candidate(console: Console, record: CandidateRecord, seeds: dict[Stage, int], db: str) -> None:
    facts = Table.grid(padding=(0, 2))
    last = record.finals[-1] if record.finals else None
    refused = last is not None and last.status != "ok"
    status = record.status + (f" ({short_id(record.same_code_as)})" if record.same_code_as else "")
    rows = {
        "candidate": f"{record.id}{'  (winner of its run)' if record.winner else ''}",
        "run": f"{record.run}, candidate {record.order}, {record.elapsed_s:.1f} s into the search",
        "kernel": f"{record.kernel}, {record.workload}",
        "device": f"{record.device} ({record.arch})",
        "status": f"{status} in the search, refused by the finals: {last.status}" if last and refused else status,
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
    if log := "\n".join(filter(None, (record.log.strip(), last.log.strip() if last and refused else ""))):
        rows["log"] = log
    for name, value in rows.items():
        facts.add_row(Text(name, style="dim"), Text(visible(value, lines=True)))
    console.print(facts, highlight=False)
    for stage in dict.fromkeys(c.stage for c in record.checks):
        command = command_line(db, "check", short_id(record.id), "--seed", str(seeds[Stage(stage)]))
        console.print(f"to repeat the {stage}'s verdict:  {command}", highlight=False, soft_wrap=True)
    for check in failed:
        drawn = f" (seed {check.seed})" if check.seed else ""  # timed data are of no case
        console.print(f"refused: {check.case}: {check.reason}{drawn}", style="red", highlight=False)


def _made_by(record: CandidateRecord) -> str:
    parents = " and ".join(f"{short_id(p.id)} (#{p.order}, {speedup(p.score)})" for p in record.parents)
    return record.operator + (f" of {parents}" if parents else "")


def _print_timings(
    console: Console, record: CandidateRecord, races: Sequence[FinalRace], noise: float | None
) -> None:
    """Race by race: the candidate, then what was timed beside it. noise: the floor of the run's last final, cold."""
    if not record.timings:
        return
    table = make_table("timed in", "cache", "contender", *_FIGURES, right=_FIGURES)
    own = [t for t in record.timings if t.round == 0]
    _add_rows(table, own, "search")
    elsewhere = several = False
    for round_ in dict.fromkeys(t.round for t in record.timings if t.round):
        timings = [t for t in record.timings if t.round == round_]
        race = next((r for r in races if r.round == round_), None)
        beside = list(race.timings) if race else []
        name = "final" if round_ == 1 else f"final {round_}"
        raced = [t for t in timings if t.contender == FINALIST]
        timings = [t for t in timings if t.contender != FINALIST]
        if race and not race.beside:
            several = True
            _add_rows(table, timings, f"{name}, all finalists", noise)
            _add_rows(table, [t for t in beside if t.protocol != "hot"], f"{name}, winner's race", noise)
            elsewhere = True
            continue
        several |= bool(raced)
        _add_rows(table, [replace(t, contender="candidate") for t in raced], f"{name}, all finalists", noise)
        for hot in (False, True):
            _add_rows(table, [t for t in (*timings, *beside) if (t.protocol == "hot") is hot], name, noise)
    print_table(console, table)
    tie = f"; a tie within ±{noise:.2%}, the noise floor" if noise is not None else ""
    notes = [f"speed-up: over the reference baseline, in the same race{tie}"]
    if any(t.contender == AA_CONTROL for r in races for t in r.timings):
        notes.append("twin: a second copy of the winner")
    if several:
        notes.append("all finalists: the race that chose the winner, which then ran once more; that is the figure to quote")
    if elsewhere:
        notes.append("winner's race: the winner ran once more, without this candidate; the baselines are of that race")
    console.print("; ".join(notes), style="dim", highlight=False, soft_wrap=True)
    if any(t.disturbed for t in (*record.timings, *(t for r in races for t in r.timings))):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def _add_rows(table: Table, timings: Sequence[TimingRecord], race: str, noise: float | None = None) -> None:
    for t in timings:
        interval = f"{1 / t.ratio_high:.3f} to {1 / t.ratio_low:.3f}" if t.ratio_low and t.ratio_high else ""
        table.add_row(
            race,
            "hot" if t.protocol == "hot" else "cold",
            t.contender,
            marked(f"{t.median_us:.2f}", t.disturbed),
            f"{t.low_us:.2f} to {t.high_us:.2f}",
            marked(speedup(t.ratio, None if t.protocol == "hot" else noise), t.disturbed and t.ratio is not None),
            interval,
            str(len(t.samples_us)),
            str(t.calls_per_sample),
            str(t.sets),
            style="bold" if t.contender == "candidate" else "",
        )
