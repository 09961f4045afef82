"""What worker processes run. Only names and plain data come in and go out.

Workers are forked from a server that has this module imported (`evo.executors.local`).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from evo.errors import CompileError, EvoError, LaunchError, TemplateError
from evo.evaluation import Build, Check, Measurement, Status
from evo.executors import BuildRequest, MeasureRequest, RaceRequest, RaceResult
from evo.kernel import Workload, load_kernel
from evo.render import render
from evo.targets import Session, find_target
from evo.targets._cache import BuildCache
from evo.timing import Protocol

if TYPE_CHECKING:
    from evo.executors._bench import Bench

__all__ = [
    "build",
    "classify",
    "measure",
    "open_device",
    "prepare_builder",
    "prepare_device",
    "race",
    "warm_up_builder",
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


def prepare_builder() -> None:
    """A builder ends with its compiler: at once when it is ended, and when the process that wanted it is gone."""
    signal.signal(signal.SIGTERM, lambda *_: _end_with_children())
    _prepare_worker()


def _prepare_worker() -> None:
    """In a process group of its own, where ^C on the terminal reaches neither worker nor compiler: they would
    look like failures of the candidates they are at."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="evo-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        _end_with_children()


def _end_with_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def warm_up_builder(target: str) -> None:
    """Has the builders started, and what they import imported."""
    find_target(target)


def build(request: BuildRequest, cache_dir: str) -> Build:
    """Renders and compiles one candidate. A failing candidate is a Build that says so."""
    kernel, target = load_kernel(request.kernel), find_target(request.target)
    compiler = target.compiler()
    try:
        source = render(
            kernel, request.target, request.genome, kernel.binding(request.target, request.workload), request.arch
        )
    except TemplateError as error:
        return Build(
            status=Status.RENDER_ERROR, arch=request.arch, compiler=compiler, source_digest="", log=str(error)
        )
    started = time.perf_counter()
    workdir = Path(tempfile.mkdtemp(prefix="evo-build-"))
    try:
        binary, seconds, cached = BuildCache(Path(cache_dir)).get_or_build(target, source, request.arch, workdir)
    except CompileError as error:
        return Build(
            status=Status.COMPILE_ERROR,
            arch=request.arch,
            compiler=compiler,
            source_digest=source.digest,
            source=source.text,
            seconds=time.perf_counter() - started,
            log=str(error),
        )
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    limits = target.limits(request.arch)
    launch = kernel.launch(request.target, request.genome.parameters, request.workload, limits)
    return Build(
        status=Status.OK,
        arch=request.arch,
        compiler=compiler,
        source_digest=source.digest,
        source=source.text,
        seconds=seconds,
        cached=cached,
        log=binary.log,
        binary=binary,
        smem_dynamic_bytes=launch.smem_bytes,
        occupancy=target.occupancy(binary, launch, limits),
    )


_place: list[tuple[str, int]] = []


