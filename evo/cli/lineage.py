"""evo lineage, diff, explain: where a candidate came from, what distinguishes two, how one got fast."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from evo.analysis.candidates import CandidateRecord
from evo.analysis.descent import Family, Kin, read_family
from evo.analysis.diff import Difference
from evo.analysis.diff import diff as read_difference
from evo.analysis.explanation import EditCredit, Explanation
from evo.analysis.explanation import explain as read_explanation
from evo.analysis.failures import present_space
from evo.analysis.runs import find_run
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
from evo.cli.tables import (
    cell,
    change_text,
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
from evo.errors import UsageError
from evo.lineage.store import Store
from evo.problem.kernel import Workload
from evo.problem.space import Space

__all__ = ["register"]

_SECTIONS = {"candidate": "about", "genome": "genome", "build": "build", "code": "machine code", "time": "time"}
_TEMPLATE = "template"
_EDIT_LINES = 4
"""Of the ten lines that a story has, with its head."""


def register(app: typer.Typer) -> None:
    app.command("lineage")(lineage)
    app.command("diff")(diff)
    app.command("explain")(explain)


def lineage(
    candidate: CandidateName,
    diff: Annotated[bool, typer.Option("--diff", help="Also what each change changed in the source.")] = False,
    descendants: Annotated[int, typer.Option(help="Show so many of them; 0 for none.", min=0, max=1_000_000)] = 20,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show a candidate's ancestors and descendants: operator, change and gain of every step."""
    with Store.open(db, write=False) as store:
        record = named_candidate(store, candidate, db)
        found = read_family(store, record.id, descendants=descendants, diff=diff)
    if json:
        print_json(found.members)
        return
    console = make_console()
    ancestors = sum(member.relation == "ancestor" for member in found.members)
    say(
        console,
        f"{record.kernel}, {record.workload} on {record.device}: {short_id(record.id)} with {_number(ancestors)}"
        f" ancestor{'' if ancestors == 1 else 's'} above it and {_descendants(found)} below",
    )
    table = make_table(
        "", "", "candidate", "operator", "parents", "change", "median us", "speed-up", "gain", "interval",
        right=("", "median us", "speed-up", "gain"),
    )  # fmt: skip
    for member in found.members:
        style = "bold" if member.relation == "self" else "" if member.main_line else "dim"
        tie = member.tie or member.gain == 1
        table.add_row(
            "*" if member.main_line else "",
            f"{member.generation:+d}" if member.generation else "",
            f"{short_id(member.id)} #{member.order}",
            cell(member.operator),
            " ".join(f"#{p.order}" for p in member.parents) or "-",
            cell(_change(member)),
            marked(figure(member.median_us), member.disturbed),
            marked(speedup(member.score), member.disturbed) if member.score else cell(member.status),
            "" if member.gain is None else "tie" if tie else factor(member.gain),
            interval(member.gain_low, member.gain_high),
            style=style,
        )
    print_table(console, table)
    say(
        console,
        "* the main line, first parents; second column: generations before or after. All figures are of the search's own"
        " timing; gain: over the first parent, with an interval put together from those of the two, and a tie where that"
        " holds 1",
        "dim",
    )
    if found.cut:
        more = command_line(db, "lineage", short_id(record.id), "--descendants", "1000")
        say(console, f"there are more descendants:  {more}", "dim")
    say_disturbed(console, *(member.disturbed for member in found.members))
    for member in found.members if diff else ():
        _print_step(console, member)


def _number(count: int) -> str:
    return str(count) if count else "no"


def _descendants(found: Family) -> str:
    count = sum(member.relation == "descendant" for member in found.members)
    return f"the first {count} of its descendants" if found.cut else f"{_number(count)} descendant{'s' * (count != 1)}"


def _change(member: Kin) -> str:
    return change_text(member.change) if member.parents else " ".join(f"{k}={v}" for k, v in member.parameters.items())


def _print_step(console: Console, member: Kin) -> None:
    """What a change changed in the source."""
    if not member.parents:
        return
    console.print()
    say(console, f"#{member.order} {short_id(member.id)}: {change_text(member.change)}", "bold")
    if member.diff is None:
        say(console, "the source of one of the two was not kept", "dim")
    elif not member.diff:
        say(console, "the source is the same", "dim")
    else:
        _print_unified(console, member.diff)


