"""A whole run: start it or take it up again, search, hold the finals, name the winners.

Everything a run needs to be continued is in its record, so `start` and `resume` meet in the same function.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path

from evo import __version__
from evo.errors import DeviceError, EvoError, StoreError, TemplateError, UsageError, error_line
from evo.evaluation import Status
from evo.executors import AskedTarget, Executor, ExecutorConfig, find_executor
from evo.lineage import Environment, RunSpec, RunStatus, Stage, StoredRun
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Value
from evo.search.cover import choose
from evo.search.finals import Finals, build_all, end_finals, hold_race
from evo.search.loop import Budget, Observer, Search, StopReason, default_max_in_flight
from evo.search.tasks import Patience, TaskExecutor, missing_kinds, tasks_of
from evo.targets import answers, find_target

_FINALISTS = 8
_FINALS_BATCHES = 3
_FINAL_RACES = 3
"""So many races are the finals of a workload, as a rule: all of them together may take as long as the search did."""
_TRIED_S = 5.0
"""What the memory checker has for a first candidate, which shows that there is one; what it finds is not asked for."""
_BUILDERS_A_CORE = 16
_PATIENCE, _LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.5, 10.0, 120.0
"""How long finals wait for a quiet machine, all together: as a share of the search's time, and its limits."""
_SHORT_PATIENCE = 2.0
"""So many times the search's time is waited at most where that is less than the least."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `finals` by task; empty if it was interrupted."""

    run: StoredRun
    reason: StopReason
    search: Search
    finals: tuple[Finals, ...] = ()


def plan_run(
    *,
    kernel: str,
    target: str,
    arch: str,
    workloads: tuple[Workload, ...],
    budget: Budget,
    seed: int,
    builders: int | None = None,
    devices: int = 1,
    sampler: str = "evolution",
    sampler_options: Mapping[str, object] | None = None,
    fixed: Mapping[str, Value] | None = None,
    starts: Sequence[tuple[str, Mapping[str, Value]]] = (),
    given: bool = False,
    cover: bool = False,
    finalists: int | None = None,
    sanitize_finals: bool = False,
    name: str | None = None,
) -> RunSpec:
    """The record from which `execute` can start, and start again. kernel: name, or path of its folder. builders: of the
    executor, if not as many as the target leaves cores for beside so many devices. starts: points to try first, each behind
    where it comes from; given: a user has named them, and they come before the default, too. cover: few variants are to
    serve all workloads. finalists: of each workload. sanitize_finals: each is run under the device's memory checker.

    What the gate's data are drawn with comes from the operating system: nobody can have fitted a kernel to them.
    """
    problem = load_kernel(kernel)
    lacking = missing_kinds(problem, target, workloads)
    return RunSpec(
        kernel=kernel,
        kernel_digest=problem.digest,
        target=target,
        arch=arch,
        sampler=sampler,
        seed=seed,
        max_in_flight=default_max_in_flight(builders or _default_builders(target, devices), devices),
        workloads=workloads,
        options={
            "sampler": dict(sampler_options or {}),
            "fixed": dict(fixed or {}),
            "starts": [dict(point) for _, point in starts],
            "origins": [origin for origin, _ in starts],
            "gate_seed": int.from_bytes(os.urandom(4)),
            "finalists": finalists or _FINALISTS,
            **({"given": True} if given else {}),
            **({"cover": True} if cover else {}),
            **({"sanitize_finals": True} if sanitize_finals else {}),
            **({"missing_kinds": lacking} if lacking else {}),
        },
        budget=asdict(budget),
        name=name,
    )


