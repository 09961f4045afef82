"""evo failures, operators, importance, pareto: what a run can tell about its search space."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console

from evo.analysis.failures import FailureReport, FailureTotal, failure_totals, read_failures
from evo.analysis.importance import TriedValue, read_importance, undersampled
from evo.analysis.operators import read_operators
from evo.analysis.pareto import AXES, read_pareto
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.tables import (
    cell,
    factor,
    figure,
    make_table,
    marked,
    print_table,
    say,
    say_disturbed,
    share,
    short_id,
)
from evo.errors import UsageError
from evo.lineage import LATEST
from evo.lineage.store import Store

__all__ = ["register"]

RunName = Annotated[str, typer.Argument(help="A run, or a unique beginning of its name; the latest if left out.")]
_BAR = 24
"""Standard errors between two shares from which on they are shown as different."""
_ALTERNATIVES = 3


def register(app: typer.Typer) -> None:
    app.command("failures")(failures)
    app.command("operators")(operators)
    app.command("importance")(importance)
    app.command("pareto")(pareto)


def failures(
    run: Annotated[
        str | None, typer.Argument(help="A run, or a unique beginning of its name; the latest if left out.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="How the candidates of all runs ended, by kernel and device.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Load the kernel: which parameters are structural, what it now forbids.")
    ] = False,
    top: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 8,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what broke in a run, where in the search space, and which constraint would have avoided it."""
    if all_ and run is not None:
        raise UsageError("--all is for every run: leave out the run, or --all")
    with Store.open(db, write=False) as store:
        if all_:
            totals = failure_totals(store)
            print_json(totals) if json else _print_totals(make_console(), totals)
            return
        report = read_failures(store, run or LATEST, template=template)
    if json:
        print_json(report)
        return
    _print_report(make_console(), report, top, db)


def _print_totals(console: Console, totals: list[FailureTotal]) -> None:
    if not totals:
        typer.echo("evo: no candidate has been recorded in this database yet", err=True)
        return
    table = make_table(
        "kernel", "target", "device", "ended as", "candidates", "share", "runs", right=("candidates", "share", "runs")
    )
    for t in totals:
        table.add_row(
            cell(t.kernel), t.target, cell(t.device), t.status, f"{t.candidates:,}", share(t.share), f"{t.runs:,}"
        )
    print_table(console, table)


def _print_report(console: Console, report: FailureReport, top: int, db: str) -> None:
    say(console, f"{report.run}: {report.refused:,} of {report.candidates:,} candidates did not pass")
    if not report.refused:
        return
    table = make_table("what broke", "candidates", "share", "seconds", "first", right=("candidates", "share", "seconds"))
    for kind in report.kinds:
        first = short_id(kind.first)
        table.add_row(kind.status, str(kind.candidates), share(kind.share), f"{kind.seconds:.1f}", first)
    print_table(console, table)
    _print_reasons(console, report, top)
    _print_values(console, report, top)
    _print_rules(console, report, top)
    first = command_line(db, "show", short_id(report.kinds[0].first))
    say(console, f"a first example:  {first}")


def _print_reasons(console: Console, report: FailureReport, top: int) -> None:
    table = make_table("reason (# is any number)", "kind", "candidates", "first", right=("candidates",))
    for reason in report.reasons[:top]:
        table.add_row(
            cell(reason.reason[:160] or "nothing was said"), reason.status, str(reason.candidates), short_id(reason.first)
        )
    console.print()
    print_table(console, table)


def _print_values(console: Console, report: FailureReport, top: int) -> None:
    table = make_table("parameter", "tried", "refused", "share", "share elsewhere", right=("tried", "refused", "share"))
    shown = [v for v in report.values if v.frequent][:top]
    for v in shown:
        table.add_row(
            cell(f"{v.parameter}={v.value}{' (structural)' if v.structural else ''}"),
            str(v.candidates),
            str(v.refused),
            share(v.share),
            f"{share(v.elsewhere_share)} of {v.elsewhere}",
        )
    console.print()
    if shown:
        print_table(console, table)
    else:
        say(console, "no parameter's value was refused more often than chance would have it", "dim")


