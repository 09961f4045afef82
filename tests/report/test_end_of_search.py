"""What a search ends with: six lines at most, whatever it has found."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import WORKLOADS, Plan, record_run

from evo.analysis.finals import RunFinals, read_run_finals
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.report.outcome import print_outcome
from evo.report.terminal import Terminal
from evo.report.text import short

MORE = tuple(f"rows={rows},cols=4096,dtype=float32" for rows in (64, 128, 192))


def ended(plan: Plan, folder: Path, *, busy: bool = False) -> tuple[RunFinals, str]:
    """A run, and the lines that its search ends with. busy: whether its winners could not be timed."""
    with Store.open(folder / "it.db", write=True) as store:
        record_run(store, plan)
        run = read_run_finals(store, "it")
    if busy:
        run = replace(run, finals=tuple(replace(held, confirmed=None, disturbed=True) for held in run.finals))
    end = {"search_s": 9.0, "stopped": "time is up", "incidents": {"processes lost": 1}, "first_failure": None}
    record = {**end, "candidates": run.evaluations, "workloads": [{"refused_most": None} for _ in run.tasks]}
    out = io.StringIO()
    print_outcome(Terminal(file=out, width=200), record, run, load_kernel(run.kernel), "runs/lineage.db")
    return run, out.getvalue()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(name="it", workloads=WORKLOADS[:1]), "winner "),
        (Plan(name="it", workloads=WORKLOADS), "4096x4096 float16: "),
        (Plan(name="it", workloads=(*WORKLOADS, *MORE)), "5 of 5 workloads have a winner; all of them:  evo best --run it"),
        (Plan(name="it", workloads=WORKLOADS[:1], finals=False), "no winner for 4096x4096 float16: "),
    ],
)
def test_a_search_ends_in_six_lines_that_fit_a_terminal(plan: Plan, said: str, tmp_path: Path) -> None:
    run, told = ended(plan, tmp_path)
    lines = told.splitlines()
    assert lines[0].startswith(said)
    assert len(lines) <= 6
    assert lines[-1].startswith("next:  evo show it")
    for held in run.finals if len(run.finals) < 4 else ():
        if (found := held.confirmed) is not None:
            assert f"{1 / found.ratio:.3f}x" in told
            assert f"({1 / found.ratio_high:.3f} to {1 / found.ratio_low:.3f})" in told
            assert f"±{held.noise_floor:.2%}" in told


@pytest.mark.parametrize("workloads", [WORKLOADS[:1], WORKLOADS, (*WORKLOADS, *MORE)])
def test_a_search_that_shows_no_speed_up_says_so_once_and_what_to_run(workloads: tuple[str, ...], tmp_path: Path) -> None:
    run, told = ended(Plan(name="it", workloads=workloads), tmp_path, busy=True)
    said = "no speed-up was shown, for other programs disturbed the race; on a quiet machine run:  evo resume it"
    assert told.splitlines().count(said) == 1
    assert told.count("evo resume it") == 1
    assert "noise floor" not in told
    if len(workloads) == 2:
        assert f"4096x4096 float16: candidate {short(run.finals[0].winner)}, too busy to measure" in told
