"""Tests marked `gpu` are skipped, with the reason, where no GPU answers; workers share the cores, and the GPU."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from evo.errors import UsageError
from evo.lineage.store import Store
from evo.targets import find_target
from tests import hurried  # noqa: F401 - tests of the wait for a quiet machine have settings of their own
from tests.lineage.postgres import Server, start_server

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Hundreds of processes that tests start import the same modules: without bytecode each would compile all of them again."""
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""For the processes that tests start: OpenMP threads that wait spin, and on a machine with more to do than cores that takes
the others' turns, for milliseconds at each call."""

_DEAR_FIXTURES = {
    "verdicts", "in_cpp_of", "searched", "recorded", "several", "folder", "module", "toy", "launcher", "loaded", "trained",
}  # fmt: skip
"""Of a file: what takes half a minute to set up is set up once, not by every worker."""
_GROUPS = {
    "test_dask.py": "dask",
    "test_search.py": "searches",
    "test_api.py": "searches",
    "test_adversaries.py": "test_adversaries.py",
    "test_calls.py": "launchers",
    "test_native.py": "launchers",
    "test_transformers.py": "transformers",
}
"""Files whose tests all run on one worker. Two searches at once disturb each other, and what was disturbed is timed again;
a native launcher takes half a minute to build, and another worker that wants the same would wait for it; models take seconds
to import. They take minutes, so they begin first: begun last, they would keep all others waiting."""
_RECORDED = "database"
"""The fixture of tests/report: what records runs and renders their pages for a quarter of a minute does so on one worker."""
_APART = ("folder", "launcher", "loaded", "trained")
"""Those that are set up anew for each of their parameters: a worker may have one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, not skip, the gpu tests without a GPU")


def pytest_configure(config: pytest.Config) -> None:
    alone = tempfile.TemporaryDirectory(prefix="evo-tests-")  # searches of other workers are not told of
    config.add_cleanup(alone.cleanup)
    os.environ["XDG_RUNTIME_DIR"] = alone.name
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        if group := _GROUPS.get(item.path.name):
            item.add_marker(pytest.mark.xdist_group(group))
        elif _RECORDED in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("recorded"))
        elif _DEAR_FIXTURES & set(getattr(item, "fixturenames", ())):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            parts = [item.path.name, *(str(parameters[name]) for name in _APART if name in parameters)]
            item.add_marker(pytest.mark.xdist_group("-".join(parts)))
    items.sort(key=lambda item: (item.path.name not in _GROUPS, item.get_closest_marker("slow") is None))
    if not on_gpu:
        return
    try:
        find_target("cuda").device()
    except UsageError as error:
        if config.getoption("--require-gpu"):
            raise
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit: who waits is not late
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    gpu, alone = item.get_closest_marker("gpu"), item.get_closest_marker("alone")
    with _gpu_shared(alone=alone is not None) if gpu else nullcontext():
        return (yield)


@contextmanager
def _gpu_shared(*, alone: bool) -> Iterator[None]:
    """A place on the GPU, beside other tests or `alone`; nobody enters while one waits to be alone."""
    place = Path(tempfile.gettempdir()) / f"evo-tests-gpu-{os.getuid()}"
    with place.with_suffix(".door").open("w") as door, place.with_suffix(".room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a process that the test has forked would keep it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a SQLite file that is not there yet."""
    return tmp_path / "runs" / "lineage.db"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server() as started:
        yield started


@pytest.fixture
def postgres_url(server: Server) -> str:
    """Of an empty database on a server."""
    return server.empty_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind, by its path or URL."""
    name = "path" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(name))


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    with Store.open(where, write=True) as opened:
        yield opened
