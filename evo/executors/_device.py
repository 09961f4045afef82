"""The device worker: a process that gates and times candidates one after another, and dies with the one that breaks it.

A candidate that loses its process is tried once more, alone, in a fresh one; if that is lost too, the candidate is to blame.
In the first process others have run before it, and may have broken what it stumbled over, and the incumbent runs beside it
where it is timed. Only a fault that the device itself names is the candidate's own at once. A process that was killed from
outside (SIGKILL) is no evidence: its candidate is tried up to four times.
"""

from __future__ import annotations

import gc
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.errors import DeviceError, EngineError, KernelError, LaunchError
from evo.evaluation import Evaluation, Status
from evo.executors import ExecutorConfig, InFlight
from evo.executors._processes import adopt_orphans, confine, end_with_command, limit_data, name_process, reap_child
from evo.executors._worker import MOST_KILLED, Worker, WorkerLost, enter_stage
from evo.measure import RaceRequest, RaceResult, Request, TaskData
from evo.problem.kernel import Workload
from evo.problem.loading import load_kernel
from evo.targets import Session, classify, find_target

if TYPE_CHECKING:
    from evo.measure.harness import TimingHarness  # imports PyTorch

_OPENING_S, _READY_S = 180.0, 600.0
"""Limits for opening the device, and for making the data that candidates are judged with: no candidate takes part."""

_UNLIMITED = 1 << 60

_PROBE_ELEMENTS = 1 << 16

_ATTEMPTS = 2
"""Number of attempts at a candidate."""

_HINT = "; it hangs, is far slower than most, or has a fault that the device takes longer to name, as it does a trap"

_JUDGED = frozenset({"gate", "timing", "race"})
"""Stages in which candidates run."""

_NAMED_FAULTS = frozenset({Status.ILLEGAL_ADDRESS, Status.MISALIGNED_ADDRESS, Status.TRAP})

_SHARED_FACTOR = 10.0
"""Longer limit of a second attempt where cores are shared: load alone must not refuse a candidate."""

_FACTOR, _REMEMBERED = 20.0, 64
"""An adaptive limit is so many times the median of so many durations."""


class AdaptiveTimeout:
    """A limit of 20 times the median duration of what passed before, so that a hang costs little. It is at least `floor_s`,
    for the machine may be busy, and at most `ceiling_s`, which holds until something has passed. Threads may share one: a
    deque is appended to, and copied, in one step."""

    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = floor_s, ceiling_s
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, seconds: float) -> None:
        """Adds the duration of something that passed."""
        self._seconds.append(seconds)

    def limit_s(self) -> float:
        if not self._seconds:
            return self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, _FACTOR * statistics.median(list(self._seconds))))


@dataclass(kw_only=True)
class Job:
    """A request, and the future that waits for its result.

    generation: no process serves two generations. attempts: the number of processes that the candidate has cost. lost_s: the
    seconds that it spent there, by stage. failed: the last process was lost before a candidate ran in it.
    """

    request: Request | RaceRequest
    future: Future[Any] = field(default_factory=Future)
    generation: int = 0
    attempts: int = 0
    lost_s: dict[str, float] = field(default_factory=dict)
    failed: bool = False


