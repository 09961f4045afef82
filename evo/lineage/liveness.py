"""Liveness: which process writes to a database, and which runs have a process that lives.

A SQLite file has one writer, which holds a lock file beside it. A PostgreSQL database has several, which agree by
advisory locks. The system or the server frees a lock when the process that holds it has ended.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, event, func, select, text, update

from evo.errors import StoreError
from evo.lineage import RunStatus, StoredRun
from evo.lineage import models as m
from evo.lineage.database import make_folder

if TYPE_CHECKING:
    from evo.lineage.store import Store

# Numbers of advisory locks that other programs are unlikely to take. A run's lock has its id as a second number.
_WRITERS, _RUNS = 0x65766F, 0x65766F02
_TRIES, _PAUSE_S = 10, 0.05

_CLAIMED = text(
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = :runs AND granted AND database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Query of the ids of the runs in a server's database that some process holds."""

GONE = "its process ended without saying why"
"""Reason that is recorded for a run whose process ended without one."""


def _is_server(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


class WriterLock:
    """The lock of the one writer of a SQLite file, held from construction to `release`.

    Raises StoreError if another process holds it, or it cannot be made. The file stays after the release, because two
    processes could lock two files of one name if it was deleted.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._take()

    def _take(self) -> None:
        database = self._database
        try:
            make_folder(database.parent)
            self._file = _lock_path(database).open("a+")
        except OSError as error:
            raise StoreError(
                f"cannot write in the folder {database.parent}: {error.strerror or error}; choose another with --db"
            ) from error
        self._file.seek(0)
        holder = self._file.read().strip() or "unknown"
        for _ in range(_TRIES):  # a reader that checks the lock holds it for a moment
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_PAUSE_S)
        else:
            self._file.close()
            raise StoreError(
                f"another search (pid {holder}) writes to this database ({database}); wait for it to end,"
                " or use --db FILE for a second one"
            )
        self._file.truncate(0)
        print(os.getpid(), file=self._file, flush=True)  # another writer names this process in its message

    def renew(self) -> None:
        """Takes the lock again if its file was deleted. Raises StoreError if another process has it by now."""
        try:
            kept = os.path.samestat(_lock_path(self._database).stat(), os.fstat(self._file.fileno()))
        except (OSError, ValueError):  # ValueError where the lock was lost before
            kept = False
        if not kept:
            self._file.close()
            self._take()

    def release(self) -> None:
        """Frees the lock, although processes that were forked meanwhile have the file open, too."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def check_free(database: Path) -> None:
    """Raises the StoreError of `WriterLock` if another process holds the lock; makes no lock file."""
    if _lock_path(database).exists():
        WriterLock(database).release()


def write_alone(connection: Connection) -> None:
    """Makes other transactions that call this wait until this one ends. It is called before a run is named, artefacts are
    stored or deleted, or tables are made: two must not find the same name free, nor each wait for an artefact of the other.
    """
    if _is_server(connection):
        connection.execute(select(func.pg_advisory_xact_lock(_WRITERS)))


class Claims:
    """The runs of a server's database that this process searches. A connection of their own holds their locks, which so end
    with the process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._held: set[int] = set()
        event.listen(engine, "invalidate", lambda *_: self._held.clear())  # with one connection, this one may be lost, too

    def take(self, run: StoredRun) -> None:
        """Claims a run. Raises StoreError if another process searches it."""
        if run.id in self._held or self._engine.dialect.name != "postgresql":
            return
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        for _ in range(_TRIES):  # another process may be checking whether the run is alive
            if self._connection.scalar(select(func.pg_try_advisory_lock(_RUNS, run.id))):
                self._held.add(run.id)
                return
            time.sleep(_PAUSE_S)
        raise StoreError(
            f"run {run.name!r} is being searched by another process, perhaps on another machine; wait for it to"
            " end, or start a run of your own"
        )

    def release(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()  # back in the pool, it would keep its locks
            self._connection.close()
            self._connection = None
        self._held.clear()


def release_dead_runs(connection: Connection) -> None:
    """Records runs with the status running whose process has ended as interrupted."""
    running = connection.scalars(select(m.Run.id).where(m.Run.status == RunStatus.RUNNING.value)).all()
    if _is_server(connection):
        # No other process can claim a run that is found to have none until this transaction ends.
        running = [key for key in running if connection.scalar(select(func.pg_try_advisory_xact_lock(_RUNS, key)))]
    if running:
        interrupted = {"status": RunStatus.INTERRUPTED.value, "stop_reason": GONE}
        connection.execute(update(m.Run).where(m.Run.id.in_(running)), interrupted)


def gone(store: Store, connection: Connection, recorded: Mapping[int, str]) -> frozenset[int]:
    """The ids of runs that are recorded as running, and whose process has ended. A reader asks this, because it cannot
    record it as `release_dead_runs` does. recorded: the status of runs by id."""
    running = frozenset(key for key, status in recorded.items() if status == RunStatus.RUNNING)
    if not running:
        return running
    if store.path is None:
        return running - frozenset(connection.scalars(_CLAIMED, {"runs": _RUNS}))
    return frozenset() if store.writes or not _is_free(_lock_path(store.path.resolve())) else running


def _is_free(lock: Path) -> bool:
    """Whether no process holds a lock. The check shares the lock for a moment; a writer that comes then waits for it."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # it is held, or cannot be read
        return False
    return True
