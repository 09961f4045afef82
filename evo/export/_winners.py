"""The recorded winners of a run, as requests of exporters with their provenance."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.descent import read_family
from evo.analysis.named import find_named, read_winners, workload_of
from evo.analysis.runs import find_run, ranked
from evo.environment import command_line
from evo.errors import StoreError, UsageError
from evo.evaluation import FINALIST, PASSED
from evo.export import Exporter, ExportItem, ExportRequest, find_exporter, publish
from evo.export._package import asked_of
from evo.export.module import remarks as remarks_of
from evo.lineage import RunStatus
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.loading import recorded_kernel
from evo.targets import find_target


def export_all_candidates(store: Store, what: Sequence[str], exporter: Exporter, out: Path) -> list[Path]:
    """Exports a whole run in a format that holds one, and returns the files written.

    Raises UsageError unless `what` is one run, and what the exporter raises."""
    if len(what) != 1:
        raise UsageError(f"{exporter.name} holds one run; name one, not {len(what)}, and export each to a folder of its own")
    run = store.run(find_run(store, what[0]).name)
    return publish(out, exporter.name, lambda: exporter.contents(run, store.evaluations(run)))


def export_run(store: Store, run: str, out: Path, db: str, tell: Callable[[str], None]) -> list[Path]:
    """Exports the winners of a run as a module, and returns the files written. tell: see `choose_winners`. Raises StoreError
    if it has none."""
    return export_winners(requests_of(store, choose_winners(store, run, db, tell), out), find_exporter("module"))[0]


def choose_winners(
    store: Store, name: str, db: str, tell: Callable[[str], None], *, refused: bool = False
) -> list[CandidateRecord]:
    """The winners of the named run, at most one for each workload, or the named candidate.

    tell: is called with a sentence for each workload that has no winner. refused: whether to accept a candidate that the
    finals refused. Raises StoreError for a run whose finals are not over, UsageError for a run without a winner and for a
    candidate that did not pass.
    """
    found = find_named(store, name)
    if isinstance(found, CandidateRecord):
        if found.status not in PASSED:
            raise UsageError(f"candidate {found.id} did not pass ({found.status}: {found.log}); export one that did")
        if found.refusal and not refused:
            raise UsageError(
                f"candidate {found.id} was refused by the finals of run {found.run} ({found.refusal}): its results may be"
                " wrong; export one that passed, or this one nevertheless with --refused"
            )
        return [found]
    without = [task.workload for task in found.tasks if task.winner is None]
    if without and found.status != RunStatus.FINISHED:
        raise StoreError(
            f"run {found.name!r} is {found.status} and has not named its winners: let it end, or continue it with:"
            f" {command_line(db, 'resume', found.name)}; a candidate can be exported by its own name"
        )
    winners = read_winners(store, found, db)
    for workload in without:
        tell(f"nothing won for {workload}: no variant of it is exported")
    return winners


def requests_of(store: Store, chosen: Sequence[CandidateRecord], out: Path) -> list[ExportRequest]:
    """The requests for recorded winners, one for each run."""
    return [_request(store, run, [c for c in chosen if c.run == run], out) for run in dict.fromkeys(c.run for c in chosen)]


def export_winners(
    parts: Sequence[ExportRequest], exporter: Exporter, archs: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """Exports winners; returns the files written, and sentences on what is missing in them or was replaced.

    archs: architectures to build for beside PTX; if empty, those of `builds`, else the one that each was measured on.
    Raises UsageError for winners of several kernels that are not a forward and its backward, or of several targets or
    architectures where the format has no place for them, and what the exporter raises.
    """
    check_alike(parts, several=exporter.holds == "several")
    if exporter.holds != "several":
        if archs:
            raise UsageError(f"--format {exporter.name} holds the code that was measured, and no other: leave out --arch")
        return exporter.export(replace(parts[0], items=tuple(item for part in parts for item in part.items))), []
    for arch in archs:
        if not any(asked_of(part.target, [arch]) for part in parts):
            raise UsageError(f"--arch {arch} is none of target {parts[0].target}, and nothing here is for another")
    built = [
        replace(part, builds=find_target(part.target).with_intermediate(asked))
        for part in parts
        if (asked := asked_of(part.target, archs) or part.builds or (part.arch,))
    ]
    return exporter.export(*built), remarks_of(parts[0].out)


def check_alike(parts: Sequence[ExportRequest], *, several: bool) -> None:
    """Raises UsageError for requests that no export has a place for together. several: it has one for several targets,
    architectures, and a kernel with its backward."""
    first = parts[0]
    for part in parts:
        alike = several or (part.target, part.arch) == (first.target, first.arch)
        if part.kernel != first.kernel:
            one, other = (recorded_kernel(p.kernel, p.digest) for p in (first, part))
            alike = several and (one.backward_of == other.name or other.backward_of == one.name)
        if not alike:
            raise UsageError(
                f"{part.items[0].candidate} is for {part.kernel} on {part.target} {part.arch},"
                f" {first.items[0].candidate} for {first.kernel} on {first.target} {first.arch}: export them to folders of"
                " their own"
            )


def _request(store: Store, run: str, chosen: Sequence[CandidateRecord], out: Path) -> ExportRequest:
    first = chosen[0]
    return ExportRequest(
        kernel=first.kernel,
        digest=first.kernel_digest,
        target=first.target,
        arch=first.arch,
        items=tuple(_item(c, _provenance(store, c), _Alternatives(store, c)) for c in chosen),
        out=out,
        environment=(about := find_run(store, run)).environment,
        few=bool(about.options.get("cover")),
    )


class _Alternatives:
    """The other candidates of a run for the same workload, the best first, each read when it is reached."""

    def __init__(self, store: Store, record: CandidateRecord) -> None:
        self._store, self._record = store, record

    def __iter__(self) -> Iterator[ExportItem]:
        record = self._record
        for name in ranked(self._store, record.run, record.task):
            if name != record.id:
                other = read_candidate(self._store, name)
                yield _item(other, _origin(other))


def _item(record: CandidateRecord, provenance: dict[str, object], alternatives: Iterable[ExportItem] = ()) -> ExportItem:
    return ExportItem(
        workload=workload_of(record, record.kernel_digest),
        genome=Genome.of(record.parameters),
        candidate=record.id,
        record=provenance,
        score=math.inf if record.score is None else record.score,
        alternatives=alternatives,
    )


def _origin(record: CandidateRecord) -> dict[str, object]:
    return {
        "run": record.run,
        "candidate": record.id,
        "order": record.order,
        "operator": record.operator,
        "device": record.device,
        "created": record.created,
        "source_digest": record.build.source_digest if record.build else None,
    }


def _provenance(store: Store, record: CandidateRecord) -> dict[str, object]:
    """The record of a winner in a manifest."""
    latest = max((t.round for t in record.timings), default=0)
    stages = {t.stage for t in record.timings if t.round == latest}
    beside = [r for r in record.final_races if r.round == latest and r.beside]
    return {
        **_origin(record),
        "code_hash": record.build.code_hash if record.build else None,
        "winner": record.winner,
        **({"refused": record.refusal} if record.refusal else {}),
        "timed_in": "final" if "final" in stages else "search",
        "timings": [asdict(t) for t in record.timings if t.round == latest and t.contender != FINALIST],
        "baselines": [asdict(t) for race in beside for t in race.timings],
        "checks": [asdict(c) for c in record.checks if c.round == latest],
        "lineage": [
            {"id": s.id, "order": s.order, "operator": s.operator, "change": s.change, "gain": s.gain}
            for s in read_family(store, record.id, descendants=0).members
        ],
    }
