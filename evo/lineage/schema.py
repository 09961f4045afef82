"""The schema's version: what is found in a database, and bringing an older one up to date.

A new database is made from the models and marked with the newest revision; alembic brings older ones up to date. It takes
a fifth of a second to import, more than most commands take for their answer, so it is imported where a schema changes, and
not to find out that one is up to date: the names of the migrations' files tell that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect

from evo.errors import StoreError
from evo.lineage.backup import back_up
from evo.lineage.database import Location
from evo.lineage.liveness import take_turns
from evo.lineage.models import Base

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = ["OlderSchemaError", "alembic_config", "check_schema", "migrate", "revisions", "schema_of"]

_OURS = frozenset({"alembic_version", "run", "task", "candidate", "parentage"})
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


class OlderSchemaError(StoreError):
    """A database that has to be brought up to date before it can be read."""


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, made here so that an installed package needs no alembic.ini."""
    from alembic.config import Config

    config = Config(attributes={} if connection is None else {"connection": connection})
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    return Path(__file__).parent / "migrations"


def revisions() -> tuple[str, ...]:
    """All that there have been, the newest last: of versions/v0001_lineage.py, 0001."""
    return tuple(sorted(p.stem[1:].partition("_")[0] for p in (_folder() / "versions").glob("v*.py")))


def check_schema(connection: Connection, location: Location) -> bool:
    """Whether the schema is up to date; False for an older one and for an empty database.

    Raises StoreError if the tables are not evo's, or are of a schema that is not known here.
    """
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return False
    if not tables >= _OURS:
        raise StoreError(
            f"{location} belongs to something else (it holds {', '.join(sorted(tables)[:3])}, ...);"
            " name another with --db"
        )
    found, known = schema_of(connection), revisions()
    if found not in known:
        raise StoreError(
            f"{location} has the schema {found}, which this evo does not know (its own is {known[-1]}); upgrade evo with"
            " pip, or name another with --db"
        )
    return found == known[-1]


def schema_of(connection: Connection) -> str:
    """The revision of the tables in a database; "" in an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return ", ".join(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars())


def migrate(engine: Engine, location: Location) -> None:
    """Creates the tables, or brings them up to date, all in one transaction; an older file is backed up before.

    Raises StoreError.
    """
    with engine.connect() as connection:
        old = schema_of(connection)
    if old and location.path is not None:
        back_up(location.path)
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
    if check_schema(connection, location):  # asked again: another process may have done it meanwhile
        return
    if schema_of(connection):
        from alembic import command

        command.upgrade(alembic_config(connection), "head")
        return
    Base.metadata.create_all(connection)
    _VERSION.create(connection)
    connection.execute(_VERSION.insert(), {"version_num": revisions()[-1]})