class Device:
    """A device with its process. Jobs are posted, the next before the last is finished, and finished in the same order: the
    process need not wait for the command between two candidates. After a first loss another process is kept ready (a spare),
    where opening the device takes longer than a measurement. One thread uses a Device; `in_flight` serves any thread.

    start: makes a device process, or raises CancelledError when no more are to be made. host_code: candidates run in the
    process itself, and share the cores with it. generation: that of the process.
    """

    def __init__(self, start: Callable[[], Worker], config: ExecutorConfig, *, host_code: bool) -> None:
        self._start, self._config, self._host_code = start, config, host_code
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._lost_any = False
        self._posted: deque[Job] = deque()
        self._timeouts: dict[tuple[str, Workload, str, int], AdaptiveTimeout] = {}
        self._current: Job | None = None
        self.losses = self.generation = 0

    @property
    def posted(self) -> int:
        return len(self._posted)

    def open(self) -> None:
        """Starts a process, if that is possible, before it is needed."""
        with suppress(Exception):  # the first job starts another one, or says why there is none
            self._worker = self._start()
            self._worker.post(open_device, answered=False)

    def make_ready(self, data: TaskData) -> None:
        """Has the process make the data that candidates are judged with, before there is a candidate."""
        if self._worker is not None:
            self._worker.post(make_ready, data, answered=False)

    def post(self, job: Job) -> None:
        """Queues a job behind those posted before. A job of a later generation needs an empty queue."""
        self._posted.append(job)
        if self._worker is not None and job.generation <= self.generation:
            self._worker.post(judge, job.request)

    def finish(self, retires: Callable[[], bool]) -> list[Job]:
        """Waits for the result of the first posted job, or for an error of evo itself, and delivers it to the job's future.

        retires: called when two fresh processes were lost before a candidate ran in them; it takes the device out of use, if
        others go on without it. Then the posted jobs are returned.
        """
        job = self._posted[0]
        result: Evaluation | RaceResult | BaseException | None = None
        try:
            while result is None:
                result = self._attempt(job)
        except BaseException as error:
            result = error
            with suppress(DeviceError):  # a process that cannot be ended has been reported
                self._end_worker()
        self._current = None
        if isinstance(result, DeviceError) and job.failed and retires():
            job.failed, job.attempts = False, 0
            return list(self._posted)
        self._posted.popleft()
        deliver(job.future, result)
        return []

    def in_flight(self) -> InFlight | None:
        """The candidate that is being gated or timed, or that waits for the device and the data to be ready."""
        job, worker = self._current, self._worker
        if job is None or not isinstance(job.request, Request):
            return None
        now, stage = time.monotonic(), worker.stage if worker is not None else ""
        limited = worker is not None and stage in ("gate", "timing")
        return InFlight(
            genome=job.request.genome,
            workload=job.request.workload,
            stage=stage if limited else "ready",
            seconds=now - worker.since_s if worker is not None else 0.0,
            left_s=max(0.0, worker.ends_at_s - now) if limited and worker is not None else None,
            again=job.attempts > 0,
        )

    def close(self) -> None:
        """Ends its processes."""
        for worker in (self._worker, self._spare):
            if worker is not None:
                worker.end()
        self._worker = self._spare = None

    # -- one attempt ------------------------------------------------------------------------------------------------

    def _attempt(self, job: Job) -> Evaluation | RaceResult | None:
        """A result, or None if the job is to be tried again. A process that is left is fit for the next candidate. Raises
        DeviceError if the device does not answer in a fresh process either, UsageError if the data do not fit."""
        self._current = job
        if job.generation > self.generation:
            self.generation = job.generation
            self._end_worker()
        if self._worker is None:
            self._worker = self._next_worker(job)
            for posted in self._posted:
                self._worker.post(judge, posted.request)
        worker = self._worker
        try:
            result: Evaluation | RaceResult = worker.collect(self._limits_s(job))
        except (WorkerLost, DeviceError) as loss:
            self.losses += 1
            if isinstance(loss, DeviceError) or not _JUDGED & worker.spent_s.keys():
                self._fail(job, loss)
                return None
            hint = _HINT if loss.status is Status.TIMEOUT and not self._host_code else ""
            log = f"the device process {loss}{hint}"
            tries = MOST_KILLED if loss.killed else _ATTEMPTS
            return self._lost(job, worker, failure(job.request, loss.status, log, worker.found), tries=tries)
        except (EngineError, KernelError) as error:
            stated_wrong = isinstance(error, KernelError) and worker.last_stage == "ready" and job.attempts > 0
            if stated_wrong or not _JUDGED & worker.spent_s.keys():
                raise
            # Where a candidate ran, no error is surely evo's own, or the kernel author's.
            log = f"in its process {str(error).partition(chr(10))[0]}"
            return self._lost(job, worker, failure(job.request, Status.CRASH, log, worker.found))
        job.failed = False
        status = result.status if isinstance(result, Evaluation) else Status.CRASH
        if result.device_lost or status is Status.OUT_OF_MEMORY:
            if words := worker.last_words():
                result = replace(result, log=f"{result.log}: {words}")
            return self._lost(job, worker, result, named=status in _NAMED_FAULTS)
        self._note(job, result)
        return replace(result, seconds=result.seconds + sum(job.lost_s.values()))

    def _fail(self, job: Job, loss: WorkerLost | DeviceError) -> None:
        """Notes that a process was lost before a candidate ran in it. Raises DeviceError for the second one in a row."""
        self._end_worker()
        if job.failed:
            if isinstance(loss, DeviceError):
                raise loss
            raise DeviceError(
                f"the device cannot be used (its process {loss}), in a fresh process either, before any candidate ran in it;"
                " what was found so far is kept: see that the device works, then resume"
            )
        job.failed = True

    def _lost(
        self, job: Job, worker: Worker, result: Evaluation | RaceResult, *, named: bool = False, tries: int = _ATTEMPTS
    ) -> Evaluation | RaceResult | None:
        """The result of a candidate that has cost the process, or None if it is to be tried again. named: the device has
        named the fault."""
        job.failed, self._lost_any = False, True
        self._end_worker()
        job.attempts += 1
        for stage in _JUDGED & worker.spent_s.keys():
            job.lost_s[stage] = job.lost_s.get(stage, 0.0) + worker.spent_s[stage]
        request = job.request
        beside = isinstance(request, Request) and request.incumbent is not None and "timing" in worker.spent_s
        if job.attempts < tries and (beside or not named):
            if isinstance(request, Request):
                job.request = replace(request, incumbent=None)  # alone
            return None
        log = result.log + (" (and again, alone in a fresh process)" if job.attempts > 1 else "")
        result = replace(result, log=log, seconds=sum(job.lost_s.values()), device_lost=True)
        if isinstance(result, RaceResult):
            return result
        gate_s, timing_s = (job.lost_s.get(stage, 0.0) for stage in ("gate", "timing"))
        return replace(result, gate_seconds=gate_s, timing_seconds=timing_s)

    def _next_worker(self, job: Job) -> Worker:
        """The spare, or a new process. Another spare is made ready, but not beside a race, which it would disturb; for the
        same reason it makes no data for timing before it is needed."""
        worker, self._spare = self._spare, None
        worker = worker or self._start()
        if self._lost_any and not self._host_code and isinstance(job.request, Request):
            self._spare = self._start()
            self._spare.post(make_ready, job.request.data, ("gate",), answered=False)
        return worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    # -- time limits ------------------------------------------------------------------------------------------------

    def _limits_s(self, job: Job) -> dict[str, float]:
        limits_s, request = {"opening": _OPENING_S, "ready": _READY_S}, job.request
        if isinstance(request, RaceRequest):
            runs = len(request.contenders) + len(request.baselines) + 1
            return limits_s | {"race": self._config.measure_timeout_s * runs}
        ceiling_s = self._config.measure_timeout_s
        factor = _SHARED_FACTOR if self._host_code and job.attempts else 1.0
        own = {stage: self._timeout(request, stage).limit_s() for stage in ("gate", "timing")}
        return limits_s | {stage: min(ceiling_s, factor * limit_s) for stage, limit_s in own.items()}

    def _timeout(self, request: Request, stage: str) -> AdaptiveTimeout:
        """The adaptive limit of the gate or of the timing, whose floor is higher: a race waits for a quiet machine."""
        floor_s = self._config.gate_floor_s if stage == "gate" else self._config.timing_floor_s
        timeout = AdaptiveTimeout(floor_s=floor_s, ceiling_s=self._config.measure_timeout_s)
        return self._timeouts.setdefault((request.kernel, request.workload, stage, len(request.cases)), timeout)

    def _note(self, job: Job, result: Evaluation | RaceResult) -> None:
        if isinstance(job.request, Request) and isinstance(result, Evaluation) and result.status is Status.OK:
            self._timeout(job.request, "gate").note(result.load_seconds + result.gate_seconds)
            if job.request.time:
                self._timeout(job.request, "timing").note(result.timing_seconds)


