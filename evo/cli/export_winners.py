"""What `evo export` asks of an exporter: winners and named candidates as requests, each for one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from evo.analysis.best import ranked
from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.descent import read_family
from evo.analysis.runs import find_run
from evo.errors import UsageError
from evo.evaluation import FINALIST
from evo.export import Combining, Exporter, ExportItem, ExportRequest
from evo.export._builds import asked_of, with_ptx
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

__all__ = ["export_winners"]


def export_winners(
    store: Store, chosen: Sequence[CandidateRecord], exporter: Exporter, out: Path, archs: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """The files written, and what is not in them as it was asked for: a sentence each.

    archs: what to build for beside PTX; none: what each was measured on. Raises UsageError for candidates of several
    kernels, or of several targets or architectures where the format has no place for them; what the exporter raises.
    """
    combined = isinstance(exporter, Combining)
    _check_alike(chosen, across_targets=combined)
    runs = dict.fromkeys(c.run for c in chosen)
    parts = [_request(store, run, [c for c in chosen if c.run == run], out) for run in runs]
    if not isinstance(exporter, Combining):
        if archs:
            raise UsageError(f"--format {exporter.name} holds the code that was measured, and no other: leave out --arch")
        return exporter.export(replace(parts[0], items=tuple(item for part in parts for item in part.items))), []
    for arch in archs:
        if not any(asked_of(part.target, [arch]) for part in parts):
            raise UsageError(f"--arch {arch} is none of target {parts[0].target}, and nothing here is for another")
    built = [replace(part, builds=with_ptx(asked_of(part.target, archs) or (part.arch,))) for part in parts]
    return exporter.export_together(built), exporter.remarks(out)


def _check_alike(chosen: Sequence[CandidateRecord], *, across_targets: bool) -> None:
    first = chosen[0]
    for record in chosen:
        alike = across_targets or (record.target, record.arch) == (first.target, first.arch)
        if record.kernel != first.kernel or not alike:
            raise UsageError(
                f"{record.id} is for {record.kernel} on {record.target} {record.arch}, {first.id} for {first.kernel} on"
                f" {first.target} {first.arch}: export them to folders of their own"
            )


def _request(store: Store, run: str, chosen: Sequence[CandidateRecord], out: Path) -> ExportRequest:
    first = chosen[0]
    return ExportRequest(
        kernel=first.kernel,
        target=first.target,
        arch=first.arch,
        items=tuple(
            ExportItem(
                workload=Workload.of(c.dims, c.dtype, c.options),
                genome=Genome.of(c.parameters),
                candidate=c.id,
                record=_provenance(store, c),
                alternatives=_Alternatives(store, c),
            )
            for c in chosen
        ),
        out=out,
        environment=find_run(store, run).environment,
    )


class _Alternatives:
    """The other candidates for the workload of one, in its run, the best first; read when they are asked for."""

    def __init__(self, store: Store, record: CandidateRecord) -> None:
        self._store, self._record = store, record

    def __iter__(self) -> Iterator[ExportItem]:
        record = self._record
        for name in ranked(self._store, record.run, record.task):
            if name != record.id:
                c = read_candidate(self._store, name)
                workload = Workload.of(c.dims, c.dtype, c.options)
                genome = Genome.of(c.parameters)
                yield ExportItem(workload=workload, genome=genome, candidate=c.id, record=_origin(c))


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
    """What a manifest says of a winner."""
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
