"""Runs work on the workers of a Dask cluster: builds wherever there are threads, measurements where there is a device.

Each worker process of the cluster that is given a task opens a `LocalExecutor` of its own, so a candidate is built, judged
and ended as it is on one machine. Dask carries requests and results, moves a binary to the device that wants it, once, and
hands the work of a worker that is gone to another. A device is a resource of that name: `dask worker ADDRESS --nthreads 8
--resources device=1` has one, and builds with the other seven threads. Devices of one kind measure for a search; workers
that have others build for it, and may measure for another search at the same time.

A connection that is lost is made again, and what was not answered is asked for again: each request has one answer. Builds
and measurements may so be done twice; a second answer is dropped.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing.process
import pickle
import signal
import threading
import time
import uuid
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from distributed import Client, KilledWorker, get_worker
from distributed.comm.core import CommClosedError

from evo import __version__
from evo.errors import DeviceError, EvoError, UsageError, error_line
from evo.evaluation import Build, Evaluation, Status
from evo.executors import ExecutorConfig, InFlight
from evo.executors._device import deliver, failure
from evo.executors.local import LocalExecutor
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.kernel import Limits
from evo.problem.loading import digest_of, find_kernel, kernel_digest, kernel_files
from evo.sanitize import Sanitized
from evo.targets import DeviceInfo, find_target

_LOG = logging.getLogger("evo")

DEVICE = "device"
"""The resource of a worker that a measurement takes one of."""

_ANSWER_S = 10.0
"""How long a scheduler may take to answer at first, and to give a result that it has."""
_COMING_S, _STARTING_S = 30.0, 120.0
"""How long a worker with a device may take to come, where no cluster is started; and to import what it needs."""
_SETTLING_S = 1.0
"""How long none may have come before a search begins: how many there are then decides how much it has in flight."""
_AWAY_S = 600.0
"""How long a search waits for a scheduler, or for a worker with a device, that is gone."""
_TICK_S = 1.0
_FETCHED_AT_ONCE = 8
"""Results: each takes several messages to the scheduler and back."""
_KEPT_BUILDS = 256
"""Whose binaries stay on the workers that have them."""
_ATTEMPTS = 8
"""Of a request whose workers are lost, most often with others that wait there: a candidate's own faults end no worker."""
_AHEAD = 2
"""Measurements that a worker begins with for each device, as those of a `LocalExecutor`: it has the next one at hand."""

_ELSEWHERE = Build(status=Status.CRASH, arch="", compiler="", source_digest="")
"""In place of a build that goes another way."""


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What a worker needs to know of a search."""

    session: str
    """No other has it."""
    target: str
    version: str
    config: ExecutorConfig
    """`cache_dir`, `builders` and `devices` are the worker's own."""


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """Of a kernel that workers may not have: tens of kilobytes that travel with every request. What a scheduler tells all
    workers at once it waits for, also from one that hangs."""

    name: str
    digest: str
    packed: bytes

    @classmethod
    def of(cls, kernel: str) -> _Folder:
        """Raises UnknownNameError, KernelError."""
        folder = find_kernel(kernel)
        parts = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        files = kernel_files(folder)
        content = {p.relative_to(folder).as_posix(): p.read_bytes() for p in parts} | files
        return cls(name=folder.name, digest=digest_of(files), packed=zlib.compress(pickle.dumps(content)))


@dataclass(kw_only=True, eq=False)
class _Job:
    """A request and the future that waits for its result; the task of the cluster that is at it."""

    request: Request | RaceRequest
    work: tuple[Any, ...]
    """The name of the method of `Executor` that is asked for, and its arguments beyond the request."""
    generation: int = 0
    future: Future[Any] = field(default_factory=Future)
    task: Any = None
    """None where it is to be asked for again."""
    place: str = ""
    """The address of the worker that measures it."""
    attempts: int = 0
    since_s: float = field(default_factory=time.monotonic)

    @property
    def building(self) -> bool:
        return self.work == ("build",)