def failure(
    request: Request | RaceRequest, status: Status, log: str, gated: object = None
) -> Evaluation | RaceResult:
    """The result of a candidate that has cost the process. gated: what the gate had found before."""
    if isinstance(request, RaceRequest):
        return RaceResult(log=f"{status}: {log}", device_lost=True)
    checks = gated.checks if isinstance(gated, Evaluation) else ()
    return Evaluation(status=status, checks=checks, log=log, device_lost=True)


def deliver(future: Future[Any], result: object) -> None:
    """Sets a future's result or exception."""
    with suppress(InvalidStateError):  # the future was cancelled meanwhile
        if isinstance(result, CancelledError):
            future.cancel()
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


# -- in the process ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _State:
    """State of a device process. memory_bytes: a candidate's memory beyond twice its data, where that is limited. used: a
    candidate has run. harnesses: the one used last comes last."""

    target: str = ""
    memory_bytes: int = 0
    used: bool = False
    harnesses: dict[TaskData, TimingHarness] = field(default_factory=dict)


_state = _State()


def prepare_device(target: str, scratch: Path, memory_bytes: int, device: str = "") -> None:
    """Sets the process up, without opening the device. device: identity of the only device that the process is to see; if it
    is empty, the process sees all."""
    if device:
        find_target(target).restrict([device])
    name_process("evo-device")
    confine(scratch, limit_files=find_target(target).shares_cores)
    adopt_orphans()
    end_with_command()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a candidate that spins gives Python no turn to handle signals
    _state.target, _state.memory_bytes = target, memory_bytes


