"""What a search ends with: six lines at most, whatever it has found."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from recorded import WORKLOADS, Plan, record_run

from evo.analysis.finals import read_run_finals
from evo.lineage.store import Store
from evo.problem.loading import load_kernel
from evo.report.outcome import print_outcome
from evo.report.terminal import Terminal

MORE = tuple(f"rows={rows},cols=4096,dtype=float32" for rows in (64, 128, 192))


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
    with Store.open(tmp_path / "it.db", write=True) as store:
        record_run(store, plan)
        run = read_run_finals(store, "it")
    ended = {"search_s": 9.0, "stopped": "time is up", "incidents": {"processes lost": 1}, "first_failure": None}
    record = {**ended, "candidates": run.evaluations, "workloads": [{"refused_most": None} for _ in run.tasks]}
    out = io.StringIO()
    print_outcome(Terminal(file=out, width=200), record, run, load_kernel(run.kernel), "runs/lineage.db")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(said)
    assert len(lines) <= 6
    assert lines[-1].startswith("next:  evo show it")
    for held in run.finals if len(run.finals) < 4 else ():
        if (found := held.confirmed) is not None:
            assert f"{1 / found.ratio:.3f}x" in out.getvalue()
            assert f"({1 / found.ratio_high:.3f} to {1 / found.ratio_low:.3f})" in out.getvalue()
            assert f"±{held.noise_floor:.2%}" in out.getvalue()