class DaskExecutor:
    """See `evo.executors.Executor`."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        """Raises UsageError, DeviceError if the cluster cannot be used."""
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters is said here
        self._setup = _Setup(session=uuid.uuid4().hex, target=target, version=__version__, config=config)
        self._client: Any = None
        self._cluster, self._address, wanted = _cluster(config.scheduler)
        self._lock = threading.RLock()
        self._jobs: set[_Job] = set()
        self._generation = self.losses = 0
        self._closed = threading.Event()
        self._settling = ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="evo-dask")
        self._builds: OrderedDict[int, tuple[Build, Any]] = OrderedDict()
        """By identity, with the task of the cluster whose result it is: a binary goes from worker to worker."""
        self._folder = cache(_Folder.of)
        self._kinds: dict[str, str] = {}
        """What the device of each worker that has one is called, by address; empty until it answers, or if it does not."""
        self._kind = ""
        """What those are called that measure; empty before it is decided."""
        self._places: dict[str, int] = {}
        """The number of devices of each worker that measures, by its address."""
        try:
            self._client = _connect(self._address)
            self.builders = self._wait_for_workers(wanted)
            self._kind = self._choose_kind(*config.devices)
            self._find_workers()
            self.devices = sum(self._places.values())
            self.target = _RemoteTarget(target, lambda *question: self._ask([*self._places], *question))
        except BaseException as error:
            self._end_cluster()
            if isinstance(error, EvoError) or not isinstance(error, Exception):
                raise
            raise DeviceError(f"the cluster at {self._address} cannot be used: {_said(error)}") from error
        self._thread = threading.Thread(target=self._watch, name="evo-dask", daemon=True)
        self._thread.start()

    # -- the seam -----------------------------------------------------------------------------------------------------

    def build(self, request: Request) -> Future[Build]:
        return self._submit(_Job(request=request, work=("build",)))

    def measure(self, request: Request) -> Future[Evaluation]:
        return self._submit(_Job(request=request, work=("measure",), generation=self._generation))

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        return self._submit(_Job(request=request, work=("race",), generation=self._generation))

    def sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Future[Sanitized]:
        return self._submit(_Job(request=request, work=("sanitize", tools, limit_s), generation=self._generation))

    def renew_device(self) -> None:
        self._generation += 1

    def in_flight(self) -> tuple[InFlight, ...]:
        """Those that were asked for; the cluster does not tell which of them have begun."""
        now = time.monotonic()
        with self._lock:
            jobs = list(self._jobs)
        found = [
            InFlight(
                genome=job.request.genome,
                workload=job.request.workload,
                stage="asked",
                seconds=now - job.since_s,
                left_s=None,
            )
            for job in jobs
            if isinstance(job.request, Request)
        ]
        return tuple(sorted(found, key=lambda work: -work.seconds))

    def wind_down(self) -> None:
        """Tasks that run go on; nobody waits for those that build."""
        with self._lock:
            dropped = [job for job in self._jobs if job.building]
            self._jobs.difference_update(dropped)
        for job in dropped:
            job.future.cancel()
        with suppress(Exception):  # the connection may be lost
            self._client.cancel([job.task for job in dropped if job.task is not None])

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            jobs = list(self._jobs)
        for job in jobs:
            job.future.cancel()
        self._thread.join()
        ending = threading.Thread(target=self._end_session, args=(jobs,), daemon=True)
        ending.start()
        ending.join(_ANSWER_S)  # a worker that hangs is not waited for
        self._end_cluster()
        self._settling.shutdown(wait=False, cancel_futures=True)

    def _end_session(self, jobs: list[_Job]) -> None:
        with suppress(Exception):  # a cluster that is gone has nothing left to end
            self._client.cancel([job.task for job in jobs if job.task is not None])
            self._client.run(_end_session, self._setup.session, on_error="ignore")

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _submit(self, job: _Job) -> Future[Any]:
        with self._lock:
            if self._closed.is_set():
                job.future.cancel()
                return job.future
            self._jobs.add(job)
            self._send(job)
        return job.future

    def _send(self, job: _Job) -> None:
        """Asks the cluster. Where it cannot be asked now, that is done when the connection is back."""
        with self._lock, suppress(Exception):  # the client has many that say that it is not connected
            setup, request = self._setup, job.request
            folder = self._folder(request.kernel)
            if job.building:
                task: Any = self._client.submit(_build, setup, folder, request, pure=False)
            else:
                builds = [self._task_of(build) for build in _builds_of(request)]
                bare = _with_builds(request, [_ELSEWHERE] * len(builds))
                # Dask would measure it where it was built, and takes a device for as many as the worker has threads.
                waiting = Counter(other.place for other in self._jobs if other.task is not None)
                job.place = min(self._places, key=lambda place: waiting[place] / self._places[place])
                arguments = (setup, folder, bare, builds, job.work, job.generation)
                options = {"workers": [job.place], "resources": {DEVICE: 1 / _AHEAD}, "priority": 1}
                task = self._client.submit(_measure, *arguments, pure=False, **options)
            job.task = task
            task.add_done_callback(lambda done: self._settling.submit(self._settle, job, done))

    def _watch(self) -> None:
        away_s = None
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            try:
                missing = self._missing(0.0 if away_s is None else now - away_s)
            except Exception as error:  # of a client whose connection is lost at that moment
                missing = f"the cluster at {self._address} cannot be used: {_said(error)}"
            if missing and away_s is None:
                _LOG.warning("evo: %s; the search waits for up to %.0f s", missing, _AWAY_S)
            away_s = None if not missing else away_s or now
            if away_s is not None and now - away_s > _AWAY_S:
                self._give_up(f"{missing}, for {_AWAY_S:.0f} s now; what was found so far is kept: resume when it is back")

    def _missing(self, seconds: float) -> str:
        """What keeps the search from going on, for so many seconds now; empty if nothing does. Connects anew where that is
        needed: also in place of a client that says that it is connecting, and has failed to."""
        status = self._client.status
        if status in ("closed", "closing") or (status != "running" and seconds > 2 * _ANSWER_S):
            try:
                self._client = _connect(self._address)
            except EvoError as error:
                return str(error)
            with self._lock:
                self._builds.clear()
                self._kinds.clear()
                for job in self._jobs:
                    job.task = None
        if self._client.status != "running":
            return f"the scheduler at {self._address} does not answer"
        workers, _ = self._find_workers()
        with self._lock:
            for job in self._jobs:
                if job.task is None:
                    self._send(job)
            jobs = list(self._jobs)
        self._client.cancel([job.task for job in jobs if job.task is not None and job.place not in ("", *self._places)])
        if not self._places and not (workers and all(job.building for job in jobs)):
            return f"no worker of the scheduler at {self._address} has a device of the kind {self._kind}"
        return f"the scheduler at {self._address} takes no requests" if any(job.task is None for job in jobs) else ""

    def _give_up(self, reason: str) -> None:
        with self._lock:
            jobs, self._jobs = list(self._jobs), set()
        for job in jobs:
            deliver(job.future, DeviceError(reason))

    def _settle(self, job: _Job, task: Any) -> None:
        """Tells a result; asks again for what was lost with a worker, the scheduler or the connection."""
        if job.task is not task:
            return  # it was asked again since
        result = self._answer(job, task)
        if result is None:
            self.losses += 1
            job.attempts += 1
            if job.attempts < _ATTEMPTS:
                with self._lock:  # what else lay there may be lost, too
                    job.task = None
                    self._builds.clear()
                return
            result = _lost(job, f"{job.attempts} workers that were at this were lost")
        with self._lock:
            self._jobs.discard(job)
            if isinstance(result, Build) and result.binary is not None:
                self._keep(result, task)
        deliver(job.future, result)

    def _answer(self, job: _Job, task: Any) -> object:
        """A result, or an exception that the job ends with; None if the job is to be asked for again."""
        error: BaseException | None = None
        with suppress(Exception):  # it is lost on its way
            if task.status == "finished":
                return task.result(timeout=_ANSWER_S)
            error = task.exception(timeout=_ANSWER_S) if task.status == "error" else None
        if error is None or isinstance(error, KilledWorker | CancelledError | CommClosedError):  # its worker was ending
            return None
        return error if isinstance(error, EvoError) else DeviceError(f"a worker of {self._address} fails: {_said(error)}")

    # -- what stays on the workers ------------------------------------------------------------------------------------

    def _keep(self, build: Build, task: Any) -> None:
        self._builds[id(build)] = build, task
        self._builds.move_to_end(id(build))
        while len(self._builds) > _KEPT_BUILDS:
            self._builds.popitem(last=False)

    def _task_of(self, build: Build) -> Any:
        """The task whose result it is; one that makes it from what is sent along, where there is none."""
        _, task = self._builds.get(id(build), (None, None))
        if task is None:
            task = self._client.submit(_same, build, pure=False)
        self._keep(build, task)
        return task

    # -- the cluster --------------------------------------------------------------------------------------------------

    def _find_workers(self) -> tuple[int, int]:
        """How many there are, and their threads. Finds those that measure: all with a device, before a kind is chosen."""
        found = self._client.scheduler_info(n_workers=-1)["workers"]
        devices = {a: n for a, worker in found.items() if (n := int(worker["resources"].get(DEVICE, 0)))}
        for gone in self._kinds.keys() - devices.keys():
            del self._kinds[gone]
        for address in devices.keys() - self._kinds.keys() if self._kind else ():
            asked = self._client.submit(_question, self._setup.target, "device", workers=[address], pure=False, priority=2)
            self._kinds[address] = ""
            asked.add_done_callback(lambda done, of=address: self._settling.submit(self._note_kind, of, done))
        self._places = {a: n for a, n in devices.items() if self._kinds.get(a, "") == self._kind}
        return len(found), sum(worker["nthreads"] for worker in found.values())

    def _note_kind(self, address: str, asked: Any) -> None:
        try:
            self._kinds[address] = asked.result(timeout=_ANSWER_S).name
        except EvoError:
            pass  # it has no such device, and builds
        except Exception:  # its answer is lost: it is asked again
            self._kinds.pop(address, None)

    def _choose_kind(self, named: str) -> str:
        """Of the workers' devices the kind that the text names, or a part of one; all may be of one kind where it is empty.
        Raises UsageError, and what they answer if none has a device that the target can use."""
        asking = ThreadPoolExecutor(len(self._places))
        tasks = {address: asking.submit(self._ask, [address], "device") for address in self._places}
        asking.shutdown()
        for address, task in tasks.items():
            if task.exception() is None:
                self._kinds[address] = task.result().name
        if not self._kinds:
            next(iter(tasks.values())).result()
        names = sorted(set(self._kinds.values()))
        fitting = [named] if named in names else [name for name in names if named.lower() in name.lower()]
        if len(fitting) == 1:
            return fitting[0]
        has = f"the workers of {self._address} have {' and '.join(names)}"
        if not fitting:
            raise UsageError(f"--devices {named!r}: {has}")
        measures = f"name the kind that is to measure, e.g. --devices {names[0]!r}"
        raise UsageError(f"{has}, whose times do not compare: {measures}; workers that have others build for it")

    def _wait_for_workers(self, wanted: int) -> int:
        """Until there are as many as wanted, of which one has a device: how many builders. Raises DeviceError if none comes
        that has one, UsageError for one of another version."""
        before, settled_s = 0, math.inf
        deadline = time.monotonic() + _COMING_S
        while True:
            count, threads = self._find_workers()
            if count != before:  # others that were started with it are still on their way
                before, settled_s = count, time.monotonic() + _SETTLING_S
            settled = self._cluster is not None or time.monotonic() > settled_s
            if self._places and count >= wanted and settled:
                break
            if self._cluster is not None and count < wanted:  # they may have to queue for hours
                deadline = time.monotonic() + _COMING_S
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"no worker of the scheduler at {self._address} has a device: start one beside each, with"
                    f" dask worker {self._address} --nthreads 8 --resources {DEVICE}=1; of a cluster that is started, its"
                    " options say so (docs/scaling.md)"
                )
            time.sleep(0.1)
        for worker, answer in self._client.run(_version, on_error="return").items():
            if isinstance(answer, Exception):
                lacks = f"the worker at {worker} cannot import evo ({_said(answer)})"
                raise DeviceError(f"{lacks}: install evo {__version__} there")
            _check_version(answer, worker)
        if self._cluster is not None:
            self._client.run(_leave_interrupts, on_error="ignore")
        return max(1, threads - sum(self._places.values()))

    def _ask(self, workers: list[str], *question: str) -> Any:
        """What the target of one of these workers answers. Raises what it raises."""
        asked = self._client.submit(_question, self._setup.target, *question, workers=workers, pure=False, priority=2)
        try:
            return asked.result(timeout=_STARTING_S)
        except EvoError:
            raise
        except Exception as error:
            raise DeviceError(f"no worker of {self._address} with a device answers: {_said(error)}") from error

    def _end_cluster(self) -> None:
        with suppress(Exception):
            if self._client is not None:
                self._client.close(timeout=_ANSWER_S)
        if self._cluster is not None:
            with suppress(Exception):
                self._cluster.close(timeout=_ANSWER_S)


def _leave_interrupts() -> None:
    """A terminal's ^C reaches the processes of a local cluster, too: it is for the command, which ends them."""
    with suppress(ValueError):  # a worker that is a thread of the command
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _RemoteTarget:
    """See `evo.executors.AskedTarget`. Each question is asked once."""

    def __init__(self, name: str, ask: Callable[..., Any]) -> None:
        self.name, self._answer = name, cache(ask)

    def device(self) -> DeviceInfo:
        return cast(DeviceInfo, self._answer("device"))

    def limits(self, arch: str) -> Limits:
        return cast(Limits, self._answer("limits", arch))

    def runs(self, arch: str) -> str:
        return cast(str, self._answer("runs", arch))

    def compiler(self) -> str:
        return cast(str, self._answer("compiler"))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_line(str(error))}"


