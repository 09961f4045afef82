"""What the figures show follows from the records."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from recorded import Plan, record_run

from evo.analysis.outcome import RunOutcome, WorkloadOutcome, read_outcome
from evo.lineage.store import Store
from evo.report.page import COLOURS, Figure, draw_convergence, draw_lineage, draw_scores, draw_workload
from evo.report.sentences import hardly_tried, importance_gap
from evo.report.text import value_text


@pytest.fixture(scope="module")
def one(known: dict[str, RunOutcome]) -> WorkloadOutcome:
    """A finished run of one workload."""
    return known["one"].workloads[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nofinals", "failures", "single", "gone"])
def test_every_figure_is_xml_of_its_own_with_a_title_and_without_links(known: dict[str, RunOutcome], name: str) -> None:
    for workload in known[name].workloads:
        for figure in draw_workload(workload).values():
            root = ET.fromstring(figure.document().encode())
            spaceless = [e.tag.rpartition("}")[2] for e in root.iter()]
            assert spaceless[:3] == ["svg", "title", "desc"]
            assert not {"a", "script", "image", "foreignObject"} & set(spaceless)
            assert "var(" not in figure.document()


def test_the_best_so_far_only_ever_rises_and_ends_at_the_lowest_score(one: WorkloadOutcome) -> None:
    ups = [m.speedup for m in one.milestones]
    assert ups == sorted(ups)
    assert ups[-1] == pytest.approx(np.nanmax(one.speedup))
    assert all(m.low < m.speedup < m.high for m in one.milestones)


def test_dots_of_candidates_are_opaque_and_shrink_only_where_they_are_many(one: WorkloadOutcome) -> None:
    def width(outcome: WorkloadOutcome) -> float:
        figure = draw_convergence(outcome, "evaluations")
        assert figure is not None
        (dots,) = (mark for layer in figure.layers if (mark := layer["mark"]).get("strokeCap") == "round")
        assert (dots["color"], "opacity" in dots) == ("var(--dot)", False)
        return float(dots["strokeWidth"])

    many = np.full(5000, 0.9)
    crowd = replace(one, points=(one.points[0],) * 5000, speedup=many, elapsed_s=np.arange(5000.0), passed=many > 0)
    assert (width(one), width(crowd)) == (5.0, 3.0)


def test_a_lineage_has_a_mark_for_each_ancestor_that_says_change_and_gain(one: WorkloadOutcome) -> None:
    figure = draw_lineage(one, anchor="w1")
    links = list(ET.fromstring(figure.inline()).iter("{http://www.w3.org/2000/svg}a"))
    said = {a.get("href"): a[0].get("aria-label") or "" for a in links}
    assert said.keys() == {f"#w1-step-{s.order}" for s in one.steps}
    gained = next(s for s in one.steps if s.gain is not None and not s.tie and s.change)
    assert "→" in said[f"#w1-step-{gained.order}"]
    assert "gain over its first parent" in said[f"#w1-step-{gained.order}"]


def _scales(figure: Figure, channel: str) -> set[tuple[float, ...]]:
    encodings = (layer["encoding"] for layer in figure.layers if layer["data"]["values"])
    return {tuple(e[channel]["scale"]["domain"]) for e in encodings if "scale" in e.get(channel, {})}


def test_axes_of_speedups_and_bars_begin_at_zero_and_hold_the_reference(one: WorkloadOutcome) -> None:
    lineage, drawn = draw_lineage(one, anchor="w1"), draw_workload(one)
    for figure, channel in (
        (drawn["convergence-evaluations"], "y"), (drawn["convergence-seconds"], "y"), (lineage, "y"), (lineage.upright, "x"),
    ):  # fmt: skip
        ((low, high),) = _scales(figure, channel)
        assert low == 0
        assert high >= max(1.0, *(s.speedup for s in one.milestones if "conv" in figure.name), 0.0)
        assert any(row == {"y": 1.0} for layer in figure.layers for row in layer["data"]["values"]), "a line at 1"
    ((low, _),) = _scales(drawn["importance"], "x")
    assert low == 0


def test_the_same_shade_is_the_same_share_of_the_best(one: WorkloadOutcome) -> None:
    for pair in (figure for name, figure in draw_workload(one).items() if name.startswith("pair-")):
        best = max(row.get("best", 0.0) for layer in pair.layers for row in layer["data"]["values"])
        scale = pair.layers[0]["encoding"]["fillOpacity"]["scale"]
        assert (scale["type"], scale["domain"]) == ("log", [best / 2, best])


def test_an_upright_lineage_has_the_same_marks_below_one_another(one: WorkloadOutcome) -> None:
    wide = draw_lineage(one, anchor="w1")
    links = [set(re.findall(r'href="(#w1-step-\d+)"', drawn.inline())) for drawn in (wide, wide.upright)]
    assert links[0] == links[1] != set()
    assert draw_workload(one)["lineage"].upright.upright is None


def test_every_candidate_is_in_one_cell_of_a_pair(one: WorkloadOutcome) -> None:
    pairs = [figure for name, figure in draw_workload(one).items() if name.startswith("pair-")]
    assert len(pairs) == 3
    for pair in pairs:
        cells = {row["tip"]: row for layer in pair.layers for row in layer["data"]["values"]}
        assert sum(int(re.search(r"of (\d+) passed", tip)[1]) for tip in cells) == one.number
        assert max(row.get("best", 0) for row in cells.values()) == pytest.approx(one.milestones[-1].speedup)


def test_values_of_what_mattered_that_were_hardly_tried_are_named(one: WorkloadOutcome) -> None:
    least = re.findall(r"(\w+)=(\S+) \((\d+) of ", hardly_tried(one.importance))
    assert least
    for parameter, value, number in least:
        assert parameter in one.important[:3]
        having = [point for point in one.points if value_text(point.get(parameter)) == value]
        assert len(having) == int(number)


def test_the_importance_of_few_candidates_is_not_guessed(known: dict[str, RunOutcome]) -> None:
    assert "only 1 candidate" in importance_gap(known["single"].workloads[0])
    assert importance_gap(known["empty"].workloads[0]) == "no candidate has a time"


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    a, b = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_marks_keep_the_contrast_that_wcag_asks_for(dark: bool) -> None:
    colours = {name: shades[dark] for name, shades in COLOURS.items()}
    for text in ("ink", "muted", "accent", "warn", "good"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
        assert _contrast(colours[text], colours["soft"]) >= 4.5, text
    assert _contrast(colours["dot"], colours["paper"]) >= 3


def test_a_leader_without_a_time_of_the_search_is_no_point_of_its_lineage(one: WorkloadOutcome) -> None:
    *before, leader = one.steps
    untimed = replace(leader, score=None)
    drawn = draw_lineage(replace(one, steps=(*before, untimed)), anchor="w1")
    assert f"#w1-step-{leader.order}" not in drawn.inline()
    assert "Left out: 1 candidate without a time" in drawn.caption
    assert draw_lineage(replace(one, steps=(untimed,)), anchor="w1") is None


def test_disturbed_times_are_never_on_the_line(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        for share in (0.5, 1.0):
            record_run(store, Plan(name=f"busy{share:g}", evaluations=40, failing={}, disturbed=share, finals=False))
        half, whole = (read_outcome(store, f"busy{share:g}").workloads[0] for share in (0.5, 1.0))
    assert [half.milestones != (), any(m.disturbed for m in half.milestones)] == [True, False]
    assert whole.milestones == ()
    assert draw_convergence(whole, "seconds") is None


def test_a_legend_stands_above_the_title_of_the_axis() -> None:
    score = SimpleNamespace(sampler="tpe", score=0.4, low=None, curve=(0.0, 0.5), curve_low=None, curve_high=None)
    root = ET.fromstring(draw_scores("scores", "Scores", [score]).document().encode())
    places: dict[str, float] = {}

    def place(element: ET.Element, down: float) -> None:
        moved = re.search(r"translate\([-\d.]+,\s*([-\d.]+)\)", element.get("transform", ""))
        down += float(moved[1]) if moved else 0.0
        if element.tag.endswith("text"):
            places["".join(element.itertext())] = down
        for child in element:
            place(child, down)

    place(root, 0.0)
    assert places["tpe 0.400"] + 13 < places["share of the way to the best"]
