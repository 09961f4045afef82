"""A package of winners: sources and binaries, and the manifest, which is what its run time reads, and where everything in it
comes from.

Every winner is built for the architecture it was measured on, and for the others that are asked for. There it is itself
where it is legal and compiles, else the best candidate for its workload that does; of a covering run one of few that do.
"""

import math
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import chain, combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from evo.errors import CompileError, KernelError, UsageError, error_line
from evo.evaluation import Binary, is_disturbed
from evo.export import ExportItem, ExportRequest
from evo.problem.formats import all_tables, unfit
from evo.problem.genome import Genome
from evo.problem.kernel import ELEMENT_BYTES, Argument, Kernel, LaunchPlan, Workload
from evo.problem.render import Source, render
from evo.problem.space import Point
from evo.runtime import cpu
from evo.runtime.manifest import PLAIN, compiled_in, compiled_when_loaded
from evo.search.cover import choose
from evo.targets import Target, compile_source, find_language, find_target

_MOST_COMPILATIONS = 20
"""Largest number of legal candidates that do not compile; after so many the fault is not the candidate's."""
_WITHIN_ELSEWHERE = 0.1
"""Share by which a variant that serves several workloads may be slower than the fastest, where times are another
architecture's."""
_SLOWEST_ELSEWHERE = 1.5
_SHARED = "a variant that serves several workloads is nearly as fast"
_STATED_ONCE = ("fixed", "recipe", "compiler")
"""What a manifest states for all sources of a target, as far as it is the first one's."""
_TRUE_ANYWHERE = ("run", "candidate", "order", "operator", "device", "created")


class _Built(NamedTuple):
    """A candidate built for an architecture. genome: as that architecture spells it."""

    item: ExportItem
    genome: Genome
    source: Source
    binary: Binary


def asked_of(target: str, archs: Sequence[str]) -> tuple[str, ...]:
    """The architectures that are a target's, each once."""
    return tuple(dict.fromkeys(filter(find_target(target).owns, archs)))


