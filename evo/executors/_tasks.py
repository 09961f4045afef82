"""What the device process runs with a candidate: gate, timing, race. Only names and plain data come in and go out."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from evo.errors import LaunchError
from evo.evaluation import Check, Measurement, Status, Timing
from evo.executors import MeasureRequest, RaceRequest, RaceResult
from evo.executors._faults import classify
from evo.executors._lifetime import end_with_command
from evo.executors._worker import halfway
from evo.kernel import Kernel, Workload, load_kernel
from evo.targets import Loaded, Session, find_target
from evo.timing import CLOSE, Protocol

if TYPE_CHECKING:
    from evo.executors._bench import Bench, Contender

__all__ = [
    "measure",
    "prepare_device",
    "race",
]

_PROTOCOLS = {
    ("search", False): Protocol(
        name="cold", min_rounds=6, max_rounds=10, sample_us=300.0, precision=0.015, limit_s=4.0
    ),
    ("search", True): Protocol(
        name="cold", min_rounds=4, max_rounds=6, sample_us=1500.0, precision=0.03, limit_s=4.0
    ),
    ("final", False): Protocol(
        name="final", min_rounds=30, max_rounds=60, sample_us=1000.0, precision=0.003, limit_s=20.0
    ),
    ("final", True): Protocol(
        name="final", min_rounds=16, max_rounds=40, sample_us=4000.0, precision=0.01, limit_s=20.0
    ),
}
"""By stage and by whether the target shares its cores with everything else (and is therefore noisier)."""


_place: list[tuple[str, int]] = []


def prepare_device(target: str, index: int) -> None:
    """Tells a device process which device is its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a candidate that spins gives Python no turn to handle it
    end_with_command()
    _place[:] = [(target, index)]


@cache
def _session() -> Session:
    import torch

    torch.set_grad_enabled(False)
    target, index = _place[0]
    return find_target(target).open(index)


@cache
def _bench(kernel_name: str, target: str, workload: Workload, seed: int) -> Bench:
    from evo.executors._bench import Bench

    return Bench(load_kernel(kernel_name), target, workload, _session(), seed)


def measure(request: MeasureRequest) -> Measurement:
    """Loads, gates and times one binary: from cheap to dear, up to the first refusal. Raises only if evo itself is
    broken."""
    started = time.perf_counter()
    kernel, session = load_kernel(request.kernel), _session()
    bench = _bench(request.kernel, request.target, request.workload, request.seed)
    assert request.build.binary is not None
    try:
        loaded = session.load(request.build.binary, kernel.entry)
    except LaunchError as error:
        return Measurement(
            status=classify(str(error), Status.LOAD_ERROR), log=str(error), seconds=time.perf_counter() - started
        )
    found = _Findings(started=started, loaded=time.perf_counter())
    try:
        _examine(request, kernel, bench, loaded, found)
    except LaunchError as error:
        found.checks = tuple(c for c in found.checks if c.passed)
        found.refuse(classify(str(error), Status.LAUNCH_ERROR), str(error))
        found.device_lost = not _answers(session)
    finally:
        loaded.close()
    return found.measurement()


@dataclass(kw_only=True)
class _Findings:
    """What is known of a candidate so far, and when each stage ended (seconds of the performance counter)."""

    started: float
    loaded: float
    status: Status = Status.OK
    log: str = ""
    checks: tuple[Check, ...] = ()
    timings: tuple[Timing, ...] = ()
    gate_seconds: float = 0.0
    timing_seconds: float = 0.0
    device_lost: bool = False

    def refuse(self, status: Status, log: str) -> None:
        self.status, self.log = status, log

    def measurement(self) -> Measurement:
        return Measurement(
            status=self.status,
            checks=self.checks,
            timings=self.timings if self.status is Status.OK else (),
            log=self.log,
            seconds=time.perf_counter() - self.started,
            load_seconds=self.loaded - self.started,
            gate_seconds=self.gate_seconds,
            timing_seconds=self.timing_seconds,
            device_lost=self.device_lost,
        )


