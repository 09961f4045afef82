"""Which process writes to a database, and which runs have a living one.

A SQLite file has one writer, which holds a lock file beside it. A PostgreSQL database has several, which agree by
advisory locks. The system or the server frees either lock when the process that holds it is gone.
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

if TYPE_CHECKING:
    from evo.lineage.store import Store

# Any numbers that other users of PostgreSQL's advisory locks will not take.
_WRITERS = 0x65766F  # "evo"
_RUNS = 0x65766F02  # the first of two numbers, the second being the run's id
_TRIES, _PAUSE_S = 10, 0.05

_CLAIMED = text(
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = :runs AND granted AND database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Keys of the runs of a server's database that a process holds."""

GONE = "its process ended without saying why"
"""Why a run stopped whose process could not tell."""


def _is_server(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


class WriterLock:
    """The lock of the one writer of a SQLite file, held from construction to `release`.

    Raises StoreError if another process holds it, or it cannot be made. The file stays when released:
    deleting it would let two processes lock two files of one name.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._take()

    def _take(self) -> None:
        database = self._database
        try:
            database.parent.mkdir(parents=True, exist_ok=True)
            self._file = _lock_path(database).open("a+")
        except OSError as error:
            raise StoreError(
                f"cannot write in the folder {database.parent}: {error.strerror or error}; choose another with --db"
            ) from error
        self._file.seek(0)
        holder = self._file.read().strip() or "unknown"
        for _ in range(_TRIES):  # a reader may be looking whether it is held
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
        print(os.getpid(), file=self._file, flush=True)  # for the other one's message

    def renew(self) -> None:
        """Takes the lock again where something has deleted its file. Raises StoreError if another process has it by now."""
        try:
            kept = os.path.samestat(_lock_path(self._database).stat(), os.fstat(self._file.fileno()))
        except (OSError, ValueError):  # the latter where the lock was lost before
            kept = False
        if not kept:
            self._file.close()
            self._take()

    def release(self) -> None:
        """Also for processes that were forked meanwhile, which have the file open too."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


def check_free(database: Path) -> None:
    """Raises the StoreError of `WriterLock` if another process holds that, and makes none."""
    if _lock_path(database).exists():
        WriterLock(database).release()


def write_alone(connection: Connection) -> None:
    """For a transaction that names a run, stores or deletes artefacts, or makes tables: until it ends, other such wait here.

    Two must not find the same name free; and each could wait for an artefact that the other has stored, and be told of a
    deadlock.
    """
    if _is_server(connection):
        connection.execute(select(func.pg_advisory_xact_lock(_WRITERS)))


class Claims:
    """The runs that this process is searching, on a server. A connection of their own holds them: they end with the
    process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._held: set[int] = set()
        event.listen(engine, "invalidate", lambda *_: self._held.clear())  # when any connection is lost, that may be, too

    def take(self, run: StoredRun) -> None:
        """Raises StoreError if another process searches the run."""
        if run.id in self._held or self._engine.dialect.name != "postgresql":
            return
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        for _ in range(_TRIES):  # another process may be looking whether the run is alive
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
            self._connection.invalidate()  # closed and not pooled: a pooled one would keep its locks
            self._connection.close()
            self._connection = None
        self._held.clear()


def release_dead_runs(connection: Connection) -> None:
    """Records that runs with the status running whose process is gone are interrupted. For a writer."""
    running = connection.scalars(select(m.Run.id).where(m.Run.status == RunStatus.RUNNING.value)).all()
    if _is_server(connection):
        # Until this transaction ends no other process can claim a run that is found to have none.
        running = [key for key in running if connection.scalar(select(func.pg_try_advisory_xact_lock(_RUNS, key)))]
    if running:
        interrupted = {"status": RunStatus.INTERRUPTED.value, "stop_reason": GONE}
        connection.execute(update(m.Run).where(m.Run.id.in_(running)), interrupted)


def gone(store: Store, connection: Connection, recorded: Mapping[int, str]) -> frozenset[int]:
    """The keys of runs that are recorded as running and whose process is known to have ended. For readers, which cannot
    record it as `release_dead_runs` does. recorded: the status of runs by their keys."""
    running = frozenset(key for key, status in recorded.items() if status == RunStatus.RUNNING)
    if not running:
        return running
    if store.path is None:
        return running - frozenset(connection.scalars(_CLAIMED, {"runs": _RUNS}))
    return frozenset() if store.writes or not _is_free(_lock_path(store.path.resolve())) else running


def _is_free(lock: Path) -> bool:
    """Whether no process holds it. It is taken for that, for a moment and beside others that only look; a writer that
    comes at that moment waits for it."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # held, or not to be looked at
        return False
    return True