def check_default(executor: Executor, spec: RunSpec) -> None:
    """Builds the default genome for every workload: a template that cannot even do that is not worth a budget. Where all
    finalists are to be sanitized, that of the first workload is: a tool that is missing is told before the search.

    The binaries are cached, so the search itself has them for nothing. Raises TemplateError with file and line,
    SpaceError if nothing is legal, EvoError with the compiler's first error, DeviceError without the memory checker.
    """
    builds, checked = [], None
    for task in tasks_of(spec, executor, Stage.SEARCH):
        space = task.space.restricted(spec.options["fixed"])
        genome = Genome.of(space.complete(space.default))
        builds.append((task, task.build(genome)))
        if task.sanitized and checked is None:
            checked = executor.sanitize(task.request(genome), (), _TRIED_S)
    for task, future in builds:
        build = future.result()
        if build.status is Status.RENDER_ERROR:
            raise TemplateError(build.log)
        if build.status is not Status.OK:
            raise EvoError(
                f"the default genome of kernel {task.problem.name!r} does not compile for {task.workload}"
                f" ({error_line(build.log) or 'it says nothing'}); mend the template, then try: evo check {task.kernel}"
            )
    if checked is not None and isinstance(error := checked.exception(), DeviceError):
        raise DeviceError(f"finalists cannot be sanitized: {error}") from None


def open_executor(
    target: str,
    cache_dir: Path,
    builders: int | None = None,
    devices: str | None = None,
    *,
    name: str = "local",
    scheduler: str = "",
) -> closing[Executor]:
    """Worker processes that start at once: they take seconds to get ready, so open this before anything slow.

    devices: as `choose_devices` has them; of a cluster, a part of the name of the kind that measures. scheduler: see
    `ExecutorConfig`; a cluster's workers have builders of their own. Raises UsageError for more builders than a machine has
    use for.
    """
    cores = os.cpu_count() or 1
    if (builders or 0) > _BUILDERS_A_CORE * cores:
        raise UsageError(
            f"--builders {builders}: this machine has {cores} cores, and more than {_BUILDERS_A_CORE * cores}"
            " compilers would only wait for each other; give at most so many"
        )
    config = ExecutorConfig(
        cache_dir=cache_dir, builders=builders or 1, scheduler=scheduler, devices=(devices or "",)
    )
    if not scheduler:
        chosen = choose_devices(target, devices)
        config = replace(config, builders=builders or _default_builders(target, len(chosen)), devices=chosen)
    return closing(find_executor(name)(target, config))


def choose_devices(target: str, devices: str | None) -> tuple[str, ...]:
    """The devices that candidates are measured on, by their identities; the target's first where none are named.

    devices: "all", or indices: 0,1,3. Raises UsageError for another text, DeviceError where one is missing, or where they
    are not of one kind: their times do not compare.
    """
    if devices is None:
        return ("",)
    indices = devices.split(",")
    if devices != "all" and (not all(i.isascii() and i.isdecimal() for i in indices) or len(set(indices)) < len(indices)):
        raise UsageError(f"--devices {devices!r} is neither all nor different numbers, counted from 0: e.g. 0,1,3")
    found = find_target(target).devices()
    chosen = range(len(found)) if devices == "all" else [int(i) for i in indices]
    if beyond := [i for i in chosen if i >= len(found)]:
        there = f"{len(found)} answer" if len(found) > 1 else "one answers"
        raise DeviceError(f"--devices {devices}: there is no device {beyond[0]} of target {target}: {there}, counted from 0")
    identities, names = list(found), list(found.values())
    if len(kinds := {names[0], *(names[i] for i in chosen)}) > 1:  # the first is what the record describes
        raise DeviceError(
            f"--devices {devices}: times of {' and '.join(sorted(kinds))} do not compare; have this process see devices of"
            " one kind alone (docs/scaling.md)"
        )
    return tuple(identities[i] for i in chosen) if len(found) > 1 else ("",)


