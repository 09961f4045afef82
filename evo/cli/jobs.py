"""Job files: searches that are written down."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evo.environment import read_toml
from evo.errors import UsageError
from evo.job.job import OPTIONS, read_option

_TABLE = re.compile(r"\s*\[\[?\s*search\s*\]")


def read_jobs(path: Path) -> list[dict[str, Any]]:
    """The searches of a job file, a TOML file with one table [search] or several [[search]]: those of the highest priority
    first, each with its kernel and the options that it gives. Raises UsageError, which names the line."""
    text, whole = read_toml(path, "job file")
    found, lines = whole.pop("search", None), text.splitlines()
    if found and whole:
        key = next(iter(whole))
        line = next((n for n, line in enumerate(lines, 1) if re.match(rf"\W*{re.escape(key)}\b", line)), 1)
        raise UsageError(f"job file {path}, line {line}: {key!r} stands outside of [search], where all keys belong")
    tables = found if isinstance(found, list) else [found]
    begins = [n for n, line in enumerate(lines, 1) if _TABLE.match(line)] or [1]
    jobs, named = list[tuple[float, dict[str, Any]]](), dict[str, int]()
    for number, table in enumerate(tables):
        first = begins[min(number, len(begins) - 1)]
        if not isinstance(table, dict) or "kernel" not in table:
            raise UsageError(
                f"job file {path}, line {first}: it needs a table [search], or several [[search]], each with at least:"
                ' kernel = "layernorm"'
            )
        key = "kernel"
        try:
            job: dict[str, Any] = {}
            for key, value in table.items():
                job[key] = _READERS[key](value) if key in _READERS else read_option(key, value, [*OPTIONS, *_READERS])
            key = "name"
            if len(tables) > 1 and key not in job:
                raise UsageError("of several searches each needs a name, by which it is continued after an interruption")
            if len(tables) > 1 and job[key] in named:
                raise UsageError(f"the search that begins on line {named[job[key]]} is called {job[key]!r}, too")
        except UsageError as error:
            raise UsageError(f"job file {path}, line {_line_of(key, lines, first)}: {error}") from None
        named[job.get("name", "")] = first
        jobs.append((job.pop("priority", 0), job))
    return [job for _, job in sorted(jobs, key=lambda one: -one[0])]


def _read_kernel(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"kernel must be a kernel's name or folder, got {value!r}")
    return value


def _read_priority(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"priority must be a number, got {value!r}")
    return value


_READERS: Mapping[str, Callable[[object], object]] = {"kernel": _read_kernel, "priority": _read_priority}
"""What reads the keys that are no options of a search."""


def _line_of(key: str, lines: Sequence[str], first: int) -> int:
    """The line of a key, else that on which its search begins, which is `first`. Lines are counted from 1."""
    tables = (n for n in range(first, len(lines)) if _TABLE.match(lines[n]))
    own = range(first, next(tables, len(lines)))
    sets_it = re.compile(rf"\s*(search\.)?[\"']?{re.escape(key)}[\"']?\s*[.=]|\s*\[\[?search\.{re.escape(key)}\]")
    return next((n for n in own if sets_it.match(lines[n])), first - 1) + 1
