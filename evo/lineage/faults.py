"""Faults of a database: rows that are not as evo records them. A database may be anybody's, and edited by hand."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

from sqlalchemy import JSON, Column, Connection, Table, and_, exc, select
from sqlalchemy.orm import aliased

from evo.errors import EngineError, EvoError, StoreError
from evo.evaluation import PASSED, Status
from evo.lineage import RunStatus
from evo.lineage import models as m
from evo.lineage.database import Location, connect, first_line, translated
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.read import read_artefacts, read_details, read_evaluations, read_run, rows_of
from evo.lineage.write import Row, is_run_name
from evo.problem.genome import Genome
from evo.problem.kernel import DTYPE_BYTES
from evo.problem.space import Value

_ROWS_AT_ONCE = 1000
_TABLES = m.Base.metadata.tables
RUN, TASK, ENVIRONMENT, CANDIDATE, ARTEFACT, TIMING = (
    _TABLES[name] for name in ("run", "task", "environment", "candidate", "artefact", "timing")
)
PARTS = tuple(_TABLES[name] for name in ("parentage", "build", "detail", "final"))
"""Tables of what belongs to candidates, but for timings, which belong to a run, too."""
KEYS = {
    "candidate": ("id", "same_code_as_id"),
    "parentage": ("child_id", "parent_id"),
    "detail": ("candidate_id", "base_id"),
    **dict.fromkeys(("build", "final", "timing"), ("candidate_id",)),
    "task": ("winner_id",),
}
"""Columns that hold keys of candidates, by table; the first is the candidate that a row belongs to."""


class Fault(Exception):
    """A row that is not as evo records it; the text says which, and why."""


def chunks(connection: Connection, table: Table, run_id: int) -> Iterator[list[Row]]:
    """The rows of a run, checked, in lists. Raises Fault."""
    column = table.c["run_id" if table in (TASK, TIMING) else KEYS[table.name][0]]
    within = column == run_id if table in (TASK, TIMING) else column.between(*key_range(run_id))
    c = CANDIDATE.c
    # A duplicate refers to a candidate that may be a later one. The order of timings tells one final from the next.
    order = {CANDIDATE: (c.same_code_as_id.is_not(None), c.id), TIMING: (TIMING.c.id,)}.get(table, ())
    rows = read_rows(connection, table, select(table).where(within).order_by(*order))
    while some := [_checked(table, row) for row in islice(rows, _ROWS_AT_ONCE)]:
        yield some


def read_rows(connection: Connection, table: Table, query: Any) -> Iterator[Row]:
    """The rows of a query. Raises Fault for a row whose values cannot be read: no JSON, no time, no UTF-8."""
    options: Any = {"yield_per": _ROWS_AT_ONCE}
    try:
        with connection.execute(query, execution_options=options) as found:
            for row in found.mappings():
                yield dict(row)
    except (ValueError, TypeError, RecursionError, exc.DBAPIError) as error:
        keys = [column.label(f"key_{column.name}") for column in table.primary_key]
        for key in connection.execute(query.with_only_columns(*keys)).all():
            where = (column == value for column, value in zip(table.primary_key, key, strict=True))
            try:
                connection.execute(select(table).where(*where)).all()
            except (ValueError, TypeError, RecursionError, exc.DBAPIError) as worse:
                name = _name(table, dict(zip(table.primary_key.columns.keys(), key, strict=True)))
                raise Fault(f"{name} cannot be read ({first_line(getattr(worse, 'orig', worse))})") from None
        raise Fault(f"its table {table.name!r} cannot be read ({first_line(getattr(error, 'orig', error))})") from None


# -- what a row must be --------------------------------------------------------------------------------------------


def _name(table: Table, row: Row) -> str:
    """The name of a row in a sentence, by its candidate where it belongs to one."""
    key = next((row[name] for name in KEYS.get(table.name, ())[:1] if row.get(name) is not None), None)
    if table is TASK:
        return f"task {row.get('number')}"
    if isinstance(key, int):
        of = f"candidate {key % ORDERS_PER_RUN}"
        return of if table is CANDIDATE else f"a {table.name} of {of}"
    return f"row {row.get('id')!r} of table {table.name!r}"


def _checked(table: Table, row: Row) -> Row:
    check(table, row, _name(table, row))
    return row


def check(table: Table, row: Row, name: str) -> None:
    """Raises Fault for a row that evo would not write."""
    for column in table.columns:
        if wrong := _wrong(column, row[column.name]):
            raise Fault(f"{name} has the {column.name} {row[column.name]!r:.80}, {wrong}")
    if wrong := next(_broken_rules(table, row), ""):
        raise Fault(f"{name} {wrong}")


def _wrong(column: Column[Any], value: Any) -> str:
    """The fault of a column's value as a clause; empty if it has none."""
    if value is None:
        return "" if column.nullable else "which must not be missing"
    several, numbers = isinstance(column.type, m.Numbers), value
    kind: Any = dict if isinstance(column.type, JSON) else tuple if several else column.type.python_type
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        return f"which is no {'object' if kind is dict else 'number' if kind in (int, float) else kind.__name__}"
    if isinstance(value, str) and "\0" in value:
        return "which holds a NUL"
    if kind is not tuple:
        numbers = numbers.values() if column.name == "clocks" else [value] if kind in (int, float) else ()
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            return "which is no finite number"
        if number < 0 and column.name not in ("seed", "clocks"):
            return "which is negative"
    try:
        json.dumps(value if kind is dict else None, allow_nan=False)
    except ValueError:
        return "which is no JSON"
    return ""


