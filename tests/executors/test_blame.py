"""Whoever ran in a process that then breaks is asked, not evo."""

from __future__ import annotations

from pathlib import Path

from evo.evaluation import Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest, RaceRequest
from evo.executors.local import LocalExecutor
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from tests.toy_kernel import write_kernel

WORKLOAD = Workload.of({"n": 4096}, "float32")
PATIENCE_S = 300.0


def test_an_error_in_a_process_where_a_candidate_ran_is_the_candidates_and_the_next_one_is_measured(
    tmp_path: Path,
) -> None:
    folder = write_kernel(tmp_path / "toy", ("honest", "odd"))
    text = (folder / "kernel.py").read_text()
    broken = '    if point["mode"] == "odd" and not COMPILING:\n        raise RuntimeError("the heap is broken")\n'
    (folder / "kernel.py").write_text(text.replace("    if COMPILING:\n", broken + "    if COMPILING:\n", 1))
    executor = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=tmp_path / "cache", gate_floor_s=30))
    try:
        results = []
        for mode in ("odd", "honest"):
            genome = Genome.of({"mode": mode, "unroll": 1})
            request = BuildRequest(kernel=str(folder), target="cpu", arch="native", genome=genome, workload=WORKLOAD)
            build = executor.build(request).result(PATIENCE_S)
            measured = executor.measure(
                MeasureRequest(
                    kernel=str(folder), target="cpu", genome=genome, workload=WORKLOAD, build=build, time=False
                )
            ).result(PATIENCE_S)
            results.append((genome, build, measured))
        race = RaceRequest(
            kernel=str(folder),
            target="cpu",
            workload=WORKLOAD,
            contenders=tuple((str(i), genome, build) for i, (genome, build, _) in enumerate(results)),
            baselines=(),
        )
        raced = executor.race(race).result(PATIENCE_S)
    finally:
        executor.close()
    assert [m.status for _, _, m in results] == [Status.CRASH, Status.OK]
    assert "the heap is broken (and again, alone in a fresh process)" in results[0][2].log
    assert not raced.timings
    assert "the heap is broken" in raced.log
