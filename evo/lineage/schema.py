"""The schema's version: what is found in a database, and bringing an older one up to date."""

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect, select, update

from evo.errors import StoreError
from evo.lineage.database import Location, back_up, command_line
from evo.lineage.liveness import write_alone
from evo.lineage.models import VIEWS, Base

MIGRATIONS: dict[str, tuple[str, ...]] = {}
"""By version after the first, the statements that bring a database of the version before up to it. SQLite and PostgreSQL
understand them alike, e.g. {"0002": ("ALTER TABLE run ADD COLUMN note TEXT",)}. The models say the same for a new one."""

_FIRST = "0001"
# alembic finds the version of a database under this name, should a change ever need it.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
_OURS = frozenset({_VERSION.name, "run", "task", "candidate", "parentage"})


class OlderSchemaError(StoreError):
    """A database that has to be brought up to date before it can be read."""


def schema_of(connection: Connection, location: Location) -> str:
    """The version of the tables in a database; "" in an empty one.

    Raises StoreError if the tables are not evo's, or are of a version that is not known here.
    """
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return ""
    if not tables >= _OURS:
        raise StoreError(
            f"{location} belongs to something else (it holds {', '.join(sorted(tables)[:3])}, ...);"
            " name another with --db"
        )
    found, known = connection.scalar(select(_VERSION.c.version_num)), [_FIRST, *MIGRATIONS]
    if found not in known:
        raise StoreError(
            f"{location} has the schema {found}, which this evo does not know (its own is {known[-1]}); upgrade evo with"
            " pip, or name another with --db"
        )
    return str(found)


def prepare(engine: Engine, location: Location, *, write: bool) -> None:
    """Creates the tables, or brings them up to date, all in one transaction; an older file is backed up before.

    Raises StoreError, also for what would have to be done and may only be read.
    """
    with engine.connect() as connection:
        found = schema_of(connection, location)
    if found == [_FIRST, *MIGRATIONS][-1]:
        return
    if not write and not found:
        raise StoreError(f"{location} is empty; run a search first, or name another with --db")
    if not write:
        raise OlderSchemaError(
            f"{location} is of an older evo (schema {found}); the next search that writes to it brings it up to"
            f" date, or: {command_line(location.url, 'vacuum')}"
        )
    if found and location.path is not None:
        back_up(location.path)
    with engine.begin() as connection:
        write_alone(connection)
        _upgrade(connection, schema_of(connection, location))  # another process may have done it meanwhile


def _upgrade(connection: Connection, found: str) -> None:
    known = [_FIRST, *MIGRATIONS]
    if not found:
        Base.metadata.create_all(connection)
        _VERSION.create(connection)
        connection.execute(_VERSION.insert(), {"version_num": known[-1]})
        return
    for name in VIEWS:  # SQLite alters no table that a view reads
        connection.exec_driver_sql(f"DROP VIEW {name}")
    for version in known[known.index(found) + 1 :]:
        for statement in MIGRATIONS[version]:
            connection.exec_driver_sql(statement)
    for statement in VIEWS.values():
        connection.exec_driver_sql(statement)
    connection.execute(update(_VERSION), {"version_num": known[-1]})
