"""What workers run: builders render and compile, the device worker gates and times. Only names and plain data come in and go
out. Workers are forked from a server that has this module imported (`evo.executors._processes`)."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from evo.errors import CompileError, TemplateError
from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, MeasureRequest, RaceRequest, RaceResult
from evo.executors._limits import confine_builder, confine_candidate, limit_data, reap_child
from evo.executors._processes import end_with_children, end_with_command
from evo.executors._worker import enter_stage
from evo.measure import tasks as measuring
from evo.problem.kernel import Workload, load_kernel
from evo.problem.render import render
from evo.targets import find_target
from evo.targets._cache import BuildCache

__all__ = [
    "Data",
    "build",
    "load_target",
    "make_ready",
    "measure",
    "open_device",
    "prepare_builder",
    "prepare_device",
    "race",
]

_UNLIMITED = 1 << 60

# -- builders -----------------------------------------------------------------------------------------------------


def prepare_builder(scratch: Path, memory_bytes: int) -> None:
    """A builder ends with its compiler: at once when it is ended, and when the process that wanted it is gone."""
    confine_builder(scratch, memory_bytes)
    signal.signal(signal.SIGTERM, lambda *_: end_with_children())
    end_with_command()


def load_target(name: str) -> None:
    """Imports what builders need."""
    find_target(name)


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


# -- the device worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Data:
    """What all candidates of a workload are judged with."""

    kernel: str
    target: str
    workload: Workload
    seed: int


@dataclass(kw_only=True)
class _State:
    """Of this process."""

    memory_bytes: int = 0
    """What a candidate may take beyond twice its data, where its memory is limited."""
    used: bool = False
    """A candidate has run in it."""
    ready: dict[Data, set[str]] = field(default_factory=dict)
    """For which of "gate" and "timing" there are data."""


_state = _State()


def prepare_device(target: str, index: int, scratch: Path, memory_bytes: int) -> None:
    """Opens nothing yet."""
    confine_candidate(scratch, host_code=find_target(target).shares_cores)
    end_with_command()
    measuring.choose_device(target, index)
    _state.memory_bytes = memory_bytes


def open_device() -> None:
    """Raises DeviceError if there is none, or if it does not compute."""
    measuring.open_device()
    measuring.probe()


def make_ready(data: Data, needed: tuple[str, ...] = ("gate", "timing")) -> None:
    """Opens the device, and makes the data of a workload, for the gate and for timing, once. Raises DeviceError, UsageError
    if they do not fit."""
    ready = _state.ready.setdefault(data, set())
    missing = set(needed) - ready
    if missing or not _state.used:  # a spare is probed again: since it was opened another process has broken something
        open_device()
    if not missing:
        return
    enter_stage("ready")
    host_code = find_target(data.target).shares_cores
    if host_code:
        limit_data(_UNLIMITED)
    measuring.set_up(
        data.kernel, data.target, data.workload, data.seed, gate="gate" in missing, timing="timing" in missing
    )
    if host_code:
        # Baselines return outputs of their own, and those of a whole sample are kept: as much again as the data.
        limit_data(_state.memory_bytes, times_held=2)
    reap_child()  # what is found later is a candidate's
    ready |= missing


def measure(request: MeasureRequest) -> Measurement:
    """Gates a candidate, and times it if it passes and that is asked for. Its stages are "opening", "gate" and "timing",
    with "ready" before either if there are data to be made.

    Raises DeviceError, UsageError; otherwise only if evo itself is broken.
    """
    data = _begin(request, "gate")

    def gated(found: Measurement) -> None:
        make_ready(data)
        enter_stage("timing", found)

    return measuring.measure(request, gated)


def race(request: RaceRequest) -> RaceResult:
    """Likewise, with the stage "race"."""
    _begin(request, "race")
    return measuring.race(request)


def _begin(request: MeasureRequest | RaceRequest, stage: str) -> Data:
    data = Data(kernel=request.kernel, target=request.target, workload=request.workload, seed=request.seed)
    make_ready(data, ("timing",) if stage == "race" else (stage,))
    _state.used = True
    enter_stage(stage)
    return data
