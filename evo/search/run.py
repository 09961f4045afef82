"""A whole run, new or taken up again: search, hold the finals, name the winners.

All that a run needs to be continued is in its record, so both ways meet in `execute`.
"""

import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

from evo import __version__
from evo.errors import DeviceError, EvoError, StoreError, TemplateError, error_line
from evo.evaluation import Status
from evo.executors import AskedTarget, Executor, device_name
from evo.lineage import Environment, RunSpec, RunStatus, Stage, StoredRun
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.search.finals import FINALISTS, Begins, Finals, hold_all_finals
from evo.search.loop import Observer, Search, StopReason
from evo.search.tasks import OpenRun, tasks_of

_TRIED_S = 5.0
"""What the memory checker has for a first candidate, which shows that there is one; what it finds is not asked for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `finals` by task; empty if it was interrupted."""

    run: StoredRun
    reason: StopReason
    search: Search
    finals: tuple[Finals, ...] = ()


def check_default(kernel: Kernel, executor: Executor, spec: RunSpec) -> None:
    """Builds the default genome for every workload: a template that cannot even do that is not worth a budget. Where all
    finalists are to be sanitized, that of the first workload is: a tool that is missing is told before the search.

    The binaries are cached, so the search itself has them for nothing. Raises TemplateError with file and line,
    SpaceError if nothing is legal, EvoError with the compiler's first error, DeviceError without the memory checker.
    """
    builds, checked = [], None
    for task in tasks_of(spec, kernel, executor, Stage.SEARCH):
        space = task.space.restricted(spec.options["fixed"])
        genome = Genome.of(space.complete(space.default))
        builds.append((task, task.build(genome)))
        if task.sanitized and checked is None:
            checked = executor.sanitize(task.request(genome), (), _TRIED_S)
    for task, future in builds:
        build = future.result()
        if build.status is Status.RENDER_ERROR:
            raise TemplateError(build.log)
        if build.status is not Status.OK:
            raise EvoError(
                f"the default genome of kernel {kernel.name!r} does not compile for {task.workload}"
                f" ({error_line(build.log) or 'it says nothing'}); mend the template, then try: evo check {task.kernel}"
            )
    if checked is not None and isinstance(error := checked.exception(), DeviceError):
        raise DeviceError(f"finalists cannot be sanitized: {error}") from None


def execute(
    opened: OpenRun,
    observer: Observer,
    *,
    on_search: Callable[[Search], None] = lambda search: None,
    on_finals: Begins = lambda step: None,
) -> Outcome:
    """Carries a new or an interrupted run to its end.

    `on_search` gets the search before it starts, e.g. to connect signals with `Search.interrupt`; `on_finals` each step
    of the finals after it. The finals end by KeyboardInterrupt, and are held anew when the
    run is resumed.
    Raises StoreError if the kernel is not what the run was started with, or the database fails.
    """
    run, store = opened.run, opened.store
    if opened.kernel.digest != run.spec.kernel_digest:
        raise StoreError(
            f"kernel {run.spec.kernel!r} is not what run {run.name!r} recorded: its files have changed, or that evo counted"
            " others among them; start a new run, or check out the files and the evo that it was started with"
        )
    store.set_status(run, RunStatus.RUNNING, elapsed_s=run.elapsed_s)
    search: Search | None = None
    try:
        search = Search(opened, observer)
        on_search(search)
        reason = search.run()
        if reason is StopReason.INTERRUPTED:
            store.set_status(run, RunStatus.INTERRUPTED, reason=reason, elapsed_s=search.elapsed_s)
            return Outcome(run=run, reason=reason, search=search)
        finalists = run.spec.options.get("finalists", FINALISTS)  # runs of before have none
        finals = hold_all_finals(search, opened, finalists, on_finals)
        store.set_status(run, RunStatus.FINISHED, reason=reason, elapsed_s=search.elapsed_s)
        return Outcome(run=run, reason=reason, search=search, finals=finals)
    except BaseException as error:
        elapsed_s = search.elapsed_s if search else run.elapsed_s
        ended = isinstance(error, KeyboardInterrupt | BrokenPipeError)
        why = StopReason.INTERRUPTED if ended else "stopped by an error"
        with suppress(EvoError):  # if the database itself is what failed, the first error says so
            store.set_status(run, RunStatus.INTERRUPTED, reason=why, elapsed_s=elapsed_s)
        raise


def describe_environment(target: AskedTarget, arch: str) -> Environment:
    """Device, driver, compilers and library versions as they are now. Raises DeviceError."""
    info, compiler = target.device(), target.compiler()
    nvrtc = re.match(r"nvrtc ([0-9.]+)", compiler)
    return Environment(
        device=device_name(target, arch),
        arch=info.arch,
        driver=info.driver,
        cuda=info.details.get("cuda_driver", ""),
        nvrtc=nvrtc[1] if nvrtc else "",
        compiler=compiler,
        torch=version("torch"),
        python=platform.python_version(),
        evo=__version__,
        details=dict(info.details),
    )
