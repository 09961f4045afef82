"""evo lineage, diff, explain: where a candidate came from, what distinguishes two, how one got fast; evo failures,
operators, importance, pareto: what a run can tell about its search space."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evo.analysis.candidates import CandidateRecord
from evo.analysis.descent import Family, Kin, read_family
from evo.analysis.diff import Difference
from evo.analysis.diff import diff as read_difference
from evo.analysis.explanation import Explanation
from evo.analysis.explanation import explain as read_explanation
from evo.analysis.failures import FailureReport, FailureTotal, failure_totals, present_space, read_failures
from evo.analysis.importance import Importance, read_importance
from evo.analysis.named import find_candidate, find_winners, workload_of
from evo.analysis.operators import OperatorCredit, read_operators
from evo.analysis.pareto import AXES, Nondominated, read_pareto
from evo.analysis.runs import find_run
from evo.cli.options import CandidateName, Db, Json, RunName, Seed, Trust, answer, print_json
from evo.cli.recorded import look, task_of, trusted
from evo.environment import DEFAULT_DB, cache_dir, command_line
from evo.errors import UsageError
from evo.job.values import draw_seed, parse_legal
from evo.lineage import LATEST
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.loading import recorded_kernel
from evo.report.sentences import hardly_tried, is_sure
from evo.report.terminal import (
    Terminal,
    change_text,
    factor,
    interval,
    make_console,
    median,
    notice,
    share,
    short_workload,
    speedup,
    unless_busy,
)
from evo.report.text import counted, short

if TYPE_CHECKING:
    from evo.search.check import Ablation

_TEMPLATE = "template"
_EDITS = 5
"""Number of edits that are shown without --all."""
_BAR = 24


def lineage(
    candidate: CandidateName,
    diff: Annotated[bool, typer.Option("--diff", help="Print the change of the source in each step, too.")] = False,
    descendants: Annotated[int, typer.Option(help="Largest number of descendants; 0 for none.", min=0, max=1_000_000)] = 20,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show a candidate's ancestors and descendants: operator, change and gain of every step."""
    with Store.open(db, write=False) as store:
        record = find_candidate(store, candidate, db)
        found = read_family(store, record.id, descendants=descendants, diff=diff)
    if json:
        print_json(found.members)
    else:
        look(trust, (record.kernel, record.kernel_digest))
        _print_family(make_console(), record, found, diff, db)


def _print_family(console: Terminal, record: CandidateRecord, found: Family, diff: bool, db: str) -> None:
    above, below = (sum(m.relation == of for m in found.members) for of in ("ancestor", "descendant"))
    first = "the first " if found.cut else ""
    workload = short_workload(record.workload, record.kernel, record.kernel_digest)
    console.say(
        f"{record.kernel}, {workload} on {record.device}: {short(record.id)} with"
        f" {counted(above, 'ancestor')} above it and {first}{counted(below, 'descendant')} below",
    )
    rows = [
        {
            "": "*" if m.main_line else "",
            "> ": f"{m.generation:+d}" if m.generation else "",
            "candidate": f"{short(m.id)} #{m.order}",
            "operator": m.operator,
            "parents": " ".join(f"#{p.order}" for p in m.parents) or "-",
            "change": _change(m),
            ">median": median(m.median_us, m.disturbed),
            ">speed-up": unless_busy(speedup(m.score) if m.score else m.status, m.disturbed),
            ">gain": "" if not is_sure(m) else "tie" if m.tie or m.gain == 1 else factor(m.gain),
            "interval": interval(m.gain_low, m.gain_high) if is_sure(m) else "",
        }
        for m in found.members
    ]
    console.print_rows(rows, ["bold" if m.relation == "self" else "" if m.main_line else "dim" for m in found.members])
    console.say(
        "* the main line, first parents; second column: generations before or after. All figures are the search's own; gain:"
        " speed-up over the first parent, with an interval made of those of the two, a tie if it holds 1",
        "dim",
    )
    if found.cut:
        more = command_line(db, "lineage", short(record.id), "--descendants", "1000")
        console.say(f"there are more descendants:  {more}", "dim")
    console.say_disturbed(*(member.disturbed for member in found.members))
    for member in found.members if diff else ():
        if member.parents:
            console.print()
            console.say(f"#{member.order} {short(member.id)}: {change_text(member.change)}", "bold")
            _print_unified(console, "source", member.diff)


def _change(member: Kin) -> str:
    return change_text(member.change) if member.parents else " ".join(f"{k}={v}" for k, v in member.parameters.items())


