"""Exporters: winners in a form that other programs import. One format a module, found by its name; a module defines
`EXPORTER`. What they write is a folder with a manifest of what lies in it; it replaces nothing but an earlier export."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from evo import __version__
from evo.discovery import find_plugin, plugin_names
from evo.errors import UnknownNameError, UsageError
from evo.lineage.database import check_folder
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.runtime.manifest import FORMAT_VERSION, stated
from evo.runtime.manifest import MANIFEST as MANIFEST

_WRITER = "evo"
"""`written_by` in a manifest marks a folder as an export."""
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class ExportItem:
    """One winner: its genome, which is rendered and compiled again, and its provenance."""

    workload: Workload
    genome: Genome
    candidate: str
    """The public identifier."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Provenance as plain JSON data: run, order, timings with intervals, checks passed, ancestry."""
    timing: Mapping[str, Any] | None = None
    """Its figure in a manifest; where that is not known yet, it follows from the record's timings."""
    score: float = math.inf
    """The ratio of its time to the reference's in the search."""
    alternatives: Iterable[ExportItem] = field(default=(), compare=False, repr=False)
    """Other candidates for the same workload, best first, for architectures that this one cannot be built for."""


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
    digest: str = ""
    """Digest of the kernel's files when they were measured; empty if it is not known."""
    builds: tuple[str, ...] = ()
    """Architectures to build for, where the format holds several; if empty, `arch`, on which they were measured."""
    few: bool = False
    """Whether equal code for several workloads is one variant."""


Contents = tuple[Mapping[str, Any], dict[str, bytes]]
"""The content of an export: what its manifest tells beside format, version and digests; and the other files, by name."""


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """A format. advice: how to use what was written, in lines for the terminal.

    contents: of one request; where the format holds "several", of requests for one kernel, or it and its backward, that
    differ in target, architecture or environment; where it holds a "run", of the run and the evaluations of all its
    candidates. Raises UsageError for what the format has no place for; TemplateError and CompileError if a source no
    longer compiles.
    """

    name: str
    contents: Callable[..., Contents]
    advice: Callable[[Path], list[str]]
    holds: Literal["one", "several", "run"] = "one"

    def export(self, *requests: ExportRequest) -> list[Path]:
        """Writes the files to `out`, which all requests have in common, and returns their paths. Raises what `contents` and
        `publish` raise."""
        return publish(requests[0].out, self.name, lambda: self.contents(*requests))


def exporter_names() -> list[str]:
    """The names of the formats as users type them: flashinfer-bench is the module flashinfer_bench."""
    return [name.replace("_", "-") for name in plugin_names("exporter")]


def find_exporter(name: str) -> Exporter:
    """The exporter of a format. Raises UnknownNameError."""
    if name not in exporter_names():
        raise UnknownNameError("export format", name, exporter_names())
    return cast(Exporter, find_plugin("exporter", name.replace("-", "_")))


def publish(out: Path, format: str, make: Callable[[], Contents]) -> list[Path]:
    """Writes what `make` returns to a new folder next to `out`, which then replaces `out`, completely or not at all.
    Returns the files.

    Raises UsageError if `out` is neither absent, nor empty, nor an earlier export of the same format, or cannot be written
    to; nothing is left then.
    """
    out = out.absolute()
    check_replaceable(out, format)
    files = with_manifest(format, *make())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", suffix=".part", dir=out.parent, ignore_cleanup_errors=True
        ) as staging:
            new, old = Path(staging) / "new", Path(staging) / "old"
            for name, data in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
            check_replaceable(out, format)  # again: making them may have taken a while
            if out.exists():
                out.rename(old)
            try:
                new.rename(out)
            except OSError:
                if old.exists():
                    old.rename(out)
                raise
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}): free space or choose another --out") from error
    return sorted(out / name for name in files)


def with_manifest(format: str, record: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of an export, the manifest among them."""
    head = {
        "written_by": _WRITER,
        "format": format,
        "format_version": FORMAT_VERSION,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    manifest = {**head, **record, "files": {name: sha256_of(files[name]) for name in sorted(files)}}
    return {**files, MANIFEST: written(manifest)}


def written(manifest: Mapping[str, Any]) -> bytes:
    """The text of a manifest, less what `read_manifest` of evo/runtime/manifest.py adds again."""
    brief = json.loads(json.dumps(manifest))
    if "variants" in brief:
        machines = brief["measured_on"]
        brief["measured_on"] = [m for i, m in enumerate(machines) if m not in machines[:i]]
        for v in brief["variants"]:
            v["measured_on"] = brief["measured_on"].index(machines[v["measured_on"]])
        for record, assumed in stated(brief):
            record["workload"] = record["workload"]["key"]
            for name in record.keys() & assumed.keys():
                value = assumed[name]
                if isinstance(value, dict):
                    record[name] = {n: part for n, part in record[name].items() if n not in value or part != value[n]}
                if record[name] in (value, {}):
                    del record[name]
    return f"{_lines(brief, 0)}\n".encode()


def sha256_of(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _lines(value: Any, depth: int, column: int = 0) -> str:
    """JSON text in which each value that fits on a line stands on one line, with as many beside it as fit. column: where it
    begins."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or column + len(flat) < _WIDTH:
        return flat
    named = value.items() if isinstance(value, dict) else (("", part) for part in value)
    text, column = "", column + 1
    for name, part in named:
        label = f"{json.dumps(name)}: " if isinstance(value, dict) else ""
        if text and (not depth or column + len(label) + len(json.dumps(part)) > _WIDTH):
            text, column = f"{text},\n{' ' * (depth + 1)}", depth + 1
        elif text:
            text, column = f"{text}, ", column + 2
        own = label + _lines(part, depth + 1, column + len(label))
        text += own
        column = len(own) - own.rindex("\n") if "\n" in own else column + len(own)
    return f"{'{' if isinstance(value, dict) else '['}{text}{'}' if isinstance(value, dict) else ']'}"


def check_replaceable(out: Path, format: str) -> None:
    """Raises UsageError if `out` is neither absent, nor empty, nor an earlier export of the same format, or cannot be
    made."""
    if not out.exists() and not out.is_symlink():
        check_folder(out.absolute().parent, "--out", f"cannot write to {out}")
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"{out} is not a folder; choose another --out")
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if not p.is_dir() and "__pycache__" not in p.parts}
    if not found:
        return
    try:
        manifest = read_manifest(out)
    except (OSError, ValueError):
        manifest = {}
    if manifest.get("written_by") != _WRITER:
        raise UsageError(f"{out} is not empty and no earlier export (no {MANIFEST} of evo's): choose another --out")
    if manifest.get("format") != format:
        raise UsageError(f"{out} is an export of format {manifest.get('format')}, not {format}: choose another --out")
    foreign = sorted(found - {MANIFEST, *manifest.get("files", {})})
    if foreign:
        raise UsageError(f"{out} is an earlier export, but {foreign[0]} in it is not evo's: move it away first")


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of an export. Raises OSError, ValueError."""
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    return manifest if isinstance(manifest, dict) else {}
