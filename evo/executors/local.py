"""Runs work on this machine: a pool of builders and one disposable device process (both by pebble).

Pebble's pools kill a task at its time limit and replace a worker that dies; what is added here is the order of
things: one measurement at a time, a fresh process after a broken one, and turns where building and timing would
share cores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest, RaceRequest, RaceResult
from evo.executors import _tasks as tasks
from evo.executors._server import start_server, worker_context
from evo.kernel import Workload
from evo.targets import find_target

__all__ = ["LocalExecutor"]

_OPEN_TIMEOUT_S = 180.0
"""For opening the device, a task of its own."""

_SETUP_TIMEOUT_S = 30.0
"""Added to the limit of the first measurement of a workload, which also makes its data and references."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Something to be done in turn, and the future that waits for it, if one does."""

    run: Callable[[], None]
    future: Future[Any] | None = None


class LocalExecutor:
    """See `evo.executors.Executor`."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        self._target, self._config = target, config
        self._turns = find_target(target).shares_cores
        start_server()
        self._context = worker_context()
        self._builders = ProcessPool(
            max_workers=config.builders, context=self._context, initializer=tasks.prepare_builder
        )
        self._device: ProcessPool | None = None
        self._jobs: deque[_Job] = deque()
        self._held_builds: deque[_Job] = deque()
        self._in_flight: set[Future[Any]] = set()
        self._set_up: set[tuple[str, Workload, int]] = set()
        self._building = 0
        self._measuring = False
        self._closed = False
        self._changed = threading.Condition()
        self._builders.schedule(tasks.warm_up_builder, args=(target,))
        self._open_device()
        self._dispatcher = threading.Thread(target=self._dispatch, name="evo-device", daemon=True)
        self._dispatcher.start()

    # -- builds ---------------------------------------------------------------------------------------------

    def build(self, request: BuildRequest) -> Future[Build]:
        outer: Future[Build] = Future()

        def start() -> None:
            args = (request, str(self._config.cache_dir))
            try:
                inner = self._schedule(self._builders, tasks.build, args, self._config.build_timeout_s)
            except CancelledError:
                outer.cancel()
                return
            inner.add_done_callback(lambda done: self._built(request, done, outer))

        with self._changed:
            if self._turns and (self._measuring or self._jobs):
                self._held_builds.append(_Job(run=start, future=outer))
                return outer
            self._building += 1
        start()
        return outer

    def _built(self, request: BuildRequest, done: Any, outer: Future[Build]) -> None:
        with self._changed:
            self._building -= 1
            self._changed.notify_all()
        try:
            result = done.result()
        except TimeoutError:
            limit = self._config.build_timeout_s
            result = _failed_build(request, Status.COMPILE_TIMEOUT, f"the build took longer than {limit:g} s")
        except ProcessExpired as error:
            result = _failed_build(
                request, Status.CRASH, f"the builder died (exit code {error.exitcode}) while it compiled this"
            )
        except CancelledError:
            outer.cancel()
            return
        except BaseException as error:
            outer.set_exception(error)
            return
        _deliver(outer, result)

    # -- the device -----------------------------------------------------------------------------------------

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        def failed(status: Status, log: str) -> Measurement:
            return Measurement(status=status, log=log)

        limit_s = self._config.measure_timeout_s
        return self._enqueue(tasks.measure, request, limit_s, failed, lambda m: m.device_lost)

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        def failed(status: Status, log: str) -> RaceResult:
            return RaceResult(log=f"{status}: {log}")

        limit_s = self._config.measure_timeout_s * (len(request.contenders) + len(request.baselines) + 1)
        return self._enqueue(tasks.race, request, limit_s, failed, lambda r: r.device_lost)

    def renew_device(self) -> None:
        self._submit(_Job(run=self._end_device))

    def _enqueue(
        self,
        task: Callable[[Any], _T],
        request: MeasureRequest | RaceRequest,
        limit_s: float,
        failed: Callable[[Status, str], _T],
        lost: Callable[[_T], bool],
    ) -> Future[_T]:
        outer: Future[_T] = Future()

        def run() -> None:
            if outer.cancelled():
                return
            setting = (request.kernel, request.workload, request.seed)
            limit = limit_s
            try:
                pool = self._open_device()
                if setting not in self._set_up:
                    limit += _SETUP_TIMEOUT_S
                result = self._schedule(pool, task, (request,), limit).result()
                self._set_up.add(setting)
            except TimeoutError:
                result = failed(Status.TIMEOUT, f"no result within {limit:g} s")
                self._end_device()
            except ProcessExpired as error:
                result = failed(Status.CRASH, f"the device process died (exit code {error.exitcode})")
                self._end_device()
            except CancelledError:
                outer.cancel()
                return
            if lost(result):
                self._end_device()
            _deliver(outer, result)

        self._submit(_Job(run=run, future=outer))
        return outer

    def _schedule(self, pool: Any, task: Callable[..., _T], args: tuple[Any, ...], timeout_s: float) -> Future[_T]:
        """Pebble forgets the tasks of a pool that is stopped: those in flight are kept, to be cancelled."""
        with self._changed:
            if self._closed:
                raise CancelledError
            future: Future[_T] = pool.schedule(task, args=args, timeout=timeout_s)
            self._in_flight.add(future)
        future.add_done_callback(self._landed)
        return future

    def _landed(self, future: Future[Any]) -> None:
        with self._changed:
            self._in_flight.discard(future)

    def _submit(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _dispatch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._jobs or (self._turns and self._building)):
                    self._changed.wait()
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._measuring = True
            try:
                job.run()
            except BaseException as error:  # what breaks evo itself is told to whoever waits
                if job.future is not None:
                    _deliver_error(job.future, error)
            with self._changed:
                self._measuring = False
                held = list(self._held_builds) if not (self._jobs or self._closed) else []
                if held:
                    self._held_builds.clear()
                self._building += len(held)
            for build in held:
                build.run()

    def _open_device(self) -> ProcessPool:
        """Raises CancelledError once this executor is closed."""
        with self._changed:
            if self._closed:
                raise CancelledError
            if self._device is None:
                self._set_up.clear()
                self._device = ProcessPool(
                    max_workers=1,
                    context=self._context,
                    initializer=tasks.prepare_device,
                    initargs=(self._target, self._config.device_index),
                )
                self._device.schedule(tasks.open_device, timeout=_OPEN_TIMEOUT_S)
            return self._device

    def _end_device(self) -> None:
        pool, self._device = self._device, None
        _end(pool)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            in_flight = list(self._in_flight)
            abandoned = [*self._jobs, *self._held_builds]
            self._jobs.clear()
            self._held_builds.clear()
            self._changed.notify_all()
        for future in in_flight:
            future.cancel()
        _stop(self._builders)
        self._end_device()
        self._builders.join()
        self._dispatcher.join()
        for job in abandoned:
            if job.future is not None:
                job.future.cancel()


def _end(pool: ProcessPool | None) -> None:
    if pool is not None:
        _stop(pool)
        pool.join()


def _stop(pool: Any) -> None:
    pool.stop()  # which pebble leaves without types


def _failed_build(request: BuildRequest, status: Status, log: str) -> Build:
    return Build(status=status, arch=request.arch, compiler="", source_digest="", log=log)


def _deliver(future: Future[_T], result: _T) -> None:
    if not future.cancelled():
        future.set_result(result)


def _deliver_error(future: Future[_T], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
