"""Runs work on this machine: builders, and for each device a worker that gates and times one candidate after another.

This module decides the order of things: measurements one behind the other, and turns where building and timing would share
cores. Each builder and each device has a thread, which looks after its process.
"""

import os
import re
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from evo.errors import CompileError, DeviceError, TemplateError
from evo.evaluation import Binary, Build, Evaluation, Status
from evo.executors import ExecutorConfig, InFlight
from evo.executors._device import AdaptiveTimeout, Device, Job, deliver, prepare_device
from evo.executors._processes import (
    confine,
    end_with_children,
    end_with_command,
    limit_data,
    make_scratch,
    name_process,
    start_server,
)
from evo.executors._worker import MOST_KILLED, Worker, WorkerLost, ran_out_of_memory
from evo.measure import RaceRequest, RaceResult, Request
from evo.problem.kernel import Kernel, Launch, Limits
from evo.problem.loading import load_kernel
from evo.problem.render import render
from evo.sanitize import Sanitized, sanitize
from evo.targets import cached_build, find_language, find_target

_AHEAD = 2
"""Number of measurements that a device worker has: the present one and the next, so that it never waits for the command."""
_KILLED = re.compile(r"signal terminated program|terminated with signal|exit code -\d")
"""Message of a compiler a part of which was killed, by a system that is out of memory or by somebody."""
_CHECKING_S = 120.0
"""Limit for compiling a candidate and drawing data before a sanitizer runs, in three processes at most."""
_NICE = 10
"""Niceness of builders beside devices that are timed: launches, and the command that proposes, come first."""


