"""manifest.json of an exported module: what its run time reads, and where everything in it comes from."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from evo import __version__
from evo.export import ExportItem, ExportRequest
from evo.export._building import BuiltVariant, LeftOut
from evo.export._folder import WRITER, to_json
from evo.export._module import _processor
from evo.problem.kernel import Kernel
from evo.targets.cpu import FLAGS, LIBRARIES

__all__ = ["FORMAT_VERSION", "interface", "manifest_record", "to_json"]

FORMAT_VERSION = 2
_TRUE_ANYWHERE = ("run", "candidate", "order", "operator", "device", "created", "lineage")
_PSABI = {
    "x86-64": "cx8 fpu fxsr mmx sse sse2",
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""What each level adds, as Linux spells it. Source: x86-64 psABI, table "Micro-Architecture Levels"."""
_UNTOLD = {"cx8", "fpu", "fxsr", "mmx"}
"""Every x86-64 CPU has these, and _processor does not report them."""


def manifest_record(
    kernel: Kernel, parts: Sequence[ExportRequest], variants: Sequence[BuiltVariant], left_out: Iterable[LeftOut]
) -> dict[str, Any]:
    """Everything but `files`, which the caller adds when they are written."""
    return {
        "written_by": WRITER,
        "format": "module",
        "format_version": FORMAT_VERSION,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "kernel": {
            "name": kernel.name,
            "title": kernel.title,
            "replaces": kernel.replaces,
            "digest": kernel.digest,
            **interface(kernel),
            "tolerance": {dtype: asdict(tolerance) for dtype, tolerance in kernel.tolerance.items()},
        },
        "measured_on": [dict(part.environment) for part in parts],
        "exported_on": {
            "machine": _processor.machine(),
            "python": platform.python_version(),
            "torch": _torch_version(),
        },
        "variants": [_variant_record(kernel, v, variants) for v in variants],
        "left_out": [asdict(missing) for missing in left_out],
    }


def interface(kernel: Kernel) -> dict[str, Any]:
    """What a package's launchers go by: the entry point, what it is called with, and what is asked of a problem."""
    return {
        "entry": kernel.entry,
        "dimensions": [*map(asdict, kernel.dimensions), *_compiled_in(kernel)],
        "arguments": [{"name": a.name, "kind": a.kind, "dtype": a.dtype} for a in kernel.arguments],
    }


def _compiled_in(kernel: Kernel) -> list[dict[str, Any]]:
    """Options that are constants of a binary. A module chooses by them as it does by sizes: off is 0, on is 1."""
    fixed = {name for names in kernel.compile_time_dims.values() for name in names}
    return [{"name": name, "low": 0, "high": 1} for name in kernel.options if name in fixed]


def _variant_record(kernel: Kernel, variant: BuiltVariant, variants: Sequence[BuiltVariant]) -> dict[str, Any]:
    found, target, arch = variant.found, variant.target, variant.arch
    item, source, binary = found.item, found.source, found.binary
    dims = dict(item.workload.dims)
    measured_code = item.record.get("code_hash") if variant.measured else None
    same = next((n for n, v in enumerate(variants) if v.measured and v.found.item is item), None)
    record: dict[str, Any] = {
        "candidate": item.candidate,
        "target": target.name,
        "arch": arch,
        "standing": "measured" if variant.measured else "compiled",
        "measured_arch": variant.measured_arch,
        "measured_on": variant.part,
        "measured_variant": same,
        "instead_of": dict(zip(("candidate", "reason"), variant.instead_of, strict=True)) if variant.instead_of else None,
        "workload": {
            "key": item.workload.key,
            "dims": {d.name: dims[d.name] for d in kernel.dimensions}
            | {d["name"]: int(item.workload.option(d["name"])) for d in _compiled_in(kernel)},
            "dtype": item.workload.dtype,
            "options": dict(item.workload.options),
        },
        "fixed": list(kernel.compile_time_dims[target.name]),
        "genome": {"parameters": found.genome.parameters},
        "source": variant.source_file,
        "source_sha256": _sha256(source.text.encode()),
        "source_digest": source.digest,
        "includes": {name: _sha256(text.encode()) for name, text in sorted(source.includes.items())},
        "flags": list(source.flags),
        "compiler": target.compiler(),
        "binary": variant.binary_file,
        "binary_sha256": _sha256(binary.code),
        "code_hash": binary.code_hash,
        "same_code_as_measured": None if measured_code is None else measured_code == binary.code_hash,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_static_bytes": binary.smem_static_bytes,
        "launch": asdict(kernel.plan(target.name, found.genome.parameters, item.workload)),
        "record": dict(item.record) if variant.measured else _record_elsewhere(item, told=same is not None),
    }
    if target.name == "cpu":
        record["needs"] = {"machine": _processor.machine(), "features": _needed_features(arch, source.flags)}
        record["recipe"] = {"flags": [*FLAGS, *source.flags], "libraries": list(LIBRARIES)}
    return record


def _record_elsewhere(item: ExportItem, *, told: bool) -> dict[str, Any]:
    """The provenance of what was compiled for an architecture it was not measured on: without figures and verdicts, which
    would be taken for this architecture's. Without ancestors, too, if they are told beside its measured build."""
    kept = {name: value for name, value in item.record.items() if name in _TRUE_ANYWHERE}
    return {name: value for name, value in kept.items() if not (told and name == "lineage")}


def _needed_features(arch: str, flags: Iterable[str]) -> list[str] | None:
    """Instruction sets that code for -march=`arch` may use; None where that is not known: it is then built anew."""
    if arch == "native":
        return sorted(_processor.features()) or None
    if arch not in _PSABI or any(f.startswith("-m") for f in flags):
        return None
    levels = list(_PSABI)[: list(_PSABI).index(arch) + 1]
    return sorted({f for level in levels for f in _PSABI[level].split()} - _UNTOLD)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