def _cluster(scheduler: str) -> tuple[Any, str, int]:
    """A cluster that is started, if a file describes one, the address of its scheduler, and how many workers to wait for.
    Raises UsageError."""
    if not scheduler.endswith((".yaml", ".yml")):
        return None, scheduler, 1
    cluster = None
    try:
        job = yaml.safe_load(Path(scheduler).read_text())
        wanted = int(job.get("workers", 1))
        if unknown := job.keys() - {"cluster", "options", "workers"}:
            raise ValueError(f"unknown {', '.join(map(str, unknown))}")
        module, _, name = job["cluster"].rpartition(".")
        cluster = getattr(importlib.import_module(module), name)(**job.get("options", {}))
        if "workers" in job:
            cluster.scale(wanted)
    except Exception as error:  # of whichever class of cluster
        if cluster is not None:
            cluster.close()
        raise UsageError(
            f"--on {scheduler} starts no cluster ({_said(error)}): it needs cluster: distributed.LocalCluster or"
            " another class, options: its arguments, workers: how many"
        ) from error
    return cluster, cluster.scheduler_address, wanted


def _connect(address: str) -> Any:
    """A client. Raises DeviceError."""
    make: Any = Client
    try:
        return make(address, timeout=_ANSWER_S, set_as_default=False, name="evo")
    except Exception as error:  # a name that no resolver knows, a port that nobody listens at, a certificate
        raise DeviceError(f"the scheduler at {address} does not answer ({_said(error)})") from error


