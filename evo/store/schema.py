"""The schema's version: what is found in a database, and bringing an older one up to date with alembic."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from evo.errors import StoreError
from evo.store.database import Location, take_turns

__all__ = ["alembic_config", "check_schema", "migrate"]

_OURS = frozenset({"alembic_version", "run", "candidate", "parentage"})


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, made here so that an installed package needs no alembic.ini."""
    config = Config(attributes={} if connection is None else {"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config


def check_schema(connection: Connection, location: Location) -> bool:
    """Whether the schema is up to date; False for an older one and for an empty database.

    Raises StoreError if the tables are not evo's, or are of a newer evo.
    """
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return False
    if not tables >= _OURS:
        raise StoreError(
            f"{location} belongs to something else (it holds {', '.join(sorted(tables)[:3])}, ...);"
            " name another with --db"
        )
    script = ScriptDirectory.from_config(alembic_config())
    found = MigrationContext.configure(connection).get_current_heads()
    known = {revision.revision for revision in script.walk_revisions()}
    if not set(found) <= known:
        raise StoreError(
            f"{location} was written by a newer evo (schema {', '.join(found)}, this one knows"
            f" {script.get_current_head()}); upgrade evo with pip, or name another with --db"
        )
    return tuple(found) == tuple(script.get_heads())


def migrate(engine: Engine, location: Location) -> None:
    """Creates the tables, or brings them up to date, all in one transaction. Raises StoreError."""
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            # Alembic copies tables to alter them; with keys enforced, dropping the old copy deletes children.
            # The pragma works outside transactions only, and so on the connection below SQLAlchemy's.
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute("PRAGMA foreign_keys = OFF")
            try:
                with connection.begin():
                    _upgrade(connection, location)
            finally:
                driver.execute("PRAGMA foreign_keys = ON")
        else:
            with connection.begin():
                take_turns(connection)
                _upgrade(connection, location)


def _upgrade(connection: Connection, location: Location) -> None:
    if not check_schema(connection, location):  # asked again: somebody else may have been faster
        command.upgrade(alembic_config(connection), "head")
