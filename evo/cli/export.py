"""evo export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evo.analysis.best import find_best
from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import find_run, list_runs
from evo.cli.export_run import export_all_candidates
from evo.cli.export_winners import export_winners
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, print_json
from evo.cli.recorded import named_candidate, unknown
from evo.cli.tables import short_id
from evo.errors import StoreError, UnknownNameError, UsageError
from evo.export import Advising, Combining, RunExporter, find_exporter
from evo.lineage import RunStatus, Stage
from evo.lineage.store import Store

__all__ = ["export_run", "register"]


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    what: Annotated[list[str], typer.Argument(help="Runs, or candidates.")],
    out: Annotated[Path, typer.Option(help="Folder to write; its name is the module's.")],
    format: Annotated[str, typer.Option(help="What to write.")] = "module",
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture to build for, any number of them; what was measured on if left out."),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Also a candidate that the finals refused.")] = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Export winners as something that PyTorch code imports."""
    exporter = find_exporter(format)
    chosen: list[CandidateRecord] = []
    remarks: list[str] = []
    with Store.open(db, write=False) as store:
        if isinstance(exporter, RunExporter):
            if arch:
                raise UsageError(f"--format {exporter.name} holds a run as it was: leave out --arch")
            written = export_all_candidates(store, what, exporter, out)
        else:
            for name in dict.fromkeys(what):
                chosen += _winners(store, name, db) or [_candidate(store, name, db, refused=refused)]
            unconfirmed = [said for c in chosen if (said := _unconfirmed(store, c, db))]
            written, remarks = export_winners(store, chosen, exporter, out, arch or ())
            remarks = unconfirmed + remarks
    for remark in remarks:
        typer.echo(f"evo: {remark}", err=True)
    if json:
        print_json([str(p) for p in written])
        return
    workloads = ", ".join(f"{c.workload.split(',dtype')[0]} {c.dtype}" for c in chosen) or f"run {what[0]}"
    typer.echo(f"{out}: {len(written)} files for {workloads}")
    if isinstance(exporter, Combining):
        typer.echo(f"built for {'; '.join(exporter.summary(out))}")
    if isinstance(exporter, Advising):
        typer.echo(exporter.advice(out))
        return
    run = f"python -m {out.name}"
    typer.echo(f"try it:  {run} check   and   {run} bench   in {out.resolve().parent}")
    if (out / "frontend.cpp").is_file():
        typer.echo(f"build its native launcher, once a machine, which makes calls cheaper:  {run} build")


def export_run(store: Store, run: str, format: str, out: Path, db: str) -> list[Path]:
    """Exports the winners of a run; the files written. Raises StoreError if it has none."""
    found = _winners(store, run, db)
    if found is None:
        raise UnknownNameError("run", run, [r.name for r in list_runs(store)])
    return export_winners(store, found, find_exporter(format), out)[0]


def _winners(store: Store, run: str, db: str) -> list[CandidateRecord] | None:
    """The winners that the run of that name has of its finals, at most one a workload; None if it is not a run's name.

    Raises StoreError if there is none, or if finals are still to be held.
    """
    try:
        summary = find_run(store, run)
    except UnknownNameError:
        return None
    without = [i for i in summary.tasks if i.winner is None]
    finished = summary.status == RunStatus.FINISHED.value
    if without and not finished:
        raise StoreError(
            f"run {summary.name!r} is {summary.status} and has not named its winners: let it end, or continue it with:"
            f" {command_line(db, 'resume', summary.name)}; a candidate can be exported by its own name"
        )
    if len(without) == len(summary.tasks):
        raise StoreError(
            f"run {summary.name!r} has no winner: nothing passed its finals, so there is nothing to export; why, of each"
            f" candidate: {command_line(db, 'show', 'CANDIDATE')}"
        )
    for task in without:
        typer.echo(f"evo: nothing won for {task.workload}: it is left to PyTorch", err=True)
    return [read_candidate(store, i.winner) for i in summary.tasks if i.winner is not None]


def _candidate(store: Store, name: str, db: str, *, refused: bool) -> CandidateRecord:
    """refused: also one that the finals have refused."""
    try:
        record = named_candidate(store, name, db)
    except UnknownNameError:
        raise unknown(store, name) from None
    if record.status not in ("ok", "same_code"):
        raise UsageError(f"candidate {record.id} did not pass ({record.status}: {record.log}); export one that did")
    if record.refusal and not refused:
        raise UsageError(
            f"candidate {record.id} was refused by the finals of run {record.run} ({record.refusal}): its results may be"
            " wrong; export one that passed, or this one nevertheless with --refused"
        )
    return record


def _unconfirmed(store: Store, record: CandidateRecord, db: str) -> str:
    """What the finals have not said for a candidate, a sentence; empty for a winner, and for a finalist beside one."""
    name = short_id(record.id)
    if record.refusal:
        return f"{name}: the finals refused it ({record.refusal}); it is exported because --refused asks for it"
    if record.winner:
        return ""
    winner = find_run(store, record.run).tasks[record.task].winner
    finalist = bool(record.finals) or any(t.stage == Stage.FINAL for t in record.timings)
    if winner is not None and finalist:
        return ""
    own = "its figures are the search's own, and its results were not checked for neighbouring sizes"
    if finalist:
        own = "it passed the gate of the finals and their race, and nothing has confirmed its time"
    if winner is not None:
        return f"{name}: no final has looked at it: {own}; the winner of its workload is {short_id(winner)}"
    some = find_best(store, run=record.run, workload=record.workload)
    found = next((b for b in some if b.workload == record.workload), None)
    check = command_line(db, "check", name)
    if found is None or not found.unconfirmed:
        state = f"no finals of run {record.run} have been held for its workload"
        if finalist or (found is not None and found.refused_finalists):
            state = f"the finals of run {record.run} are not over for its workload"
        return f"{name}: {state}: {own}; to hold them: {command_line(db, 'resume', record.run)}"
    refused = f"{found.refused_finalists} finalist{'' if found.refused_finalists == 1 else 's'}"
    return (
        f"{name}: unconfirmed: the finals of run {record.run} have no winner for its workload and refused {refused}: {own};"
        f" to gate it on fresh data: {check}"
    )
