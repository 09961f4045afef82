"""Where what is built on this machine is kept."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "cache_folder", "keep", "kept"]

VARIABLE = "EVO_KERNELS_CACHE"


def cache_folder(create: bool = True) -> Path | None:
    """$EVO_KERNELS_CACHE, else evo-kernels/ in $XDG_CACHE_HOME (~/.cache). A folder of this user's alone, since what lies
    in it is executed; None if there is none. Need not exist where it is not to be created."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        wanted = os.environ.get(VARIABLE)
        users = base if base.is_absolute() else Path.home() / ".cache"
        folder = Path(wanted).absolute() if wanted else users / "evo-kernels"
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not folder.exists():
            return folder
        status = folder.stat()
    except (OSError, RuntimeError):  # read-only, or no home
        return None
    return folder if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def keep(name: str, data: bytes, facts: Mapping[str, Any]) -> None:
    """Writes a file, and what is known of it beside it, for `kept` of this and other processes: whole or not at all.
    Without a cache folder, or room in it, nothing."""
    folder = cache_folder()
    if folder is None:
        return
    told = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), **facts}, indent=1)
    with suppress(OSError):
        for path, content in ((folder / name, data), (folder / f"{name}.json", told.encode())):
            descriptor, part = tempfile.mkstemp(dir=folder, prefix="part-")
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                    file.write(content)
                Path(part).replace(path)
            except OSError:
                Path(part).unlink(missing_ok=True)
                raise


def kept(name: str) -> bytes | None:
    """What `keep` wrote under that name; None if there is nothing, or it is not as it was written."""
    folder = cache_folder(create=False)
    if folder is None:
        return None
    try:
        facts, data = json.loads((folder / f"{name}.json").read_bytes()), (folder / name).read_bytes()
    except (OSError, ValueError):
        return None
    same = isinstance(facts, dict) and facts.get("sha256") == hashlib.sha256(data).hexdigest()
    return data if same else None
