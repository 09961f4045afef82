"""evo search and evo resume."""

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from evo.analysis.finals import read_run_finals
from evo.analysis.runs import find_run
from evo.cli.jobs import read_jobs
from evo.cli.options import Db, Json, RunName, TargetName, print_json
from evo.environment import DEFAULT_DB, command_line
from evo.errors import EvoError, UsageError
from evo.job.job import OPTIONS, Job, make_job, read_budget, read_options, read_place
from evo.job.opening import check_early, configure, find_begun, open_again, open_search
from evo.job.values import check_seed, split_pairs
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.report.outcome import outcome_record, print_outcome
from evo.report.progress import check_log, follow
from evo.report.terminal import make_console, notice
from evo.search.place import Place
from evo.search.tasks import OpenRun

Devices = Annotated[
    str | None,
    typer.Option(help="GPUs that measure: all, or 0,1,3, else one; of a cluster, the name of a kind.", show_default=False),
]
On = Annotated[
    str | None,
    typer.Option(
        help="Where work runs: this machine, a Dask scheduler, or a Dask cluster that a file describes.",
        metavar="local|tcp://HOST:PORT|FILE.yaml",
        show_default=False,
    ),
]
Log = Annotated[Path | None, typer.Option(help="Append what happens to this file, as JSON lines.", metavar="FILE")]