def build_package(kernel: Kernel, parts: Sequence[ExportRequest]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the files by name: sources, binaries, local headers.

    In its `variants`, measured ones come first, in the order of the items. `left_out`: workloads that a package has no
    place for (formats.toml), or for which nothing could be built for an architecture. Raises UsageError for no winner, for
    two of one workload, target and architecture, and where nothing at all can be exported for one of the architectures;
    TemplateError, CompileError, DeviceError.
    """
    given = [(item.workload.key, part.target, part.arch, item.candidate) for part in parts for item in part.items]
    if not given:
        raise UsageError("there is nothing to export: name a run that has a winner, or candidates")
    for (*one, first), (*other, second) in combinations(given, 2):
        if one == other:
            raise UsageError(f"{first} and {second} are both for {one[0]}: export one of them")
    parts, left_out = _fitting(kernel, parts)
    variants: list[dict[str, Any]] = []
    targets: dict[str, dict[str, Any]] = {}
    files: dict[str, bytes] = {}
    few: dict[tuple[int, str], Mapping[Workload, Sequence[ExportItem]]] = {}
    for number, item, arch in _wanted(parts):
        part, why = parts[number], ""
        target, source = find_target(part.target), _source_as_measured(kernel, part, item)
        if arch == part.arch:
            built: _Built | None = _Built(item, item.genome, source, _compile(source, arch))
        else:
            there = (number, target.machine_code(arch))  # PTX counts as machine code of its number
            if part.few and there not in few and there[1] != target.machine_code(part.arch):
                few[there] = _few_elsewhere(kernel, target, part, arch)
            built, why = _build_elsewhere(kernel, target, item, arch, few.get(there, {}).get(item.workload, ()))
        if built is None:
            left_out.append(_left_out(item, part, arch, why))
            continue
        if built.item is not item:
            _source_as_measured(kernel, part, built.item)
        record = _variant_record(kernel, target, arch, built, variants, measured_arch=part.arch)
        record |= {"measured_on": number, "instead_of": {"candidate": item.candidate, "reason": why} if why else None}
        variants.append(record)
        targets.setdefault(part.target, {name: record[name] for name in _STATED_ONCE})
        files |= {record["source"]: built.source.text.encode(), record["binary"]: built.binary.code}
        for name, text in built.source.includes.items():
            if name.startswith("/") or ".." in name:
                raise KernelError(f"{record['source']} includes {name!r}, which is not below its include folders")
            files[name] = text.encode()
    for m in left_out:  # a GPU's own instructions have no PTX
        found = {m["arch"], find_target(m["target"]).machine_code(m["arch"])}
        if not any(v["target"] == m["target"] and v["arch"] in found for v in variants):
            raise UsageError(f"nothing here can be exported for {m['arch']}; of {m['candidate']}, for one: {m['reason']}")
    manifest = {
        "kernel": {
            "name": kernel.name,
            "title": kernel.title,
            "replaces": kernel.replaces,
            "digest": kernel.digest,
            "entry": kernel.entry,
            "dimensions": [*map(asdict, kernel.dimensions), *compiled_in(kernel)],
            "arguments": [_argument_record(a) for a in kernel.parameters],
            "tolerance": {dtype: asdict(kernel.tolerance[dtype]) for dtype in kernel.tolerance if dtype in _dtypes(kernel)},
        },
        "measured_on": [{name: told for name, told in part.environment.items() if told} for part in parts],
        "exported_on": {"machine": cpu.machine(), "python": platform.python_version(), "torch": version("torch")},
        "targets": targets,
        "variants": variants,
        "left_out": left_out,
    }
    return manifest, files


def _dtypes(kernel: Kernel) -> set[str]:
    """The dtypes of its problems, and others that an output may have."""
    own = {dtype for dtypes in kernel.dtypes.values() for dtype in dtypes}
    every = {"problem": own, "opmath": {"float32", "float64"}, **kernel.choices}
    return own.union(*(every.get(a.dtype, {a.dtype}) for a in kernel.outputs()))


def _argument_record(argument: Argument) -> dict[str, Any]:
    record: dict[str, Any] = {"name": argument.name, "kind": argument.kind, "dtype": argument.dtype}
    if argument.kind == "structure":
        record |= {"bytes": argument.size_bytes, "alignment": argument.alignment}
    return record


def _fitting(kernel: Kernel, parts: Sequence[ExportRequest]) -> tuple[list[ExportRequest], list[dict[str, str]]]:
    """The requests without what a package has no place for, and what was left out."""
    table, fitting, left_out = all_tables(kernel).get("module", {}), [], []
    for part in parts:
        judged = [(item, unfit(table, item.workload)) for item in part.items]
        left_out += [_left_out(item, part, part.arch, why) for item, why in judged if why]
        fitting.append(replace(part, items=tuple(item for item, why in judged if not why)))
    return fitting, left_out


def _left_out(item: ExportItem, part: ExportRequest, arch: str, why: str) -> dict[str, str]:
    told = {"candidate": item.candidate, "reason": why}
    return {**told, "workload": item.workload.key, "target": part.target, "arch": arch}


def _wanted(parts: Sequence[ExportRequest]) -> Iterator[tuple[int, ExportItem, str]]:
    """Triples of part, item and architecture, one for each build. For an architecture that several parts could be built
    for, the winner that was measured on it, or else on code of its number (compute_89: sm_89), goes before the others of
    its workload."""
    pairs = [(n, arch) for n, part in enumerate(parts) for arch in part.builds or (part.arch,)]

    def place(pair: tuple[int, str]) -> tuple[bool, bool]:
        target, measured, arch = find_target(parts[pair[0]].target), parts[pair[0]].arch, pair[1]
        return arch != measured, target.machine_code(arch) != target.machine_code(measured)

    done = set()
    for number, arch in sorted(pairs, key=place):
        for item in parts[number].items:
            key = (parts[number].target, arch, item.workload)
            if key not in done:
                done.add(key)
                yield number, item, arch


def _source_as_measured(kernel: Kernel, part: ExportRequest, item: ExportItem) -> Source:
    """The source of an item. Raises UsageError if it is not the measured one, since the record would not be true of it."""
    source = render(kernel, part.target, item.genome, item.workload, part.arch)
    measured = item.record.get("source_digest")
    if measured is not None and measured != source.digest:
        raise UsageError(
            f"{item.candidate} was measured with another source than kernel {kernel.name!r} gives today (its "
            f"template has changed since): search again, or go back to the templates it was found with"
        )
    return source


def _compile(source: Source, arch: str) -> Binary:
    """The binary of a source. Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="evo-export-") as workdir:
        return compile_source(source, arch, Path(workdir))


def _few_elsewhere(
    kernel: Kernel, target: Target, part: ExportRequest, arch: str
) -> dict[Workload, Sequence[ExportItem]]:
    """The candidates that are to serve each workload on an architecture where nothing was measured, the fastest first: few
    genomes that were fast where they were measured."""
    fast = {i.workload: list(_Elsewhere(kernel, target, i.workload, arch).fast(i)) for i in part.items}
    times = [{variant: c.score for c, variant in reversed(found)} for found in fast.values()]  # the least of each
    chosen = choose(times, within=_WITHIN_ELSEWHERE)
    return {workload: [c for c, variant in found if variant in chosen] for workload, found in fast.items()}


