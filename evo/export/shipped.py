"""What lies in kernels/: of a package of `module`, the manifest and the sources. It is for this repository: `evo.ready`
finds it there, takes the frontend and the headers from the templates, and has the sources compiled where they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evo.export import Combining, ExportRequest
from evo.export._folder import Contents, publish
from evo.export.module import ModuleExporter, make_package

__all__ = ["EXPORTER"]

_KEPT_OF_RECORD = ("run", "order", "operator", "device", "created")
_OF_BINARY = ("binary", "binary_sha256", "same_code_as_measured")


class ShippedExporter(ModuleExporter):
    """As the exporter of `module`, of which this is a part."""

    name = "shipped"

    def export_together(self, parts: Sequence[ExportRequest]) -> list[Path]:
        return publish(parts[0].out, self.name, lambda: _sources_of(*make_package(parts)))


def _sources_of(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Contents:
    """Leaves out PTX (a source is compiled for newer GPUs, too), binaries, headers, and what the database tells better."""
    variants = []
    for v in (v for v in manifest["variants"] if not v["arch"].startswith("compute_")):
        origin = {name: v["record"][name] for name in _KEPT_OF_RECORD if name in v["record"]}
        variants.append({name: value for name, value in v.items() if name not in _OF_BINARY} | {"record": origin})
    sources = {r["source"]: files[r["source"]] for r in (*variants, *manifest["general"])}
    return {**manifest, "variants": variants, "headers": {}}, sources


EXPORTER: Combining = ShippedExporter()
