"""evo search, evo resume."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from evo.analysis import queries
from evo.budget import Budget, StopReason
from evo.cli.cells import format_duration
from evo.cli.job import read_job
from evo.cli.options import (
    DEFAULT_DB,
    Db,
    Json,
    TargetName,
    check_seed,
    command_line,
    make_console,
    parse_duration,
    parse_fixed,
    print_json,
)
from evo.cli.results import outcome_record, print_outcome
from evo.cli.screen import LiveScreen, PlainLines, Screen, SilentScreen
from evo.cli.setup import Setup, set_up, worker_settings
from evo.cli.starts import read_starts
from evo.errors import DeviceError, StoreError, UsageError
from evo.executors import Executor
from evo.export._folder import check_replaceable
from evo.lineage import RunStatus, StoredRun
from evo.lineage.store import Store
from evo.search.loop import Search, SearchConfig, default_max_in_flight
from evo.search.run import (
    RunSettings,
    budget_of,
    check_default,
    check_workloads,
    describe_environment,
    execute,
    open_executor,
    plan_run,
)
from evo.search.samplers import find_sampler
from evo.targets import find_target

__all__ = ["register"]

_DEFAULT_BUDGET = "60s"


def register(app: typer.Typer) -> None:
    app.command("search")(search)
    app.command("resume")(resume)


@dataclass(frozen=True, kw_only=True)
class _Report:
    """How the end of a search is told. `started`: when the command began, as time.time(). `resumed`: the run had begun
    before."""

    json: bool
    export: Path | None
    db: str
    started: float
    resumed: bool = False


def search(
    kernel: Annotated[str, typer.Argument(help="A kernel's name, its folder, or a job file (.toml).")],
    target: TargetName = None,
    arch: Annotated[str | None, typer.Option(help="Architecture, e.g. sm_89; the device's own if left out.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="e.g. rows=4096,cols=8192,dtype=float16; repeat for more.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for search and finals: 60s, 10m, 2h.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="Stop after so many candidates.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many candidates without a better one.")] = None,
    sampler: Annotated[str | None, typer.Option(help="evolution, tpe or random.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, --builders and measurements: same proposals.", callback=check_seed),
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(help="Hold a parameter at one value: NAME=VALUE.")] = None,
    start: Annotated[
        list[str] | None,
        typer.Option(help="Also try this first: a run's winners, a candidate, or NAME=VALUE,...; repeat for more."),
    ] = None,
    builders: Annotated[int | None, typer.Option(help="Compiling processes.", min=1)] = None,
    finalists: Annotated[int | None, typer.Option(help="Candidates that are timed again, paired.", min=1)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    export: Annotated[Path | None, typer.Option(help="Export the winners to this folder as a module.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Search for faster variants of a kernel."""
    report = _Report(json=json, export=export, db=db, started=_process_started())
    job: dict[str, Any] = read_job(Path(kernel)) if kernel.endswith(".toml") else {"kernel": kernel}
    given: dict[str, Any] = {
        "target": target,
        "arch": arch,
        "workloads": workload,
        "budget": budget,
        "evaluations": evaluations,
        "patience": patience,
        "sampler": sampler,
        "seed": seed,
        "name": name,
        "fix": fix,
        "start": start,
        "builders": builders,
        "finalists": finalists,
    }
    job |= {k: v for k, v in given.items() if v is not None}
    setup = set_up(job["kernel"], job.get("target"), job.get("arch"), db)
    named = {k: job[k] for k in ("builders", "finalists") if job.get(k) is not None}
    setup = replace(setup, workers=replace(setup.workers, **named))
    config = _configure(job, setup, db)
    if export is not None:
        check_replaceable(export, "module")  # before the budget is spent
    with setup.open_executor() as executor, _open(db) as store:
        environment = describe_environment(find_target(config.target))
        check_default(executor, config, setup.kernel)
        run = store.create_run(plan_run(config, setup.kernel, job.get("name")), environment)
        _carry_out(store, run, executor, setup.workers, config.budget, report)


