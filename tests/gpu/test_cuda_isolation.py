"""On a GPU: a candidate that breaks it costs its own evaluation, and those around it are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evo.evaluation import Status
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
from evo.targets import find_target
from tests.chaos.kernel import CUDA_FAULTS
from tests.chaos.requests import PATIENCE_S, build_request, costs_only_itself, evaluate

pytestmark = pytest.mark.gpu

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
        ExecutorConfig(builders=2, cache_dir=tmp_path_factory.mktemp("cache"), gate_floor_s=4.0, build_floor_s=6),
    )
    yield opened
    opened.close()


def request(fault: str, number: int) -> Request:
    return build_request("cuda", find_target("cuda").device().arch, fault, number)


@pytest.mark.parametrize("fault", CUDA_FAULTS)
def test_a_broken_candidate_costs_only_its_own_evaluation(executor: LocalExecutor, fault: str) -> None:
    number = CUDA_FAULTS.index(fault)
    costs_only_itself(executor, request("none", number), request(fault, number), EXPECTED[fault], timed=True)


def test_a_compiler_that_is_never_done_is_ended(executor: LocalExecutor) -> None:
    build = executor.build(request("compile_bomb", 50)).result(PATIENCE_S)
    assert build.status in {Status.COMPILE_TIMEOUT, Status.OUT_OF_MEMORY}, build.log
    assert executor.build(request("none", 51)).result(PATIENCE_S).status is Status.OK


def test_device_printf_reaches_no_terminal(executor: LocalExecutor, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(executor, request("print", 60), timed=True)[1].status is Status.OK
    assert capfd.readouterr() == ("", "")
