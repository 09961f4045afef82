"""Where candidates do not share the cores with the builders, one is gated while another is timed: never both at once.

The CPU stands in for a device of its own: only the executor is told that nothing shares the cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from evo.errors import UsageError
from evo.evaluation import Build, Measurement, Status
from evo.executors import BuildRequest, ExecutorConfig, MeasureRequest, RaceRequest
from evo.executors import _device_lock as device_lock
from evo.executors._device_lock import DeviceLock
from evo.executors._server import start_server, worker_context
from evo.executors._worker import Worker
from evo.executors.local import LocalExecutor
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.targets import find_target
from tests.toy_kernel import TEMPLATE, write_kernel

WORKLOAD = Workload.of({"n": 4096}, "float32")
PATIENCE_S = 200.0
UNROLLS = (1, 2, 4, 8)

CALLS = r"""
    if (std::FILE* file = std::fopen("@LOG@", "a")) {
        std::fprintf(file, "{{ p.unroll }} {{ p.mode }} %lld\n", n);
        std::fclose(file);
    }
"""
"""Who was called, and on how many elements: in the gate on fewer than 4096."""

LATE = r"""
    if ({{ 1 if p.mode == "late" else 0 }} && n == 4096) std::abort();
"""
"""It breaks where it is timed, and not in the gate."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    anchor = "    const float factor"
    assert anchor in TEMPLATE
    return write_kernel(
        tmp_path_factory.mktemp("kernels") / "toy",
        ("honest", "wrong", "abort", "spin", "late"),
        template=TEMPLATE.replace(anchor, CALLS + LATE + anchor),
    )


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    opened = open_executor(tmp_path_factory.mktemp("cache"))
    yield opened
    opened.close()


def open_executor(cache: Path) -> LocalExecutor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_target("cpu"), "shares_cores", False)
        return LocalExecutor("cpu", ExecutorConfig(builders=1, cache_dir=cache, measure_timeout_s=6, gate_floor_s=6))


def build(executor: LocalExecutor, kernel: Path, mode: str, unroll: int = 1) -> Build:
    genome = Genome.of({"mode": mode, "unroll": unroll})
    request = BuildRequest(kernel=str(kernel), target="cpu", arch="native", genome=genome, workload=WORKLOAD)
    built = executor.build(request).result(PATIENCE_S)
    assert built.status is Status.OK, built.log
    return built


def request(kernel: Path, built: Build, mode: str, unroll: int = 1) -> MeasureRequest:
    genome = Genome.of({"mode": mode, "unroll": unroll})
    return MeasureRequest(
        kernel=str(kernel), target="cpu", genome=genome, workload=WORKLOAD, build=built, seed=1
    )


def measure_all(
    executor: LocalExecutor, kernel: Path, candidates: list[tuple[str, int]]
) -> list[Measurement]:
    """All asked for at once."""
    built = [build(executor, kernel, mode, unroll) for mode, unroll in candidates]
    futures = [
        executor.measure(request(kernel, b, mode, unroll))
        for b, (mode, unroll) in zip(built, candidates, strict=True)
    ]
    return [f.result(PATIENCE_S) for f in futures]


def test_nothing_is_gated_while_a_candidate_is_timed(executor: LocalExecutor, kernel: Path) -> None:
    log = kernel / "log.txt"
    for unroll in UNROLLS:
        build(executor, kernel, "honest", unroll)
    log.write_text("")
    measured = measure_all(executor, kernel, [("honest", u) for u in UNROLLS])
    assert [m.status for m in measured] == [Status.OK] * len(UNROLLS)
    calls = [line.split() for line in log.read_text().splitlines()]
    calls = [c for c in calls if c[0].isdigit()]  # the others are notes of builds
    for unroll in map(str, UNROLLS):
        timed = [i for i, (who, _, n) in enumerate(calls) if who == unroll and n == "4096"]
        assert len(timed) > 10
        assert {who for who, _, _ in calls[timed[0] : timed[-1] + 1]} == {unroll}


def test_what_cannot_be_made_ready_is_told_to_the_first_candidate(executor: LocalExecutor, kernel: Path) -> None:
    huge = Workload.of({"n": 1 << 42}, "float32")
    built = build(executor, kernel, "honest")
    executor.expect(str(kernel), "cpu", huge, 1)
    with pytest.raises(UsageError, match="needs"):
        executor.measure(replace(request(kernel, built, "honest"), workload=huge)).result(PATIENCE_S)
    executor.expect(str(kernel), "cpu", WORKLOAD, 1)
    assert measure_all(executor, kernel, [("honest", 1)])[0].status is Status.OK