def prepare_device(target: str, index: int) -> None:
    """Tells a device process which device is its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a candidate that spins gives Python no turn to handle it
    _prepare_worker()
    _place[:] = [(target, index)]


def open_device() -> None:
    """Opens the device ahead of the first measurement. One that does not open is reported by that."""
    with suppress(EvoError):
        _session()


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
    """Loads, gates and times one binary. Raises only if evo itself is broken."""
    started = time.perf_counter()
    kernel, session = load_kernel(request.kernel), _session()
    bench = _bench(request.kernel, request.target, request.workload, request.seed)
    checks: tuple[Check, ...] = ()
    gated = started
    assert request.build.binary is not None
    try:
        loaded = session.load(request.build.binary, kernel.entry)
    except LaunchError as error:
        return Measurement(
            status=classify(str(error), Status.LOAD_ERROR), log=str(error), seconds=time.perf_counter() - started
        )
    try:
        cases = [
            (case, kernel.launch(request.target, request.genome.parameters, case.workload, session.limits))
            for case in kernel.cases(request.target, request.workload)
        ]
        checks = bench.gate.run(loaded, cases)
        gated = time.perf_counter()
        if not all(c.passed for c in checks):
            return Measurement(
                status=Status.WRONG,
                checks=checks,
                log=f"{checks[-1].case}: {checks[-1].reason}",
                seconds=gated - started,
                gate_seconds=gated - started,
            )
        if not request.time:
            return Measurement(
                status=Status.OK, checks=checks, seconds=gated - started, gate_seconds=gated - started
            )
        reference = next(b for b in kernel.baselines if b.role == "reference")
        launch = kernel.launch(request.target, request.genome.parameters, request.workload, session.limits)
        bench.poison_timed()
        timings = bench.time(
            [bench.candidate("candidate", loaded, launch), bench.baseline(reference)],
            _protocol("search", request.target),
            reference.name,
            keep=frozenset({reference.name}),
        )
        timed = time.perf_counter()
        checks = (*checks, bench.verify_timed(pick=int(request.genome.digest[:8], 16)))
        ended = time.perf_counter()
        passed = checks[-1].passed
        return Measurement(
            status=Status.OK if passed else Status.WRONG,
            checks=checks,
            timings=timings if passed else (),
            log="" if passed else f"{checks[-1].case}: {checks[-1].reason}",
            seconds=ended - started,
            gate_seconds=gated - started + ended - timed,
            timing_seconds=timed - gated,
        )
    except LaunchError as error:
        return Measurement(
            status=classify(str(error), Status.LAUNCH_ERROR),
            checks=checks if all(c.passed for c in checks) else (),
            log=str(error),
            seconds=time.perf_counter() - started,
            device_lost=not _answers(session),
        )
    finally:
        loaded.close()


def race(request: RaceRequest) -> RaceResult:
    """Times contenders and baselines interleaved; every output is verified first."""
    started = time.perf_counter()
    kernel, session = load_kernel(request.kernel), _session()
    bench = _bench(request.kernel, request.target, request.workload, request.seed)
    reference = next(b for b in kernel.baselines if b.role == "reference")
    names = dict.fromkeys((reference.name, *request.baselines))
    refused: list[tuple[str, str]] = []
    entries, loaded_all = [], []
    try:
        for name, genome, built in request.contenders:
            assert built.binary is not None
            launch = kernel.launch(request.target, genome.parameters, request.workload, session.limits)
            try:
                loaded_all.append(session.load(built.binary, kernel.entry))
                entry = bench.candidate(name, loaded_all[-1], launch)
                bench.poison_timed()
                entry.calls[0]()
                session.synchronize()
            except LaunchError as error:
                refused.append((name, str(error)))
                if _answers(session):
                    continue
                raise
            check = bench.verify_timed(pick=int(genome.digest[:8], 16) ^ request.seed & 0xFFFF)
            if check.passed:
                entries.append(entry)
            else:
                refused.append((name, check.reason))
        for name in names:
            baseline = kernel.baseline(name)
            if request.target not in baseline.targets:
                continue
            reason = "" if baseline.role == "ceiling" else bench.check_baseline(baseline)
            if reason and name != reference.name:
                refused.append((name, reason))
            else:
                entries.append(bench.baseline(baseline))
        protocol = _protocol("final", request.target)
        timings = list(bench.time(entries, protocol, reference.name))
        if request.hot and bench.fits_cache:
            timings += bench.time(entries, replace(protocol, name="hot", cold=False), reference.name, sets=1)
    except LaunchError as error:
        return RaceResult(
            log=str(error),
            refused=tuple(refused),
            seconds=time.perf_counter() - started,
            device_lost=not _answers(session),
        )
    finally:
        for loaded in loaded_all:
            loaded.close()
    return RaceResult(timings=tuple(timings), refused=tuple(refused), seconds=time.perf_counter() - started)


def _answers(session: Session) -> bool:
    """Most CUDA errors of a kernel are sticky: the context is lost and reports the same error for ever."""
    try:
        session.synchronize()
    except LaunchError:
        return False
    return True


def classify(message: str, default: Status) -> Status:
    """The status that a device's error message stands for."""
    text = message.upper()
    if "ILLEGAL_ADDRESS" in text or "MISALIGNED_ADDRESS" in text or "ILLEGAL_INSTRUCTION" in text:
        return Status.ILLEGAL_ADDRESS
    if "OUT_OF_MEMORY" in text:
        return Status.OUT_OF_MEMORY
    if "LAUNCH_TIMEOUT" in text:
        return Status.TIMEOUT
    return default


def _protocol(stage: str, target: str) -> Protocol:
    return _PROTOCOLS[stage, find_target(target).shares_cores]


