"""evo search, evo resume, which `evo.api` shares; and what other commands that build and run candidates begin with."""

import math
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from evo.analysis.finals import read_run_finals
from evo.analysis.runs import find_alike, find_best, find_nearly_as_fast, find_run
from evo.cli.jobs import parse_jobs
from evo.cli.options import (
    DEFAULT_DB,
    Db,
    Json,
    RunName,
    TargetName,
    cache_dir,
    check_seed,
    command_line,
    draw_seed,
    handling,
    make_console,
    parse_duration,
    parse_point,
    parse_sampler_options,
    parse_values,
    print_json,
)
from evo.cli.recorded import find_winners, is_of
from evo.cli.screen import ENDING, JsonLog, LiveScreen, PlainLines, outcome_record, print_outcome
from evo.cli.tables import Terminal, brief_workload, say
from evo.errors import DeviceError, EvoError, StoreError, UnknownNameError, UsageError
from evo.executors import AskedTarget, Executor, find_executor
from evo.export import MANIFEST, check_replaceable, read_manifest
from evo.lineage import RunSpec, RunStatus, StoredRun
from evo.lineage.database import EmptyError, check_folder
from evo.lineage.schema import OlderSchemaError
from evo.lineage.store import Store
from evo.lineage.write import check_run_name
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import find_kernel, load_kernel
from evo.problem.space import Space
from evo.report.text import counted, duration, lacks
from evo.search.loop import Budget, Progress, Search, StopReason
from evo.search.run import (
    Outcome,
    check_default,
    check_workloads,
    choose_devices,
    describe_environment,
    execute,
    open_executor,
    plan_run,
)
from evo.search.samplers import find_sampler
from evo.targets import answers, find_target, targets_by_rank

_DEFAULT_BUDGET = "60s"
_MOST_STARTS = 8
"""Of what earlier runs found: a worthless one costs an evaluation for each workload. Ten emulated searches of two spaces
were 3% better at 100 to 200 candidates with eight that differ than with the fastest alone."""
Devices = Annotated[
    str | None,
    typer.Option(help="GPUs that measure: all, or 0,1,3, else one; of a cluster, the name of a kind.", show_default=False),
]
ExecutorName = Annotated[str | None, typer.Option("--executor", help="Where work runs: local, or dask.", show_default=False)]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler whose workers build and measure.", metavar="tcp://HOST:PORT")
]
Cluster = Annotated[Path | None, typer.Option(help="A file that describes a Dask cluster to start.", metavar="FILE.yaml")]
Log = Annotated[Path | None, typer.Option(help="Append what happens to this file, as JSON lines.", metavar="FILE")]
_LOOPBACK = re.compile(r"tcp://(localhost|127\.|\[::1\])")


def load_context(
    kernel: str, target: str | None, arch: str | None, elsewhere: Executor | None = None
) -> tuple[Kernel, str, str]:
    """The kernel; the target and architecture named, else the best target present and the device's own architecture.
    elsewhere: whose target and device these are, if not this machine's.

    Raises UsageError for an unknown name, and for a kernel that has no template for the target; DeviceError if nothing
    was named and nothing is present.
    """
    problem = load_kernel(kernel)
    devices = [name for name in targets_by_rank() if not find_target(name).shares_cores]
    if target is None and arch and (owners := [name for name in devices if find_target(name).owns(arch)]):
        target = owners[0]
    elif target is None and len(problem.dtypes) == 1:  # whether such a device is present or not
        (target,) = problem.dtypes
    asked = elsewhere.target if elsewhere else find_target(target or _best_present())
    problem.check_target(asked.name)
    arch = arch or asked.device().arch
    asked.limits(arch)  # raises where it is not known
    return problem, asked.name, arch


def _best_present() -> str:
    """cuda where a GPU answers, else cpu."""
    for candidate in targets_by_rank():
        if answers(candidate):
            return candidate
    raise DeviceError("neither a CUDA GPU nor a C++ compiler answers here; see: evo doctor")