@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("wrong", Status.WRONG),
        ("abort", Status.TRAP),
        ("spin", Status.TIMEOUT),
        ("late", Status.TRAP),
    ],
)
def test_a_candidate_that_breaks_in_either_process_costs_only_itself(
    executor: LocalExecutor, kernel: Path, mode: str, status: Status
) -> None:
    crowd = [("honest", 1), ("honest", 2), (mode, 1), ("honest", 4), (mode, 2), ("honest", 8)]
    measured = measure_all(executor, kernel, crowd)
    assert [m.status for m in measured] == [status if m == mode else Status.OK for m, _ in crowd]
    assert all(bool(m.timings) == (m.status is Status.OK) for m in measured)


def test_a_race_waits_for_what_was_asked_before(executor: LocalExecutor, kernel: Path) -> None:
    log = kernel / "log.txt"
    built = {u: build(executor, kernel, "honest", u) for u in (1, 2, 4)}
    log.write_text("")
    before = executor.measure(request(kernel, built[1], "honest", 1))
    contender = ("a", Genome.of({"mode": "honest", "unroll": 2}), built[2])
    race = executor.race(
        RaceRequest(
            kernel=str(kernel), target="cpu", workload=WORKLOAD, contenders=(contender,), baselines=(), seed=1
        )
    )
    executor.renew_device()
    after = executor.measure(request(kernel, built[4], "honest", 4))
    assert race.result(PATIENCE_S).timings
    assert before.done()
    assert after.result(PATIENCE_S).status is before.result().status is Status.OK
    callers = [line.split()[0] for line in log.read_text().splitlines()]
    assert sorted(callers, key="124".index) == callers


@pytest.mark.parametrize("mode", ["honest", "spin"])
def test_closing_amid_it_ends_every_process(kernel: Path, tmp_path: Path, mode: str) -> None:
    others = set(psutil.Process().children(recursive=True))
    opened = open_executor(tmp_path)
    candidates = [("honest", u) for u in UNROLLS] + [(mode, 1)]
    built = [build(opened, kernel, m, u) for m, u in candidates]
    futures = [opened.measure(request(kernel, b, m, u)) for b, (m, u) in zip(built, candidates, strict=True)]
    assert futures[0].result(PATIENCE_S).status is Status.OK
    opened.close()
    assert all(f.done() for f in futures)
    gone = [p for p in psutil.Process().children(recursive=True) if p not in others]
    assert not psutil.wait_procs(gone, timeout=PATIENCE_S)[1]


# -- the lock itself --------------------------------------------------------------------------------------------


def prepare(lock: DeviceLock) -> int:
    device_lock.adopt(lock)
    return 0


def take(alone: bool, then_sleep_s: float = 0.0) -> float:
    began = time.perf_counter()
    device_lock.acquire(alone=alone)
    waited_s = time.perf_counter() - began
    time.sleep(then_sleep_s)
    return waited_s


def give_back() -> None:
    device_lock.release()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    start_server()
    started = []
    for _ in range(2):
        lock = DeviceLock(tmp_path / "lock")
        started.append(Worker(worker_context(), tmp_path, prepare, (lock,), gone=lock.close))
    for worker in started:
        worker.call(give_back, limit_s=60)
    yield started
    for worker in started:
        worker.end()


def test_a_process_that_waits_for_the_device_is_not_late(workers: list[Worker]) -> None:
    first, second = workers
    first.call(take, True, limit_s=60)
    second.post(take, True, 0.1)
    time.sleep(2.0)
    first.call(give_back, limit_s=60)
    assert second.collect(1.0, patience=100) > 1.0


def test_the_device_stays_with_a_process_that_died_until_that_is_ended(workers: list[Worker]) -> None:
    first, second = workers
    first.call(take, False, limit_s=60)
    psutil.Process(first.pid).kill()
    while first.alive:
        time.sleep(0.01)
    second.call(take, False, limit_s=60)  # beside it nothing is timed, but others may go on
    second.call(give_back, limit_s=60)
    second.post(take, True)
    time.sleep(0.5)
    first.end()
    assert second.collect(60) > 0.1