def _print_unified(console: Terminal, what: str, text: str | None) -> None:
    """Prints a unified diff in its colours. what: the kind of text, "source" or "PTX"."""
    if not text:
        console.say(f"the {what} of one of the two was not kept" if text is None else f"the {what} is the same", "dim")
        return
    console.say(f"{what}:", "bold")
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in text.splitlines():
        console.say(line, styles.get(line[:1], ""), lines=True)


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A candidate's identifier, or a unique beginning of it.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another candidate's.")],
    all_: Annotated[bool, typer.Option("--all", help="Print equal properties, too.")] = False,
    source: Annotated[bool, typer.Option("--source/--no-source", help="Print the difference of the sources.")] = True,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare two candidates: genome, source, machine code, resources, time."""
    with Store.open(db, write=False) as store:
        found = read_difference(store, *(find_candidate(store, name, db).id for name in (one, other)))
    answer(json, found, _print_difference, all_, source)


def _print_difference(console: Terminal, found: Difference, all_: bool, source: bool) -> None:
    busy = {row.name.split()[0]: (row.one, row.other) for row in found.rows if row.name.endswith(" disturbed")}
    shown = [
        row
        for row in found.rows
        if "ratio" not in row.name and (all_ or (row.differs and not row.name.endswith("disturbed")))
    ]
    rows = [
        {
            "": "" if i and row.section == shown[i - 1].section else row.section,
            " ": row.name,
            short(found.one): _value(row.name, row.one, busy.get(row.name.split()[0], (None, None))[0]),
            f"{short(found.other)} ": _value(row.name, row.other, busy.get(row.name.split()[0], (None, None))[1]),
        }
        for i, row in enumerate(shown)
    ]
    console.print_rows(rows, ["bold" if all_ and row.differs else "" for row in shown])
    console.say(_verdict(found, busy))
    console.say_disturbed(*(any(both) for both in busy.values()))
    if source:
        console.print()
        _print_unified(console, "source", found.source)
        if found.ptx is not None:
            _print_unified(console, "PTX", found.ptx)


def _value(name: str, value: Any, disturbed: Any) -> Any:
    if name.endswith("_us"):
        return median(value, bool(disturbed))
    return value[:12] if isinstance(value, str) and name.endswith(("digest", "hash")) else value


def _verdict(found: Difference, busy: Mapping[str, tuple[Any, ...]]) -> str:
    """The sentence on which of two candidates is faster. busy: whether each was disturbed, by the kind of race."""
    if found.same_code:
        return "the two are the same machine code; what differs in their times is noise"
    if found.gain is None or found.timed_in is None:
        return "their times cannot be compared: not both were timed on one device for one workload"
    where = "finals" if found.timed_in == "final" else "search"
    if any(busy.get(found.timed_in, ())):
        return f"too busy to compare: something slowed the device down in the {where}, and no gain is sure"
    how = "round by round in one race" if found.one_race else "each was timed beside the reference, in a race of its own"
    gain, low, high = found.gain, found.gain_low, found.gain_high
    if gain < 1 and not found.tie:
        gain, low, high = 1 / gain, 1 / high if high else None, 1 / low if low else None
    if found.tie:
        return f"a tie in the {where}: {factor(gain)}, with 1 inside its interval ({interval(low, high)}); {how}"
    first = short(found.other if found.gain > 1 else found.one)
    return f"{first} is {factor(gain)} as fast in the {where} ({interval(low, high)}); {how}"


def explain(
    candidate: CandidateName,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="The base: a candidate, 'template' for the template's present default, or NAME=VALUE,... for that with"
            " these values; the run's first candidate if left out.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Build and time the edits between, in one race on this machine.")
    ] = False,
    seed: Seed = None,
    all_: Annotated[bool, typer.Option("--all", help="Print every edit, not only those worth most.")] = False,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Tell how a candidate got fast: which of its changes carry the gain, as far as that was measured."""
    if seed is not None and not measure:
        raise UsageError("--seed is for --measure: leave it out, or measure")
    with Store.open(db, write=False) as store:
        one = json or measure or from_ is not None  # else each winner of a run is told of
        told = [find_candidate(store, candidate, db)] if one else find_winners(store, candidate, db)
        for record in told:
            trusted(trust and (measure or from_ is not None), record.kernel)
        explained = [(record, _explanation(store, record, from_)) for record in told]
    for record, found in explained:
        ablation = measure_edits(record, found, seed=draw_seed(seed), db=db) if measure and found.edits else None
        if json:
            print_json(found, measured=ablation)
            return
        look(trust, (record.kernel, record.kernel_digest))
        _tell_explanation(record, found, ablation, all_=all_, from_=from_, db=db)


