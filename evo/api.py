"""Searching from Python: `evo.search` and `evo.resume` do what the commands of these names do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Unpack

from evo.analysis.failures import read_failures
from evo.analysis.finals import read_run_finals
from evo.analysis.frame import Records
from evo.analysis.runs import Best, find_best, find_run
from evo.environment import DEFAULT_DB, command_line, fill_standard_files
from evo.errors import EvoError, TakenError, UsageError
from evo.export._winners import export_run
from evo.job.in_python import in_python, told_in_python
from evo.job.job import OPTIONS, Options, make_job, read_budget, read_options, read_place
from evo.job.opening import find_begun, open_again, open_search
from evo.lineage import RunStatus, StoredRun
from evo.lineage.store import Store
from evo.problem.kernel import Kernel
from evo.report.notebook import Cell, in_notebook
from evo.report.outcome import outcome_record, print_outcome
from evo.report.progress import follow
from evo.report.terminal import make_console, notice
from evo.report.text import counted
from evo.search.loop import Budget, StopReason
from evo.search.tasks import OpenRun

__all__ = ["Run", "resume", "search"]

_LIMITS: dict[str, str] = {
    StopReason.TIME: "seconds", StopReason.EVALUATIONS: "evaluations", StopReason.PATIENCE: "patience",
}  # fmt: skip
"""The limit of a budget that ends a run for this reason."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in a lineage database, as `evo.search` left it. interrupted: it ended before its finals were over, and `resume`
    continues it; everything finished is stored."""

    name: str
    db: str
    interrupted: bool

    def best(self) -> Records[Best]:
        """The winner of each workload, with its time in microseconds, its speed-up over PyTorch and the interval; the
        fastest candidate so far where no final was held. Workloads of which nothing passed are left out; raises EvoError,
        which says why, if that are all."""
        with told_in_python(self.db), Store.open(self.db, write=False) as store:
            if found := find_best(store, run=self.name):
                return Records(found)
            run = find_run(store, self.name)
            most = next(iter(read_failures(store, self.name).reasons), None)
        ended = "interrupted" if self.interrupted else run.stop_reason
        tried = f"of {counted(run.evaluations, 'candidate')} none passed" if run.evaluations else "no candidate was finished"
        reason = f", most often {most.status.replace('_', ' ')}: {most.example}" if most is not None else ""
        longer = in_python(command_line(self.db, "resume", self.name, "--budget", "10m"), self.db)
        raise EvoError(f"run {self.name} has no result ({ended}): {tried}{reason}; search longer: {longer}")

    def export(self, out: str | Path) -> list[Path]:
        """The files of a package that stands alone, written to the folder `out`, as `evo export --format module` does.
        Raises UsageError where there is no winner, or something else is in the folder."""
        with told_in_python(self.db), Store.open(self.db, write=False) as store:
            return export_run(store, self.name, Path(out), self.db, _teller(self.db))

    def resume(
        self, budget: str | float | None = None, *, evaluations: int | None = None, progress: bool = True, **place: Any
    ) -> Run:
        """Continues the run, as `evo.resume` does. place: its other arguments, which say where."""
        return resume(self.name, budget=budget, evaluations=evaluations, db=self.db, progress=progress, **place)


def search(
    kernel: str | Path | Kernel,
    *,
    resume: bool = False,
    db: str | Path = DEFAULT_DB,
    progress: bool = True,
    **options: Unpack[Options],
) -> Run:
    """Searches for faster variants of a kernel, and holds the finals.

    kernel: its name, its folder, or a Kernel that was loaded from one: worker processes load it from there. progress: prints
    how it goes. resume: the run of this name, if there is one, is continued; one that is finished is left as it is, so that
    a cell can be run twice. Each other argument is an option of `evo search`. budget: "60s", "10m", or seconds; 60 s where
    no limit is given.

    An interrupt (SIGINT) ends the search in order, a second one at once; the run says so. A search in which nothing passed
    is no error; `Run.best` then says why. Call it from any thread; only the main one sees interrupts. Raises UsageError,
    for what cannot be searched; EvoError where the work failed.
    """
    fill_standard_files()
    started, db = time.time(), os.fspath(db)
    tell = _teller(db)
    with told_in_python(db):
        job, limit = make_job(kernel, options), read_budget(read_options(options))
        if resume and job.name is None:
            raise UsageError("resume=True continues the run of a name; give name, too")
        if (begun := find_begun(job, options, db, tell) if resume else None) is None:
            opening = open_search(job, db, tell)
        elif begun.status is RunStatus.FINISHED and not _is_more(limit, begun):
            if progress:
                tell(f"run {begun.name} is finished ({begun.stop_reason}); a larger --budget or --evaluations searches on")
            return Run(name=begun.name, db=db, interrupted=False)
        else:
            opening = open_again(begun.name, db, tell, budget=limit, place=job.place)
        with _resumable(), opening as opened:
            return _follow(opened, db, progress, started, resumed=begun is not None, log=job.log)


_own = signature(search).parameters
_named = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=False if kind is bool else None, annotation=kind)
    for name, kind in OPTIONS.items()
]
# Notebooks and `help` show each option.
search.__signature__ = Signature([_own["kernel"], *_named, _own["resume"], _own["db"], _own["progress"]])  # type: ignore[attr-defined]


def resume(
    run: str = "latest",
    *,
    budget: str | float | None = None,
    evaluations: int | None = None,
    devices: str | None = None,
    on: str | Path | None = None,
    db: str | Path = DEFAULT_DB,
    progress: bool = True,
    **others: object,
) -> Run:
    """Continues a run that was interrupted, or one that is finished with a larger budget: one for the run as a whole.

    run: its name, or a unique beginning. others: are refused. Raises UsageError for a run that is not there or
    has nothing left to do, and for another device, driver, compiler or PyTorch than it was measured with.
    """
    fill_standard_files()
    started = time.time()
    place = {"budget": budget, "evaluations": evaluations, "devices": devices, "on": on}
    db = os.fspath(db)
    with told_in_python(db):
        given = read_options(place | others, place)
        with open_again(run, db, _teller(db), budget=read_budget(given), place=read_place(given)) as opened:
            return _follow(opened, db, progress, started, resumed=True)


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except TakenError as error:
        error.args = (f"{error}, or here with resume=True",)
        raise


def _is_more(limit: Budget | None, finished: StoredRun) -> bool:
    """Whether the limit that has ended a run is another one's no longer."""
    name = _LIMITS.get(finished.stop_reason)
    if limit is None or name is None:
        return False
    now: float | None = getattr(limit, name)
    return now is None or now > finished.spec.budget[name]


def _teller(db: str) -> Callable[[str], None]:
    return lambda text: notice(in_python(text, db))


def _follow(
    opened: OpenRun, db: str, progress: bool, started: float, *, resumed: bool = False, log: Path | None = None
) -> Run:
    console = Cell() if in_notebook() else make_console()
    console.quiet, console.words = not progress, partial(in_python, db=db)
    name = opened.run.name
    outcome = follow(opened, console, resumed=resumed, ending=(signal.SIGINT,), log=log)
    if outcome is None:
        again = command_line(db, "resume", name)
        console.say(f"run {name} is interrupted; everything finished is stored. Continue with: {again}")
    elif progress:
        found = read_run_finals(opened.store, name, opened.kernel.ceilings)
        print_outcome(console, outcome_record(outcome, found, started, opened.store), found, opened.kernel, db)
    return Run(name=name, db=db, interrupted=outcome is None)
