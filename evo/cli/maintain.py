"""evo prune, vacuum, merge, backup: the maintenance of databases."""

import shlex
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from evo.cli.options import Db, Json, print_json
from evo.environment import DEFAULT_DB, command_line
from evo.errors import UsageError
from evo.lineage.database import back_up, locate, shown, translated
from evo.lineage.merge import merge as merge_store
from evo.lineage.prune import Part, chosen_runs
from evo.lineage.prune import prune as prune_runs
from evo.lineage.schema import OlderSchemaError
from evo.lineage.store import Store
from evo.report.terminal import say
from evo.report.text import counted, parse_duration


def prune(
    runs: Annotated[list[str] | None, typer.Argument(help="Names of runs, or unique beginnings of them.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Prune all runs last written to longer ago than this, e.g. 90d.")
    ] = None,
    drop: Annotated[
        list[Part] | None,
        typer.Option(
            help="Part to drop: failed (sources and machine code of candidates that did not pass; the default), sources,"
            " binaries, samples (single samples of search timings; a run that can be continued keeps them)."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be dropped.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Drop sources, machine code or samples of old runs. Winners, finalists and their ancestors keep theirs."""
    if not runs and older_than is None:
        raise UsageError(
            "name the runs to prune, or give --older-than, e.g."
            f" {command_line(db, 'prune', '--older-than', '90d', '--dry-run')}"
        )
    before = None
    if older_than is not None:
        before = datetime.now(UTC) - timedelta(seconds=parse_duration(older_than, "--older-than"))
    with Store.open(db, write=not dry_run, create=False) as store:
        names, busy = chosen_runs(store, runs or (), before)
        done = prune_runs(store, names, drop or [Part.FAILED], dry=dry_run)
    if json:
        print_json(done, dry_run=dry_run, skipped=busy)
        return
    for name in busy:
        say(f"left alone: {name} is being searched", err=True)
    went, gone = ("would go from", "would be freed") if dry_run else ("went from", "freed")
    say(
        f"{done.sources} sources, {done.binaries} binaries and the samples of {done.samples} timings {went}"
        f" {counted(len(names), 'run')}; {done.artefacts} stored files that nothing else needs, {decimal(done.bytes)} {gone}"
    )
    say(f"{done.kept} candidates keep everything: winners, finalists, leaders and all their ancestors")
    if done.bytes and not dry_run:
        say(f"the file becomes smaller with: {command_line(db, 'vacuum')}")


def vacuum(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Give back the room that pruning has freed; bring an older database up to date."""
    with Store.open(db, write=True, create=False) as store:
        before = store.size()
        store.vacuum()
        after = store.size()
    if json:
        print_json({"before": before, "after": after})
    else:
        say(f"{decimal(before)} before, {decimal(after)} now")


def merge(
    other: Annotated[str, typer.Argument(help="Database to take runs from: a file or a URL.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Add the runs of another database to this one, all or none. Merging again changes nothing."""
    one, this = (at.path.resolve() if at.path is not None else at.url for at in (locate(other), locate(db)))
    if one == this:
        raise UsageError(f"{shown(other)} is the database itself; name another one to merge into it")
    with Store.open(other, write=False) as source, Store.open(db, write=True) as target:
        done = merge_store(target, source)
    if json:
        print_json(done)
        return
    say(
        f"{counted(len(done.added), 'run')} added, {len(done.continued)} continued, {len(done.unchanged)} there already;"
        f" {counted(done.candidates, 'candidate')} copied"
    )
    for name, new in done.renamed.items():
        say(f"{name} is called {new} here: there is another run of its name")


def backup(
    out: Annotated[
        Path | None,
        typer.Option(help="File to make; if left out, one beside the database, named NAME.backup-TIME."),
    ] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Copy a SQLite database into one file, also while a search writes to it. The same is done before a migration."""
    location = locate(db)
    if location.path is None:
        raise UsageError(f"{location} is on a server; back it up with: pg_dump --file FILE {shlex.quote(shown(db))}")
    with suppress(OlderSchemaError):  # which needs no update to be copied
        Store.open(db, write=False).close()
    with translated(location):
        made = back_up(location.path, out)
    size = made.stat().st_size
    if json:
        print_json({"file": str(made), "bytes": size})
    else:
        say(f"{made}: {decimal(size)}")
