"""A search on a Dask cluster loses and doubles nothing, whatever happens to its workers, its scheduler and the network."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

import evo
from evo.errors import UsageError
from evo.problem.loading import kernel_files
from evo.testing.toy_kernel import TEMPLATE, write_kernel
from tests.executors.processes import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

_ENDING_S = 30.0
_ANCHOR = "    const float factor"
_SETTINGS = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "8s", "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "20"}


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Wire:
    """A way to a port of this machine that can be cut."""

    def __init__(self, port: int) -> None:
        self._to, self._ends = port, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                if far.connect_ex(("127.0.0.1", self._to)):
                    near.close()
                    far.close()
                    continue
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it; to close it does not
            end.close()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Cluster:
    """A scheduler and workers, each a process of its own, as they are started on several machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address, self.wire = f"tcp://127.0.0.1:{self.port}", Wire(self.port)
        self.workers: list[subprocess.Popen[bytes]] = []
        self._start_scheduler()

    def _start_scheduler(self) -> None:
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        wait_until(lambda: answers(self.port), "the scheduler starts")

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log.txt").open("ab") as log:
            command = [sys.executable, "-m", "distributed.cli.dask_" + what, *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **_SETTINGS}, cwd=self._folder)

    def add_worker(self, *more: str) -> None:
        options = ("--nthreads", "2", "--resources", "device=1", "--no-dashboard", *more)
        self.workers.append(self._start("worker", self.address, *options))

    def worker_processes(self) -> list[psutil.Process]:
        """The processes that nannies have started, and start again."""
        found: list[psutil.Process] = []
        for nanny in self.workers:
            with suppress(psutil.Error):
                found += [p for p in psutil.Process(nanny.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        return found

    def restart(self) -> None:
        """The scheduler; its workers end with it, or are ended if they hang, and are started again by what started them."""
        self.scheduler.kill()
        self.scheduler.wait()
        self._start_scheduler()
        for worker in self.workers.copy():
            with suppress(subprocess.TimeoutExpired):
                worker.wait(_ENDING_S)
            self._end(worker)
            self.workers.remove(worker)
            self.add_worker()

    def close(self) -> None:
        self.wire.close()
        for process in (*self.workers, self.scheduler):
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    opened = Cluster(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel with 48 points, each of which has machine code of its own."""
    own = "    volatile int mode = {{ p.mode[1:] }}; (void)mode;\n"
    modes = tuple(f"m{i}" for i in range(12))
    return write_kernel(tmp_path_factory.mktemp("kernels") / "toy", modes, template=TEMPLATE.replace(_ANCHOR, own + _ANCHOR))


def candidates(db: Path) -> list[int]:
    """The orders of the recorded candidates."""
    with closing(sqlite3.connect(db)) as connection, suppress(sqlite3.OperationalError):  # no table yet
        return [order for (order,) in connection.execute('select "order" from candidate order by 1')]
    return []


_OF_A_KIND = """
from dataclasses import replace
from pathlib import Path

import evo.executors.dask as executor
from evo.targets.cpu import TARGET

device, work = type(TARGET).device, executor._work  # Dask runs this twice


def noted(setup, folder, request, asked, generation, work=work):
    if asked[0] != "build":
        Path({path!r}).touch()
    return work(setup, folder, request, asked, generation)


type(TARGET).device = lambda self, device=device: replace(device(self), name={name!r})
executor._work = noted
"""


def test_the_sources_of_a_kernel_travel_and_nothing_else_that_lies_in_its_folder(tmp_path: Path) -> None:
    from evo.executors.dask import _Folder

    folder = write_kernel(tmp_path / "toy", ("good",))
    before = kernel_files(folder)
    for name in ("runs/lineage.db", ".git/objects/pack", ".netrc", "test_toy.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    assert pickle.loads(zlib.decompress(_Folder.of(str(folder)).packed)) == before == kernel_files(folder)


def test_of_several_kinds_of_device_one_measures(cluster: Cluster, kernel: Path, tmp_path: Path) -> None:
    for name in ("one", "another"):
        (tmp_path / f"{name}.py").write_text(_OF_A_KIND.format(name=f"CPU of {name} kind", path=str(tmp_path / name)))
        cluster.add_worker("--preload", str(tmp_path / f"{name}.py"))
    from distributed import Client  # with it exceptions are pickled with what caused them, in other tests, too

    with Client(cluster.address) as client:
        client.wait_for_workers(2)

    def search(devices: str | None) -> evo.Run:
        where = {"on": cluster.address, "devices": devices, "db": tmp_path / "l.db"}
        return evo.search(kernel, target="cpu", evaluations=6, finalists=1, **where)

    with pytest.raises(UsageError, match=r"have CPU of another kind and CPU of one kind, whose times do not compare"):
        search(None)
    with pytest.raises(UsageError, match=r"devices='L4': the workers of .* have CPU of another kind and"):
        search("L4")
    assert search("ANOTHER").best()
    assert (tmp_path / "another").exists()
    assert not (tmp_path / "one").exists()


def test_a_search_survives_what_happens_to_workers_scheduler_and_network(
    cluster: Cluster, kernel: Path, tmp_path: Path
) -> None:
    db = tmp_path / "lineage.db"
    for _ in range(2):
        cluster.add_worker()

    searching: Future[object] = Future()

    def search() -> None:
        try:
            found = evo.search(
                kernel,
                target="cpu",
                on=cluster.wire.address,
                evaluations=24,
                seed=3,
                finalists=1,
                name="cut",
                db=db,
                progress=False,
            )
            searching.set_result(found)
        except Exception as error:
            searching.set_exception(error)

    threading.Thread(target=search, daemon=True).start()

    def wait_for(more: int, what: str) -> None:
        before = len(candidates(db))
        wait_until(lambda: searching.done() or len(candidates(db)) >= before + more, f"the search goes on {what}")
        if searching.done():
            searching.result()

    draw = random.Random(1)

    def a_worker() -> psutil.Process:
        found: list[psutil.Process] = []
        wait_until(lambda: found.extend(cluster.worker_processes()) or found, "a worker starts again")
        return draw.choice(found)

    wait_for(3, "at first")
    for _ in range(3):
        a_worker().kill()
        wait_for(1, "after a worker was killed")
    a_worker().send_signal(signal.SIGSTOP)
    wait_for(8, "beside a worker that hangs")  # as many as are in flight: its own are among them
    cluster.wire.cut()
    wait_for(1, "after the network was cut")
    cluster.restart()
    wait_for(4, "after the scheduler was started again")
    searching.result(PATIENCE_S)
    assert candidates(db) == list(range(24))
    evo.resume("cut", evaluations=25, db=db, progress=False)  # replays: other proposals would be refused
    assert candidates(db) == list(range(25))
