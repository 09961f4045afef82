"""One worker process: its limits, and what is said of how it ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evo.errors import DeviceError, EngineError, KernelError
from evo.evaluation import Status
from evo.executors._device import AdaptiveTimeout
from evo.executors._processes import start_server
from evo.executors._worker import MOST_KILLED, Worker, WorkerLost, enter_stage, exit_status, run_with_kernel
from evo.measure.cases import random_cases
from evo.problem.kernel import Kernel
from evo.problem.loading import load_kernel
from evo.targets import classify
from tests.executors.processes import PATIENCE_S


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered", Status.ILLEGAL_ADDRESS),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", Status.ILLEGAL_ADDRESS),
        ("CUDA_ERROR_MISALIGNED_ADDRESS (716): misaligned address", Status.MISALIGNED_ADDRESS),
        ("CUDA_ERROR_ILLEGAL_INSTRUCTION (715): an illegal instruction was encountered", Status.TRAP),
        ("CUDA_ERROR_ASSERT (710): device-side assert triggered", Status.TRAP),
        ("CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure", Status.TRAP),
        ("CUDA_ERROR_HARDWARE_STACK_ERROR (714): hardware stack error", Status.TRAP),
        ("CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", Status.OUT_OF_MEMORY),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", Status.OUT_OF_MEMORY),
        ("CUDA_ERROR_LAUNCH_TIMEOUT (702): the launch timed out and was terminated", Status.TIMEOUT),
        ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701): too many resources requested", Status.LAUNCH_ERROR),
        ("CUDA_ERROR_INVALID_VALUE (1): invalid argument", Status.LAUNCH_ERROR),
    ],
)
def test_a_message_of_the_device_has_a_status(message: str, status: Status) -> None:
    assert classify(message, Status.LAUNCH_ERROR) is status


@pytest.mark.parametrize(
    ("exitcode", "status", "text"),
    [
        (-signal.SIGBUS, Status.ILLEGAL_ADDRESS, "SIGBUS"),
        (-signal.SIGILL, Status.TRAP, "SIGILL"),
        (-signal.SIGKILL, Status.CRASH, "SIGKILL"),
        (3, Status.CRASH, "exit code 3"),
    ],
)
def test_the_end_of_a_process_has_a_status(exitcode: int, status: Status, text: str) -> None:
    assert exit_status(exitcode) == (status, text)


def test_a_limit_follows_the_median_between_its_floor_and_its_ceiling() -> None:
    timeout = AdaptiveTimeout(floor_s=2, ceiling_s=30)
    assert timeout.limit_s() == 30
    timeout.note(0.01)
    assert timeout.limit_s() == 2
    for _ in range(2):
        timeout.note(0.5)
    assert timeout.limit_s() == pytest.approx(10)
    for _ in range(9):
        timeout.note(9)
    assert timeout.limit_s() == 30


def nothing(*arguments: object) -> None:
    return None


def work_in_stages(first_s: float, second_s: float) -> str:
    time.sleep(first_s)
    enter_stage("second")
    time.sleep(second_s)
    return "done"


def fail() -> None:
    raise ZeroDivisionError("nothing to divide by")


def fork_and_return() -> None:
    os.fork()


def print_and_die() -> None:
    os.write(1, b"last words")
    os.abort()


def fail_as_stated(kernel: Kernel) -> None:
    raise KernelError(f"kernel {kernel.name!r} fails on what it is given")


def die(kernel: Kernel, log: str, number: int, lives: int = 0) -> str:
    """Dies of the signal of that number, in as many processes as it has lives."""
    with Path(log).open("a") as file:
        file.write("x")
    if Path(log).stat().st_size > lives:
        return kernel.name
    os.kill(os.getpid(), number)
    return ""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    start_server()
    started = Worker(tmp_path, nothing, (), candidates=True)
    yield started
    started.end()


def test_answers_come_in_the_order_of_the_tasks(worker: Worker) -> None:
    worker.post(divmod, 7, 2)
    worker.post(divmod, 8, 2, answered=False)
    worker.post(fail, answered=False)
    worker.post(divmod, 9, 2)
    limits_s = {"task": PATIENCE_S}
    assert [worker.collect(limits_s), worker.collect(limits_s)] == [(3, 1), (4, 1)]


def test_a_task_larger_than_the_pipe_is_handed_over_while_another_runs(worker: Worker) -> None:
    worker.post(time.sleep, 0.5)
    worker.post(len, bytes(1 << 24))
    assert worker.collect({"task": PATIENCE_S}) is None
    assert worker.collect({"task": PATIENCE_S}) == 1 << 24


def test_each_stage_of_a_task_has_its_own_limit(worker: Worker) -> None:
    worker.post(work_in_stages, 0.1, 1.0)
    assert worker.collect({"first": PATIENCE_S, "second": PATIENCE_S}) == "done"
    assert set(worker.spent_s) == {"first", "second"}
    assert worker.spent_s["second"] > 0.9
    worker.post(work_in_stages, 0.0, 600.0)
    with pytest.raises(WorkerLost, match=r"^gave no result within 0.5 s$") as lost:
        worker.collect({"first": PATIENCE_S, "second": 0.5})
    assert lost.value.status is Status.TIMEOUT
    assert worker.ended


@pytest.mark.parametrize(
    ("task", "status", "text"),
    [
        (print_and_die, Status.TRAP, "died (SIGABRT): last words"),
        (fork_and_return, Status.CRASH, "was ended: the candidate started another process"),
    ],
)
def test_a_lost_worker_says_how_it_ended(
    worker: Worker, task: Callable[[], None], status: Status, text: str
) -> None:
    worker.post(task)
    with pytest.raises(WorkerLost) as lost:
        worker.collect({"task": PATIENCE_S})
    assert (lost.value.status, str(lost.value)) == (status, text)


def test_an_error_in_a_task_is_told_and_costs_no_process(worker: Worker) -> None:
    worker.post(fail)
    with pytest.raises(EngineError, match="nothing to divide by"):
        worker.collect({"task": PATIENCE_S})
    worker.post(divmod, 7, 2)
    assert worker.collect({"task": PATIENCE_S}) == (3, 1)


# -- a function of a kernel, in a worker of its own -----------------------------------------------------------------


def test_a_function_of_a_kernel_gives_and_raises_in_a_worker_what_it_does_here() -> None:
    kernel = load_kernel("softmax")
    workload = kernel.workloads["cpu"][0]
    drawn = run_with_kernel(random_cases, "softmax", kernel.digest, "cpu", workload, 3, 20)
    assert drawn == random_cases(kernel, "cpu", workload, 3, 20)
    with pytest.raises(KernelError, match=r"^kernel 'softmax' fails on what it is given$"):
        run_with_kernel(fail_as_stated, "softmax", kernel.digest)
    with pytest.raises(KernelError, match=r"^the files of kernel 'softmax' were changed or deleted"):
        run_with_kernel(fail_as_stated, "softmax", "another")


def test_a_function_of_a_kernel_is_tried_again_where_its_worker_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = str(tmp_path / "log")
    assert run_with_kernel(die, "softmax", "", log, signal.SIGKILL, MOST_KILLED - 1) == "softmax"
    with pytest.raises(DeviceError, match=r"^functions of kernel softmax cannot be run \(their process died \(SIGKILL\)\)"):
        run_with_kernel(die, "softmax", "", log, signal.SIGKILL, 99)
    assert len(Path(log).read_text()) == 2 * MOST_KILLED
    with pytest.raises(DeviceError, match=r"died \(SIGSEGV\)"):
        run_with_kernel(die, "softmax", "", log, signal.SIGSEGV, 99)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
