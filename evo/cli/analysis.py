"""evo failures, operators, importance, pareto: what a run can tell about its search space."""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

import typer

from evo.analysis.failures import FailureReport, FailureTotal, failure_totals, read_failures
from evo.analysis.importance import Importance, read_importance
from evo.analysis.operators import OperatorCredit, read_operators
from evo.analysis.pareto import AXES, Nondominated, read_pareto
from evo.cli.options import DEFAULT_DB, Db, Json, RunName, answer, command_line
from evo.cli.tables import Terminal, factor, figure, marked, share
from evo.errors import UsageError
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.report.sentences import hardly_tried
from evo.report.text import counted, short

_BAR = 24


def failures(
    run: RunName = LATEST,
    all_: Annotated[bool, typer.Option("--all", help="How the candidates of all runs ended, by kernel and device.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Load the kernel: which parameters are structural, what it now forbids.")
    ] = False,
    top: Annotated[int, typer.Option(help="Rows of each table.", min=1)] = 8,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what broke in a run, where in the search space, and which constraint would have avoided it."""
    if all_ and run != LATEST:
        raise UsageError("--all is for every run: leave out the run, or --all")
    with Store.open(db, write=False) as store:
        if all_:
            answer(json, failure_totals(store), _print_totals)
        else:
            answer(json, read_failures(store, run, template=template), _print_report, top, db)


def _print_totals(console: Terminal, totals: Sequence[FailureTotal]) -> None:
    if not totals:
        typer.echo("evo: no candidate has been recorded in this database yet", err=True)
    rows = [
        {
            "kernel": t.kernel,
            "target": t.target,
            "device": t.device,
            "ended as": t.status,
            ">candidates": f"{t.candidates:,}",
            ">share": share(t.share),
            ">runs": f"{t.runs:,}",
        }
        for t in totals
    ]
    console.print_rows(rows)


def _print_report(console: Terminal, report: FailureReport, top: int, db: str) -> None:
    console.say(f"{report.run}: {report.refused:,} of {report.candidates:,} candidates did not pass")
    if not report.refused:
        return
    kinds = [
        {
            "what broke": kind.status,
            ">candidates": kind.candidates,
            ">share": share(kind.share),
            ">seconds": f"{kind.seconds:.1f}",
            "first": short(kind.first),
        }
        for kind in report.kinds
    ]
    reasons = [
        {
            "reason (# is any number)": reason.reason[:160] or "nothing was said",
            "kind": reason.status,
            ">candidates": reason.candidates,
            "first": short(reason.first),
        }
        for reason in report.reasons[:top]
    ]
    values = [
        {
            "parameter": f"{v.parameter}={v.value}{' (structural)' if v.structural else ''}",
            ">tried": v.candidates,
            ">refused": v.refused,
            ">share": share(v.share),
            "share elsewhere": f"{share(v.elsewhere_share)} of {v.elsewhere}",
        }
        for v in report.values
        if v.frequent
    ]
    console.print_rows(kinds)
    console.print()
    console.print_rows(reasons)
    console.print()
    console.print_rows(values[:top])
    if not values:
        console.say("no parameter's value was refused more often than chance would have it", "dim")
    _print_rules(console, report, top)
    first = command_line(db, "show", short(report.kinds[0].first))
    console.say(f"a first example:  {first}")


def _print_rules(console: Terminal, report: FailureReport, top: int) -> None:
    if not report.rules:
        return
    rows = [
        {
            "forbidding": f"{rule.rule}{' (the template does now)' if rule.kind == 'existing' else ''}",
            ">avoids": rule.avoided,
            ">of all": share(rule.avoided_share),
            ">more": rule.more,
            ">passed lost": rule.passed_lost,
            ">good lost": rule.good_lost,
            ">seconds saved": f"{rule.seconds:.1f}",
            "": "loses the best" if rule.best_lost else "",
        }
        for rule in report.rules[:top]
    ]
    console.print()
    console.print_rows(rows)
    console.say(
        "more: not avoided by a rule above; lost: what it would forbid of the candidates that passed, and of the fastest"
        " quarter. From this run alone: a rule is a question to the template, not proof",
        "dim",
    )


def operators(
    run: RunName = LATEST,
    windows: Annotated[int, typer.Option(help="Into how many parts the search time is cut.", min=1, max=1000)] = 5,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what each operator was worth: trials, success, gain a second, and when."""
    with Store.open(db, write=False) as store:
        answer(json, read_operators(store, run, windows=windows), _print_operators)


def _print_operators(console: Terminal, found: Sequence[OperatorCredit]) -> None:
    if not found:
        typer.echo("evo: no candidate of this run has been recorded yet", err=True)
        return
    rows = [
        {
            "operator": c.operator if c.window is None else "",
            "search time": "all" if c.window is None else f"{c.from_s:.0f} to {c.to_s:.0f} s",
            ">trials": c.trials,
            ">passed": share(c.passed / c.trials),
            ">new code": share(c.new_code / c.trials),
            ">success": share(c.success),
            ">improved": c.improvements,
            ">gain": factor(c.gain),
            ">seconds": f"{c.seconds:.1f}",
            ">gain/s": "-" if c.gain_rate is None else f"{c.gain_rate:.3g}%",
        }
        for c in found
    ]
    console.print_rows(rows, ["bold" if c.window is None else "dim" for c in found])
    console.say(
        "passed, new code: of the trials; success: faster than the faster parent, of the trials with a timed one; improved:"
        " faster than all before; gain: of these together; seconds: building and measuring; gain/s: per cent a second",
        "dim",
    )


def importance(
    run: RunName = LATEST,
    quantile: Annotated[float, typer.Option(help="What share of the candidates counts as fast.")] = 0.1,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show which parameters matter for being fast, by workload (PED-ANOVA)."""
    with Store.open(db, write=False) as store:
        answer(json, read_importance(store, run, quantile=quantile), _print_importance, quantile, db)


def _print_importance(console: Terminal, found: Sequence[Importance], quantile: float, db: str) -> None:
    for workload, group in groupby(found, lambda r: r.workload):
        records = list(group)
        console.say(f"{workload}, {counted(records[0].timed, 'timed candidate')}")
        rows = [
            {
                "parameter": r.parameter,
                "": "█" * round(_BAR * (r.importance or 0.0)),
                ">share": share(r.importance),
                ">values": r.values,
                ">in": r.candidates if r.conditional else "all",
                " ": r.note,
            }
            for r in records
        ]
        console.print_rows(rows)
        if least := hardly_tried(records):
            console.say(least)
    console.say(
        f"how much the values of the fastest {quantile:.0%} differ from those of all that were timed; shares sum to 1. A"
        " search that settled a parameter early makes it look unimportant. What a value gains:"
        f" {command_line(db, 'explain', 'CANDIDATE')}. A search with one value only:"
        f" {command_line(db, 'search', 'KERNEL', '--fix', 'NAME=VALUE')}",
        "dim",
    )


def pareto(
    run: RunName = LATEST,
    axes: Annotated[str, typer.Option(help="What to trade, separated by commas.")] = ",".join(AXES),
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show the candidates that no other beats in time, registers, spills, shared memory and accuracy at once."""
    chosen = [axis.strip() for axis in axes.split(",") if axis.strip()]
    with Store.open(db, write=False) as store:
        answer(json, read_pareto(store, run, chosen), _print_pareto, chosen)


def _print_pareto(console: Terminal, found: Sequence[Nondominated], axes: Sequence[str]) -> None:
    for workload, group in groupby(found, lambda r: r.workload):
        records = list(group)
        rows = [
            {
                "candidate": f"{short(r.id)} #{r.order}",
                ">speed-up": marked(factor(1 / r.ratio), r.disturbed),
                ">median us": marked(figure(r.median_us), r.disturbed),
                ">registers": r.registers,
                ">spilled": r.spill_bytes,
                ">shared": r.smem_bytes,
                ">error": share(r.error),
                ">equal": r.equal or "",
            }
            for r in records
        ]
        console.say(workload)
        console.print_rows(rows, ["bold" if r.fastest else "" for r in records])
    console.say_disturbed(*(r.disturbed for r in found))
    if not found:
        console.say("no candidate of this run was timed")
    console.say(
        f"no other candidate is better in one of {', '.join(axes)} and as good in the rest; spilled, shared: bytes; error:"
        " the largest, of what the gate allows; equal: others with these very figures. All times are of the search",
        "dim",
    )
