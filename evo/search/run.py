"""A whole run: start it or take it up again, search, hold the finals, name the winners.

Everything a run needs to be continued is in its record, so `start` and `resume` meet in the same function.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

from evo import __version__
from evo.errors import EvoError, StoreError, TemplateError, UsageError, error_line
from evo.evaluation import Candidate, Status
from evo.executors import Executor, ExecutorConfig, find_executor
from evo.lineage import Environment, RunSpec, RunStatus, Stage, StoredRun
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload, load_kernel
from evo.problem.space import Value
from evo.search.finals import Finals, end_finals, hold_race
from evo.search.loop import Budget, Observer, Search, StopReason, default_max_in_flight
from evo.search.tasks import TaskExecutor, tasks_of
from evo.targets import Target, find_target

_FINALS_BATCHES = 3
_WITHIN = 0.03
"""How much longer than the fastest variant that is known for a point the one that serves it may take."""
_MOST_VARIANTS = 12
"""For one dtype."""


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


def plan_run(
    *,
    kernel: str,
    target: str,
    arch: str,
    workloads: tuple[Workload, ...],
    budget: Budget,
    seed: int,
    builders: int | None = None,
    sampler: str = "evolution",
    sampler_options: Mapping[str, object] | None = None,
    fixed: Mapping[str, Value] | None = None,
    initial_points: Sequence[Mapping[str, Value]] = (),
    cover: bool = False,
    name: str | None = None,
) -> RunSpec:
    """The record from which `execute` can start, and start again. kernel: name, or path of its folder. builders: of the
    executor, if not as many as the target leaves cores for. cover: few variants are to serve all workloads.

    What the gate's data are drawn with comes from the operating system: nobody can have fitted a kernel to them.
    """
    return RunSpec(
        kernel=kernel,
        kernel_digest=load_kernel(kernel).digest,
        target=target,
        arch=arch,
        sampler=sampler,
        seed=seed,
        max_in_flight=default_max_in_flight(builders or _default_builders(target)),
        workloads=workloads,
        options={
            "sampler": dict(sampler_options or {}),
            "fixed": dict(fixed or {}),
            "starts": [dict(point) for point in initial_points],
            "gate_seed": int.from_bytes(os.urandom(4)),
            **({"cover": True} if cover else {}),
        },
        budget=asdict(budget),
        name=name,
    )


def check_default(executor: Executor, spec: RunSpec) -> None:
    """Builds the default genome for every workload: a template that cannot even do that is not worth a budget.

    The binaries are cached, so the search itself has them for nothing. Raises TemplateError with file and line,
    SpaceError if nothing is legal, EvoError with the compiler's first error.
    """
    builds = []
    for task in tasks_of(spec, executor, Stage.SEARCH):
        space = task.space.restricted(spec.options["fixed"])
        builds.append((task, task.build(Genome.of(space.complete(space.default)))))
    for task, future in builds:
        build = future.result()
        if build.status is Status.RENDER_ERROR:
            raise TemplateError(build.log)
        if build.status is not Status.OK:
            raise EvoError(
                f"the default genome of kernel {task.problem.name!r} does not compile for {task.workload}"
                f" ({error_line(build.log) or 'it says nothing'}); mend the template, then try: evo check {task.kernel}"
            )


def open_executor(target: str, cache_dir: Path, builders: int | None = None) -> closing[Executor]:
    """Worker processes that start at once: they take seconds to get ready, so open this before anything slow."""
    config = ExecutorConfig(cache_dir=cache_dir, builders=builders or _default_builders(target))
    return closing(find_executor("local")(target, config))


def execute(
    run: StoredRun,
    store: Store,
    executor: Executor,
    observer: Observer,
    *,
    finalists: int,
    on_search: Callable[[Search], None] = lambda search: None,
    on_finals: Callable[[Workload], None] = lambda workload: None,
) -> Outcome:
    """Carries a new or an interrupted run to its end.

    `on_search` gets the search before it starts, e.g. to connect signals with `Search.interrupt`; `on_finals` each workload
    whose finals begin after it. The finals end by KeyboardInterrupt, and are held anew when the run is resumed.
    Raises StoreError if the kernel is not what the run was started with, or the database fails.
    """
    if load_kernel(run.spec.kernel).digest != run.spec.kernel_digest:
        raise StoreError(
            f"kernel {run.spec.kernel!r} has changed since run {run.name!r} was started, so its search cannot be"
            " continued; start a new run, or check out the files it was started with"
        )
    store.set_status(run, RunStatus.RUNNING, elapsed_s=run.elapsed_s)
    search: Search | None = None
    try:
        search = Search(run, store, executor, observer)
        on_search(search)
        reason = search.run()
        if reason is StopReason.INTERRUPTED:
            store.set_status(run, RunStatus.INTERRUPTED, reason=reason, elapsed_s=search.elapsed_s)
            return Outcome(run=run, reason=reason, search=search)
        finals = hold_all_finals(search, run, store, executor, finalists, on_finals)
        store.set_status(run, RunStatus.FINISHED, reason=reason, elapsed_s=search.elapsed_s)
        return Outcome(run=run, reason=reason, search=search, finals=finals)
    except BaseException as error:
        elapsed_s = search.elapsed_s if search else run.elapsed_s
        why = StopReason.INTERRUPTED if isinstance(error, KeyboardInterrupt) else "stopped by an error"
        with suppress(EvoError):  # if the database itself is what failed, the first error says so
            store.set_status(run, RunStatus.INTERRUPTED, reason=why, elapsed_s=elapsed_s)
        raise


def hold_all_finals(
    search: Search,
    run: StoredRun,
    store: Store,
    executor: Executor,
    count: int,
    begins: Callable[[Workload], None] = lambda workload: None,
) -> tuple[Finals, ...]:
    """Of every task, with `count` finalists; where all of them are refused, with the next best. begins: told of each."""
    executor.renew_device()
    tasks = tasks_of(run.spec, executor, Stage.FINAL)
    if run.spec.options.get("cover"):
        return _hold_covering_finals(search, run, store, tasks, count, begins)
    held = []
    for number, task in enumerate(tasks):
        begins(task.workload)
        elites = search.elites(number)
        for batch in range(_FINALS_BATCHES):
            tried, elites = elites[:count], elites[count:]
            if batch and not tried:
                break  # no candidate is left
            finals = end_finals(task, *hold_race(task, tried))
            _store_finals(store, run, number, finals, search.elapsed_s)
            if finals.winner or not finals.finalists:
                break  # else all of these were refused, and the next best have their turn
        held.append(finals)
    return tuple(held)


def _hold_covering_finals(
    search: Search,
    run: StoredRun,
    store: Store,
    tasks: Sequence[TaskExecutor],
    count: int,
    begins: Callable[[Workload], None],
) -> tuple[Finals, ...]:
    """Where few variants are to serve all tasks. Finalists of a task are its fastest, and what is the fastest of others; all
    races are held before it is decided which variants are kept, and the fastest of these is confirmed for each task."""

    def variant(task: TaskExecutor, candidate: Candidate) -> str:
        """What is the same code with the same launch at all sizes."""
        assert candidate.code is not None
        plan = task.problem.plan(task.target, candidate.proposal.genome.parameters, task.workload)
        return f"{candidate.code[0]} {plan}"

    elites = [search.elites(number) for number in range(len(tasks))]
    best = {variant(task, found[0]) for task, found in zip(tasks, elites, strict=True) if found}
    races = []
    for task, found in zip(tasks, elites, strict=True):
        begins(task.workload)
        first = (count + 1) // 2
        shared = [c for c in found[first:] if variant(task, c) in best]
        races.append(hold_race(task, [*found[:first], *shared][:count]))
    times: dict[str, list[dict[str, float]]] = {}
    for task, (finalists, timings) in zip(tasks, races, strict=True):
        ratios = {t.contender: t.ratio for t in timings if t.ratio is not None}
        own = {variant(task, f.candidate): ratios[f.name] for f in finalists if f.passed and f.name in ratios}
        times.setdefault(task.workload.dtype, []).append(own)
    few = {v for points in times.values() for v in choose(points)}
    held = []
    for number, (task, race) in enumerate(zip(tasks, races, strict=True)):
        finals = end_finals(task, *race, {f.candidate.order for f in race[0] if variant(task, f.candidate) in few})
        _store_finals(store, run, number, finals, search.elapsed_s)
        held.append(finals)
    return tuple(held)


def choose(times: Sequence[Mapping[str, float]], *, within: float = _WITHIN, most: int = _MOST_VARIANTS) -> list[str]:
    """The variants to keep, of those that have times at some points, one mapping a point. Choosing the fewest is set cover;
    the greedy choice is used, which is within a factor of ln(points) of that (Chvatal 1979).

    Each point has one that takes at most 1 + `within` times its least time, unless that would need more than `most`: then
    points that are served by none take the nearest to that, as far as there is one for them. A variant is kept that serves
    the most points that none serves yet; of equal ones that with the least time over the points' least, summed over its
    points.
    """
    least = [min(known.values(), default=0.0) for known in times]
    excess = [{v: t / low - 1 for v, t in known.items()} for known, low in zip(times, least, strict=True)]
    waiting, chosen = {i for i, known in enumerate(times) if known}, list[str]()
    while waiting and len(chosen) < most:
        serves: dict[str, list[float]] = {}
        for i in sorted(waiting):
            for v, more in excess[i].items():
                if more <= within:
                    serves.setdefault(v, []).append(more)
        best = min(serves, key=lambda v: (-len(serves[v]), sum(serves[v])))
        chosen.append(best)
        waiting = {i for i in waiting if best not in excess[i] or excess[i][best] > within}
    return chosen


def _store_finals(store: Store, run: StoredRun, task: int, finals: Finals, elapsed_s: float) -> None:
    with store.transaction():
        for finalist in finals.finalists:
            store.add_final(run, finalist.candidate.order, finalist.measurement, elapsed_s=elapsed_s)
        store.add_baselines(run, task, finals.baselines, stage=Stage.FINAL)
        # Also None: the winner of earlier finals has not won these.
        store.set_winner(run, task, finals.winner.candidate.order if finals.winner else None)


def _default_builders(target: str) -> int:
    """Builders beside the device process: all cores but one, or all where they take turns anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if find_target(target).shares_cores else max(1, min(cores - 1, 32))


