"""A PostgreSQL server for the tests: its own files, its own port, gone with the test session, however that ends."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Server", "start_server"]

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 120.0

USER, PASSWORD = "evo", "correct/horse@battery:staple"  # what a URL has to spell as %2F, %40 and %3A

_DATABASE = "evo_tests"
_EMPTY = """
SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
DROP SCHEMA public CASCADE;
CREATE SCHEMA public;
GRANT USAGE ON SCHEMA public TO PUBLIC  -- as in a new database
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    port: int

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        from sqlalchemy import URL

        url = URL.create("postgresql", user, password, "127.0.0.1", self.port, database)
        return url.render_as_string(hide_password=False)

    def execute(self, sql: str, database: str = "postgres") -> None:
        """Executes a statement as the owner of the server, outside of a transaction."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]

    def empty_database(self) -> str:
        """The URL of one. It is always the same, left by whoever used it: a new one costs the server half a second."""
        self.execute(_EMPTY, _DATABASE)
        return self.url(_DATABASE)


def _programs() -> Path:
    """The folder of initdb and postgres; skips where they are not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name, reverse=True)
    if found := shutil.which("postgres"):
        folders.insert(0, Path(found).parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("there is no PostgreSQL server here; on Debian: apt-get install postgresql")


def _account() -> dict[str, str | int]:
    """The account that runs the server, which refuses to run as root; for subprocess.run."""
    if os.geteuid() != 0:
        return {}
    accounts = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = accounts.get("postgres") or accounts["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """In the child, which has changed its account before this: it gets SIGQUIT when the tests' process is gone. Only a
    killed one leaves it behind; its folder in the system's place for temporary files stays then."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _await_ready(postgres: subprocess.Popen[bytes], told: Path, said: Path) -> None:
    """Until the last line of its postmaster.pid says so, as pg_ctl waits for it; skips if it ends before."""
    for _ in range(round(_PATIENCE_S / 0.05)):
        if postgres.poll() is not None:
            pytest.skip(f"PostgreSQL does not start here: {said.read_text()[-300:]}")
        if told.exists() and told.read_text().split()[-1:] == ["ready"]:
            return
        time.sleep(0.05)
    pytest.skip(f"PostgreSQL is not ready after {_PATIENCE_S:g} s: {said.read_text()[-300:]}")


@contextmanager
def start_server() -> Iterator[Server]:
    """Skips where none can be started."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'evo-kernels[postgres]'")
    programs, account = _programs(), _account()
    # Not under pytest's folder, which other accounts may not enter; and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="evo-postgres-"))
    try:
        if account:
            os.chown(folder, int(account["user"]), int(account["group"]))
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)

        said = folder.with_suffix(".log")

        def begin(program: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
            command = [str(programs / program), "-D", str(folder / "data"), *map(str, arguments)]
            with said.open("a") as log:
                return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
                    command, stdout=log, stderr=log, cwd="/", preexec_fn=_end_with_parent, **account
                )

        made = begin("initdb", "-U", USER, "--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--encoding=UTF8",
                     "--locale=C", "--no-sync")  # fmt: skip
        if made.wait(timeout=_PATIENCE_S):
            pytest.skip(f"PostgreSQL does not start here: {said.read_text()[-300:]}")
        port = _free_port()
        settings = {"fsync": "off", "max_connections": "60", "shared_buffers": "32MB"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        postgres = begin("postgres", "-p", str(port), "-k", folder, "-h", "127.0.0.1", *options)
        try:
            _await_ready(postgres, folder / "data" / "postmaster.pid", said)
            server = Server(port=port)
            server.execute(f"CREATE DATABASE {_DATABASE}")
            yield server
        finally:
            postgres.send_signal(signal.SIGQUIT)  # at once: nothing of it is to be kept
            postgres.wait(timeout=_PATIENCE_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
