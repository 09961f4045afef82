"""What every executor promises that runs the CPU's target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evo.errors import UsageError
from evo.evaluation import Build, Status
from evo.executors import Executor, ExecutorConfig, find_executor
from evo.measure import RaceRequest, RaceResult
from evo.problem.kernel import Workload
from evo.testing import Suite
from evo.testing.toy_kernel import WORKLOAD, build_request, measure_request, write_kernel

CLUSTER = """
cluster: distributed.LocalCluster
options: {n_workers: 1, threads_per_worker: 3, resources: {device: 1}, dashboard_address: ":0"}
"""
MODES = ("honest", "wrong", "compile_error", "no_entry", "abort")
PATIENCE_S = 250.0


def config(folder: Path) -> ExecutorConfig:
    """With a cluster of one worker, for an executor that needs one."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER)
    return ExecutorConfig(builders=1, cache_dir=folder, gate_floor_s=6, scheduler=str(cluster))


def built(executor: Executor, kernel: Path, mode: str) -> Build:
    return executor.build(build_request(kernel, mode)).result(PATIENCE_S)


def raced(executor: Executor, kernel: Path, contenders: dict[str, tuple[str, Build]]) -> RaceResult:
    request = RaceRequest(
        kernel=str(kernel),
        target="cpu",
        workload=WORKLOAD,
        contenders=tuple((name, build_request(kernel, mode).genome, build) for name, (mode, build) in contenders.items()),
        baselines=("copy",),
        seed=1,
        limit_s=1.0,
    )
    return executor.race(request).result(PATIENCE_S)


class ExecutorSuite(Suite):
    """What every executor promises."""

    @pytest.fixture(scope="module")
    def kernel(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_kernel(tmp_path_factory.mktemp("kernels") / "toy", MODES)

    @pytest.fixture(scope="module")
    def executor(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
        opened = find_executor(name)("cpu", config(tmp_path_factory.mktemp("cache")))
        yield opened
        opened.close()

    def test_an_honest_candidate_is_gated_and_timed(self, executor: Executor, kernel: Path) -> None:
        build = built(executor, kernel, "honest")
        assert build.status is Status.OK, build.log
        measured = executor.measure(measure_request(kernel, build, "honest")).result(PATIENCE_S)
        assert measured.status is Status.OK, measured.log
        *own, drawn, timed = (c.case for c in measured.checks)
        assert (own, timed) == (["normal 5", "normal 64", "normal 1001"], "timed")
        assert drawn.startswith("n=4096,dtype=float32,data=normal")
        assert {t.contender for t in measured.timings} == {"candidate", "torch"}
        assert all(t.median_us > 0 for t in measured.timings)
        gated = executor.measure(measure_request(kernel, build, "honest", timed=False)).result(PATIENCE_S)
        assert (gated.status, gated.timings) == (Status.OK, ())
        assert executor.in_flight() == ()

    @pytest.mark.parametrize(
        ("mode", "status", "log"),
        [
            ("wrong", Status.WRONG, "n=1,dtype=float32,data=normal: y: 1 of 1 elements are outside the tolerance"),
            ("no_entry", Status.LOAD_ERROR, "'twice'"),
            ("abort", Status.TRAP, "died (SIGABRT) (and again, alone in a fresh process)"),
        ],
    )
    def test_a_bad_candidate_carries_the_reason_and_costs_only_itself(
        self, executor: Executor, kernel: Path, mode: str, status: Status, log: str
    ) -> None:
        honest, bad = built(executor, kernel, "honest"), built(executor, kernel, mode)
        crowd = ["honest", mode, mode, "honest"]  # asked for at once
        futures = [executor.measure(measure_request(kernel, honest if m == "honest" else bad, m)) for m in crowd]
        found = [f.result(PATIENCE_S) for f in futures]
        assert [m.status for m in found] == [Status.OK, status, status, Status.OK]
        assert [bool(m.timings) for m in found] == [True, False, False, True]
        assert log in found[1].log

    def test_a_build_that_fails_carries_the_compilers_words(self, executor: Executor, kernel: Path) -> None:
        build = built(executor, kernel, "compile_error")
        assert build.status is Status.COMPILE_ERROR
        assert "this candidate does not compile" in build.log
        assert "#error" in build.source
        assert built(executor, kernel, "honest").status is Status.OK

    def test_a_race_has_times_of_all_that_are_right_and_reasons_for_the_others(
        self, executor: Executor, kernel: Path
    ) -> None:
        honest, wrong = (built(executor, kernel, m) for m in ("honest", "wrong"))
        assert honest.binary is not None
        triggers = replace(honest, binary=replace(honest.binary, triggers_dependents=True))  # as a GPU's code can
        others = {"b": ("wrong", wrong), "c": ("honest", triggers)}
        held = raced(executor, kernel, {"a": ("honest", honest), **others})
        assert [t.contender for t in held.timings] == ["a", "torch", "copy"]
        reasons = dict(held.refused)
        assert reasons.keys() == others.keys()
        assert reasons["b"] == "y: 4096 of 4096 elements are outside the tolerance (in a timed call)"
        assert reasons["c"].startswith("the code lets the kernel after it start before it has ended")
        assert [t.contender for t in raced(executor, kernel, others).timings] == ["torch", "copy"]

    def test_a_contender_that_breaks_a_race_is_an_empty_result_with_the_reason(
        self, executor: Executor, kernel: Path
    ) -> None:
        honest, broken = (built(executor, kernel, m) for m in ("honest", "abort"))
        lost = raced(executor, kernel, {"a": ("honest", honest), "b": ("abort", broken)})
        assert not lost.timings
        assert lost.log == "trap: the device process died (SIGABRT) (and again, alone in a fresh process)"
        assert lost.seconds > 0

    def test_data_that_cannot_be_made_are_an_error_and_cost_no_other_workload(
        self, executor: Executor, kernel: Path
    ) -> None:
        request = measure_request(kernel, built(executor, kernel, "honest"), "honest")
        with pytest.raises(UsageError, match="needs"):
            executor.measure(replace(request, workload=Workload.of({"n": 1 << 42}, "float32"))).result(PATIENCE_S)
        assert executor.measure(request).result(PATIENCE_S).status is Status.OK

    def test_closing_cancels_what_was_asked(self, name: str, kernel: Path, tmp_path: Path) -> None:
        opened = find_executor(name)("cpu", config(tmp_path))
        build = built(opened, kernel, "honest")
        futures = [opened.measure(measure_request(kernel, build, "honest")) for _ in range(20)]
        opened.close()
        assert all(f.done() for f in futures)
        assert futures[-1].cancelled()
        assert opened.measure(measure_request(kernel, build, "honest")).cancelled()
