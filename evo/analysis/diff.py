"""Two candidates side by side: what differs between them, and how much faster one is."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from sqlalchemy import Connection, and_, select

from evo.analysis.candidates import read_artefacts, resolve_candidate
from evo.analysis.descent import unified
from evo.analysis.times import Gain, HeldRace, RaceTime, gain_between, gain_within, held_races, search_times
from evo.lineage import models as m
from evo.lineage.store import Store
from evo.problem.genome import Genome

__all__ = ["Difference", "DifferenceRow", "code_statistics", "diff"]

_c = m.Candidate
_BUILD = ("registers", "spill_bytes", "stack_bytes", "smem_static_bytes", "smem_dynamic_bytes", "occupancy")
_CUDA_MACHINE = ("EM_CUDA", 190)
_SASS_BYTES = 16
"""Of an instruction, from Volta on."""
_PADDING = struct.Struct("<H")
_SASS_NOP = 0x918
_SASS_OPCODE = 0xFFF
"""The low 12 bits of an instruction say what it is (as nvdisasm prints them beside its text)."""
_PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9]*)(?:\.[\w:.]+)?(?:\s[^;{]*)?;", re.MULTILINE)
_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PROBLEM = ("kernel", "target", "arch", "device", "workload")


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """One thing about both. section: candidate, genome, build, code or time. None: not known, or not there."""

    section: str
    name: str
    one: Any
    other: Any
    differs: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """gain: the first one's time over the second's (above 1: the second is faster), of `timed_in`: their finals if both
    have one, else the search; None where they were not timed on one device for one workload. one_race: whether both times
    are of one race, the last that all finalists of a final ran in; else each is of its own race, a winner's of that which
    confirmed it. source, ptx: unified diffs; empty for equal texts, None where one is not kept. same_code: of equal machine
    code, None where one has none.
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
    """What distinguishes two candidates, of one run or of two.

    Raises UnknownNameError, or StoreError for an ambiguous prefix.
    """
    with store.reading() as connection:
        keys = [resolve_candidate(connection, name) for name in (one, other)]
        rows = [_read(connection, key) for key in keys]
        times = _read_times(connection, rows)
        wanted = {s for row in rows for s in (row.source_sha, row.binary_sha) if s}
        kept = read_artefacts(connection, wanted)
    codes = [kept.get(row.binary_sha) for row in rows]
    comparable = all(
        getattr(rows[0], name) == getattr(rows[1], name) for name in ("kernel", "device", "workload")
    )
    timed_in, one_race, gain = _gain(times) if comparable else (None, False, None)
    hashes = [row.code_hash for row in rows]
    found = [
        *_candidate_rows(rows),
        *_genome_rows(rows),
        *_build_rows(rows),
        *_code_rows(codes),
        *_time_rows(times),
    ]
    return Difference(
        one=rows[0].public_id,
        other=rows[1].public_id,
        rows=tuple(found),
        gain=gain.gain if gain else None,
        gain_low=gain.low if gain else None,
        gain_high=gain.high if gain else None,
        tie=gain.tie if gain else None,
        timed_in=timed_in,
        one_race=one_race,
        same_code=None if None in hashes else hashes[0] == hashes[1],
        source=_text_diff(rows, [kept.get(row.source_sha) for row in rows]),
        ptx=_text_diff(rows, [code if code and _is_ptx(code) else None for code in codes]),
    )


def _read(connection: Connection, key: int) -> Any:
    i, r, e, b = m.Task, m.Run, m.Environment, m.Build
    query = (
        select(
            *(column for column in _c.__table__.c if column.name != "log"),
            i.workload,
            r.name.label("run"),
            r.kernel,
            r.kernel_digest,
            r.target,
            r.arch,
            e.device,
            b.compiler,
            b.source_digest,
            b.code_hash,
            b.binary_sha,
            b.seconds.label("build_seconds"),
            *(getattr(b, name) for name in _BUILD),
        )
        .join_from(_c, i, and_(i.run_id == _c.run_id, i.number == _c.task))
        .join(r, r.id == i.run_id)
        .join(e, e.id == r.environment_id)
        .join(b, b.candidate_id == _c.id, isouter=True)
    )
    return connection.execute(query.where(_c.id == key)).one()


@dataclass(frozen=True, kw_only=True)
class _Times:
    """A candidate's cold times. final: in the race of all finalists, the last that both of two ran in, or else its own last
    one; confirmed: a winner's, in the race that confirmed it. together: `final` is of one race with the other's."""

    search: RaceTime | None
    final: RaceTime | None
    confirmed: RaceTime | None
    together: bool

    def stages(self) -> dict[str, RaceTime | None]:
        return {"search": self.search, "final": self.final, "confirmed": self.confirmed}


def _read_times(connection: Connection, rows: list[Any]) -> list[_Times]:
    finals = [held_races(connection, row.run_id, row.task) for row in rows]
    alike = (rows[0].run_id, rows[0].task) == (rows[1].run_id, rows[1].task)
    both = [race for race in finals[0] if alike and all(row.id in race.common() for row in rows)]
    found = []
    for row, own in zip(rows, finals, strict=True):
        race = (both or [race for race in own if row.id in race.common()] or [HeldRace()])[-1]
        found.append(
            _Times(
                search=search_times(connection, row.run_id, [row.id]).get(row.id),
                final=race.common().get(row.id),
                confirmed=race.confirmed().get(row.id),
                together=bool(both),
            )
        )
    return found


