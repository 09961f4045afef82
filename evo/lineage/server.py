"""What several writers to one PostgreSQL database agree on: whose turn it is, and which runs are alive.

All of it is advisory locks, which the server frees when the process that holds them is gone. SQLite needs none
of them: its one writer is alone.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, Engine, func, select, update

from evo.errors import StoreError
from evo.lineage import RunStatus, StoredRun
from evo.lineage import models as m

__all__ = ["GONE", "RUN_LOCKS", "Claims", "release_dead_runs", "take_turns", "write_alone", "write_beside"]

# Any numbers that other users of PostgreSQL's advisory locks will not take.
_NAMES = 0x65766F  # "evo": names of runs and environments are given out one after another
_ARTEFACTS = 0x65766F01
RUN_LOCKS = 0x65766F02
"""The first of two numbers, the second being the run's id."""
_TRIES, _PAUSE_S = 5, 0.1

GONE = "its process ended without saying why"
"""Why a run stopped whose process could not tell."""


def _is_server(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


def take_turns(connection: Connection) -> None:
    """Until its transaction ends, others wait here; for what two writers must not decide at once."""
    if _is_server(connection):
        connection.execute(select(func.pg_advisory_xact_lock(_NAMES)))


def write_beside(connection: Connection) -> None:
    """For a transaction that stores artefacts in one go, sorted by digest.

    Two of them that store the same ones wait for each other in one direction only.
    """
    if _is_server(connection):
        connection.execute(select(func.pg_advisory_xact_lock_shared(_ARTEFACTS)))


def write_alone(connection: Connection) -> None:
    """For a transaction that stores artefacts in several goes, or deletes some: until it ends, no other does.

    Two such at once could each wait for what the other has stored, and one would be told of a deadlock.
    """
    if _is_server(connection):
        connection.execute(select(func.pg_advisory_xact_lock(_ARTEFACTS)))


class Claims:
    """The runs that this process is searching. Held by a connection of their own: they end with the process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._held: set[int] = set()

    def take(self, run: StoredRun) -> None:
        """Raises StoreError if another process searches the run."""
        if run.id in self._held or self._engine.dialect.name != "postgresql":
            return
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        for _ in range(_TRIES):  # somebody may only be looking whether the run is alive
            if self._connection.scalar(select(func.pg_try_advisory_lock(RUN_LOCKS, run.id))):
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
    """Runs recorded as running whose process is gone are interrupted ones."""
    running = connection.scalars(select(m.Run.id).where(m.Run.status == RunStatus.RUNNING.value)).all()
    if _is_server(connection):
        # Until this transaction ends nobody can claim what is found to be nobody's.
        running = [key for key in running if connection.scalar(select(func.pg_try_advisory_xact_lock(RUN_LOCKS, key)))]
    if running:
        connection.execute(
            update(m.Run).where(m.Run.id.in_(running)),
            {
                "status": RunStatus.INTERRUPTED.value,
                "stop_reason": GONE,
            },
        )