def search(
    context: typer.Context,
    kernel: Annotated[str, typer.Argument(help="A kernel's name, its folder, or a job file (.toml).")],
    target: TargetName = None,
    arch: Annotated[str | None, typer.Option(help="Architecture, also an older one, e.g. sm_89; else the device's.")] = None,
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help="e.g. rows=4096,cols=8192,dtype=float16; repeat for more.")
    ] = None,
    cover: Annotated[
        list[str] | None,
        typer.Option(help="A grid that few variants are to serve: rows=1024/4096,cols=8192,dtype=float16; repeat for more."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time for search and finals: 60s, 10m, 2h. Finals that are disturbed take longer.")
    ] = None,
    evaluations: Annotated[int | None, typer.Option(help="Stop after so many candidates.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many candidates without a better one.")] = None,
    sampler: Annotated[str | None, typer.Option(help="evolution, tpe, random, or a file of one's own.")] = None,
    sampler_options: Annotated[
        list[str] | None, typer.Option("--sampler-option", help="An option of the sampler: NAME=VALUE; repeat for more.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, starts, --builders and measurements: same proposals.", callback=check_seed),
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Hold a parameter at one value: NAME=VALUE.")] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(help="Try this first: a run's winners, a candidate, an export, NAME=VALUE,...; repeat for more."),
    ] = None,
    cold: Annotated[
        bool | None, typer.Option("--cold", help="Begin from nothing, and not from what earlier runs found for the like.")
    ] = None,
    builders: Annotated[int | None, typer.Option(help="Compiling processes.", min=1)] = None,
    devices: Devices = None,
    on: On = None,
    finalists: Annotated[int | None, typer.Option(help="Candidates that are timed again, paired.", min=1)] = None,
    sanitize_finals: Annotated[
        bool | None, typer.Option("--sanitize-finals", help="Run all finalists under the memory checker, not only winners.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    log: Log = None,
    export: Annotated[Path | None, typer.Option(help="Export the winners to this folder as a module.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Search for faster variants of a kernel."""
    from_file = kernel.endswith(".toml")
    typed = {name: value for name, value in context.params.items() if name != "kernel" and value not in (None, ())}
    own: dict[str, Any] = {name: value for name, value in typed.items() if name in OPTIONS}
    if sampler_options:
        own["sampler_options"] = split_pairs(sampler_options, "--sampler-option")
    tables = read_jobs(Path(kernel)) if from_file else [{"kernel": kernel}]
    several = len(tables) > 1
    if several and (name or export):
        raise UsageError(f"--name and --export are for one search, and {kernel} holds {len(tables)}")
    jobs = list[tuple[dict[str, Any], Job]]()
    for table in tables:  # what the last one lacks is said before the first one takes its hours
        told = {key: value for key, value in table.items() if key != "kernel"}
        told |= own | {"sampler_options": told.get("sampler_options", {}) | own.get("sampler_options", {})}
        with _told_of(told.get("name"), kernel if from_file else ""):
            jobs.append((told, job := make_job(table["kernel"], told)))
            if several:
                check_early(job, db, taken=False)
                if not job.place.is_elsewhere:
                    configure(job, db, notice)
    if export is not None:
        _check_export(jobs[0][1].kernel, jobs[0][1].workloads, export)
    again = ("search", kernel, *words(context, typed)) if several else ()
    records, failed = search_each(jobs, db, kernel if from_file else "", again, named=not name, export=export, json=json)
    if json:
        print_json({"searches": records} if several or not records else records[0])
    if failed:
        raise typer.Exit(failed)


def search_each(
    jobs: Iterable[tuple[Mapping[str, Any], Job]],
    db: str,
    origin: str,
    again: Sequence[str],
    *,
    named: bool = True,
    export: Path | None = None,
    json: bool,
) -> tuple[list[dict[str, Any]], int]:
    """Carries out jobs, each behind the options that made it, and returns what was found and the exit code.

    origin: the job file, or another word for where they come from; empty for a single search that was typed. again: the
    words of the command that continues them all; without it a mistake of one is raised, with it the others have their
    turns. named: a job whose name the database has is continued, or left if it is finished.
    """
    records, failed = list[dict[str, Any]](), 0
    for told, job in jobs:
        with _told_of(job.name, origin):
            begun = find_begun(job, told, db, notice) if origin and named else None
        if begun is not None and begun.status is RunStatus.FINISHED:
            shown, longer = (command_line(db, verb, begun.name) for verb in ("show", "resume"))
            notice(f"run {begun.name} of {origin} is finished: {shown}; to search on: {longer} --budget ...")
            continue
        limit = job.budget if "budget" in told or "evaluations" in told else None
        opening = open_search(job, db, notice)
        if begun is not None:
            opening = open_again(begun.name, db, notice, budget=limit, place=job.place)
        try:
            with _told_of(job.name, origin), opening as opened:
                resuming = again or _resuming(opened, job.place, job.log)
                record = _carry_out(opened, db, job.log, export, resuming, resumed=begun is not None, json=json)
        except EvoError as error:
            if not again:
                raise
            notice(str(error))
            failed = failed or error.exit_code
            continue
        records.append(record)
        failed = failed or _exit_code(record)
    return records, failed


@contextmanager
def _told_of(name: str | None, path: str) -> Iterator[None]:
    """Mistakes are told with the job file, if there is one, and with the name of the search that has them."""
    try:
        yield
    except EvoError as error:
        if path:
            error.args = (f"{path}{f', search {name!r}' if name else ''}: {error}",)
        raise


def resume(
    run: RunName,
    budget: Annotated[str | None, typer.Option(help="A new budget of time for the run as a whole.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="A new number of candidates for the run as a whole.")] = None,
    devices: Devices = None,
    on: On = None,
    log: Log = None,
    export: Annotated[Path | None, typer.Option(help="Export the winners to this folder as a module.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Continue a search that was interrupted."""
    check_log(log)
    if export is not None:
        with Store.open(db, write=True, create=False) as store:  # which brings its tables up to date
            spec = store.run(run).spec
        _check_export(load_kernel(spec.kernel), spec.workloads, export)
    given = read_options({"budget": budget, "evaluations": evaluations, "devices": devices, "on": on})
    place = read_place(given)
    with open_again(run, db, notice, budget=read_budget(given), place=place) as opened:
        record = _carry_out(opened, db, log, export, _resuming(opened, place, log), resumed=True, json=json)
    if json:
        print_json(record)
    if code := _exit_code(record):
        raise typer.Exit(code)


def _resuming(opened: OpenRun, place: Place, log: Path | None) -> tuple[str, ...]:
    """The words of the command that continues a run there."""
    options = {"--devices": place.devices, "--on": place.on if place.is_elsewhere else None, "--log": log}
    return ("resume", opened.run.name, *(word for name, value in options.items() if value for word in (name, str(value))))


def _carry_out(
    opened: OpenRun, db: str, log: Path | None, export: Path | None, again: Sequence[str], *, resumed: bool, json: bool
) -> dict[str, Any]:
    """Searches, shows how it goes and what was found unless that is to be JSON, and exports the winners. Returns what was
    found. again: the words of the command that continues it."""
    store, run, kernel = opened.store, opened.run, opened.kernel
    console = make_console()
    console.quiet = json
    before = {"candidates": find_run(store, run.name).evaluations, "search_s": round(run.elapsed_s, 2)} if resumed else None
    outcome = follow(opened, console, resumed=resumed, log=log)
    if outcome is None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to close what is open
        notice(f"interrupted; everything finished is stored. Continue with: {command_line(db, *again)}")
        raise typer.Exit(130)
    found = read_run_finals(store, run.name, kernel.ceilings)
    started = float(psutil.Process().create_time())  # a user waits for the imports, too
    record = outcome_record(outcome, found, started, store, before)
    if not json:
        print_outcome(console, record, found, kernel, db)
    if export is not None and _has_winner(record):
        from evo.export._winners import export_run

        try:
            record["export"] = [str(p) for p in export_run(store, run.name, export, db, notice)]
        except EvoError as error:  # what was found is told nevertheless
            record |= {"export": [], "export_error": str(error)}
            notice(f"{error}; to export the winners later: {command_line(db, 'export', run.name, '--out', str(export))}")
    return record


def _check_export(kernel: Kernel, workloads: Sequence[Workload], out: Path) -> None:
    """Raises what `check_module` raises, before the budget is spent."""
    from evo.export.module import check_module  # other searches do not need it

    check_module(kernel, workloads, out)


def _exit_code(record: Mapping[str, Any]) -> int:
    """1 if there is no winner, or none could be exported."""
    return 0 if _has_winner(record) and "export_error" not in record else 1


def words(context: typer.Context, typed: Mapping[str, Any]) -> Iterator[str]:
    """Options as they were typed, but for the database."""
    for parameter in context.command.params:
        value: Any = typed.get(str(parameter.name))
        if value is True:
            yield parameter.opts[0]
        elif value and parameter.name != "db":
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from (parameter.opts[0], str(one))


def _has_winner(record: Mapping[str, Any]) -> bool:
    return any(workload["winner"] for workload in record["workloads"])
