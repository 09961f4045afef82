"""Runs work on this machine: builders, and two disposable processes on the device, for the gate and for timing.

What is decided here is the order of things: measurements one behind the other, each timed while the next is gated, races
alone, and turns where building and timing would share cores.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from evo.errors import DeviceError
from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest, RaceRequest, RaceResult
from evo.executors import _device_tasks as tasks
from evo.executors._builders import Builders
from evo.executors._device_lock import DeviceLock
from evo.executors._device_tasks import SetUp
from evo.executors._lane import Job, Lane, deliver
from evo.executors._limits import SCRATCH, drop_stale_scratch
from evo.executors._pace import Pace
from evo.executors._presence import Presence
from evo.executors._server import start_server, worker_context
from evo.executors._stage import Stage
from evo.executors._worker import Worker
from evo.problem.kernel import Workload
from evo.progress import InFlight
from evo.targets import find_target

__all__ = ["LocalExecutor"]

_GATE_FLOOR_S = {False: 0.3, True: 0.5}
"""The least limit of a gate, by whether the target shares its cores."""

_LAUNCH_SHARE = 0.4
"""Of that is the least limit of a single launch on a GPU, where one takes microseconds and does not depend on the host."""

_SPARES = 4
"""A process takes a second from its start until it can gate: longer than most faults. But processes that open the device
hold up those that use it."""

_T = TypeVar("_T")


class LocalExecutor:
    """See `evo.executors.Executor`."""

    def __init__(self, target: str, config: ExecutorConfig) -> None:
        self._target, self._config = target, config
        self._turns = find_target(target).shares_cores
        start_server()
        self._context = worker_context()
        drop_stale_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        self._jobs: deque[Job] = deque()
        self._held_builds: deque[Job] = deque()
        self._outstanding: set[Future[Any]] = set()
        self._paces: dict[tuple[str, Workload, str], Pace] = {}
        self._building = 0
        self._measuring = False
        self._closed = False
        self._changed = threading.Condition()
        self._announced: set[SetUp] = set()
        # Processes that share cores are given time when they were not given cores; a GPU does not tell.
        self._presence = Presence()
        self._gate = self._stage(spares=0 if self._turns else _SPARES, timed=False)
        self._timer = self._stage(spares=0, timed=True)
        self._timings = Lane("evo-timing")
        self._builders = Builders(self._start, target, config, self._scratch)
        self._dispatcher = threading.Thread(target=self._dispatch, name="evo-device", daemon=True)
        self._dispatcher.start()

    def _start(self, prepare: Callable[..., int], arguments: tuple[Any, ...]) -> Worker:
        return Worker(self._context, self._scratch, prepare, arguments)

    @cached_property
    def _device_place(self) -> str:
        """What the device is called by all who use it, whichever of the machine's devices they see; of one that does not
        answer, the target's name: what cannot run is told by who tries to run on it."""
        try:
            return find_target(self._target).device().details.get("pci_bus", self._target)
        except DeviceError:
            return self._target

    def _start_device(self) -> Worker:
        arguments = (self._target, self._config.device_index, self._scratch)
        if self._turns:
            return self._start(tasks.prepare, (*arguments, None))
        self._presence.join(self._device_place)
        lock = DeviceLock(self._scratch / "device")
        return Worker(self._context, self._scratch, tasks.prepare, (*arguments, lock), gone=lock.close)

    def _stage(self, *, spares: int, timed: bool) -> Stage:
        return Stage(
            self._start_device,
            spares=spares,
            timed=timed,
            host_code=self._turns,
            memory_bytes=self._config.candidate_memory_bytes,
        )

    # -- builds ---------------------------------------------------------------------------------------------

    def build(self, request: BuildRequest) -> Future[Build]:
        future: Future[Build] = Future()
        self._expect(future)

        def start() -> None:
            self._builders.submit(request, lambda result: self._built(result, future))

        with self._changed:
            if self._turns and (self._measuring or self._jobs):
                self._held_builds.append(Job(run=start, future=future))
                return future
            self._building += 1
        start()
        return future

    def _built(self, result: Build | BaseException, future: Future[Build]) -> None:
        with self._changed:
            self._building -= 1
            self._changed.notify_all()
        deliver(future, result)

    # -- the device -----------------------------------------------------------------------------------------

    def expect(self, kernel: str, target: str, workload: Workload, seed: int) -> None:
        def announce() -> None:
            self._gate.expect(self._gate.data(kernel, target, workload, seed))
            self._announce(self._timer.data(kernel, target, workload, seed))

        self._submit(Job(run=announce))

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        """The gate has a process of its own, which has little to lose; what passes is timed in another, while the next
        is gated there."""
        launching, gating, timing = (self._pace(request, stage) for stage in ("launch", "gate", "timing"))
        future: Future[Measurement] = Future()

        def gate(launch_limit_s: float) -> Measurement:
            limited = replace(request, launch_limit_s=launch_limit_s)
            return self._gate.judge(tasks.gate, limited, gating.limit_s, tasks.lost_measurement)

        def pass_gate() -> None:
            if request.time:
                self._announce(self._timer.data(request.kernel, request.target, request.workload, request.seed))
            limit_s = launching.limit_s()
            gated = gate(limit_s)
            if gated.status is Status.TIMEOUT and self._presence.others() and (wider_s := launching.limit_s()) > limit_s:
                # Another command has come since: what it stopped for a moment is no hang.
                lost, gated = gated, gate(wider_s)
                gated = replace(gated, seconds=gated.seconds + lost.seconds)
            if gated.status is Status.OK:
                gating.note(gated.load_seconds + gated.gate_seconds)
                launching.note(gated.launch_seconds)
            if gated.status is not Status.OK or not request.time:
                deliver(future, gated)
                return
            self._timings.put(Job(run=lambda: deliver(future, timed(gated)), future=future))
            if self._turns:
                self._timings.drain()

        def timed(gated: Measurement) -> Measurement:
            found: Measurement = self._timer.judge(tasks.clock, request, timing.limit_s, tasks.lost_measurement)
            if found.status is Status.OK:
                timing.note(found.load_seconds + found.timing_seconds + found.gate_seconds)  # and not what was lost before
            return replace(
                found,
                checks=gated.checks + found.checks,
                seconds=gated.seconds + found.seconds,
                load_seconds=gated.load_seconds + found.load_seconds,
                gate_seconds=gated.gate_seconds + found.gate_seconds,
            )

        return self._enqueue(pass_gate, future)

    def race(self, request: RaceRequest) -> Future[RaceResult]:
        limit_s = self._config.measure_timeout_s * (len(request.contenders) + len(request.baselines) + 1)
        future: Future[RaceResult] = Future()

        def hold() -> None:
            self._timings.drain()
            deliver(future, self._timer.judge(tasks.race, request, lambda: limit_s, tasks.lost_race))

        return self._enqueue(hold, future)

    def in_flight(self) -> tuple[InFlight, ...]:
        stages = (self._gate.in_flight(), self._timer.in_flight())
        found = [*self._builders.in_flight(), *(work for work in stages if work is not None)]
        return tuple(sorted(found, key=lambda work: (work.stage == "ready", -work.seconds)))

    def renew_device(self) -> None:
        def renew() -> None:
            self._timings.drain()
            for stage in (self._gate, self._timer):
                stage.renew()

        self._submit(Job(run=renew))

    def _announce(self, data: SetUp) -> None:
        """Has the timing's process make its data while the first candidate is gated."""
        if data not in self._announced:
            self._announced.add(data)
            self._timings.put(Job(run=lambda: self._timer.expect(data)))

    def _pace(self, request: MeasureRequest, stage: str) -> Pace:
        """A hang shows in the gate, whose time varies little; a race waits for a quiet machine, up to its own limit."""
        floor_s = self._config.timing_floor_s
        if stage != "timing" and self._config.gate_floor_s is not None:
            floor_s = self._config.gate_floor_s  # a launch may take all of what is asked for
        elif stage != "timing":
            floor_s = _GATE_FLOOR_S[self._turns] * (_LAUNCH_SHARE if stage == "launch" else 1.0)
        crowded = self._presence.others if stage != "timing" else None
        fresh = Pace(floor_s=floor_s, ceiling_s=self._config.measure_timeout_s, crowded=crowded)
        return self._paces.setdefault((request.kernel, request.workload, stage), fresh)

    def _enqueue(self, run: Callable[[], None], future: Future[_T]) -> Future[_T]:
        self._expect(future)

        def begin() -> None:
            if not future.cancelled():
                run()

        self._submit(Job(run=begin, future=future))
        return future

    def _expect(self, future: Future[Any]) -> None:
        with self._changed:
            if self._closed:
                future.cancel()
            self._outstanding.add(future)
        future.add_done_callback(self._settled)

    def _settled(self, future: Future[Any]) -> None:
        with self._changed:
            self._outstanding.discard(future)

    def _submit(self, job: Job) -> None:
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
            job.carry_out()
            with self._changed:
                self._measuring = False
                held = list(self._held_builds) if not (self._jobs or self._closed) else []
                if held:
                    self._held_builds.clear()
                self._building += len(held)
            for build in held:
                build.run()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            outstanding = list(self._outstanding)
            self._jobs.clear()
            self._held_builds.clear()
            self._changed.notify_all()
        for future in outstanding:
            future.cancel()
        self._timings.close()
        for stage in (self._gate, self._timer):
            stage.kill()
        self._builders.close()
        self._dispatcher.join()
        self._timings.join()
        for stage in (self._gate, self._timer):
            stage.close()
        self._presence.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
