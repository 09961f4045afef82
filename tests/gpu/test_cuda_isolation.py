"""On a GPU: a candidate that breaks it costs its own evaluation, and those around it are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evo.evaluation import Build, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest
from evo.executors.local import LocalExecutor
from evo.genome import Genome
from evo.kernel import Workload
from evo.targets import find_target
from tests.chaos.kernel import CUDA_FAULTS

pytestmark = pytest.mark.gpu

KERNEL = str(Path(__file__).parent.parent / "chaos")
WORKLOAD = Workload.of({"n": 4096}, "float32")
PATIENCE_S = 120.0

EXPECTED = {
    "wrong": {Status.WRONG},
    "illegal_address": {Status.ILLEGAL_ADDRESS},
    "misaligned_address": {Status.MISALIGNED_ADDRESS},
    "assertion": {Status.TRAP},
    "trap": {Status.TRAP},
    # Beyond the stack lies memory that may or may not be somebody's.
    "stack_overflow": {Status.TRAP, Status.ILLEGAL_ADDRESS},
    "spin": {Status.TIMEOUT},
    "deadlock": {Status.TIMEOUT},
    "grid_too_large": {Status.LAUNCH_ERROR},
    "grid_endless": {Status.TIMEOUT},
    "too_many_threads": {Status.LAUNCH_ERROR},
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    opened = LocalExecutor(
        "cuda",
        ExecutorConfig(
            builders=2, cache_dir=tmp_path_factory.mktemp("cache"), gate_floor_s=1.5, build_floor_s=6
        ),
    )
    yield opened
    opened.close()


def request(fault: str, number: int) -> BuildRequest:
    genome = Genome.of({"fault": fault, "number": number})
    arch = find_target("cuda").device().arch
    return BuildRequest(kernel=KERNEL, target="cuda", arch=arch, genome=genome, workload=WORKLOAD)


def measure_request(built: BuildRequest, build: Build) -> MeasureRequest:
    return MeasureRequest(
        kernel=KERNEL, target="cuda", genome=built.genome, workload=WORKLOAD, build=build, seed=1
    )


def test_every_fault_has_an_expectation() -> None:
    assert set(EXPECTED) == set(CUDA_FAULTS)


@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_a_broken_candidate_costs_only_its_own_evaluation(executor: LocalExecutor, fault: str) -> None:
    number = CUDA_FAULTS.index(fault)
    healthy, bad = request("none", number), request(fault, number)
    first, second = (executor.build(r) for r in (healthy, bad))
    builds = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert [b.status for b in builds] == [Status.OK, Status.OK], builds[1].log
    ahead, broken, behind = (
        executor.measure(measure_request(r, b))
        for r, b in ((healthy, builds[0]), (bad, builds[1]), (healthy, builds[0]))
    )
    verdict = ahead.result(PATIENCE_S)
    assert verdict.status is Status.OK, verdict.log
    verdict = broken.result(PATIENCE_S)
    assert verdict.status in EXPECTED[fault], verdict.log
    assert verdict.log
    assert not verdict.timings
    verdict = behind.result(PATIENCE_S)
    assert verdict.status is Status.OK, verdict.log


def test_a_compiler_that_is_never_done_is_ended(executor: LocalExecutor) -> None:
    build = executor.build(request("compile_bomb", 50)).result(PATIENCE_S)
    assert build.status in {Status.COMPILE_TIMEOUT, Status.OUT_OF_MEMORY}, build.log
    assert executor.build(request("none", 51)).result(PATIENCE_S).status is Status.OK


def test_device_printf_reaches_no_terminal(executor: LocalExecutor, capfd: pytest.CaptureFixture[str]) -> None:
    asked = request("print", 60)
    build = executor.build(asked).result(PATIENCE_S)
    assert executor.measure(measure_request(asked, build)).result(PATIENCE_S).status is Status.OK
    assert capfd.readouterr() == ("", "")


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    opened = LocalExecutor("cuda", ExecutorConfig(builders=1, cache_dir=tmp_path, gate_floor_s=1.5))
    asked = request("trap", 70)
    build = opened.build(asked).result(PATIENCE_S)
    assert opened.measure(measure_request(asked, build)).result(PATIENCE_S).status is Status.TRAP
    opened.close()
    deadline = time.monotonic() + PATIENCE_S
    while after := {p.pid for p in psutil.Process().children(recursive=True)} - before:
        assert time.monotonic() < deadline, after
        time.sleep(0.05)
