"""Searching from Python: `evo.search(...)` and `evo.resume(...)`, on what the commands of these names do."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo.analysis.failures import read_failures
from evo.analysis.runs import Best, find_best, find_run
from evo.cli import fill_standard_files
from evo.cli.export import export_run
from evo.cli.options import DEFAULT_DB, check_seed, command_line, make_console
from evo.cli.search import follow, open_again, open_search
from evo.errors import EvoError, UsageError
from evo.executors import Executor
from evo.lineage import StoredRun
from evo.lineage.store import Store
from evo.problem.kernel import Kernel
from evo.problem.space import Value
from evo.report.text import counted

__all__ = ["Run", "resume", "search"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in a lineage database, as `evo.search` left it. interrupted: it ended before its finals were over, and `resume`
    continues it; everything finished is stored."""

    name: str
    db: str
    interrupted: bool

    def best(self) -> tuple[Best, ...]:
        """The winner of each workload, with its time in microseconds, its speed-up over PyTorch and the interval; the
        fastest candidate so far where no final was held. Workloads of which nothing passed are left out; raises EvoError,
        which says why, if that are all."""
        with Store.open(self.db, write=False) as store:
            if found := find_best(store, run=self.name):
                return found
            run = find_run(store, self.name)
            most = next(iter(read_failures(store, self.name).reasons), None)
        ended = "interrupted" if self.interrupted else run.stop_reason
        tried = f"of {counted(run.evaluations, 'candidate')} none passed" if run.evaluations else "no candidate was finished"
        reason = f", most often {most.status.replace('_', ' ')}: {most.example}" if most is not None else ""
        longer = f"search longer with Run.resume, or: {command_line(self.db, 'resume', self.name, '--budget', '10m')}"
        raise EvoError(f"run {self.name} has no result ({ended}): {tried}{reason}; {longer}")

    def export(self, out: str | Path) -> list[Path]:
        """The files of a package that stands alone, written to the folder `out`, as `evo export --format module` does.
        Raises UsageError where there is no winner, or something else is in the folder."""
        with Store.open(self.db, write=False) as store:
            return export_run(store, self.name, Path(out), self.db)

    def resume(
        self, budget: str | float | None = None, *, evaluations: int | None = None, progress: bool = True, **place: Any
    ) -> Run:
        """As `evo.resume`. place: its other arguments, which say where."""
        return resume(self.name, budget=budget, evaluations=evaluations, db=self.db, progress=progress, **place)


def search(
    kernel: str | Path | Kernel,
    *,
    workloads: Sequence[str] = (),
    cover: Sequence[str] = (),
    target: str | None = None,
    arch: str | None = None,
    budget: str | float | None = None,
    evaluations: int | None = None,
    patience: int | None = None,
    sampler: str | None = None,
    sampler_options: Mapping[str, object] | None = None,
    seed: int | None = None,
    fix: Mapping[str, Value] | None = None,
    start: Sequence[str] = (),
    cold: bool = False,
    builders: int | None = None,
    devices: str | None = None,
    executor: str | None = None,
    scheduler: str | None = None,
    cluster: str | Path | None = None,
    finalists: int | None = None,
    sanitize_finals: bool = False,
    name: str | None = None,
    db: str | Path = DEFAULT_DB,
    progress: bool = True,
) -> Run:
    """Searches for faster variants of a kernel, and holds the finals. Each argument is the option of `evo search`.

    kernel: its name, its folder, or a Kernel that was loaded from one: worker processes load it from there. budget: "60s",
    "10m", or seconds; 60 s where no limit is given. progress: prints how it goes.

    An interrupt (SIGINT) ends the search in order, a second one at once; the run says so. A search in which nothing passed
    is no error; `Run.best` then says why. Call it from any thread; only the main one sees
    interrupts. Raises UsageError, which names the command's option, for what cannot be searched; EvoError where the work
    failed.
    """
    job: dict[str, Any] = dict(locals())  # by the parameters' names, which are the command's
    fill_standard_files()
    if isinstance(kernel, Kernel):
        if kernel.folder == Path():
            raise UsageError(
                f"kernel {kernel.name!r} was not loaded from a folder, and worker processes load it from there: write it to"
                " FOLDER/kernel.py as KERNEL, and search that folder"
            )
        kernel = str(kernel.folder)
    for option, texts in (("workloads", workloads), ("cover", cover), ("start", start)):
        if isinstance(texts, str):
            raise UsageError(f"{option} must be a list of texts, got {texts!r}")
    numbers = {"builders": builders, "finalists": finalists, "evaluations": evaluations, "patience": patience, "seed": seed}
    for option, value in job.items():
        if value == "":
            raise UsageError(f"{option} is empty; leave it out, or give it a value")
        if (number := numbers.get(option)) is not None and type(number) is not int:
            raise UsageError(f"{option} must be a whole number, got {number!r}")
    for option, number in (("builders", builders), ("finalists", finalists)):
        if number is not None and number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}")
    db = os.fspath(db)
    job |= {
        "kernel": os.fspath(kernel),
        "budget": None if budget is None else str(budget),
        "sampler_options": dict(sampler_options or {}),
        "seed": check_seed(seed),
        "fix": [f"{parameter}={value}" for parameter, value in (fix or {}).items()],
    }
    with open_search(job, db) as (store, run, workers):
        return _follow(store, run, workers, db, progress)


def resume(
    run: str = "latest",
    *,
    budget: str | float | None = None,
    evaluations: int | None = None,
    devices: str | None = None,
    executor: str | None = None,
    scheduler: str | None = None,
    cluster: str | Path | None = None,
    db: str | Path = DEFAULT_DB,
    progress: bool = True,
) -> Run:
    """Continues a run that was interrupted, or one that is finished with a larger budget: one for the run as a whole.

    run: its name, or a unique beginning. Raises UsageError for a run that is not there or has nothing left to do, and for
    another device, driver, compiler or PyTorch than it was measured with.
    """
    fill_standard_files()
    db, place = os.fspath(db), {"devices": devices, "executor": executor, "scheduler": scheduler, "cluster": cluster}
    with open_again(run, db, None if budget is None else str(budget), evaluations, place) as (store, stored, workers):
        return _follow(store, stored, workers, db, progress, resumed=True)


def _follow(
    store: Store, run: StoredRun, executor: Executor, db: str, progress: bool, *, resumed: bool = False
) -> Run:
    console = make_console()
    console.quiet = not progress
    outcome = follow(store, run, executor, console, resumed=resumed, ending=(signal.SIGINT,))
    return Run(name=run.name, db=db, interrupted=outcome is None)
