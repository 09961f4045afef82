"""evo explain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from evo.ablation import Ablation, Problem, measure_ablation
from evo.cli.cells import cell, change_text, factor, figure, interval, visible
from evo.cli.options import (
    DEFAULT_DB,
    CandidateName,
    Db,
    Json,
    command_line,
    make_console,
    parse_values,
    print_json,
)
from evo.cli.recorded import Recorded, named_candidate
from evo.cli.results import DISTURBED_NOTE, make_table, marked, short_id, timing_record
from evo.cli.setup import worker_settings
from evo.errors import UsageError
from evo.genome import Genome
from evo.kernel import Workload, load_kernel
from evo.lineage import Lineage, present_space
from evo.run import open_executor
from evo.space import Space
from evo.store import queries
from evo.store.edits import Edit
from evo.store.explanation import EditCredit, Explanation
from evo.targets import find_target

__all__ = ["register"]

_TEMPLATE = "template"
_EDIT_LINES = 4
"""Of the ten lines that a story has."""


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    candidate: CandidateName,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Where it begins: a candidate, 'template' for its present default, or NAME=VALUE,... of that; the run's"
            " first candidate if left out.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Build and time what lies between, in one race on this machine.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="With --measure: draws the data; random if left out.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every edit, with what is known of it, as a table.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Tell how a candidate got fast: which of its changes carry the gain, as far as that was measured."""
    if seed is not None and not measure:
        raise UsageError("--seed is for --measure: leave it out, or measure")
    with Lineage(db) as known:
        recorded = Recorded(record=named_candidate(known.store, candidate, db), seeds={}, db=db)
    found, edits, space = _explanation(recorded, from_, db, with_space=measure)
    ablation = None
    if measure and edits:
        assert space is not None
        drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
        ablation = _measure(recorded, found, edits, space, drawn, db)
    if json:
        measured = _ablation_record(ablation, found.edits) if ablation else None
        print_json(asdict(found) | {"measured": measured})
        return
    console = make_console()
    if ablation:
        _tell_race(console, found, ablation)
    else:
        more = command_line(db, "explain", short_id(found.id), *(("--from", from_) if from_ else ()), "--measure")
        _tell(console, found, more)
    if all_:
        _print_all(console, found)


def _explanation(
    recorded: Recorded, from_: str | None, db: str, *, with_space: bool
) -> tuple[Explanation, list[Edit], Space | None]:
    """The edits of the explanation, in its order; the present space, if it is needed."""
    record = recorded.record
    named = from_ is not None and (from_ == _TEMPLATE or "=" in from_)
    space, carriers, base, base_from = None, None, None, ""
    if named or with_space:
        workload = Workload.of(record.dims, record.dtype, record.options)
        space = present_space(record.kernel, record.target, record.arch, workload)
        carriers = {p.name: tuple(w.parameter for w in p.when) for p in space.parameters}
    if named:
        assert space is not None
        assert from_ is not None
        values = {} if from_ == _TEMPLATE else parse_values(filter(None, from_.split(",")), space, "--from")
        point = space.complete({**space.default, **values})
        if broken := space.violations(point):
            raise UsageError(f"--from {from_!r} is not legal for {record.workload}: {'; '.join(broken)}")
        base, base_from = Genome.of(point), "the template's default" + (f" with {from_}" if values else "")
    with Lineage(db) as known:
        found = known.explanation(record.id, base or from_, carriers=carriers, base_from=base_from)
    return found, [Edit(credit.change) for credit in found.edits], space


def _measure(
    recorded: Recorded, found: Explanation, edits: Sequence[Edit], space: Space, seed: int, db: str
) -> Ablation:
    request, record = recorded.request, recorded.record
    target = find_target(record.target)
    if reason := target.runs(record.arch):
        raise UsageError(f"code for {record.arch} cannot be timed here: {reason}")
    here = target.device().name
    if here != record.device:
        typer.echo(f"evo: timed on {here}; the recorded figures are of {record.device}", err=True)
    kernel = load_kernel(record.kernel)
    if kernel.digest != _kernel_digest(record.run, db):
        typer.echo(f"evo: kernel {kernel.name} has changed since: what its template renders now is timed", err=True)
    problem = Problem(
        kernel=record.kernel,
        target=record.target,
        arch=record.arch,
        workload=request.workload,
        space=space,
        seed=seed,
    )
    with open_executor(record.target, worker_settings(record.target, db)) as executor:
        return measure_ablation(executor, problem, Genome.of(found.base, found.base_flags), request.genome, edits)


def _kernel_digest(run: str, db: str) -> str:
    with Lineage(db) as known:
        return queries.run(known.store, run).kernel_digest


def _ablation_record(ablation: Ablation, credits: Sequence[EditCredit]) -> dict[str, Any]:
    changes = [credit.change for credit in credits]
    return {
        "start": timing_record(ablation.start),
        "end": timing_record(ablation.end),
        "reference": {"contender": ablation.reference.contender, **timing_record(ablation.reference)},
        "gain": asdict(ablation.total),
        "without": [
            {
                "change": changes[w.edit],
                "gain": asdict(w.gain) | {"tie": w.gain.tie} if w.gain else None,
                "timing": timing_record(w.timing) if w.timing else None,
                "reason": w.reason,
            }
            for w in ablation.without
        ],
        "path": [
            {
                "changes": [changes[edit] for edit in step.edits],
                "gain": asdict(step.gain) | {"tie": step.gain.tie},
                "timing": timing_record(step.timing),
            }
            for step in ablation.path
        ],
        "seconds": round(ablation.seconds, 2),
    }


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=True)


