"""evo export."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from evo.cli.export_run import export_all_candidates
from evo.cli.options import DEFAULT_DB, Db, Json, command_line, print_json
from evo.cli.recorded import named_candidate
from evo.errors import StoreError, UnknownNameError, UsageError
from evo.exporters import Advising, ExportItem, ExportRequest, RunExporter, find_exporter
from evo.genome import Genome
from evo.kernel import Workload
from evo.store import RunStatus, candidates, queries
from evo.store.records import CandidateRecord
from evo.store.store import Store

__all__ = ["export_run", "register"]


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    what: Annotated[list[str], typer.Argument(help="A run, or candidates.")],
    out: Annotated[Path, typer.Option(help="Folder to write; its name is the module's.")],
    format: Annotated[str, typer.Option(help="What to write.")] = "module",
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Export winners as something that PyTorch code imports."""
    exporter = find_exporter(format)
    chosen: list[CandidateRecord] = []
    with Store.open(db, write=False) as store:
        if isinstance(exporter, RunExporter):
            written = export_all_candidates(store, what, exporter, out)
        else:
            won = _winners(store, what[0], db) if len(what) == 1 else None
            chosen = won or [_candidate(store, name, db) for name in what]
            written = _export(store, chosen, format, out)
    if json:
        print_json([str(p) for p in written])
        return
    workloads = ", ".join(f"{c.workload.split(',dtype')[0]} {c.dtype}" for c in chosen) or f"run {what[0]}"
    typer.echo(f"{out}: {len(written)} files for {workloads}")
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
        raise UnknownNameError("run", run, [r.name for r in queries.runs(store)])
    return _export(store, found, format, out)


def _winners(store: Store, run: str, db: str) -> list[CandidateRecord] | None:
    """The winners that the run of that name has of its finals, at most one a workload; None if it is not a run's name.

    Raises StoreError if there is none, or if finals are still to be held.
    """
    try:
        summary = queries.run(store, run)
    except UnknownNameError:
        return None
    without = [i for i in summary.islands if i.winner is None]
    finished = summary.status == RunStatus.FINISHED.value
    if without and not finished:
        raise StoreError(
            f"run {summary.name!r} is {summary.status} and has not named its winners: let it end, or continue it with:"
            f" {command_line(db, 'resume', summary.name)}; a candidate can be exported by its own name"
        )
    if len(without) == len(summary.islands):
        raise StoreError(
            f"run {summary.name!r} has no winner: nothing passed its finals, so there is nothing to export; why, of each"
            f" candidate: {command_line(db, 'show', 'CANDIDATE')}"
        )
    for island in without:
        typer.echo(f"evo: nothing won for {island.workload}: it is left to PyTorch", err=True)
    return [candidates.candidate(store, i.winner) for i in summary.islands if i.winner is not None]


def _candidate(store: Store, name: str, db: str) -> CandidateRecord:
    record = named_candidate(store, name, db)
    if record.status not in ("ok", "same_code"):
        raise UsageError(f"candidate {record.id} did not pass ({record.status}: {record.log}); export one that did")
    return record


def _export(store: Store, chosen: list[CandidateRecord], format: str, out: Path) -> list[Path]:
    first = chosen[0]
    for record in chosen:
        if (record.kernel, record.target, record.arch) != (first.kernel, first.target, first.arch):
            raise UsageError(
                f"{record.id} is for {record.kernel} on {record.target} {record.arch}, {first.id} for {first.kernel} on"
                f" {first.target} {first.arch}: export them to folders of their own"
            )
    environment = next(r.environment for r in queries.runs(store) if r.name == first.run)
    items = tuple(
        ExportItem(
            workload=Workload.of(c.dims, c.dtype, c.options),
            genome=Genome.of(c.parameters, c.flags),
            candidate=c.id,
            record=_provenance(store, c),
        )
        for c in chosen
    )
    request = ExportRequest(
        kernel=first.kernel, target=first.target, arch=first.arch, items=items, out=out, environment=environment
    )
    return find_exporter(format).export(request)


def _provenance(store: Store, record: CandidateRecord) -> dict[str, object]:
    """What a manifest says of a winner."""
    latest = max((t.round for t in record.timings), default=0)
    stages = {t.stage for t in record.timings if t.round == latest}
    beside = [r for r in queries.final_races(store, record) if r.round == latest and r.beside]
    return {
        "run": record.run,
        "candidate": record.id,
        "order": record.order,
        "operator": record.operator,
        "device": record.device,
        "created": record.created,
        "source_digest": record.build.source_digest if record.build else None,
        "code_hash": record.build.code_hash if record.build else None,
        "winner": record.winner,
        "timed_in": "final" if "final" in stages else "search",
        "timings": [asdict(t) for t in record.timings if t.round == latest],
        "baselines": [asdict(t) for race in beside for t in race.timings],
        "checks": [asdict(c) for c in record.checks if c.round == latest],
        "lineage": [
            {"id": s.id, "order": s.order, "operator": s.operator, "change": s.change, "gain": s.gain}
            for s in candidates.ancestry(store, record.id)
        ],
    }
