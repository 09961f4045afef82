"""All builds of a package: every winner for the architecture it was measured on, and for the others that are asked for.
There it is itself where it is legal and compiles, else the best candidate for its workload that does."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from evo.errors import CompileError, UsageError
from evo.evaluation import Binary
from evo.export import ExportItem, ExportRequest
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel
from evo.problem.render import Source, render
from evo.problem.space import Point, Space, Value
from evo.targets import Target, find_target

__all__ = ["BuiltVariant", "LeftOut", "asked_of", "build_variants", "check_parts", "with_ptx"]

_MOST_COMPILATIONS = 20
"""Of candidates that are legal and do not compile: what is wrong is then not the candidate."""
_GPU = re.compile(r"(sm|compute)_(\d+)([af]?)")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A candidate built for an architecture. `item`: whose genome it is; `genome`: as that architecture spells it."""

    item: ExportItem
    genome: Genome
    source: Source
    binary: Binary


@dataclass(frozen=True, kw_only=True)
class BuiltVariant:
    """A winner, rendered and compiled again for `arch`: the one it was measured on, or another.

    `part`: the index of the request it is from. `instead_of`: the candidate that would have been built, and why it could
    not be.
    """

    part: int
    target: Target
    arch: str
    measured_arch: str
    found: Compiled
    source_file: str
    binary_file: str
    instead_of: tuple[str, str] | None

    @property
    def measured(self) -> bool:
        return self.arch == self.measured_arch


@dataclass(frozen=True)
class LeftOut:
    """A winner for whose workload nothing could be built for an architecture."""

    candidate: str
    workload: str
    target: str
    arch: str
    reason: str


def asked_of(target: str, archs: Sequence[str]) -> tuple[str, ...]:
    """Those of the architectures that are a target's: GPUs are called sm_XX or compute_XX, CPUs are not. Each once."""
    return tuple(dict.fromkeys(a for a in archs if bool(_GPU.fullmatch(a)) == (target == "cuda")))


def with_ptx(archs: Sequence[str]) -> tuple[str, ...]:
    """Also PTX, for GPUs newer than these: of the lowest, so that whatever is at least as new as that runs something. Code
    that uses a GPU's own instructions (sm_90a) has none that is newer."""
    found = [_GPU.fullmatch(arch) for arch in archs]
    plain = [int(m[2]) for m in found if m and m[1] == "sm" and not m[3]]
    if not plain or any(m and m[1] == "compute" for m in found):
        return tuple(archs)
    return (*archs, f"compute_{min(plain)}")


def check_parts(kernel: Kernel, parts: Sequence[ExportRequest]) -> None:
    """Raises UsageError for two winners of one workload, target and architecture, and where there is none at all."""
    seen: dict[tuple[str, str, str], str] = {}
    for part in parts:
        kernel.check_target(part.target)
        for item in part.items:
            key = (item.workload.key, part.target, part.arch)
            if key in seen:
                raise UsageError(f"{seen[key]} and {item.candidate} are both for {key[0]}: export one of them")
            seen[key] = item.candidate
    if not seen:
        raise UsageError("there is nothing to export: name a run that has a winner, or candidates")


def build_variants(kernel: Kernel, parts: Sequence[ExportRequest]) -> tuple[list[BuiltVariant], list[LeftOut]]:
    """What was measured first, in the order of the items. Raises UsageError where nothing at all can be built for one of
    the architectures; TemplateError, CompileError, DeviceError."""
    built: list[BuiltVariant] = []
    left_out: list[LeftOut] = []
    for number, item, arch in _wanted(parts):
        part = parts[number]
        target, source = find_target(part.target), _source_as_measured(kernel, part, item)
        if arch == part.arch:
            found = Compiled(item=item, genome=item.genome, source=source, binary=_compile(target, source, arch))
            why = ""
        else:
            elsewhere, why = _compile_elsewhere(kernel, target, item, arch)
            if elsewhere is None:
                left_out.append(LeftOut(item.candidate, item.workload.key, target.name, arch, why))
                continue
            found = elsewhere
            _source_as_measured(kernel, part, found.item)
        stem = _stem(kernel, target, item, len(built)) + ("" if arch == part.arch else f"_{arch}")
        mine = (v for v in built if v.found.item.workload == item.workload and v.found.source == found.source)
        same = next((v.source_file for v in mine), None)
        kind = "so" if target.name == "cpu" else "cubin" if found.binary.code.startswith(b"\x7fELF") else "ptx"
        built.append(
            BuiltVariant(
                part=number,
                target=target,
                arch=arch,
                measured_arch=part.arch,
                found=found,
                source_file=same or f"{stem}.{target.language}",
                binary_file=f"{stem}.{kind}",
                instead_of=(item.candidate, why) if why else None,
            )
        )
    for missing in left_out:
        if not any((v.target.name, v.arch) == (missing.target, missing.arch) for v in built):
            raise UsageError(
                f"nothing here can be built for {missing.arch}; of {missing.candidate}, for one: {missing.reason}"
            )
    return built, left_out