def _points_of(grid: str) -> list[str]:
    """The workloads of a grid: rows=1024/4096,cols=1024,dtype=float16/bfloat16 are four."""
    parts = [part.partition("=") for part in grid.split(",")]
    if bare := next((name for name, equals, _ in parts if not equals), None):
        raise UsageError(f"--cover {grid!r}: {bare!r} has no name; several values of one name are written rows=16/32")
    return [",".join(p) for p in product(*([f"{n}{equals}{v}" for v in values.split("/")] for n, equals, values in parts))]


def check_workloads(kernel: Kernel, target: str, texts: Sequence[str], grids: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads named and those of grids, or else the kernel's own. Raises what `Kernel.workload` raises."""
    kernel.check_target(target)
    texts = [*texts, *(point for grid in grids for point in _points_of(grid))]
    if not texts:
        return kernel.workloads[target]
    found = tuple(kernel.workload(target, text) for text in texts)
    for workload in found:
        if any(size == 0 for _, size in workload.dims):
            raise UsageError(f"workload {workload.key} is empty: there is nothing to time; give sizes above 0")
    if twice := next((w for w in found if found.count(w) > 1), None):
        raise UsageError(f"a workload is named twice ({twice.key}); name each once")
    return found


def describe_environment(target: Target) -> Environment:
    """Device, driver, compilers and library versions as they are now. Raises DeviceError."""
    info = target.device()
    return Environment(
        device=info.name,
        arch=info.arch,
        driver=info.driver,
        compiler=target.compiler(),
        torch=version("torch"),
        python=platform.python_version(),
        evo=__version__,
        details=dict(info.details),
    )
