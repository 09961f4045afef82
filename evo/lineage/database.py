"""The place of a lineage database: how it is opened (SQLite by path or URL, PostgreSQL by URL), one sentence for everything
that a driver can object to, the file of an open SQLite database, and copies of it made while it is used."""

import json
import os
import re
import shlex
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from glob import escape
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, exc, make_url

from evo.errors import EngineError, StoreError

_BUSY_TIMEOUT_S = 10.0
CACHED_BYTES = 16 << 20
"""Bytes of pages that a writer caches; they are all that is left of a file that another program overwrites."""
_CONNECT_TIMEOUT_S = 10
_SECRETS = frozenset({"password", "sslpassword"})
"""Options of libpq that a URL may carry after its '?', and that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """A database's address. path: the file of a SQLite database; None for a server."""

    url: URL
    path: Path | None

    def __str__(self) -> str:
        return f"the database {shown(self.url)}"


def command_line(where: str | URL | None, *words: str) -> str:
    """A command to be typed next, quoted for a shell. where: the database that it names, without a password; None: none."""
    return shlex.join(("evo", *words, *(("--db", shown(where)) if where is not None else ())))


def locate(where: str | Path) -> Location:
    """The location that a path, sqlite:///path or postgresql://user@host/name names.

    Raises StoreError for another text or another kind of database.
    """
    if isinstance(where, Path) or "://" not in where:
        if not str(where):
            raise StoreError("the database has no name; give a file such as runs/lineage.db, or a URL")
        if isinstance(where, str) and _SERVER_WITHOUT_URL.search(where):
            raise StoreError(f"a database on a server is named by a URL; {_EXAMPLES}")
        path = Path(where).expanduser().absolute()
        return Location(url=URL.create("sqlite", database=str(path)), path=path)
    try:
        url = make_url(where)
        if "@" in (url.host or ""):  # a part of a password that should have been escaped
            raise ValueError("@")
        backend, driver = url.get_backend_name(), url.get_driver_name()
    except (exc.ArgumentError, exc.NoSuchModuleError, ValueError):  # these errors' texts may hold a part of a password
        raise StoreError(
            f"{_hidden(where)!r} is not a database URL; {_EXAMPLES}, with special characters of a name or password as"
            " %40 for '@'"
        ) from None
    if (backend, driver) == ("sqlite", "pysqlite"):
        if not url.database or url.database == ":memory:" or url.query:
            raise StoreError(f"{where!r} names no file, or more than a file; {_EXAMPLES}")
        return locate(Path(url.database))
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        return Location(url=url.set(drivername="postgresql+psycopg"), path=None)
    raise StoreError(f"{_hidden(where)!r}: evo does not work with {url.drivername} databases; {_EXAMPLES}")


_EXAMPLES = "write a file, sqlite:///FILE or postgresql://USER@HOST/NAME"
# A libpq connection string, or a URL with a slash too few. Taken for a file, it would be shown with its password.
_SERVER_WITHOUT_URL = re.compile(r"\bpassword\s*=|^postgres\w*(\+\w+)?:|^[a-z0-9+]+:[^@]*@")


def shown(where: str | Path | URL) -> str:
    """`where` without the password that a URL may carry: printable, and understood by --db."""
    if isinstance(where, URL):
        return str(where.database) if where.get_backend_name() == "sqlite" else _render(where)
    if isinstance(where, Path) or "://" not in where:
        return str(where)
    try:
        url = make_url(where)
        return _hidden(where) if "@" in (url.host or "") else _render(url)
    except (exc.ArgumentError, ValueError):
        return _hidden(where)


def _render(url: URL) -> str:
    name = url.drivername.removesuffix("+psycopg")
    query = {key: value for key, value in url.query.items() if key not in _SECRETS}
    return url.set(drivername=name, query=query).render_as_string(hide_password=True)


def _hidden(text: str) -> str:
    """`text`, which need not be a URL, without options and without the user and password before an @."""
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{'***@' if '@' in rest else ''}{rest.rpartition('@')[2].partition('?')[0]}"


