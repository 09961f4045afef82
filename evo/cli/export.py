"""evo export: winners as files for other programs; evo import-workloads: job files from another program's dataset."""

import json as json_format
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.descent import read_family
from evo.analysis.runs import find_run, not_confirmed, ranked
from evo.cli.options import DEFAULT_DB, Db, Json, Trust, command_line, parse_duration, print_json
from evo.cli.recorded import find_named, read_winners, trusted, workload_of
from evo.cli.tables import say, short_workload
from evo.errors import StoreError, UsageError
from evo.evaluation import FINALIST, PASSED
from evo.export import MANIFEST, Exporter, ExportItem, ExportRequest, check_replaceable, find_exporter, publish
from evo.export._package import asked_of
from evo.export.flashinfer_bench import Refusal
from evo.export.flashinfer_bench import import_workloads as import_dataset
from evo.export.module import remarks as remarks_of
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.loading import kernel_names, load_kernel, recorded_kernel
from evo.report.text import short
from evo.targets import find_target

_SHOWN = 5
"""Lines or names; of more, how many there are."""


def export(
    what: Annotated[list[str], typer.Argument(help="Runs, or candidates.")],
    out: Annotated[Path, typer.Option(help="Folder to write; its name is the module's.")],
    format: Annotated[str, typer.Option(help="What to write.")] = "module",
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture to build for, any number of them; what was measured on if left out."),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Also a candidate that the finals refused.")] = False,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Export winners as something that PyTorch code imports."""
    exporter, replaced = find_exporter(format), (out / MANIFEST).is_file()
    check_replaceable(out, exporter.name)
    chosen: list[CandidateRecord] = []
    remarks: list[str] = []
    with Store.open(db, write=False) as store:
        if exporter.holds == "run":
            if arch:
                raise UsageError(f"--format {exporter.name} holds a run as it was: leave out --arch")
            written = export_all_candidates(store, what, exporter, out)
        else:
            for name in dict.fromkeys(what):
                chosen += _chosen(store, name, db, refused=refused)
            trusted(trust, *(c.kernel for c in chosen))
            for said in filter(None, [_unconfirmed(store, c, db) for c in chosen]):
                say(f"evo: {said}", err=True)
            written, remarks = export_winners(store, chosen, exporter, out, arch or ())
    shown = remarks if len(remarks) <= _SHOWN else remarks[: _SHOWN - 1]
    for remark in shown:
        say(f"evo: {remark}", err=True)
    if more := len(remarks) - len(shown):
        say(f"evo: {more} more of these: {out / MANIFEST} says what of each workload is built", err=True)
    if json:
        print_json([str(p) for p in written])
        return
    names = [short_workload(c.workload, c.kernel, c.kernel_digest) for c in chosen] or [f"run {what[0]}"]
    workloads = ", ".join(names) if len(names) <= _SHOWN else f"{len(names)} workloads"
    say(f"{out}: {len(written)} files for {workloads}{', in place of an earlier export' if replaced else ''}")
    for line in exporter.advice(out):
        say(line)


def export_all_candidates(store: Store, what: Sequence[str], exporter: Exporter, out: Path) -> list[Path]:
    """Exports a whole run in a format that holds one; the files written.

    Raises UsageError unless `what` is one run, and what the exporter raises."""
    if len(what) != 1:
        raise UsageError(f"{exporter.name} holds one run; name one, not {len(what)}, and export each to a folder of its own")
    run = store.run(find_run(store, what[0]).name)
    return publish(out, exporter.name, lambda: exporter.contents(run, store.evaluations(run)))


def export_run(store: Store, run: str, out: Path, db: str) -> list[Path]:
    """Exports the winners of a run as a module; the files written. Raises StoreError if it has none."""
    return export_winners(store, _chosen(store, run, db), find_exporter("module"), out)[0]


def _chosen(store: Store, name: str, db: str, *, refused: bool = False) -> list[CandidateRecord]:
    """The winners of the run, at most one for each workload, or the candidate of that name.

    refused: a candidate that the finals have refused is accepted, too. Raises StoreError for a run whose finals are not
    over; UsageError for one without a winner, and for a candidate that did not pass.
    """
    found = find_named(store, name)
    if isinstance(found, CandidateRecord):
        if found.status not in PASSED:
            raise UsageError(f"candidate {found.id} did not pass ({found.status}: {found.log}); export one that did")
        if found.refusal and not refused:
            raise UsageError(
                f"candidate {found.id} was refused by the finals of run {found.run} ({found.refusal}): its results may be"
                " wrong; export one that passed, or this one nevertheless with --refused"
            )
        return [found]
    without = [task.workload for task in found.tasks if task.winner is None]
    if without and found.status != RunStatus.FINISHED:
        raise StoreError(
            f"run {found.name!r} is {found.status} and has not named its winners: let it end, or continue it with:"
            f" {command_line(db, 'resume', found.name)}; a candidate can be exported by its own name"
        )
    winners = read_winners(store, found, db)
    for workload in without:
        say(f"evo: nothing won for {workload}: no variant of it is exported", err=True)
    return winners


def _unconfirmed(store: Store, record: CandidateRecord, db: str) -> str:
    """A sentence on a candidate that no final has confirmed or measured; empty for another winner, and for a finalist that
    lost to one."""
    name, run = short(record.id), find_run(store, record.run)
    if record.refusal:
        return f"{name}: the finals refused it ({record.refusal}); it is exported because --refused asks for it"
    winner = run.tasks[record.task].winner
    if record.winner and (why := not_confirmed(run.options, record.workload)):
        return f"{name}: {why}; its results may be wrong there"
    last = max((t.round for t in record.timings), default=0)
    if record.winner and any(t.disturbed for t in record.timings if t.round == last and t.protocol != "hot"):
        return (
            f"{name}: the machine was too busy to measure it, so that a short race decides wherever it is to serve; to time"
            f" it first, on a quiet machine: {command_line(db, 'resume', record.run)}"
        )
    if record.winner or (winner is not None and record.finals):
        return ""
    beside = f"; the winner of its workload is {short(winner)}" if winner is not None else ""
    return (
        f"{name}: the finals of run {record.run} have not confirmed it: its figures are the search's own, and its results"
        f" may be wrong for neighbouring sizes{beside}; to gate it on fresh data: {command_line(db, 'check', name)}"
    )


# -- what an exporter is given --------------------------------------------------------------------------------


def export_winners(
    store: Store, chosen: Sequence[CandidateRecord], exporter: Exporter, out: Path, archs: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """The files written, and a sentence for each thing that is missing in them or was replaced.

    archs: what to build for beside PTX; none: what each was measured on. Raises UsageError for candidates of several
    kernels that are not a forward and its backward, or of several targets or architectures where the format has no place
    for them; what the exporter raises.
    """
    _check_alike(chosen, several=exporter.holds == "several")
    runs = dict.fromkeys(c.run for c in chosen)
    parts = [_request(store, run, [c for c in chosen if c.run == run], out) for run in runs]
    if exporter.holds != "several":
        if archs:
            raise UsageError(f"--format {exporter.name} holds the code that was measured, and no other: leave out --arch")
        return exporter.export(replace(parts[0], items=tuple(item for part in parts for item in part.items))), []
    for arch in archs:
        if not any(asked_of(part.target, [arch]) for part in parts):
            raise UsageError(f"--arch {arch} is none of target {parts[0].target}, and nothing here is for another")
    built = [
        replace(part, builds=find_target(part.target).with_intermediate(asked_of(part.target, archs) or (part.arch,)))
        for part in parts
    ]
    return exporter.export(*built), remarks_of(out)


def _check_alike(chosen: Sequence[CandidateRecord], *, several: bool) -> None:
    first = chosen[0]
    for record in chosen:
        alike = several or (record.target, record.arch) == (first.target, first.arch)
        if record.kernel != first.kernel:
            one, other = (recorded_kernel(c.kernel, c.kernel_digest) for c in (first, record))
            alike = several and (one.backward_of == other.name or other.backward_of == one.name)
        if not alike:
            raise UsageError(
                f"{record.id} is for {record.kernel} on {record.target} {record.arch}, {first.id} for {first.kernel} on"
                f" {first.target} {first.arch}: export them to folders of their own"
            )


def _request(store: Store, run: str, chosen: Sequence[CandidateRecord], out: Path) -> ExportRequest:
    first = chosen[0]
    return ExportRequest(
        kernel=first.kernel,
        target=first.target,
        arch=first.arch,
        items=tuple(_item(c, _provenance(store, c), _Alternatives(store, c)) for c in chosen),
        out=out,
        environment=(about := find_run(store, run)).environment,
        few=bool(about.options.get("cover")),
    )


class _Alternatives:
    """The other candidates of a run for the same workload, the best first. Each is read when it is reached."""

    def __init__(self, store: Store, record: CandidateRecord) -> None:
        self._store, self._record = store, record

    def __iter__(self) -> Iterator[ExportItem]:
        record = self._record
        for name in ranked(self._store, record.run, record.task):
            if name != record.id:
                other = read_candidate(self._store, name)
                yield _item(other, _origin(other))


def _item(record: CandidateRecord, provenance: dict[str, object], alternatives: Iterable[ExportItem] = ()) -> ExportItem:
    return ExportItem(
        workload=workload_of(record, record.kernel_digest),
        genome=Genome.of(record.parameters),
        candidate=record.id,
        record=provenance,
        score=math.inf if record.score is None else record.score,
        alternatives=alternatives,
    )


def _origin(record: CandidateRecord) -> dict[str, object]:
    return {
        "run": record.run,
        "candidate": record.id,
        "order": record.order,
        "operator": record.operator,
        "device": record.device,
        "created": record.created,
        "source_digest": record.build.source_digest if record.build else None,
    }


def _provenance(store: Store, record: CandidateRecord) -> dict[str, object]:
    """The record of a winner in a manifest."""
    latest = max((t.round for t in record.timings), default=0)
    stages = {t.stage for t in record.timings if t.round == latest}
    beside = [r for r in record.final_races if r.round == latest and r.beside]
    return {
        **_origin(record),
        "code_hash": record.build.code_hash if record.build else None,
        "winner": record.winner,
        **({"refused": record.refusal} if record.refusal else {}),
        "timed_in": "final" if "final" in stages else "search",
        "timings": [asdict(t) for t in record.timings if t.round == latest and t.contender != FINALIST],
        "baselines": [asdict(t) for race in beside for t in race.timings],
        "checks": [asdict(c) for c in record.checks if c.round == latest],
        "lineage": [
            {"id": s.id, "order": s.order, "operator": s.operator, "change": s.change, "gain": s.gain}
            for s in read_family(store, record.id, descendants=0).members
        ],
    }


# -- job files from a dataset ---------------------------------------------------------------------------------


def import_workloads(
    path: Annotated[Path, typer.Argument(help="A FlashInfer-Bench dataset: definitions/ and workloads/ below it.")],
    kernel: Annotated[list[str] | None, typer.Option(help="Only for these kernels.")] = None,
    target: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the job files.")] = Path("runs"),
    budget: Annotated[str, typer.Option(help="Of each search.")] = "10m",
    json: Json = False,
) -> None:
    """Write a job file for each kernel that computes something of a FlashInfer-Bench dataset."""
    find_target(target)  # raises for an unknown one
    parse_duration(budget)
    kernels = [load_kernel(name) for name in dict.fromkeys(kernel or kernel_names())]
    taken, refused = import_dataset(path, kernels, target)
    if not taken:
        why = "; ".join(map(_refusal_text, refused)) or "it is empty"
        raise UsageError(
            f"nothing in {path} can be searched for here: {why}; evo needs definitions of"
            f" {' or '.join(k.name for k in kernels)} that {target} serves"
        )
    written = {}
    for key in dict.fromkeys(t.kernel for t in taken):
        workloads = dict.fromkeys(w for t in taken if t.kernel == key for w in t.workloads)
        file = out / f"{path.resolve().name}-{key}.toml"
        _write_job(file, {"kernel": key, "target": target, "workloads": list(workloads), "budget": budget}, path)
        written[str(file)] = list(workloads)
    if json:
        print_json({"jobs": written, "taken": taken, "refused": refused})
        return
    for refusal in refused:
        say(f"left out: {_refusal_text(refusal)}", err=True)
    for file_name, keys in written.items():
        say(f"{file_name}: {len(keys)} workloads; search them with:  evo search {file_name}")


def _refusal_text(refusal: Refusal) -> str:
    return f"{refusal.definition}{f', workload {refusal.workload}' if refusal.workload else ''}: {refusal.reason}"


def _write_job(file: Path, job: dict[str, object], source: Path) -> None:
    """Raises UsageError if the file is there, or cannot be written."""
    lines = [f"{key} = {json_format.dumps(value)}" for key, value in job.items()]  # a JSON text is one in TOML, too
    text = "\n".join([f"# Workloads of FlashInfer-Bench definitions in {str(source)!r}.", "[search]", *lines, ""])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; move it away, or choose another --out") from None
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --out") from error
