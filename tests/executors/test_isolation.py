"""Every fault of tests/chaos costs its own evaluation: those before and after it are right, and nothing is left."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from evo.evaluation import Status
from evo.executors import ExecutorConfig
from evo.executors.local import LocalExecutor
from evo.measure import Request
from tests.chaos.kernel import BUILD_FAULTS, CPU_FAULTS
from tests.chaos.requests import PATIENCE_S, build_request, costs_only_itself, evaluate, measure_request
from tests.ended import run_python
from tests.executors.processes import descendants

pytestmark = pytest.mark.slow

EXPECTED = {
    "wrong": {Status.WRONG},
    "no_entry": {Status.LOAD_ERROR},
    "illegal_address": {Status.ILLEGAL_ADDRESS},
    "abort": {Status.TRAP},
    "assertion": {Status.TRAP},
    "trap": {Status.TRAP},
    "divide_by_zero": {Status.TRAP},
    "stack_overflow": {Status.ILLEGAL_ADDRESS},
    "exit": {Status.CRASH, Status.TIMEOUT},  # what libraries do at exit may wait for threads that are gone
    "kill": {Status.CRASH},
    "stop": {Status.TIMEOUT},
    "spin": {Status.TIMEOUT},
    "sleep": {Status.TIMEOUT},
    "leak": {Status.OUT_OF_MEMORY, Status.TIMEOUT},  # a slow machine takes longer than the limit to hand it out
    "allocate": {Status.OUT_OF_MEMORY},
    "change_folder": {Status.CRASH},
    "close_descriptors": {Status.CRASH},
    "scribble_on_descriptors": {Status.CRASH},
    "fork": {Status.CRASH},
    "fork_and_return": {Status.CRASH},
    "daemon": {Status.CRASH},
    "compile_error": {Status.COMPILE_ERROR},
    "compile_memory": {Status.OUT_OF_MEMORY},
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    """Builds have little memory, and all the time that a busy machine may take."""
    opened = LocalExecutor(
        "cpu",
        ExecutorConfig(
            builders=1,
            cache_dir=tmp_path_factory.mktemp("cache"),
            measure_timeout_s=60,
            build_timeout_s=PATIENCE_S,
            build_floor_s=PATIENCE_S,
            build_memory_bytes=256 << 20,
            candidate_memory_bytes=512 << 20,
        ),
    )
    _, measured = evaluate(opened, request("none", 0))
    assert measured.status is Status.OK, measured.log
    yield opened
    opened.close()


def request(fault: str, number: int) -> Request:
    return build_request("cpu", "native", fault, number)


def strays(executor: LocalExecutor, before: Collection[psutil.Process]) -> list[psutil.Process]:
    """Processes that a candidate has started: new ones that are not the executor's own builder or device worker."""
    own = {w.pid for w in executor._workers if not w.ended}
    new = [process for process in descendants() if process not in before and process.pid not in own]
    with suppress(psutil.NoSuchProcess):  # a browser of other tests starts processes of its own whenever it likes
        return [process for process in new if not process.name().startswith("chrom")]
    return [process for process in new if process.is_running()]


@pytest.mark.parametrize("fault", CPU_FAULTS)
def test_a_broken_candidate_costs_only_its_own_evaluation(executor: LocalExecutor, fault: str) -> None:
    before = descendants()  # a browser, perhaps, of tests that this worker had before
    number = 1 + CPU_FAULTS.index(fault)
    costs_only_itself(executor, request("none", number), request(fault, number), EXPECTED[fault], timed=False)
    assert strays(executor, before) == []


@pytest.mark.parametrize("fault", [f for f in BUILD_FAULTS if f != "compile_bomb"])
def test_a_build_that_breaks_costs_only_itself(executor: LocalExecutor, fault: str) -> None:
    before = descendants()
    number = 100 + BUILD_FAULTS.index(fault)
    build = executor.build(request(fault, number)).result(PATIENCE_S)
    assert build.status in EXPECTED[fault], build.log
    assert build.log
    assert evaluate(executor, request("none", number))[1].status is Status.OK
    assert strays(executor, before) == []


def test_a_candidate_that_leaks_runs_out_of_memory_and_not_of_time(tmp_path: Path) -> None:
    config = ExecutorConfig(
        builders=1,
        cache_dir=tmp_path,
        measure_timeout_s=PATIENCE_S,
        gate_floor_s=PATIENCE_S,
        candidate_memory_bytes=128 << 20,
    )
    opened = LocalExecutor("cpu", config)
    try:
        assert evaluate(opened, request("none", 120))[1].status is Status.OK
        verdict = evaluate(opened, request("leak", 121))[1]
        assert verdict.status is Status.OUT_OF_MEMORY, verdict.log
        assert evaluate(opened, request("none", 122))[1].status is Status.OK
    finally:
        opened.close()


def test_a_candidate_that_prints_does_not_reach_the_terminal(tmp_path: Path) -> None:
    done = run_python(Path(), "-m", "tests.executors.test_isolation", str(tmp_path))
    assert done.stdout == "print ok\nassertion trap\ncompile_error compile_error\n"
    assert done.stderr == ""


def device_process(executor: LocalExecutor) -> int:
    worker = executor._devices[0]._worker
    return worker.pid


def test_a_candidate_behind_a_process_that_died_idle_is_not_blamed(executor: LocalExecutor) -> None:
    asked = request("none", 200)
    build, measured = evaluate(executor, asked)
    assert measured.status is Status.OK
    psutil.Process(device_process(executor)).kill()
    measured = executor.measure(measure_request(asked, build, timed=False)).result(PATIENCE_S)
    assert (measured.status, measured.log) == (Status.OK, "")


def test_a_candidate_whose_process_is_killed_once_is_tried_again_and_not_blamed(executor: LocalExecutor) -> None:
    """Somebody else's thread, or the kernel out of memory: it was not this one."""
    assert evaluate(executor, request("none", 202))[1].status is Status.OK
    asked = request("sleep", 201)
    build = executor.build(asked).result(PATIENCE_S)
    first = device_process(executor)
    future = executor.measure(measure_request(asked, build, timed=False))
    while not executor.in_flight():
        continue
    psutil.Process(first).kill()
    verdict = future.result(PATIENCE_S)
    assert verdict.status is Status.TIMEOUT  # of the second attempt: the first was a crash
    assert verdict.log.endswith("(and again, alone in a fresh process)")


def main(cache: Path) -> None:
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=cache))
    for fault in ("print", "assertion", "compile_error"):
        asked = request(fault, 0)
        build = opened.build(asked).result(PATIENCE_S)
        status = build.status
        if status is Status.OK:
            status = opened.measure(measure_request(asked, build, timed=False)).result(PATIENCE_S).status
        print(fault, status, flush=True)
    opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
