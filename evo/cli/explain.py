"""evo explain."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from evo.analysis import queries
from evo.analysis.explanation import EditCredit, Explanation
from evo.analysis.lineage import Lineage, present_space
from evo.analysis.records import CandidateRecord
from evo.cli.cells import cell, change_text, factor, figure, interval
from evo.cli.options import (
    DEFAULT_DB,
    CandidateName,
    Db,
    Json,
    check_seed,
    command_line,
    make_console,
    parse_values,
    print_json,
)
from evo.cli.recorded import Recorded, named_candidate
from evo.cli.tables import DISTURBED_NOTE, make_table, marked, print_table, say, short_id
from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.problem.space import Space

__all__ = ["register"]

_TEMPLATE = "template"
_EDIT_LINES = 4
"""Of the ten lines that a story has, with its head."""


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
    seed: Annotated[
        int | None,
        typer.Option(help="With --measure: draws the data; random if left out.", callback=check_seed),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every edit, with what is known of it, as a table.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Tell how a candidate got fast: which of its changes carry the gain, as far as that was measured."""
    if seed is not None and not measure:
        raise UsageError("--seed is for --measure: leave it out, or measure")
    with Lineage(db) as known:
        record = named_candidate(known.store, candidate, db)
        of_template = from_ is not None and (from_ == _TEMPLATE or "=" in from_)
        space = _present_space(record) if of_template or measure else None
        found = _explanation(known, record, from_, space)
        digest = queries.run(known.store, record.run).kernel_digest if measure else ""
    ablation = None
    if measure and found.edits:
        from evo.cli.explain_race import ablation_record, measure_edits, tell_race  # what builds and times

        assert space is not None
        drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
        recorded = Recorded(record=record, seeds={}, db=db)
        ablation = measure_edits(recorded, found, space, kernel_digest=digest, seed=drawn)
    if json:
        print_json(asdict(found) | {"measured": ablation_record(ablation, found.edits) if ablation else None})
        return
    console = make_console()
    say(console, _head(found), "bold")
    if ablation:
        tell_race(console, found, ablation)
    else:
        more = command_line(db, "explain", short_id(found.id), *(("--from", from_) if from_ else ()), "--measure")
        _tell(console, found, more)
    if all_:
        _print_all(console, found)


def _present_space(record: CandidateRecord) -> Space:
    workload = Workload.of(record.dims, record.dtype, record.options)
    return present_space(record.kernel, record.target, record.arch, workload)


def _explanation(known: Lineage, record: CandidateRecord, from_: str | None, space: Space | None) -> Explanation:
    """space: the kernel's present one, where that is known."""
    carriers = {p.name: tuple(w.parameter for w in p.when) for p in space.parameters} if space else None
    if from_ is None or space is None or (from_ != _TEMPLATE and "=" not in from_):
        return known.explanation(record.id, from_, carriers=carriers)
    values = {} if from_ == _TEMPLATE else parse_values(filter(None, from_.split(",")), space, "--from")
    point = space.complete({**space.default, **values})
    if broken := space.violations(point):
        raise UsageError(f"--from {from_!r} is not legal for {record.workload}: {'; '.join(broken)}")
    base_from = "the template's default" + (f" with {from_}" if values else "")
    return known.explanation(record.id, Genome.of(point), carriers=carriers, base_from=base_from)


def _head(found: Explanation) -> str:
    where = f"{found.kernel}, {found.workload} on {found.device}"
    fast = f"{figure(found.median_us)} us in the search, {factor(1 / found.ratio)} over the reference"
    return f"{short_id(found.id)} ({where}): {fast}"


def _tell(console: Console, found: Explanation, command: str) -> None:
    """At most nine lines. command: what times the rest."""
    begun = found.base_from + (f" ({short_id(found.base_id)})" if found.base_id else "")
    count = f"{len(found.edits)} edit{'s' * (len(found.edits) != 1)}"
    if not found.edits:
        say(console, f"it is the same genome as {begun}")
        return
    if found.gain is None:
        say(console, f"from {begun}, which has no time of its own in this run: {count}")
    else:
        gained = f"{marked(factor(found.gain), found.disturbed)} ({interval(found.low, found.high)})"
        say(console, f"from {begun} at {figure(found.base_us)} us: {gained} by {count}:")
    disturbed = found.disturbed or any(c.disturbed for c in found.edits)
    told = [c for c in found.edits if c.gain is not None and c.tie is not True]
    lines = _EDIT_LINES - disturbed
    for credit in told[:lines]:
        say(console, f"  {_credit_line(credit)}")
    if len(told) > lines:
        rest = "; ".join(f"{factor(c.gain)} {change_text(c.change)}" for c in told[lines:])
        say(console, f"  further: {rest}")
    if ties := [c for c in found.edits if c.tie]:
        names = (change_text(c.change) + " (the same machine code)" * c.same_code for c in ties)
        say(console, f"  within the noise: {'; '.join(names)}", "dim")
    unknown = [c for c in found.edits if c.gain is None]
    if unknown:
        say(console, f"  not measured: {'; '.join(change_text(c.change) for c in unknown)}", "yellow")
    say(console, _rest(found, len(unknown), command), "dim")
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
    print_table(console, table)
    say(
        console,
        "gain: mean over pairs of candidates that differ in this edit only; alone: of the start with it; last: of the"
        " finished one without it; since: the first of the main line that has it",
        "dim",
    )
