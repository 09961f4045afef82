"""The schema's version: which one a database has, and the migrations that bring an older one up to date."""

import zlib
from collections import defaultdict
from collections.abc import Callable

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect, select, text, update

from evo.errors import StoreError
from evo.evaluation import Status
from evo.lineage.database import EmptyError, Location, back_up, command_line
from evo.lineage.liveness import write_alone
from evo.lineage.models import VIEWS, Base
from evo.lineage.write import Bases, Row, detail_row

_KEYS_AT_ONCE = 1000


def _pack(connection: Connection) -> None:
    """Moves gate cases and compilers' logs, which had a table and columns of their own, into `detail`; packs sources."""
    on_sqlite = connection.dialect.name == "sqlite"
    key, data, end = ("INTEGER", "BLOB", " WITHOUT ROWID") if on_sqlite else ("BIGINT", "BYTEA", "")
    connection.exec_driver_sql(
        f"CREATE TABLE detail (candidate_id {key} NOT NULL, round INTEGER NOT NULL, base_id {key}, data {data} NOT NULL,"
        " CONSTRAINT pk_detail PRIMARY KEY (candidate_id, round),"
        f" CONSTRAINT fk_detail_candidate_id_candidate FOREIGN KEY (candidate_id) REFERENCES candidate (id)){end}"
    )
    insert = text("INSERT INTO detail (candidate_id, round, base_id, data) VALUES (:candidate_id, :round, :base_id, :data)")
    repack = text("UPDATE artefact SET base_sha = :base, data = :data WHERE sha256 = :sha256")
    bases, seen = Bases(), set[str]()
    candidates = connection.execute(text("SELECT id, run_id, task, source_sha FROM candidate ORDER BY id")).all()
    for first in range(0, len(candidates), _KEYS_AT_ONCE):
        some = candidates[first : first + _KEYS_AT_ONCE]
        told = _told(connection, some[0].id, some[-1].id)
        for key, run, task, sha256 in some:
            rows = [detail_row(bases, task, key, round_, told[key][round_]) for round_ in sorted(told[key])]
            if rows:
                connection.execute(insert, rows)
            if sha256 is None or sha256 in seen:
                continue
            seen.add(sha256)
            found = connection.scalar(text("SELECT data FROM artefact WHERE sha256 = :sha256"), {"sha256": sha256})
            try:
                source = zlib.decompress(found)
            except zlib.error:  # a damaged source stays as it is; whoever reads it is told
                continue
            base, packed = bases.pack(("source", run, task), source, sha256)
            if base is not None:
                connection.execute(repack, {"sha256": sha256, "base": base, "data": packed})


def _told(connection: Connection, first: int, last: int) -> dict[int, dict[int, Row]]:
    """The content of `detail`, by the candidate's key and round."""
    found: dict[int, dict[int, Row]] = defaultdict(lambda: defaultdict(lambda: {"cases": []}))
    builds = f"SELECT candidate_id, status, log, binary_log FROM build WHERE candidate_id BETWEEN {first} AND {last}"
    for key, status, log, remarks in connection.execute(text(builds)):
        remarks = (log if remarks is None else remarks) if status == Status.OK else ""
        found[key][0] |= {"log": log, "remarks": remarks}
    checks = 'SELECT candidate_id, round, "case", passed, error, allowed, torch_error, reason, seed FROM "check"'
    checks += f" WHERE candidate_id BETWEEN {first} AND {last} ORDER BY candidate_id, round, position"
    for key, round_, name, passed, *rest in connection.execute(text(checks)):
        found[key][round_]["cases"].append([name, bool(passed), *rest])
    return found


MIGRATIONS: dict[str, tuple[str | Callable[[Connection], None], ...]] = {
    "0002": (
        "ALTER TABLE artefact ADD COLUMN base_sha VARCHAR(64)",
        _pack,
        'DROP TABLE "check"',
        "ALTER TABLE build DROP COLUMN log",
        "ALTER TABLE build DROP COLUMN binary_log",
        "ALTER TABLE candidate DROP COLUMN genome_digest",
    ),
    "0003": (),  # the view v_best tells what was disturbed
}
"""The statements and functions that bring a database up to each version after the first, from the version before it. SQLite
and PostgreSQL understand them alike. The models say the same for a new database."""

_FIRST = "0001"
# The table's name is the one that alembic uses.
_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
_OURS = frozenset({_VERSION.name, "run", "task", "candidate", "parentage"})


class OlderSchemaError(StoreError):
    """A database that has to be brought up to date before it can be read."""


def schema_of(connection: Connection, location: Location) -> str:
    """The version of the tables in a database; "" for an empty database.

    Raises StoreError if the tables are not evo's, or are of an unknown version.
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

    Raises StoreError, also for a database that only may be read and would have to be changed.
    """
    with engine.connect() as connection:
        found = schema_of(connection, location)
    if found == [_FIRST, *MIGRATIONS][-1]:
        return
    if not write and not found:
        raise EmptyError(f"{location} is empty; run a search first, or name another with --db")
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
        for step in MIGRATIONS[version]:
            if callable(step):
                step(connection)
            else:
                connection.exec_driver_sql(step)
    for statement in VIEWS.values():
        connection.exec_driver_sql(statement)
    connection.execute(update(_VERSION), {"version_num": known[-1]})
