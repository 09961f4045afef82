"""Exporters: winners in a form that other programs import. One format a module, found by its name; a module defines
`EXPORTER`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from evo.discovery import find_plugin, plugin_names
from evo.errors import UnknownNameError
from evo.lineage import StoredEvaluation, StoredRun
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

__all__ = [
    "Combining",
    "ExportItem",
    "ExportRequest",
    "Exporter",
    "RunExporter",
    "exporter_names",
    "find_exporter",
]


@dataclass(frozen=True, kw_only=True)
class ExportItem:
    """One winner: what to render and compile again, and its provenance."""

    workload: Workload
    genome: Genome
    candidate: str
    """Public identifier."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Provenance as plain JSON data: run, order, timings with intervals, checks passed, ancestry."""
    alternatives: Iterable[ExportItem] = field(default=(), compare=False, repr=False)
    """Other candidates for the same workload, best first: for architectures that this one cannot be built for."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Winners of one kernel on one target and architecture, at most one for each workload."""

    kernel: str
    target: str
    arch: str
    items: tuple[ExportItem, ...]
    out: Path
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The machine and the versions that they were measured with."""
    builds: tuple[str, ...] = ()
    """Architectures to build for, where the exporter is `Combining`; empty: `arch`, on which they were measured."""


class Exporter(Protocol):
    name: str

    def export(self, request: ExportRequest) -> list[Path]:
        """Writes the files and returns their paths. `out` is created; it must be empty or an earlier export.

        Raises UsageError if it is neither, CompileError if a source no longer compiles.
        """
        ...

    def advice(self, out: Path) -> list[str]:
        """How to use what was written, in lines for the terminal."""
        ...


@runtime_checkable
class Combining(Exporter, Protocol):
    """An exporter that builds for several architectures, and holds winners of several targets together."""

    def export_together(self, parts: Sequence[ExportRequest]) -> list[Path]:
        """As `export`, for requests of one kernel with the same `out`."""
        ...

    def remarks(self, out: Path) -> list[str]:
        """What was requested and is missing or replaced in an export, with the reason, a sentence each."""
        ...


@runtime_checkable
class RunExporter(Exporter, Protocol):
    """A format that holds all candidates of a run. Its `export`, which is given winners, raises UsageError."""

    def export_run(self, run: StoredRun, evaluations: Sequence[StoredEvaluation], out: Path) -> list[Path]:
        """Writes the files and returns their paths. `out` as in `Exporter.export`. Raises UsageError."""
        ...


def exporter_names() -> list[str]:
    """As users type them: flashinfer-bench is the module flashinfer_bench."""
    return [name.replace("_", "-") for name in plugin_names(sys.modules[__name__])]


def find_exporter(name: str) -> Exporter:
    """Raises UnknownNameError."""
    if name not in exporter_names():
        raise UnknownNameError("export format", name, exporter_names())
    return cast(Exporter, find_plugin(sys.modules[__name__], "exporter", name.replace("-", "_")))
