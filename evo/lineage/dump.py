"""A database as one portable file: JSON Lines, compressed with gzip, from any database to any other.

The first line is a header, the last one says how many rows there were; between them, a line names a table and its
columns, and each line after it is a row. Times are ISO 8601, bytes are base64, JSON columns are their text, and
infinite numbers the words "inf" and "-inf". `docs/database.md` has the format in full.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from sqlalchemy import JSON, Connection, Text, cast, select, type_coerce

from evo import __version__
from evo.errors import StoreError
from evo.lineage import models as m
from evo.lineage.faults import translated
from evo.lineage.schema import schema_of
from evo.lineage.store import Store

__all__ = ["FORMAT", "TABLES", "Block", "Dump", "Header", "dump_store", "encode", "write_dump"]

FORMAT = 1
_COMPRESSION = 3
_ROWS_AT_ONCE = 2000
# Parents before children.
TABLES = tuple(
    model.metadata.tables[model.__tablename__]
    for model in (
        m.Environment, m.Run, m.Task, m.Artefact, m.Candidate, m.Parentage, m.Build, m.Check, m.Timing, m.Final
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Header:
    """schema: the revision of the tables. salvaged: rows that others refer to may be missing."""

    schema: str
    salvaged: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of one table, as `encode` makes them."""

    table: str
    columns: tuple[str, ...]
    rows: Iterable[list[Any]]


def tables_of(store: Store) -> Iterator[Block]:
    """Everything in a database, in one state of it; to be read in turn."""
    with store.reading() as connection:
        for table in TABLES:
            yield Block(table=table.name, columns=tuple(c.name for c in table.columns), rows=_rows(connection, table))


def _rows(connection: Connection, table: Any) -> Iterator[list[Any]]:
    server = connection.dialect.name == "postgresql"
    columns = [
        (cast(c, Text) if server else type_coerce(c, Text)) if isinstance(c.type, JSON) else c for c in table.columns
    ]
    query = select(*columns).order_by(*table.primary_key.columns)
    options: Any = {"yield_per": _ROWS_AT_ONCE}
    with connection.execute(query, execution_options=options) as found:
        for row in found:
            yield [encode(value) for value in row]


def encode(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode()
    return value


def write_dump(
    file: IO[bytes], header: Header, blocks: Iterable[Block], unreadable: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Rows written, by table. unreadable: of a salvaged database, places that could not be read, by table; looked at when
    all blocks have been."""
    written: dict[str, int] = {}
    # No name and no time in the file: equal databases give equal dumps.
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_COMPRESSION, filename="", mtime=0) as packed:

        def line(record: Any) -> None:
            packed.write(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")

        line({"evo_dump": FORMAT, "schema": header.schema, "salvaged": header.salvaged, "evo": __version__})
        for block in blocks:
            line({"table": block.table, "columns": block.columns})
            number = 0
            for row in block.rows:
                line(row)
                number += 1
            written[block.table] = number
        line({"end": True, "rows": written} | ({} if unreadable is None else {"unreadable": dict(unreadable)}))
    return written


def dump_store(store: Store, file: IO[bytes]) -> dict[str, int]:
    """Rows written, by table."""
    with translated(store):
        with store.reading() as connection:
            schema = schema_of(connection)
        return write_dump(file, Header(schema=schema, salvaged=False), tables_of(store))


class Dump:
    """A dump that is being read. unreadable: places of a damaged database that could not be read, by table, once all blocks
    have been; None if the dump does not say."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._name, self._lines = name, self._read(file)
        first = next(self._lines, None)
        if not isinstance(first, dict) or not isinstance(first.get("evo_dump"), int):
            raise StoreError(f"{name} is not a dump of a lineage database; make one with: evo dump --db DATABASE --out FILE")
        if first["evo_dump"] > FORMAT:
            raise StoreError(
                f"{name} was written by a newer evo (format {first['evo_dump']}, this one knows {FORMAT}); upgrade evo"
            )
        self.header = Header(schema=str(first.get("schema")), salvaged=bool(first.get("salvaged")))
        self.unreadable: dict[str, int] | None = None
        self._ahead: Any = next(self._lines, None)

    def _read(self, file: IO[bytes]) -> Iterator[Any]:
        try:
            with gzip.GzipFile(fileobj=file, mode="rb") as packed:
                for line in packed:
                    yield json.loads(line)
        except (OSError, EOFError, ValueError, zlib.error) as error:  # not gzip, cut off, not JSON, changed
            if isinstance(error, EOFError):
                raise self._incomplete() from error
            raise StoreError(f"{self._name} is not a dump of a lineage database, or is damaged ({error})") from error

    def _incomplete(self) -> StoreError:
        return StoreError(f"{self._name} ends too early: it was not copied to its end; nothing was loaded")

    def blocks(self) -> Iterator[Block]:
        """Every table in turn. Raises StoreError where the dump ends too early."""
        counted: dict[str, int] = {}
        while isinstance(self._ahead, dict) and "table" in self._ahead:
            name, columns = str(self._ahead["table"]), tuple(self._ahead["columns"])
            counted[name] = 0
            yield Block(table=name, columns=columns, rows=self._rows(name, len(columns), counted))
        if not isinstance(self._ahead, dict) or not self._ahead.get("end") or self._ahead.get("rows") != counted:
            raise self._incomplete()
        if isinstance(told := self._ahead.get("unreadable"), dict):
            self.unreadable = told
        for _ in self._lines:  # to the end, where the file's checksum is compared
            raise StoreError(f"{self._name} is damaged: something follows its end")

    def _rows(self, table: str, width: int, counted: dict[str, int]) -> Iterator[list[Any]]:
        for row in self._lines:
            if isinstance(row, dict):
                self._ahead = row
                return
            if not isinstance(row, list) or len(row) != width:
                raise StoreError(f"{self._name} is damaged: a row of {table!r} does not fit its columns")
            counted[table] += 1
            yield row
        self._ahead = None
