"""evo prune, vacuum, merge, dump, load: looking after databases."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Annotated

import typer

from evo.cli.options import DEFAULT_DB, Db, Json, command_line, parse_duration, print_json
from evo.errors import StoreError, UsageError
from evo.lineage.database import check_file, locate, shown
from evo.lineage.dump import dump_store
from evo.lineage.load import load as load_dump
from evo.lineage.merge import Merged
from evo.lineage.merge import merge as merge_store
from evo.lineage.pruning import Part, chosen_runs
from evo.lineage.pruning import prune as prune_runs
from evo.lineage.salvage import Salvaged, is_whole, salvage
from evo.lineage.schema import OlderSchemaError
from evo.lineage.store import Store
from evo.lineage.upkeep import open_current
from evo.lineage.upkeep import vacuum as vacuum_store

__all__ = ["register"]

_GZIP_MAGIC = b"\x1f\x8b"
_LISTED = 5


def register(app: typer.Typer) -> None:
    for command in (prune, vacuum, merge, dump, load):
        app.command(command.__name__)(command)


def prune(
    runs: Annotated[list[str] | None, typer.Argument(help="These runs; each by its name or a beginning of it.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="All runs last written to longer ago than this, e.g. 90d.")
    ] = None,
    drop: Annotated[
        list[Part] | None,
        typer.Option(
            help="What goes: failed (sources and machine code of what did not pass; the default), sources, binaries,"
            " samples (single samples of search timings)."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
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
    _must_be_a_database(db)
    with Store.open(db, write=not dry_run) as store:
        names, busy = chosen_runs(store, runs or (), before)
        done = prune_runs(store, names, drop or [Part.FAILED], dry=dry_run)
    if json:
        print_json(asdict(done) | {"dry_run": dry_run, "skipped": busy})
        return
    for name in busy:
        typer.echo(f"left alone: {name} is being searched", err=True)
    went, gone = ("would go from", "would be freed") if dry_run else ("went from", "freed")
    typer.echo(
        f"{done.sources} sources, {done.binaries} binaries and the samples of {done.samples} timings {went}"
        f" {_number(len(names), 'run')}; {done.artefacts} stored files that nothing else needs, {_bytes(done.bytes)} {gone}"
    )
    typer.echo(f"{done.kept} candidates keep everything: winners, finalists, leaders and all their ancestors")
    if done.bytes and not dry_run:
        typer.echo(f"the file becomes smaller with: {command_line(db, 'vacuum')}")


def vacuum(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Give back the room that pruning has freed; bring an older database up to date."""
    _must_be_a_database(db)
    with Store.open(db, write=True) as store:
        done = vacuum_store(store)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(f"{_bytes(done.before)} before, {_bytes(done.after)} now")