class LocalExecutor:
    """The executor of this machine."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        self._target, self._config = target, config
        self.target, self.builders, self.devices = find_target(target), config.builders, len(config.devices)
        self._losses = 0
        """Lost builders, and losses of devices that are out of use."""
        self._turns = self.target.shares_cores
        start_server()
        self._scratch, mark = make_scratch()
        self._mark = os.fdopen(mark)
        self._workers: set[Worker] = set()
        """Workers that may not have ended."""
        self._outstanding: set[Future[Any]] = set()
        self._closed = self._winding_down = False
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Guards all of this object but the devices, and wakes the devices' threads."""
        self._may_build = threading.Condition(lock)
        """Wakes builders: a build one of them, and a measurement none."""
        self._builds: deque[Job] = deque()
        self._measurements: deque[Job] = deque()
        self._builders: list[Worker | None] = [None] * config.builders
        self._building_at: list[tuple[Request, float] | None] = [None] * config.builders
        """The request that each builder works at, and since when, by time.monotonic()."""
        self._build_timeout = AdaptiveTimeout(floor_s=config.build_floor_s, ceiling_s=config.build_timeout_s)
        self._first: Request | RaceRequest | None = None
        """The first request that was submitted."""
        self._measuring = False
        """Whether it is the devices' turn."""
        self._generation = 0
        """Number of times that the devices' processes have been renewed."""
        self._devices = [
            Device(partial(self._start_device, name), config, host_code=self._turns) for name in config.devices
        ]
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="evo-checking")
        serving: list[tuple[str, Callable[..., None], object]] = [
            *((f"evo-device-{place}", self._serve_device, device) for place, device in enumerate(self._devices)),
            *((f"evo-builder-{place}", self._serve_builds, place) for place in range(config.builders)),
        ]
        self._threads = [threading.Thread(target=f, name=name, args=(of,), daemon=True) for name, f, of in serving]
        for thread in self._threads:
            thread.start()

    # -- the seam -----------------------------------------------------------------------------------------------------

    def build(self, request: Request) -> Future[Build]:
        return self._submit(self._builds, Job(request=request))

    def measure(self, request: Request) -> Future[Evaluation]:
        return self._submit(self._measurements, Job(request=request, generation=self._generation))

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        return self._submit(self._measurements, Job(request=request, generation=self._generation))

    def sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Future[Sanitized]:
        return self._checking.submit(self._sanitize, request, tools, limit_s)

    @property
    def losses(self) -> int:
        return self._losses + sum(device.losses for device in self._devices)

    def renew_device(self) -> None:
        self._generation += 1

    def in_flight(self) -> tuple[InFlight, ...]:
        now = time.monotonic()
        found = [work for device in self._devices if (work := device.in_flight()) is not None]
        for at, worker in zip(self._building_at, self._builders, strict=True):
            if at is not None:
                request, since_s = at
                found.append(
                    InFlight(
                        genome=request.genome,
                        workload=request.workload,
                        stage="build",
                        seconds=now - since_s,
                        left_s=max(0.0, worker.ends_at_s - now) if worker is not None and worker.stage else None,
                    )
                )
        return tuple(sorted(found, key=lambda work: (work.stage == "ready", -work.seconds)))

    def wind_down(self) -> None:
        with self._changed:
            self._winding_down = True
            dropped = [job.future for job in (*self._builds, *self._measurements)]
            self._builds.clear()
            self._measurements.clear()
            places = zip(self._builders, self._building_at, strict=True)
            building = [worker for worker, at in places if worker is not None and at is not None]
        for future in dropped:
            future.cancel()
        for worker in building:
            worker.kill()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            outstanding = list(self._outstanding)
            self._changed.notify_all()
            self._may_build.notify_all()
            workers = list(self._workers)
        for future in outstanding:
            future.cancel()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        self._checking.shutdown(cancel_futures=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._mark.close()

    def _submit(self, queue: deque[Job], job: Job) -> Future[Any]:
        job.future.add_done_callback(self._outstanding.discard)
        with self._changed:
            self._outstanding.add(job.future)
            if self._first is None:
                self._first = job.request
                self._changed.notify_all()
            if self._closed or self._winding_down:
                job.future.cancel()
                return job.future
            queue.append(job)
            (self._may_build if queue is self._builds else self._changed).notify()
        return job.future

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start_worker(
        self, prepare: Callable[..., None], arguments: tuple[Any, ...], *, candidates: bool = False
    ) -> Worker:
        """Raises CancelledError when closed."""
        if self._closed:
            raise CancelledError
        worker = Worker(self._scratch, prepare, arguments, candidates=candidates)
        with self._changed:
            self._workers = {w for w in self._workers if not w.ended} | {worker}
            if not self._closed:
                return worker
        worker.end()
        raise CancelledError

    def _start_device(self, name: str, *, judges: bool = True) -> Worker:
        """judges: candidates run in the worker, on a CPU in the process itself."""
        arguments = (self._target, self._scratch, self._config.candidate_memory_bytes, name)
        return self._start_worker(prepare_device, arguments, candidates=judges and self._turns)

    def _sanitize(self, request: Request, tools: Sequence[str], limit_s: float) -> Sanitized:
        worker = self._start_device(self._config.devices[0], judges=False)
        worker.post(sanitize, request, tools, limit_s)
        try:
            return cast(Sanitized, worker.collect({"sanitizing": (_CHECKING_S + 3 * limit_s) * max(1, len(tools))}))
        except WorkerLost as loss:
            raise DeviceError(f"the process that runs the sanitizer {loss}") from None
        finally:
            worker.end()

    # -- the devices' threads -----------------------------------------------------------------------------------------

    def _serve_device(self, device: Device) -> None:
        device.open()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._first is not None)
        if self._first is not None and not self._turns:
            device.make_ready(self._first.data)  # while the first candidate is built
        while True:
            while device.posted < _AHEAD and (job := self._take(device.generation, wait=device.posted == 0)) is not None:
                device.post(job)
            if device.posted == 0:
                break
            if left := device.finish(partial(self._retire, device)):
                with self._changed:
                    self._measurements.extendleft(reversed(left))
                    self._changed.notify_all()
                break
        device.close()

    def _retire(self, device: Device) -> bool:
        """Takes a device out of use, unless it is the last."""
        with self._changed:
            if self.devices == 1:
                return False
            self._losses += device.losses
            self._devices = [other for other in self._devices if other is not device]
            self.devices -= 1
            return True

    def _take(self, generation: int, *, wait: bool) -> Job | None:
        """The next measurement, if a device of that generation may begin it. wait: until there is one; then None means that
        the executor is closed."""
        with self._changed:
            while True:
                if wait and self._measuring and not self._measurements:
                    self._measuring = False
                    self._may_build.notify_all()
                builds = self._builds or any(self._building_at)
                may_begin = self._measurements and (self._measuring or not (self._turns and builds))
                if self._closed or may_begin or not wait:
                    break
                self._changed.wait()
            if self._closed or not may_begin:
                return None
            if not wait:  # ahead of its turn: another device may be free to begin the measurement now
                idle = sum(device.posted == 0 for device in self._devices)
                if len(self._measurements) <= idle or self._measurements[0].generation > generation:
                    return None
            self._measuring = True
            return self._measurements.popleft()

    # -- the builders' threads ----------------------------------------------------------------------------------------

    def _serve_builds(self, place: int) -> None:
        with suppress(Exception):  # the first build starts another one, or says why there is none
            self._builder(place)
        while (begun := self._begin_build(place)) is not None:
            request, future = begun
            result: Build | BaseException
            try:
                result = self._build(place, request, time.monotonic())
            except BaseException as error:  # an error of evo itself goes to whoever waits
                result = error
            with self._changed:
                self._building_at[place] = None
                self._changed.notify()
            deliver(future, result)
        if (worker := self._builders[place]) is not None:
            worker.end()

    def _begin_build(self, place: int) -> tuple[Request, Future[Build]] | None:
        """The next build, when it is the builders' turn; None when closed."""
        with self._may_build:
            self._may_build.wait_for(lambda: self._closed or (self._builds and not (self._turns and self._measuring)))
            if self._closed:
                return None
            job = self._builds.popleft()
            assert isinstance(job.request, Request)
            self._building_at[place] = job.request, time.monotonic()
            return job.request, job.future

    def _build(self, place: int, request: Request, started_s: float, lost: int = 0) -> Build:
        """One build. lost: the number of builders that have died of it. It is tried twice, and more often where they were
        killed from outside, which may as well happen again."""
        limit_s = self._build_timeout.limit_s()
        try:
            worker = self._builder(place)
            worker.post(build, request, str(self._config.cache_dir))
            built: Build = worker.collect({"build": limit_s})
        except WorkerLost as loss:
            self._builders[place] = None
            if self._closed or self._winding_down:
                raise CancelledError from None
            self._losses += 1
            status, log = Status.CRASH, f"the builder {loss} while it compiled this, {lost + 1} times"
            if loss.status is Status.TIMEOUT:
                status, log = Status.COMPILE_TIMEOUT, f"the build took longer than {limit_s:.3g} s"
            elif lost + 1 < (MOST_KILLED if loss.killed else 2):
                return self._build(place, request, started_s, lost + 1)
            elif loss.status is Status.OUT_OF_MEMORY:
                status, log = loss.status, f"the compiler {loss}"
            seconds = time.monotonic() - started_s
            return Build(status=status, arch=request.arch, compiler="", source_digest="", seconds=seconds, log=log)
        if built.status is Status.OK and not built.cached:
            self._build_timeout.note(built.seconds)
        if built.status is Status.COMPILE_ERROR and lost + 1 < MOST_KILLED and _KILLED.search(built.log):
            return self._build(place, request, started_s, lost + 1)
        if built.status is Status.COMPILE_ERROR and ran_out_of_memory(built.log):
            return replace(built, status=Status.OUT_OF_MEMORY)
        return built

    def _builder(self, place: int) -> Worker:
        worker = self._builders[place]
        if worker is None:
            arguments = (self._target, self._scratch, self._config.build_memory_bytes)
            worker = self._builders[place] = self._start_worker(prepare_builder, arguments)
        return worker


