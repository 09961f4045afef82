"""Recorded candidates: finding them by the names that users give, and building them anew."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import RunSummary, find_run, list_runs
from evo.cli.options import command_line
from evo.cli.tables import say
from evo.errors import EvoError, UnknownNameError, UsageError
from evo.evaluation import Check
from evo.lineage.store import Store
from evo.measure.cases import is_case_text
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import kernel_names, load_kernel, recorded_kernel, template_root
from evo.report.text import short

if TYPE_CHECKING:
    from evo.executors import Executor
    from evo.search.tasks import TaskExecutor


def find_named(store: Store, name: str) -> RunSummary | CandidateRecord:
    """The run whose name begins so, or else the candidate whose identifier does. Raises UnknownNameError, or StoreError for
    the beginning of several."""
    with suppress(UnknownNameError):
        return find_run(store, name)
    try:
        return read_candidate(store, name)
    except UnknownNameError:
        if may_be_candidate(name):
            raise
    known = [run.name for run in list_runs(store)]  # the name may be a misspelt one of these
    raise UnknownNameError("run or candidate", name, known)


def find_winners(store: Store, name: str, db: str) -> list[CandidateRecord]:
    """The winners of the named run, one a workload, or the named candidate. Raises as `find_named` does, and UsageError for
    a run without a winner."""
    found = find_named(store, name)
    return [found] if isinstance(found, CandidateRecord) else read_winners(store, found, db)


def read_winners(store: Store, run: RunSummary, db: str) -> list[CandidateRecord]:
    """The winner of each workload that has one. Raises UsageError if none has."""
    if winners := [task.winner for task in run.tasks if task.winner is not None]:
        return [read_candidate(store, winner) for winner in winners]
    best = [command_line(db, "show", short(task.best)) for task in run.tasks if task.best is not None]
    raise UsageError(
        f"run {run.name!r} has no winner; " + (f"its best candidate: {', '.join(best)}" if best else "nothing of it passed")
    )


def find_candidate(store: Store, name: str, db: str) -> CandidateRecord:
    """The named candidate, or the only winner of the named run. Raises as `find_winners` does, and UsageError for a run of
    several winners."""
    first, *others = find_winners(store, name, db)
    if others:
        several = ", ".join(f"{short(r.id)} for {r.workload}" for r in (first, *others))
        raise UsageError(f"run {first.run!r} has a winner for each workload ({several}); name one of them")
    return first


def may_be_candidate(name: str) -> bool:
    """Whether a name is written as identifiers are."""
    return bool(name) and set(name.lower()) <= set(string.hexdigits)


def task_of(record: CandidateRecord, executor: Executor, seed: int) -> TaskExecutor:
    """The executor that builds, gates and times a candidate, and others beside it."""
    from evo.search.tasks import TaskExecutor  # most commands only read the database

    workload = workload_of(record)
    return TaskExecutor(
        executor=executor, kernel=record.kernel, target=record.target, arch=record.arch, workload=workload, seed=seed
    )


def trusted(trust: bool, *kernels: str) -> None:
    """Loads what a database calls its kernels if --trust is given, so that `recorded_kernel` takes them for the user's own.
    Raises as `load_kernel` does."""
    for kernel in dict.fromkeys(kernels) if trust else ():
        load_kernel(kernel)


def look(trust: bool, *kernels: tuple[str, str]) -> None:
    """Does what `trusted` does for a record that can be shown without its kernel; a line on stderr names a kernel that is
    not run. kernels: each with the recorded digest."""
    for name, digest in dict.fromkeys(kernels):
        try:
            trusted(trust, name)
            recorded_kernel(name, digest)
        except EvoError as error:
            if trust or type(error) is UsageError:  # a missing kernel is not worth a line
                say(f"evo: {error}", err=True)


def workload_of(record: CandidateRecord, digest: str | None = None) -> Workload:
    """A candidate's workload; options that its kernel has gained since have their defaults. digest: see `recorded_kernel`.
    Raises UsageError for what is no workload of the kernel, because a dtype out of a database would name files."""
    recorded = Workload.of(record.dims, record.dtype, record.options)
    return recorded_kernel(record.kernel, digest).workload(record.target, recorded.key)


def is_of(store: Store, name: str, run: str, kernel: Kernel) -> bool:
    """Whether a run's recorded kernel `name` is this kernel: by the name of a kernel that comes with evo or by an absolute
    path, whatever its files are now; else because the files are the same, as a relative path may be any kernel's here."""
    place = template_root() / name if name in kernel_names() else Path(name)
    if place.is_absolute() and place.resolve() == kernel.folder.resolve():
        return True
    return find_run(store, run).kernel_digest == kernel.digest


def source_remarks(record: CandidateRecord, digest: str, db: str) -> list[str]:
    """Remarks if the source rendered now, which has that digest, is not the recorded one."""
    if record.build is None or digest in ("", record.build.source_digest):
        return []
    return [
        f"kernel {record.kernel} has changed since: what its template renders now is not the recorded source"
        f" (that: {command_line(db, 'show', short(record.id), '--source')}); the present one is looked at"
    ]


def drawn_case(last: Check) -> str:
    """The random case by which the last check of a verdict refused; empty for one of the kernel's own."""
    return last.case if not last.passed and is_case_text(last.case) else ""


def verdicts_of(recorded: CandidateRecord) -> Iterator[dict[str, Any]]:
    """The recorded verdicts, round by round, each with the values that repeat it."""
    for (round_, stage), group in groupby(recorded.checks, lambda check: (check.round, check.stage)):
        checks = list(group)
        yield {
            "stage": stage,
            "round": round_,
            "cases": len(checks),
            "passed": sum(c.passed for c in checks),
            "seed": recorded.seeds[stage],
            "case": drawn_case(checks[-1]),
            # Only finals have random cases, beside the one of the timed size that every gate has.
            "random_cases": max(0, sum(is_case_text(c.case) for c in checks) - 1),
        }


def again_line(db: str, candidate: str, seed: int, case: str = "", random_cases: int = 0) -> str:
    """The command that repeats a verdict. random_cases: the number that were run, used unless `case` names one."""
    options = ("--case", case) if case else ("--cases", str(random_cases)) if random_cases else ()
    return command_line(db, "check", candidate, "--seed", str(seed), *options)
