"""FlashInfer-Bench's dataset layout: definitions/, workloads/, solutions/ and traces/ below one folder, which its
TraceSet.from_path reads and its Benchmark evaluates.

A Definition for each group of winners that computes the same (dtype and compiled-in sizes), with a Workload for each of
them, and one Solution: Python that launches the package of `module`, whose files are its sources. Machine code, which
JSON cannot hold, is base64 there. A Trace has the search's own figures, under the status FlashInfer-Bench calls PASSED:
what its own evaluation finds is appended to the same file.
Reference: flashinfer-bench 0.1.2, flashinfer_bench/data and compile/builders/python_builder.py.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evo import __version__
from evo.errors import UsageError
from evo.export import Exporter, ExportItem, ExportRequest
from evo.export._folder import publish
from evo.export._wrapping import is_binary, place_package, speed_of, write_manifest
from evo.problem.formats import check_fit, fill, format_table, values_of
from evo.problem.kernel import Kernel, load_kernel

__all__ = ["EXPORTER", "FlashInferBenchExporter"]

_MAIN = '''"""{title}: found and written by evo {version}. The kernel and what launches it lie in {package}/."""

import base64
from contextlib import suppress
from pathlib import Path

for _encoded in (Path(__file__).parent / "{package}").rglob("*.b64"):
    _encoded.with_suffix("").write_bytes(base64.b64decode(_encoded.read_text()))

from . import {package}
from .{package} import *

with suppress(RuntimeError):  # without a C++ compiler calls are launched from Python
    {package}.build()

_served = set()


def require_variant(key, *arguments):
    """The package leaves to PyTorch what it was not tuned for; here that would be another solution's figure."""
    if key not in _served:
        way = {package}.explain(*arguments)
        if not way.startswith("variant"):
            raise RuntimeError(way)
        _served.add(key)


