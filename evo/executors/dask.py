"""Runs work on the workers of a Dask cluster: builds wherever there are threads, measurements where there is a device.

Each worker process of the cluster that is given a task opens a `LocalExecutor` of its own, so a candidate is built, judged
and ended as it is on one machine. Dask carries requests and results, and hands the work of a worker that is gone to another.
A device is a resource of that name: `dask worker ADDRESS --nthreads 8 --resources device=1` has one, and builds with the
other seven threads. Devices of one kind measure for a search; workers that have other kinds build for it, and may measure
for another search at the same time.

A lost connection is made again, and every request without an answer is sent again. A build or a measurement may therefore
be done twice; the second answer is dropped.
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
from collections import Counter
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
"""Longest wait for a scheduler's first answer, and for a result that it has."""
_COMING_S, _STARTING_S = 30.0, 120.0
"""Longest wait for a first worker with a device, where no cluster is started; and for a worker to import the engine."""
_SETTLING_S = 1.0
"""A search begins when no worker has come for so long: the number of workers then decides how much it has in flight."""
_AWAY_S = 600.0
"""Longest wait for a scheduler, or for a worker with a device, that is gone."""
_TICK_S = 1.0
_FETCHED_AT_ONCE = 8
"""Number of results that are fetched in parallel: each takes several messages to the scheduler and back."""
_ATTEMPTS = 8
"""Number of lost workers after which a request is given up. Most are lost to other work: a candidate ends no worker."""
_AHEAD = 2
"""Number of measurements that a worker has at hand for each device, as a `LocalExecutor` has."""


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """A search, as its workers know it. `session` is unique. `config`: a worker replaces `cache_dir`, `builders` and
    `devices` by its own."""

    session: str
    target: str
    version: str
    config: ExecutorConfig


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """The files of a kernel, which workers may not have: tens of kilobytes that travel with every request. A scheduler that
    tells all workers at once waits for each of them, also for one that hangs."""

    name: str
    digest: str
    packed: bytes

    @classmethod
    def of(cls, kernel: str) -> _Folder:
        """Raises UnknownNameError, KernelError."""
        folder = find_kernel(kernel)
        files = kernel_files(folder)
        return cls(name=folder.name, digest=digest_of(files), packed=zlib.compress(pickle.dumps(files)))


@dataclass(kw_only=True, eq=False)
class _Job:
    """A request, the future that waits for its result, and the task of the cluster that makes it.

    work: name of a method of `Executor`, and its arguments beyond the request. task: None if it is to be sent again. place:
    address of the worker that measures it.
    """

    request: Request | RaceRequest
    work: tuple[Any, ...]
    generation: int = 0
    future: Future[Any] = field(default_factory=Future)
    task: Any = None
    place: str = ""
    attempts: int = 0
    since_s: float = field(default_factory=time.monotonic)

    @property
    def building(self) -> bool:
        return self.work == ("build",)


