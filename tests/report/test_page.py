"""A report says what a run found, in one file, whatever the run left behind."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from recorded import PLANS, Plan, record_run

from evo.analysis.outcome import RunOutcome, read_outcome, read_problem
from evo.lineage.store import Store
from evo.problem.kernel import load_kernel, template_root
from evo.report.page import render_page
from evo.report.sentences import commands, facts, finalists_sentence, headline
from evo.report.text import clean, duration, micro

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags and attributes as a browser would see them; complains of what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def pages(known: dict[str, RunOutcome]) -> dict[str, Page]:
    return {name: Page(render_page(data)) for name, data in known.items()}


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_every_tag_of_a_report_is_closed_and_every_id_is_there_once(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert not page.open
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    anchors = {a["href"] for tag, a in page.tags if tag == "a" and (a.get("href") or "").startswith("#")}
    assert {f"#{i}" for i in ids} >= anchors


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_a_report_asks_for_nothing_outside_itself(pages: dict[str, Page], name: str) -> None:
    for tag, attributes in pages[name].tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for attribute in ("src", "href", "action", "data", "srcset"):
            target = attributes.get(attribute)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
        assert not any(a.startswith("on") for a in attributes), f"{tag} has a program in an attribute"
        assert "style" not in attributes, f"the policy forbids the style of {tag}"


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_headings_go_down_one_level_at_a_time(pages: dict[str, Page], name: str) -> None:
    levels = [int(tag[1]) for tag, _ in pages[name].tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels


def test_tables_name_their_rows_and_columns_and_figures_say_what_is_to_be_seen(pages: dict[str, Page]) -> None:
    page = pages["two"]
    assert all(a.get("scope") in ("row", "col") for tag, a in page.tags if tag == "th")
    drawings = [a for tag, a in page.tags if tag == "svg"]
    assert len(drawings) == 18
    assert all(a["role"] in ("img", "group") and len(a["aria-label"] or "") > 20 for a in drawings)


def test_what_a_database_holds_stays_text(known: dict[str, RunOutcome]) -> None:
    for name in ("two", "gone"):
        text = render_page(known[name])
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)


def test_characters_that_nobody_sees_are_shown() -> None:
    assert clean("a\x00\x1b\x7f\u202eb\n\tc\ud800") == "a␀␛␡\N{REPLACEMENT CHARACTER}b\n\tc\N{REPLACEMENT CHARACTER}"


def test_a_finished_run_is_told_with_its_interval_its_noise_and_its_baselines(
    known: dict[str, RunOutcome], pages: dict[str, Page]
) -> None:
    data, text = known["one"].workloads[0], pages["one"].text
    timing = data.timing
    assert timing is not None
    assert timing.ratio is not None
    assert timing.stage == "final"
    assert headline(data) == f"{1 / timing.ratio:.3f}× the speed of PyTorch."
    assert data.leader is not None
    assert re.search(r"copy ceiling [\d.]+ [\d.]+ to [\d.]+ [\d.]+× [\d.]+ to [\d.]+ 1.000 30", text)
    assert re.search(rf"{data.leader.id[:10]} winner .* torch reference 31.0 30.9 to 31.1 1 ", text)
    for said in (
        "noise floor ±0.20%",
        "selection regret",
        "NVIDIA H200",
        "evo search layernorm",
        "--seed 1",
        "12 calls",
    ):
        assert said in text, said


def test_searching_again_keeps_the_number_of_candidates_in_flight(known: dict[str, RunOutcome]) -> None:
    data = known["one"]
    for window, builders in ((8, "4"), (16, "8")):
        again = dict(commands(replace(data, run=replace(data.run, max_in_flight=window))))["search again"]
        assert f"--builders {builders}" in again


def test_when_the_winner_was_found_is_told_by_its_own_number(known: dict[str, RunOutcome]) -> None:
    one = known["one"].workloads[0]
    assert one.leader is not None
    name = f"{one.leader.id[:10]} #{one.leader.order}"
    (found,) = [f for f in facts(one) if f.name == "winner found after"]
    assert (found.value, found.note) == (duration(one.leader.elapsed_s), name)
    later = replace(one.milestones[-1], order=one.leader.order + 7, elapsed_s=31.0)
    assert one.candidates is not None
    candidates = replace(one.candidates, milestones=(later,))
    (found,) = [f for f in facts(replace(one, candidates=candidates)) if f.name == "winner found after"]
    assert found.note == f"{name}; the fastest in the search was #{later.order}, after 31 s"
    assert [f.note for f in facts(known["nofinals"].workloads[0]) if f.name == "best found after"]


def test_a_page_numbers_candidates_as_the_commands_do(known: dict[str, RunOutcome]) -> None:
    """By their order in the run, from 0: also where a run has several workloads."""
    two = known["two"].workloads[1]
    last = two.milestones[-1]
    assert last.order == 2 * (last.evaluated - 1) + 1
    page = render_page(known["two"])
    assert f"reached with #{last.order} after {last.evaluated} of 80 candidates" in page
    assert not re.search(r"candidate \d", page)


def test_the_finalists_are_listed_with_who_ties(known: dict[str, RunOutcome], pages: dict[str, Page]) -> None:
    one = known["one"].workloads[0]
    text = pages["one"].text
    assert one.leader is not None
    assert [f.winner for f in one.finals.finalists] == [True, False, False]
    listed = re.search(r"in the search (\w{10}) #(\d+) .*? winner .*?(\w{10}) #(\d+) .*?(\w{10}) #(\d+)", text)
    assert listed
    assert listed.groups() == tuple(x for f in one.finals.finalists for x in (f.id[:10], str(f.order)))
    assert "behind: the winner's speed-up over this one's" in text
    assert finalists_sentence(one) in text
    near = replace(one.finals, finalists=tuple(replace(f, tie=not f.winner) for f in one.finals.finalists))
    assert finalists_sentence(replace(one, finals=near)).startswith("2 finalists tie with the winner: ")
    assert "The finalists" not in pages["nofinals"].text


def test_finalists_are_told_by_their_one_race_and_the_winner_by_the_one_that_confirmed_it(tmp_path: Path) -> None:
    """The machine was a fifth slower when the winner was confirmed."""
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        record_run(store, Plan(name="changed", evaluations=60, confirmed=1.2))
        changed = read_outcome(store, "changed")
    one = changed.workloads[0]
    assert one.timing is not None
    assert one.timing.ratio is not None
    assert one.leader is not None
    assert min(f.behind for f in one.finals.finalists if f.behind is not None) > 1
    text = Page(render_page(changed)).text
    assert f"{1 / (one.leader.score * 1.01):.3f}×" in text, "the winner in the race of all finalists"  # type: ignore[operator]
    assert "All of them in one race" in text
    assert f"alone with the baselines, in a fresh process and on other data: {micro(one.timing.median_us)} µs" in text
    assert "That is the figure to quote." in text
    assert "The winner's two races do not agree: the speed-up was 16% less" in text
    assert "time over copy, the fastest baseline here that only moves the bytes" in text


def test_a_gain_within_the_noise_floor_is_a_tie(known: dict[str, RunOutcome], pages: dict[str, Page]) -> None:
    assert known["tie"].workloads[0].tie
    assert "tie with PyTorch" in headline(known["tie"].workloads[0])
    assert "a tie with PyTorch" in pages["tie"].text


def test_a_disturbed_figure_has_its_mark_wherever_it_stands(known: dict[str, RunOutcome]) -> None:
    data = known["one"]
    one = data.workloads[0]
    assert one.leader is not None
    spoilt = tuple(replace(t, clocks={**t.clocks, "disturbed": 2.0}) for t in one.leader.timings)
    data = replace(data, workloads=(replace(one, leader=replace(one.leader, timings=spoilt)),))
    assert "(disturbed)" in headline(data.workloads[0])
    page = Page(render_page(data))
    assert sum(a.get("class") == "mark" for tag, a in page.tags if tag == "abbr") >= 3
    assert "do not trust the figure" in page.text


def test_what_no_final_confirmed_is_said_to_be_the_searchs_own_figure(pages: dict[str, Page]) -> None:
    text = pages["nofinals"].text
    assert "not confirmed by finals" in text
    assert "was interrupted" in text
    assert "No noise floor was recorded" in text


def test_a_run_of_failures_tells_what_broke_and_draws_no_line(
    known: dict[str, RunOutcome], pages: dict[str, Page]
) -> None:
    said = "Nothing was found: of 30 candidates none passed the gate and its timed calls."
    assert headline(known["failures"].workloads[0]) == said
    assert "compile error" in pages["failures"].text
    assert "Against candidates evaluated" not in pages["failures"].text


def test_a_run_without_candidates_still_says_how_it_was_set_up(pages: dict[str, Page]) -> None:
    text = pages["empty"].text
    assert "nothing was evaluated" in text
    assert "How to reproduce" in text


def test_a_kernel_that_is_gone_is_named_as_what_is_not_known(pages: dict[str, Page]) -> None:
    assert "the kernel cannot be loaded here any more" in pages["gone"].text


def test_records_that_are_missing_leave_their_sentences_out(known: dict[str, RunOutcome]) -> None:
    data = known["one"]
    one = data.workloads[0]
    assert one.leader is not None
    bare = replace(one, leader=replace(one.leader, build=None, checks=(), timings=()), steps=())
    sparse = replace(data.run, environment={"device": "a GPU"}, options={}, budget={}, stop_reason="")
    text = Page(render_page(replace(data, run=sparse, workloads=(bare,)))).text
    assert "Right first" not in text
    assert "a GPU" in text


def test_several_workloads_have_a_section_each(pages: dict[str, Page]) -> None:
    anchors = [a.get("id") for tag, a in pages["two"].tags if tag == "section"]
    assert anchors == ["w1", "w2", "measured", "environment", "again"]
    assert "on 2 workloads" in pages["two"].text


def test_a_beginning_of_a_name_finds_the_run(database: Path) -> None:
    with Store.open(database, write=False) as store:
        assert read_outcome(store, "nof").run.name == "nofinals"


def test_a_kernel_of_somebody_elses_is_not_run_unless_it_is_the_one_of_the_run(
    known: dict[str, RunOutcome], tmp_path: Path
) -> None:
    folder = tmp_path / "kernel"
    shutil.copytree(template_root() / "layernorm", folder)
    run = replace(known["one"].run, kernel=str(folder), kernel_digest=load_kernel(str(folder)).digest)
    assert read_problem(run).changed == ""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "kernel.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    assert "has changed" in read_problem(replace(run, kernel=str(trap))).changed
    assert not (tmp_path / "sprung").exists()
