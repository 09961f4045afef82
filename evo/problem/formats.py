"""A kernel's description for other projects' formats: <kernel>/formats.toml, a table for each format.

Texts in it are Jinja templates over the dimensions, options and dtype of a workload, and what the format adds.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from evo.errors import KernelError, UsageError
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import template_root
from evo.problem.render import template_environment

FORMATS_FILE = "formats.toml"


def format_table(kernel: Kernel, format: str) -> Mapping[str, Any]:
    """The table of a format in the kernel's file. Raises UsageError if there is none, KernelError."""
    table = all_tables(kernel).get(format)
    if not isinstance(table, dict):
        raise UsageError(
            f"kernel {kernel.name!r} cannot be exported as {format}: {kernel.folder / FORMATS_FILE} has no table "
            f"[{format}]; write one (docs/formats.md), or choose another --format"
        )
    return table


def all_tables(kernel: Kernel) -> Mapping[str, Any]:
    """Empty if there is no such file. A table that says `like = FAMILY` has what it does not say itself of the family's.
    Raises KernelError for a file that cannot be read, or is not there."""
    path = kernel.folder / FORMATS_FILE
    found = _read(path) if path.is_file() else {}
    for name, table in found.items():
        if isinstance(table, dict) and (family := table.pop("like", None)) is not None:
            places = [root / str(family) / FORMATS_FILE for root in (kernel.folder, template_root())]
            shared = _read(next(filter(Path.is_file, places), places[-1]))
            found[name] = _completed(table, shared.get(name, {}))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KernelError(f"{path} cannot be read ({error})") from error


def _completed(table: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {n: _completed(v, other[n]) for n, v in table.items() if isinstance(v, dict) and isinstance(other.get(n), dict)}
    return {**other, **table, **both}


def values_of(workload: Workload) -> dict[str, Any]:
    return {**dict(workload.dims), **dict(workload.options), "dtype": workload.dtype}


def fill(text: str, values: Mapping[str, Any]) -> str:
    """The rendered text. Raises KernelError, which names what is undefined or wrong."""
    try:
        return template_environment().from_string(text).render(values)
    except jinja2.TemplateError as error:
        raise KernelError(f"a text in {FORMATS_FILE} does not render ({error}): {text.strip()[:60]!r}") from error


def unfit(table: Mapping[str, Any], workload: Workload) -> str:
    """The reason, if the workload meets one of the conditions in the table's `unfit`, pairs of a condition and a reason."""
    values = values_of(workload)
    return next((why for condition, why in table.get("unfit", ()) if fill(f"{{{{ 1 if {condition} }}}}", values)), "")


def check_fit(table: Mapping[str, Any], format: str, candidate: str, workload: Workload) -> None:
    """Raises UsageError if the format has no place for the workload."""
    if reason := unfit(table, workload):
        raise UsageError(
            f"{candidate} is for {workload.key}, which {format} has no place for: {reason}; leave it out, or choose "
            f"another --format"
        )
