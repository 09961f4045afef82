"""The files of a kernel's folder, from what is known of the kernel."""

from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

from evo.problem.loading import UNFILLED
from evo.problem.render import template_environment


def as_python(name: str) -> str:
    return f"{name}_" if iskeyword(name) else name


def rendered(facts: Mapping[str, Any], *files: str) -> dict[str, str]:
    """The text of each file, by name. facts: `name`; `k`, an `Adopted`, or None for the small complete kernel; `file`, that
    it is from; `own`, an `evo.adoption.own.Stated`, of a function with a body."""
    environment = template_environment(Path(__file__).parent)
    environment.filters["literal"] = lambda value: repr(value).replace("'", '"')
    environment.filters["python"] = as_python
    known = {"own": None, "mark": UNFILLED, **facts}
    return {file: environment.get_template(f"_{file}.j2").render(known) for file in files}
