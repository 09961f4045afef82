"""A kernel as a whole is checked as a search would meet it: every branch built, gated, and run at the size that is timed."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from evo import cli
from evo.errors import UsageError
from evo.evaluation import Measurement
from evo.executors import MeasureRequest
from evo.problem.kernel import load_kernel
from evo.search.check import BranchPlan, check_branches
from tests.landscape import LandscapeExecutor
from tests.toy_kernel import write_kernel

TEMPLATE = """
extern "C" void twice(const float* x, float* y, long long n) {
    for (long long i = 0; i < n; ++i) y[i] = 2 * x[i];
{% if p.mode == "wrong" %}
    y[n - 1] = 3;
{% elif p.mode == "wrong_when_timed" %}
    if (n == 4096) for (int i = 0; i < n; ++i) y[i] = 3;
{% elif p.mode == "breaks_when_timed" %}
    if (n == 4096) __builtin_trap();
{% endif %}
}
"""
MODES = ("honest", "wrong", "wrong_when_timed", "breaks_when_timed")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernel(tmp_path_factory.mktemp("check") / "toy", MODES, template=TEMPLATE)


def check(kernel: Path, *more: str) -> int:
    return cli.run(["check", str(kernel), "--target", "cpu", "--db", str(kernel.parent / "lineage.db"), *more])


def test_a_branch_is_refused_for_what_it_does_at_the_size_that_is_timed(
    kernel: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert check(kernel, "--json") == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    document: dict[str, Any] = json.loads(captured.out)
    found = {b["changes"].get("mode", "honest"): (b["gate"], b["cases"], b["timed"]) for b in document["branches"]}
    assert found == {
        "honest": ("ok", 3, "ok"),
        "wrong": ("wrong", 1, "not run"),
        "wrong_when_timed": ("ok", 3, "wrong"),
        "breaks_when_timed": ("ok", 3, "trap"),
    }
    assert document["not_timed"] == []
    assert check(kernel) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if " mode=wrong_when_timed " in line]
    assert line.split()[-3:] == ["3", "ok", "wrong"]
    assert "4 of 4 branches compiled, 3 of 4 passed the gate, 1 of 4 at the size that is timed (seed " in out


class Small(LandscapeExecutor):
    """On whose machine the data of no timing fit."""

    asked: list[bool]

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        self.asked.append(request.time)
        if not request.time:
            return super().measure(request)
        refused: Future[Measurement] = Future()
        refused.set_exception(UsageError("the data do not fit"))
        return refused


def test_a_workload_whose_data_do_not_fit_is_gated_all_the_same() -> None:
    kernel = load_kernel("layernorm")
    own = kernel.example("cpu")
    plan = BranchPlan(
        kernel_name="layernorm",
        kernel=kernel,
        target="cpu",
        arch="native",
        workloads=(own,),
        timed=frozenset({own}),
        gate=True,
        seed=1,
    )
    executor = Small(1)
    executor.asked = []
    try:
        branches, untimed = check_branches(executor, plan, lambda standing: None)
    finally:
        executor.close()
    assert untimed == {own: "the data do not fit"}
    assert executor.asked == [True, *[False] * sum(b.measurement is not None for b in branches)]
    assert not any(b.timed for b in branches)
