"""Recorded runs and candidates, found again by what a user calls them."""

import string
from contextlib import suppress
from pathlib import Path

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import RunSummary, find_run, list_runs
from evo.environment import command_line
from evo.errors import UnknownNameError, UsageError
from evo.lineage.store import Store
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import kernel_names, recorded_kernel, template_root


def short(identifier: str) -> str:
    """The beginning of a candidate's identifier, as it is printed."""
    return identifier[:10]


def find_named(store: Store, name: str) -> RunSummary | CandidateRecord:
    """The run whose name begins so, else the candidate whose identifier does.

    Raises UnknownNameError, or StoreError for the beginning of several.
    """
    with suppress(UnknownNameError):
        return find_run(store, name)
    try:
        return read_candidate(store, name)
    except UnknownNameError:
        if may_be_candidate(name):
            raise
    known = [run.name for run in list_runs(store)]  # these can be misspelt
    raise UnknownNameError("run or candidate", name, known)


def find_winners(store: Store, name: str, db: str) -> list[CandidateRecord]:
    """The winners of the run of that name, one a workload, or the candidate. Raises as `find_named` does, and UsageError
    for a run without a winner."""
    found = find_named(store, name)
    return [found] if isinstance(found, CandidateRecord) else read_winners(store, found, db)


def read_winners(store: Store, run: RunSummary, db: str) -> list[CandidateRecord]:
    """The winners of a run, one for each workload that has one. Raises UsageError if none has."""
    if winners := [task.winner for task in run.tasks if task.winner is not None]:
        return [read_candidate(store, winner) for winner in winners]
    best = [command_line(db, "show", short(task.best)) for task in run.tasks if task.best is not None]
    raise UsageError(
        f"run {run.name!r} has no winner; " + (f"its best candidate: {', '.join(best)}" if best else "nothing of it passed")
    )


def find_candidate(store: Store, name: str, db: str) -> CandidateRecord:
    """The candidate of that name, or the only winner of the run. Raises as `find_winners` does, and UsageError for a run
    of several winners."""
    first, *others = find_winners(store, name, db)
    if others:
        several = ", ".join(f"{short(r.id)} for {r.workload}" for r in (first, *others))
        raise UsageError(f"run {first.run!r} has a winner for each workload ({several}); name one of them")
    return first


def may_be_candidate(name: str) -> bool:
    """Whether a name is written as identifiers are."""
    return bool(name) and set(name.lower()) <= set(string.hexdigits)


def workload_of(record: CandidateRecord, digest: str | None = None) -> Workload:
    """The workload of a candidate. Options that its kernel has gained since have their defaults. digest: see
    `recorded_kernel`. Raises UsageError for what is no workload of the kernel: what a database calls a dtype would name
    files."""
    recorded = Workload.of(record.dims, record.dtype, record.options)
    return recorded_kernel(record.kernel, digest).workload(record.target, recorded.key)


def is_of(store: Store, name: str, run: str, kernel: Kernel) -> bool:
    """Whether what a run recorded of kernel `name` is of this kernel: by the name of one that evo brings along or by a whole
    path, whatever its files are now; or because they are what they were. A path from elsewhere can be any kernel's here."""
    place = template_root() / name if name in kernel_names() else Path(name)
    if place.is_absolute() and place.resolve() == kernel.folder.resolve():
        return True
    return find_run(store, run).kernel_digest == kernel.digest
