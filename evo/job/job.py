"""A search as it is asked for: a frozen `Job`, which the command, a job file and `evo.search` each make by `make_job`."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, get_type_hints

from evo.discovery import full_path
from evo.errors import DeviceError, UnknownNameError, UsageError
from evo.executors import AskedTarget, Executor
from evo.executors._worker import run_with_kernel
from evo.job.values import check_seed, draw_seed, own_files, prefix_of, read_sampler_options, split_pairs
from evo.lineage import RunSpec
from evo.lineage.write import check_run_name
from evo.measure.cases import missing_kinds
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Value, parse_number
from evo.report.text import parse_duration
from evo.search.finals import FINALISTS
from evo.search.loop import Budget, default_max_in_flight
from evo.search.place import HERE, Place, choose_devices, default_builders
from evo.search.samplers import find_sampler
from evo.targets import answers, find_target, targets_by_rank

_DEFAULT_BUDGET = Budget(seconds=60.0)
_MOST_WORKLOADS = 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """A search that is to be carried out. Raises UsageError for what no search can be."""

    kernel: Kernel
    kernel_name: str
    """The name by which workers find the kernel, or the path of its folder."""
    target: str
    arch: str | None = None
    """The device's own where it is None."""
    workloads: tuple[Workload, ...]
    cover: bool = False
    """Few variants are to serve all workloads."""
    budget: Budget = _DEFAULT_BUDGET
    sampler: str = "evolution"
    sampler_options: Mapping[str, object] = field(default_factory=dict)
    seed: int
    fixed: Mapping[str, Value] = field(default_factory=dict)
    """Parameters that are held at one value; a value may be written as text."""
    starts: tuple[str, ...] = ()
    """What is tried first, before the default: see `evo.job.starts.read_starts`."""
    cold: bool = False
    """The search begins with nothing that earlier runs found."""
    place: Place = HERE
    finalists: int = FINALISTS
    """Candidates of each workload that are timed again."""
    sanitize_finals: bool = False
    """Each finalist is run under the device's memory checker, and not the winner alone."""
    name: str | None = None
    log: Path | None = None
    """File to which what happens is appended."""
    shipped: Mapping[str, object] = field(default_factory=dict)
    """How the shipped package of the kernel did on this device; the run keeps it."""

    def __post_init__(self) -> None:
        self.kernel.check_target(self.target)
        find_sampler(self.sampler)
        check_seed(self.seed)
        if self.finalists < 1:
            raise UsageError(f"finalists must be at least 1, got {self.finalists}")
        if self.name is not None:
            check_run_name(self.name)


# -- what a user says ---------------------------------------------------------------------------------------------


_Text: TypeAlias = str | Path | None
_Time: TypeAlias = str | float | None
_Number: TypeAlias = int | None
_Texts: TypeAlias = Sequence[str] | None
_Table: TypeAlias = Mapping[str, object] | None
_Pairs: TypeAlias = Sequence[str] | Mapping[str, Value] | None


class Options(TypedDict, total=False):
    """What a search may be told: the options of the command, the keys of a job file and the arguments of `evo.search`. None
    is what is left out."""

    target: _Text
    arch: _Text
    workloads: _Texts
    cover: _Texts
    budget: _Time
    evaluations: _Number
    patience: _Number
    sampler: _Text
    sampler_options: _Table
    seed: _Number
    fix: _Pairs
    start: _Texts
    cold: bool
    builders: _Number
    devices: _Text
    on: _Text
    finalists: _Number
    sanitize_finals: bool
    name: _Text
    log: _Text


OPTIONS = get_type_hints(Options)
_WANTED = {bool: "true or false", _Number: "a whole number", _Text: "a single value", _Time: "a single value"}
_WANTED |= {_Texts: "a list of texts", _Pairs: "a list of texts", _Table: "a table"}
_REPLACED = ("executor", "scheduler", "cluster")


def read_options(told: Mapping[str, object], known: Collection[str] = OPTIONS) -> dict[str, Any]:
    """The values of the options that were given. known: see `read_option`. Raises UsageError."""
    return {name: read_option(name, value, known) for name, value in told.items() if value not in (None, (), [], {})}


