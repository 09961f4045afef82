"""A job, or a run that is to be continued, with the database and the workers that carry it out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace

from evo.analysis.runs import find_best
from evo.discovery import check_files
from evo.environment import cache_dir
from evo.errors import DeviceError, StoreError, UnknownNameError, UsageError
from evo.executors import AskedTarget, Executor, device_name
from evo.job.job import Job, choose_arch, plan_run, read_options
from evo.job.starts import known_starts, open_recorded, read_starts
from evo.job.values import read_values
from evo.lineage import RunSpec, RunStatus, StoredRun
from evo.lineage.database import check_folder
from evo.lineage.store import Store
from evo.problem.loading import find_kernel, load_kernel
from evo.problem.space import Value
from evo.report.progress import check_log
from evo.search.loop import Budget
from evo.search.place import HERE, Place, open_workers, search_here
from evo.search.run import check_default, describe_environment
from evo.search.samplers import find_sampler
from evo.search.tasks import OpenRun
from evo.targets import find_target


@contextmanager
def open_search(job: Job, db: str, tell: Callable[[str], None]) -> Iterator[OpenRun]:
    """A new run that is ready to be carried out. tell: is called with what its user should know before. Raises what
    `check_early`, `configure` and `check_default` raise."""
    check_early(job, db)
    with ExitStack() as opened:
        elsewhere = opened.enter_context(_open_elsewhere(job.place, job.target, db, tell))
        spec = configure(job, db, tell, elsewhere)
        workers = elsewhere or _open_here(opened, job.target, db, job.place, tell)
        store = opened.enter_context(Store.open(db, write=True))
        check_default(job.kernel, workers, spec)
        run = store.create_run(spec, describe_environment(workers.target, spec.arch))
        yield OpenRun(run=run, kernel=job.kernel, store=store, executor=workers)


@contextmanager
def open_again(
    run: str, db: str, tell: Callable[[str], None], *, budget: Budget | None = None, place: Place = HERE
) -> Iterator[OpenRun]:
    """A run that is ready to be continued. budget, tell: see `prolong` and `open_search`. Raises what `prolong` raises."""
    with ExitStack() as opened:
        store = opened.enter_context(Store.open(db, write=True, create=False))
        spec = store.run(run).spec
        check_files(spec.options.get("files", {}))
        elsewhere = opened.enter_context(_open_elsewhere(place, spec.target, db, tell))
        stored = prolong(store, run, budget, elsewhere.target if elsewhere else find_target(spec.target))
        kernel = load_kernel(spec.kernel)
        workers = elsewhere or _open_here(opened, spec.target, db, place, tell)
        yield OpenRun(run=stored, kernel=kernel, store=store, executor=workers)


def _open_here(opened: ExitStack, target: str, db: str, place: Place, tell: Callable[[str], None]) -> Executor:
    """The workers of a search on this machine."""
    workers = opened.enter_context(open_workers(target, cache_dir(db), place))
    opened.enter_context(search_here(target, tell))
    return workers


@contextmanager
def _open_elsewhere(place: Place, target: str, db: str, tell: Callable[[str], None]) -> Iterator[Executor | None]:
    """The workers of a cluster, which is asked what its devices are; None where the search is on this machine."""
    if not place.is_elsewhere:
        yield None
        return
    for remark in place.remarks:
        tell(remark)
    with open_workers(target, cache_dir(db), place) as executor:
        yield executor


def find_begun(job: Job, told: Mapping[str, object], db: str, tell: Callable[[str], None]) -> StoredRun | None:
    """The run of the job's name, if the database has one. told: the options that make the job. Raises UsageError if that run
    is of another kernel, or differs in what is told."""
    found = None
    with open_recorded(db, tell) as store, suppress(UnknownNameError):
        found = store.run(job.name) if store is not None and job.name is not None else None
    if found is None or found.name != job.name:
        return None
    spec, given = found.spec, read_options(told)
    if job.kernel.folder != find_kernel(spec.kernel):
        raise UsageError(f"the database has a run {found.name!r} of another kernel ({spec.kernel}); choose another name")
    workloads = " and ".join(workload.key for workload in spec.workloads)
    asked: dict[str, tuple[object, object, object]] = {
        "target": (job.target, spec.target, spec.target),
        "workloads": ("cover" in given or job.workloads, "cover" in given or spec.workloads, workloads),
        "cover": ((job.cover, job.workloads), (spec.options.get("cover", False), spec.workloads), workloads),
        "sampler": (job.sampler, spec.sampler, spec.sampler),
        "seed": (job.seed, spec.seed, spec.seed),
        "arch": (job.arch, spec.arch, spec.arch),
        "finalists": (job.finalists, had := spec.options["finalists"], had),
        "sampler_options": (dict(job.sampler_options), had := spec.options["sampler"], had or "none"),
        "fix": (_written(job.fixed), _written(had := spec.options["fixed"]), had or "none"),
    }
    for name, (now, before, shown) in asked.items():
        if name in given and now != before:
            raise UsageError(
                f"the database has a run {found.name!r} with another value of {name} ({shown}); choose another name, or ask"
                " for the same"
            )
    return found


def _written(values: Mapping[str, Value]) -> dict[str, str]:
    return {name: str(value).lower() for name, value in values.items()}


def check_early(job: Job, db: str, *, taken: bool = True) -> None:
    """Raises UsageError for what can be seen to be wrong without a device or a compiler. taken: also for the name of a run
    that the database has."""
    check_log(job.log)
    Store.check_writable(db, job.name if taken else None)
    check_folder(cache_dir(db), "EVO_CACHE")


def configure(job: Job, db: str, tell: Callable[[str], None], elsewhere: Executor | None = None) -> RunSpec:
    """The record of the run that a job asks for. elsewhere: the workers of a cluster, if it is not for this machine. Raises
    UsageError for what cannot be searched."""
    target = elsewhere.target if elsewhere else find_target(job.target)
    arch = choose_arch(target, job.arch)
    if reason := target.runs(arch):
        raise DeviceError(
            f"{reason}: search where it does, or check that it compiles with: evo check {job.kernel_name} --arch {arch}"
            f" --target {job.target}"
        )
    limits = target.limits(arch)
    fixed = read_values(job.fixed, job.kernel.space(job.target, job.workloads[0], limits))
    spaces = [job.kernel.space(job.target, workload, limits).restricted(fixed) for workload in job.workloads]
    if job.starts:
        starts = read_starts(job.starts, job.kernel, job.target, spaces, db)
    else:
        starts = () if job.cold else known_starts(job, device_name(target, arch), spaces, db, tell)
    find_sampler(job.sampler)(spaces[0], 0, job.sampler_options)  # refuses bad options before anything starts
    return plan_run(replace(job, arch=arch, fixed=fixed), starts, elsewhere)


def prolong(store: Store, run: str, limit: Budget | None, target: AskedTarget) -> StoredRun:
    """The run of that name as it is to be continued, with a new budget for the run as a whole, if one is given. Without one,
    a finished run is continued where the machine was too busy to measure a winner: the finals are held again.

    target: where it is to be. Raises UsageError for a budget that is used up, StoreError for a run that is finished or was
    measured elsewhere.
    """
    stored = store.run(run)
    finished, had = stored.status is RunStatus.FINISHED, Budget(**stored.spec.budget)
    if limit is not None and not finished and (limit.seconds, limit.evaluations) == (had.seconds, had.evaluations):
        limit = None  # the same command again
    elif limit is None and finished and not any(b.disturbed for b in find_best(store, run=run)):
        raise StoreError(
            f"run {stored.name!r} is finished ({stored.stop_reason}); to search on, give it a larger --budget or"
            " --evaluations"
        )
    if limit is not None and limit.seconds is not None and limit.seconds <= stored.elapsed_s:
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
    then, now = run.environment, describe_environment(target, run.spec.arch)
    for name in ("device", "driver", "compiler", "torch"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            raise StoreError(
                f"run {run.name!r} was measured with {name} {before!r}, and now it is {after!r}: their times do not"
                " mix; start a new run"
            )
