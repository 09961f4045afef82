"""A run as one HTML file that needs nothing else: styles, figures and the little program in it are inside."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evo.report.data import RunData, WorkloadData
from evo.report.figures.convergence import draw_convergence
from evo.report.figures.failures import FailureKind, draw_failures, failure_kinds
from evo.report.figures.families import draw_families, group_families
from evo.report.figures.importance import draw_importance
from evo.report.figures.lineage import change_text, draw_lineage, gain_text
from evo.report.figures.operators import OperatorCredit, credit_operators, draw_operators
from evo.report.figures.pairs import HeatMap, draw_heat_map, map_pairs
from evo.report.findings import (
    confirmation_sentences,
    facts,
    finalist_rows,
    finalists_sentence,
    hardly_tried,
    headline,
    race_rows,
    remarks,
    run_headline,
    size,
)
from evo.report.palette import DARK, LIGHT, figure_css, variables
from evo.report.protocol import command, commands, environment_rows, measured_rows, protocol_words, setup_rows
from evo.report.svg import Figure
from evo.report.text import clean, counted, duration, micro, percent, short, times, value_text
from evo.report.yardsticks import ceiling_note

__all__ = ["GENERATOR", "Section", "figures_of", "render", "render_body", "render_page", "script", "sections", "style"]

GENERATOR = "evo report"
_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One workload's part of the report. figures: by name; heats: with what they were drawn from."""

    anchor: str
    data: WorkloadData
    figures: dict[str, Figure]
    heats: tuple[tuple[HeatMap, Figure], ...]
    failures: tuple[FailureKind, ...]
    operators: tuple[OperatorCredit, ...]

    @property
    def all_figures(self) -> Iterator[Figure]:
        return itertools.chain(self.figures.values(), (f for _, f in self.heats))


def sections(data: RunData) -> list[Section]:
    """Everything that is drawn, workload by workload."""
    return [_section(i, w) for i, w in enumerate(data.workloads, 1)]


def _section(number: int, data: WorkloadData) -> Section:
    anchor = f"w{number}"
    kinds, credits = failure_kinds(data), credit_operators(data)
    drawn = (
        draw_convergence(data, "evaluations"),
        draw_convergence(data, "seconds"),
        draw_lineage(data, anchor=f"{anchor}-step-"),
        draw_families(data, group_families(data)),
        draw_importance(data.importance),
        draw_failures(data, kinds),
        draw_operators(data, credits),
    )
    heats = tuple((heat, draw_heat_map(heat)) for heat in map_pairs(data))
    return Section(
        anchor=anchor,
        data=data,
        figures={f.name: f for f in drawn if f is not None},
        heats=heats,
        failures=tuple(kinds),
        operators=tuple(credits),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            value if isinstance(value, Markup) else clean(value) if isinstance(value, str) else value
        ),
    )
    environment.filters |= {
        "change": change_text, "counted": counted, "duration": duration, "gain": gain_text, "micro": micro,
        "percent": percent, "short": short, "size": size, "times": times, "value": value_text,
    }  # fmt: skip
    environment.globals |= {
        "ceiling_note": ceiling_note, "command": command, "commands": commands,
        "confirmation_sentences": confirmation_sentences, "environment_rows": environment_rows, "facts": facts,
        "finalist_rows": finalist_rows, "finalists_sentence": finalists_sentence, "hardly_tried": hardly_tried,
        "headline": headline,
        "measured_rows": measured_rows, "protocol_words": protocol_words, "race_rows": race_rows, "remarks": remarks,
        "run_headline": run_headline, "setup_rows": setup_rows,
    }  # fmt: skip
    return environment


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def style() -> str:
    """The style sheet of the report and of the live pages."""
    text = (_FOLDER / "style.css").read_text(encoding="utf-8")
    return text.replace("/*LIGHT*/", variables(LIGHT)).replace("/*DARK*/", variables(DARK)) + figure_css()


def script(name: str = "tips") -> str:
    """tips: shows what a mark of a figure means, beside the pointer or the focus. live: keeps a page up to date."""
    return (_FOLDER / f"{name}.js").read_text(encoding="utf-8")


def render_body(data: RunData, drawn: list[Section] | None = None, *, live: bool = False) -> str:
    """What stands between the page's frame: also what a live page exchanges."""
    return render("report.html.j2", data=data, run=data.run, sections=drawn or sections(data), live=live)


def render_page(data: RunData, drawn: list[Section] | None = None) -> str:
    """The whole file. Its policy forbids browsers to load anything, and to run anything but its own script."""
    css, program = style(), script()
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(program)}'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    return render(
        "page.html.j2",
        title=run_headline(data),
        generator=GENERATOR,
        policy=policy,
        style=Markup(css),
        script=Markup(program),
        body=Markup(render_body(data, drawn)),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def figures_of(section: Section, several: bool) -> list[Figure]:
    """For files: the same drawings, named apart where a run has several workloads, and without links into a page."""
    found = list(section.all_figures)
    plain = draw_lineage(section.data)
    found = [plain if plain is not None and f.name == plain.name else f for f in found]
    return [replace(f, name=f"{section.anchor}-{f.name}") for f in found] if several else found
