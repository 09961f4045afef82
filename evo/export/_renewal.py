"""An exported package with the launchers of the evo that is installed now; what was measured stays as it is."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evo import __version__
from evo.errors import UsageError
from evo.export._folder import MANIFEST, WRITER, file_digests, publish
from evo.export._manifest import FORMAT_VERSION, interface, to_json
from evo.export.module import FORMAT, frontend_of, is_of_launcher, public_names, write_launcher
from evo.problem.kernel import load_kernel

__all__ = ["renew"]


def renew(folder: Path, kernel_name: str | None = None) -> list[str]:
    """Replaces the run time and the kernel's frontend in a package, and leaves its variants, their sources and their
    record. Returns what became another file, or came or went.

    kernel_name: name or folder of its kernel, if it is not evo's of the name that the package tells.

    Raises UsageError if it is no package of format `module`, of another version of it, not as it was exported, or of a
    kernel that has changed what it is called with, or by.
    """
    folder = folder.resolve()
    manifest = _read(folder)
    before: dict[str, str] = manifest["files"]
    for name, digest in before.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UsageError(f"{path} is not the file that was exported: put that back, or export again from the run")
    kernel = load_kernel(kernel_name or manifest["kernel"]["name"])
    present = {"name": kernel.name, "title": kernel.title, "replaces": kernel.replaces, **interface(kernel)}
    present = json.loads(to_json(present))
    if changed := [name for name, value in present.items() if manifest["kernel"].get(name) != value]:
        raise UsageError(
            f"kernel {kernel.name!r} in {kernel.folder} has another {' and '.join(changed)} than {folder} was exported with:"
            " name the right one with --kernel, or search again"
        )
    if public_names(frontend_of(kernel)) != public_names(folder / "__init__.py"):
        raise UsageError(
            f"the frontend of kernel {kernel.name!r} in {kernel.folder} has other public names than {folder}: name the right"
            " kernel with --kernel, or export again from the run"
        )
    with TemporaryDirectory() as scratch:
        write_launcher(Path(scratch), frontend_of(kernel))
        present_files = file_digests(Path(scratch))
    if present_files == {name: digest for name, digest in before.items() if is_of_launcher(name)}:
        return []
    with publish(folder, FORMAT) as new:
        for name in before:
            if not is_of_launcher(name):
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes((folder / name).read_bytes())
        write_launcher(new, frontend_of(kernel))
        after = file_digests(new)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        manifest["files"] = after
        manifest["renewed"] = {"evo_version": __version__, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        (new / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
    return changed


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        below = sorted(str(p.parent) for p in folder.glob(f"*/{MANIFEST}"))
        hint = f"; did you mean {' '.join(below)}?" if below else ""
        raise UsageError(f"{folder} is no exported package: there is no {MANIFEST} in it that can be read{hint}") from error
    if not isinstance(manifest, dict) or manifest.get("written_by") != WRITER or manifest.get("format") != FORMAT:
        raise UsageError(f"{folder} is not an export of format {FORMAT}, and others have no launcher to renew")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UsageError(
            f"{folder} has version {manifest.get('format_version')} of its format, and this evo writes {FORMAT_VERSION}:"
            " export again, from the run"
        )
    files = manifest.get("files")
    whole = isinstance(files, dict) and isinstance(manifest.get("kernel"), dict)
    if not whole or any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest["files"]):
        raise UsageError(f"the {MANIFEST} in {folder} is damaged: put that of the export back")
    return manifest