def read_option(name: str, value: object, known: Collection[str] = OPTIONS) -> Any:
    """The value of one option, which may come out of a job file. known: the options that there are. Raises UsageError for a
    name that is none of these, and for what the option cannot be."""
    if name in _REPLACED:
        raise UsageError(
            f"{name} is no option any more; say where work runs with on: 'local', the address of a Dask scheduler such as"
            " 'tcp://HOST:8786', or a FILE.yaml that describes a Dask cluster to start"
        )
    if name not in known:
        raise UnknownNameError("option", name, known)
    if value in ("", (), [], {}) or (isinstance(value, list | tuple) and "" in value):
        raise UsageError(f"{name} {'holds an empty text' if value else 'is empty'}; leave it out, or give it a value")
    if (read := _read(OPTIONS[name], value)) is None:
        raise UsageError(f"{name} must be {_WANTED[OPTIONS[name]]}, got {value!r}")
    return read


def _read(kind: Any, value: object) -> Any:
    """A value as an option of this type has it, whether it is written as text or not; None for what it cannot be."""
    match value:
        case bool():
            return value if kind is bool else None
        case str() if kind == _Number:
            with suppress(ValueError):
                return parse_number(value, int)
        case int() if kind == _Number:
            return value
        case str() | int() | float() | Path() if kind in (_Text, _Time):
            return str(value)
        case list() | tuple() if kind in (_Texts, _Pairs):
            return tuple(map(str, value))
        case Mapping() if kind in (_Table, _Pairs):
            return dict(value)
    return None


def make_job(kernel: str | Path | Kernel, told: Mapping[str, object]) -> Job:
    """The search of a kernel that these options describe: of the best target present, if none is named.

    kernel: its name, its folder, or one that was loaded from a folder. Raises UsageError.
    """
    given = read_options(told)
    budget, place = read_budget(given) or _DEFAULT_BUDGET, read_place(given)
    if isinstance(kernel, Kernel):
        if kernel.folder == Path():
            raise UsageError(
                f"kernel {kernel.name!r} was not loaded from a folder, and worker processes load it from there: write it to"
                " FOLDER/kernel.py as KERNEL, and search that folder"
            )
        kernel = kernel.folder
    problem = load_kernel(name := os.fspath(kernel))
    target = choose_target(problem, given.get("target"), given.get("arch"), place)
    sampler, own = full_path(given.get("sampler", Job.sampler)), read_sampler_options(given.get("sampler_options", {}))
    same = ("arch", "cold", "finalists", "sanitize_finals", "name")
    return Job(
        kernel=problem,
        kernel_name=name,
        target=target,
        workloads=check_workloads(problem, target, given.get("workloads", ()), given.get("cover", ())),
        cover="cover" in given,
        budget=budget,
        sampler=sampler,
        sampler_options={n.removeprefix(prefix_of(sampler)): v for n, v in own.items()},
        seed=draw_seed(given.get("seed")),
        fixed=fix if isinstance(fix := given.get("fix", {}), Mapping) else split_pairs(fix, "--fix"),
        starts=given.get("start", ()),
        place=place,
        log=Path(given["log"]) if "log" in given else None,
        **{name: given[name] for name in same if name in given},
    )


def read_budget(given: Mapping[str, Any]) -> Budget | None:
    """The budget of these options; None where no limit is given. Raises UsageError."""
    limits = {name: given[name] for name in ("evaluations", "patience") if name in given}
    if "budget" in given:
        limits["seconds"] = parse_duration(given["budget"])
    return Budget(**limits) if limits else None


def read_place(given: Mapping[str, Any]) -> Place:
    """Raises UsageError."""
    return Place(**{name: given[name] for name in ("on", "devices", "builders") if name in given})


# -- targets and workloads ----------------------------------------------------------------------------------------


