"""Requests for exports, and changes to what was exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evo.export import ExportItem, ExportRequest
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.problem.space import Point, Space, Value
from evo.runtime.manifest import MANIFEST, read_manifest
from evo.targets import find_target


def request_for(
    target: str, arch: str, out: Path, *workloads: str, kernel: str = "layernorm", **record: Any
) -> ExportRequest:
    """The default point of the search space for each workload."""
    problem, limits = load_kernel(kernel), find_target(target).limits(arch)
    items = []
    for index, text in enumerate(workloads):
        workload = problem.workload(target, text)
        space = problem.space(target, workload, limits)
        genome = Genome.of(space.complete(space.default))
        items.append(ExportItem(workload=workload, genome=genome, candidate=f"test/{index}", record=record))
    return ExportRequest(kernel=kernel, target=target, arch=arch, items=tuple(items), out=out)


def near(space: Space, wanted: Mapping[str, Value]) -> Point:
    """The default, or a legal point near it with these values."""
    point = space.complete(space.default)
    for name, value in wanted.items():
        found = space.nearest(point, name, value)
        assert found is not None, f"no legal point has {name}={value}"
        point = found
    assert wanted.items() <= point.items()
    return point


def listing(folder: Path) -> dict[str, bytes]:
    """What is in each file of a folder, by its path there."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def manifest_of(folder: Path) -> dict[str, Any]:
    """What the manifest of an export says, with what it leaves out."""
    return read_manifest(folder / MANIFEST)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As it is written."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
