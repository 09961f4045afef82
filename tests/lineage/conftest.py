"""A fresh database for every test that asks for one: a SQLite file, and one on a PostgreSQL server where it can run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import Server, start_server

from evo.lineage.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a SQLite file that is not there yet."""
    return tmp_path / "runs" / "lineage.db"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server() as started:
        yield started


@pytest.fixture
def postgres_url(server: Server) -> Iterator[str]:
    """Of an empty database on a server."""
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind, by its path or URL."""
    name = "path" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(name))


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    with Store.open(where, write=True) as opened:
        yield opened
