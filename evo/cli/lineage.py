"""evo lineage, diff: where a candidate came from, what came of it, and what distinguishes two."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from evo.analysis.descent import Family, Kin
from evo.analysis.diff import Difference
from evo.analysis.lineage import Lineage
from evo.cli.cells import cell, change_text, factor, figure, interval, visible
from evo.cli.options import DEFAULT_DB, CandidateName, Db, Json, command_line, make_console, print_json
from evo.cli.recorded import named_candidate
from evo.cli.tables import (
    DISTURBED_NOTE,
    make_table,
    marked,
    print_table,
    say,
    short_id,
    speedup,
)

__all__ = ["register"]

_SECTIONS = {"candidate": "about", "genome": "genome", "build": "build", "code": "machine code", "time": "time"}


def register(app: typer.Typer) -> None:
    app.command("lineage")(lineage)
    app.command("diff")(diff)


def lineage(
    candidate: CandidateName,
    diff: Annotated[bool, typer.Option("--diff", help="Also what each change changed in the source.")] = False,
    descendants: Annotated[int, typer.Option(help="Show so many of them; 0 for none.", min=0, max=1_000_000)] = 20,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Show a candidate's ancestors and descendants: operator, change and gain of every step."""
    with Lineage(db) as known:
        record = named_candidate(known.store, candidate, db)
        found = known.family(record.id, descendants=descendants, diff=diff)
    if json:
        print_json([asdict(member) for member in found.members])
        return
    console = make_console()
    ancestors = sum(member.relation == "ancestor" for member in found.members)
    say(
        console,
        f"{record.kernel}, {record.workload} on {record.device}: {short_id(record.id)} with {_number(ancestors)}"
        f" ancestor{'' if ancestors == 1 else 's'} above it and {_descendants(found)} below",
    )
    table = make_table(
        "", "", "candidate", "operator and change", "parents", "median us", "speed-up", "gain", "interval",
        right=("", "median us", "speed-up", "gain"),
    )  # fmt: skip
    for member in found.members:
        style = "bold" if member.relation == "self" else "" if member.main_line else "dim"
        table.add_row(
            "*" if member.main_line else "",
            f"{member.generation:+d}" if member.generation else "",
            f"{short_id(member.id)} #{member.order}",
            cell(f"{member.operator}: {_change(member)}"),
            " ".join(f"#{p.order}" for p in member.parents) or "-",
            marked(figure(member.median_us), member.disturbed),
            marked(speedup(member.score), member.disturbed) if member.score else cell(member.status),
            _gain(member),
            interval(member.gain_low, member.gain_high),
            style=style,
        )
    print_table(console, table)
    _print_notes(console, found, record.id, db)
    if diff:
        _print_diffs(console, found)


def _number(count: int) -> str:
    return str(count) if count else "no"


def _descendants(found: Family) -> str:
    count = sum(member.relation == "descendant" for member in found.members)
    return f"the first {count} of its descendants" if found.cut else f"{_number(count)} descendant{'s' * (count != 1)}"


def _gain(member: Kin) -> str:
    if member.gain is None:
        return ""
    return "tie" if member.tie or member.gain == 1 else factor(member.gain)


def _change(member: Kin) -> str:
    return change_text(member.change) if member.parents else " ".join(f"{k}={v}" for k, v in member.parameters.items())


def _print_notes(console: Console, found: Family, candidate: str, db: str) -> None:
    console.print(
        "* the main line, first parents; second column: generations before or after. All figures are of the search's own"
        " timing; gain: over the first parent, with an interval put together from those of the two, and a tie where that"
        " holds 1",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    if found.cut:
        more = command_line(db, "lineage", short_id(candidate), "--descendants", "1000")
        console.print(f"there are more descendants:  {more}", style="dim", highlight=False, soft_wrap=True)
    if any(member.disturbed for member in found.members):
        console.print(DISTURBED_NOTE, style="bold red", highlight=False, soft_wrap=True)


def _print_diffs(console: Console, found: Family) -> None:
    for member in found.members:
        if not member.parents:
            continue
        console.print()
        console.print(Text(f"#{member.order} {short_id(member.id)}: {change_text(member.change)}", style="bold"))
        if member.diff is None:
            console.print("the source of one of the two was not kept", style="dim")
        elif not member.diff:
            console.print("the source is the same", style="dim")
        else:
            print_unified(console, member.diff)


def print_unified(console: Console, text: str) -> None:
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
    with Lineage(db) as known:
        first, second = (named_candidate(known.store, name, db) for name in (one, other))
        found = known.difference(first.id, second.id)
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
    console.print(_verdict(found), highlight=False, soft_wrap=True)
    for name, text in (("source", found.source), ("PTX", found.ptx)):
        if text is None and name == "source" and source:
            console.print("\nthe source of one of the two was not kept", style="dim")
        if text is None or (text and not source):
            continue
        console.print()
        console.print(f"the {name} is the same" if not text else f"{name}:", style="dim" if not text else "bold")
        if text:
            print_unified(console, text)


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
