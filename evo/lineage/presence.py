"""Whether a run that is recorded as running is being searched: a process that was killed could not say that it stopped."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection, text

from evo.lineage import RunStatus
from evo.lineage.database import lock_path
from evo.lineage.server import RUN_LOCKS
from evo.lineage.store import Store

__all__ = ["gone"]


def gone(store: Store, connection: Connection, recorded: Mapping[int, str]) -> frozenset[int]:
    """Of runs with the status that is recorded of each, by their keys: those recorded as running whose process is known to
    have ended. The next writer of a file records it (`evo.lineage.server.release_dead_runs`); readers cannot."""
    running = frozenset(key for key, status in recorded.items() if status == RunStatus.RUNNING)
    if not running:
        return running
    if store.path is None:
        return running - _claimed(connection)
    return frozenset() if store.writes or not _is_free(lock_path(store.path.resolve())) else running


def _claimed(connection: Connection) -> frozenset[int]:
    """Keys of the runs of a server's database that a process holds (`evo.lineage.server.Claims`)."""
    held = connection.execute(
        text(
            "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = :runs AND granted AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())"
        ),
        {"runs": RUN_LOCKS},
    )
    return frozenset(int(key) for key in held.scalars())


def _is_free(lock: Path) -> bool:
    """Whether nobody holds it. It is taken for that, for a moment and beside others that only look; who comes to write at
    that moment waits for it (`evo.lineage.lock.WriterLock`)."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # held, or not to be looked at
        return False
    return True