def _head(found: Explanation) -> str:
    where = f"{found.kernel}, {found.workload} on {found.device}"
    fast = f"{figure(found.median_us)} us in the search, {factor(1 / found.ratio)} over the reference"
    return f"{short_id(found.id)} ({where}): {fast}"


def _tell(console: Console, found: Explanation, command: str) -> None:
    """At most ten lines. command: what times the rest."""
    _say(console, _head(found), "bold")
    begun = found.base_from + (f" ({short_id(found.base_id)})" if found.base_id else "")
    count = f"{len(found.edits)} edit{'s' * (len(found.edits) != 1)}"
    if not found.edits:
        _say(console, f"it is the same genome as {begun}")
        return
    if found.gain is None:
        _say(console, f"from {begun}, which has no time of its own in this run: {count}")
    else:
        gained = f"{factor(found.gain)} ({interval(found.low, found.high)})"
        _say(console, f"from {begun} at {figure(found.base_us)} us: {gained} by {count}:")
    disturbed = found.disturbed or any(c.disturbed for c in found.edits)
    told = [c for c in found.edits if c.gain is not None and c.tie is not True]
    lines = _EDIT_LINES - disturbed
    for credit in told[:lines]:
        _say(console, f"  {_credit_line(credit)}")
    if len(told) > lines:
        rest = "; ".join(f"{factor(c.gain)} {change_text(c.change)}" for c in told[lines:])
        _say(console, f"  further: {rest}")
    if ties := [c for c in found.edits if c.tie]:
        names = (change_text(c.change) + " (the same machine code)" * c.same_code for c in ties)
        _say(console, f"  within the noise: {'; '.join(names)}", "dim")
    unknown = [c for c in found.edits if c.gain is None]
    if unknown:
        _say(console, f"  not measured: {'; '.join(change_text(c.change) for c in unknown)}", "yellow")
    _say(console, _rest(found, len(unknown), command), "dim")
    if disturbed:
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def _credit_line(credit: EditCredit) -> str:
    pairs = f"{credit.pairs} pair{'s' * (credit.pairs != 1)} of candidates"
    since = f", since #{credit.since_order}" if credit.since_order is not None else ""
    gain = marked(factor(credit.gain), credit.disturbed)
    return f"{gain} ({interval(credit.low, credit.high)})  {change_text(credit.change)}  [{pairs}{since}]"


def _rest(found: Explanation, unknown: int, command: str) -> str:
    more = f"time what is missing:  {command}"
    if found.product is None:
        return f"nothing that lies between was measured; {more}"
    if found.rest is None:
        return f"the measured edits together: {factor(found.product)}; {more}"
    left = f"{factor(found.rest)} is left for {'the others and ' * bool(unknown)}what edits do only together"
    return f"the measured edits together: {factor(found.product)}; {left}" + (f"; {more}" if unknown else "")


def _tell_race(console: Console, found: Explanation, ablation: Ablation) -> None:
    """The way there, edit by edit, all of one race."""
    _say(console, _head(found), "bold")
    _say(
        console,
        f"timed again from {found.base_from} at {figure(ablation.start.median_us)} us to"
        f" {figure(ablation.end.median_us)} us, all in one race: {factor(ablation.total.gain)}"
        f" ({interval(ablation.total.low, ablation.total.high)})",
    )
    right = ("median us", "gain", "taken out")
    table = make_table("edit", "median us", "gain", "interval", "taken out", "interval ", right=right)
    alone = {w.edit: w for w in ablation.without}
    for step in ablation.path:
        changes = "; ".join(change_text(found.edits[edit].change) for edit in step.edits)
        out = alone[step.edits[0]] if len(step.edits) == 1 else None
        table.add_row(
            cell(changes),
            marked(figure(step.timing.median_us), step.timing.disturbed),
            "tie" if step.gain.tie else factor(step.gain.gain),
            interval(step.gain.low, step.gain.high),
            "" if out is None else "tie" if out.gain and out.gain.tie else factor(out.gain.gain if out.gain else None),
            "" if out is None else interval(out.gain.low, out.gain.high) if out.gain else cell(out.reason[:60]),
        )
    console.print(table)
    _say(
        console,
        "gain: over the line before, made in this order; taken out: what the finished kernel loses without that edit alone."
        " Of the same rounds, so that the machine's changes cancel",
        "dim",
    )
    if any(t.disturbed for t in (ablation.start, ablation.end, *(s.timing for s in ablation.path))):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def _print_all(console: Console, found: Explanation) -> None:
    right = ("gain", "alone", "last", "pairs")
    table = make_table("edit", "gain", "from to", "alone", "last", "pairs", "since", right=right)
    for c in found.edits:
        table.add_row(
            cell(change_text(c.change)),
            factor(c.gain) if c.gain is not None else "not measured",
            interval(c.low, c.high),
            factor(c.alone),
            factor(c.last),
            str(c.pairs),
            f"#{c.since_order} {short_id(c.since)}" if c.since else "-",
        )
    console.print(table)
    _say(
        console,
        "gain: mean over pairs of candidates that differ in this edit only; alone: of the start with it; last: of the"
        " finished one without it; since: the first of the main line that has it",
        "dim",
    )
