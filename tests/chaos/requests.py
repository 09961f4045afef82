"""What is asked of an executor about the candidates of tests/chaos."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evo.evaluation import Build, Evaluation, Status
from evo.executors.local import LocalExecutor
from evo.measure import Request
from evo.problem.genome import Genome
from evo.problem.kernel import Workload

KERNEL = str(Path(__file__).parent)
WORKLOAD = Workload.of({"n": 4096}, "float32")
PATIENCE_S = 200.0
"""How long a test waits for anything at all: the machine may be busy."""


def build_request(target: str, arch: str, fault: str, number: int) -> Request:
    genome = Genome.of({"fault": fault, "number": number})
    return Request(kernel=KERNEL, target=target, arch=arch, genome=genome, workload=WORKLOAD, seed=1)


def measure_request(built: Request, build: Build, *, timed: bool) -> Request:
    return replace(built, build=build, time=timed)


def evaluate(executor: LocalExecutor, asked: Request, *, timed: bool = False) -> tuple[Build, Evaluation]:
    build = executor.build(asked).result(PATIENCE_S)
    assert build.status is Status.OK, build.log
    return build, executor.measure(measure_request(asked, build, timed=timed)).result(PATIENCE_S)


def neighbours_of_a_fault(
    executor: LocalExecutor, healthy: Request, bad: Request, *, timed: bool
) -> tuple[Evaluation, Evaluation, Evaluation]:
    """A healthy candidate, a broken one, and the healthy one again, asked for at once."""
    first, second = (executor.build(r) for r in (healthy, bad))
    builds = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert [b.status for b in builds] == [Status.OK, Status.OK], builds[1].log
    ahead, broken, behind = (
        executor.measure(measure_request(r, b, timed=timed))
        for r, b in ((healthy, builds[0]), (bad, builds[1]), (healthy, builds[0]))
    )
    return ahead.result(PATIENCE_S), broken.result(PATIENCE_S), behind.result(PATIENCE_S)
