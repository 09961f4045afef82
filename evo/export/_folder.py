"""The folder that an export is written to: complete or not at all; it replaces nothing but an earlier export."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evo import __version__
from evo.errors import UsageError
from evo.export import ExportRequest

__all__ = [
    "MANIFEST",
    "WRITER",
    "check_replaceable",
    "file_digests",
    "place_package",
    "publish",
    "to_json",
    "write_manifest",
]

MANIFEST = "manifest.json"
WRITER = "evo"
"""`written_by` in a manifest marks a folder as an export."""
_PROVENANCE = ("run", "kernel", "measured_on", "exported_on", "variants")
_WIDTH = 120


@contextmanager
def publish(out: Path, format: str) -> Iterator[Path]:
    """A new folder next to `out`, which replaces `out` when the block ends, and is removed if the block raises.

    The block must leave a manifest there with `written_by`, `format` and `files`. Raises UsageError if `out` is
    neither absent, nor empty, nor an earlier export of the same format, or cannot be written to.
    """
    check_replaceable(out, format)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {out.parent} ({error.strerror}); choose another --out") from error
    new, old = staging / "new", staging / "old"
    try:
        new.mkdir()
        yield new
        check_replaceable(out, format)  # again: the block may have taken a while
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {out} ({error.strerror}); free some space or fix its rights") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def place_package(request: ExportRequest, out: Path) -> dict[str, Any]:
    """Writes the package of format `module` to folder `out`, for formats that wrap it; its manifest. Raises what that
    exporter raises."""
    from evo.export.module import ModuleExporter

    ModuleExporter().export(replace(request, out=out))
    manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def write_manifest(folder: Path, format: str, record: Mapping[str, Any]) -> None:
    """Writes the manifest, after all other files, which it lists. record: of the run, or the manifest of the package, from
    which this one takes the kernel, the machines and the variants."""
    manifest = {
        "written_by": WRITER,
        "format": format,
        "format_version": 1,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: record[name] for name in _PROVENANCE if name in record},
        "files": file_digests(folder),
    }
    (folder / MANIFEST).write_text(to_json(manifest), encoding="utf-8")


def to_json(record: Mapping[str, Any]) -> str:
    """One text for one record, times in ISO 8601. Whatever fits on a line stands on one."""
    plain = json.loads(json.dumps(record, default=_as_json))
    return _lines(plain, 0) + "\n"


def _lines(value: Any, depth: int, before: int = 0) -> str:
    """JSON on as few lines as its width allows; `before`: what stands on its first line already."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or depth + before + len(flat) < _WIDTH:
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_lines(part, depth + 1, len(name) + 4)}" for name, part in value.items()]
    else:
        parts = [_lines(part, depth + 1) for part in value]
    lines: list[str] = []
    for part in parts:
        if lines and "\n" not in lines[-1] + part and depth + len(lines[-1]) + len(part) + 4 < _WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + " " * depth
    return f"{opening}{indent} {f',{indent} '.join(lines)}{indent}{closing}"


def _as_json(value: object) -> object:
    """Values of provenance that are not plain JSON data."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def check_replaceable(out: Path, format: str) -> None:
    """Raises UsageError if `out` is neither absent, nor empty, nor an earlier export of the same format."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"{out} is not a folder; choose another --out")
    found = {p.relative_to(out).as_posix() for p in out.rglob("*") if not p.is_dir() and "__pycache__" not in p.parts}
    if not found:
        return
    manifest = _read_manifest(out)
    if manifest is None:
        raise UsageError(f"{out} is not empty and no earlier export (no {MANIFEST} of evo's): choose another --out")
    if manifest.get("format") != format:
        raise UsageError(f"{out} is an export of format {manifest.get('format')}, not {format}: choose another --out")
    foreign = sorted(found - {MANIFEST, *manifest.get("files", {})})
    if foreign:
        raise UsageError(f"{out} is an earlier export, but {foreign[0]} in it is not evo's: move it away first")


def _read_manifest(out: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and manifest.get("written_by") == WRITER:
            return manifest
    return None
