"""The folder that an export is written to: complete or not at all, with a manifest of what lies in it; it replaces nothing
but an earlier export."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evo import __version__
from evo.errors import UsageError

__all__ = ["MANIFEST", "Contents", "check_replaceable", "publish", "read_manifest", "sha256_of", "with_manifest"]

MANIFEST = "manifest.json"
_WRITER = "evo"
"""`written_by` in a manifest marks a folder as an export."""
_FORMAT_VERSION = 3
_WIDTH = 120


Contents = tuple[Mapping[str, Any], dict[str, bytes]]
"""Of an export: what its manifest tells beside format, version and digests; and the other files, by name."""


def publish(out: Path, format: str, make: Callable[[], Contents]) -> list[Path]:
    """Writes what `make` returns to a new folder next to `out`, which then replaces `out`; its files.

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
        "format_version": _FORMAT_VERSION,
        "evo_version": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    manifest = {**head, **record, "files": {name: sha256_of(files[name]) for name in sorted(files)}}
    text = _lines(json.loads(json.dumps(manifest, default=_as_json)), 0)
    return {**files, MANIFEST: f"{text}\n".encode()}


def sha256_of(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


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