def open_workers(target: str, db: str, job: Mapping[str, Any] | None = None) -> AbstractContextManager[Executor]:
    """Worker processes, with their cache where `cache_dir` says. job: where they are, by the parameters' names."""
    job = job or {}
    scheduler, cluster = job.get("scheduler"), job.get("cluster")
    name = job.get("executor") or ("dask" if scheduler or cluster else "local")
    find_executor(name)
    if scheduler and cluster:
        raise UsageError("--scheduler names a cluster that runs, and --cluster starts one: give one of them")
    if (name == "local") == bool(scheduler or cluster):
        raise UsageError(f"--executor {name} {'takes no' if name == 'local' else 'needs'} --scheduler or --cluster")
    kind = job.get("devices")
    if name != "local" and kind is not None and re.fullmatch(r"all|[\d,]*", kind):
        raise UsageError(f"--devices {kind}: of a cluster it names the kind of device that measures, e.g. 'NVIDIA L4'")
    if name != "local" and job.get("builders") is not None:
        raise UsageError("--builders is of this machine; workers of a cluster are started with their own")
    if scheduler and scheduler.startswith("tcp://") and not _LOOPBACK.match(scheduler):
        say(
            f"evo: the scheduler at {scheduler} is used without TLS: whoever reaches it or its workers can run code there,"
            " and read what is sent (docs/scaling.md)",
            err=True,
        )
    if cluster or scheduler:
        say(f"evo: the search begins when workers with a device have come to {cluster or scheduler}", err=True)
    return open_executor(
        target, cache_dir(db), job.get("builders"), job.get("devices"), name=name, scheduler=str(cluster or scheduler or "")
    )


def _is_elsewhere(job: Mapping[str, Any]) -> bool:
    return job.get("executor") not in (None, "local") or bool(job.get("scheduler") or job.get("cluster"))


@contextmanager
def open_elsewhere(job: Mapping[str, Any], db: str) -> Iterator[Executor | None]:
    """The workers of a cluster, which is asked what its devices are; None where the search is on this machine."""
    if not _is_elsewhere(job):
        yield None
        return
    dtypes = load_kernel(job["kernel"]).dtypes
    with open_workers(job.get("target") or next(n for n in targets_by_rank() if n in dtypes), db, job) as executor:
        yield executor


