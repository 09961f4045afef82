"""What a worker is kept from, and what happens when the device itself is broken."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evo.errors import DeviceError
from evo.executors import _builders
from evo.executors import _device_tasks as tasks
from evo.executors._device import Device
from evo.executors._device_tasks import SetUp
from evo.executors._server import start_server, worker_context
from evo.executors._worker import Worker
from tests.chaos.requests import KERNEL, WORKLOAD

OWN_NETWORK = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000) != 0)"
"""CLONE_NEWUSER | CLONE_NEWNET: what any user may do, where the system lets him."""


def reaches(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def prepare_candidate(scratch: Path) -> int:
    return tasks.prepare("cpu", 0, scratch, None)


def prepare_builder(scratch: Path) -> int:
    return _builders._prepare(scratch, 1 << 30)


def prepare_nothing(scratch: Path) -> int:
    return 0


@pytest.mark.parametrize(
    ("prepare", "reached"), [(prepare_candidate, False), (prepare_builder, False), (prepare_nothing, True)]
)
def test_neither_builder_nor_candidate_has_a_network(
    tmp_path: Path, prepare: Callable[[Path], int], reached: bool
) -> None:
    if subprocess.run([sys.executable, "-c", OWN_NETWORK], check=False).returncode:
        pytest.skip("this system gives no process a network of its own")
    start_server()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Worker(worker_context(), tmp_path, prepare, (tmp_path,))
        assert worker.call(reaches, listener.getsockname()[1], limit_s=60) is reached
        worker.end()


def prepare_dead_device(scratch: Path) -> int:
    tasks.prepare("cpu", 0, scratch, None)
    session = tasks.measuring.open_device()

    def fall_silent() -> None:
        raise RuntimeError("fell off the bus\nand more")

    session.synchronize = fall_silent  # type: ignore[method-assign]
    return 0


def prepare_deaf_device(scratch: Path) -> int:
    import torch

    tasks.prepare("cpu", 0, scratch, None)
    torch.arange = lambda count, **options: torch.zeros(count, dtype=torch.int64)  # type: ignore[assignment]
    return 0


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [(prepare_dead_device, "does not answer: fell off the bus$"), (prepare_deaf_device, "computes wrong sums: 0 for")],
    ids=["it does not answer", "it computes wrong sums"],
)
def test_a_device_that_fails_its_probe_in_two_processes_ends_the_work(
    tmp_path: Path, prepare: Callable[..., int], reason: str
) -> None:
    start_server()
    started: list[Any] = []

    def start() -> Worker:
        started.append(Worker(worker_context(), tmp_path, prepare, (tmp_path,)))
        return started[-1]

    device = Device(start, spares=0)
    wanted = SetUp(kernel=KERNEL, target="cpu", workload=WORKLOAD, seed=1, timed=False, memory_bytes=1 << 28)
    try:
        with pytest.raises(DeviceError, match=reason):
            device.ready(wanted)
        assert len(started) == 2
    finally:
        device.close()