def check_folder(folder: Path, option: str = "--db", said: str = "") -> None:
    """Raises StoreError if a folder is not there and cannot be made, or no file can be made in it; leaves nothing there.
    option: the option that names it. said: the beginning of the error's text, if that is not about the folder."""
    try:
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"{said or f'cannot write in the folder {folder}'}: {why}; choose another with {option}") from error


def make_folder(folder: Path) -> None:
    """Makes the folder of a database where there is none; git ignores all that is in it then. Raises OSError."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def connect(location: Location, *, write: bool) -> Engine:
    """An engine for the database. An engine that only reads cannot change anything.

    Raises StoreError for a place that cannot be a database, or cannot be opened this way.
    """
    if location.path is None:
        return _connect_server(location, write=write)
    path = location.path
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is a folder or a device; name a file with --db")
    if not write and not path.exists():
        raise EmptyError(f"there is no database {path}; run a search first, or name another with --db")
    if write:
        mode = "mode=rw"
    elif os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists():
        mode = "mode=ro"
    else:
        # SQLite reads a WAL database through a -shm file beside it. Where this account may not make one, and no
        # writer has the database open, it is read as it lies.
        mode = "immutable=1"
    first = write

    def open_file() -> sqlite3.Connection:
        """Opens the file, which the first writing connection makes; a later one does not, because the file is lost then."""
        nonlocal first
        uri = f"{path.as_uri()}?{mode}{'c' if first else ''}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        first = False
        return connection

    engine = create_engine(
        location.url,
        creator=open_file,
        poolclass=QueuePool,
        pool_use_lifo=True,  # one connection does nearly everything, and has in memory what it needs
        json_serializer=_write_json,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        # sqlite3 would begin transactions late and commit before some statements; evo begins them itself.
        connection.isolation_level = None
        connection.execute("PRAGMA trusted_schema = OFF")  # somebody else's views call no function with side effects
        if write:
            connection.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing this way, since the journal is a WAL; a power cut at most the last candidates.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA cache_size = -{CACHED_BYTES >> 10}")
        else:
            connection.execute("PRAGMA query_only = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes the write lock at once: a later upgrade of a read lock could fail with "locked".
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _connect_server(location: Location, *, write: bool) -> Engine:
    # A host that drops packets would keep a command waiting for minutes; a connection whose other end is gone is given up
    # by both ends within a minute or two. Compiling one of evo's queries (JIT) takes longer than the query.
    usual = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "options": "-c jit=off -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3",
        "keepalives_idle": 30,
        "tcp_user_timeout": 60_000,  # ms
    }
    options = {name: value for name, value in usual.items() if name not in location.url.query}
    try:
        engine = create_engine(
            location.url, json_serializer=_write_json, pool_pre_ping=True, connect_args=options, hide_parameters=True
        )
    except ImportError as error:  # no psycopg, or one without the C library that it wraps
        raise StoreError(
            f"{location} needs the Python package 'psycopg' with the library libpq ({first_line(error)}); install them with:"
            " pip install 'evo-kernels[postgres]'"
        ) from error
    except (exc.ArgumentError, TypeError) as error:  # the driver refuses an option of the URL
        raise StoreError(f"{location} cannot be opened: {first_line(error)}") from error

    if write:
        return engine
    # A reader sees one state of the database through all the queries of a transaction, as on SQLite.
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


# NaN is not JSON, and PostgreSQL refuses it. The order of keys is kept: a workload's dimensions have one.
_write_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))

# Primary result codes of SQLite (https://www.sqlite.org/rescode.html), the low byte of an extended one, where SQLite's own
# words do not say what to do.
_DAMAGED = 11
_BUSY = "is being written by another program; wait until it is done, or close it"
_SQLITE = {
    5: _BUSY,
    6: _BUSY,
    8: "cannot be written; check the permissions of the file and its folder, or name another with --db",
    13: "cannot grow because the disk is full; no half record was kept: free some space, then go on",
    14: "cannot be opened; check its permissions, that its folder exists and may be written, and that the disk is not full",
    26: "is not a SQLite database; name another file with --db",
}
_NO_RIGHTS = "42501"
"""SQLSTATE with which PostgreSQL refuses what a user has no rights for."""


class EmptyError(StoreError):
    """There is no database yet where one is to be read."""


class UnreachableError(StoreError):
    """The connection to a server is lost, or cannot be made; or another program holds the lock of a file."""


class LostFileError(StoreError):
    """The file of a database is not there any more, or must not be written to. `str()` says where the records are."""


@contextmanager
def translated(place: Location) -> Iterator[None]:
    """Turns every error of the database inside into a StoreError about `place`, or into an EngineError where only evo
    itself can be at fault."""
    try:
        yield
    except exc.DBAPIError as error:
        lost = error.connection_invalidated and place.path is None
        raise _explain(place, error.orig or error, connected=error.statement is not None and not lost) from error
    except sqlite3.Error as error:
        raise _explain(place, error, connected=True) from error
    except (exc.StatementError, ValueError, OverflowError) as error:  # a value was refused before it reached the database
        raise EngineError(f"a record cannot be stored: {first_line(getattr(error, 'orig', None) or error)}") from error
    except exc.SQLAlchemyError as error:
        raise StoreError(f"{place} cannot be used: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain(place: Location, error: BaseException, *, connected: bool) -> StoreError | EngineError:
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF == _DAMAGED and place.path is not None:
        return damage(place.path)
    if isinstance(code, int) and code & 0xFF in _SQLITE:
        kind = UnreachableError if _SQLITE[code & 0xFF] is _BUSY else StoreError
        return kind(f"{place} {_SQLITE[code & 0xFF]}")
    if getattr(error, "sqlstate", None) == _NO_RIGHTS:
        return StoreError(f"{place} does not let this user do that; ask for the rights to create and write tables")
    if not connected and not isinstance(error, sqlite3.Error):  # psycopg, whose words have no password in them
        return UnreachableError(
            f"{place} cannot be reached: {first_line(error).rpartition(' failed: ')[2]}; check host, port, database and user"
            " in the URL, the password in ~/.pgpass or PGPASSWORD, and that the server runs; createdb makes a database"
        )
    # The classes of PEP 249 have the same names in every driver.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if connected and kinds & {"IntegrityError", "DataError", "ProgrammingError"}:
        return EngineError(f"a record does not fit {place}: {first_line(error)}")
    return StoreError(f"{place} cannot be used: {first_line(error)}")


# -- a file that is open -----------------------------------------------------------------------------------------


class WatchedFile:
    """The file of a database that is open for writing. SQLite goes on with the files that it has open, whatever becomes of
    their names; this object tells whether the file is still the same.

    path: the file without symbolic links. The file stays open until `close`: to close it frees the locks that this process
    has on it, so that another program's last connection would delete the write-ahead log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._opened = self.path.open("rb", buffering=0)
        self._file, self._log = _identity(self.path), self._find_log()
        self._was_writable = self._is_writable()
        self._header, self._found_at = self._read_header(), 0

    def close(self) -> None:
        self._opened.close()

    def _read_header(self) -> bytes:
        """The header of a SQLite file, which has a counter of changes."""
        return os.pread(self._opened.fileno(), 100, 0)

    def _holds(self, run: str) -> bool:
        """Whether the file itself, without its write-ahead log, holds the random uid of a run."""
        file, uid = self._opened.fileno(), run.encode()
        for place in (self._found_at, *range(0, os.fstat(file).st_size, _BLOCK_BYTES)):
            if uid in os.pread(file, _BLOCK_BYTES + len(uid), place):
                self._found_at = place
                return True
        return False

    def note(self, run: str | None) -> bool:
        """Notes the file's header after the database was written to, unless another program has overwritten the file: then
        False. run: the uid of a run that the file must hold.

        Other programs may write, too; one that moves records from the log into the file moves the run, which is older.
        """
        header = self._read_header()
        if run is not None and header != self._header and not self._holds(run):
            return False
        self._header = header
        return True

    def read(self) -> sqlite3.Connection:
        """A connection to a copy, in memory, of the file as it is now, under whatever name, without the write-ahead log."""
        copy = sqlite3.connect(":memory:", check_same_thread=False)
        self._opened.seek(0)
        data = bytearray(self._opened.read())
        data[18:20] = b"\1\1"  # the format without a log, which memory cannot have (https://www.sqlite.org/fileformat2.html)
        copy.deserialize(bytes(data))
        return copy

    def fault(self, run: str | None) -> str:
        """Why the file must not be written to; empty if it may. run: the uid of a run that it must hold."""
        found = _identity(self.path)
        if found is None:
            return "was deleted or moved"
        if found != self._file:
            return "was replaced by another file"
        if not self.note(run):
            return "was overwritten by another program"
        return READ_ONLY if self._was_writable and not self._is_writable() else ""

    def _is_writable(self) -> bool:
        with suppress(OSError):
            return os.access(self.path, os.W_OK) and self.path.stat().st_mode & 0o222 != 0
        return False

    def has_lost_log(self) -> bool:
        """Whether a file of the write-ahead log was deleted or replaced: no other process sees its records, and they are
        lost with this one."""
        found = self._find_log()
        lost = any(was is not None and found[name] != was for name, was in self._log.items())
        self._log = self._log if lost else found
        return lost

    def forget_log(self) -> None:
        """Forgets a lost log, once its records are in the file and the next connection makes another log."""
        self._log = dict.fromkeys(self._log)

    def remove_log(self) -> None:
        """Deletes what is left of the write-ahead log, which SQLite would apply to another file of this name."""
        for name, was in self._find_log().items():
            if was is not None and was == self._log[name]:
                self.path.with_name(name).unlink(missing_ok=True)

    def _find_log(self) -> dict[str, tuple[int, int] | None]:
        names = (self.path.name + end for end in ("-wal", "-shm"))
        return {name: _identity(self.path.with_name(name)) for name in names}