def merge(
    other: Annotated[str, typer.Argument(help="The database to take runs from: a file or a URL.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Add the runs of another database to this one, all or none. Merging again changes nothing."""
    if _same_file(other, db):
        raise UsageError(f"{shown(other)} is the database itself; name another one to merge into it")
    with open_current(other) as source, Store.open(db, write=True) as target:
        done = merge_store(target, source)
    if json:
        print_json(asdict(done))
        return
    typer.echo(
        f"{_number(len(done.added), 'run')} added, {len(done.continued)} continued, {len(done.unchanged)} there already;"
        f" {_number(done.candidates, 'candidate')} copied"
    )
    _tell_renamed(done)
    _tell_left_aside(done)


def dump(
    out: Annotated[Path | None, typer.Option(help="The file to write; standard output if left out.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Save a whole database as one portable file; of a damaged one, what can still be read."""
    if out is None and sys.stdout.isatty():
        raise UsageError("a dump is no text for a terminal; write it to a file with --out FILE, or pipe it")
    if out is None and json:
        raise UsageError("--json goes to standard output, and so does the dump; give it a file with --out FILE")
    saved: Salvaged | None = None
    with _output(out) as file:
        path = locate(db).path
        if path is not None and path.is_file():
            check_file(path, write=False)
        if path is not None and path.is_file() and not is_whole(path):
            saved = salvage(path, file)
            written = saved.written
        else:
            with open_current(db) as store:
                written = dump_store(store, file)
    size = out.stat().st_size if out is not None else None
    if json:
        print_json({"rows": written, "bytes": size, "salvaged": None if saved is None else asdict(saved)})
    else:
        to = f" in {out} ({_bytes(size)})" if size is not None else ""
        typer.echo(
            f"{_number(written['run'], 'run')}, {_number(written['candidate'], 'candidate')}{to}", err=out is None
        )
    if saved is not None:
        typer.echo(f"evo: {shown(db)} is damaged: {_losses(saved)}; what could be read was saved", err=True)
        raise typer.Exit(1)


def _losses(saved: Salvaged) -> str:
    said = [f"{_number(n, 'stretch', 'stretches')} of {table!r} unreadable" for table, n in saved.gaps.items()]
    said += [f"nothing of {table!r} left" for table in saved.unread]
    said += [f"{_number(saved.spoilt, 'source or binary', 'sources or binaries')} spoilt"] if saved.spoilt else []
    return ", ".join(said) or "its tables could all be read, its indices are broken"


def load(
    file: Annotated[Path, typer.Argument(help="A dump; - for standard input.")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Add the runs of a dump to a database, all or none; it is made if it is not there."""
    if str(file) == "-":
        done = load_dump(sys.stdin.buffer, "standard input", db)
    else:
        try:
            opened = file.open("rb")
        except OSError as error:
            raise StoreError(f"cannot read {file}: {error.strerror or error}") from error
        with opened:
            done = load_dump(opened, str(file), db)
    merged = done.merged
    if json:
        print_json(asdict(done))
        return
    typer.echo(
        f"{_number(len(merged.added), 'run')} added, {len(merged.continued)} continued, {len(merged.unchanged)} there"
        f" already; {_number(merged.candidates, 'candidate')} loaded"
    )
    _tell_renamed(merged)
    _tell_left_aside(merged)
    if done.left_out:
        lost = ", ".join(f"{_number(n, 'row')} of {table!r}" for table, n in done.left_out.items())
        typer.echo(f"evo: left out, since they refer to what was lost: {lost}", err=True)
    if done.stand_ins:
        stood = ", ".join(f"{_number(n, 'row')} of {table!r}" for table, n in done.stand_ins.items())
        typer.echo(f"evo: made up for candidates that passed, in place of what was lost: {stood}", err=True)
    here = {name: losses for name, losses in done.losses.items() if name not in merged.unchanged}
    for name, losses in list(here.items())[:_LISTED]:
        typer.echo(f"evo: {(merged.renamed or {}).get(name, name)}: {losses}", err=True)
    if len(here) > _LISTED:
        typer.echo(f"evo: {len(here) - _LISTED} more runs have lost something; see: {command_line(db, 'runs')}", err=True)


def _tell_renamed(merged: Merged) -> None:
    renamed = list((merged.renamed or {}).items())
    for name, new in renamed[:_LISTED]:
        typer.echo(f"{name} is called {new} here: there is another run of its name")
    if len(renamed) > _LISTED:
        typer.echo(f"and so are {len(renamed) - _LISTED} more; --json lists them all")


def _tell_left_aside(merged: Merged) -> None:
    for name, aside in list((merged.left_aside or {}).items())[:_LISTED]:
        kept = "the copy that came is newer and was taken" if name in merged.continued else "the copy here was kept"
        typer.echo(f"evo: {name}: one of its two copies is salvaged; {kept}; left aside, of the other: {aside}", err=True)
    if (more := len(merged.left_aside or ()) - _LISTED) > 0:
        typer.echo(f"evo: of {more} more runs something was left aside; --json lists them all", err=True)


def _must_be_a_database(db: str) -> None:
    """Opened for writing, it would be made."""
    path = locate(db).path
    if path is not None and not path.exists():
        raise StoreError(f"there is no database {path}; name another with --db")
    with suppress(OlderSchemaError):
        Store.open(db, write=False).close()


def _same_file(one: str, other: str) -> bool:
    first, second = locate(one), locate(other)
    if first.path is None or second.path is None:
        return first.url == second.url
    return first.path.exists() and second.path.exists() and first.path.samefile(second.path)


@contextmanager
def _output(out: Path | None) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all is written, or standard output."""
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a file in it")
    if out.is_file() and out.stat().st_size:  # a slip of the keyboard must not cost a database
        with out.open("rb") as there:
            if there.read(2) != _GZIP_MAGIC:
                raise UsageError(f"{out} is there and is not a dump; name another file")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise UsageError(f"cannot write in the folder {out.parent}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).rename(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            Path(name).unlink()


def _number(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _bytes(n: int | None) -> str:
    value = float(n or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError
