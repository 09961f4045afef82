"""What builders run: one candidate rendered and compiled. Only names and plain data come in and go out.

Builders are forked from a server that has this module imported (`evo.executors._server`).
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

from evo.errors import CompileError, TemplateError
from evo.evaluation import Build, Status
from evo.executors import BuildRequest
from evo.executors._lifetime import end_with_children, end_with_command
from evo.problem.kernel import load_kernel
from evo.problem.render import render
from evo.targets import find_target
from evo.targets._cache import BuildCache

__all__ = ["build", "prepare_builder", "warm_up_builder"]


def prepare_builder() -> None:
    """A builder ends with its compiler: at once when it is ended, and when the process that wanted it is gone."""
    signal.signal(signal.SIGTERM, lambda *_: end_with_children())
    end_with_command()


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