# -- in a builder ---------------------------------------------------------------------------------------------------


def prepare_builder(target: str, scratch: Path, memory_bytes: int) -> None:
    """Sets a builder up. It ends with its compiler: when it is ended, and when the command is gone."""
    name_process("evo-builder")
    confine(scratch, limit_files=True)
    limit_data(memory_bytes)
    if not find_target(target).shares_cores:  # imports what builds need
        os.nice(_NICE)
    signal.signal(signal.SIGTERM, lambda *_: end_with_children())
    end_with_command()


def build(request: Request, cache_dir: str) -> Build:
    """Renders and compiles one candidate. A failing candidate is a Build that says so. Raises KernelError where, before or
    afterwards, the kernel's files are not those of the request."""
    built = _build(load_kernel(request.kernel, request.kernel_digest), request, cache_dir)
    load_kernel(request.kernel, request.kernel_digest)
    return built


def _build(kernel: Kernel, request: Request, cache_dir: str) -> Build:
    target = find_target(request.target)
    try:
        source = render(kernel, request.target, request.genome, request.workload, request.arch)
    except TemplateError as error:
        log, compiler = str(error), target.compiler()
        return Build(status=Status.RENDER_ERROR, arch=request.arch, compiler=compiler, source_digest="", log=log)
    language = find_language(source.language)
    built = Build(
        status=Status.COMPILE_ERROR,
        arch=request.arch,
        compiler=language.compiler(),
        source_digest=source.digest,
        source=source.text,
    )
    started = time.perf_counter()
    try:
        binary, seconds, cached = cached_build(Path(cache_dir), language, source, request.arch, request.device_arch)
        limits = target.limits(request.arch)
        point = request.genome.parameters
        launches = kernel.sequence(request.target, point, request.workload, limits, binary.launch).launches
        occupancies = [language.occupancy(binary, launch, limits) for launch in launches]
        if binary.stand_in:
            _check_fit(binary, launches, occupancies, limits)
    except CompileError as error:
        return replace(built, seconds=time.perf_counter() - started, log=str(error))
    return replace(
        built,
        status=Status.OK,
        seconds=seconds,
        cached=cached,
        log=binary.log,
        binary=binary,
        smem_dynamic_bytes=max(launch.smem_bytes for launch in launches),
        occupancy=min((share for share in occupancies if share is not None), default=None),
    )


def _check_fit(
    binary: Binary, launches: Sequence[Launch], occupancies: Sequence[float | None], limits: Limits
) -> None:
    """Raises CompileError where the architecture does not hold a block that the device which measures may."""
    for launch, share in zip(launches, occupancies, strict=True):
        smem = launch.smem_bytes + (binary.smem_static_bytes or 0)
        if share == 0 or smem > limits.smem_bytes_per_block:
            raise CompileError(
                f"a block of {prod(launch.block)} threads with {smem:,} bytes of shared memory fits no multiprocessor of"
                f" {limits.arch}"
            )


EXECUTOR = LocalExecutor