def _tell_explanation(
    record: CandidateRecord, found: Explanation, ablation: Ablation | None, *, all_: bool, from_: str | None, db: str
) -> None:
    console = make_console()
    workload = short_workload(found.workload, found.kernel, found.kernel_digest)
    timed = [t for t in record.timings if t.round and t.protocol != "hot" and t.contender == "candidate"]
    last = max(timed, key=lambda t: t.round, default=None)
    final = f"; {median(last.median_us, last.disturbed)} in the final" if last is not None else ""
    gain = "" if found.disturbed else f", {factor(1 / found.ratio)} over the reference"
    time = f"{median(found.median_us, found.disturbed)} in the search{gain}{final}"
    console.say(f"{short(found.id)} ({found.kernel}, {workload} on {found.device}): {time}", "bold")
    if ablation:
        _tell_race(console, found, ablation)
    if all_ or not ablation:
        more = command_line(db, "explain", short(found.id), *(("--from", from_) if from_ else ()), "--measure")
        _tell(console, found, more, len(found.edits) if all_ else _EDITS)


def _explanation(store: Store, record: CandidateRecord, from_: str | None) -> Explanation:
    if from_ is None or (from_ != _TEMPLATE and "=" not in from_):
        return read_explanation(store, record.id, from_)
    kernel = recorded_kernel(record.kernel, None)
    space = present_space(kernel, record.target, record.arch, workload_of(record))
    base_from = "the template's default" + ("" if from_ == _TEMPLATE else f" with {from_}")
    base = parse_legal("" if from_ == _TEMPLATE else from_, space, "--from")
    return read_explanation(store, record.id, base.parameters, base_from=base_from)


def _tell(console: Terminal, found: Explanation, command: str, most: int) -> None:
    """Prints what the run measured of the edits, at most so many. command: the command that measures the rest."""
    begun = found.base_from + (f" ({short(found.base_id)})" if found.base_id else "")
    edits = counted(len(found.edits), "edit")
    if not found.edits:
        console.say(f"it is the same genome as {begun}")
        return
    if found.gain is None:
        console.say(f"from {begun}, which has no time of its own in this run: {edits}")
    else:
        gained = unless_busy(f"{factor(found.gain)} ({interval(found.low, found.high)})", found.disturbed)
        console.say(f"from {begun} at {median(found.base_us, False)}: {gained} by {edits}")
    console.print_rows(
        {
            "edit": change_text(c.change),
            ">gain": "not measured" if c.gain is None else unless_busy("tie" if c.tie else factor(c.gain), c.disturbed),
            "interval": "the same machine code" if c.same_code else interval(c.low, c.high, c.disturbed),
            ">alone": unless_busy(factor(c.alone), c.disturbed and c.alone is not None),
            ">last": unless_busy(factor(c.last), c.disturbed and c.last is not None),
            ">pairs": c.pairs,
            "since": f"#{c.since_order} {short(c.since)}" if c.since else "-",
        }
        for c in found.edits[:most]
    )
    console.say(
        "gain: mean over pairs of candidates that differ in this edit only; alone: its gain on the base; last: its gain as"
        " the last edit; since: the first candidate of the main line with it",
        "dim",
    )
    hidden = f"; {counted(len(found.edits) - most, 'more edit')}: --all" if len(found.edits) > most else ""
    console.say(_rest(found, command) + hidden, "dim")
    console.say_disturbed(found.disturbed, *(c.disturbed for c in found.edits))


def _rest(found: Explanation, command: str) -> str:
    """The sentence on the share of the gain that the edits account for, and the command that measures the others."""
    unknown = any(c.gain is None for c in found.edits)
    if found.product is None:
        return f"nothing that lies between was measured; time what is missing:  {command}"
    spoilt = any(c.disturbed for c in found.edits)
    text = f"the measured edits together: {unless_busy(factor(found.product), spoilt)}"
    if found.rest is not None and not spoilt:
        text += f"; {factor(found.rest)} is left for {'the others and ' * unknown}what edits do only together"
    return text + (f"; time what is missing:  {command}" if unknown else "")


# -- edits timed now ------------------------------------------------------------------------------------------


def measure_edits(record: CandidateRecord, found: Explanation, *, seed: int, db: str) -> Ablation:
    """The edits of an explanation, timed in one race on this machine. Raises UsageError where the candidate's code does
    not run here."""
    from evo.executors import device_name
    from evo.search.check import measure_ablation
    from evo.search.place import open_workers  # its import takes longer than all else
    from evo.targets import find_target

    target = find_target(record.target)
    if reason := target.runs(record.arch):
        raise UsageError(f"code for {record.arch} cannot be timed here: {reason}")
    here = device_name(target, record.arch)
    if here != record.device:
        notice(f"timed on {here}; the recorded figures are of {record.device}")
    kernel = recorded_kernel(record.kernel, None)
    if kernel.digest != record.kernel_digest:
        notice(f"kernel {kernel.name} has changed since: what its template renders now is timed")
    edits = [credit.change for credit in found.edits]
    if sys.stderr.isatty():  # nothing is shown until the end
        notice(f"building, gating and timing {counted(len(edits), 'edit')}; this takes a minute or more")
    with open_workers(record.target, cache_dir(db)) as executor:
        task = task_of(record, executor, seed)
        return measure_ablation(task, Genome.of(found.base), Genome.of(record.parameters), edits)