def _gain(times: list[_Times]) -> tuple[str | None, bool, Gain | None]:
    """(stage, of one race, gain)."""
    one, other = times
    if one.together and one.final is not None and other.final is not None:
        return "final", True, gain_within(one.final, other.final)
    finals = [f.confirmed or f.final for f in times]
    if all(finals):
        return "final", False, gain_between(*finals)
    if one.search is not None and other.search is not None:
        return "search", False, gain_between(one.search, other.search)
    return None, False, None


def _row(section: str, name: str, one: Any, other: Any) -> DifferenceRow:
    return DifferenceRow(section=section, name=name, one=one, other=other, differs=one != other)


def _candidate_rows(rows: list[Any]) -> Iterator[DifferenceRow]:
    for name in ("run", "order", *_PROBLEM, "kernel_digest", "operator", "status", "compiler"):
        yield _row("candidate", name, *(getattr(row, name) for row in rows))


def _genome_rows(rows: list[Any]) -> Iterator[DifferenceRow]:
    one, other = (Genome.from_json(row.genome) for row in rows)
    a, b = one.parameters, other.parameters
    for name in sorted(a.keys() | b.keys()):
        yield _row("genome", name, a.get(name), b.get(name))


def _build_rows(rows: list[Any]) -> Iterator[DifferenceRow]:
    for name in (*_BUILD, "build_seconds", "source_digest", "code_hash"):
        yield _row("build", name, *(getattr(row, name) for row in rows))


def _code_rows(codes: list[bytes | None]) -> Iterator[DifferenceRow]:
    one, other = (code_statistics(code) if code else {} for code in codes)
    for name in dict.fromkeys((*one, *other)):
        yield _row("code", name, one.get(name), other.get(name))


def _time_rows(times: list[_Times]) -> Iterator[DifferenceRow]:
    for stage in ("search", "final", "confirmed"):
        one, other = (f.stages()[stage] for f in times)
        if one is None and other is None:
            continue
        for name in ("median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high", "disturbed"):
            a, b = (None if f is None else getattr(f, name) for f in (one, other))
            yield _row("time", f"{stage} {name}", a, b)


def _text_diff(rows: list[Any], texts: list[bytes | None]) -> str | None:
    if texts[0] is None or texts[1] is None:
        return None
    one, other = (text.decode("utf-8", "replace") for text in texts if text is not None)
    return unified(
        one, other, f"{rows[0].public_id} #{rows[0].order}", f"{rows[1].public_id} #{rows[1].order}"
    )


def _is_ptx(code: bytes) -> bool:
    return not code.startswith(b"\x7fELF") and b".version" in code[:4096]


def code_statistics(code: bytes) -> dict[str, int]:
    """Figures by name, in a fixed order: bytes of code and constants, instructions; empty for what is neither an ELF file
    nor PTX."""
    if _is_ptx(code):
        return _ptx_statistics(code.decode("utf-8", "replace"))
    from elftools.common.exceptions import ELFError  # of all questions to a database, one looks into an ELF file
    from elftools.elf.elffile import ELFFile

    try:
        return _elf_statistics(ELFFile(BytesIO(code)))
    except (ELFError, ValueError, struct.error, UnicodeDecodeError, AttributeError, KeyError):
        return {}


def _elf_statistics(file: Any) -> dict[str, int]:
    cubin = file.header["e_machine"] in _CUDA_MACHINE
    found: Counter[str] = Counter()
    for section in file.iter_sections():
        name = section.name
        if name == ".text" or name.startswith(".text."):
            found["code_bytes"] += section["sh_size"]
            if cubin:
                found["instructions"] += _sass_instructions(section.data())
        elif name.startswith((".rodata", ".nv.constant")) and not name.startswith(".nv.constant0"):
            found["constant_bytes"] += section["sh_size"]
        elif name.startswith(".nv.shared"):
            found["shared_bytes"] += section["sh_size"]
    order = ("code_bytes", "instructions", "constant_bytes", "shared_bytes")
    return {k: found[k] for k in order if k in found}


def _sass_instructions(text: bytes) -> int:
    """Without the NOPs that fill a section up."""
    opcodes = (_PADDING.unpack_from(text, i)[0] & _SASS_OPCODE for i in range(0, len(text) - 1, _SASS_BYTES))
    return sum(opcode != _SASS_NOP for opcode in opcodes)


def _ptx_statistics(text: str) -> dict[str, int]:
    """Instructions, and how many of them are of the ten most frequent kinds."""
    body = _PTX_COMMENT.sub(" ", text)
    kinds = Counter(_PTX_LINE.findall(body))
    kinds.pop("reg", None)
    counted = {f"ptx_{kind}": n for kind, n in sorted(kinds.most_common(10), key=lambda k: (-k[1], k[0]))}
    return {"code_bytes": len(text), "instructions": sum(kinds.values()), **counted}
