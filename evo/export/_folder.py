"""The folder that an export is written to: complete or not at all, with a manifest of what lies in it; it replaces nothing
but an earlier export."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evo import __version__
from evo.errors import UsageError

__all__ = ["MANIFEST", "check_replaceable", "file_digests", "publish", "read_manifest"]

MANIFEST = "manifest.json"
_WRITER = "evo"
"""`written_by` in a manifest marks a folder as an export."""
_FORMAT_VERSION = 3
_WIDTH = 120


def publish(out: Path, format: str, write: Callable[[Path], Mapping[str, Any]]) -> list[Path]:
    """Has a new folder written next to `out`, which then replaces `out`; its files. If `write` raises, nothing is left.

    write: returns what the manifest tells beside format, version and digests of the files. Raises UsageError if `out` is
    neither absent, nor empty, nor an earlier export of the same format, or cannot be written to.
    """
    out = out.absolute()
    check_replaceable(out, format)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
        try:
            new, old = staging / "new", staging / "old"
            new.mkdir()
            _write_manifest(new, format, write(new))
            check_replaceable(out, format)  # again: writing may have taken a while
            if out.exists():
                out.rename(old)
            try:
                new.rename(out)
            except OSError:
                if old.exists():
                    old.rename(out)
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}): free space or choose another --out") from error
    return _files(out)


def _write_manifest(folder: Path, format: str, record: Mapping[str, Any]) -> None:
    head = {
        "written_by": _WRITER,
        "format": format,
        "format_version": _FORMAT_VERSION,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # Twice: first in the text, and not replaced by what the manifest of a package within this export says.
    manifest = {**head, **record, **head, "files": file_digests(folder)}
    (folder / MANIFEST).write_text(_lines(json.loads(json.dumps(manifest, default=_as_json)), 0) + "\n", encoding="utf-8")


def _lines(value: Any, depth: int) -> str:
    """JSON in which whatever fits on a line stands on one."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or depth + len(flat) < _WIDTH:
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {_lines(part, depth + 1)}" for name, part in value.items()]
    else:
        parts = [_lines(part, depth + 1) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + " " * depth
    return f"{opening}{indent} {f',{indent} '.join(parts)}{indent}{closing}"


def _as_json(value: object) -> object:
    """Values of provenance that are not plain JSON data."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its relative path."""
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def check_replaceable(out: Path, format: str) -> None:
    """Raises UsageError if `out` is neither absent, nor empty, nor an earlier export of the same format."""
    if not out.exists() and not out.is_symlink():
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
    """Raises OSError, ValueError."""
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    return manifest if isinstance(manifest, dict) else {}
