"""Options that several commands share, and records as they are printed for programs."""

import json
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar, TypeVarTuple

import typer

from evo.environment import DEFAULT_DB
from evo.evaluation import Timing
from evo.job.values import check_seed
from evo.report.terminal import Terminal, make_console, timing_record

_Record = TypeVar("_Record")
_More = TypeVarTuple("_More")


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
