"""Options that several commands share, and how their text is read. The only place that reads the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from evo.errors import DeviceError, UsageError
from evo.lineage import database
from evo.problem.space import Space, Value
from evo.targets import find_target, target_names

__all__ = [
    "CandidateName",
    "Db",
    "Json",
    "Seed",
    "TargetName",
    "cache_dir",
    "check_seed",
    "choose_arch",
    "choose_target",
    "command_line",
    "draw_seed",
    "lasting_db",
    "make_console",
    "named_db",
    "parse_duration",
    "parse_fixed",
    "parse_values",
    "print_json",
    "split_pair",
]

Db = Annotated[
    str,
    typer.Option("--db", envvar="EVO_DB", help="Lineage database: a file or a URL.", show_default="runs/lineage.db"),
]
_FILE_WIDTH = 200
DEFAULT_DB = "runs/lineage.db"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
CandidateName = Annotated[str, typer.Argument(help="A candidate's identifier, or a unique beginning of it.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Draws the data; random if left out.", callback=lambda seed: check_seed(seed)),
]
TargetName = Annotated[str | None, typer.Option("--target", help="cuda or cpu; the best present if left out.")]


def choose_target(name: str | None) -> str:
    """The target named, which must exist; else cuda where a GPU answers, else cpu."""
    if name is not None:
        find_target(name)
        return name
    for candidate in ("cuda", *(n for n in target_names() if n != "cuda")):
        try:
            find_target(candidate).device()
        except DeviceError:
            continue
        return candidate
    raise DeviceError("neither a CUDA GPU nor a C++ compiler answers here; see: evo doctor")


def choose_arch(target: str, arch: str | None) -> str:
    """The architecture named, which must be known; else the present device's. Raises DeviceError."""
    chosen = arch or find_target(target).device().arch
    find_target(target).limits(chosen)
    return chosen


def cache_dir(db: str) -> Path:
    """Where compiled candidates are kept: EVO_CACHE, else beside the database, else under runs/."""
    if named := os.environ.get("EVO_CACHE"):
        return Path(named)
    beside = Path("runs") if "://" in db else Path(db).parent
    return beside / "cache"


def command_line(db: str, *words: str) -> str:
    """A command to be typed next; it names the database where that is not the default one, without its password."""
    return database.command_line(named_db(db), *words)


def named_db(db: str) -> str | None:
    """The database where commands have to name it; None where they take it by themselves."""
    return None if db == (os.environ.get("EVO_DB") or DEFAULT_DB) else db


def lasting_db(db: str) -> str | None:
    """`named_db` for what is read elsewhere or later, where EVO_DB may be another: None for the built-in default only."""
    return named_db(db) or (None if db == DEFAULT_DB else db)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def check_seed(seed: int | None) -> int | None:
    """A callback of --seed. Raises UsageError for what no database keeps, and what random generators take for another."""
    if seed is not None and not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to {2**63 - 1}, got {seed}")
    return seed


def draw_seed(seed: int | None) -> int:
    """The seed given, else a random one."""
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def parse_duration(text: str, option: str = "--budget") -> float:
    """Seconds of 90, 90s, 1.5m, 2h, 1d. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{option} {text!r} is not a duration; write e.g. 60s, 10m or 2h")
    return float(found[1]) * _SECONDS[(found[2] or "s").lower()]


def parse_fixed(texts: Iterable[str], space: Space) -> dict[str, Value]:
    """`parse_values` of --fix, which leave something to search. Raises SpaceError, too."""
    fixed = parse_values(texts, space, "--fix")
    space.restricted(fixed)
    return fixed


def parse_values(texts: Iterable[str], space: Space, option: str) -> dict[str, Value]:
    """name=value pairs, each value one of the parameter's own. Raises UsageError, UnknownNameError or SpaceError."""
    fixed: dict[str, Value] = {}
    for text in texts:
        name, value = split_pair(text, option)
        parameter = space.by_name.get(name)
        match = next((v for v in parameter.values if _written(v) == value.lower()), None) if parameter else None
        fixed[name] = value if match is None else match
        space.require(name, fixed[name])
    return fixed


def split_pair(text: str, option: str) -> tuple[str, str]:
    """NAME=VALUE as two texts. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{option} {text!r} is not NAME=VALUE")
    return name, value


def _written(value: Value) -> str:
    return str(value).lower()


def make_console() -> Console:
    """A console as wide as the terminal; in a file or pipe, wide enough that no table is folded."""
    console = Console(markup=False, emoji=False)  # what is printed comes from databases and files, too
    return console if console.is_terminal else Console(width=_FILE_WIDTH, markup=False, emoji=False)


def print_json(record: Any, **more: Any) -> None:
    """more: further keys beside those of the record."""
    typer.echo(json.dumps(_plain(record) | more if more else record, indent=2, default=_plain))


CONTRACT_KEYS = {"task": "island", "tasks": "islands", "max_in_flight": "window"}
"""Keys of --json that scripts rely on, by the names of the records' fields."""


def _plain(value: Any) -> Any:
    """A record as a dict with the names that --json has."""
    if is_dataclass(value) and not isinstance(value, type):
        # What is in it comes here in its turn. PRINTED: names of properties that are printed, too.
        record = vars(value) | {name: getattr(value, name) for name in getattr(value, "PRINTED", ())}
        return {CONTRACT_KEYS.get(name, name): part for name, part in record.items()}
    return str(value)