READ_ONLY = "was made read-only"
_BLOCK_BYTES = 1 << 20


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino






def rescue(path: Path, source: sqlite3.Connection) -> Path | None:
    """Writes what a connection still has of a lost file into a new file, beside it or where else there is room. Returns the
    new file; None where none can be made."""
    for folder in (lambda: path.parent, tempfile.gettempdir, Path.home):
        with suppress(StoreError, OSError, RuntimeError, sqlite3.Error):  # no folder may be found, either
            out = Path(folder()) / f"{path.stem}.recovered-{_now()}{path.suffix}"
            _copy(source, path, out)
            return out
    return None


# -- copies --------------------------------------------------------------------------------------------------------

_BACKUP = ".backup-"


def _now() -> str:
    """The time in UTC, in a form that sorts."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"


def back_up(path: Path, out: Path | None = None) -> Path:
    """Copies a database with SQLite's online backup, checks the copy, and returns its path.

    out: the file to make, which must not exist yet; if left out, one beside the database, named by the time.
    Raises StoreError, also for a damaged database, or sqlite3.Error.
    """
    out = out or path.with_name(f"{path.stem}{_BACKUP}{_now()}{path.suffix}")
    if out.exists():
        raise StoreError(f"{out} is there already; name another file for the backup")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source:
        _copy(source, path, out)
    with suppress(OSError):
        out.chmod(path.stat().st_mode & 0o666)
    return out


def _copy(source: sqlite3.Connection, path: Path, out: Path) -> None:
    """Makes a copy that appears under its name when it is complete. Raises StoreError, sqlite3.Error."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        os.close(handle)
    except OSError as error:
        raise StoreError(f"cannot write in the folder {out.parent}: {error.strerror or error}") from error
    try:
        with closing(sqlite3.connect(name)) as copy:
            source.backup(copy)
            if copy.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise damage(path)
            copy.execute("PRAGMA journal_mode = DELETE")  # the copy is one file; the next writer makes it WAL again
        Path(name).rename(out)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            Path(name).unlink()


def newest_backup(path: Path) -> Path | None:
    """The newest backup that `back_up` has put beside a database."""
    found = path.parent.glob(f"{escape(path.stem + _BACKUP)}*{path.suffix}")
    return max(found, key=lambda p: p.stem, default=None)


def damage(path: Path) -> StoreError:
    """The error of a damaged file, with what to do about it."""
    backup = newest_backup(path)
    restore = f"its newest backup is {backup}" if backup else "there is no backup beside it"
    recover = f"sqlite3 {shlex.quote(str(path))} .recover | sqlite3 NEW.db"
    return StoreError(f"the database {path} is damaged; {restore}; what can still be read is saved by: {recover}")