def _examine(request: MeasureRequest, kernel: Kernel, bench: Bench, loaded: Loaded, found: _Findings) -> None:
    """Gate, timing, and a look at what the timed calls wrote. Raises LaunchError."""
    point, limits = request.genome.parameters, _session().limits
    cases = [
        (case, kernel.launch(request.target, point, case.workload, limits))
        for case in kernel.cases(request.target, request.workload)
    ]
    found.checks = bench.gate.run(loaded, cases)
    halfway()
    gated = time.perf_counter()
    found.gate_seconds = gated - found.loaded
    if not all(c.passed for c in found.checks):
        found.refuse(Status.WRONG, f"{found.checks[-1].case}: {found.checks[-1].reason}")
        return
    if not request.time:
        return
    launch = kernel.launch(request.target, point, request.workload, limits)
    found.timings = _time(request, kernel, bench, bench.candidate("candidate", loaded, launch))
    timed = time.perf_counter()
    found.timing_seconds = timed - gated
    found.checks = (*found.checks, bench.verify_timed(pick=int(request.genome.digest[:8], 16)))
    found.gate_seconds += time.perf_counter() - timed
    if not found.checks[-1].passed:
        found.refuse(Status.WRONG, f"{found.checks[-1].case}: {found.checks[-1].reason}")
    elif reason := bench.impossible(found.timings, "candidate"):
        found.checks = (*found.checks[:-1], replace(found.checks[-1], passed=False, reason=reason))
        found.refuse(Status.IMPOSSIBLE, reason)


def _time(request: MeasureRequest, kernel: Kernel, bench: Bench, candidate: Contender) -> tuple[Timing, ...]:
    """Beside the reference; and again beside the rival too, if the candidate comes close to that."""
    reference = bench.baseline(kernel.reference_baseline)
    protocol, kept, rival = _protocol("search", request.target), frozenset({reference.name}), request.rival
    timings = bench.time(
        [candidate, reference],
        protocol,
        reference.name,
        keep=kept,
        rival=rival.ratio if rival else None,
        surprise=True,
    )
    if rival is None or (timings[0].ratio or 0.0) > CLOSE * rival.ratio:
        return timings
    other = bench.rival(rival)
    if other is None:
        return timings
    return bench.time([candidate, other, reference], protocol, reference.name, keep=kept, surprise=True)


def race(request: RaceRequest) -> RaceResult:
    """Times contenders and baselines interleaved; every output is verified, before the race and after it."""
    started = time.perf_counter()
    kernel, session = load_kernel(request.kernel), _session()
    bench = _bench(request.kernel, request.target, request.workload, request.seed)
    reference = kernel.reference_baseline
    refused: dict[str, str] = {}
    entries: list[Contender] = []
    loaded_all: list[Loaded] = []

    def verify(entry: Contender, pick: int) -> bool:
        """Whether a contender is right. Raises LaunchError if the device is lost with it."""
        try:
            bench.call_witnesses(entry)
        except LaunchError as error:
            refused[entry.name] = str(error)
            if _answers(session):
                return False
            raise
        check = bench.verify_timed(pick=pick ^ request.seed & 0xFFFF)
        if not check.passed:
            refused[entry.name] = check.reason
        return check.passed

    try:
        for name, genome, built in request.contenders:
            assert built.binary is not None
            launch = kernel.launch(request.target, genome.parameters, request.workload, session.limits)
            try:
                loaded_all.append(session.load(built.binary, kernel.entry))
            except LaunchError as error:
                refused[name] = str(error)
                continue
            entry = bench.candidate(name, loaded_all[-1], launch)
            if verify(entry, pick=int(genome.digest[:8], 16)):
                entries.append(entry)
        contenders = list(entries)
        for name in dict.fromkeys((reference.name, *request.baselines)):
            baseline = kernel.baseline(name)
            if request.target not in baseline.targets:
                continue
            reason = "" if baseline.role == "ceiling" else bench.check_baseline(baseline)
            if reason and name != reference.name:
                refused[name] = reason
            else:
                entries.append(bench.baseline(baseline))
        protocol = _protocol("final", request.target)
        timings = list(bench.time(entries, protocol, reference.name))
        if request.hot and bench.fits_cache:
            timings += bench.time(entries, replace(protocol, name="hot", cold=False), reference.name, sets=1)
        for entry in contenders:
            if not verify(entry, pick=1):
                continue
            if reason := bench.impossible(timings, entry.name):
                refused[entry.name] = reason
    except LaunchError as error:
        return RaceResult(
            log=str(error),
            refused=tuple(refused.items()),
            seconds=time.perf_counter() - started,
            device_lost=not _answers(session),
        )
    finally:
        for loaded in loaded_all:
            loaded.close()
    return RaceResult(
        timings=tuple(t for t in timings if t.contender not in refused),
        refused=tuple(refused.items()),
        seconds=time.perf_counter() - started,
    )


def _answers(session: Session) -> bool:
    """Most CUDA errors of a kernel are sticky: the context is lost and reports the same error for ever."""
    try:
        session.synchronize()
    except LaunchError:
        return False
    return True


def _protocol(stage: str, target: str) -> Protocol:
    return _PROTOCOLS[stage, find_target(target).shares_cores]