@cache
def session() -> Session:
    """The device of this process. Raises DeviceError if there is none."""
    import torch

    torch.set_grad_enabled(False)
    return find_target(_state.target).open()


def _harness(data: TaskData) -> TimingHarness:
    """The harness of a workload, kept with its data as long as others have the memory they need: a run may have more
    workloads than fit. Since workloads take turns, the harness used last is freed first."""
    from evo.measure.harness import TimingHarness

    harnesses = _state.harnesses
    harness = harnesses.pop(data, None)
    if harness is None:
        kernel = load_kernel(data.kernel, data.kernel_digest)
        harness = TimingHarness(kernel, data.target, data.workload, session(), data.seed)
    while harnesses and not find_target(data.target).has_room(harness.wanted_bytes):
        harnesses.popitem()
        gc.collect()  # its parts refer to each other
    harnesses[data] = harness
    return harness


def open_device() -> None:
    """Tests the device with a small computation. Raises DeviceError if there is none, or if the result is wrong."""
    import torch

    from evo.measure.roofline import roofline_of

    device = session()
    try:
        found = torch.arange(_PROBE_ELEMENTS, dtype=torch.int64, device=device.device).square().sum().item()
        device.synchronize()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{device.info.name} does not answer: {reason}") from error
    n = _PROBE_ELEMENTS - 1
    if found != n * (n + 1) * (2 * n + 1) // 6:
        raise DeviceError(f"{device.info.name} computes wrong sums: {found} for the squares up to {n}")
    if not find_target(_state.target).shares_cores:
        roofline_of(device)  # while there is no request yet


def make_ready(data: TaskData, needed: tuple[str, ...] = ("gate", "timing", "case")) -> None:
    """Opens the device, and makes the needed parts of a workload's data that the harness lacks. Raises DeviceError,
    UsageError if they do not fit."""
    with find_target(data.target).torch_as_on(data.arch):
        _make_ready(data, needed)


def _make_ready(data: TaskData, needed: tuple[str, ...]) -> None:
    harness = _harness(data)
    missing = {part for part in needed if harness.lacks(part)}
    if missing or not _state.used:  # a spare is tested again: another process may have broken the device since
        open_device()
    if not missing:
        return
    enter_stage("ready")
    host_code = find_target(data.target).shares_cores
    if host_code:
        limit_data(_UNLIMITED)
    if "timing" in missing:
        harness.prepare()
        missing |= {"case"}.intersection(needed)  # its memory was freed for the races' data
    if "gate" in missing:
        harness.gate.warm_up(data.workload)
    if "case" in missing:
        harness.draw_case()
    session().synchronize()
    if host_code:
        # Baselines return outputs of their own; a sample keeps all of them, as much again as the data.
        limit_data(_state.memory_bytes, times_held=2)
    reap_child()  # a child that is found later is a candidate's
    harness.ready |= missing


def judge(request: Request | RaceRequest) -> Evaluation | RaceResult:
    """Gates a candidate, and times it if it passes and the request asks for times. The stages are "opening", "gate" and
    "timing", with "ready" before the last two where data have to be made; a race has the stage "race" instead.

    A fault may first show in a call of PyTorch: an allocation that fails, an error of the device. Raises DeviceError,
    UsageError; other exceptions only if evo itself is broken.
    """
    data, is_race = request.data, isinstance(request, RaceRequest)
    gating = ("gate", "case") if isinstance(request, Request) and request.cases else ("gate",)
    try:
        make_ready(data, ("timing",) if is_race else gating)
    except (RuntimeError, LaunchError) as error:  # no candidate is loaded yet: other processes take the memory
        if classify(str(error), Status.OK) is not Status.OUT_OF_MEMORY:
            raise
        free = find_target(data.target).free_bytes() / 2**30
        raise DeviceError(
            f"{session().info.name} has no memory for the data of {data.workload.key}, {free:.1f} GiB are free: end what"
            " else uses it, or choose a smaller workload"
        ) from error
    _state.used = True
    enter_stage("race" if is_race else "gate")

    def gated(found: Evaluation) -> None:
        make_ready(data)
        enter_stage("timing", found)

    try:
        harness = _harness(data)
        with find_target(data.target).torch_as_on(data.arch):
            return harness.race(request) if isinstance(request, RaceRequest) else harness.measure(request, gated)
    except (RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        status = classify("OUT OF MEMORY" if isinstance(error, MemoryError) else text, Status.OK)
        if status is Status.OK:
            try:
                open_device()
            except DeviceError:
                return failure(request, Status.LAUNCH_ERROR, text)
            raise
        return failure(request, status, text)
