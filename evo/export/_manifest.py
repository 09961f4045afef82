"""manifest.json of an exported module: what its run time reads, and where everything in it comes from."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from evo import __version__
from evo.export import ExportItem, ExportRequest
from evo.export._builds import BuiltVariant, LeftOut
from evo.export._folder import WRITER
from evo.problem.kernel import Kernel
from evo.runtime import cpu
from evo.targets.cpu import FLAGS, LIBRARIES

__all__ = ["FORMAT_VERSION", "manifest_record", "recipe", "sha256_of", "timing_of"]

FORMAT_VERSION = 3
_TRUE_ANYWHERE = ("run", "candidate", "order", "operator", "device", "created", "lineage")
_PSABI = {
    "x86-64": "cx8 fpu fxsr mmx sse sse2",
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""What each level adds, as Linux spells it. Source: x86-64 psABI, table "Micro-Architecture Levels"."""
_UNTOLD = {"cx8", "fpu", "fxsr", "mmx"}
"""Every x86-64 CPU has these, and evo.runtime.cpu does not report them."""


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
            "entry": kernel.entry,
            "dimensions": [*map(asdict, kernel.dimensions), *_compiled_in(kernel)],
            "arguments": [{"name": a.name, "kind": a.kind, "dtype": a.dtype} for a in kernel.arguments],
            "tolerance": {dtype: asdict(tolerance) for dtype, tolerance in kernel.tolerance.items()},
        },
        "measured_on": [dict(part.environment) for part in parts],
        "exported_on": {
            "machine": cpu.machine(),
            "python": platform.python_version(),
            "torch": _torch_version(),
        },
        "variants": [_variant_record(kernel, v, variants) for v in variants],
        "headers": {name: sha256_of(text) for v in variants for name, text in sorted(v.found.source.includes.items())},
        "left_out": [asdict(missing) for missing in left_out],
    }


def _compiled_in(kernel: Kernel) -> list[dict[str, Any]]:
    """Options that are constants of a binary. A module chooses by them as it does by sizes: off is 0, on is 1."""
    fixed = {name for names in kernel.compile_time_dims.values() for name in names}
    return [{"name": name, "low": 0, "high": 1} for name in kernel.options if name in fixed]


def timing_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one figure of a winner, out of its provenance: from its race with cold caches, beside the reference's median;
    None without one."""
    cold = [t for t in record.get("timings", ()) if t["protocol"] != "hot"]
    own = next((t for t in cold if t["contender"] == "candidate" and t["ratio"] is not None), None)
    if own is None:
        return None
    beside = [*cold, *(t for t in record.get("baselines", ()) if t["protocol"] != "hot")]
    reference = next((t for t in beside if t["ratio"] is None), None)
    figures = ("stage", "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high")
    return {
        **{name: own.get(name) for name in figures},
        "torch_us": reference["median_us"] if reference else None,
        "disturbed": bool((own.get("clocks") or {}).get("disturbed")),
    }


def recipe(target: str, flags: Sequence[str]) -> dict[str, list[str]]:
    """What the compiler is told beside the architecture."""
    if target == "cpu":
        return {"flags": [*FLAGS, *flags], "libraries": list(LIBRARIES)}
    standard = () if any(f.startswith(("--std", "-std")) for f in flags) else ("--std=c++17",)
    return {"flags": [*standard, *flags]}


def sha256_of(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _variant_record(kernel: Kernel, variant: BuiltVariant, variants: Sequence[BuiltVariant]) -> dict[str, Any]:
    found, target, arch = variant.found, variant.target, variant.arch
    item, source, binary = found.item, found.source, found.binary
    dims = dict(item.workload.dims)
    measured_code = item.record.get("code_hash") if variant.measured else None
    record: dict[str, Any] = {
        "candidate": item.candidate,
        "target": target.name,
        "arch": arch,
        "standing": "measured" if variant.measured else "compiled",
        "measured_arch": variant.measured_arch,
        "measured_on": variant.part,
        "instead_of": dict(zip(("candidate", "reason"), variant.instead_of, strict=True)) if variant.instead_of else None,
        "workload": {
            "key": item.workload.key,
            "dims": {d.name: dims[d.name] for d in kernel.dimensions}
            | {d["name"]: int(item.workload.option(d["name"])) for d in _compiled_in(kernel)},
            "dtype": item.workload.dtype,
            "options": dict(item.workload.options),
        },
        "fixed": list(kernel.compile_time_dims[target.name]),
        "genome": found.genome.parameters,
        "source": variant.source_file,
        "source_sha256": sha256_of(source.text),
        "source_digest": source.digest,
        "recipe": recipe(target.name, source.flags),
        "compiler": target.compiler(),
        "binary": variant.binary_file,
        "binary_sha256": sha256_of(binary.code),
        "code_hash": binary.code_hash,
        "same_code_as_measured": None if measured_code is None else measured_code == binary.code_hash,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "smem_static_bytes": binary.smem_static_bytes,
        "launch": asdict(kernel.plan(target.name, found.genome.parameters, item.workload)),
        "timing": timing_of(item.record) if variant.measured else None,
        "record": dict(item.record) if variant.measured else _record_elsewhere(item, variants),
    }
    if target.name == "cpu":
        record["needs"] = {"machine": cpu.machine(), "features": _needed_features(arch, source.flags)}
    return record


def _record_elsewhere(item: ExportItem, variants: Sequence[BuiltVariant]) -> dict[str, Any]:
    """The provenance of what was compiled for an architecture it was not measured on: without figures and verdicts, which
    would be taken for this architecture's. Without ancestors, too, if they are told beside its measured build."""
    told = any(v.measured and v.found.item is item for v in variants)
    return {n: v for n, v in item.record.items() if n in _TRUE_ANYWHERE and not (told and n == "lineage")}


def _needed_features(arch: str, flags: Iterable[str]) -> list[str] | None:
    """Instruction sets that code for -march=`arch` may use; None where that is not known: it is then built anew."""
    if arch == "native":
        return sorted(cpu.features()) or None
    if arch not in _PSABI or any(f.startswith("-m") for f in flags):
        return None
    levels = list(_PSABI)[: list(_PSABI).index(arch) + 1]
    return sorted({f for level in levels for f in _PSABI[level].split()} - _UNTOLD)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
