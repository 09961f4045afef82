"""Tests marked `gpu` are skipped, with the reason, where no GPU answers; workers share the cores."""

from __future__ import annotations

import os

import pytest
import torch

from evo.errors import UsageError
from evo.targets import find_target

_DEAR_FIXTURES = {"verdicts", "searched"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, not skip, the gpu tests without a GPU")


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:  # what takes a minute to set up is set up once, not by every worker
        if item.get_closest_marker("gpu"):
            continue  # these have one worker as it is
        for fixture in _DEAR_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {fixture}"))
    if not on_gpu:
        return
    try:
        find_target("cuda").device()
    except UsageError as error:
        if config.getoption("--require-gpu"):
            raise
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=str(error)))
    for item in on_gpu:  # one worker has the GPU: its memory is not divided, and what others do there shows
        item.add_marker(pytest.mark.xdist_group("gpu"))
