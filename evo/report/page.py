"""A run as one HTML file that needs nothing else, and its figures as files.

The styles, the figures and the small script of the page are inside. A file is there whole or not at all, and nothing that
is not a report is replaced.
"""

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evo.analysis.finals import ceiling_note
from evo.analysis.outcome import RunOutcome
from evo.errors import UsageError
from evo.lineage.database import command_line
from evo.report import sentences
from evo.report.figures import COLOURS, change_text, draw_workload, gain_text
from evo.report.sentences import run_headline, size
from evo.report.text import counted, duration, interval, micro, percent, short, times, value_text, visible

_GENERATOR = "evo report"
_FOLDER = Path(__file__).parent / "templates"
_HEAD_BYTES = 400


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            value if isinstance(value, Markup) or not isinstance(value, str) else visible(value, lines=True)
        ),
    )
    environment.filters |= {
        "change": change_text, "counted": counted, "duration": duration, "gain": gain_text, "micro": micro,
        "attributes": vars, "percent": percent, "short": short, "size": size, "times": times, "value": value_text,
    }  # fmt: skip
    environment.globals |= {name: getattr(sentences, name) for name in sentences.__all__}
    environment.globals |= {
        "ceiling_note": ceiling_note, "command_line": command_line, "draw_workload": draw_workload, "interval": interval,
    }  # fmt: skip
    return environment


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _style() -> str:
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in COLOURS.items())
    return (_FOLDER / "style.css").read_text(encoding="utf-8").replace("/*COLOURS*/", colours)


@cache
def _script(live: bool) -> str:
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.js", *(["live.js"] if live else [])))


def policy_of(*, live: bool) -> str:
    """What a page allows a browser: its own style and script, and to a live one its own server."""
    style, script = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (_style(), _script(live)))
    own = f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src data:; base-uri 'none'"
    return f"{own}; form-action 'none'" + ("; connect-src 'self'" if live else "")


def render_body(data: RunOutcome, *, live: bool = False) -> str:
    """What stands in a page: also what a live one exchanges."""
    return render("report.html.j2", data=data, run=data.run, live=live)


def render_page(data: RunOutcome) -> str:
    """The whole file."""
    return render_frame(run_headline(data), render_body(data))


def render_frame(title: str, body: str, *, live: bool = False) -> str:
    """A page around its body, with all that it needs to be shown. live: it may ask its server for more."""
    parts = {"style": _style(), "script": _script(live), "body": body}
    marked = {name: Markup(text) for name, text in parts.items()}
    return render("page.html.j2", title=title, generator=_GENERATOR, policy=policy_of(live=live), **marked)


def check_replaceable(out: Path) -> None:
    """Raises UsageError unless `out` can become a report: it is not there, or is one."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, such as {out / 'report.html'}")
    if not out.is_file():  # nothing, or a pipe or device such as /dev/stdout
        return
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read --out {out}: {error.strerror or error}") from error
    if head and f'content="{_GENERATOR}"'.encode() not in head:
        raise UsageError(f"--out {out} is there and is not a report of evo's; it is left as it is: name another file")


def write_figures(folder: Path, data: RunOutcome) -> list[Path]:
    """Every figure as SVG and as PNG, named apart where a run has several workloads.

    Raises UsageError where a file cannot be written.
    """
    written = []
    for number, workload in enumerate(data.workloads, 1):
        for figure in draw_workload(workload).values():
            name = f"w{number}-{figure.name}" if len(data.workloads) > 1 else figure.name
            for end, content in (("svg", figure.document().encode()), ("png", figure.png())):
                written.append(folder / f"{name}.{end}")
                write_file(written[-1], content)
    return written


def write_file(out: Path, content: bytes) -> None:
    """Raises UsageError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():  # a device or a pipe is written to, never replaced
            out.write_bytes(content)
            return
        out = out.resolve()
        part = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
