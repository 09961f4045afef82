"""Job files: searches that are written down, and are read as if they had been typed."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from evo.errors import UsageError

_TABLE = re.compile(r"\s*\[\[?\s*search\s*\]")
_NOT_IN_JOBS = {"kernel", "export", "db", "json"}


class Job(dict[str, Any]):
    """A search of a job file: its keys are the parameters of `evo search`."""

    def __init__(self, keys: Mapping[str, Any], path: Path, lines: Sequence[str], first: int) -> None:
        """lines: of the file, counted from 1; first: that on which this search begins."""
        super().__init__(keys)
        self._path, self._lines, self._first = path, lines, first

    def wrong(self, key: str | None, said: str) -> UsageError:
        """With the line of the key, or that on which the search begins."""
        tables = (n for n in range(self._first, len(self._lines)) if _TABLE.match(self._lines[n]))
        own = range(self._first, next(tables, len(self._lines)))
        sets_it = re.compile(rf"\s*(search\.)?[\"']?{key}[\"']?\s*[.=]|\s*\[\[?search\.{key}\]")
        line = next((n for n in own if key and sets_it.match(self._lines[n])), self._first - 1)
        return UsageError(f"job file {self._path}, line {line + 1}: {said}")


def read_jobs(path: Path) -> list[Job]:
    """The searches of a job file, a TOML file with one table [search] or several [[search]]: those of the highest priority
    first. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
        whole = tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(f"job file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise UsageError(f"job file {path} cannot be read: {error}") from error
    found, lines = whole.pop("search", None), text.splitlines()
    if found and whole:
        key = next(iter(whole))
        line = next((n for n, line in enumerate(lines, 1) if re.match(rf"\W*{re.escape(key)}\b", line)), 1)
        raise UsageError(f"job file {path}, line {line}: {key!r} stands outside of [search], where all keys belong")
    tables = found if isinstance(found, list) else [found]
    begins = [n for n, line in enumerate(lines, 1) if _TABLE.match(line)] or [1]
    jobs, named = list[Job](), dict[str, int]()
    for number, table in enumerate(tables):
        first = begins[min(number, len(begins) - 1)]
        if not isinstance(table, dict) or "kernel" not in table:
            raise UsageError(
                f"job file {path}, line {first}: it needs a table [search], or several [[search]], each with at least:"
                ' kernel = "layernorm"'
            )
        job = Job(table, path, lines, first)
        priority = job.get("priority", 0)
        if isinstance(priority, bool) or not isinstance(priority, int | float) or not math.isfinite(priority):
            raise job.wrong("priority", f"priority must be a number, got {job['priority']!r}")
        if len(tables) > 1 and not isinstance(job.get("name"), str):
            raise job.wrong("name", "of several searches each needs a name, by which it is continued after an interruption")
        if (name := str(job.get("name"))) in named and len(tables) > 1:
            raise job.wrong("name", f"the search that begins on line {named[name]} is called {name!r}, too")
        named[name] = first
        jobs.append(job)
    return sorted(jobs, key=lambda job: -job.pop("priority", 0))


def parse_jobs(context: typer.Context, path: Path) -> list[dict[str, Any]]:
    """The parameters of `evo search` as if what a job file says had been typed, for each of its searches. Raises
    UsageError."""
    options: dict[str, Any] = {str(p.name): p for p in context.command.params if p.name not in _NOT_IN_JOBS}
    typed = []
    for job in read_jobs(path):
        if not isinstance(job["kernel"], str) or not job["kernel"]:
            raise job.wrong("kernel", f"kernel must be a kernel's name or folder, got {job['kernel']!r}")
        words = [job["kernel"]]
        for key, value in job.items():
            if key == "kernel":
                continue
            if key not in options:
                raise job.wrong(key, f"unknown key {key!r}; known: {', '.join(sorted([*options, 'priority']))}")
            if value in ("", [], {}) or (isinstance(value, list) and "" in value):
                raise job.wrong(key, f"{key} is empty, or holds an empty text; leave it out, or give it a value")
            kind: Any = dict if key == "sampler_options" else list if options[key].multiple else (str, int, float)
            if options[key].is_flag:
                kind = bool
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                wanted = {dict: "a table", list: "a list", bool: "true or false"}.get(kind, "a single value")
                raise job.wrong(key, f"{key} must be {wanted}, got {value!r}")
            if kind is bool:
                words += [options[key].opts[0]] if value else []
                continue
            values = [f"{k}={v}" for k, v in value.items()] if kind is dict else value if kind is list else [value]
            words += [f"{options[key].opts[0]}={one}" for one in values]
        try:
            typed.append(context.command.make_context("search", words).params)
        except typer.BadParameter as error:
            raise job.wrong(str(error.param.name) if error.param else None, error.format_message()) from None
    return typed
