"""Job files: a search written down. TOML, with one table [search] whose keys are the options of `evo search`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evo.errors import UsageError

__all__ = ["read_job"]


def read_job(path: Path) -> dict[str, Any]:
    """The [search] table of a job file. Raises UsageError."""
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"job file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"job file {path} cannot be read: {error}") from error
    job = document.get("search")
    if not isinstance(job, dict) or "kernel" not in job:
        raise UsageError(f"job file {path} needs a table [search] with at least: kernel = \"layernorm\"")
    for key, value in job.items():
        if key not in _JOB_KEYS:
            raise UsageError(f"job file {path}: unknown key {key!r}; known: {', '.join(sorted(_JOB_KEYS))}")
        fits, wanted = _JOB_KEYS[key]
        if not fits(value):
            raise UsageError(f"job file {path}: {key} must be {wanted}, got {value!r}")
    return job


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


_JOB_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "kernel": (_is_text, 'a name or a folder, e.g. "layernorm"'),
    "target": (_is_text, '"cuda" or "cpu"'),
    "arch": (_is_text, 'an architecture, e.g. "sm_89"'),
    "workloads": (_is_texts, 'a list, e.g. ["rows=4096,cols=8192,dtype=float16"]'),
    "budget": (lambda v: _is_text(v) or _is_count(v), 'seconds, or a duration such as "10m"'),
    "evaluations": (_is_whole, "a whole number"),
    "patience": (_is_whole, "a whole number"),
    "sampler": (_is_text, 'a name, e.g. "evolution"'),
    "seed": (lambda v: type(v) is int and 0 <= v < 2**63, "a whole number from 0 to 2**63 - 1"),
    "name": (_is_text, "a text"),
    "fix": (_is_texts, 'a list, e.g. ["threads=1"]'),
    "start": (_is_texts, 'a list of runs, candidates or points, e.g. ["threads=256,vectors=2"]'),
    "builders": (_is_count, "a whole number above 0"),
    "finalists": (_is_count, "a whole number above 0"),
}