'''


class FlashInferBenchExporter:
    """The methods are those of `evo.export.Exporter`."""

    name = "flashinfer-bench"

    def export(self, request: ExportRequest) -> list[Path]:
        """Raises UsageError for a kernel that formats.toml does not describe, and what `ModuleExporter.export` raises."""
        out = request.out.absolute()
        kernel = load_kernel(request.kernel)
        kernel.check_target(request.target)
        table = format_table(kernel, self.name)
        groups: dict[str, list[ExportItem]] = {}
        for item in request.items:
            check_fit(table, self.name, item.candidate, item.workload)
            groups.setdefault(fill(table["name"], values_of(item.workload)), []).append(item)
        if not groups:
            raise UsageError("there is nothing to export: name a run that has a winner, or candidates")
        with publish(out, self.name) as folder:
            manifests = [
                _write_group(folder, kernel, table, name, replace(request, items=tuple(items)))
                for name, items in groups.items()
            ]
            variants = [variant for manifest in manifests for variant in manifest["variants"]]
            write_manifest(folder, self.name, {**manifests[0], "variants": variants})
        return sorted(p for p in out.rglob("*") if p.is_file())

    def advice(self, out: Path) -> str:
        return f"evaluate it:  flashinfer-bench run --local {out}"


def _write_group(
    folder: Path, kernel: Kernel, table: Mapping[str, Any], name: str, request: ExportRequest
) -> dict[str, Any]:
    """Everything about one definition; the manifest of its package."""
    op_type = table["op_type"]
    definition = _definition(kernel, table, name, request)
    solution, manifest = _solution(kernel, table, definition, request)
    workloads = [_workload(table, definition, item) for item in request.items]
    traces = [
        {"definition": name, "workload": workload, "solution": solution["name"], "evaluation": evaluation}
        for workload, item in zip(workloads, request.items, strict=True)
        if (evaluation := _evaluation(request, item)) is not None
    ]
    _write(folder / "definitions" / op_type / f"{name}.json", json.dumps(definition, indent=2))
    _write(folder / "solutions" / op_type / name / f"{solution['name']}.json", json.dumps(solution, indent=2))
    bare = [{"definition": name, "workload": w, "solution": None, "evaluation": None} for w in workloads]
    _write(folder / "workloads" / op_type / f"{name}.jsonl", *map(json.dumps, bare))
    if traces:
        _write(folder / "traces" / op_type / f"{name}.jsonl", *map(json.dumps, traces))
    return manifest


def _write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _definition(kernel: Kernel, table: Mapping[str, Any], name: str, request: ExportRequest) -> dict[str, Any]:
    workload = request.items[0].workload
    constant = {*kernel.compile_time_dims[request.target], *table.get("constant", ())}
    axes = {
        axis: {"type": "const", "value": workload.dim(dim)} if dim in constant else {"type": "var"}
        for axis, dim in table["axes"].items()
    }
    inputs = _inputs(table, values_of(workload))
    values = values_of(workload) | {"inputs": list(inputs)}
    return {
        "name": name,
        "description": f"{kernel.title}, as {kernel.replaces} computes it.",
        "op_type": table["op_type"],
        "tags": ["status:verified"],
        "axes": axes,
        "inputs": {n: {"shape": shape, "dtype": workload.dtype} for n, shape in inputs.items()},
        "outputs": {n: {"shape": shape, "dtype": workload.dtype} for n, shape in table["outputs"].items()},
        "reference": fill(table["reference"], values).lstrip("\n"),
    }


def _inputs(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Without those that an option of the workload leaves out."""
    optional = table.get("optional", {})
    return {n: shape for n, shape in table["inputs"].items() if n not in optional or values[optional[n]]}


def _solution(
    kernel: Kernel, table: Mapping[str, Any], definition: Mapping[str, Any], request: ExportRequest
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Solution, and the manifest of the package in it."""
    values = values_of(request.items[0].workload) | {"inputs": list(definition["inputs"])}
    package = f"{kernel.entry}_package"
    with TemporaryDirectory(prefix="evo-export-") as scratch:
        place = Path(scratch) / package
        manifest = place_package(request, place)
        sources = [_source(place, path) for path in sorted(p for p in place.rglob("*") if p.is_file())]
    main = _MAIN.format(title=kernel.title, version=__version__, package=package) + fill(table["run"], values)
    name = re.sub(r"\W+", "_", f"evo_{definition['name']}_{request.arch}_{request.items[0].candidate}")
    solution = {
        "name": name,
        "definition": definition["name"],
        "author": "evo",
        "description": f"{kernel.title} for {request.arch}, tuned for "
        + "; ".join(f"{item.workload.key} (candidate {item.candidate})" for item in request.items),
        "spec": {
            "language": "python",
            "target_hardware": [request.target],
            "entry_point": "main.py::run",
            "dependencies": [],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": main}, *sources],
    }
    return solution, manifest


def _source(place: Path, path: Path) -> dict[str, str]:
    relative = path.relative_to(place.parent).as_posix()
    if is_binary(path.name):
        return {"path": f"{relative}.b64", "content": base64.encodebytes(path.read_bytes()).decode()}
    return {"path": relative, "content": path.read_text(encoding="utf-8")}


def _workload(table: Mapping[str, Any], definition: Mapping[str, Any], item: ExportItem) -> dict[str, Any]:
    free = [axis for axis, spec in definition["axes"].items() if spec["type"] == "var"]
    axes = {axis: item.workload.dim(table["axes"][axis]) for axis in free}
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"evo:{definition['name']}:{item.workload.key}")
    return {"axes": axes, "inputs": {n: {"type": "random"} for n in definition["inputs"]}, "uuid": str(unique)}


def _evaluation(request: ExportRequest, item: ExportItem) -> dict[str, Any] | None:
    """What the search measured; None where nothing was recorded."""
    speed = speed_of(item.record)
    if speed is None:
        return None
    own_us, reference_us = speed
    errors = [float(c["error"]) for c in item.record.get("checks", ()) if c.get("error") is not None]
    environment = request.environment
    return {
        "status": "PASSED",
        "environment": {
            "hardware": str(item.record.get("device") or environment.get("device") or request.arch),
            "libs": {n: str(v) for n in ("torch", "cuda", "evo") if (v := environment.get(n))},
        },
        "timestamp": _timestamp(item.record.get("created")),
        "log": "Timed and judged by evo: cold caches, interleaved with PyTorch, which is the reference here; errors are "
        "the largest of its gate, against float64.",
        "correctness": {"max_relative_error": 0.0, "max_absolute_error": _largest(errors)},
        "performance": {
            "latency_ms": own_us / 1e3,
            "reference_latency_ms": reference_us / 1e3,
            "speedup_factor": reference_us / own_us,
        },
    }


def _largest(errors: Iterable[float]) -> float:
    return max((e for e in errors if e == e and e != float("inf")), default=0.0)


def _timestamp(created: object) -> str:
    if isinstance(created, datetime):
        return created.isoformat()
    return str(created) if created else datetime.now(UTC).isoformat(timespec="seconds")


EXPORTER: Exporter = FlashInferBenchExporter()
