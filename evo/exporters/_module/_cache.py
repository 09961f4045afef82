"""Where what is built on this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "cache_folder"]

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
