"""A run as one HTML file that needs nothing else, and its figures as files.

The styles, the figures and the small script of the page are inside. A file is there whole or not at all, and nothing that
is not a report is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evo.analysis.candidates import TimingRecord
from evo.analysis.finals import ceiling_note
from evo.analysis.outcome import RunOutcome, WorkloadOutcome
from evo.errors import UsageError
from evo.evaluation import within_noise
from evo.report import sentences
from evo.report.figures import DARK, LIGHT, Figure, change_text, draw_workload, gain_text
from evo.report.sentences import run_headline, size
from evo.report.text import counted, duration, interval, micro, percent, short, times, value_text, visible

__all__ = [
    "Section", "check_replaceable", "read_script", "read_style", "render", "render_body", "render_page", "sections",
    "write_figures", "write_page",
]  # fmt: skip

_GENERATOR = "evo report"
_FOLDER = Path(__file__).parent / "templates"
_HEAD_BYTES = 400


@dataclass(frozen=True, kw_only=True)
class Section:
    """One workload's part of the report. figures: by name."""

    anchor: str
    data: WorkloadOutcome
    figures: dict[str, Figure]

    @property
    def race(self) -> list[TimingRecord]:
        """The leader and what ran beside it, the fastest first."""
        timing = self.data.timing
        return sorted([timing, *self.data.baselines], key=lambda t: t.median_us) if timing is not None else []


def sections(data: RunOutcome) -> list[Section]:
    """Everything that is drawn, workload by workload."""
    found = []
    for number, workload in enumerate(data.workloads, 1):
        drawn = draw_workload(workload, anchor=f"w{number}-step-")
        found.append(Section(anchor=f"w{number}", data=workload, figures={figure.name: figure for figure in drawn}))
    return found


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
        "percent": percent, "short": short, "size": size, "times": times, "value": value_text,
    }  # fmt: skip
    environment.globals |= {name: getattr(sentences, name) for name in sentences.__all__}
    environment.globals["ceiling_note"] = ceiling_note
    environment.globals |= {"interval": interval, "speedup": _speedup}
    return environment


def _speedup(ratio: float, noise: float | None) -> str:
    return "tie" if within_noise(ratio, noise) else times(ratio)


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def read_style() -> str:
    """The style sheet of the report and of the live pages."""
    text = (_FOLDER / "style.css").read_text(encoding="utf-8")
    for name, colours in (("/*LIGHT*/", LIGHT), ("/*DARK*/", DARK)):
        text = text.replace(name, "".join(f"--{key}:{colour};" for key, colour in colours.items()))
    return text


def read_script(name: str) -> str:
    """page.js: shows what a mark of a figure means, beside the pointer or the focus. live.js: keeps a page up to date."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def render_body(data: RunOutcome, drawn: list[Section] | None = None, *, live: bool = False) -> str:
    """What stands between the page's frame: also what a live page exchanges."""
    drawn = sections(data) if drawn is None else drawn
    return render("report.html.j2", data=data, run=data.run, sections=drawn, live=live)


def render_page(data: RunOutcome, drawn: list[Section] | None = None) -> str:
    """The whole file. Its policy forbids browsers to load anything, and to run anything but its own script."""
    css, program = read_style(), read_script("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(program)}'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    return render(
        "page.html.j2",
        title=run_headline(data),
        generator=_GENERATOR,
        policy=policy,
        style=Markup(css),
        script=Markup(program),
        body=Markup(render_body(data, drawn)),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


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


def write_page(out: Path, page: str) -> None:
    """Raises UsageError where the file cannot be written."""
    _write(out, page.encode("utf-8", "replace"))


def write_figures(folder: Path, drawn: list[Section]) -> list[Path]:
    """Every figure as SVG and as PNG, named apart where a run has several workloads.

    Raises UsageError where a file cannot be written.
    """
    written = []
    for section in drawn:
        for figure in section.figures.values():
            name = f"{section.anchor}-{figure.name}" if len(drawn) > 1 else figure.name
            for end, content in (("svg", figure.document().encode()), ("png", figure.png())):
                written.append(folder / f"{name}.{end}")
                _write(written[-1], content)
    return written


def _write(out: Path, content: bytes) -> None:
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
