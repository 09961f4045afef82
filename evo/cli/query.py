"""evo query: a query in SQL."""

import csv
import io
import math
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from evo.analysis.sql import Selection, select_sql
from evo.cli.options import Db, Json, print_json
from evo.environment import DEFAULT_DB
from evo.lineage.store import Store
from evo.report.terminal import cell, make_console, make_table, say
from evo.report.text import parse_duration, visible


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    sql: Annotated[str, typer.Argument(help="One statement that only reads; - takes it from standard input.")],
    limit: Annotated[int, typer.Option(help="Largest number of rows.", min=1, max=100_000_000)] = 1000,
    timeout: Annotated[str, typer.Option(help="Time limit, e.g. 30s or 5m.")] = "30s",
    format: Annotated[Format, typer.Option(help="Form of the output.")] = Format.TABLE,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Ask the database a question in SQL. Nothing can be changed this way."""
    text = sys.stdin.read() if sql == "-" else sql
    seconds = parse_duration(timeout, "--timeout")
    with Store.open(db, write=False) as store:
        found = select_sql(store, text, limit=limit, timeout_s=seconds)
    if json or format is Format.JSON:
        rows = [[_plain(value) for value in row] for row in found.rows]
        print_json({"columns": found.columns, "rows": rows, "cut": found.cut, "limit": limit})
        return
    if format is Format.CSV:
        typer.echo(_csv(found), nl=False)
    elif not found.rows:
        say("evo: no rows", err=True)  # a line of headings alone would look like a row
    else:
        columns = zip(found.columns, zip(*found.rows, strict=True), strict=True)
        numbers = {name for name, column in columns if any(isinstance(value, int | float) for value in column)}
        # Nothing is folded; for a terminal that is too narrow, the table is printed row by row.
        table = make_table(*(f">{name}" if name in numbers else name for name in found.columns), fold=False)
        for row in found.rows:
            table.add_row(*map(cell, row))
        make_console().print_table(table)
    if found.cut:
        say(f"evo: there are more rows than the {limit} shown; ask for more with --limit", err=True)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes as hexadecimal, infinities as words."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _csv(found: Selection) -> str:
    """The rows as CSV (RFC 4180). A terminal shows characters that do not print as escapes; a file gets them unchanged."""
    shown = visible if sys.stdout.isatty() else str
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(shown, found.columns))
    writer.writerows(["" if value is None else shown(str(_plain(value))) for value in row] for row in found.rows)
    return buffer.getvalue()