def choose_target(kernel: Kernel, target: str | None, arch: str | None, place: Place) -> str:
    """The target named, else that of the architecture, the only one of the kernel, or the best one present. Raises
    UsageError for one that the kernel has no template for; DeviceError if nothing was named and nothing is present."""
    if target is None and arch:
        owners = [t for t in map(find_target, targets_by_rank()) if t.owns(arch)]
        own = [t.name for t in owners if t.name in kernel.dtypes]
        devices = [t.name for t in owners if not t.shares_cores]  # the machine's cores own whatever no device does
        target = next(iter(own + devices), None)
    if target is None and len(kernel.dtypes) == 1:  # whether such a device is present or not
        (target,) = kernel.dtypes
    elif target is None and place.is_elsewhere:
        target = next(name for name in targets_by_rank() if name in kernel.dtypes)
    target = find_target(target or _best_present()).name
    kernel.check_target(target)
    return target


def _best_present() -> str:
    """cuda where a GPU answers, else cpu."""
    for candidate in targets_by_rank():
        if answers(candidate):
            return candidate
    raise DeviceError("neither a CUDA GPU nor a C++ compiler answers here; see: evo doctor")


def choose_arch(target: AskedTarget, arch: str | None) -> str:
    """The architecture named, else the device's own. Raises UsageError for one that is not known."""
    arch = arch or target.device().arch
    target.limits(arch)
    return arch


def load_context(name: str, target: str | None, arch: str | None) -> tuple[Kernel, str, str]:
    """A kernel with the target and the architecture that it is looked at for on this machine. Raises what `load_kernel`,
    `choose_target` and `choose_arch` raise."""
    kernel = load_kernel(name)
    chosen = choose_target(kernel, target, arch, HERE)
    return kernel, chosen, choose_arch(find_target(chosen), arch)


def _points_of(grid: str) -> Iterator[str]:
    """The workloads of a grid: rows=1024/4096,cols=1024,dtype=float16/bfloat16 are four."""
    parts = [part.partition("=") for part in grid.split(",")]
    if bare := next((name for name, equals, _ in parts if not equals), None):
        raise UsageError(f"--cover {grid!r}: {bare!r} has no name; several values of one name are written rows=16/32")
    yield from map(",".join, product(*([f"{n}{equals}{v}" for v in values.split("/")] for n, equals, values in parts)))


def check_workloads(kernel: Kernel, target: str, texts: Sequence[str], grids: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads named and those of grids, or else the kernel's own. Raises what `Kernel.workload` raises."""
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


# -- the record of a run ------------------------------------------------------------------------------------------


def plan_run(job: Job, starts: Sequence[tuple[str, Mapping[str, Value]]] = (), workers: Executor | None = None) -> RunSpec:
    """The record from which a run can be carried out, and continued. job: with its architecture, and fixed values as the
    parameters have them. starts: points to try first, each behind where it comes from. workers: of a cluster, if the search
    is not on this machine.

    What the gate's data are drawn with comes from the operating system: nobody can have fitted a kernel to them.
    """
    assert job.arch is not None
    devices = workers.devices if workers else len(choose_devices(job.target, job.place.devices))
    builders = workers.builders if workers else job.place.builders or default_builders(job.target, devices)
    files = own_files(job.sampler, job.sampler_options)
    lacking = run_with_kernel(missing_kinds, job.kernel_name, job.kernel.digest, job.target, job.workloads)
    return RunSpec(
        kernel=job.kernel_name,
        kernel_digest=job.kernel.digest,
        target=job.target,
        arch=job.arch,
        sampler=job.sampler,
        seed=job.seed,
        max_in_flight=default_max_in_flight(builders, devices),
        workloads=job.workloads,
        options={
            "sampler": dict(job.sampler_options),
            "fixed": dict(job.fixed),
            "starts": [dict(point) for _, point in starts],
            "origins": [origin for origin, _ in starts],
            "gate_seed": int.from_bytes(os.urandom(4)),
            "finalists": job.finalists,
            **({"files": files} if files else {}),
            **({"given": True} if job.starts else {}),
            **({"cover": True} if job.cover else {}),
            **({"sanitize_finals": True} if job.sanitize_finals else {}),
            **({"missing_kinds": lacking} if lacking else {}),
            **({"shipped": dict(job.shipped)} if job.shipped else {}),
        },
        budget=asdict(job.budget),
        name=job.name,
    )