class _Elsewhere:
    """An architecture, for candidates that were measured on another. PTX is compiled from the text that machine code of its
    number is. Raises DeviceError for an unknown architecture."""

    def __init__(self, kernel: Kernel, target: Target, workload: Workload, arch: str) -> None:
        self.arch = target.machine_code(arch)
        self.limits = target.limits(self.arch)  # PTX may use what every GPU has that may compile it
        self.space = kernel.space(target.name, workload, self.limits)
        self._stand_ins = kernel.inactive.get(target.name, {})
        self._plans: Callable[[Point], tuple[LaunchPlan, ...]] = lambda point: kernel.plans(target.name, point, workload)

    def point(self, genome: Genome) -> tuple[Point, list[str]]:
        """The same kernel as a point of this architecture's space, and what of it cannot be expressed there or is not
        legal. A parameter that one of the two spaces lacks has the value that templates read in its place."""
        known = {**self._stand_ins, **genome.parameters}
        point: Point = {}
        for parameter in self.space.parameters:
            if parameter.name in known and self.space.is_active(parameter, point):
                point[parameter.name] = known[parameter.name]
        unsaid = {n: v for n, v in genome.parameters.items() if n not in point and self._stand_ins.get(n) != v}
        plans = self._plans(genome.parameters)
        later = tuple(replace(plan, programmatic=False) for plan in plans)
        if len(unsaid) == 1 and self._plans(point) == later != plans:
            unsaid = {}  # the kernel is the same but for an early start
        return point, [f"there is no {n}={v}" for n, v in unsaid.items()] or self.space.violations(point)

    def fast(self, item: ExportItem) -> Iterator[tuple[ExportItem, str]]:
        """The item and its alternatives that are legal there, but for the slowest, each with its digest there."""
        least = math.inf
        for candidate in chain([item], item.alternatives):
            if candidate.score > _SLOWEST_ELSEWHERE * least:
                break
            point, broken = self.point(candidate.genome)
            if not broken and candidate.score < math.inf:
                least = min(least, candidate.score)
                yield candidate, Genome.of(point).digest


def _build_elsewhere(
    kernel: Kernel, target: Target, item: ExportItem, arch: str, preferred: Sequence[ExportItem]
) -> tuple[_Built | None, str]:
    """The candidate for an architecture that an item was not measured on: the first of the `preferred`, or else the item,
    or the best of its alternatives; None if there is none. And why it is not the item; empty if it is.

    Raises DeviceError for an unknown architecture; TemplateError.
    """
    there = _Elsewhere(kernel, target, item.workload, arch)
    why, compilations, tried = "; ".join(there.point(item.genome)[1]), 0, set[str]()
    for candidate in chain(preferred, [item], item.alternatives):
        point, broken = there.point(candidate.genome)
        if broken or candidate.candidate in tried:
            continue
        tried.add(candidate.candidate)
        genome = Genome.of(point)
        source = render(kernel, target.name, genome, item.workload, there.arch)
        try:
            binary = _compile(source, arch)
        except CompileError as error:
            why = why or (f"it does not compile ({error_line(str(error))})" if candidate is item else "")
            compilations += 1
            if compilations == _MOST_COMPILATIONS:
                break
            continue
        language = find_language(source.language)
        launches = kernel.sequence(target.name, point, item.workload, there.limits, binary.launch).launches
        if unfit := [launch for launch in launches if language.occupancy(binary, launch, there.limits) == 0]:
            if candidate is item:
                why = f"a block of {math.prod(unfit[0].block)} threads with {binary.registers} registers each does not fit"
            continue
        return _Built(candidate, genome, source, binary), "" if candidate is item else why or _SHARED
    return None, why