def _tell_race(console: Terminal, found: Explanation, ablation: Ablation) -> None:
    """Prints the race of the edits. If it was disturbed, so is every figure of it."""
    spoilt, discarded = ablation.disturbed, ablation.discarded_rounds
    again = f", {discarded} disturbed rounds taken again" if discarded else ""
    start, end = (median(t.median_us, t.disturbed) for t in (ablation.start, ablation.end))
    gained = unless_busy(f"{factor(ablation.gain.gain)} ({interval(ablation.gain.low, ablation.gain.high)})", spoilt)
    console.say(f"timed again from {found.base_from} at {start} to {end}, all in one race{again}: {gained}")
    rows = []
    for step in ablation.path:
        without = next((w for w in ablation.without if (w.change,) == step.changes), None)  # None for several edits
        alone = without.gain if without else None
        row = {
            "edit": "; ".join(map(change_text, step.changes)),
            ">median": median(step.timing.median_us, step.timing.disturbed),
            ">gain": unless_busy("tie" if step.gain.tie else factor(step.gain.gain), spoilt),
            "interval": interval(step.gain.low, step.gain.high, spoilt),
            ">taken out": unless_busy("tie" if alone.tie else factor(alone.gain), spoilt) if alone else "",
            "interval ": interval(alone.low, alone.high, spoilt) if alone else without.reason[:60] if without else "",
        }
        rows.append(row)
    console.print_rows(rows)
    console.say(
        "gain: over the line before, made in this order; taken out: what the finished kernel loses without that edit alone."
        " All are of the same rounds, so that changes of the machine cancel",
        "dim",
    )
    console.say_disturbed(spoilt)


# -- a run's search space ---------------------------------------------------------------------------------------


def failures(
    run: RunName = LATEST,
    all_: Annotated[bool, typer.Option("--all", help="Count the candidates of all runs, by kernel and device.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Load the kernel: show structural parameters and what it now forbids.")
    ] = False,
    top: Annotated[int, typer.Option(help="Largest number of rows of a table.", min=1)] = 8,
    trust: Trust = False,
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
            trusted(trust and template, find_run(store, run).kernel)
            answer(json, read_failures(store, run, template=template), _print_report, top, db)


def _print_totals(console: Terminal, totals: Sequence[FailureTotal]) -> None:
    if not totals:
        notice("no candidate has been recorded in this database yet")
    console.print_rows(
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
    )


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
        "more: failures that no rule above avoids; lost: candidates that it would forbid among those that passed, and among"
        " the fastest quarter. One run is no proof: a rule is a question to the template",
        "dim",
    )


def operators(
    run: RunName = LATEST,
    windows: Annotated[int, typer.Option(help="Number of parts of the search time.", min=1, max=1000)] = 5,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show what each operator was worth: trials, success, gain a second, and when."""
    with Store.open(db, write=False) as store:
        answer(json, read_operators(store, run, windows=windows), _print_operators)


def _print_operators(console: Terminal, found: Sequence[OperatorCredit]) -> None:
    if not found:
        notice("no candidate of this run has been recorded yet")
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
        "passed, new code: shares of the trials; success: share that was faster than the faster parent, among trials with a"
        " timed one; improved: number faster than all before; gain: of these together; seconds: time of building and"
        " measuring; gain/s: per cent a second",
        "dim",
    )


def importance(
    run: RunName = LATEST,
    quantile: Annotated[float, typer.Option(help="Share of the candidates that counts as fast.")] = 0.1,
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
        console.print_rows(
            {
                "parameter": r.parameter,
                "": "█" * round(_BAR * (r.importance or 0.0)),
                ">share": share(r.importance),
                ">values": r.values,
                ">in": r.candidates if r.conditional else "all",
                " ": r.note,
            }
            for r in records
        )
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
    axes: Annotated[str, typer.Option(help="Figures to trade, separated by commas.")] = ",".join(AXES),
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
                ">speed-up": unless_busy(factor(1 / r.ratio), r.disturbed),
                ">median": median(r.median_us, r.disturbed),
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
        console.say("no candidate of this run was timed undisturbed")
    console.say(
        f"no other candidate is better in one of {', '.join(axes)} and as good in the rest; spilled, shared: bytes; error:"
        " the largest share of what the gate allows; equal: number of others with the same figures. All times are the"
        " search's own",
        "dim",
    )