def _print_rules(console: Console, report: FailureReport, top: int) -> None:
    if not report.rules:
        return
    right = ("avoids", "of all", "more", "passed lost", "good lost", "seconds saved")
    table = make_table("forbidding", *right, "", right=right)
    first = [rule for rule in report.rules if rule.more]
    others = [rule for rule in report.rules if not rule.more][:_ALTERNATIVES]
    for rule in [*first, *others][:top]:
        table.add_row(
            cell(f"{rule.rule}{' (the template does now)' if rule.kind == 'existing' else ''}"),
            str(rule.avoided),
            share(rule.avoided_share),
            str(rule.more),
            str(rule.passed_lost),
            str(rule.good_lost),
            f"{rule.seconds:.1f}",
            "loses the best" if rule.best_lost else "",
        )
    console.print()
    print_table(console, table)
    say(
        console,
        "more: not avoided by a rule above; lost: what it would forbid of the candidates that passed, and of the fastest"
        " quarter. From this run alone: a rule is a question to the template, not proof",
        "dim",
    )


def operators(
    run: RunName = "latest",
    windows: Annotated[int, typer.Option(help="Into how many parts the search time is cut.", min=1, max=1000)] = 5,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what each operator was worth: trials, success, gain a second, and when."""
    with Store.open(db, write=False) as store:
        found = read_operators(store, run, windows=windows)
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
            "-" if c.gain_rate is None else f"{c.gain_rate:.3g}%",
            style="bold" if total else "dim",
        )
    console = make_console()
    print_table(console, table)
    say(
        console,
        "passed, new code: of the trials; success: faster than the faster parent, of the trials with a timed one; improved:"
        " faster than all before; gain: of these together; seconds: building and measuring; gain/s: per cent a second",
        "dim",
    )


def importance(
    run: RunName = "latest",
    quantile: Annotated[float, typer.Option(help="What share of the candidates counts as fast.")] = 0.1,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show which parameters matter for being fast, by workload (PED-ANOVA)."""
    with Store.open(db, write=False) as store:
        found = read_importance(store, run, quantile=quantile)
    if json:
        print_json(found)
        return
    console = make_console()
    for workload, group in groupby(found, lambda r: r.workload):
        records = list(group)
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
        if least := undersampled(records):
            say(console, f"tried least of what matters most: {', '.join(map(_undersampled, least))}")
    say(
        console,
        f"how much the values of the fastest {quantile:.0%} differ from those of all that were timed; shares sum to 1. A"
        " search that settled a parameter early makes it look unimportant. What a value gains:"
        f" {command_line(db, 'explain', 'CANDIDATE')}. A search with one value only:"
        f" {command_line(db, 'search', 'KERNEL', '--fix', 'NAME=VALUE')}",
        "dim",
    )


def _undersampled(tried: TriedValue) -> str:
    fared = f"best {factor(1 / tried.best)}" if tried.best else "none was timed" if tried.passed else "none passed"
    return f"{tried.parameter}={tried.value} ({tried.candidates:,} of {tried.of:,} candidates, {fared})"


def pareto(
    run: RunName = "latest",
    axes: Annotated[str, typer.Option(help="What to trade, separated by commas.")] = ",".join(AXES),
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the candidates that no other beats in time, registers, spills, shared memory and accuracy at once."""
    chosen = [axis.strip() for axis in axes.split(",") if axis.strip()]
    with Store.open(db, write=False) as store:
        found = read_pareto(store, run, chosen)
    if json:
        print_json(found)
        return
    console = make_console()
    for workload, records in groupby(found, lambda r: r.workload):
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
    say_disturbed(console, *(r.disturbed for r in found))
    if not found:
        say(console, "no candidate of this run was timed")
    say(
        console,
        f"no other candidate is better in one of {', '.join(chosen)} and as good in the rest; spilled, shared: bytes; error:"
        " the largest, of what the gate allows; equal: others with these very figures. All times are of the search",
        "dim",
    )