def _print_unified(console: Console, text: str) -> None:
    """A unified diff in its colours."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in text.splitlines():
        console.print(Text(visible(line, lines=True), style=styles.get(line[:1], "")), soft_wrap=True)


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A candidate's identifier, or a unique beginning of it.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another's.")],
    all_: Annotated[bool, typer.Option("--all", help="Also what is equal.")] = False,
    source: Annotated[bool, typer.Option("--source/--no-source", help="Print what differs in the source.")] = True,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Compare two candidates: genome, source, machine code, resources, time."""
    with Store.open(db, write=False) as store:
        found = read_difference(store, *(named_candidate(store, name, db).id for name in (one, other)))
    if json:
        print_json(found)
        return
    console = make_console()
    table = make_table("", "", short_id(found.one), short_id(found.other))
    section = ""
    for row in found.rows:
        if not (row.differs or all_) or "ratio" in row.name or (row.name.endswith("disturbed") and not all_):
            continue
        table.add_row(
            Text("" if row.section == section else _SECTIONS[row.section], style="dim"),
            cell(row.name),
            cell(_shorter(row.name, row.one)),
            cell(_shorter(row.name, row.other), style="bold" if row.differs and all_ else ""),
        )
        section = row.section
    console.print(table)
    say(console, _verdict(found))
    for name, text in (("source", found.source), ("PTX", found.ptx)):
        if text is None and name == "source" and source:
            say(console, "the source of one of the two was not kept", "dim")
        if text is None or (text and not source):
            continue
        console.print()
        say(console, f"{name}:" if text else f"the {name} is the same", "bold" if text else "dim")
        _print_unified(console, text)


def _shorter(name: str, value: object) -> object:
    return value[:12] if isinstance(value, str) and name.endswith(("digest", "hash")) else value


def _verdict(found: Difference) -> str:
    if found.same_code:
        return "the two are the same machine code; what differs in their times is noise"
    if found.gain is None:
        return "their times cannot be compared: not both were timed on one device for one workload"
    where = "finals" if found.timed_in == "final" else "search"
    how = "round by round in one race" if found.one_race else "each was timed beside the reference, in a race of its own"
    if found.tie:
        return f"a tie in the {where}: {factor(found.gain)}, with 1 inside its interval ({_limits(found)}); {how}"
    first = short_id(found.other if found.gain > 1 else found.one)
    value = found.gain if found.gain > 1 else 1 / found.gain
    limits = f" ({_limits(found)})" if found.gain_low is not None else ""
    return f"{first} is {factor(value)} as fast in the {where}{limits}; {how}"


def _limits(found: Difference) -> str:
    low, high = found.gain_low, found.gain_high
    if low is None or high is None:
        return "-"
    return interval(low, high) if found.gain is not None and (found.gain > 1 or found.tie) else interval(1 / high, 1 / low)


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
    with Store.open(db, write=False) as store:
        record = named_candidate(store, candidate, db)
        of_template = from_ is not None and (from_ == _TEMPLATE or "=" in from_)
        space = _present_space(record) if of_template or measure else None
        found = _explanation(store, record, from_, space)
        digest = find_run(store, record.run).kernel_digest if measure else ""
    ablation = None
    if measure and found.edits:
        from evo.cli.explain_race import ablation_record, measure_edits, tell_race  # what builds and times

        assert space is not None
        drawn = int.from_bytes(os.urandom(4)) if seed is None else seed
        recorded = Recorded(record=record, db=db)
        ablation = measure_edits(recorded, found, kernel_digest=digest, seed=drawn)
    if json:
        print_json(found, measured=ablation_record(ablation, found.edits) if ablation else None)
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


def _explanation(store: Store, record: CandidateRecord, from_: str | None, space: Space | None) -> Explanation:
    """space: the kernel's present one, where that is known."""
    carriers = {p.name: tuple(w.parameter for w in p.when) for p in space.parameters} if space else None
    if from_ is None or space is None or (from_ != _TEMPLATE and "=" not in from_):
        return read_explanation(store, record.id, from_, carriers=carriers)
    values = {} if from_ == _TEMPLATE else parse_values(filter(None, from_.split(",")), space, "--from")
    point = space.complete({**space.default, **values})
    if broken := space.violations(point):
        raise UsageError(f"--from {from_!r} is not legal for {record.workload}: {'; '.join(broken)}")
    base_from = "the template's default" + (f" with {from_}" if values else "")
    return read_explanation(store, record.id, point, carriers=carriers, base_from=base_from)


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
    say_disturbed(console, disturbed)


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
