"""Formats that wrap the package of `module`: it is exported to a place in their own folder, and read from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evo import __version__
from evo.export import ExportRequest
from evo.export._folder import MANIFEST, WRITER, file_digests
from evo.export._manifest import to_json
from evo.export.module import ModuleExporter

__all__ = ["is_binary", "place_package", "speed_of", "write_manifest"]

_BINARIES = (".cubin", ".so")


def place_package(request: ExportRequest, out: Path) -> dict[str, Any]:
    """The package of `module` as folder `out`; its manifest. Raises what that exporter raises."""
    ModuleExporter().export(replace(request, out=out))
    manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def is_binary(name: str) -> bool:
    """Whether a file of the package is no text."""
    return name.endswith(_BINARIES)


def write_manifest(folder: Path, format: str, package: Mapping[str, Any]) -> None:
    """The manifest of an export that wraps a package: last, for it lists the files. The package's provenance is in it."""
    record = {
        "written_by": WRITER,
        "format": format,
        "format_version": 1,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: package[name] for name in ("kernel", "measured_on", "exported_on", "variants")},
        "files": file_digests(folder),
    }
    (folder / MANIFEST).write_text(to_json(record), encoding="utf-8")


def speed_of(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """Microseconds of a winner and of the reference, from the race with cold caches its provenance has; None without
    one."""
    cold = [t for t in record.get("timings", ()) if t["protocol"] != "hot"]
    own = next((t for t in cold if t["contender"] == "candidate" and t["ratio"] is not None), None)
    beside = [*cold, *(t for t in record.get("baselines", ()) if t["protocol"] != "hot")]
    reference = next((t for t in beside if t["ratio"] is None), None)
    return (own["median_us"], reference["median_us"]) if own and reference else None
