"""A PostgreSQL server for the tests: its own files, its own port, gone with the test session."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Server", "start_server"]

USER, PASSWORD = "evo", "correct/horse@battery:staple"  # what a URL has to spell as %2F, %40 and %3A


@dataclass(frozen=True, kw_only=True)
class Server:
    port: int
    socket_folder: Path

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        from sqlalchemy import URL

        url = URL.create("postgresql", user, password, "127.0.0.1", self.port, database)
        return url.render_as_string(hide_password=False)

    def execute(self, sql: str) -> None:
        """As the owner of the server, and outside a transaction."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]

    def create_database(self) -> str:
        """The name of a new one."""
        name = f"evo_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _programs() -> Path:
    """The folder of initdb and pg_ctl; skips where they are not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name, reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    pytest.skip("there is no PostgreSQL server here; on Debian: apt-get install postgresql")


def _account() -> dict[str, str | int]:
    """Who runs the server, which refuses to be root's; for subprocess.run."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid}
    pytest.skip("PostgreSQL does not run as root, and there is no other account")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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

        def run(program: str, *arguments: str | Path) -> None:
            command = [str(programs / program), "-D", str(folder / "data"), *map(str, arguments)]
            with (folder.with_suffix(".log")).open("a") as log:
                done = subprocess.run(command, stdout=log, stderr=log, cwd="/", timeout=120, **account)  # type: ignore[call-overload]
            if done.returncode:
                pytest.skip(f"PostgreSQL does not start here: {folder.with_suffix('.log').read_text()[-300:]}")

        run("initdb", "-U", USER, "--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--encoding=UTF8",
            "--locale=C", "--no-sync")  # fmt: skip
        port = _free_port()
        settings = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off -c max_connections=60 -c shared_buffers=32MB"
        run("pg_ctl", "-w", "-o", settings, "start")
        try:
            yield Server(port=port, socket_folder=folder)
        finally:
            run("pg_ctl", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
