"""What is asked of an executor about the candidates of tests/chaos."""

from __future__ import annotations

from collections.abc import Collection
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


def costs_only_itself(
    executor: LocalExecutor, healthy: Request, bad: Request, expected: Collection[Status], *, timed: bool
) -> None:
    """A healthy candidate, a broken one, and the healthy one again, asked for at once: only the broken one fails, as is
    expected of it."""
    futures = [executor.build(r) for r in (healthy, bad)]
    builds = [future.result(PATIENCE_S) for future in futures]
    assert [b.status for b in builds] == [Status.OK, Status.OK], builds[1].log
    asked = ((healthy, builds[0]), (bad, builds[1]), (healthy, builds[0]))
    measured = [executor.measure(measure_request(r, b, timed=timed)) for r, b in asked]
    ahead, broken, behind = (future.result(PATIENCE_S) for future in measured)
    assert ahead.status is Status.OK, ahead.log
    assert broken.status in expected, broken.log
    assert broken.log
    assert not broken.timings
    assert behind.status is Status.OK, behind.log