def _wanted(parts: Sequence[ExportRequest]) -> Iterator[tuple[int, ExportItem, str]]:
    """(part, item, architecture) of every build. For an architecture that several parts could be built for, the winner that
    was measured on it, or else on code of its number (compute_89: sm_89), goes before the others of its workload."""
    pairs = [(n, arch) for n, part in enumerate(parts) for arch in part.builds or (part.arch,)]

    def place(pair: tuple[int, str]) -> int:
        number, arch = pair
        measured = parts[number].arch
        return 0 if arch == measured else 1 if arch.partition("_")[2] == measured.partition("_")[2] else 2

    done = set()
    for number, arch in sorted(pairs, key=place):
        for item in parts[number].items:
            key = (parts[number].target, arch, item.workload)
            if key not in done:
                done.add(key)
                yield number, item, arch


def _source_as_measured(kernel: Kernel, part: ExportRequest, item: ExportItem) -> Source:
    """Raises UsageError if another one is rendered today: what is recorded would not be true of it."""
    source = render(kernel, part.target, item.genome, kernel.binding(part.target, item.workload), part.arch)
    measured = item.record.get("source_digest")
    if measured is not None and measured != source.digest:
        raise UsageError(
            f"{item.candidate} was measured with another source than kernel {kernel.name!r} gives today (its "
            f"template has changed since): search again, or go back to the templates it was found with"
        )
    return source


def _stem(kernel: Kernel, target: Target, item: ExportItem, index: int) -> str:
    fixed = kernel.compile_time_dims[target.name]
    sizes = "x".join(str(n) for d, n in item.workload.dims if d in fixed or not fixed)
    return f"variant_{index}_{item.workload.dtype}_{sizes}"


def _compile(target: Target, source: Source, arch: str) -> Binary:
    """Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="evo-export-") as workdir:
        return target.compile(source, arch, Path(workdir))


def _compile_elsewhere(kernel: Kernel, target: Target, item: ExportItem, arch: str) -> tuple[Compiled | None, str]:
    """The item, or else the best of its alternatives, for an architecture it was not measured on; None if there is none.
    And why it is not the item; empty if it is.

    PTX is compiled from the text that machine code of that architecture is. Raises DeviceError for an unknown
    architecture; TemplateError.
    """
    machine_code = arch.replace("compute_", "sm_")
    limits = target.limits(machine_code)  # of PTX: what every GPU has that may compile it
    space = kernel.space(target.name, item.workload, limits)
    why, compilations = "", 0
    for candidate in chain([item], item.alternatives):
        point, unsaid = _as_spelt_there(space, candidate.genome, kernel.inactive.get(target.name, {}))
        if broken := [f"there is no {n}={v}" for n, v in unsaid.items()] or space.violations(point):
            why = why or "; ".join(broken)
            continue
        genome = Genome.of(point)
        source = render(kernel, target.name, genome, kernel.binding(target.name, item.workload), machine_code)
        try:
            binary = _compile(target, source, arch)
        except CompileError as error:
            why, compilations = why or f"it does not compile ({_first_line(error)})", compilations + 1
            if compilations == _MOST_COMPILATIONS:
                break
            continue
        launch = kernel.launch(target.name, point, item.workload, limits)
        if target.occupancy(binary, launch, limits) == 0:
            why = why or f"a block of {launch.block[0]} threads with {binary.registers} registers each does not fit"
            continue
        return Compiled(item=candidate, genome=genome, source=source, binary=binary), why
    return None, why


def _as_spelt_there(space: Space, genome: Genome, stand_ins: Mapping[str, Value]) -> tuple[Point, Point]:
    """The same kernel as a point of another architecture's space, and what of it cannot be said there: a parameter that one
    of the two spaces has not is the value that templates read in its place."""
    given = genome.parameters
    point: Point = {}
    for parameter in space.parameters:
        name = parameter.name
        if space.is_active(parameter, point):
            if name in given:
                point[name] = given[name]
            elif name in stand_ins:
                point[name] = stand_ins[name]
    return point, {n: v for n, v in given.items() if n not in point and stand_ins.get(n) != v}


def _first_line(error: CompileError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