def resume(
    run: Annotated[str, typer.Argument(help="A run's name, a unique beginning of it, or 'latest'.")],
    budget: Annotated[str | None, typer.Option(help="A new budget of time for the run as a whole.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="A new number of candidates for the run as a whole.")] = None,
    export: Annotated[Path | None, typer.Option(help="Export the winners to this folder as a module.")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Continue a search that was interrupted."""
    report = _Report(json=json, export=export, db=db, started=_process_started(), resumed=True)
    if export is not None:
        check_replaceable(export, "module")  # before the budget is spent
    with _open(db) as store:
        stored = store.run(run)
        longer = budget is not None or evaluations is not None
        if stored.status is RunStatus.FINISHED and not longer:
            raise StoreError(
                f"run {stored.name!r} is finished ({stored.stop_reason}); to search on, give it a larger --budget or"
                " --evaluations"
            )
        limit = budget_of(stored)
        if longer:
            limit = Budget(seconds=parse_duration(budget) if budget else None, evaluations=evaluations)
            _check_larger(limit, stored)
        _check_same_machine(stored)
        if longer:
            store.set_budget(stored, asdict(limit))
        workers = worker_settings(stored.spec.target, db)
        with open_executor(stored.spec.target, workers) as executor:
            _carry_out(store, stored, executor, workers, limit, report)


def _check_larger(budget: Budget, run: StoredRun) -> None:
    """Raises UsageError for a new budget of time that leaves none."""
    if budget.seconds is None or budget.seconds > run.elapsed_s:
        return
    without = "" if run.status is RunStatus.FINISHED else ", or leave --budget out to keep the run's own"
    raise UsageError(
        f"run {run.name!r} has used {run.elapsed_s:.2f} s of searching already, and --budget {budget.seconds:g}s is for the"
        f" run as a whole; give a larger one{without}"
    )


def _check_same_machine(run: StoredRun) -> None:
    """Raises StoreError if what a run was measured on and with has changed since: such times do not mix."""
    then, now = run.environment, describe_environment(find_target(run.spec.target))
    for name in ("device", "driver", "compiler", "torch"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            raise StoreError(
                f"run {run.name!r} was measured with {name} {before!r}, and now it is {after!r}: their times do not"
                " mix; start a new run"
            )


def _configure(job: dict[str, Any], setup: Setup, db: str) -> SearchConfig:
    kernel, target, arch = setup.kernel, setup.target, setup.arch
    workloads = check_workloads(kernel, target, list(job.get("workloads") or ()))
    if reason := find_target(target).runs(arch):
        raise DeviceError(
            f"{reason}: search where it does, or check that it compiles with: evo check {job['kernel']} --arch {arch}"
            f" --target {target}"
        )
    limits = find_target(target).limits(arch)
    fixed = parse_fixed(job.get("fix") or (), kernel.space(target, workloads[0], limits))
    spaces = [kernel.space(target, workload, limits).restricted(fixed) for workload in workloads]
    starts = read_starts(job.get("start") or (), kernel, target, spaces, db)
    sampler = job.get("sampler") or "evolution"
    find_sampler(sampler)
    seconds = job.get("budget")
    limited = any(job.get(k) is not None for k in ("budget", "evaluations", "patience"))
    if not limited:
        seconds = _DEFAULT_BUDGET
    seed = job.get("seed")
    return SearchConfig(
        kernel=job["kernel"],
        target=target,
        arch=arch,
        workloads=workloads,
        sampler=sampler,
        seed=int.from_bytes(os.urandom(4)) if seed is None else int(seed),
        max_in_flight=default_max_in_flight(setup.workers.builders),
        budget=Budget(
            seconds=parse_duration(str(seconds)) if seconds is not None else None,
            evaluations=job.get("evaluations"),
            patience=job.get("patience"),
        ),
        fixed=fixed,
        initial_points=starts,
    )


def _carry_out(
    store: Store,
    run: StoredRun,
    executor: Executor,
    settings: RunSettings,
    budget: Budget,
    report: _Report,
) -> None:
    console = make_console()
    kept = sum(queries.counts(store, run.name).values())
    if report.resumed and not report.json:
        console.print(
            f"run {run.name} is resumed: {kept} candidates and {format_duration(run.elapsed_s)} of searching are kept;"
            f" {_what_is_left(budget, kept, run.elapsed_s)}",
            highlight=False,
            soft_wrap=True,
        )
    screen = _screen(console, run, budget, report.json)
    with screen:
        screen.say(f"run {run.name}: {run.spec.kernel} on {run.environment.device}, seed {run.spec.seed}; starting …")
        try:
            with _signals() as (connect, disconnect):
                outcome = execute(
                    run, store, executor, settings, screen, budget=budget, on_search=connect, on_finals=disconnect
                )
            interrupted = outcome.reason is StopReason.INTERRUPTED
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        command = command_line(report.db, "resume", run.name)
        typer.echo(f"evo: interrupted; everything finished is stored. Continue with: {command}", err=True)
        raise typer.Exit(130)
    before = {"candidates": kept, "search_s": round(run.elapsed_s, 2)} if report.resumed else None
    record = outcome_record(outcome, report.started, store, before)
    if report.export is not None and outcome.has_winner:
        from evo.cli.export import export_run

        record["export"] = [str(p) for p in export_run(store, run.name, "module", report.export, report.db)]
    if report.json:
        print_json(record)
    else:
        print_outcome(console, outcome, record, report.db)
    if not outcome.has_winner:
        raise typer.Exit(1)


def _what_is_left(budget: Budget, kept: int, elapsed_s: float) -> str:
    """Of the budget: the limit that is nearest cannot be known before, so all of them."""
    left = []
    if budget.seconds is not None:
        left.append(f"{format_duration(budget.seconds - elapsed_s)}, a part of it for the finals")
    if budget.evaluations is not None:
        count = max(0, budget.evaluations - kept)
        left.append(f"{count} candidate{'' if count == 1 else 's'}, then the finals")
    if budget.patience is not None:
        left.append(f"until {budget.patience} candidates in a row bring nothing better")
    return f"left: {'; or '.join(left)}"


def _screen(console: Console, run: StoredRun, budget: Budget, json: bool) -> Screen:
    if json:
        return SilentScreen()
    if console.is_terminal:
        title = f"evo search {run.spec.kernel} · {run.environment.device} · {run.name}"
        return LiveScreen(console, title, run.spec.workloads, budget)
    return PlainLines(console, run.spec.workloads)


@contextmanager
def _open(db: str) -> Iterator[Store]:
    store = Store.open(db, write=True)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _signals() -> Iterator[tuple[Callable[[Search], None], Callable[[], None]]]:
    """(connect, disconnect): the first SIGINT or SIGTERM ends a connected search in order. A second SIGINT, or
    either one when no search is connected, raises KeyboardInterrupt."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def connect(search: Search) -> None:
        def stop(number: int, frame: object) -> None:
            search.interrupt()
            signal.signal(signal.SIGINT, signal.default_int_handler)

        for s in before:
            signal.signal(s, stop)

    def disconnect() -> None:
        for s in before:
            signal.signal(s, signal.default_int_handler)

    disconnect()
    try:
        yield connect, disconnect
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _process_started() -> float:
    """When this process began, on the clock of time.time(): what a user waits for includes the imports."""
    import psutil

    try:
        return float(psutil.Process().create_time())
    except psutil.Error:
        return time.time()