def _builds_of(request: Request | RaceRequest) -> list[Build]:
    """Those that it is sent with."""
    if isinstance(request, RaceRequest):
        return [build for _, _, build in request.contenders]
    beside = request.incumbent.build if request.incumbent is not None else None
    return [build for build in (request.build, beside) if build is not None]


def _with_builds(request: Any, builds: list[Build]) -> Any:
    """The request with these in place of `_builds_of`."""
    rest = iter(builds)
    if isinstance(request, RaceRequest):
        return replace(request, contenders=tuple((name, genome, next(rest)) for name, genome, _ in request.contenders))
    incumbent, build = request.incumbent, next(rest) if request.build is not None else None
    if incumbent is not None and incumbent.build is not None:
        incumbent = replace(incumbent, build=next(rest))
    return replace(request, build=build, incumbent=incumbent)


def _lost(job: _Job, log: str) -> Build | Evaluation | RaceResult | DeviceError:
    if job.building:
        assert isinstance(job.request, Request)
        return Build(status=Status.CRASH, arch=job.request.arch, compiler="", source_digest="", log=log)
    if job.work[0] == "sanitize":
        return DeviceError(log)
    return failure(job.request, Status.CRASH, log)


def _check_version(version: str, worker: str) -> None:
    if version != __version__:
        raise UsageError(f"the worker at {worker} has evo {version}, and this is {__version__}: install the same there")


