"""What a process is given from outside: standard files, files in TOML, and what EVO_DB and EVO_CACHE name. Only this module
and the options of commands read these variables."""

import os
import sys
from pathlib import Path
from typing import Any

from evo.errors import UsageError

DEFAULT_DB = "runs/lineage.db"


def fill_standard_files() -> None:
    """Opens the null device as each of the descriptors 0, 1 and 2 that is closed, as in a service or a program without a
    console, because a file or socket with such a number would be taken for standard input or output. Missing streams of
    Python use it, too."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def read_toml(path: Path, what: str) -> tuple[str, dict[str, Any]]:
    """The text of a file, and what it holds. what: the file is, in words. Raises UsageError."""
    import tomllib  # few commands read a file

    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise UsageError(f"{what} {path} cannot be read: {error}") from error


def cache_dir(db: str) -> Path:
    """The folder of compiled candidates: EVO_CACHE, else one beside the database, else one under runs/."""
    if named := os.environ.get("EVO_CACHE"):
        return Path(named)
    from evo.lineage import database  # fill_standard_files comes before all that takes long to import

    return (database.locate(db).path or Path(DEFAULT_DB)).with_name("cache")


def command_line(db: str, *words: str) -> str:
    """A command to be typed next. It names the database, without its password, unless that is the default here."""
    from evo.lineage import database

    default = os.environ.get("EVO_DB") or DEFAULT_DB
    return database.command_line(None if db == default else db, *words)


def lasting_db(db: str) -> str | None:
    """The database as commands in a written page must name it, since EVO_DB may differ where the page is read; None for the
    built-in default."""
    return db if db != DEFAULT_DB or os.environ.get("EVO_DB") not in (None, "", db) else None
