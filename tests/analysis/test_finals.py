"""What is printed of a record: figures that are not to be trusted say so, and every figure says what it is beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from evo.evaluation import FINALIST, Evaluation, Timing
from evo.lineage import RunStatus, Stage
from evo.lineage import models as m
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.report.terminal import time_cells, timing_record
from tests.ended import Ended, run_here
from tests.lineage import samples as s

MARK = "! too busy: other programs or throttling disturbed this time, so that its speed-up is not known"
CALM, BUSY, EARLIER = {"power_w": 61.0}, {"power_w": 61.0, "disturbed": 12.0}, {"power_w": 59.5}


@dataclass(frozen=True)
class Recorded:
    """A database of one run, and commands asked of it. Candidates: 0 won, 1 lost to it, 2 was refused by the finals."""

    db: str
    ids: tuple[str, ...]
    capsys: pytest.CaptureFixture[str]

    def ask(self, *arguments: str) -> Ended:
        return run_here(self.capsys, *arguments, "--db", self.db)

    def document(self, *arguments: str) -> Any:
        return self.ask(*arguments, "--json").document


Record = Callable[..., Recorded]


@pytest.fixture
def record(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Record:
    """Records a run whose last race was taken with these clocks."""
    monkeypatch.setenv("COLUMNS", "500")

    def make(clocks: dict[str, float], missing_kinds: tuple[str, ...] = ()) -> Recorded:
        lacking = {"missing_kinds": {s.SMALL.key: [*missing_kinds]}} if missing_kinds else {}
        spec = replace(s.SPEC, name="mine", workloads=(s.SMALL,), options={**s.SPEC.options, **lacking})
        db = tmp_path / "lineage.db"
        with Store.open(db, write=True) as store:
            run = store.create_run(spec, s.ENVIRONMENT)
            for order, ratio in enumerate((0.5, 0.6, 0.55)):
                store.add(run, s.ref(order, *([0] if order else [])), s.passed(order, ratio), elapsed_s=1.0)
            raced = final(FINALIST, 0.52, EARLIER)
            store.add_final(run, 0, measured(final("candidate", 0.52, clocks), raced), elapsed_s=2.0)
            store.add_final(run, 1, measured(final("candidate", 0.62, EARLIER)), elapsed_s=2.0)
            store.add_final(run, 2, s.refused_final(), elapsed_s=2.0)
            beside = [
                final("twin", 0.521, {**clocks, "noise_floor": 0.004}),
                replace(final("torch", 1.0, clocks), ratio=None, ratio_low=None, ratio_high=None),
                final("copy", 0.48, clocks),
            ]
            store.add_baselines(run, 0, beside, stage=Stage.FINAL)
            store.set_winner(run, 0, 0)
            store.set_status(run, RunStatus.FINISHED, reason="time is up", elapsed_s=3.0)
            ids = tuple(public_id(run.uid, order) for order in range(3))
        return Recorded(str(db), ids, capsys)

    return make


def final(contender: str, ratio: float, clocks: dict[str, float]) -> Timing:
    return replace(s.timing(s.SMALL, ratio, contender=contender), protocol="final", clocks=clocks)


def measured(*timings: Timing) -> Evaluation:
    return replace(s.final(0.5), timings=timings)


@pytest.mark.parametrize(("clocks", "disturbed"), [(BUSY, True), (CALM, False)])
def test_a_disturbed_final_is_marked_wherever_its_figure_is_printed(
    record: Record, clocks: dict[str, float], disturbed: bool
) -> None:
    recorded = record(clocks)
    for command, lines in ((["runs"], 1), (["best"], 1), (["show", recorded.ids[0]], 4)):
        told = recorded.ask(*command).out
        assert told.count(MARK) == disturbed, command
        assert len([line for line in told.splitlines() if " !  " in line]) == lines * disturbed, command
        assert ("too busy" in told) is disturbed, command
        assert ("1.923x" in told) is not disturbed or command[0] == "show", command
    assert ("±0.40%" in recorded.ask("best").out) is ("±0.40%" in recorded.ask("show", recorded.ids[0]).out) is not disturbed
    told = recorded.ask("diff", recorded.ids[0], recorded.ids[1]).out
    assert (" !" in told) is disturbed
    assert "too busy to compare" not in told, "their one race was not disturbed"
    (best,) = recorded.document("best")
    (run,) = recorded.document("runs")
    shown = recorded.document("show", recorded.ids[0])
    assert best["disturbed"] is run["best"][0]["disturbed"] is disturbed
    assert (best["speedup"] is None) is disturbed
    assert best["finals"] == ("too busy to measure" if disturbed else "confirmed")
    assert [t["disturbed"] for t in shown["timings"]] == [False, False, disturbed, False]
    assert [t["disturbed"] for t in shown["final_races"][0]["timings"]] == [disturbed] * 3
    assert [step["disturbed"] for step in recorded.document("lineage", recorded.ids[1])] == [False, False]


def test_a_winner_whose_race_was_disturbed_has_the_same_time_in_every_command(record: Record) -> None:
    recorded = record(BUSY)
    with Store.open(recorded.db, write=True) as store, store.transaction() as connection:
        confirming = (m.Timing.contender == "candidate", m.Timing.round == 1)
        connection.execute(update(m.Timing).where(*confirming).values(median_us=18.0))
        connection.execute(update(m.Build).values(cached=True))
    time = "18 us !"
    shown = recorded.ask("show", "mine").out
    assert f"{recorded.ids[0][:10]} ran once more ({time}): too busy to measure: " in shown
    assert shown.count("is the race of all finalists, on new data. It decides the winner, unless it was") == 1
    assert f"; {time} in the final" in recorded.ask("explain", recorded.ids[0]).out
    assert time in recorded.ask("best").out
    assert "a candidate, built from the cache, took on average " in shown


def test_a_run_is_followed_to_its_end_and_listed_with_the_words_of_the_others(record: Record) -> None:
    recorded = record(CALM)
    told = recorded.ask("watch", "mine").out.splitlines()
    assert told[0] == "mine: finished, 3 candidates (3 passed the search)"
    assert told[1:] == recorded.ask("best", "--run", "mine").out.splitlines()
    with Store.open(recorded.db, write=True) as store:
        run = store.create_run(replace(s.SPEC, name="new"), s.ENVIRONMENT)
        store.set_status(run, RunStatus.RUNNING, elapsed_s=0.0)
        assert "0 ms" not in recorded.ask("runs").out


def test_a_candidate_that_was_disturbed_in_the_search_has_no_score_and_no_figure(record: Record) -> None:
    recorded = record(CALM)
    with Store.open(recorded.db, write=True) as store:
        evaluation = s.passed(3, 0.4)
        slow = replace(evaluation.timings[0], clocks=BUSY)
        spoilt = replace(evaluation, timings=(slow, *evaluation.timings[1:]))
        run = store.run("mine")
        store.add(run, s.ref(3, 0), spoilt, elapsed_s=4.0)
    name = public_id(run.uid, 3)
    assert MARK[2:] in recorded.ask("explain", name).out
    assert "too busy to compare: something slowed the device down in the search" in recorded.ask("diff", name, "mine").out
    told = recorded.ask("lineage", name)
    assert told.out.count(MARK) == 1
    [marked] = [line for line in told.out.splitlines() if " !" in line]
    assert marked.count(" !") == 2, "time and speed-up"
    assert "too busy !" in marked
    assert recorded.document("show", name)["score"] is None
    assert [found["disturbed"] for found in recorded.document("pareto", "mine", "--axes", "time")] == [False]


def test_a_final_within_the_noise_floor_of_the_baseline_is_a_tie_in_every_command(record: Record) -> None:
    recorded = record(CALM)
    with Store.open(recorded.db, write=True) as store:
        store.add_final(store.run("mine"), 0, measured(final("candidate", 0.999, CALM)), elapsed_s=5.0)
    for command in (["runs"], ["best"], ["show", "mine"]):
        assert "tie" in recorded.ask(*command).out.split(), command
    out = recorded.ask("show", recorded.ids[0]).out
    assert "tie" in next(line for line in out.splitlines() if line.startswith("final 2")).split()
    assert "a tie within ±0.40%, the noise floor" in out


def test_a_finalist_that_was_refused_says_by_whom(record: Record) -> None:
    recorded = record(CALM)
    out = recorded.ask("show", recorded.ids[2]).out
    assert "ok in the search, refused by the finals: wrong" in out
    assert "not so right" in out
    (run,) = recorded.document("runs")
    assert (run["passed"], run["refused_in_finals"]) == (3, 1)
    assert recorded.ask("runs").out.splitlines()[1].split()[5:8] == ["finished", "3", "2"]


@pytest.mark.parametrize("command", ["diff", "lineage", "explain"])
def test_a_run_where_a_candidate_is_wanted_stands_for_its_winner(record: Record, command: str) -> None:
    recorded = record(CALM)
    other = [recorded.ids[1]] if command == "diff" else []
    ended = recorded.ask(command, "mine", *other)
    assert ended.code == 0
    assert ended.out == recorded.ask(command, recorded.ids[0], *other).out


def in_one_race(ratios: dict[int, float], confirmed: float) -> dict[int, Evaluation]:
    """By order: measurements of a race of forty rounds, of which the first won; it was confirmed at another ratio, in a race
    in which everything took twice as long."""
    found = {}
    for i, (order, ratio) in enumerate(ratios.items()):
        rounds = tuple(20.1 * ratio * (1 + 0.2 * (k % 2) + 0.001 * (k % 3)) for k in range(40))
        timing = replace(final("candidate", ratio, CALM), samples_us=rounds)
        timings = [timing]
        if not i:
            slow = tuple(40.2 * confirmed * (1 + 0.002 * (k % 5)) for k in range(40))
            again = replace(final("candidate", confirmed, EARLIER), median_us=40.2 * confirmed, samples_us=slow)
            timings = [again, replace(timing, contender="finalist")]
        found[order] = replace(s.final(0.5), timings=tuple(timings))
    return found


def raced_anew(recorded: Recorded, confirmed: float = 0.7, near: float = 0.52052) -> list[str]:
    """A final of 0, 1 and 3, of which 3 is a little behind 0. Identifiers of them."""
    with Store.open(recorded.db, write=True) as store:
        run = store.run("mine")
        store.add(run, s.ref(3, 0), s.passed(3, 0.53), elapsed_s=4.0)
        for order, measurement in in_one_race({0: 0.52, 1: 0.62, 3: near}, confirmed).items():
            store.add_final(run, order, measurement, elapsed_s=5.0)
        beside = [final("twin", confirmed, {**EARLIER, "noise_floor": 0.004}), final("copy", 0.48, EARLIER)]
        store.add_baselines(run, 0, beside, stage=Stage.FINAL)
        return [public_id(run.uid, order) for order in (0, 1, 3)]


def test_finalists_are_compared_by_the_race_that_all_of_them_ran_in(record: Record) -> None:
    """The machine had changed when the winner was confirmed: its figure there is no worse for the others."""
    recorded = record(CALM)
    winner, last, near = raced_anew(recorded)
    (held,) = recorded.document("show", "mi")["finals"]
    assert (held["winner"], held["one_race"]) == (winner, True)
    assert [(f["id"], f["order"], f["ratio"]) for f in held["finalists"]] == [
        (winner, 0, 0.52), (near, 3, 0.52052), (last, 1, 0.62)
    ]  # fmt: skip
    assert (held["confirmed"]["ratio"], held["confirmed"]["median_us"]) == (0.7, pytest.approx(28.14))
    by_id = {f["id"]: f for f in held["finalists"]}
    assert by_id[last]["behind"] == pytest.approx(0.62 / 0.52)
    assert by_id[near]["behind"] == pytest.approx(1.001)
    assert by_id[near]["tie"] is False, "round by round it is behind in all of them, whatever the rounds have in common"
    for f in held["finalists"][1:]:
        between = recorded.document("diff", f["id"], winner)
        assert (between["timed_in"], between["one_race"]) == ("final", True)
        assert [f["behind"], f["behind_low"], f["behind_high"], f["tie"]] == [
            between[name] for name in ("gain", "gain_low", "gain_high", "tie")
        ]
        rows = {row["name"]: (row["one"], row["other"]) for row in between["rows"] if row["section"] == "time"}
        assert rows["final median_us"][1] == pytest.approx(10.452)
        assert rows["confirmed median_us"] == (None, pytest.approx(28.14))
    out = recorded.ask("show", "mine").out
    rows_shown = [line.split() for line in out.splitlines() if " #" in line]
    assert [row[:2] for row in rows_shown[:3]] == [[winner[:10], "#0"], [near[:10], "#3"], [last[:10], "#1"]]
    assert rows_shown[0][2] == "10.45"
    assert "winner" in rows_shown[0]
    assert f"finalist {recorded.ids[2][:10]} #2 was refused: wrong" in out
    (told,) = (line for line in out.splitlines() if line.startswith("confirmed: "))
    for said in ("28.14 us", "1.429x", "the figure to quote"):
        assert said in told
    assert "the winner's two races do not agree" in out
    assert held["times_ceiling"] == pytest.approx(28.14 / 9.648)
    assert "takes 2.92 times as long as copy, which moves as many bytes: up to 66% of its time may be left" in out
    out = recorded.ask("diff", last, winner, "--no-source").out
    assert f"{winner[:10]} is 1.192x as fast in the finals" in out
    assert "round by round in one race" in out


def test_a_winner_is_shown_in_both_of_its_races_and_a_finalist_beside_the_second(record: Record) -> None:
    recorded = record(CALM)
    winner, last, near = raced_anew(recorded, near=0.52)
    (held,) = recorded.document("show", "mine")["finals"]
    assert {f["id"]: f["tie"] for f in held["finalists"]}[near] is True
    row = next(line for line in recorded.ask("show", "mine").out.splitlines() if line.startswith(near[:10]))
    assert "tie" in row.split()
    out = recorded.ask("show", winner).out
    rows = [line for line in out.splitlines() if line.startswith("final 2")]
    assert [line.split()[:6] for line in rows] == [
        ["final", "2,", "all", "finalists", "cold", "candidate"],
        ["final", "2", "cold", "candidate", "28.14", "us"],
        ["final", "2", "cold", "twin", "14.07", "us"],
        ["final", "2", "cold", "copy", "9.65", "us"],
    ]
    assert "all finalists: the race that chose the winner" in out
    repeated = [line for line in out.splitlines() if line.startswith("to repeat the ")]
    assert [line.endswith(f" --db {recorded.db}") for line in repeated] == [True, True]
    other = recorded.ask("show", last).out
    assert "final 2, all finalists  cold   candidate" in other
    assert "final 2, winner's race  cold   twin" in other
    assert "which then ran once more (without those that lost: winner's race)" in other
    beside = [recorded.document("show", name)["final_races"][-1]["beside"] for name in (winner, last)]
    assert beside == [True, False]


def test_each_of_several_finals_has_its_own_baselines_and_of_a_run_the_last_is_shown(record: Record) -> None:
    recorded = record(CALM)
    with Store.open(recorded.db, write=True) as store:
        run = store.run("mine")
        store.add_final(run, 0, measured(final("candidate", 0.51, BUSY)), elapsed_s=5.0)
        store.add_baselines(run, 0, [final("copy", 0.47, BUSY)], stage=Stage.FINAL)
    races = recorded.document("show", recorded.ids[0])["final_races"]
    assert [(r["round"], [(t["contender"], t["ratio"]) for t in r["timings"]]) for r in races] == [
        (1, [("twin", 0.521), ("torch", None), ("copy", 0.48)]),
        (2, [("copy", 0.47)]),
    ]
    (held,) = recorded.document("show", "latest")["finals"]
    assert [(f["order"], f["ratio"], f["disturbed"]) for f in held["finalists"]] == [(0, 0.51, True)]
    out = recorded.ask("show", "mine").out
    assert out.count(MARK) == 1
    assert "that is the figure to quote" not in out


def test_the_very_name_of_a_run_goes_before_the_beginning_of_an_identifier(record: Record) -> None:
    recorded = record(CALM)
    name = recorded.ids[0][:4]
    with Store.open(recorded.db, write=True) as store:
        store.create_run(replace(s.SPEC, name=name, workloads=(s.SMALL,)), s.ENVIRONMENT)
    assert recorded.document("show", name)["name"] == name
    assert recorded.document("show", recorded.ids[0][:5])["id"] == recorded.ids[0]


def test_a_run_whose_process_is_gone_is_interrupted_and_how_to_continue_it_is_said(record: Record) -> None:
    recorded = record(CALM)
    with Store.open(recorded.db, write=True) as store:
        store.create_run(replace(s.SPEC, name="killed", workloads=(s.SMALL,)), s.ENVIRONMENT)
        assert "running" in recorded.ask("runs").out, "while this process has it open for writing"
    out = recorded.ask("runs").out
    assert next(line for line in out.splitlines() if line.startswith("killed")).split()[5] == "interrupted"
    assert f"evo resume killed --db {recorded.db}" in out
    assert recorded.document("runs")[0]["stop_reason"] == "its process ended without saying why"
    out = recorded.ask("show", "killed").out
    assert "interrupted: its process ended without saying why" in out
    assert f"evo resume killed --db {recorded.db}" in out
    assert "resume" not in recorded.ask("show", "mine").out


def test_a_run_without_finals_says_so(record: Record) -> None:
    recorded = record(CALM)
    with Store.open(recorded.db, write=True) as store:
        run = store.create_run(replace(s.SPEC, name="other", workloads=(s.SMALL,)), s.ENVIRONMENT)
        store.add(run, s.ref(0), s.passed(0), elapsed_s=1.0)
    out = recorded.ask("show", "other").out
    assert f"no final has named a winner; the best candidate so far: evo show {public_id(run.uid, 0)[:10]}" in out
    ended = recorded.ask("show", "othre")
    assert (ended.code, ended.out) == (2, "")
    assert ended.sentence == "evo: unknown run or candidate 'othre'; did you mean other?"


def test_a_figure_is_rounded_once() -> None:
    """1.55547 is 1.555, and not 1.5555 and then 1.556: at the end of a search as everywhere."""
    timing = replace(final("candidate", 1 / 1.55547, CALM), median_us=45.2549)
    found = timing_record(timing)
    assert f"{found['speedup']:.3f}" == "1.555"
    assert f"{found['median_us']:.2f}" == "45.25"
    cells = time_cells(timing, 0.0202546)
    assert (cells[">median"], cells[">speed-up"]) == ("45.25 us", "1.555x")
    assert time_cells(replace(timing, median_us=12345.6), 0.02)[">median"] == "12.35 ms"


def unconfirmed(recorded: Recorded) -> str:
    """One more run, whose finals refused both of its finalists; a third candidate was in none. Its identifier."""
    with Store.open(recorded.db, write=True) as store:
        run = store.create_run(replace(s.SPEC, name="vain", workloads=(s.SMALL,)), s.ENVIRONMENT)
        for order, ratio in enumerate((0.2, 0.25, 0.3)):
            store.add(run, s.ref(order), s.passed(order, ratio), elapsed_s=1.0)
        for order in range(2):
            store.add_final(run, order, s.refused_final(), elapsed_s=2.0)
        store.set_status(run, RunStatus.FINISHED, reason="time is up", elapsed_s=3.0)
        return public_id(run.uid, 2)


def test_a_candidate_of_a_run_whose_finals_confirmed_nobody_is_marked(record: Record) -> None:
    recorded = record(CALM)
    left = unconfirmed(recorded)
    note = "? unconfirmed: the finals refused their finalists and have no winner"
    for command, arguments in (("runs", []), ("best", ["--run", "vain"])):
        out = recorded.ask(command, *arguments).out
        (row,) = (line for line in out.splitlines() if "vain" in line and "3.333x" in line)
        assert "3.333x ? " in row, command
        assert out.count("?") == 2, command
        assert note in out, command
        assert "evo show vain" in out, command
    assert "speed-up: over the reference, in the same race" in recorded.ask("best").out
    (found,) = recorded.document("best", "--run", "vain")
    assert (found["id"], found["winner"]) == (left, False)
    assert (found["finals"], found["refused_finalists"]) == ("unconfirmed", 2)
    by_name = {run["name"]: run["best"][0] for run in recorded.document("runs")}
    assert {name: (b["finals"], b["refused_finalists"]) for name, b in by_name.items()} == {
        "vain": ("unconfirmed", 2), "mine": ("confirmed", 1)
    }  # fmt: skip
    assert "unconfirmed: the finals have no winner; the best candidate so far: evo show " + left[:10] in (
        recorded.ask("show", "vain").out
    )
    (first,) = recorded.document("best")
    assert (first["run"], first["finals"]) == ("mine", "confirmed"), "what is confirmed goes before"
    assert "?" not in recorded.ask("best").out
    first, second = recorded.document("compare", "vain", "mine")["rows"]
    assert (first["run"], first["finals"], first["behind"]) == ("mine", "confirmed", 1.0)
    assert (second["run"], second["best"], second["finals"]) == ("vain", left, "unconfirmed")
    assert second["behind"] == pytest.approx(0.3 / 0.52), "over what was confirmed"
    out = recorded.ask("compare", "vain", "mine").out
    assert "3.333x ?" in out
    assert "? unconfirmed: the finals refused their finalists and have no winner" in out
    assert "1.923x ?" not in out


def test_a_winner_whose_gate_lacks_cases_is_named_but_confirmed_nowhere(record: Record) -> None:
    recorded = record(CALM, missing_kinds=("nan", "one row"))
    said = "not confirmed: the gate has no case of these kinds: nan, one row"
    for command, arguments in (("runs", []), ("best", [])):
        out = recorded.ask(command, *arguments).out
        assert "1.923x ? " in out, command
        assert f"? {said}" in out, command
    (best,) = recorded.document("best")
    assert (best["id"], best["winner"], best["finals"]) == (recorded.ids[0], True, said)
    (held,) = recorded.document("show", "mine")["finals"]
    assert (held["winner"], held["not_confirmed"]) == (recorded.ids[0], said)
    shown = recorded.ask("show", "mine").out
    assert said in shown
    assert "1.923x" in shown
    assert "confirmed: " not in shown.replace("not confirmed: ", "")
    page = Path(recorded.db).parent / "page.html"
    assert recorded.ask("report", "mine", "--out", str(page)).code == 0
    assert f"1.923× the speed of PyTorch, {said}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.INTERRUPTED])
def test_a_run_whose_finals_are_not_over_has_not_confirmed_nobody(record: Record, status: RunStatus) -> None:
    """None was held yet, or a batch of finalists was refused and the next best have their turn."""
    recorded = record(CALM)
    left = unconfirmed(recorded)
    with Store.open(recorded.db, write=True) as store:
        soon = store.create_run(replace(s.SPEC, name="soon", workloads=(s.SMALL,)), s.ENVIRONMENT)
        store.add(soon, s.ref(0), s.passed(0, 0.4), elapsed_s=1.0)
        for name in ("soon", "vain"):
            store.set_status(store.run(name), status, elapsed_s=3.0)
        for name, refused in (("soon", 0), ("vain", 2)):
            (found,) = recorded.document("best", "--run", name)
            assert (found["finals"], found["refused_finalists"]) == ("not held", refused)
            assert "?" not in recorded.ask("best", "--run", name).out
        assert "?" not in recorded.ask("compare", "soon", "mine").out
        out = recorded.ask("show", "vain").out
    assert "unconfirmed" not in out
    assert "no final has named a winner; the best candidate so far: evo show " + left[:10] in out
