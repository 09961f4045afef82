"""Options that several commands share, the reading of their text, and signals. Only this module reads the environment."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, TypeVarTuple

import typer

from evo.cli.tables import Terminal, timing_record
from evo.errors import UsageError
from evo.evaluation import Timing
from evo.lineage import database
from evo.problem.genome import Genome
from evo.problem.space import Point, Space, Value, parse_number

DEFAULT_DB = "runs/lineage.db"
_FILE_WIDTH = 200
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|m|h|d)?", re.IGNORECASE | re.ASCII)
_Record = TypeVar("_Record")
_More = TypeVarTuple("_More")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def check_seed(seed: int | None) -> int | None:
    """The seed. Raises UsageError for a number that no database keeps or that generators reduce to another."""
    if seed is not None and not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to {2**63 - 1}, got {seed}")
    return seed


Db = Annotated[
    str,
    typer.Option("--db", envvar="EVO_DB", help="Lineage database: a file or a URL.", show_default=DEFAULT_DB),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
CandidateName = Annotated[str, typer.Argument(help="A candidate's identifier or its beginning, or a run for its winner.")]
RunName = Annotated[str, typer.Argument(help="A run's name, a unique beginning of it, or 'latest'.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Seed of the data; random if left out.", callback=check_seed)
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the kernel.py that the database names, wherever it lies and whatever it holds.")
]
TargetName = Annotated[str | None, typer.Option("--target", help="cuda or cpu; the best one here if left out.")]


def cache_dir(db: str) -> Path:
    """The folder of compiled candidates: EVO_CACHE, else one beside the database, else one under runs/."""
    if named := os.environ.get("EVO_CACHE"):
        return Path(named)
    return (database.locate(db).path or Path(DEFAULT_DB)).with_name("cache")


def command_line(db: str, *words: str) -> str:
    """A command to be typed next. It names the database, without its password, unless that is the default here."""
    default = os.environ.get("EVO_DB") or DEFAULT_DB
    return database.command_line(None if db == default else db, *words)


def lasting_db(db: str) -> str | None:
    """The database as commands in a written page must name it, since EVO_DB may differ where the page is read; None for the
    built-in default."""
    return db if db != DEFAULT_DB or os.environ.get("EVO_DB") not in (None, "", db) else None


def draw_seed(seed: int | None) -> int:
    """The given seed, or else a random one."""
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def parse_duration(text: str, option: str = "--budget") -> float:
    """The seconds of a text such as 90, 90s, 1.5m, 2h or 1d. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{option} {text!r} is not a duration; write e.g. 60s, 10m or 2h")
    return float(found[1]) * _SECONDS[(found[2] or "s").lower()]


def parse_values(texts: Iterable[str], space: Space, option: str) -> dict[str, Value]:
    """The values of NAME=VALUE pairs, each of them one of the parameter's. Raises UsageError, UnknownNameError or
    SpaceError."""
    values: dict[str, Value] = {}
    for text in texts:
        name, value = split_pair(text, option)
        parameter = space.by_name.get(name)
        match = next((v for v in parameter.values if str(v).lower() == value.lower()), None) if parameter else None
        values[name] = value if match is None else match
        space.require(name, values[name])
    return values


def parse_point(text: str, space: Space, option: str) -> Point:
    """The default with the values of NAME=VALUE,..., which may be illegal. Raises what `parse_values` raises, and UsageError
    for values that have no effect."""
    parts = [part for part in text.split(",") if part]
    values = parse_values(parts, space, option)
    if len(values) < len(parts):
        raise UsageError(f"{option} {text!r} names a parameter twice")
    point = space.complete({**space.default, **values})
    if idle := [name for name in values if name not in point]:
        raise UsageError(f"{option} {text!r}: with these values {' and '.join(idle)} has no effect; leave it out")
    return point


def parse_legal(text: str, space: Space, option: str) -> Genome:
    """The genome of `parse_point`. Raises UsageError for a point that is not legal, too."""
    point = parse_point(text, space, option)
    if broken := space.violations(point):
        raise UsageError(f"{option} {text!r} is not legal here: {'; '.join(broken)}")
    return Genome.of(point)


def split_pair(text: str, option: str) -> tuple[str, str]:
    """The two texts of NAME=VALUE. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{option} {text!r} is not NAME=VALUE")
    return name, value


def parse_sampler_options(texts: Iterable[str]) -> dict[str, object]:
    """The options of NAME=VALUE pairs, as numbers where they can be read as such. The sampler checks names and values."""
    options: dict[str, object] = {}
    for text in texts:
        name, value = split_pair(text, "--sampler-option")
        options[name] = value
        for kind in (float, int):
            with suppress(ValueError):
                options[name] = parse_number(value, kind)
    return options


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Makes a handler take these signals inside. Ignored signals, as under nohup, stay ignored, and outside of the main
    thread, where no handler can be installed, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def make_console() -> Terminal:
    """A console as wide as the terminal; for a file or pipe, so wide that no table is folded."""
    console = Terminal(markup=False, emoji=False)  # printed text comes from databases and files, too
    return console if console.is_terminal else Terminal(width=_FILE_WIDTH, markup=False, emoji=False)


def answer(json: bool, record: _Record, show: Callable[[Terminal, _Record, *_More], None], *more: *_More) -> None:
    """Prints a record as JSON, or as `show` does. more: further arguments of `show`."""
    if json:
        print_json(record)
    else:
        show(make_console(), record, *more)


def print_json(record: Any, **more: Any) -> None:
    """Prints a record as JSON, indented on a terminal. more: further keys."""
    indent = 2 if sys.stdout.isatty() else None
    typer.echo(json.dumps(_plain(record) | more if more else record, indent=indent, default=_plain))


CONTRACT_KEYS = {"task": "island", "tasks": "islands", "max_in_flight": "window"}
"""Keys of --json that scripts rely on, by the name of a record's field where that is another."""


def _plain(value: Any) -> Any:
    """A record as a dict with the keys of --json. A class's PRINTED names properties that are printed, too."""
    if type(value) is Timing:  # a recorded timing, which is a subclass, is printed with all fields
        return timing_record(value)
    if is_dataclass(value) and not isinstance(value, type):
        record = vars(value) | {name: getattr(value, name) for name in getattr(value, "PRINTED", ())}
        return {CONTRACT_KEYS.get(name, name): part for name, part in record.items()}
    return str(value)