def search(
    context: typer.Context,
    kernel: Annotated[str, typer.Argument(help="A kernel's name, its folder, or a job file (.toml).")],
    target: TargetName = None,
    arch: Annotated[str | None, typer.Option(help="Architecture, e.g. sm_89; the device's own if left out.")] = None,
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
    sampler: Annotated[str | None, typer.Option(help="evolution, tpe or random.")] = None,
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
    executor: ExecutorName = None,
    scheduler: Scheduler = None,
    cluster: Cluster = None,
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
    jobs: list[dict[str, Any]] = parse_jobs(context, Path(kernel)) if from_file else [{"kernel": kernel}]
    typed = {name: value for name, value in context.params.items() if name != "kernel" and value not in (None, ())}
    if len(jobs) > 1 and (name or export):
        raise UsageError(f"--name and --export are for one search, and {kernel} holds {len(jobs)}")
    for job in jobs:
        options = [*(job.get("sampler_options") or ()), *(sampler_options or ())]
        job |= typed | {"sampler_options": parse_sampler_options(options)}
    if export is not None:
        check_replaceable(export, "module")  # before the budget is spent
    for path in {Path(job["log"]) for job in jobs if job.get("log")}:
        check_log(path)
    if len(jobs) > 1:
        for job in jobs:  # what the last one lacks is said before the first one takes its hours
            with _told_of(job, kernel):
                refuse_early(job, db, taken=False)
                if not _is_elsewhere(job):
                    configure(job, db)
    records, failed = list[dict[str, Any]](), 0
    for job in jobs:
        with _told_of(job, kernel):
            begun = _begun(job, db) if from_file and not name else None
        if begun is not None and begun.status is RunStatus.FINISHED:
            shown, longer = (command_line(db, verb, begun.name) for verb in ("show", "resume"))
            finished = f"run {begun.name} of {kernel} is finished: {shown}"
            say(f"evo: {finished}; to search on: {longer} --budget ...", err=True)
            continue
        limits = job.get("budget"), job.get("evaluations")
        opened = open_again(begun.name, db, *limits, job) if begun else open_search(job, db)
        again = ("search", kernel, *_words(context, typed)) if len(jobs) > 1 else None
        try:
            with _told_of(job, kernel if from_file else ""), opened as (store, run, workers):
                record = _carry_out(store, run, workers, job, json=json, export=export, db=db, begun=begun, again=again)
        except EvoError as error:
            if len(jobs) == 1:
                raise
            say(f"evo: {error}", err=True)  # the others have their turns
            failed = failed or error.exit_code
            continue
        records.append(record)
        failed = failed or (0 if _has_winner(record) else 1)
    if json:
        print_json(records[0] if len(jobs) == 1 and records else {"searches": records})
    if failed:
        raise typer.Exit(failed)


@contextmanager
def _told_of(job: Mapping[str, Any], path: str) -> Iterator[None]:
    """Mistakes are told with the job file, if there is one, and with which of its searches they are of."""
    try:
        yield
    except EvoError as error:
        if path:
            error.args = (f"{path}{', search ' + repr(job['name']) if job.get('name') else ''}: {error}",)
        raise


def _begun(job: Mapping[str, Any], db: str) -> StoredRun | None:
    """The run of the job's name, if the database has one. Raises UsageError if that searches for something else."""
    found, name = None, job.get("name")
    with _recorded_in(db) as store, suppress(UnknownNameError):
        found = store.run(name) if store is not None and name is not None else None
    if found is None or found.name != name:
        return None
    problem = load_kernel(job["kernel"])
    asked = [problem.workload(found.spec.target, text) for text in job.get("workloads") or ()]
    if problem.folder != find_kernel(found.spec.kernel) or (asked and asked != list(found.spec.workloads)):
        raise UsageError("the database has a run of that name that searches for something else; give this one another name")
    return found


def refuse_early(job: Mapping[str, Any], db: str, *, taken: bool = True) -> None:
    """Raises UsageError for what can be seen to be wrong without a kernel, a device or a compiler. taken: also for a name
    that a run of the database has."""
    if (name := job.get("name")) is not None:
        check_run_name(name)
    budget_of(job)
    find_sampler(sampler_of(job))
    Store.check_writable(db, name if taken else None)
    check_folder(cache_dir(db), "EVO_CACHE")


def check_log(path: Path | None) -> None:
    """Raises UsageError for a --log that cannot be written."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise UsageError(f"--log {path} cannot be written: {error.strerror}") from error


@contextmanager
def open_search(job: Mapping[str, Any], db: str) -> Iterator[tuple[Store, StoredRun, Executor]]:
    """A new run that is ready to be carried out, with its workers. Raises what `refuse_early`, `configure` and
    `check_default` raise."""
    refuse_early(job, db)
    with ExitStack() as opened:
        elsewhere = opened.enter_context(open_elsewhere(job, db))
        spec = configure(job, db, elsewhere)
        workers = elsewhere or opened.enter_context(open_workers(spec.target, db, job))
        store = opened.enter_context(Store.open(db, write=True))
        check_default(workers, spec)
        yield store, store.create_run(spec, describe_environment(workers.target)), workers


@contextmanager
def open_again(
    run: str, db: str, budget: str | None, evaluations: int | None, job: Mapping[str, Any]
) -> Iterator[tuple[Store, StoredRun, Executor]]:
    """A run that is to be continued, with workers. job: where they are. Raises what `prolong` raises."""
    with ExitStack() as opened:
        store = opened.enter_context(Store.open(db, write=True))
        spec = store.run(run).spec
        elsewhere = opened.enter_context(open_elsewhere({"kernel": spec.kernel, "target": spec.target, **job}, db))
        stored = prolong(store, run, budget, evaluations, elsewhere.target if elsewhere else find_target(spec.target))
        yield store, stored, elsewhere or opened.enter_context(open_workers(spec.target, db, job))


def resume(
    run: RunName,
    budget: Annotated[str | None, typer.Option(help="A new budget of time for the run as a whole.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="A new number of candidates for the run as a whole.")] = None,
    devices: Devices = None,
    executor: ExecutorName = None,
    scheduler: Scheduler = None,
    cluster: Cluster = None,
    log: Log = None,
    export: Annotated[Path | None, typer.Option(help="Export the winners to this folder as a module.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Continue a search that was interrupted."""
    if export is not None:
        check_replaceable(export, "module")  # before the budget is spent
    check_log(log)
    place = {"devices": devices, "executor": executor, "scheduler": scheduler, "cluster": cluster, "log": log}
    with open_again(run, db, budget, evaluations, place) as (store, stored, workers):
        record = _carry_out(store, stored, workers, place, json=json, export=export, db=db, begun=stored)
    if json:
        print_json(record)
    if not _has_winner(record):
        raise typer.Exit(1)


def prolong(
    store: Store, run: str, budget: str | None, evaluations: int | None, target: AskedTarget
) -> StoredRun:
    """The run of that name as it is to be continued, with the new budget if one is given, for the run as a whole. Without
    one, a finished run is continued where the machine was too busy to measure a winner: the finals are held again.

    target: where it is to be. Raises UsageError for a budget that is used up, StoreError for a run that is finished or was
    measured elsewhere.
    """
    stored = store.run(run)
    seconds, limit, had = parse_duration(budget) if budget is not None else None, None, Budget(**stored.spec.budget)
    if seconds is not None or evaluations is not None:
        limit = Budget(seconds=seconds, evaluations=evaluations)
    if stored.status is not RunStatus.FINISHED and (seconds, evaluations) == (had.seconds, had.evaluations):
        limit = seconds = None  # the same command again
    elif limit is None and stored.status is RunStatus.FINISHED and not any(b.disturbed for b in find_best(store, run=run)):
        raise StoreError(
            f"run {stored.name!r} is finished ({stored.stop_reason}); to search on, give it a larger --budget or"
            " --evaluations"
        )
    if seconds is not None and seconds <= stored.elapsed_s:
        raise UsageError(
            f"run {stored.name!r} has used {stored.elapsed_s:.2f} s of searching already, and --budget is for the run as"
            " a whole; give a larger one"
        )
    _check_same_machine(stored, target)
    if limit is not None:
        store.set_budget(stored, asdict(limit))
        stored = store.run(stored.name)
    return stored


def _check_same_machine(run: StoredRun, target: AskedTarget) -> None:
    """Raises StoreError if the device, driver, compiler or PyTorch of a run has changed since: such times do not mix."""
    then, now = run.environment, describe_environment(target)
    for name in ("device", "driver", "compiler", "torch"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            raise StoreError(
                f"run {run.name!r} was measured with {name} {before!r}, and now it is {after!r}: their times do not"
                " mix; start a new run"
            )


def configure(job: Mapping[str, Any], db: str, elsewhere: Executor | None = None) -> RunSpec:
    """The run that the parameters of `evo search` describe. Raises UsageError for what cannot be searched.

    job: by the parameters' names; sampler_options: values by name. elsewhere: where it is not for this machine.
    """
    kernel, target, arch = load_context(job["kernel"], job.get("target"), job.get("arch"), elsewhere)
    asked = elsewhere.target if elsewhere else find_target(target)
    workloads = check_workloads(kernel, target, job.get("workloads") or (), job.get("cover") or ())
    if reason := asked.runs(arch):
        raise DeviceError(
            f"{reason}: search where it does, or check that it compiles with: evo check {job['kernel']} --arch {arch}"
            f" --target {target}"
        )
    limits = asked.limits(arch)
    fixed = parse_values(job.get("fix") or (), kernel.space(target, workloads[0], limits), "--fix")
    spaces = [kernel.space(target, workload, limits).restricted(fixed) for workload in workloads]
    if job.get("start"):
        starts = read_starts(job["start"], kernel, target, spaces, db)
    else:
        starts = () if job.get("cold") else _known_starts(kernel, target, asked.device().name, workloads, spaces, db)
    sampler = sampler_of(job)
    find_sampler(sampler)(spaces[0], 0, job["sampler_options"])  # refuses bad options before anything starts
    return plan_run(
        kernel=job["kernel"],
        target=target,
        arch=arch,
        workloads=workloads,
        sampler=sampler,
        seed=draw_seed(job.get("seed")),
        builders=elsewhere.builders if elsewhere else job.get("builders"),
        devices=elsewhere.devices if elsewhere else len(choose_devices(target, job.get("devices"))),
        budget=budget_of(job),
        fixed=fixed,
        sampler_options=job["sampler_options"],
        starts=starts,
        given=bool(job.get("start")),
        cover=bool(job.get("cover")),
        finalists=job.get("finalists"),
        sanitize_finals=bool(job.get("sanitize_finals")),
        name=job.get("name"),
    )


def sampler_of(job: Mapping[str, Any]) -> str:
    return "evolution" if job.get("sampler") is None else str(job["sampler"])


def budget_of(job: Mapping[str, Any]) -> Budget:
    """Raises UsageError."""
    time, evaluations, patience = (job.get(name) for name in ("budget", "evaluations", "patience"))
    if time is None and evaluations is None and patience is None:
        time = _DEFAULT_BUDGET
    seconds = parse_duration(time) if time is not None else None
    return Budget(seconds=seconds, evaluations=evaluations, patience=patience)


def _parse_start(text: str, spaces: Sequence[Space]) -> Mapping[str, Any]:
    """In the first space that has its names and values. Raises what the first of all says."""
    for space in spaces:
        with suppress(UsageError):
            return parse_point(text, space, "--start")
    return parse_point(text, spaces[0], "--start")


def read_starts(
    texts: Sequence[str], kernel: Kernel, target: str, spaces: Sequence[Space], db: str
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """The points that the texts of --start name, in their order, each behind what it is from: a candidate's id, or the text.

    A text is NAME=VALUE,... (the default with these values), the name of a run (its winners), a candidate, or the folder of
    an export (its variants).
    spaces: of the workloads. A point is tried where it is legal; of each text at least one point must be legal somewhere.

    Raises UsageError, UnknownNameError, SpaceError or StoreError.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for text in texts:
        if "=" in text:
            points = [(text, _parse_start(text, spaces))]
        elif (Path(text) / MANIFEST).is_file():
            points = [(text, point) for point in _exported_points(Path(text), target)]
        else:
            points = _recorded_points(text, kernel, target, db)
        fit = [(origin, point) for origin, point in points if _fits(point, spaces)]
        if not fit:
            broken = dict.fromkeys(v for _, p in points for space in spaces for v in space.violations(space.adapted(p)))
            raise UsageError(f"--start {text!r} is legal for none of the workloads: {'; '.join(broken) or points}")
        found += fit
    return tuple(found)


def _fits(point: Mapping[str, Any], spaces: Sequence[Space]) -> bool:
    """Whether it is legal for one of the workloads."""
    return any(space.is_legal(space.adapted(point)) for space in spaces)


def _exported_points(folder: Path, target: str) -> list[Mapping[str, Any]]:
    """Each once; also those of another kernel, and of what it was before, as far as they are legal."""
    try:
        variants = read_manifest(folder)["variants"]
        genomes = dict.fromkeys(Genome.of(v["genome"]) for v in variants if v["target"] == target)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--start {folder}: {MANIFEST} there cannot be read as an export's: {error!r}") from error
    if not genomes:
        raise UsageError(f"--start {folder}: no variant there is for {target}")
    return [genome.parameters for genome in genomes]


def _known_starts(
    kernel: Kernel, target: str, device: str, workloads: Sequence[Workload], spaces: Sequence[Space], db: str
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """What earlier runs found for the like, as far as it is legal for one of the workloads. Where there is but one, half of
    the starts are those that differ most: several workloads each try all of them."""
    with _recorded_in(db) as store:
        if store is None:
            return ()
        every = -(-len(workloads) // _MOST_STARTS)
        alike = find_alike(store, kernel, target, device, workloads[::every])
        found = {Genome.of(best.parameters): best.id for best in alike if _fits(best.parameters, spaces)}
        if len(spaces) > 1:
            return tuple((origin, genome.parameters) for genome, origin in islice(found.items(), _MOST_STARTS))
        (space,) = spaces
        near = find_nearly_as_fast(store, islice(found.values(), _MOST_STARTS))
        known = dict[Genome, str]()
        for genome, origin in (*found.items(), *near.items()):
            known.setdefault(Genome.of(space.adapted(genome.parameters)), origin)
        default = Genome.of(space.complete(space.default))  # comes first anyway
        left = [genome for genome in known if genome != default and space.is_legal(genome.parameters)]
        starts = left[: _MOST_STARTS // 2]
        while len(starts) < _MOST_STARTS and (left := [genome for genome in left if genome not in starts]):
            starts.append(max(left, key=lambda genome: min(len(genome.difference(start)) for start in starts)))
        return tuple((known[genome], genome.parameters) for genome in starts)


@contextmanager
def _recorded_in(db: str) -> Iterator[Store | None]:
    """What a database has; None where there is none yet, or one that is to be brought up to date first, which is said.
    Raises StoreError for one that cannot be read."""
    with ExitStack() as opened:
        store = None
        try:
            store = opened.enter_context(Store.open(db, write=False))
        except EmptyError:
            pass
        except OlderSchemaError as error:
            say(f"evo: earlier runs are not looked at: {error}", err=True)
        yield store


def _recorded_points(text: str, kernel: Kernel, target: str, db: str) -> list[tuple[str, Mapping[str, Any]]]:
    with Store.open(db, write=False) as store:
        records = find_winners(store, text, db)
        for r in records:
            if r.target != target or not is_of(store, r.kernel, r.run, kernel):
                raise UsageError(
                    f"--start {text!r} is of kernel {r.kernel!r} on {r.target}, and {kernel.name!r} as it is now on"
                    f" {target} is searched; to start there all the same, write its values: NAME=VALUE,..."
                )
    return [(r.id, r.parameters) for r in records]


def _carry_out(
    store: Store,
    run: StoredRun,
    executor: Executor,
    job: Mapping[str, Any],
    *,
    json: bool,
    export: Path | None,
    db: str,
    begun: StoredRun | None,
    again: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Searches, shows how it goes and what was found unless that is to be JSON, and exports the winners. Returns what was
    found. job: where it runs, and its log; begun: as it was before, if it is continued; again: the command that continues
    it, if it is not `evo resume`."""
    console = make_console()
    console.quiet = json
    before = {"candidates": find_run(store, run.name).evaluations, "search_s": round(run.elapsed_s, 2)} if begun else None
    log = Path(job["log"]) if job.get("log") else None
    outcome = follow(store, run, executor, console, resumed=begun is not None, log=log)
    if outcome is None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to close what is open
        place = [word for name in _PLACE if job.get(name) for word in (f"--{name}", str(job[name]))]
        command = command_line(db, *(again or ("resume", run.name, *place)))
        say(f"evo: interrupted; everything finished is stored. Continue with: {command}", err=True)
        raise typer.Exit(130)
    kernel = load_kernel(run.spec.kernel)
    found = read_run_finals(store, run.name, kernel.ceilings)
    started = float(psutil.Process().create_time())  # a user waits for the imports, too
    record = outcome_record(outcome, found, started, store, before)
    if export is not None and _has_winner(record):
        from evo.cli.export import export_run

        record["export"] = [str(p) for p in export_run(store, run.name, export, db)]
    if not json:
        print_outcome(console, record, found, kernel, db)
    return record


_PLACE = ("devices", "scheduler", "cluster", "log")


def _words(context: typer.Context, typed: Mapping[str, Any]) -> Iterator[str]:
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


def follow(
    store: Store,
    run: StoredRun,
    executor: Executor,
    console: Terminal,
    *,
    resumed: bool = False,
    ending: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    log: Path | None = None,
) -> Outcome | None:
    """Carries a run to its end and shows how it goes, unless the console is quiet. None: a signal has ended it in order, and
    everything finished is stored. resumed: the run had begun before; ending: the signals that do so; log: see `JsonLog`."""
    budget = Budget(**run.spec.budget)
    if resumed:
        kept, limit = find_run(store, run.name).evaluations, budget.evaluations
        reached = f"; --evaluations {limit} is reached already" if limit is not None and limit <= kept else ""
        searched = f"{counted(kept, 'candidate')} and {duration(run.elapsed_s)} of searching"
        console.say(f"run {run.name} is resumed: {searched} are kept{reached}")
    kernel = load_kernel(run.spec.kernel)
    names = {workload: brief_workload(workload, kernel) for workload in run.spec.workloads}
    screen: PlainLines | LiveScreen = PlainLines(console, [*names.values()])
    if console.is_terminal and not console.quiet:
        title = f"evo search {run.spec.kernel} · {run.environment.device} · {run.name}"
        screen = LiveScreen(console, title, [*names.values()], budget)
    written = JsonLog(log, run.name, [*names.values()]) if log else None
    shown = [screen, written] if written else [screen]

    def say(text: str) -> None:
        for each in shown:
            each.say(text)

    def update(progress: Progress) -> None:
        for each in shown:
            each.update(progress)

    outcome, why = None, "an error"
    with screen, ExitStack() as ending_log:
        if written:
            ending_log.callback(lambda: written.end(why, outcome))
        on = f"{run.environment.device}, {counted(executor.devices, 'device')}, {counted(executor.builders, 'builder')}"
        options = run.spec.options
        kind, how = ("given", "") if options.get("given") else ("known", " (--cold: none)")
        first = f", first {counted(len(starts), f'{kind} point')}{how}" if (starts := options.get("starts")) else ""
        limit_s = f"for {duration(budget.seconds)}, " if budget.seconds is not None else ""
        say(f"run {run.name}: {run.spec.kernel} on {on}, {limit_s}seed {run.spec.seed}{first}; starting …")
        for workload in run.spec.workloads:
            if missing := run.spec.options.get("missing_kinds", {}).get(workload.key):
                say(f"warning: {names[workload]}: {lacks(missing)}")
        try:
            with _signals(ending, said=isinstance(screen, LiveScreen)) as searching:

                def finals(workload: Workload, waits_s: float) -> None:
                    searching.clear()
                    again = f"; it is held again, for up to {math.ceil(waits_s)} s more"
                    busy = f": other programs disturb the race{again}" if waits_s else ""
                    say(f"finals of {names[workload]}{busy} …")

                outcome = execute(run, store, executor, update, on_search=searching.append, on_finals=finals)
            why = str(outcome.reason)
        except (KeyboardInterrupt, BrokenPipeError):  # the latter where nobody reads the output any more
            why = str(StopReason.INTERRUPTED)
    return None if why == StopReason.INTERRUPTED else outcome


@contextmanager
def _signals(ending: Sequence[signal.Signals], *, said: bool) -> Iterator[list[Search]]:
    """A list for the search that these signals end in order: the first when what is being timed is done, the second at
    once. While none is in it, they raise KeyboardInterrupt, and so they do where a search does not end at once. said: a
    screen says so."""
    searching: list[Search] = []
    received = 0

    def stop(number: int, frame: object) -> None:
        nonlocal received
        received += 1
        if not searching or searching[-1].over or received > _AT_ONCE:
            raise KeyboardInterrupt
        searching[-1].interrupt()
        if received == _AT_ONCE:  # unless the database or a sampler keeps it
            again = threading.Timer(_LONGEST_S, once_more, (searching[-1], number))
            again.daemon = True
            again.start()
        elif not said:
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"evo: {ENDING}\n".encode())

    def once_more(search: Search, number: int) -> None:
        if not search.over:
            os.kill(os.getpid(), number)

    with handling(ending, stop):
        try:
            yield searching
        finally:
            searching.clear()


_AT_ONCE, _LONGEST_S = 2, 0.5
"""Number of signals that end a search at once, and the seconds after which one raises an exception."""
