"""All builds of a package: every winner for the architecture it was measured on, and for the others that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evo.errors import UsageError
from evo.export import ExportItem, ExportRequest
from evo.export._architectures import Compiled, compile_elsewhere, compile_source
from evo.problem.kernel import Kernel
from evo.problem.render import Source, render
from evo.targets import Target, find_target

__all__ = ["BuiltVariant", "LeftOut", "build_variants", "check_parts"]


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
            found = Compiled(item=item, genome=item.genome, source=source, binary=compile_source(target, source, arch))
            why = ""
        else:
            elsewhere, why = compile_elsewhere(kernel, target, item, arch)
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