def _variant_record(
    kernel: Kernel, target: Target, arch: str, built: _Built, before: Sequence[Mapping[str, Any]], *, measured_arch: str
) -> dict[str, Any]:
    """The record of a build, but for what was asked for. before: the records of earlier builds."""
    item, source, binary, measured = built.item, built.source, built.binary, arch == measured_arch
    workload, fixed = item.workload, kernel.compile_time_dims[target.name]
    compiled_in = [n for d, n in workload.dims if d in fixed]
    sizes = "x".join(map(str, compiled_in or dict(workload.dims).values()))
    stem = f"variant_{len(before)}_{workload.dtype}_{sizes}" + ("" if measured else f"_{arch}")
    same = (v["source"] for v in before if (v["workload"]["key"], v["source_digest"]) == (workload.key, source.digest))
    kind = "so" if target.shares_cores else "ptx" if compiled_when_loaded(arch) else "cubin"
    language = find_language(source.language)
    measured_code = item.record.get("code_hash") if measured else None
    record: dict[str, Any] = {
        "candidate": item.candidate,
        "target": target.name,
        "arch": arch,
        # Where the kernel has changed since, nothing of it was measured.
        "standing": "measured" if measured and "kernel_digest" not in item.record else "compiled",
        "measured_arch": measured_arch,
        "workload": workload_record(kernel, workload),
        "fixed": list(fixed),
        "genome": built.genome.parameters,
        "source": next(same, f"{stem}{language.suffix}"),
        "binary": f"{stem}.{kind}",
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_static_bytes": binary.smem_static_bytes,
        "source_digest": source.digest,
        "code_hash": binary.code_hash,
        "same_code_as_measured": None if measured_code is None else measured_code == binary.code_hash,
        # What compiles it elsewhere tells no launch.
        "recipe": None if binary.launch else language.recipe(source.flags),
        "compiler": language.compiler(),
        "launch": plan_record(kernel, target.name, built.genome, workload, binary.launch),
        "timing": (item.timing or timing_of(item.record)) if measured else None,
        "record": dict(item.record),
    }
    if not measured:
        # Figures and verdicts would be taken for this architecture's.
        record["record"] = {name: value for name, value in item.record.items() if name in _TRUE_ANYWHERE}
    if needs := target.needs(arch, source.flags):
        record["needs"] = needs
    return record


def workload_record(kernel: Kernel, workload: Workload) -> dict[str, Any]:
    dims = {d.name: workload.dim(d.name) for d in kernel.dimensions}
    dims |= {d["name"]: kernel.number_of(d["name"], workload.option(d["name"])) for d in compiled_in(kernel)}
    return {"key": workload.key, "dims": dims, "dtype": workload.dtype, "options": dict(workload.options)}


def plan_record(
    kernel: Kernel, target: str, genome: Genome, workload: Workload, launch: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The launches for the manifest, as `Variant` of evo/runtime/package.py reads them; launch: `Binary.launch`. Raises
    KernelError where they depend on a size that is not compiled in: those of other sizes would be wrong."""
    found = _plan_record(kernel, target, genome, workload, launch)
    own = dict(workload.dims)
    for d in kernel.dimensions:
        size = own[d.name] * 2 if own[d.name] * 2 <= d.high else max(d.low, own[d.name] // 2)
        other = Workload.of({**own, d.name: size}, workload.dtype, dict(workload.options))
        if d.name in kernel.compile_time_dims[target] or kernel.validate(other):
            continue
        if _plan_record(kernel, target, genome, other, launch) != found:
            raise KernelError(
                f"kernel {kernel.name!r}: its launches or its workspace for {d.name}={size} are others than for"
                f" {d.name}={own[d.name]}, and an export has one for all; let `plan` give tiles of {d.name}, and `size` name"
                f" {d.name!r} as a factor, or compile it in (compile_time_dims)"
            )
    return found


def _plan_record(
    kernel: Kernel, target: str, genome: Genome, workload: Workload, launch: Mapping[str, Any]
) -> dict[str, Any]:
    first, *then = (asdict(plan) for plan in kernel.plans(target, genome.parameters, workload, launch))
    if first["entry"] == kernel.entry:
        first["entry"] = ""
    then = [{name: value for name, value in plan.items() if value != PLAIN[name]} for plan in then]
    workspace = []
    for a in kernel.arguments:
        if a.size is not None:
            factors = a.size(target, genome.parameters, workload)
            size = math.prod(f for f in factors if isinstance(f, int)) * ELEMENT_BYTES[a.dtype]
            workspace.append((size, [f for f in factors if isinstance(f, str)], a.zeroed))
    return first | ({"then": then} if then else {}) | ({"workspace": workspace} if workspace else {})


def timing_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one figure of a winner in its provenance: its time in its race with cold caches beside the reference's median, in
    six digits, which no clock gives. None without one."""
    cold, baselines = ([t for t in record.get(of, ()) if t["protocol"] != "hot"] for of in ("timings", "baselines"))
    own = next((t for t in cold if t["contender"] == "candidate" and t["ratio"] is not None), None)
    if own is None:
        return None
    torch_us = next((t["median_us"] for t in (*cold, *baselines) if t["ratio"] is None), None)
    figures = {n: own.get(n) for n in ("median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high")}
    rounded = {n: us and float(f"{us:.6g}") for n, us in {**figures, "torch_us": torch_us}.items()}
    return {"stage": own.get("stage"), **rounded, "disturbed": is_disturbed(own.get("clocks"))}
