"""Recorded candidates, found again by what a user calls them, as they are to be built anew."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.runs import find_run, list_runs
from evo.cli.options import command_line
from evo.cli.tables import short_id
from evo.errors import StoreError, UnknownNameError, UsageError
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload, kernel_names, template_root

if TYPE_CHECKING:
    from evo.executors import Request

__all__ = [
    "Recorded",
    "find_candidate",
    "find_winners",
    "is_of",
    "may_be_candidate",
    "may_have_been",
    "named_candidate",
    "source_remark",
    "unknown",
]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A candidate as the database has it, and the database as it was named."""

    record: CandidateRecord
    db: str

    @property
    def request(self) -> Request:
        """What builds it anew."""
        from evo.executors import Request  # most commands only look at what is recorded

        r = self.record
        return Request(
            kernel=r.kernel,
            target=r.target,
            arch=r.arch,
            genome=Genome.of(r.parameters),
            workload=Workload.of(r.dims, r.dtype, r.options),
        )


def unknown(store: Store, name: str) -> UnknownNameError:
    """Of what is neither a run nor a candidate. Runs have names that can be misspelt."""
    return UnknownNameError("run or candidate", name, [run.name for run in list_runs(store)])


def named_candidate(store: Store, name: str, db: str) -> CandidateRecord:
    """The candidate whose identifier begins so.

    Raises UsageError, which of a run's name says what to ask for instead.
    """
    try:
        return read_candidate(store, name)
    except UnknownNameError:
        if hint := _run_hint(store, name, db):
            raise UsageError(hint) from None
        raise


def _run_hint(store: Store, name: str, db: str) -> str:
    """What to do with a run where a candidate is wanted; empty for what is not the name of one."""
    try:
        run = find_run(store, name)
    except (UnknownNameError, StoreError):
        return ""
    leaders = [i.winner or i.best for i in run.tasks]
    shown = [command_line(db, "show", short_id(leader)) for leader in leaders if leader is not None]
    what = "winner" if any(i.winner for i in run.tasks) else "best candidate"
    tell = f"its {what}: {', '.join(shown)}" if shown else f"nothing of it has passed: {command_line(db, 'runs')}"
    return f"{name!r} is a run, and a candidate is wanted; {tell}"


def may_be_candidate(name: str) -> bool:
    """Whether it is written as identifiers are."""
    return bool(name) and set(name.lower()) <= set(string.hexdigits)


def find_candidate(db: str, name: str) -> Recorded:
    """The candidate whose identifier begins so. Raises UsageError, with what `name` could have been instead."""
    hexadecimal = may_be_candidate(name)
    try:
        with Store.open(db, write=False) as store:
            try:
                return Recorded(record=read_candidate(store, name), db=db)
            except UnknownNameError as error:
                known = f"{name!r} is neither a kernel ({', '.join(kernel_names())}) nor known here: {error}"
                if hint := _run_hint(store, name, db) or (known if hexadecimal else ""):
                    raise UsageError(hint) from None
    except StoreError:  # without a database, a word can still be a kernel's name misspelt
        if hexadecimal:
            raise
    raise UnknownNameError("kernel or candidate", name, kernel_names())


def find_winners(db: str, name: str) -> list[Recorded]:
    """The candidate whose identifier begins so, or else the winners of the run whose name does, one a workload.

    Raises UnknownNameError, or StoreError for a run without a winner.
    """
    with Store.open(db, write=False) as store:
        try:
            return [Recorded(record=read_candidate(store, name), db=db)]
        except UnknownNameError:
            try:
                run = find_run(store, name)
            except UnknownNameError:
                raise unknown(store, name) from None
        winners = [i.winner for i in run.tasks if i.winner is not None]
        if not winners:
            raise StoreError(
                f"run {run.name!r} has no winner; name one of its candidates; {command_line(db, 'best')} tells of some"
            )
        return [Recorded(record=read_candidate(store, winner), db=db) for winner in winners]


def is_of(store: Store, name: str, run: str, kernel: Kernel) -> bool:
    """Whether what a run recorded of kernel `name` is of this one: by the name of one that evo brings along or by a whole
    path, whatever its files are now; or because they are what they were. A path from elsewhere can be any kernel's here."""
    place = template_root() / name if name in kernel_names() else Path(name)
    if place.is_absolute() and place.resolve() == kernel.folder.resolve():
        return True
    return find_run(store, run).kernel_digest == kernel.digest


def may_have_been(name: str, kernel: Kernel) -> bool:
    """Whether what is recorded of kernel `name` and not of this one may be so because its files have changed since."""
    is_place = name in kernel_names() or Path(name).is_absolute()
    return not is_place and Path(name).name == kernel.folder.name


def source_remark(recorded: Recorded, digest: str) -> str:
    """What is to be said where the source rendered now, of that digest, is not the recorded one; empty if it is."""
    built = recorded.record.build
    if built is None or not digest or digest == built.source_digest:
        return ""
    recorded_one = command_line(recorded.db, "show", short_id(recorded.record.id), "--source")
    return (
        f"kernel {recorded.record.kernel} has changed since: what its template renders now is not the recorded source"
        f" (that: {recorded_one}); the present one is looked at"
    )
