"""Recorded candidates, found again by what a user calls them, as they are to be built anew."""

from __future__ import annotations

import string
from dataclasses import dataclass

from evo.errors import StoreError, UnknownNameError, UsageError
from evo.executors import BuildRequest
from evo.genome import Genome
from evo.kernel import Workload, kernel_names
from evo.run import gate_seeds
from evo.store import Stage, queries
from evo.store.candidates import candidate
from evo.store.records import CandidateRecord
from evo.store.store import Store

__all__ = ["Recorded", "find_candidate", "find_winners", "source_remark"]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A candidate as the database has it, and the seeds its run drew the gate's data with."""

    record: CandidateRecord
    seeds: dict[Stage, int]

    @property
    def request(self) -> BuildRequest:
        """What builds it anew."""
        r = self.record
        return BuildRequest(
            kernel=r.kernel,
            target=r.target,
            arch=r.arch,
            genome=Genome.of(r.parameters, r.flags),
            workload=Workload.of(r.dims, r.dtype, r.options),
        )


def find_candidate(db: str, name: str) -> Recorded:
    """The candidate whose identifier begins so. Raises UsageError, with what `name` could have been instead."""
    if not name or not set(name.lower()) <= set(string.hexdigits):
        raise UnknownNameError("kernel or candidate", name, kernel_names())
    try:
        with Store.open(db, write=False) as store:
            return _recorded(store, name)
    except UnknownNameError as error:
        raise UsageError(f"{name!r} is neither a kernel ({', '.join(kernel_names())}) nor known here: {error}") from None


def find_winners(db: str, name: str) -> list[Recorded]:
    """The candidate whose identifier begins so, or else the winners of the run whose name does, one a workload.

    Raises UnknownNameError, or StoreError for a run without a winner.
    """
    with Store.open(db, write=False) as store:
        try:
            return [_recorded(store, name)]
        except UnknownNameError as error:
            try:
                run = queries.run(store, name)
            except UnknownNameError:
                raise UsageError(f"{name!r} is no run, and {error}") from None
        winners = [i.winner for i in run.islands if i.winner is not None]
        if not winners:
            raise StoreError(f"run {run.name!r} has no winner; name one of its candidates: evo best tells of some")
        return [_recorded(store, winner) for winner in winners]


def _recorded(store: Store, prefix: str) -> Recorded:
    record = candidate(store, prefix)
    run = queries.run(store, record.run)
    return Recorded(record=record, seeds=gate_seeds(run.options, run.seed))


def source_remark(recorded: Recorded, digest: str) -> str:
    """What is to be said where the source rendered now, of that digest, is not the recorded one; empty if it is."""
    built = recorded.record.build
    if built is None or not digest or digest == built.source_digest:
        return ""
    return (
        f"kernel {recorded.record.kernel} has changed since: what its template renders now is not the recorded source"
        f" (that: evo show {recorded.record.id[:10]} --source); the present one is looked at"
    )