# -- in a worker of the cluster -------------------------------------------------------------------------------------

_opening = threading.Lock()
_open: dict[str, LocalExecutor] = {}
"""By target."""
_sessions: dict[str, int] = {}
"""Those that use one, with the generation of its devices."""
_ended: set[str] = set()


def _version() -> str:
    return __version__


def _same(value: Any) -> Any:
    return value


def _question(target: str, question: str, *arguments: str) -> Any:
    return getattr(find_target(target), question)(*arguments)


def _executor(setup: _Setup, generation: int) -> LocalExecutor:
    """Raises UsageError, DeviceError."""
    with _opening:
        worker = get_worker()
        if setup.session in _ended:
            raise CancelledError
        if setup.session not in _sessions:
            _check_version(setup.version, worker.address)
        if setup.target not in _open:
            # A nanny's worker may have no children, lest they outlive it; these end with it (`end_with_command`).
            getattr(multiprocessing.process.current_process(), "_config")["daemon"] = False  # noqa: B009
            count = int(worker.state.total_resources.get(DEVICE, 0))
            devices = ("",) if count == 1 else tuple(find_target(setup.target).devices())[:count] if count else ()
            if len(devices) < count:
                raise DeviceError(f"the worker at {worker.address} offers {count} devices, and has {len(devices)}")
            config = replace(
                setup.config,
                cache_dir=_local_folder() / "cache",
                builders=max(1, worker.state.nthreads - count),
                devices=devices,
            )
            _open[setup.target] = LocalExecutor(setup.target, config)
        executor = _open[setup.target]
        if generation > _sessions.setdefault(setup.session, 0):
            _sessions[setup.session] = generation
            executor.renew_device()
        return executor


