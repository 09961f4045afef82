"""What a running search shows, and what it waits for."""

from __future__ import annotations

import io
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from evo.executors import InFlight
from evo.lineage import Environment
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.report import progress as screen
from evo.report.outcome import unfinished
from evo.report.progress import LiveScreen, PlainLines, busy_share
from evo.search.finals import Step
from evo.search.loop import Budget, Improvement, Progress, Search, StopReason
from tests.landscape import Hanging, opened, random_search
from tests.lineage import samples as s

WORKLOADS = (Workload.of({"n": 4096}, "float32"),)


def progress(clocks: dict[str, float]) -> Progress:
    timing = replace(s.timing(WORKLOADS[0], 0.5), ratio_low=0.4, ratio_high=0.625, clocks=clocks)
    found = Improvement(elapsed_s=3.0, task=0, order=12, ratio=0.5, timing=timing)
    return Progress(finished=20, elapsed_s=3.0, best={0: found}, improvements=[found])


@pytest.mark.parametrize("live", [False, True])
def test_a_better_candidate_is_shown_with_no_figure_that_finals_will_correct(live: bool) -> None:
    told = shown(live, progress({}))
    assert "about 2x" in told
    assert "2.000" not in told
    assert "1.600" not in told


def test_what_a_resumed_run_had_found_before_is_told_as_that_and_only_the_best_of_it() -> None:
    new = progress({}).improvements[0]
    old = [replace(new, order=order, elapsed_s=elapsed_s, replayed=True) for order, elapsed_s in ((2, 0.5), (9, 1.0))]
    lines = shown(False, Progress(improvements=[*old, new])).splitlines()
    assert len(lines) == 2
    assert "kept from before: candidate 9 is about 2x" in lines[0]
    assert "4096 float32: candidate 12 is about 2x" in lines[1]


def shown(live: bool, *updates: Progress) -> str:
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=live, color_system=None)
    names = [str(workload) for workload in WORKLOADS]
    observer = LiveScreen(console, "evo search", names, Budget(seconds=9)) if live else PlainLines(console, names)
    with observer:
        for update in updates:
            observer.update(update)
    return out.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_what_has_passed_is_shown_also_where_the_machine_is_too_busy(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    found = progress({}).improvements[0]
    told = shown(live, replace(progress({}), measuring=3, on_device=1))
    assert ("best about 2x PyTorch (candidate 12)" in told) is not live
    assert "compiling 0, measuring 1, 2 waiting" in told
    busy = replace(found, timing=replace(found.timing, clocks={"disturbed": 16.0}))
    assert "too busy" in shown(live, Progress(finished=1, unsure={0: busy}))


@pytest.mark.parametrize("live", [False, True])
def test_finals_have_a_step_and_a_time_left(live: bool) -> None:
    step = Step(workload=WORKLOADS[0], text="gate, finalist 3 of 8", spent_s=2.0, left_s=12.0)
    out = io.StringIO()
    console = Console(file=out, width=150, force_terminal=live, color_system=None)
    names = [str(WORKLOADS[0])]
    observer = LiveScreen(console, "evo search", names, Budget(seconds=9)) if live else PlainLines(console, names)
    with observer:
        observer.finals(step, names[0])
        observer.finals(replace(step, text="race of 8 finalists"), names[0])
    assert "finals of 4096 float32: gate, finalist 3 of 8" in out.getvalue()
    assert re.search("about 1[12] s left", out.getvalue())
    assert ("race of 8 finalists" in out.getvalue()) is live, "a line now and then off a terminal"


def test_a_log_has_a_line_for_what_is_better_and_for_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    log = screen.JsonLog(tmp_path / "log.jsonl", "night", ["4096"])
    log.update(progress({}))
    log.update(progress({}))  # what was told is not told again
    log.end("time is up", None)
    told = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [t["event"] for t in told] == ["begun", "better", "progress", "progress", "ended"]
    assert (told[1]["order"], told[1]["speedup"], told[1]["workload"]) == (12, 2.0, "4096")
    assert {t["run"] for t in told} == {"night"}


def held_up(seconds: float, stage: str = "gate") -> Progress:
    genome = Genome.of({"unroll": 1})
    work = InFlight(genome=genome, workload=WORKLOADS[0], stage=stage, seconds=seconds, left_s=25.0)
    return Progress(measuring=1, first_measured_s=0.0, elapsed_s=seconds, waiting=(7, work))


@pytest.mark.parametrize("live", [False, True])
def test_who_keeps_a_search_waiting_is_named_with_when_that_ends(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    said = "waiting for candidate 7: in the gate for 5 s; without a result it is ended in 25 s"
    assert said in shown(live, held_up(5.0))
    assert "waiting for" not in shown(live, held_up(1.0))


def test_that_a_device_is_prepared_is_said_once_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    begins = [replace(held_up(seconds, "ready"), begun=False) for seconds in (1.0, 6.0)]
    lines = shown(False, *begins, held_up(5.0), *(held_up(seconds, "ready") for seconds in (5.0, 10.0))).splitlines()
    said = ("preparing the device; the time of", "in the gate for 5 s", "candidate 7: preparing the device for 5 s")
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True)), lines


def test_the_end_of_a_search_says_whom_it_still_waited_for() -> None:
    assert unfinished(held_up(6.5)) == {"order": 7, "what": "in the gate", "seconds": 6.5}
    assert unfinished(held_up(1.0)) is None
    assert unfinished(Progress()) is None


def test_a_candidate_that_is_not_finished_keeps_the_device_busy() -> None:
    assert busy_share(held_up(10.0)) == 1.0
    assert busy_share(held_up(10.0, "build")) == 0.0
    assert busy_share(replace(held_up(10.0), devices=2)) == 0.5


class Looking:
    def __init__(self, executor: Hanging) -> None:
        self._executor, self.waited_for = executor, list[tuple[int, InFlight]]()

    def __call__(self, progress: Progress) -> None:
        if progress.waiting is not None:
            self.waited_for.append(progress.waiting)
            self._executor.seen.set()


def test_a_search_knows_which_candidate_it_waits_for(tmp_path: Path) -> None:
    executor = Hanging()
    observer = Looking(executor)
    with closing(executor), Store.open(tmp_path / "lineage.db", write=True) as store:
        run = store.create_run(random_search("layernorm"), Environment(device="a landscape", arch="none"))
        loop = Search(opened(run, store, executor), observer)
        assert loop.run() is StopReason.EVALUATIONS
        stored = store.evaluations(run)
    ((order, *_),) = {(order, work.stage, work.left_s) for order, work in observer.waited_for}
    assert executor.measured[0] == stored[order].candidate.proposal.genome.digest
    assert loop.progress.waiting is None
