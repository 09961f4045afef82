"""evo show: everything that is known of a candidate, or of a run and its finals."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evo.analysis.candidates import CandidateRecord, TimingRecord, read_candidate, read_source
from evo.analysis.finals import Finalist, RefusedFinalist, WorkloadFinals, quoted
from evo.analysis.runs import RunFinals, read_run_finals
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.recorded import named_candidate, unknown
from evo.cli.tables import (
    Cells,
    cell,
    factor,
    figure,
    interval,
    make_table,
    marked,
    print_table,
    say,
    say_disturbed,
    short_id,
    speedup,
    visible,
)
from evo.errors import EvoError, UnknownNameError
from evo.evaluation import AA_CONTROL, FINALIST
from evo.lineage import RunStatus
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
        text = read_source(store, record.id) if source and isinstance(record, CandidateRecord) else None
    if json:
        print_json(record, **({} if text is None else {"text": text}))
    elif isinstance(record, RunFinals):
        _print_run(make_console(), record, db)
    elif text is None:
        _print_candidate(make_console(), record, db)
        _print_timings(make_console(), record)
    else:
        _print_source(make_console(), text, "cuda" if record.target == "cuda" else "cpp")


def _print_source(console: Console, text: str, language: str) -> None:
    if not console.is_terminal:
        typer.echo(text)
        return
    from rich.syntax import Syntax  # and with it Pygments

    console.print(Syntax(text, language, theme="ansi_dark"))


def _named(store: Store, name: str) -> CandidateRecord | RunFinals:
    """The run of this very name, else the candidate whose identifier begins so, else the run whose name does."""
    run: RunFinals | None = None
    no_run: EvoError | None = None
    try:
        run = read_run_finals(store, name)
    except EvoError as error:  # no run, or several that begin so
        no_run = error
    if run is not None and run.name == name:
        return run
    try:
        return read_candidate(store, name)
    except UnknownNameError as no_candidate:
        if run is not None:
            return run
        if no_run is not None and not isinstance(no_run, UnknownNameError):
            raise no_run from None
        raise no_candidate if set(name.lower()) <= set(string.hexdigits) else unknown(store, name) from None


def _print_candidate(console: Console, record: CandidateRecord, db: str) -> None:
    facts = Table.grid(padding=(0, 2))
    last = record.finals[-1] if record.finals else None
    refused = last is not None and last.status != "ok"
    status = record.status + (f" ({short_id(record.same_code_as)})" if record.same_code_as else "")
    parents = " and ".join(f"{short_id(p.id)} (#{p.order}, {speedup(p.score)})" for p in record.parents)
    failed = [c for c in record.checks if not c.passed]
    rows = {
        "candidate": f"{record.id}{'  (winner of its run)' if record.winner else ''}",
        "run": f"{record.run}, candidate {record.order}, {record.elapsed_s:.1f} s into the search",
        "kernel": f"{record.kernel}, {record.workload}",
        "device": f"{record.device} ({record.arch})",
        "status": f"{status} in the search, refused by the finals: {last.status}" if last and refused else status,
        "made by": record.operator + (f" of {parents}" if parents else ""),
        "children": str(len(record.children)),
        "genome": " ".join(f"{k}={v}" for k, v in record.parameters.items()),
    }
    if b := record.build:
        rows["build"] = f"{b.status} in {b.seconds:.2f} s{' (cached)' if b.cached else ''}, {b.compiler}"
        if b.registers is not None:
            rows["resources"] = (
                f"{b.registers} registers, {b.spill_bytes} bytes spilled, shared memory {b.smem_static_bytes} +"
                f" {b.smem_dynamic_bytes} bytes" + (f", occupancy {b.occupancy:.0%}" if b.occupancy is not None else "")
            )
    rows["gate"] = f"{len(record.checks) - len(failed)} of {len(record.checks)} cases passed"
    if log := "\n".join(filter(None, (record.log.strip(), last.log.strip() if last and refused else ""))):
        rows["log"] = log
    for name, value in rows.items():
        facts.add_row(Text(name, style="dim"), Text(visible(value, lines=True)))
    console.print(facts, highlight=False)
    for stage in dict.fromkeys(c.stage for c in record.checks):
        command = command_line(db, "check", short_id(record.id), "--seed", str(record.seeds[stage]))
        say(console, f"to repeat the {stage}'s verdict:  {command}")
    for check in failed:
        drawn = f" (seed {check.seed})" if check.seed else ""  # timed data are of no case
        console.print(f"refused: {check.case}: {check.reason}{drawn}", style="red", highlight=False)


def _print_timings(console: Console, record: CandidateRecord) -> None:
    """Race by race: the candidate, then what was timed beside it."""
    if not record.timings:
        return
    table = make_table("timed in", "cache", "contender", *_FIGURES, right=_FIGURES)
    _add_rows(table, [t for t in record.timings if t.round == 0], "search")
    noise = record.noise_floor
    races = {race.round: race for race in record.final_races}
    elsewhere = several = False
    for round_ in dict.fromkeys(t.round for t in record.timings if t.round):
        own = [t for t in record.timings if t.round == round_]
        raced = [replace(t, contender="candidate") for t in own if t.contender == FINALIST]
        own = [t for t in own if t.contender != FINALIST]
        race, name = races.get(round_), "final" if round_ == 1 else f"final {round_}"
        beside = race.timings if race else ()
        several |= bool(raced)
        if race and not race.beside:
            several = elsewhere = True
            _add_rows(table, own, f"{name}, all finalists", noise)
            _add_rows(table, [t for t in beside if t.protocol != "hot"], f"{name}, winner's race", noise)
            continue
        _add_rows(table, raced, f"{name}, all finalists", noise)
        for hot in (False, True):
            _add_rows(table, [t for t in (*own, *beside) if (t.protocol == "hot") is hot], name, noise)
    print_table(console, table)
    timings = [*record.timings, *(t for race in record.final_races for t in race.timings)]
    tie = f"; a tie within ±{noise:.2%}, the noise floor" if noise is not None else ""
    notes = [f"speed-up: over the reference baseline, in the same race{tie}"]
    if any(t.contender == AA_CONTROL for t in timings):
        notes.append("twin: a second copy of the winner")
    if several:
        notes.append("all finalists: the race that chose the winner, which then ran once more; that is the figure to quote")
    if elsewhere:
        notes.append("winner's race: the winner ran once more, without this candidate; the baselines are of that race")
    say(console, "; ".join(notes), "dim")
    say_disturbed(console, *(t.disturbed for t in timings))


def _add_rows(table: Table, timings: Sequence[TimingRecord], race: str, noise: float | None = None) -> None:
    for t in timings:
        table.add_row(
            race,
            "hot" if t.protocol == "hot" else "cold",
            t.contender,
            marked(figure(t.median_us), t.disturbed),
            interval(t.low_us, t.high_us, 2),
            marked(speedup(t.ratio, None if t.protocol == "hot" else noise), t.disturbed and t.ratio is not None),
            _speedup_interval(t),
            str(len(t.samples_us)),
            str(t.calls_per_sample),
            str(t.sets),
            style="bold" if t.contender == "candidate" else "",
        )


def _speedup_interval(t: TimingRecord | Finalist) -> str:
    return interval(1 / t.ratio_high, 1 / t.ratio_low) if t.ratio_low and t.ratio_high else ""


def _print_run(console: Console, run: RunFinals, db: str) -> None:
    stopped = f": {run.stop_reason}" if run.stop_reason else ""
    say(
        console,
        f"{run.name}: {run.kernel} ({run.target}) on {run.device}, {run.status}{stopped}; {run.evaluations} candidates in"
        f" {run.elapsed_s:.0f} s, {run.passed} passed the search",
    )
    if run.status == RunStatus.INTERRUPTED:
        say(console, f"to continue it:  {command_line(db, 'resume', run.name)}")
    for held in run.finals:
        refused = [f for f in run.refused_in_finals if f.task == held.task]
        say(console, held.workload, "bold")
        if held.finalists:
            print_table(console, _finalists_table(held))
            _print_confirmation(console, held)
        if held.winner is None:
            _print_best(console, run, held, refused, db)
        for f in refused:
            why = f"{f.status.replace('_', ' ')}: {f.reason}"
            say(console, f"finalist {short_id(f.id)} #{f.order} was refused: {why}", "red")
    if any(held.winner for held in run.finals):
        say(
            console,
            "all figures of a table are of one race; behind: the winner's speed-up over this one's, round by round in the"
            " race of all finalists, a tie where the interval of that holds 1, as in evo diff",
            "dim",
        )
    say_disturbed(console, *(t.disturbed for h in run.finals for t in (*h.finalists, h.confirmed) if t is not None))


def _print_best(
    console: Console, run: RunFinals, held: WorkloadFinals, refused: Sequence[RefusedFinalist], db: str
) -> None:
    """Why there is no winner, and what there is instead."""
    best = run.tasks[held.task].best
    left, style = "the best that they have not refused" if refused else "the best so far", ""
    if not held.finalists and not refused:
        reason, left = "no final has timed a candidate", "its best so far"
    elif run.status != RunStatus.FINISHED:
        reason = "the finals are not over"
    else:
        reason, style = "unconfirmed: the finals have no winner", "bold red"
    shown = f"; {left}: {command_line(db, 'show', short_id(best))}" if best else ""
    say(console, reason + shown, style)


def _finalists_table(held: WorkloadFinals) -> Cells:
    noise = f" ±{held.noise_floor:.2%}" if held.noise_floor is not None else ""
    heading = f"speed-up{noise}"
    table = make_table(
        "candidate", "median us", "interval", heading, "interval ", "behind", "interval  ", "in the search",
        right=("median us", heading, "behind", "in the search"),
    )  # fmt: skip
    for f in held.finalists:
        table.add_row(
            cell(f"{short_id(f.id)} #{f.order}"),
            marked(figure(f.median_us), f.disturbed),
            interval(f.low_us, f.high_us, 2),
            marked(speedup(f.ratio, held.noise_floor), f.disturbed),
            _speedup_interval(f),
            "winner" if f.winner else "" if f.behind is None else "tie" if f.tie else factor(f.behind),
            interval(f.behind_low, f.behind_high) if f.behind is not None else "",
            speedup(f.score),
            style="bold" if f.winner else "",
        )
    return table


def _print_confirmation(console: Console, held: WorkloadFinals) -> None:
    """The figure to quote, and what is out of the ordinary about it."""
    again = held.confirmed
    if again is None or held.winner is None:
        return
    limits = f" ({interval(1 / again.ratio_high, 1 / again.ratio_low)})" if again.ratio_low and again.ratio_high else ""
    gain = marked(f"{speedup(again.ratio, held.noise_floor)}{limits}", again.disturbed)
    say(
        console,
        f"confirmed: {short_id(held.winner)} ran once more, alone with the baselines, in a fresh process and on other data:"
        f" {figure(again.median_us)} us ({interval(again.low_us, again.high_us, 2)}), {gain}; {quoted(again)}",
        "bold",
    )
    for remark in held.remarks:
        say(console, remark, "yellow")
