"""Every fault of tests/chaos costs its own evaluation: those before and after it are right, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest
from evo.executors.local import LocalExecutor
from evo.genome import Genome
from evo.kernel import Workload
from tests.chaos.kernel import BUILD_FAULTS, CPU_FAULTS, faults

KERNEL = str(Path(__file__).parent.parent / "chaos")
WORKLOAD = Workload.of({"n": 4096}, "float32")
PATIENCE_S = 200.0

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
    "compile_bomb": {Status.COMPILE_TIMEOUT},
    "compile_memory": {Status.OUT_OF_MEMORY},
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    opened = LocalExecutor(
        "cpu",
        ExecutorConfig(
            builders=1,
            cache_dir=tmp_path_factory.mktemp("cache"),
            measure_timeout_s=60,
            build_timeout_s=60,
            gate_floor_s=1.5,
            build_floor_s=4,
            build_memory_bytes=256 << 20,
            candidate_memory_bytes=512 << 20,
        ),
    )
    _, measured = evaluate(opened, "none", 0)
    assert measured.status is Status.OK, measured.log
    yield opened
    opened.close()


def request(fault: str, number: int) -> BuildRequest:
    genome = Genome.of({"fault": fault, "number": number})
    return BuildRequest(kernel=KERNEL, target="cpu", arch="native", genome=genome, workload=WORKLOAD)


def measure_request(built: BuildRequest, build: Build) -> MeasureRequest:
    return MeasureRequest(
        kernel=KERNEL, target="cpu", genome=built.genome, workload=WORKLOAD, build=build, seed=1, time=False
    )


def evaluate(executor: LocalExecutor, fault: str, number: int) -> tuple[Build, Measurement]:
    asked = request(fault, number)
    build = executor.build(asked).result(PATIENCE_S)
    assert build.status is Status.OK, build.log
    return build, executor.measure(measure_request(asked, build)).result(PATIENCE_S)


def own_state() -> tuple[str, dict[str, str]]:
    """Working directory and open descriptors of this process, but for pipes: those to workers come and go."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if not target.startswith(("pipe:", "socket:", "/proc")):
            found[path.name] = target
    return str(Path.cwd()), found


def strays() -> list[psutil.Process]:
    """Processes below this one that are no part of the executor: a server, a tracker, one builder, one device."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in words:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found[3:]


def test_every_fault_has_an_expectation() -> None:
    assert set(EXPECTED) == set(CPU_FAULTS) | set(BUILD_FAULTS)
    assert set(EXPECTED) == set(faults("cpu")) - {"none", "print"}


@pytest.mark.parametrize("fault", [f for f in CPU_FAULTS if f != "close_descriptors"] + ["close_descriptors"])
def test_a_broken_candidate_costs_only_its_own_evaluation(executor: LocalExecutor, fault: str) -> None:
    number = 1 + CPU_FAULTS.index(fault)
    before = own_state()
    healthy, bad = request("none", number), request(fault, number)
    builds = [executor.build(r).result(PATIENCE_S) for r in (healthy, bad)]
    assert [b.status for b in builds] == [Status.OK, Status.OK], builds[1].log
    ahead, broken, behind = (
        executor.measure(measure_request(r, b))
        for r, b in ((healthy, builds[0]), (bad, builds[1]), (healthy, builds[0]))
    )
    assert ahead.result(PATIENCE_S).status is Status.OK
    verdict = broken.result(PATIENCE_S)
    assert verdict.status in EXPECTED[fault], verdict.log
    assert verdict.log
    assert not verdict.timings
    after = behind.result(PATIENCE_S)
    assert after.status is Status.OK, after.log
    assert own_state() == before
    assert strays() == []


@pytest.mark.parametrize("fault", BUILD_FAULTS)
def test_a_build_that_breaks_costs_only_itself(executor: LocalExecutor, fault: str) -> None:
    number = 100 + BUILD_FAULTS.index(fault)
    build = executor.build(request(fault, number)).result(PATIENCE_S)
    assert build.status in EXPECTED[fault], build.log
    assert build.log
    assert evaluate(executor, "none", number)[1].status is Status.OK
    assert strays() == []


def test_a_candidate_that_prints_does_not_reach_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.executors.test_isolation", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "print ok\nassertion trap\ncompile_error compile_error\n"
    assert done.stderr == ""


def test_a_candidate_behind_a_process_that_died_idle_is_not_blamed(executor: LocalExecutor) -> None:
    asked = request("none", 200)
    build = executor.build(asked).result(PATIENCE_S)
    assert executor.measure(measure_request(asked, build)).result(PATIENCE_S).status is Status.OK
    worker = executor._device._worker
    assert worker is not None
    psutil.Process(worker.pid).kill()
    measured = executor.measure(measure_request(asked, build)).result(PATIENCE_S)
    assert (measured.status, measured.log) == (Status.OK, "")


def test_a_candidate_whose_process_is_killed_once_is_tried_again_and_not_blamed(executor: LocalExecutor) -> None:
    """Somebody else's thread, or the kernel out of memory: it was not this one."""
    asked = request("sleep", 201)
    build = executor.build(asked).result(PATIENCE_S)
    future = executor.measure(measure_request(asked, build))
    first = executor._device._worker
    while first is None or not first.alive:
        first = executor._device._worker
    psutil.Process(first.pid).kill()
    assert future.result(PATIENCE_S).status is Status.TIMEOUT  # of the second attempt: the first was a crash
    second = executor._device._worker
    assert second is None or second.pid != first.pid


def main(cache: Path) -> None:
    opened = LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=cache))
    for fault in ("print", "assertion", "compile_error"):
        asked = request(fault, 0)
        build = opened.build(asked).result(PATIENCE_S)
        status = build.status
        if status is Status.OK:
            status = opened.measure(measure_request(asked, build)).result(PATIENCE_S).status
        print(fault, status, flush=True)
    opened.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