def execute(
    run: StoredRun,
    store: Store,
    executor: Executor,
    observer: Observer,
    *,
    on_search: Callable[[Search], None] = lambda search: None,
    on_finals: Callable[[Workload, float], None] = lambda workload, waits_s: None,
) -> Outcome:
    """Carries a new or an interrupted run to its end.

    `on_search` gets the search before it starts, e.g. to connect signals with `Search.interrupt`; `on_finals` each workload
    whose finals begin after it, and, with the seconds that are left for it, each whose finals wait for a quiet machine. The
    finals end by KeyboardInterrupt, and are held anew when the run is resumed.
    Raises StoreError if the kernel is not what the run was started with, or the database fails.
    """
    if load_kernel(run.spec.kernel).digest != run.spec.kernel_digest:
        raise StoreError(
            f"kernel {run.spec.kernel!r} is not what run {run.name!r} recorded: its files have changed, or that evo counted"
            " others among them; start a new run, or check out the files and the evo that it was started with"
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
        finalists = run.spec.options.get("finalists", _FINALISTS)  # runs of before have none
        finals = hold_all_finals(search, run, store, executor, finalists, on_finals)
        store.set_status(run, RunStatus.FINISHED, reason=reason, elapsed_s=search.elapsed_s)
        return Outcome(run=run, reason=reason, search=search, finals=finals)
    except BaseException as error:
        elapsed_s = search.elapsed_s if search else run.elapsed_s
        ended = isinstance(error, KeyboardInterrupt | BrokenPipeError)
        why = StopReason.INTERRUPTED if ended else "stopped by an error"
        with suppress(EvoError):  # if the database itself is what failed, the first error says so
            store.set_status(run, RunStatus.INTERRUPTED, reason=why, elapsed_s=elapsed_s)
        raise


def hold_all_finals(
    search: Search,
    run: StoredRun,
    store: Store,
    executor: Executor,
    count: int,
    begins: Callable[[Workload, float], None] = lambda workload, waits_s: None,
) -> tuple[Finals, ...]:
    """Holds the finals of every task, with `count` finalists; where all are refused, with the next best, but not of a
    covering run.
    begins: see `execute`. Raises LostFileError while they are held, where the database is lost."""
    executor.renew_device()
    workloads = len(run.spec.workloads)
    race_s = search.elapsed_s / (_FINAL_RACES * workloads)
    least_s = min(_LEAST_PATIENCE_S, _SHORT_PATIENCE * search.elapsed_s)
    patience_s = min(max(_PATIENCE * search.elapsed_s, least_s), _MOST_PATIENCE_S) / workloads
    tasks = [
        replace(
            task,
            race_s=race_s,
            reference_us=search.reference_us(n),
            patience=Patience(left_s=patience_s, tell=begins),
            check=store.check,
        )
        for n, task in enumerate(tasks_of(run.spec, executor, Stage.FINAL))
    ]
    if run.spec.options.get("cover"):
        return _hold_covering_finals(search, run, store, tasks, count, begins)
    held = []
    first = [build_all(task, search.elites(number)[:count]) for number, task in enumerate(tasks)]
    for number, (task, building) in enumerate(zip(tasks, first, strict=True)):
        begins(task.workload, 0.0)
        for batch in range(_FINALS_BATCHES):
            if batch:
                building = build_all(task, search.elites(number)[batch * count :][:count])
                if not building:
                    break  # no candidate is left
            finals = end_finals(task, *hold_race(task, building))
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
    begins: Callable[[Workload, float], None],
) -> tuple[Finals, ...]:
    """Where few variants are to serve all tasks. A variant is a genome, whatever is compiled in for a task. Finalists of a
    task are its fastest, and its fastest of those that would be kept by the search's own times; all races are held before it
    is decided which are kept, and the fastest of these is confirmed for each task. A task whose reference is faster than all
    of them is served by that."""
    elites = [search.elites(number) for number in range(len(tasks))]
    dtypes = [task.workload.dtype for task in tasks]
    won = [found if found and (found[0].ratio or 1.0) < 1 else [] for found in elites]
    likely = _few(dtypes, [{c.proposal.genome.digest: c.ratio for c in found if c.ratio} for found in won])
    first, started, races, times = (count + 2) // 3, [], [], []
    for task, found in zip(tasks, elites, strict=True):
        others = sorted(found[first:], key=lambda c: c.proposal.genome.digest not in likely[task.workload.dtype])
        started.append(build_all(task, [*found[:first], *others][:count]))
    for task, building in zip(tasks, started, strict=True):
        begins(task.workload, 0.0)
        races.append(hold_race(task, building))
    for finalists, timings in races:
        timed = {t.contender: t for t in timings if t.ratio is not None}
        raced = [(f, timed[f.name]) for f in finalists if f.passed and f.name in timed]
        faster = any(t.disturbed or (t.ratio_low or 0.0) <= 1 for _, t in raced)  # than the reference, as far as is known
        times.append({f.candidate.proposal.genome.digest: t.ratio for f, t in raced if faster and t.ratio})
    few = _few(dtypes, times)
    held = []
    for number, (task, race) in enumerate(zip(tasks, races, strict=True)):
        kept = few[task.workload.dtype]
        finals = end_finals(task, *race, {f.candidate.order for f in race[0] if f.candidate.proposal.genome.digest in kept})
        _store_finals(store, run, number, finals, search.elapsed_s)
        held.append(finals)
    return tuple(held)


