"""What the device process runs with a candidate: gate, timing, race. Only names and plain data come in and go out."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from evo.errors import DeviceError, HangError, LaunchError
from evo.evaluation import BOOTSTRAP_SAMPLES, Build, Evaluation, Status, Timing
from evo.measure import RaceRequest, RaceResult, Request
from evo.measure.clock import CLOSE, Protocol
from evo.problem.kernel import Workload, load_kernel
from evo.targets import Loaded, Session, classify, find_target

if TYPE_CHECKING:
    from evo.measure.harness import Calls, TimingHarness

__all__ = ["choose_device", "measure", "open_device", "probe", "race", "set_up"]

_T = TypeVar("_T")

_PROTOCOLS = {
    ("search", False): Protocol(
        name="cold", min_rounds=6, max_rounds=10, sample_us=200.0, precision=0.015, limit_s=4.0
    ),
    ("search", True): Protocol(
        name="cold", min_rounds=4, max_rounds=6, sample_us=1500.0, precision=0.03, limit_s=4.0
    ),
    ("final", False): Protocol(
        name="final",
        min_rounds=30,
        max_rounds=60,
        sample_us=1000.0,
        precision=0.003,
        limit_s=20.0,
        least_rounds=BOOTSTRAP_SAMPLES,
    ),
    ("final", True): Protocol(
        name="final",
        min_rounds=16,
        max_rounds=40,
        sample_us=4000.0,
        precision=0.01,
        limit_s=20.0,
        least_rounds=BOOTSTRAP_SAMPLES,
    ),
}
"""By stage and by whether the target shares its cores with everything else (and is therefore noisier)."""

_TRIGGERS_DEPENDENTS = (
    "the code lets the kernel after it start before it has ended (griddepcontrol.launch_dependents): its calls would"
    " overlap where they are timed, one behind the other, and hardly anywhere else"
)

_PROBE_ELEMENTS = 1 << 16

_NUMBERS = [1.0, 2.0**-60, sys.float_info.min]  # a list, so that nothing is computed ahead

_place: list[tuple[str, int]] = []


def choose_device(target: str, index: int) -> None:
    """Tells a device process which device is its own. It is opened when it is first used."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a candidate that spins gives Python no turn to handle it
    _place[:] = [(target, index)]


@cache
def open_device() -> Session:
    """The process's device. Raises DeviceError if there is none."""
    import torch

    torch.set_grad_enabled(False)
    target, index = _place[0]
    return find_target(target).open(index)


def probe() -> None:
    """A small computation whose result is known. Raises DeviceError if the device does not give it."""
    import torch

    session = open_device()
    try:
        found = torch.arange(_PROBE_ELEMENTS, dtype=torch.int64, device=session.device).square().sum().item()
        session.synchronize()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{session.info.name} does not answer: {reason}") from error
    n = _PROBE_ELEMENTS - 1
    if found != n * (n + 1) * (2 * n + 1) // 6:
        raise DeviceError(f"{session.info.name} computes wrong sums: {found} for the squares up to {n}")


def set_up(kernel: str, target: str, workload: Workload, seed: int, *, gate: bool = True, timing: bool = True) -> None:
    """Makes the data that all candidates of a workload are judged with, once, and warms the gate up. No candidate runs
    meanwhile. Raises UsageError if the data do not fit."""
    harness = _harness(kernel, target, workload, seed)
    if timing:
        harness.prepare()
    if gate:
        harness.gate.warm_up(workload)
    open_device().synchronize()


@cache
def _harness(kernel_name: str, target: str, workload: Workload, seed: int) -> TimingHarness:
    from evo.measure.harness import TimingHarness

    return TimingHarness(load_kernel(kernel_name), target, workload, open_device(), seed)


def measure(request: Request, gated: Callable[[Evaluation], None] = lambda found: None) -> Evaluation:
    """Loads one binary, runs it on the gate's cases up to the first refusal, and times it if it passes and that is asked
    for; then looks at what the timed calls wrote. Raises only if evo itself is broken.

    gated: called between the gate and the timing, with what the gate has found.
    """
    return _judged(
        lambda: _measure(request, gated), lambda status, log: Evaluation(status=status, log=log, device_lost=True)
    )


def race(request: RaceRequest) -> RaceResult:
    """Times contenders and baselines interleaved. Each contender is verified before the race, and checked in it."""
    return _judged(lambda: _race(request), lambda status, log: RaceResult(log=f"{status}: {log}", device_lost=True))


