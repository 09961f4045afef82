"""A whole run: start it or take it up again, search, hold the finals, name the winners.

Everything a run needs to be continued is in its record, so `start` and `resume` meet in the same function.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evo import __version__
from evo.errors import EvoError, StoreError, TemplateError, UsageError
from evo.evaluation import Status
from evo.executors import BuildRequest, Executor, ExecutorConfig, find_executor
from evo.lineage import Environment, RunSpec, RunStatus, Stage, StoredEvaluation, StoredRun, gate_seeds
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload, load_kernel
from evo.search.finals import Finals, FinalsConfig, hold_finals
from evo.search.loop import Search, SearchConfig
from evo.search.progress import Budget, Observer, StopReason
from evo.search.samplers import find_sampler
from evo.targets import Target, find_target

__all__ = [
    "Outcome",
    "RunSettings",
    "budget_of",
    "check_default",
    "describe_environment",
    "execute",
    "open_executor",
    "plan_run",
]

_FINALS_RESERVE = 0.15
_FINALS_RESERVE_MAX_S = 20.0
_FINALS_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How this process carries a run out; none of it changes what is proposed."""

    cache_dir: Path
    builders: int
    executor: str = "local"
    finalists: int = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `finals` by task; empty if it was interrupted."""

    run: StoredRun
    reason: StopReason
    search: Search
    finals: tuple[Finals, ...] = ()

    @property
    def has_winner(self) -> bool:
        return any(f.winner for f in self.finals)


def plan_run(config: SearchConfig, kernel: Kernel, name: str | None) -> RunSpec:
    """The record from which `execute` can start, and start again.

    What the gate's data are drawn with comes from the operating system: nobody can have fitted a kernel to them.
    """
    return RunSpec(
        kernel=config.kernel,
        kernel_digest=kernel.digest,
        target=config.target,
        arch=config.arch,
        sampler=config.sampler,
        seed=config.seed,
        max_in_flight=config.max_in_flight,
        workloads=config.workloads,
        options={
            "sampler": dict(config.sampler_options),
            "fixed": dict(config.fixed),
            "starts": [dict(point) for point in config.initial_points],
            "gate_seed": int.from_bytes(os.urandom(4)),
        },
        budget=dataclasses.asdict(config.budget),
        name=name,
    )


def check_default(executor: Executor, config: SearchConfig, kernel: Kernel) -> None:
    """Builds the default genome for every workload: a template that cannot even do that is not worth a budget.

    The binaries are cached, so the search itself has them for nothing. Raises TemplateError with file and line,
    SpaceError if nothing is legal, EvoError with the compiler's first error.
    """
    limits = find_target(config.target).limits(config.arch)
    builds = []
    for workload in config.workloads:
        space = kernel.space(config.target, workload, limits).restricted(config.fixed)
        request = BuildRequest(
            kernel=config.kernel,
            target=config.target,
            arch=config.arch,
            genome=Genome.of(space.complete(space.default)),
            workload=workload,
        )
        builds.append((workload, executor.build(request)))
    for workload, future in builds:
        build = future.result()
        if build.status is Status.RENDER_ERROR:
            raise TemplateError(build.log)
        if build.status is not Status.OK:
            raise EvoError(
                f"the default genome of kernel {kernel.name!r} does not compile for {workload}"
                f" ({_first_error(build.log)}); mend the template, then try: evo check {config.kernel}"
            )


def _first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it says nothing")


def budget_of(run: StoredRun) -> Budget:
    limits: Mapping[str, Any] = run.spec.budget
    return Budget(**limits)


@contextmanager
def open_executor(target: str, settings: RunSettings) -> Iterator[Executor]:
    """Worker processes that start at once: they take seconds to get ready, so open this before anything slow."""
    executor = find_executor(settings.executor)(
        target,
        ExecutorConfig(
            builders=settings.builders,
            cache_dir=settings.cache_dir,
        ),
    )
    try:
        yield executor
    finally:
        executor.close()


def execute(
    run: StoredRun,
    recorder: Store,
    executor: Executor,
    settings: RunSettings,
    observer: Observer,
    *,
    budget: Budget | None = None,
    on_search: Callable[[Search], None] = lambda search: None,
    on_finals: Callable[[], None] = lambda: None,
) -> Outcome:
    """Carries a new or an interrupted run to its end.

    `on_search` gets the search before it starts, e.g. to connect signals with `Search.interrupt`; `on_finals`
    is called when it is over. The finals end by KeyboardInterrupt, and are held anew when the run is resumed.
    Raises StoreError if the kernel is not what the run was started with, or the database fails.
    """
    spec = run.spec
    kernel, target = load_kernel(spec.kernel), find_target(spec.target)
    if kernel.digest != spec.kernel_digest:
        raise StoreError(
            f"kernel {spec.kernel!r} has changed since run {run.name!r} was started, so its search cannot be"
            " continued; start a new run, or check out the files it was started with"
        )
    limits = target.limits(spec.arch)
    recorder.set_status(run, RunStatus.RUNNING, elapsed_s=run.elapsed_s)
    total = budget or budget_of(run)
    options: Mapping[str, Any] = spec.options
    seeds = gate_seeds(options, spec.seed)
    config = SearchConfig(
        kernel=spec.kernel,
        target=spec.target,
        arch=spec.arch,
        workloads=spec.workloads,
        sampler=spec.sampler,
        seed=spec.seed,
        max_in_flight=spec.max_in_flight,
        budget=_search_part(total, len(spec.workloads)),
        sampler_options=options.get("sampler", {}),
        fixed=options.get("fixed", {}),
        initial_points=options.get("starts", ()),
        gate_seed=seeds[Stage.SEARCH],
    )
    search: Search | None = None
    try:
        recorded: list[StoredEvaluation] = recorder.evaluations(run)
        search = Search(
            config,
            kernel,
            limits,
            find_sampler(spec.sampler),
            executor,
            recorder,
            run,
            observer,
            recorded=recorded,
            elapsed_s=run.elapsed_s,
        )
        on_search(search)
        reason = search.run()
        if reason is StopReason.INTERRUPTED:
            recorder.set_status(run, RunStatus.INTERRUPTED, reason=reason, elapsed_s=search.elapsed_s)
            return Outcome(run=run, reason=reason, search=search)
        on_finals()
        finals_config = FinalsConfig(
            kernel=kernel,
            kernel_name=spec.kernel,
            target=spec.target,
            arch=spec.arch,
            limits=limits,
            seed=seeds[Stage.FINAL],
        )
        finals = _finals(executor, finals_config, search, recorder, run, settings.finalists)
        recorder.set_status(run, RunStatus.FINISHED, reason=reason, elapsed_s=search.elapsed_s)
        return Outcome(run=run, reason=reason, search=search, finals=finals)
    except BaseException:
        _mark_interrupted(recorder, run, search.elapsed_s if search else run.elapsed_s)
        raise


def _finals(
    executor: Executor, config: FinalsConfig, search: Search, recorder: Store, run: StoredRun, count: int
) -> tuple[Finals, ...]:
    executor.renew_device()
    held = []
    for task in range(len(run.spec.workloads)):
        for batch in range(_FINALS_BATCHES):
            elites = search.elites(task, batch * count, count)
            if batch and not elites:
                break  # no candidate is left
            finals = hold_finals(executor, config, elites)
            with recorder.transaction():
                for finalist in finals.finalists:
                    recorder.add_final(run, finalist.candidate.order, finalist.measurement, elapsed_s=search.elapsed_s)
                recorder.add_baselines(run, task, finals.baselines, stage=Stage.FINAL)
                # Also None: the winner of earlier finals has not won these.
                recorder.set_winner(run, task, finals.winner.candidate.order if finals.winner else None)
            if finals.winner or not finals.finalists:
                break  # else all of these were refused, and the next best have their turn
        held.append(finals)
    return tuple(held)


def _search_part(budget: Budget, tasks: int) -> Budget:
    """The finals are part of the time a user grants, as far as can be foreseen."""
    if budget.seconds is None:
        return budget
    reserve = min(_FINALS_RESERVE * budget.seconds, _FINALS_RESERVE_MAX_S * tasks)
    return dataclasses.replace(budget, seconds=budget.seconds - reserve)


def _mark_interrupted(recorder: Store, run: StoredRun, elapsed_s: float) -> None:
    try:
        recorder.set_status(run, RunStatus.INTERRUPTED, reason="stopped by an error", elapsed_s=elapsed_s)
    except EvoError:
        return  # the database itself is what failed; the first error says so


def default_builders(target: Target) -> int:
    """Builders beside the device process: all cores but one, or all where they take turns anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if target.shares_cores else max(1, min(cores - 1, 32))


def check_workloads(kernel: Kernel, target: str, texts: list[str]) -> tuple[Workload, ...]:
    """The workloads named, or the kernel's own for this target. Raises what `Kernel.workload` raises."""
    kernel.check_target(target)
    if not texts:
        return kernel.workloads[target]
    found = tuple(kernel.workload(target, text) for text in texts)
    for workload in found:
        if any(size == 0 for _, size in workload.dims):
            raise UsageError(f"workload {workload.key} is empty: there is nothing to time; give sizes above 0")
    if len(set(found)) < len(found):
        raise UsageError("a workload is named twice; name each once")
    return found


def describe_environment(target: Target) -> Environment:
    """Device, driver, compilers and library versions as they are now. Raises DeviceError."""
    info = target.device()
    return Environment(
        device=info.name,
        arch=info.arch,
        driver=info.driver,
        cuda=info.details.get("cuda", ""),
        nvrtc=info.details.get("nvrtc", ""),
        compiler=target.compiler(),
        torch=_version("torch"),
        python=platform.python_version(),
        evo=__version__,
        details=dict(info.details),
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