LIMITS = frozenset({"seconds", "evaluations", "patience"})
"""Limits that a run's budget may have, as `evo.search.loop.Budget` has them."""
_OPTIONS = {
    "sampler": dict,
    "fixed": dict,
    "starts": list,
    "origins": list,
    "gate_seed": int,
    "finalists": int,
    "files": dict,
    "missing_kinds": dict,
}
"""Kinds of a run's options that continuing it relies on."""

_INTERVALS = (("low_us", "median_us", "high_us"), ("ratio_low", "ratio", "ratio_high"))
_SLACK = 0.01
"""Share by which a median may lie outside of its own interval, which is drawn at random."""
_FAR = 10.0
"""Factor between a ratio and that of two medians which no disturbance of an honest race explains."""


def _is_own(kind: str, name: str) -> bool:
    """Whether a sampler's name is the path of a file of its user's own."""
    return kind == "sampler" and name.endswith(".py") and name.isprintable()


def _broken_rules(table: Table, row: Row) -> Iterator[str]:
    """Sentences on the rules of `evo.evaluation` and `evo.lineage.write` that a row breaks, beside the kinds of values."""
    known: frozenset[str] = frozenset(RunStatus if table is RUN else Status)
    if "status" in row and row["status"] not in known:
        yield f"has the unknown status {row['status']!r:.80}"
    if table is RUN:
        if not is_run_name(row["name"]):
            yield f"has the name {row['name']!r:.80}, which none may have"
        # Targets and samplers may be of another version of evo, or of its plug-ins; where one is needed, it is asked for.
        if other := next((n for n in ("target", "sampler") if not (is_run_name(row[n]) or _is_own(n, row[n]))), None):
            yield f"has the {other} {row[other]!r:.80}, which none may be called"
        if row["max_in_flight"] < 1:
            yield f"has {row['max_in_flight']} candidates in flight at most"
        if any(limit is not None and type(limit) not in (int, float) for limit in row["budget"].values()):
            yield f"has the budget {row['budget']}, whose limits are not all numbers"
        if unknown := row["budget"].keys() - LIMITS:
            yield f"has the budget {row['budget']!r:.80}, and a budget has no {min(unknown)!r:.80}"
        options = row["options"]
        if wrong := [n for n, kind in _OPTIONS.items() if n in options and type(options[n]) is not kind]:
            yield f"has the option {wrong[0]} {options[wrong[0]]!r:.80}, which is no {_OPTIONS[wrong[0]].__name__}"
        if not all(type(p) is dict and all(isinstance(v, Value) for v in p.values()) for p in options.get("starts", ())):
            yield f"has the option starts {options['starts']!r:.80}, which are no points of a search space"
        kinds = options.get("missing_kinds", {}).values()
        if not all(type(some) is list and all(isinstance(kind, str) for kind in some) for some in kinds):
            yield f"has the option missing_kinds {options['missing_kinds']!r:.80}, which are no lists of words"
    if table is TASK:
        dims, options = row["dims"].values(), row["options"].values()
        if any(type(v) is not int or v < 0 for v in dims) or not all(isinstance(v, Value) for v in options):
            yield f"has dimensions {row['dims']} and options {row['options']}, which are of no workload"
        if row["dtype"] not in DTYPE_BYTES:
            yield f"has the dtype {row['dtype']!r:.80}, which no kernel has ({', '.join(DTYPE_BYTES)} are known)"
    if table is CANDIDATE:
        if row["id"] != row["run_id"] * ORDERS_PER_RUN + row["order"]:
            yield f"has the id {row['id']}, which does not follow from its run {row['run_id']} and order {row['order']}"
        try:
            values = Genome.from_json(row["genome"]).items
        except EvoError as error:
            yield f"has a genome that cannot be read: {error}"
        else:
            if not all(isinstance(v, Value) for _, v in values):
                yield f"has a genome whose values are not all numbers and words: {row['genome']:.80}"
        if row["score"] is not None and (row["score"] == 0 or row["status"] not in PASSED):
            yield f"has the score {row['score']} with status {row['status']}"
        # A candidate that was refused like another one of its code has the status of that one.
        same = row["same_code_as_id"]
        if (same is None) if row["status"] == Status.SAME_CODE else (same is not None and row["status"] in PASSED):
            yield f"has status {row['status']}, and {'no' if same is None else 'a'} candidate of the same code"
    if table.name == "parentage" and row["parent_id"] >= row["child_id"]:
        yield f"names a parent that is not earlier: {row['parent_id'] % ORDERS_PER_RUN}"
    if table is TIMING and (row["median_us"] <= 0 or row["ratio"] == 0):
        yield f"has a time of {row['median_us']} us and a ratio of {row['ratio']}"
    for names in _INTERVALS if table is TIMING else ():
        low, middle, high = (row[name] for name in names)
        if None not in (low, middle, high) and not low * (1 - _SLACK) <= middle <= high * (1 + _SLACK):
            yield f"has the {names[1]} {middle}, which is not within {low} to {high}"
    keys = [row[name] for name in KEYS.get(table.name, ()) if row[name] is not None]
    own = row.get("run_id", keys[0] // ORDERS_PER_RUN if keys else 0)
    if far := next((key for key in keys if key // ORDERS_PER_RUN != own), None):
        yield f"refers to candidate {far % ORDERS_PER_RUN} of another run"


def find_fault(connection: Connection) -> str:
    """The first fault of a database, and its place; empty if it has none. Reads the whole database."""
    where = ""
    try:
        for environment in read_rows(connection, ENVIRONMENT, select(ENVIRONMENT)):
            _checked(ENVIRONMENT, environment)
        for run in list(read_rows(connection, RUN, select(RUN).order_by(RUN.c.id))):
            where = f"run {run['name']!r:.80}: "
            check(RUN, run, "its row of table 'run'")
            if connection.scalar(select(ENVIRONMENT.c.id).where(ENVIRONMENT.c.id == run["environment_id"])) is None:
                raise Fault(f"it is of environment {run['environment_id']}, which is not there")
            for table in (TASK, CANDIDATE, *PARTS, TIMING):
                for _ in chunks(connection, table, run["id"]):
                    pass
            refuse_dangling(connection, key_range(run["id"]))
            prove(connection, run["id"])
        where = ""
        for table in (TASK, CANDIDATE, TIMING):
            lost = select(table).where(table.c.run_id.not_in(select(RUN.c.id))).limit(1)
            for row in read_rows(connection, table, lost):
                raise Fault(f"{_name(table, row)} is of run {row['run_id']}, which is not there")
        artefacts = read_rows(connection, ARTEFACT, select(ARTEFACT))
        while some := list(islice(artefacts, _ROWS_AT_ONCE)):
            prove_artefacts(connection, some)
    except Fault as fault:
        return f"{where}{fault}"
    return ""


def explain(error: Exception, *locations: Location) -> StoreError | None:
    """The error to tell in place of an unexpected one, if one of these databases has a fault that may be its cause."""
    if isinstance(error, EvoError | OSError) and not isinstance(error, EngineError):
        return None
    for location in locations:
        fault = ""
        with suppress(EvoError), ExitStack() as closing:
            engine = connect(location, write=False)
            closing.callback(engine.dispose)
            with translated(location), engine.connect() as connection:
                fault = find_fault(connection)
        if fault:
            return StoreError(
                f"{location} holds what evo does not record there: {fault}; correct or delete that row, go back to a"
                " backup, or name another database with --db"
            )
    return None


def refuse_dangling(connection: Connection, within: tuple[int, int]) -> None:
    """Raises Fault for a row that refers to a missing candidate. within: the first and last key of the run's candidates."""
    other = CANDIDATE.alias("other")
    for table in (CANDIDATE, *PARTS, TIMING):
        first, *others = (table.c[name] for name in KEYS[table.name])
        for column in others or (first,):
            there = select(other.c.id).where(other.c.id == column).correlate(table).exists()
            query = select(table).where(first.between(*within), column.is_not(None), ~there).limit(1)
            for row in read_rows(connection, table, query):
                raise Fault(f"{_name(table, row)} refers to candidate {row[column.name]}, which is not there")


def prove_artefacts(connection: Connection, artefacts: list[Row]) -> None:
    """Raises Fault for an artefact whose content has another digest, or whose base has a base itself, which
    `evo.lineage.write.Bases` never makes."""
    bases = {row["base_sha"] for row in artefacts} - {None}
    whole = select(ARTEFACT.c.sha256).where(ARTEFACT.c.base_sha.is_(None))
    lost = bases - {row.sha256 for row in rows_of(connection, whole, bases, ARTEFACT.c.sha256)}
    for row in artefacts:
        check(ARTEFACT, row, name := f"stored file {row['sha256']}")
        if row["base_sha"] in lost:
            raise Fault(f"{name} is packed against {row['base_sha']}, which is not there as a whole")
    try:
        content = read_artefacts(connection, [row["sha256"] for row in artefacts])
    except EvoError as error:
        raise Fault(str(error)) from None
    for digest, data in content.items():
        if hashlib.sha256(data).hexdigest() != digest:
            raise Fault(f"stored file {digest} has another content than its digest says")


def prove(connection: Connection, run_id: int) -> None:
    """Reads a run as a search that continues it would. Raises Fault for what contradicts itself."""
    run = read_run(connection, run_id)
    tasks, within = len(run.spec.workloads), key_range(run_id)
    c, t, i, f = m.Candidate, m.Timing, m.Task, m.Final
    numbers = list(connection.scalars(select(i.number).where(i.run_id == run_id).order_by(i.number)))
    if numbers != list(range(tasks)) or not tasks:
        raise Fault(f"its tasks are numbered {numbers}, and not from 0")
    named = select(c.order, c.public_id).where(c.id.between(*within))
    if wrong := next((order for order, name in connection.execute(named) if name != m.public_id(run.uid, order)), None):
        raise Fault(f"candidate {wrong} has another identifier than follows from its run")
    try:
        read_evaluations(connection, run)
        for told in read_details(connection, m.Detail.candidate_id.between(*within), m.Detail.round > 0):
            told.checks  # noqa: B018 - is read for its errors
    except (EvoError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Fault(str(error)) from None
    passed = select(f.candidate_id).where(f.candidate_id == t.candidate_id, f.round == t.round, f.status.in_(PASSED))
    unheld = select(t.candidate_id).where(t.run_id == run_id, t.candidate_id.is_not(None), t.round > 0, ~passed.exists())
    if (key := connection.scalar(unheld.limit(1))) is not None:
        raise Fault(f"candidate {key % ORDERS_PER_RUN} has the time of a final that it did not pass")
    beside = aliased(t)  # the reference, which has no ratio
    raced = and_(t.run_id == run_id, t.round == 0, beside.run_id == run_id, beside.round == 0, beside.ratio.is_(None))
    raced &= and_(*(getattr(beside, name) == getattr(t, name) for name in ("candidate_id", "workload", "protocol", "stage")))
    factor = t.ratio * beside.median_us / t.median_us
    odd = select(t.candidate_id % ORDERS_PER_RUN, t.ratio, t.median_us, beside.median_us).where(raced)
    if (odds := connection.execute(odd.where(~factor.between(1 / _FAR, _FAR)).limit(1)).first()) is not None:
        raise Fault("a timing of candidate {} has the ratio {}, and its medians are {} us and {} us".format(*odds))
    timed = select(t.id).where(t.run_id == run_id, t.candidate_id == i.winner_id, t.task == i.number)
    timed = timed.where(t.contender == "candidate", t.ratio.is_not(None))
    held = select(f.round).where(f.candidate_id == c.id).exists()
    won = and_(c.task == i.number, m.unrefused(), c.status.in_(PASSED) | held)
    winners = select(i.number, i.winner_id).join(c, and_(c.id == i.winner_id, won), isouter=True)
    winners = winners.where(i.run_id == run_id, i.winner_id.is_not(None), c.id.is_(None) | ~timed.exists())
    if (winner := connection.execute(winners.limit(1)).first()) is not None:
        order = winner.winner_id % ORDERS_PER_RUN
        raise Fault(f"candidate {order}, the winner of task {winner.number}, has no time there, or did not pass")