def _judged(task: Callable[[], _T], failed: Callable[[Status, str], _T]) -> _T:
    """A task's result, or `failed` where its candidate is at fault.

    A fault may first show in a call of PyTorch: an allocation that fails, an error of the device. A candidate on the CPU may
    change how its process computes, also for the candidates after it.
    """
    session = open_device()
    before = _arithmetic() if session.device.type == "cpu" else None
    try:
        result = task()
        if before is not None and (reason := _changed_arithmetic(before)):
            return failed(Status.CRASH, reason)
        return result
    except (RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
        status = classify("OUT OF MEMORY" if isinstance(error, MemoryError) else text, Status.OK)
        if status is Status.OK:
            try:
                probe()
            except DeviceError:
                return failed(Status.LAUNCH_ERROR, text)
            raise
        return failed(status, text)


def _arithmetic() -> tuple[int, tuple[float, ...]]:
    """The number of threads that PyTorch computes with, and sums that depend on the rounding mode.

    A call of omp_set_num_threads changes the first. A rounding mode that is not restored changes the second, and so does
    code linked with -ffast-math, where denormal numbers count as zero.
    """
    import torch

    one, tiny, smallest = _NUMBERS
    return torch.get_num_threads(), (one + tiny, one - tiny, -one - tiny, smallest / 2)


def _changed_arithmetic(before: tuple[int, tuple[float, ...]]) -> str:
    threads, rounding = _arithmetic()
    if threads != before[0]:
        return f"it changed with how many threads its process computes, from {before[0]} to {threads}"
    return "it changed how its process rounds floating-point numbers" if rounding != before[1] else ""


def _measure(request: Request, gated: Callable[[Evaluation], None]) -> Evaluation:
    started = time.perf_counter()
    harness = _harness(request.kernel, request.target, request.workload, request.seed)
    found, loaded = Evaluation(status=Status.OK), None
    try:
        loaded = _load(request.build, harness)
        found = replace(found, load_seconds=time.perf_counter() - started)
        found = _gate(request, harness, loaded, found)
        if request.time and found.status is Status.OK:
            gated(found)
            found = _clock(request, harness, loaded, found)
    except HangError as error:
        found = replace(found, status=Status.TIMEOUT, log=str(error), device_lost=True)
        loaded = None  # unloading would wait for the launch
    except LaunchError as error:
        status = classify(str(error), Status.LOAD_ERROR if loaded is None else Status.LAUNCH_ERROR)
        found = replace(found, status=status, log=str(error), device_lost=not _answers())
    finally:
        if loaded is not None:
            loaded.close()
    lost = found.device_lost or harness.data_changed
    return replace(found, seconds=time.perf_counter() - started, device_lost=lost)


def _load(build: Build | None, harness: TimingHarness) -> Loaded:
    """Raises LaunchError, also for code that must not be loaded."""
    assert build is not None
    assert build.binary is not None
    if build.binary.triggers_dependents:
        raise LaunchError(_TRIGGERS_DEPENDENTS)
    return open_device().load(build.binary, harness.kernel.entry)


def _gate(request: Request, harness: TimingHarness, loaded: Loaded, found: Evaluation) -> Evaluation:
    """Raises LaunchError."""
    started = time.perf_counter()
    cases = [
        (case, harness.launch(request.genome, case.workload))
        for case in harness.kernel.cases(request.target, request.workload)
    ]
    checks = harness.gate.run(loaded, cases, launch_limit_s=request.launch_limit_s)
    found = replace(found, checks=checks, gate_seconds=time.perf_counter() - started)
    return found if all(c.passed for c in checks) else _refused(found, Status.WRONG)


def _clock(request: Request, harness: TimingHarness, loaded: Loaded, found: Evaluation) -> Evaluation:
    """Raises LaunchError."""
    started = time.perf_counter()
    launch = harness.launch(request.genome)
    candidate = harness.candidate(loaded, launch)
    timings = _time(request, harness, candidate)
    timed = time.perf_counter()
    check, status = harness.complaint("candidate"), Status.WRONG
    if check.passed and (reason := harness.reads_early(candidate, programmatic=launch.programmatic)):
        check = replace(check, passed=False, reason=reason)
    if check.passed and (reason := harness.impossible(timings, "candidate")):
        check, status = replace(check, passed=False, reason=reason), Status.IMPOSSIBLE
    found = replace(
        found,
        checks=(*found.checks, check),
        gate_seconds=found.gate_seconds + time.perf_counter() - timed,
        timing_seconds=timed - started,
    )
    return replace(found, timings=timings) if check.passed else _refused(found, status)


def _refused(found: Evaluation, status: Status) -> Evaluation:
    """By its last check."""
    last = found.checks[-1]
    return replace(found, status=status, log=last.reason if status is Status.IMPOSSIBLE else f"{last.case}: {last.reason}")


def _time(request: Request, harness: TimingHarness, candidate: Calls) -> tuple[Timing, ...]:
    """Beside the reference; and again beside the incumbent too, if the candidate comes close to that."""
    reference = harness.kernel.reference_baseline
    entries = {"candidate": candidate, reference.name: harness.baseline(reference)}
    protocol, incumbent = _protocol("search", request.target), request.incumbent
    ratio = incumbent.ratio if incumbent else None
    race = partial(harness.time, protocol=protocol, reference=reference.name, keep=reference.name, checked=("candidate",))
    timings = race(entries, incumbent=ratio)
    is_close = ratio is not None and (timings[0].ratio or 0.0) <= CLOSE * ratio
    if incumbent is None or not is_close or not harness.complaint("candidate").passed:
        return timings
    try:
        other = harness.incumbent(incumbent)
    except LaunchError:  # no fault of the candidate, if the device still answers: it has its times
        if _answers():
            return timings
        raise
    return timings if other is None else race({"candidate": candidate, "incumbent": other, **entries})


def _race(request: RaceRequest) -> RaceResult:
    started = time.perf_counter()
    harness = _harness(request.kernel, request.target, request.workload, request.seed)
    kernel, reference = harness.kernel, harness.kernel.reference_baseline
    refused: dict[str, str] = {}
    contenders: dict[str, Calls] = {}
    baselines: dict[str, Calls] = {}
    loaded_all: list[Loaded] = []

    def result(timings: Sequence[Timing] = (), log: str = "", *, lost: bool = False) -> RaceResult:
        return RaceResult(
            timings=tuple(t for t in timings if t.contender not in refused),
            refused=tuple(refused.items()),
            log=log,
            seconds=time.perf_counter() - started,
            device_lost=lost,
        )

    def time_all(protocol: Protocol, sets: int | None = None) -> tuple[Timing, ...]:
        entries = {**contenders, **baselines}
        timings = harness.time(entries, protocol, reference.name, sets=sets, checked=tuple(contenders))
        checks = {name: harness.complaint(name) for name in contenders}
        refused.update({name: check.reason for name, check in checks.items() if not check.passed})
        return timings

    try:
        for name, genome, built in request.contenders:
            launch = harness.launch(genome)
            try:
                loaded_all.append(_load(built, harness))
                calls = harness.candidate(loaded_all[-1], launch)
                check = harness.verify(calls, programmatic=launch.programmatic)
                if check.passed:
                    contenders[name] = calls
                else:
                    refused[name] = check.reason
            except LaunchError as error:
                refused[name] = str(error)
                if not _answers():
                    raise
            if harness.data_changed:  # nobody else can be judged any more
                return result(log=refused[name], lost=True)
        for name in dict.fromkeys((reference.name, *request.baselines)):
            baseline = kernel.baseline(name)
            if request.target not in baseline.targets:
                continue
            reason = "" if baseline.role == "ceiling" else harness.check_baseline(baseline)
            if reason and name != reference.name:
                refused[name] = reason
            else:
                baselines[name] = harness.baseline(baseline)
        protocol = _protocol("final", request.target)
        timings = list(time_all(protocol))
        if request.hot and harness.fits_cache and not harness.data_changed:
            timings += time_all(replace(protocol, name="hot", cold=False), sets=1)
        if harness.data_changed:  # by which of several, the race does not tell; each alone does
            log = next(iter(refused.values()))
            if len({built.binary for _, _, built in request.contenders}) > 1:
                refused.clear()
            return result(log=log, lost=True)
        for name in contenders.keys() - refused.keys():
            if reason := harness.impossible(timings, name):
                refused[name] = reason
        return result(timings)
    except LaunchError as error:
        return result(log=str(error), lost=not _answers())
    finally:
        for loaded in loaded_all:
            loaded.close()


def _answers() -> bool:
    """Most CUDA errors of a kernel are sticky: the context is lost and reports the same error for ever."""
    try:
        open_device().synchronize()
    except LaunchError:
        return False
    return True


def _protocol(stage: str, target: str) -> Protocol:
    return _PROTOCOLS[stage, find_target(target).shares_cores]
