"""evo failures."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from evo.analysis.failures import FailureReport, FailureTotal
from evo.analysis.lineage import Lineage
from evo.cli.cells import cell, share
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, make_console, print_json
from evo.cli.tables import make_table, print_table, say, short_id
from evo.errors import UsageError
from evo.lineage import LATEST

__all__ = ["register"]

_NOT_CHANCE = 2.0
"""Standard errors between two shares from which on they are shown as different."""
_ALTERNATIVES = 3


def register(app: typer.Typer) -> None:
    app.command("failures")(failures)


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
    with Lineage(db) as known:
        if all_:
            totals = known.failure_totals()
            print_json(totals) if json else _print_totals(make_console(), totals)
            return
        report = known.failure_report(run or LATEST, template=template)
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
    console.print(f"a first example:  {first}", highlight=False, soft_wrap=True)


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
    shown = [v for v in report.values if v.z is not None and v.z >= _NOT_CHANCE][:top]
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
        console.print("no parameter's value was refused more often than chance would have it", style="dim")


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
    console.print(
        "more: not avoided by a rule above; lost: what it would forbid of the candidates that passed, and of the fastest"
        " quarter. From this run alone: a rule is a question to the template, not proof",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
