"""The lineage database, opened for writing by a search or for reading."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, func, select, update

from evo.errors import EngineError, EvoError, StoreError
from evo.evaluation import Candidate, Evaluation, Timing
from evo.lineage import Environment, RunSpec, RunStatus, Stage, StoredEvaluation, StoredRun
from evo.lineage import models as m
from evo.lineage.database import (
    CACHED_BYTES,
    READ_ONLY,
    Location,
    LostFileError,
    UnreachableError,
    WatchedFile,
    check_folder,
    command_line,
    connect,
    locate,
    rescue,
    translated,
)
from evo.lineage.liveness import Claims, WriterLock, check_free, release_dead_runs
from evo.lineage.read import read_evaluations, read_run, resolve_run
from evo.lineage.schema import prepare, schema_of
from evo.lineage.write import Bases, check_name, clean_text, insert_candidate, insert_final, insert_run, insert_timings

OPENED: set[Location] = set()
"""Databases that the running command has opened."""

_AWAY_S, _PAUSE_S = 600.0, 1.0
"""Seconds for which a writer waits for a lost server or a locked file, and between two tries."""
_COUNT = select(func.count()).select_from(m.Candidate).where(m.Candidate.run_id == bindparam("counted"))
_TOUCH = update(m.Run).where(m.Run.id == bindparam("touched"))


class Store:
    """A lineage database. Open it with `Store.open`, close it with `close` or `with`.

    One thread of one process may use it. Every method raises StoreError with one sentence where the database fails. path:
    the file, None for a server. writes: it was opened for writing, and its file is not lost.
    """

    def __init__(
        self, engine: Engine, location: Location, closing: ExitStack, lock: WriterLock | None, *, writes: bool
    ) -> None:
        """lock: the lock of a file that is opened for writing; else None."""
        self._engine, self._location, self._closing, self._lock = engine, location, closing, lock
        self.path, self.writes = location.path, writes
        self._watched = WatchedFile(location.path) if lock is not None and location.path is not None else None
        self._run: StoredRun | None = None
        """The run that is being searched."""
        self._candidates = 0
        """Number of that run's candidates in the database."""
        self._is_complete = False
        """Whether the file itself has all records, and no connection that has them is open."""
        self.bases = Bases()
        self.connections_lost = 0
        self._open: Connection | None = None
        self._claims = Claims(engine)
        closing.callback(self._claims.release)

    @classmethod
    def open(cls, where: str | Path, *, write: bool, create: bool = True) -> Store:
        """The database at a path (runs/lineage.db) or URL (sqlite:///FILE, postgresql://...).

        Writing creates what is missing (unless a file is not to be made), brings the tables up to date, and shuts out other
        writers of the same file. Reading needs no lock, and works beside a writer.
        Raises StoreError for a database that is absent, locked, not evo's, newer, damaged or not writable.
        """
        location, lock = locate(where), None
        with ExitStack() as closing:
            if write and location.path is not None:
                if location.path.exists() or not create:
                    cls._check(location)
                lock = WriterLock(location.path.resolve())
                closing.callback(lock.release)
            engine = connect(location, write=write)
            closing.callback(engine.dispose)
            with translated(location):
                prepare(engine, location, write=write)
                if write:  # a file has no other writer
                    with engine.begin() as connection:
                        release_dead_runs(connection)
            OPENED.add(location)
            return cls(engine, location, closing.pop_all(), lock, writes=write)

    @classmethod
    def check_writable(cls, where: str | Path, name: str | None = None) -> None:
        """Raises the StoreError of a database that a search could not open for writing, or that has a run of this name, as
        far as that shows without making or changing a database."""
        location = locate(where)
        if location.path is not None and not location.path.exists():
            check_folder(location.path.parent)
            return
        if location.path is not None:
            check_free(location.path.resolve())
        cls._check(location, name)

    @staticmethod
    def _check(location: Location, name: str | None = None) -> None:
        """Raises StoreError for a database that is not evo's, without a change to it. name: a name that no run may have."""
        engine = connect(location, write=False)
        try:
            with translated(location), engine.connect() as connection:
                if schema_of(connection, location) and name is not None:
                    check_name(connection, name)
        finally:
            engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, and lets the next writer in. A second call does nothing."""
        self._closing.close()
        if self._watched is not None:
            self._watched.close()

    def __str__(self) -> str:
        return str(self._location)

    def command(self, *words: str) -> str:
        """A command to be typed next about this database."""
        return command_line(self._location.url, *words)

    def vacuum(self) -> None:
        """Makes a SQLite file as small as it can be, which needs as much free room meanwhile. On PostgreSQL, free room
        inside its files becomes usable for new records, while others work on."""
        if not self.writes:
            raise EngineError(f"{self} was opened for reading only")
        with translated(self._location), self._engine.connect() as connection:
            if self.path is None:
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            driver: Any = connection.connection.driver_connection  # VACUUM runs outside any transaction
            if self.path is None:
                driver.execute("VACUUM (ANALYZE)")
            else:
                for statement in ("VACUUM", "ANALYZE", "PRAGMA wal_checkpoint(TRUNCATE)"):
                    driver.execute(statement)

    def size(self) -> int:
        """Bytes that the database takes on disk."""
        with self.reading() as connection:
            if self.path is None:
                return int(connection.scalar(select(func.pg_database_size(func.current_database()))) or 0)
            wal = self.path.with_name(self.path.name + "-wal")
            return self.path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)

    def check(self) -> None:
        """Checks that the file of a database that is written to is still there, in some hundred thousandths of a second.

        Raises LostFileError once where it was deleted, moved, replaced or overwritten: this object then goes on with a file
        of another name, which has what was recorded. Raises it, too, where the file was made read-only.
        """
        watched, lock = self._watched, self._lock
        if watched is None or lock is None or self._open is not None:
            return
        if fault := watched.fault(self._run.uid if self._run is not None else None):
            raise self._lost(watched, fault)
        lock.renew()
        if watched.has_lost_log():  # this connection still has the log; the next one makes another
            with translated(self._location), self._engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                connection.rollback()
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.invalidate()
            watched.forget_log()
            self._is_complete = True
            try:
                self._read_all()
            except StoreError:
                self.check()  # a lost file is the cause of whatever SQLite says
                raise
            finally:
                self._is_complete = False

    def _lost(self, watched: WatchedFile, fault: str) -> LostFileError:
        what = f"{self._location} {fault} while it was written to"
        if fault == READ_ONLY:
            return LostFileError(f"{what}; all that was recorded is in it: chmod u+w {watched.path}, then resume")
        self._watched = None
        if self._is_complete:
            out = rescue(watched.path, watched.read())
        else:
            pooled = self._engine.raw_connection()
            source: Any = pooled.driver_connection
            out = rescue(watched.path, source)
            # A close could write into a file that is another program's now: the connection is open until the process ends.
            pooled.detach()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(source))
        watched.remove_log()
        watched.close()
        if out is None:
            self.writes, self._engine = False, connect(self._location, write=False)
            self._closing.callback(self._engine.dispose)
            return LostFileError(f"{what}, and what was recorded can be read or saved nowhere")
        self._location, self.path = locate(out), out
        self._engine = connect(self._location, write=True)
        self._closing.callback(self._engine.dispose)
        self.bases.forget()
        if self._run is None:
            return LostFileError(f"{what}; what was recorded is in {out}")
        with self.reading() as connection:
            found = int(connection.scalar(_COUNT, {"counted": self._run.id}) or 0)
        kept = "all that was recorded is" if found >= self._candidates else f"{found} of {self._candidates} candidates are"
        return LostFileError(f"{what}; {kept} in {out}, go on with: {self.command('resume', self._run.name)}")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for queries, which see one state of the database with everything recorded so far."""
        if self._open is not None:  # an error is translated where the transaction ends
            yield self._open
            return
        self.check()
        with translated(self._location), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection that writes. Everything recorded inside is one transaction: if anything fails, nothing is recorded.
        A transaction inside another one is a part of it."""
        if self._open is not None:
            yield self._open
            return
        if not self.writes:
            raise EngineError(f"{self} was opened for reading only")
        self.check()
        try:
            with translated(self._location), self._engine.begin() as connection:
                self._open = connection
                yield connection
        except BaseException as error:
            self._open = None
            self.bases.forget()  # nothing of what was recorded inside is kept
            if isinstance(error, StoreError):
                self.check()  # a lost file is the cause of whatever SQLite says
            raise
        finally:
            self._open = None
            if self._watched is not None:
                self._watched.note(self._run.uid if self._run is not None else None)

    def create_run(self, spec: RunSpec, environment: Environment) -> StoredRun:
        """Records a new run. Raises StoreError for a name that is taken or not legal."""
        with self.transaction() as connection:
            run = read_run(connection, insert_run(connection, spec, environment))
            self._claims.take(run)  # before another process can see it
        self._begin(run)
        return run

    def _begin(self, run: StoredRun) -> None:
        """Notes the run that is searched, for the case that the file is lost."""
        if self._watched is None or (self._run is not None and self._run.id == run.id):
            return
        with self.reading() as connection:
            self._candidates = int(connection.scalar(_COUNT, {"counted": run.id}) or 0)
        self._read_all()
        self._run = run

    def _read_all(self) -> None:
        """Makes the connection keep all of a small enough file in memory, from where it is written if the file is lost. The
        first statement puts something into the log: without that SQLite would ask the file again."""
        if self.size() < CACHED_BYTES:
            with self.transaction() as connection:
                connection.exec_driver_sql("UPDATE run SET name = name WHERE id = (SELECT min(id) FROM run)")
            with self.reading() as connection:
                connection.exec_driver_sql("PRAGMA quick_check(1)")

    def run(self, name: str) -> StoredRun:
        """The run of a name, a unique prefix or "latest". Raises UnknownNameError, or StoreError if ambiguous."""
        with self.reading() as connection:
            return read_run(connection, resolve_run(connection, name))

    def add(self, run: StoredRun, candidate: Candidate, evaluation: Evaluation, *, elapsed_s: float) -> None:
        """Records a candidate with its parents, build, checks, timings, source and code, all or nothing.

        Orders may come in any sequence; parents and `same_code_as` must be recorded before. PTX is stored for every
        candidate; machine code only for one that is the fastest of its task when it is recorded, if its build has it.
        A lost connection to a server is made again, for up to ten minutes; a file that another program has locked is waited
        for as long. Where the file is lost, the candidate is recorded with the others, elsewhere.
        Raises EngineError for a second candidate of the same order, or one that refers to an unknown one.
        """
        lost_s = None
        while True:
            try:
                with self.transaction() as connection:
                    self._claims.take(run)
                    state: dict[str, object] = {}
                    if lost_s is None or self._task_of(connection, run, candidate.order) is None:
                        insert_candidate(connection, self.bases, run, candidate, evaluation, elapsed_s=elapsed_s)
                    if lost_s is not None:  # others may have found that no process searches the run
                        state = {"status": RunStatus.RUNNING.value}
                    self._touch(connection, run, elapsed_s=elapsed_s, **state)
                self._candidates += 1
                return
            except LostFileError:
                if self.path is not None and self._watched is None:
                    with suppress(EvoError), self.transaction() as connection:
                        insert_candidate(connection, self.bases, run, candidate, evaluation, elapsed_s=elapsed_s)
                        self._touch(connection, run, elapsed_s=elapsed_s)
                raise
            except StoreError as error:
                if lost_s is None:
                    if not isinstance(error, UnreachableError):
                        raise
                    lost_s, self.connections_lost = time.monotonic(), self.connections_lost + (self.path is None)
                if time.monotonic() - lost_s > _AWAY_S:
                    raise
                self._claims.release()  # the old connection holds the run until the server knows that it is gone
                time.sleep(_PAUSE_S)

    def add_baselines(
        self, run: StoredRun, task: int, timings: Sequence[Timing], *, stage: Stage = Stage.SEARCH
    ) -> None:
        """Records times of baselines that were timed beside no candidate."""
        if timings:
            with self.transaction() as connection:
                insert_timings(connection, run, task, None, timings, stage, 0)

    def add_final(self, run: StoredRun, order: int, measurement: Evaluation, *, elapsed_s: float) -> None:
        """Records a finalist's re-timing; the last of several counts. Raises EngineError for an unknown candidate."""
        with self.transaction() as connection:
            key, task = self._find(connection, run, order)
            insert_final(connection, self.bases, run, task, key, measurement)
            self._touch(connection, run, elapsed_s=elapsed_s)

    def claim(self, run: StoredRun) -> None:
        """Reserves a run for this process until the store is closed. Raises StoreError if another process searches it."""
        self._claims.take(run)

    def set_winner(self, run: StoredRun, task: int, order: int | None) -> None:
        """Names a task's winner, or none. Raises EngineError for a candidate of another task."""
        with self.transaction() as connection:
            key = None
            if order is not None:
                key, home = self._find(connection, run, order)
                if home != task:
                    raise EngineError(f"candidate {order} is of task {home} and cannot win {task}")
            where = (m.Task.run_id == run.id, m.Task.number == task)
            if connection.execute(update(m.Task).where(*where), {"winner_id": key}).rowcount != 1:
                raise EngineError(f"run {run.name!r} has no task {task}")

    def set_budget(self, run: StoredRun, budget: Mapping[str, object]) -> None:
        """Records the whole budget of a run that is continued."""
        with self.transaction() as connection:
            self._touch(connection, run, elapsed_s=run.elapsed_s, budget=dict(budget))

    def set_status(self, run: StoredRun, status: RunStatus, *, reason: str = "", elapsed_s: float) -> None:
        """Records a run's status, and the time at which it finished. Raises StoreError for a run that another process
        searches."""
        now = datetime.now(UTC)
        finished = now if status is RunStatus.FINISHED else None
        state = {"status": status.value, "stop_reason": clean_text(reason), "finished": finished}
        with self.transaction() as connection:
            self._claims.take(run)
            self._touch(connection, run, elapsed_s=elapsed_s, **state)
        self._begin(run)

    def evaluations(self, run: StoredRun) -> list[StoredEvaluation]:
        """All candidates added so far, sorted by order."""
        with self.reading() as connection:
            return read_evaluations(connection, run)

    @staticmethod
    def _task_of(connection: Connection, run: StoredRun, order: int) -> int | None:
        """The task of a candidate; None if there is no such candidate."""
        return connection.scalar(select(m.Candidate.task).where(m.Candidate.id == m.candidate_key(run.id, order)))

    def _find(self, connection: Connection, run: StoredRun, order: int) -> tuple[int, int]:
        """Key and task of a candidate."""
        task = self._task_of(connection, run, order)
        if task is None:
            raise EngineError(f"run {run.name!r} has no candidate {order}")
        return m.candidate_key(run.id, order), task

    @staticmethod
    def _touch(connection: Connection, run: StoredRun, *, elapsed_s: float, **state: object) -> None:
        values = {"elapsed_s": elapsed_s, "updated": datetime.now(UTC), **state}
        if connection.execute(_TOUCH, {**values, "touched": run.id}).rowcount != 1:
            raise EngineError(f"run {run.name!r} is not in this database")
