"""A report says what a run found, in one file, whatever the run left behind."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from recorded import PLANS

from evo.analysis.outcome import RunOutcome, read_problem
from evo.problem.loading import load_kernel, template_root
from evo.report.page import render_page
from evo.report.sentences import headline, rows
from evo.report.text import duration, micro, visible

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
def pages(rendered: dict[str, str]) -> dict[str, Page]:
    return {name: Page(text) for name, text in rendered.items()}


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_a_page_is_well_formed_and_asks_for_nothing_outside_itself(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert not page.open
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    anchors = {a["href"] for tag, a in page.tags if tag == "a" and (a.get("href") or "").startswith("#")}
    assert {f"#{i}" for i in ids} >= anchors
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for attribute in ("src", "href", "action", "data", "srcset"):
            target = attributes.get(attribute)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
        assert not any(a.startswith("on") for a in attributes), f"{tag} has a program in an attribute"
        assert "style" not in attributes, f"the policy forbids the style of {tag}"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels


def test_tables_name_their_rows_and_columns_and_figures_say_what_is_to_be_seen(pages: dict[str, Page]) -> None:
    page = pages["two"]
    assert all(a.get("scope") in ("row", "col") for tag, a in page.tags if tag == "th")
    drawings = [a for tag, a in page.tags if tag == "svg"]
    assert len(drawings) == 16, "the lineage of each is there once more, for a phone"
    assert all(a["role"] in ("img", "group") and len(a["aria-label"] or "") > 20 for a in drawings)


def test_what_a_database_holds_stays_text(rendered: dict[str, str]) -> None:
    for name in ("two", "gone"):
        text = rendered[name]
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert visible("a\x00\x1b\u202e×\n\tc\ud800", lines=True) == r"a\x00\x1b\u202e×" + "\n\tc" + r"\ud800"


def test_a_finished_run_is_told_with_its_interval_its_noise_and_its_baselines(
    known: dict[str, RunOutcome], pages: dict[str, Page]
) -> None:
    data, text = known["one"].workloads[0], pages["one"].text
    timing, leader = data.timing, data.leader
    assert timing.stage == "final"
    assert headline(data) == f"{1 / timing.ratio:.3f}× the speed of PyTorch."
    assert re.search(r"copy ceiling [\d.]+ [\d.]+ to [\d.]+ [\d.]+× [\d.]+ to [\d.]+ 1.000 30", text)
    assert re.search(rf"{leader.id[:10]} winner .* torch reference 31.00 30.94 to 31.06 1 ", text)
    for said in (
        f"winner found after {duration(leader.elapsed_s)} {leader.id[:10]} #{leader.order}",
        "noise floor ±0.20%",
        "selection regret",
        "NVIDIA H200",
        "evo search layernorm",
        "--seed 1",
        "calls per sample 12",
    ):
        assert said in text, said


def test_a_page_numbers_candidates_as_the_commands_do(known: dict[str, RunOutcome], rendered: dict[str, str]) -> None:
    """Candidates are numbered by their order in the run, from 0, also where a run has several workloads."""
    two = known["two"].workloads[1]
    last = two.milestones[-1]
    assert last.order == 2 * (last.evaluated - 1) + 1
    page = rendered["two"]
    assert f"reached with #{last.order} after {last.evaluated} of 80 candidates" in page
    assert not re.search(r"candidate \d", page)


def test_the_finalists_are_listed_with_who_ties(known: dict[str, RunOutcome], pages: dict[str, Page]) -> None:
    one = known["one"].workloads[0]
    assert [f.winner for f in one.finals.finalists] == [True, False, False]
    listed = re.search(r"in the search (\w{10}) #(\d+) .*? winner .*?(\w{10}) #(\d+) .*?(\w{10}) #(\d+)", pages["one"].text)
    assert listed
    assert listed.groups() == tuple(x for f in one.finals.finalists for x in (f.id[:10], str(f.order)))
    assert "All of them in one race" not in pages["nofinals"].text


def test_finalists_are_told_by_their_one_race_and_the_winner_by_the_one_that_confirmed_it(
    known: dict[str, RunOutcome], pages: dict[str, Page]
) -> None:
    """The machine was a fifth slower when the winner was confirmed."""
    one, text = known["changed"].workloads[0], pages["changed"].text
    assert f"{1 / (one.leader.score * 1.01):.3f}×" in text, "the winner in the race of all finalists"
    assert "alone with the baselines, in a fresh process and on other data: its figure is the one to quote" in text
    assert f"winner {micro(one.timing.median_us)} " in text
    assert "The winner's two races do not agree: the speed-up was 16% less" in text
    assert "time over copy, the fastest baseline here that only moves the bytes" in text


def test_a_disturbed_figure_has_its_mark_wherever_it_stands(known: dict[str, RunOutcome]) -> None:
    data = known["one"]
    one = data.workloads[0]
    spoilt = tuple(replace(t, clocks={**t.clocks, "disturbed": 2.0}) for t in one.leader.timings)
    finals = replace(one.finals, disturbed=True, confirmed=None)
    data = replace(data, workloads=(replace(one, leader=replace(one.leader, timings=spoilt), finals=finals),))
    assert headline(data.workloads[0]) == "Not measured: the machine was too busy."
    page = Page(render_page(data))
    assert sum(a.get("class") == "mark" for tag, a in page.tags if tag == "abbr") >= 3
    assert "no speed-up of it is sure" in page.text
    assert "to time it again when the machine is quiet: evo resume one" in page.text
    assert "noise floor ±" not in page.text
    assert f"{one.leader.id[:10]} winner, time not known {micro(one.timing.median_us, True)} ! too busy ! 30" in page.text
    assert f"{1 / one.timing.ratio:.3f}×" not in page.text.partition("Convergence")[0]


def test_what_a_run_was_is_told_in_words_with_units(known: dict[str, RunOutcome]) -> None:
    environment = {
        "arch": "native", "nvrtc": "", "torch": "2.13.0", "cuda": "13.0",
        "details": {"cuda_driver": "13.0", "cores": "2", "cache_bytes": "33554432", "memory_bytes": "150754820096"},
    }  # fmt: skip
    assert rows(environment) == [
        ("architecture", "native"), ("PyTorch", "2.13.0"), ("CUDA", "13.0"), ("cores", "2"), ("last-level cache", "33.6 MB"),
        ("memory", "150.8 GB"),
    ]  # fmt: skip
    options = {"sampler": {"pool": 20}, "fixed": {"tile_w": 1024}, "starts": [], "origins": [], "gate_seed": 7}
    budget, counts = {"seconds": 600.0, "evaluations": 240, "patience": None}, {"ok": 214, "compile_error": 16}
    run = replace(
        known["one"].run, options=options, budget=budget, counts=counts, created="2026-11-29T23:55:22.305+00:00"
    )
    told = dict(rows(vars(run), "environment"))
    for name, value in {
        "seed of the proposals": "1", "seed of the gate's data": "7", "budget of time": "10 min 00 s",
        "budget of candidates": "240", "candidates": "240", "ended as ok": "214", "ended as compile error": "16",
        "fixed tile_w": "1024", "sampler option pool": "20", "started": "2026-11-29 23:55:22 UTC",
    }.items():  # fmt: skip
        assert told[name] == value, name
    assert not {"", "[]", "None"} & set(told.values())
    assert [name for name in told if "_" in name] == ["fixed tile_w"], "a parameter keeps its name"
    timing = dict(rows(vars(known["one"].workloads[0].timing), "task"))
    told = timing["median time"], timing["clock of the multiprocessors"], timing["power"]
    assert told == ("24.15 µs", "1,980 MHz", "410 W")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tie", ["a tie with PyTorch"]),
        ("nofinals", ["not confirmed by finals", "was interrupted", "No finals have timed this candidate"]),
        ("failures", ["nothing was found: of 30 candidates none passed the gate and its timed calls", "compile error"]),
        ("empty", ["nothing was evaluated", "How to reproduce"]),
        ("gone", ["the kernel cannot be loaded here any more"]),
        ("two", ["on 2 workloads"]),
    ],
)
def test_every_kind_of_run_says_what_it_is(pages: dict[str, Page], name: str, told: list[str]) -> None:
    for said in told:
        assert said in pages[name].text
    sections = [a.get("id") for tag, a in pages[name].tags if tag == "section"]
    assert sections == ["w1", *(["w2"] if name == "two" else []), "measured", "environment", "again"]
    assert ("Against candidates evaluated" in pages[name].text) is (name not in ("failures", "empty"))


def test_records_that_are_missing_leave_their_sentences_out(known: dict[str, RunOutcome]) -> None:
    data = known["one"]
    one = data.workloads[0]
    bare = replace(one, leader=replace(one.leader, build=None, checks=(), timings=()), steps=())
    sparse = replace(data.run, environment={"device": "a GPU"}, options={}, budget={}, stop_reason="")
    text = Page(render_page(replace(data, run=sparse, workloads=(bare,)))).text
    assert "The leader passed" not in text
    assert "a GPU" in text


def test_a_kernel_of_somebody_elses_is_not_run_unless_it_is_the_one_of_the_run(
    known: dict[str, RunOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "kernel"
    shutil.copytree(template_root() / "layernorm", folder)
    run = replace(known["one"].run, kernel=str(folder), kernel_digest=load_kernel(str(folder)).digest)
    assert read_problem(run).changed == ""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "kernel.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    assert "has changed" in read_problem(replace(run, kernel=str(trap))).changed
    assert not (tmp_path / "sprung").exists()
