"""One writer for each SQLite database: a lock file beside it, freed by the system when its holder dies."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from evo.errors import StoreError
from evo.lineage.database import lock_path

__all__ = ["WriterLock"]

_LOOKED_AT_S = 0.2
"""Readers who look whether it is held have it for far less (`evo.lineage.presence`)."""


class WriterLock:
    """Held from construction to `release`.

    Raises StoreError if another process holds it, or it cannot be made. The file stays when released:
    deleting it would let two processes lock two files of one name.
    """

    def __init__(self, database: Path) -> None:
        self.path = lock_path(database)
        self._lock = FileLock(self.path)
        holder = self._holder()  # first: older releases of filelock empty the file when they try
        try:
            self._lock.acquire(timeout=_LOOKED_AT_S, poll_interval=0.02)
        except Timeout:
            if not self.path.exists():  # filelock takes any file that cannot be made for one that is being made
                raise StoreError(f"cannot write in the folder {database.parent}; choose another with --db") from None
            raise StoreError(
                f"another search (pid {holder}) writes to this database ({database}); wait for it to end,"
                " or use --db FILE for a second one"
            ) from None
        except OSError as error:
            raise StoreError(
                f"cannot write in the folder {database.parent}: {error.strerror or error}; choose another with --db"
            ) from error
        with suppress(OSError):  # only for the other one's message; the lock is held without it
            self.path.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        self._lock.release()

    def _holder(self) -> str:
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"
