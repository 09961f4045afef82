"""evo export: winners as files for other programs; evo import-workloads: job files from another program's dataset."""

import json as json_format
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from evo.analysis.candidates import CandidateRecord
from evo.analysis.runs import find_run, not_confirmed
from evo.cli.options import Db, Json, Trust, print_json
from evo.cli.recorded import trusted
from evo.environment import DEFAULT_DB, command_line
from evo.errors import UsageError
from evo.export import MANIFEST, Exporter, ExportRequest, check_replaceable, find_exporter
from evo.export._earlier import beside, folder_of, requests_from
from evo.export._tuned import write_tuned
from evo.export._winners import choose_winners, export_all_candidates, export_winners, requests_of
from evo.export.flashinfer_bench import Refusal
from evo.export.flashinfer_bench import import_workloads as import_dataset
from evo.lineage.store import Store
from evo.problem.loading import find_kernel, kernel_names, load_kernel
from evo.report.terminal import notice, say, short_workload
from evo.report.text import parse_duration, short
from evo.targets import find_target

SHOWN = 5
"""Largest number of lines or names that are printed; of more, the number is."""


def export(
    what: Annotated[list[str], typer.Argument(help="Runs, candidates, or earlier exports to add to.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; its name is the module's.")] = None,
    format: Annotated[str, typer.Option(help="Format of the export.")] = "module",
    tuned: Annotated[
        Path | None, typer.Option(help="Add the results to this NAME.tuned.toml, for a repository; `evo rebuild` reads it.")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture to build for; the measured one if left out; repeat for more."),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Export a candidate although the finals refused it.")] = False,
    trust: Trust = False,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Export winners as something that PyTorch code imports."""
    if out is None and (tuned is None or arch or format != "module"):
        raise UsageError("--out is missing: name the folder to write" + ("" if tuned else ", or with --tuned a file"))
    exporter = find_exporter(format)
    replaced = out is not None and (out / MANIFEST).is_file()
    if out is not None:
        check_replaceable(out, exporter.name)
    chosen: list[CandidateRecord] = []
    remarks, written = list[str](), list[Path]()
    packages = {name: folder for name in what if (folder := folder_of(name)) is not None}
    needed = Store.open(db, write=False) if packages.keys() < {*what} or exporter.holds == "run" else nullcontext()
    with needed as store:
        if store is not None and exporter.holds == "run" and out is not None:
            if arch or tuned:
                left = "--arch" if arch else "--tuned"
                raise UsageError(f"--format {exporter.name} holds a run as it was: leave out {left}")
            written = export_all_candidates(store, what, exporter, out)
            names = [f"run {what[0]}"]
        else:
            for name in dict.fromkeys(what):
                if store is not None and name not in packages:
                    chosen += choose_winners(store, name, db, notice, refused=refused)
            trusted(trust, *(c.kernel for c in chosen))
            parts = list[ExportRequest]()
            if store is not None:
                for said in filter(None, [_unconfirmed(store, c, db) for c in chosen]):
                    notice(said)
                parts = requests_of(store, chosen, out or Path())
            parts = beside(parts, [r for folder in packages.values() for r in requests_from(folder, out or Path(), parts)])
            if out is not None:
                written, remarks = export_winners(parts, exporter, arch or ())
            if tuned is not None:
                write_tuned(tuned, parts)
            names = [short_workload(c.workload, c.kernel, c.kernel_digest) for c in chosen] or [*packages]
    workloads = ", ".join(names) if len(names) <= SHOWN else f"{len(names)} workloads"
    if json:
        print_json([str(p) for p in (*written, *([tuned] if tuned else []))])
    elif tuned is not None:
        say(f"{tuned}: {workloads}; the package is made from it with:  {shlex.join(['evo', 'rebuild', str(tuned)])}")
        folders = {find_kernel(part.kernel) for part in parts}
        if links := sorted({os.path.relpath(p.resolve()) for folder in folders for p in folder.iterdir() if p.is_symlink()}):
            say(f"commit {', '.join(links)} with it: the kernel's folder links to that")
    if out is not None:
        tell_written(exporter, out, written, remarks, workloads, replaced, json)


def tell_written(
    exporter: Exporter, out: Path, written: Sequence[Path], remarks: Sequence[str], of: str, replaced: bool, json: bool
) -> None:
    """Says what an export has written, and with `json` only what is missing in it. of: for what, in words."""
    shown = remarks if len(remarks) <= SHOWN else remarks[: SHOWN - 1]
    for remark in shown:
        notice(remark)
    if more := len(remarks) - len(shown):
        notice(f"{more} more of these: {out / MANIFEST} says what of each workload is built")
    if json:
        return
    say(f"{out}: {len(written)} files for {of}{', in place of an earlier export' if replaced else ''}")
    for line in exporter.advice(out):
        say(line)


def _unconfirmed(store: Store, record: CandidateRecord, db: str) -> str:
    """A warning of a candidate that no final has confirmed or measured; empty for a confirmed winner, and for a finalist
    that lost to it."""
    name, run = short(record.id), find_run(store, record.run)
    if record.refusal:
        return f"{name}: the finals refused it ({record.refusal}); it is exported because --refused asks for it"
    winner = run.tasks[record.task].winner
    if record.winner and (why := not_confirmed(run.options, record.workload)):
        return f"{name}: {why}; its results may be wrong there"
    last = max((t.round for t in record.timings), default=0)
    if record.winner and any(t.disturbed for t in record.timings if t.round == last and t.protocol != "hot"):
        return (
            f"{name}: the machine was too busy to measure it, so each program that uses the export first times it against"
            f" PyTorch and takes the faster; to measure it now, on a quiet machine: {command_line(db, 'resume', record.run)}"
        )
    if record.winner or (winner is not None and record.finals):
        return ""
    beside = f"; the winner of its workload is {short(winner)}" if winner is not None else ""
    return (
        f"{name}: the finals of run {record.run} have not confirmed it: its figures are the search's own, and its results"
        f" may be wrong for neighbouring sizes{beside}; to gate it on fresh data: {command_line(db, 'check', name)}"
    )


# -- job files from a dataset ---------------------------------------------------------------------------------


def import_workloads(
    path: Annotated[Path, typer.Argument(help="A FlashInfer-Bench dataset: a folder with definitions/ and workloads/.")],
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeat for more.")] = None,
    target: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the job files.")] = Path("runs"),
    budget: Annotated[str, typer.Option(help="Budget of each search.")] = "10m",
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
    """Writes a job file. Raises UsageError if it exists or cannot be written."""
    lines = [f"{key} = {json_format.dumps(value)}" for key, value in job.items()]  # JSON texts and lists are TOML, too
    text = "\n".join([f"# Workloads of FlashInfer-Bench definitions in {str(source)!r}.", "[search]", *lines, ""])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; move it away, or choose another --out") from None
    except OSError as error:
        raise UsageError(f"cannot write {file} ({error.strerror}); choose another --out") from error