def _few(dtypes: Sequence[str], times: Sequence[Mapping[str, float]]) -> dict[str, list[str]]:
    """The variants to keep of each dtype, many of them those of another."""
    few: dict[str, list[str]] = {}
    for dtype in dict.fromkeys(dtypes):
        own = [known for known, of in zip(times, dtypes, strict=True) if of == dtype]
        few[dtype] = choose(own, preferred=[v for chosen in few.values() for v in chosen])
    return few


def _store_finals(store: Store, run: StoredRun, task: int, finals: Finals, elapsed_s: float) -> None:
    with store.transaction():
        for finalist in finals.finalists:
            store.add_final(run, finalist.candidate.order, finalist.measurement, elapsed_s=elapsed_s)
        store.add_baselines(run, task, finals.baselines, stage=Stage.FINAL)
        # Also None: the winner of earlier finals has not won these.
        store.set_winner(run, task, finals.winner.candidate.order if finals.winner else None)


# -- what a run begins with --------------------------------------------------------------------------------------


def _default_builders(target: str, devices: int = 1) -> int:
    """Builders beside the devices' processes: all cores but one for each; all where they take turns anyway, or nothing can
    be timed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if find_target(target).shares_cores or not answers(target):
        return cores
    return max(1, min(cores - devices, 32 * devices))


_MOST_WORKLOADS = 256


def _points_of(grid: str) -> Iterator[str]:
    """The workloads of a grid: rows=1024/4096,cols=1024,dtype=float16/bfloat16 are four."""
    parts = [part.partition("=") for part in grid.split(",")]
    if bare := next((name for name, equals, _ in parts if not equals), None):
        raise UsageError(f"--cover {grid!r}: {bare!r} has no name; several values of one name are written rows=16/32")
    yield from map(",".join, product(*([f"{n}{equals}{v}" for v in values.split("/")] for n, equals, values in parts)))


def check_workloads(kernel: Kernel, target: str, texts: Sequence[str], grids: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads named and those of grids, or else the kernel's own. Raises what `Kernel.workload` raises."""
    kernel.check_target(target)
    texts = [*texts, *islice((point for grid in grids for point in _points_of(grid)), _MOST_WORKLOADS + 1)]
    if len(texts) > _MOST_WORKLOADS:
        raise UsageError(f"one search has at most {_MOST_WORKLOADS} workloads, and more are asked for: name a smaller grid")
    if not texts:
        return kernel.workloads[target]
    found = tuple(kernel.workload(target, text) for text in texts)
    for workload in found:
        if any(size == 0 for _, size in workload.dims):
            raise UsageError(f"workload {workload.key} is empty: there is nothing to time; give sizes above 0")
    if twice := next((w for w in found if found.count(w) > 1), None):
        raise UsageError(f"a workload is named twice ({twice.key}); name each once")
    return found


def describe_environment(target: AskedTarget) -> Environment:
    """Device, driver, compilers and library versions as they are now. Raises DeviceError."""
    info, compiler = target.device(), target.compiler()
    nvrtc = re.match(r"nvrtc ([0-9.]+)", compiler)
    return Environment(
        device=info.name,
        arch=info.arch,
        driver=info.driver,
        cuda=info.details.get("cuda_driver", ""),
        nvrtc=nvrtc[1] if nvrtc else "",
        compiler=compiler,
        torch=version("torch"),
        python=platform.python_version(),
        evo=__version__,
        details=dict(info.details),
    )
