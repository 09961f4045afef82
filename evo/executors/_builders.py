"""Builders: as many workers as there are builds at a time, each of them replaced when a build breaks it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

from evo.errors import EngineError
from evo.evaluation import Build, Status
from evo.executors import BuildRequest, ExecutorConfig
from evo.executors import _build_tasks as tasks
from evo.executors._faults import ran_out_of_memory
from evo.executors._limits import confine_builder
from evo.executors._pace import Pace
from evo.executors._worker import Worker, WorkerDied, WorkerStalled
from evo.progress import InFlight

__all__ = ["Builders"]

_WARM_UP_S = 120.0


def _prepare(scratch: Path, memory_bytes: int) -> int:
    limit = confine_builder(scratch, memory_bytes)
    tasks.prepare_builder()
    return limit


class Builders:
    """`start`: makes a worker out of what is called in it first, and its arguments. Deliveries are called in the
    builders' threads."""

    def __init__(self, start: Callable[..., Worker], target: str, config: ExecutorConfig, scratch: Path) -> None:
        self._config, self._target = config, target
        self._start, self._scratch = start, scratch
        self._pace = Pace(floor_s=config.build_floor_s, ceiling_s=config.build_timeout_s)
        self._jobs: queue.SimpleQueue[tuple[BuildRequest, Callable[[Build | BaseException], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._workers: list[Worker | None] = [None] * config.builders
        self._at: list[tuple[BuildRequest, float] | None] = [None] * config.builders
        """By builder: what it is at, and since when by time.monotonic()."""
        self._closed = False
        self._changed = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"evo-builder-{i}", daemon=True)
            for i in range(config.builders)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: BuildRequest, deliver: Callable[[Build | BaseException], None]) -> None:
        self._jobs.put((request, deliver))

    def in_flight(self) -> list[InFlight]:
        """What is being built, in no order. For any thread."""
        now, found = time.monotonic(), []
        for at, worker in zip(self._at, self._workers, strict=True):
            if at is not None:
                (request, since_s), ends_at_s = at, worker.ends_at_s if worker is not None else None
                found.append(
                    InFlight(
                        genome=request.genome,
                        workload=request.workload,
                        stage="build",
                        seconds=now - since_s,
                        left_s=None if ends_at_s is None else max(0.0, ends_at_s - now),
                    )
                )
        return found

    def close(self) -> None:
        with self._changed:
            self._closed = True
            running = [w for w in self._workers if w is not None]
        for worker in running:
            worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, place: int) -> None:
        try:
            worker = self._open(place)
            worker.post(tasks.warm_up_builder, self._target)
            worker.collect(_WARM_UP_S)
        except (CancelledError, WorkerDied, WorkerStalled, EngineError):
            self._end(place)
        while (job := self._jobs.get()) is not None:
            request, deliver = job
            result: Build | BaseException
            self._at[place] = request, time.monotonic()
            try:
                result = self._build(place, request)
            except BaseException as error:  # what breaks evo itself is told to whoever waits
                result = error
            self._at[place] = None
            deliver(result)
        self._end(place)

    def _build(self, place: int, request: BuildRequest) -> Build:
        started = time.monotonic()

        def failed(status: Status, log: str) -> Build:
            return Build(
                status=status,
                arch=request.arch,
                compiler="",
                source_digest="",
                seconds=time.monotonic() - started,
                log=log,
            )

        for attempt in range(2):
            worker = self._open(place)
            limit_s = self._pace.limit_s()
            try:
                build: Build = worker.call(tasks.build, request, str(self._config.cache_dir), limit_s=limit_s)
            except WorkerStalled:
                self._end(place)
                return failed(Status.COMPILE_TIMEOUT, f"the build took longer than {limit_s:.3g} s")
            except WorkerDied as death:
                self._end(place)
                if self._closed:
                    raise CancelledError from None
                if attempt and death.status is Status.OUT_OF_MEMORY:
                    return failed(death.status, f"the compiler {death}")
                if attempt:
                    return failed(Status.CRASH, f"the builder {death} while it compiled this, twice")
                continue
            if build.status is Status.OK and not build.cached:
                self._pace.note(build.seconds)
            if build.status is Status.COMPILE_ERROR and ran_out_of_memory(build.log):
                return replace(build, status=Status.OUT_OF_MEMORY)
            return build
        raise EngineError("a build ended without a result")

    def _open(self, place: int) -> Worker:
        worker = self._workers[place]
        if worker is not None and worker.alive:
            return worker
        self._end(place)
        with self._changed:
            if self._closed:
                raise CancelledError
            self._workers[place] = worker = self._start(_prepare, (self._scratch, self._config.build_memory_bytes))
            return worker

    def _end(self, place: int) -> None:
        with self._changed:
            worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.end()
