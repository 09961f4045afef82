"""The difference of two candidates: what is not the same, and how much faster one is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from evo.analysis.candidates import CandidateRecord, read_candidate
from evo.analysis.descent import unified
from evo.analysis.times import HeldRace, RaceTime, gain_between, gain_fields, gain_within, held_races, search_times
from evo.evaluation import Gain
from evo.lineage.models import candidate_key
from evo.lineage.read import read_artefacts, resolve_run
from evo.lineage.store import Store

_CANDIDATE = (
    "run", "order", "kernel", "target", "arch", "device", "workload", "kernel_digest", "operator", "status",
)  # fmt: skip
_BUILD = (
    "registers", "spill_bytes", "stack_bytes", "smem_static_bytes", "smem_dynamic_bytes", "occupancy", "source_digest",
    "code_hash",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """One property of both. section: candidate, genome, build or time. one, other: the values; None where not known."""

    section: str
    name: str
    one: Any
    other: Any
    differs: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two candidates.

    gain: the first one's time over the second's (above 1: the second is faster); None where they were not timed on one
    device for one workload. timed_in: "final" if both were timed in one, else "search". one_race: whether both times are of
    one race, the last one of all finalists that both ran in; else each is of a race of its own, a winner's of the one that
    confirmed it. source, ptx: unified diffs; empty for equal texts, None where one is not kept. same_code: whether their
    machine code is equal; None where one has none.
    """

    one: str
    other: str
    rows: tuple[DifferenceRow, ...]
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    tie: bool | None
    timed_in: str | None
    one_race: bool
    same_code: bool | None
    source: str | None
    ptx: str | None


def diff(store: Store, one: str, other: str) -> Difference:
    """The difference of two candidates, of one run or of two."""
    first, second = records = [read_candidate(store, name) for name in (one, other)]
    digests = [(record.source, record.build and record.build.binary) for record in records]
    with store.reading() as connection:
        times, together = _read_times(connection, records)
        kept = read_artefacts(connection, {digest for pair in digests for digest in pair if digest})
    sources, codes = ([kept.get(digest or "") for digest in some] for some in zip(*digests, strict=True))
    comparable = all(getattr(first, name) == getattr(second, name) for name in ("kernel", "device", "workload"))
    timed_in, one_race, gain = _gain(times, together) if comparable else (None, False, None)
    names = [f"{record.id} #{record.order}" for record in records]
    hashes = [record.build and record.build.code_hash for record in records]
    one_facts, other_facts = (_facts(record, found) for record, found in zip(records, times, strict=True))
    rows = (
        DifferenceRow(section=section, name=name, one=a.get(name), other=b.get(name), differs=a.get(name) != b.get(name))
        for (section, a), b in zip(one_facts.items(), other_facts.values(), strict=True)
        for name in dict.fromkeys((*a, *b))
    )
    return Difference(
        one=first.id,
        other=second.id,
        rows=tuple(rows),
        **gain_fields(gain),
        timed_in=timed_in,
        one_race=one_race,
        same_code=None if None in hashes else hashes[0] == hashes[1],
        source=unified(sources, names),
        ptx=unified([code if code and _is_ptx(code) else None for code in codes], names),
    )


def _facts(record: CandidateRecord, times: Mapping[str, RaceTime]) -> dict[str, Mapping[str, Any]]:
    """The compared properties of a candidate, by section and name."""
    build = record.build
    return {
        "candidate": {name: getattr(record, name) for name in _CANDIDATE} | {"compiler": build and build.compiler},
        "genome": record.parameters,
        "build": {"build_seconds": build and build.seconds, **{name: getattr(build, name, None) for name in _BUILD}}
        | ({"launch": dict(build.launch)} if build and build.launch else {}),
        "time": {f"{stage} {name}": value for stage, time in times.items() for name, value in time.figures().items()},
    }


def _read_times(connection: Connection, records: Sequence[CandidateRecord]) -> tuple[list[dict[str, RaceTime]], bool]:
    """Cold times of two candidates, each by the kind of its race, and whether both `final` times are of one race.

    Kinds: "search"; "final", the race of all finalists, the last one that both ran in or else the candidate's own last one;
    "confirmed", the race that confirmed a winner.
    """
    runs = [resolve_run(connection, record.run) for record in records]
    keys = [candidate_key(run, record.order) for run, record in zip(runs, records, strict=True)]
    held = [held_races(connection, run, record.task) for run, record in zip(runs, records, strict=True)]
    alike = (runs[0], records[0].task) == (runs[1], records[1].task)
    both = [race for race in held[0] if alike and race.common.keys() >= set(keys)]
    found = []
    for run, key, own in zip(runs, keys, held, strict=True):
        race = (both or [race for race in own if key in race.common] or [HeldRace()])[-1]
        parts = {"search": search_times(connection, run, [key]), "final": race.common, "confirmed": race.confirmed}
        found.append({stage: some[key] for stage, some in parts.items() if key in some})
    return found, bool(both)


def _gain(times: Sequence[Mapping[str, RaceTime]], together: bool) -> tuple[str | None, bool, Gain | None]:
    """The stage in which two candidates are compared, whether that is one race, and the gain."""
    one, other = times
    if together:
        return "final", True, gain_within(one["final"], other["final"])
    finals = [found.get("confirmed") or found.get("final") for found in times]
    if all(finals):
        return "final", False, gain_between(*finals)
    gain = gain_between(one.get("search"), other.get("search"))
    return "search" if gain else None, False, gain


def _is_ptx(code: bytes) -> bool:
    return not code.startswith(b"\x7fELF") and b".version" in code[:4096]