def _end_session(session: str) -> None:
    """The last one ends what they have used. Not in this thread, which answers the scheduler."""
    with _opening:
        _ended.add(session)
        if _sessions.pop(session, None) is not None and not _sessions:
            for executor in _open.values():
                threading.Thread(target=executor.close, daemon=True).start()
            _open.clear()


def _local_folder() -> Path:
    return Path(get_worker().local_directory) / "evo"


@cache
def _unpacked(sent: _Folder) -> str:
    """The folder of a kernel on this worker, with what it shares with others. Raises UsageError if it would use more that
    is shared here."""
    folder = _local_folder() / sent.digest / sent.name
    for name, data in pickle.loads(zlib.decompress(sent.packed)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    if kernel_digest(folder) != sent.digest:
        raise UsageError(
            f"the worker at {get_worker().address} has other templates than this machine, which kernel"
            f" {sent.name!r} shares: install the same evo there"
        )
    return str(folder)


def _local(request: Any, folder: _Folder) -> Any:
    """The request with the kernel as this worker finds it."""
    with _opening:
        return replace(request, kernel=_unpacked(folder))


def _build(setup: _Setup, folder: _Folder, request: Request) -> Build:
    return _executor(setup, 0).build(_local(request, folder)).result()


def _measure(
    setup: _Setup, folder: _Folder, request: Any, builds: list[Build], work: tuple[Any, ...], generation: int
) -> Any:
    (method, *arguments), executor = work, _executor(setup, generation)
    return getattr(executor, method)(_with_builds(_local(request, folder), builds), *arguments).result()


EXECUTOR = DaskExecutor