class DaskExecutor:
    """The executor of a Dask cluster."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        """Raises UsageError, DeviceError if the cluster cannot be used."""
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # whatever matters to a search is reported here
        self._setup = _Setup(session=uuid.uuid4().hex, target=target, version=__version__, config=config)
        self._client: Any = None
        self._cluster, self._address, wanted = _cluster(config.scheduler)
        self._lock = threading.RLock()
        self._jobs: set[_Job] = set()
        self._generation = self.losses = 0
        self._closed = threading.Event()
        self._settling = ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="evo-dask")
        self._folder = cache(_Folder.of)
        self._kinds: dict[str, str] = {}
        """Name of each worker's device, by the worker's address; empty until the worker answers."""
        self._kind = ""
        """Name of the devices that measure; empty before it is decided."""
        self._places: dict[str, int] = {}
        """Number of devices of each worker that measures, by the worker's address."""
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
        """All candidates that were sent; the cluster does not tell which of them have begun."""
        now = time.monotonic()
        with self._lock:
            sent = sorted(((now - job.since_s, job.request) for job in self._jobs), key=lambda work: -work[0])
        return tuple(
            InFlight(genome=request.genome, workload=request.workload, stage="asked", seconds=seconds, left_s=None)
            for seconds, request in sent
            if isinstance(request, Request)
        )

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
        """Sends a request to the cluster. Without a connection `_missing` does so when there is one again."""
        with self._lock, suppress(Exception):  # the client has many exceptions for a lost connection
            options: dict[str, Any] = {}
            if not job.building:  # Dask itself takes a device for as many measurements as the worker has threads
                waiting = Counter(other.place for other in self._jobs if other.task is not None)
                job.place = min(self._places, key=lambda place: waiting[place] / self._places[place])
                options = {"workers": [job.place], "resources": {DEVICE: 1 / _AHEAD}, "priority": 1}
            arguments = (self._setup, self._folder(job.request.kernel), job.request, job.work, job.generation)
            job.task = task = self._client.submit(_work, *arguments, pure=False, **options)
            task.add_done_callback(lambda done: self._settling.submit(self._settle, job, done))

    def _watch(self) -> None:
        away_s = None
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            try:
                missing = self._missing(0.0 if away_s is None else now - away_s)
            except Exception as error:  # the connection is lost at this moment
                missing = f"the cluster at {self._address} cannot be used: {_said(error)}"
            if missing and away_s is None:
                _LOG.warning("evo: %s; the search waits for up to %.0f s", missing, _AWAY_S)
            away_s = None if not missing else away_s or now
            if away_s is not None and now - away_s > _AWAY_S:
                self._give_up(f"{missing}, for {_AWAY_S:.0f} s now; what was found so far is kept: resume when it is back")

    def _missing(self, seconds: float) -> str:
        """What keeps the search from going on, for so many seconds now; empty if nothing does. Makes a new client where the
        connection is lost, also in place of one that has failed to connect again, which says that it is connecting."""
        status = self._client.status
        if status in ("closed", "closing") or (status != "running" and seconds > 2 * _ANSWER_S):
            try:
                self._client = _connect(self._address)
            except EvoError as error:
                return str(error)
            with self._lock:
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
        """Delivers a result. What was lost with a worker, the scheduler or the connection is sent again."""
        if job.task is not task:
            return  # it was sent again since
        result = self._answer(job, task)
        if result is None:
            self.losses += 1
            job.attempts += 1
            if job.attempts < _ATTEMPTS:
                job.task = None
                return
            result = _lost(job, f"{job.attempts} workers that were at this were lost")
        with self._lock:
            self._jobs.discard(job)
        deliver(job.future, result)

    def _answer(self, job: _Job, task: Any) -> object:
        """A result, or an exception that the job ends with; None if the job is to be sent again."""
        error: BaseException | None = None
        with suppress(Exception):  # the answer is lost on its way
            if task.status == "finished":
                return task.result(timeout=_ANSWER_S)
            error = task.exception(timeout=_ANSWER_S) if task.status == "error" else None
        if error is None or isinstance(error, KilledWorker | CancelledError | CommClosedError):  # its worker was ending
            return None
        return error if isinstance(error, EvoError) else DeviceError(f"a worker of {self._address} fails: {_said(error)}")

    # -- the cluster --------------------------------------------------------------------------------------------------

    def _find_workers(self) -> tuple[int, int]:
        """Number of workers, and of their threads. Notes which workers measure: all that have a device of the chosen kind,
        or any device before a kind is chosen."""
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
        except Exception:  # the answer is lost, and the worker is asked again
            self._kinds.pop(address, None)

    def _choose_kind(self, named: str) -> str:
        """The kind of device whose name, or a part of it, was given; without a name, the only kind that there is. Raises
        UsageError; and a worker's own error if no worker has a device that the target can use."""
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
        """Number of builders, as soon as there are the wanted workers and one of them has a device. Raises DeviceError if
        none with a device comes, UsageError for a worker with another version."""
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
        """The answer of the target of one of these workers. Raises what the target raises."""
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
    """Has a worker ignore ^C, which a terminal sends to a local cluster, too: the command ends its workers."""
    with suppress(ValueError):  # this worker is a thread of the command
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _RemoteTarget:
    """The target of the workers that measure. Each question is asked once."""

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
    """The cluster that a file describes, started, or None; its scheduler's address; and the number of workers to wait for.
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
    except Exception as error:  # any class of cluster may raise anything
        if cluster is not None:
            cluster.close()
        raise UsageError(
            f"--on {scheduler!r} starts no cluster ({_said(error)}): it needs cluster: distributed.LocalCluster or"
            " another class, options: its arguments, workers: how many"
        ) from error
    return cluster, cluster.scheduler_address, wanted


def _connect(address: str) -> Any:
    """A client. Raises DeviceError."""
    make: Any = Client
    try:
        return make(address, timeout=_ANSWER_S, set_as_default=False, name="evo")
    except Exception as error:  # an unknown name, a port that nobody listens at, a wrong certificate
        raise DeviceError(f"the scheduler at {address} does not answer ({_said(error)})") from error


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
"""Executors of this worker, by target."""
_sessions: dict[str, int] = {}
"""Searches that use them, each with the generation of its device processes."""
_ended: set[str] = set()


def _version() -> str:
    return __version__


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
            # Dask forbids children to a nanny's worker, lest they outlive it. These end with it (`end_with_command`).
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
    """Ends a search here; the last one closes the executors, in another thread, since this one answers the scheduler."""
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
    """The folder of a kernel on this worker, shared files included. Raises UsageError if the kernel would use other shared
    files of this worker."""
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


def _work(setup: _Setup, folder: _Folder, request: Any, work: tuple[Any, ...], generation: int) -> Any:
    (method, *arguments), executor = work, _executor(setup, generation)
    with _opening:
        local = replace(request, kernel=_unpacked(folder))
    return getattr(executor, method)(local, *arguments).result()


EXECUTOR = DaskExecutor
