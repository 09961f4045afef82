"""What the figures show follows from the records."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import PLANS, Plan, record_run

from evo.analysis import queries
from evo.analysis.credit import operators
from evo.analysis.importance import importance
from evo.lineage.store import Store
from evo.report.columns import read_candidates
from evo.report.data import RunData, read_run_data
from evo.report.figures.convergence import draw_convergence
from evo.report.figures.failures import failure_kinds
from evo.report.figures.families import group_families
from evo.report.figures.lineage import draw_lineage, shown_steps
from evo.report.figures.operators import credit_operators
from evo.report.figures.pairs import map_pairs
from evo.report.findings import hardly_tried
from evo.report.page import figures_of, sections
from evo.report.palette import DARK, LIGHT, STEPS
from evo.report.svg import ticks
from evo.report.text import value_text
from tests.lineage import samples as s


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_every_figure_is_xml_of_its_own_with_a_title_and_without_links(known: dict[str, RunData], name: str) -> None:
    for section in sections(known[name]):
        for figure in figures_of(section, several=True):
            root = ET.fromstring(figure.document().encode())
            spaceless = [e.tag.rpartition("}")[2] for e in root.iter()]
            assert spaceless[:3] == ["svg", "title", "desc"]
            assert not {"a", "script", "image", "foreignObject"} & set(spaceless)
            assert "var(" not in figure.document()


def test_the_best_so_far_only_ever_rises_and_ends_at_the_lowest_score(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    ups = [m.speedup for m in data.milestones]
    assert ups == sorted(ups)
    assert data.candidates is not None
    assert ups[-1] == pytest.approx(1 / np.nanmin(data.candidates.score))
    assert all(m.low < m.speedup < m.high for m in data.milestones)
    assert draw_convergence(data, "evaluations") is not None


def test_a_lineage_of_ties_says_so(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    tied = tuple(replace(step, tie=True) if step.gain is not None else step for step in data.steps)
    told, otherwise = draw_lineage(replace(data, steps=tied)), draw_lineage(data)
    assert told is not None
    assert otherwise is not None
    assert "through first parents, each step of which is a tie" in told.caption
    assert "through first parents, with the gains of steps that are no ties" in otherwise.caption


def test_a_lineage_has_a_mark_for_each_ancestor_that_says_change_and_gain(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    figure = draw_lineage(data, anchor="w1-step-")
    assert figure is not None
    steps = shown_steps(data)
    links = list(ET.fromstring(f"<svg>{figure.body}</svg>").iter("a"))
    assert [a.get("href") for a in links] == [f"#w1-step-{s.order}" for s in steps]
    gained = next(s for s in steps if s.gain is not None and not s.tie and s.change)
    told = next(a for a in links if a.get("href") == f"#w1-step-{gained.order}").get("data-tip") or ""
    assert "→" in told
    assert "gain over its first parent" in told


def test_cells_of_a_pair_count_every_candidate_once(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    maps = map_pairs(data)
    assert 1 <= len(maps) <= 6
    for heat in maps:
        cells = [c for row in heat.cells for c in row]
        assert sum(c.tried for c in cells) == data.number
        assert max(c.best for c in cells if c.best) == pytest.approx(data.milestones[-1].speedup)
        assert all(c.median <= c.best for c in cells if c.best and c.median)


def test_families_divide_the_candidates_among_them(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    families = group_families(data)
    rows = np.concatenate([f.rows for f in families])
    assert sorted(rows) == list(range(data.number))
    assert min(f.best for f in families if f.best) == pytest.approx(1 / data.milestones[-1].speedup)


def test_operators_share_the_credit_for_all_that_was_gained(known: dict[str, RunData]) -> None:
    data = known["one"].workloads[0]
    credits = credit_operators(data)
    assert sum(c.tried for c in credits) == data.number
    assert sum(c.credit or 0 for c in credits) == pytest.approx(1)
    assert sum(len(c.firsts) for c in credits) == len(data.milestones) - 1  # the first is better than none
    gained = math.log(data.milestones[-1].speedup / data.milestones[0].speedup)
    assert gained > 0


def test_operators_are_credited_on_the_page_as_the_command_does(database: object, known: dict[str, RunData]) -> None:
    with Store.open(str(database), write=False) as store:
        asked = {c.operator: c for c in operators(store, "one", windows=1) if c.window is None}
    shown = {c.name: c for c in credit_operators(known["one"].workloads[0])}
    assert shown.keys() == asked.keys()
    assert {n: (c.children, len(c.better), len(c.firsts)) for n, c in shown.items()} == {
        n: (c.compared, c.better, c.improvements) for n, c in asked.items()
    }
    assert shown["crossover"].children


def test_a_child_of_two_is_better_only_if_it_beats_the_faster_one(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = store.create_run(s.SPEC, s.ENVIRONMENT)
        tried = [(s.ref(0), 0.9), (s.ref(1), 0.4), (s.ref(2, 0, 1), 0.5), (s.ref(3, 0, 1), 0.3)]
        for ref, ratio in tried:
            store.add(run, ref, s.passed(ref.order, ratio), elapsed_s=1.0)
        some = read_candidates(store, run.id)[0]
    assert some.compared.tolist() == [False, False, True, True]
    assert some.better.tolist() == [False, False, False, True]


def test_failures_are_counted_by_kind_with_their_reasons(known: dict[str, RunData]) -> None:
    data = known["failures"].workloads[0]
    kinds = failure_kinds(data)
    assert sum(k.number for k in kinds) == 30
    assert {k.status for k in kinds} == {"compile_error", "wrong"}
    assert all(k.reasons[0][1] == k.number for k in kinds)


def test_the_importance_on_the_page_is_that_of_the_command(database: object, known: dict[str, RunData]) -> None:
    with Store.open(str(database), write=False) as store:
        asked = {i.parameter: i.importance for i in importance(store, "one") if i.importance is not None}
    data = known["one"].workloads[0]
    shown = {p.name: share for p, share in data.importance.shares}
    assert shown.keys() == asked.keys()
    assert all(shown[name] == pytest.approx(asked[name]) for name in asked)


def test_values_of_what_mattered_that_were_hardly_or_never_tried_are_named(known: dict[str, RunData]) -> None:
    data, gone = known["one"], known["gone"].workloads[0]
    one = data.workloads[0]
    assert one.candidates is not None
    space = data.problem.spaces[0]
    assert one.importance.option_min
    assert one.importance.never
    top = set(one.importance.names[:3])
    for least in one.importance.option_min:
        place = one.candidates.tried[least.parameter].index(least.value)
        assert (one.candidates.values[least.parameter] == place).sum() == least.tried.candidates
        assert least.parameter in top
        assert f"{least.parameter}={value_text(least.value)} ({least.tried.candidates} of " in " ".join(hardly_tried(one))
    for name, value in one.importance.never:
        assert name in top
        assert value not in one.candidates.tried[name]
        assert space.is_legal(space.restricted({name: value}).default)
        assert f"{name}={value_text(value)}" in hardly_tried(one)[-1]
    assert not gone.importance.never, "nobody knows the space of a kernel that is gone"


def test_the_importance_of_few_candidates_is_not_guessed(known: dict[str, RunData]) -> None:
    assert "only 1 candidate" in known["single"].workloads[0].importance.reason
    assert known["empty"].workloads[0].importance.reason == "no candidate has a time"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.93, 1.61), (0, 1000), (-3, 7), (5, 5), (0, 1e-6)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 9
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    a, b = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_marks_keep_the_contrast_that_wcag_asks_for(colours: dict[str, str]) -> None:
    for text in ("ink", "muted", "accent", "warn", "good"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
        assert _contrast(colours[text], colours["soft"]) >= 4.5, text
    for mark in ("dot", *(f"s{i}" for i in range(8))):
        assert _contrast(colours[mark], colours["paper"]) >= 3, mark
    for step in range(STEPS):
        assert _contrast(colours[f"t{step}"], colours[f"h{step}"]) >= 4.5, step


def test_disturbed_times_are_on_the_line_only_where_there_are_no_others(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        for share in (0.5, 1.0):
            record_run(store, Plan(name=f"busy{share:g}", evaluations=40, failing={}, disturbed=share, finals=False))
        half, whole = (read_run_data(store, f"busy{share:g}").workloads[0] for share in (0.5, 1.0))
        spoilt = queries.disturbed(store, [m.id for m in half.milestones])
    assert half.milestones
    assert not spoilt
    assert not any(m.disturbed for m in half.milestones)
    assert whole.milestones
    assert all(m.disturbed for m in whole.milestones)
    figure = draw_convergence(whole, "evaluations")
    assert figure is not None
    assert "Broken line" in figure.caption
