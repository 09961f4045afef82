"""Databases of every earlier schema, as the evo of their time left them: `schemas/*.sql`, made with sqlite3's
iterdump, and infinity written as 9e999.

Whoever adds a migration adds the schema before it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from alembic import command
from sqlalchemy import MetaData, create_engine

from evo.store.database import locate
from evo.store.schema import alembic_config

__all__ = ["SCHEMAS", "make_older"]

SCHEMAS = {path.stem.removeprefix("v"): path for path in sorted((Path(__file__).parent / "schemas").glob("v*.sql"))}


def make_older(revision: str, where: str | Path) -> None:
    """Fills an empty database with an older schema and its records."""
    location = locate(where)
    if location.path is not None:
        location.path.parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(location.path) as raw:
            raw.executescript(SCHEMAS[revision].read_text())
            raw.execute("PRAGMA journal_mode = WAL")
        raw.close()
        return
    # What SQLite's evo recorded, in the tables that the same migrations make on a server.
    source, target = create_engine("sqlite://"), create_engine(location.url)
    driver = source.raw_connection()
    assert isinstance(driver.driver_connection, sqlite3.Connection)
    driver.driver_connection.executescript(SCHEMAS[revision].read_text())
    with target.begin() as connection, source.connect() as old:
        command.upgrade(alembic_config(connection), revision)
        connection.exec_driver_sql("ALTER TABLE island DROP CONSTRAINT fk_island_winner_id_candidate")
        tables = MetaData()  # of which no two refer to each other now
        tables.reflect(connection)
        for table in tables.sorted_tables:
            if table.name == "alembic_version":
                continue
            names = ", ".join(f'"{c.name}"' for c in table.columns)
            rows = [dict(row) for row in old.exec_driver_sql(f'SELECT {names} FROM "{table.name}"').mappings()]
            for row in rows:
                for column in table.columns:
                    row[column.name] = _as_on_a_server(row[column.name], str(column.type))
            if rows:
                connection.execute(table.insert(), rows)
        connection.exec_driver_sql(
            "ALTER TABLE island ADD CONSTRAINT fk_island_winner_id_candidate"
            " FOREIGN KEY (winner_id) REFERENCES candidate (id)"
        )
        for name in ("run", "environment", "timing"):  # numbers were given out by hand
            connection.exec_driver_sql(
                f"SELECT setval(pg_get_serial_sequence('{name}', 'id'), (SELECT max(id) FROM {name}))"
            )
    driver.close()
    source.dispose()
    target.dispose()


def _as_on_a_server(value: object, type_: str) -> object:
    import json
    from datetime import UTC, datetime

    if value is None:
        return None
    if type_ == "JSON":
        return json.loads(str(value))
    if type_ == "BOOLEAN":
        return bool(value)
    if type_.startswith("TIMESTAMP"):
        return datetime.fromisoformat(str(value)).replace(tzinfo=UTC)
    return value
