"""Commands run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ended import run_here


@pytest.fixture(scope="session", autouse=True)
def waiting_threads_sleep() -> Iterator[None]:
    """OpenMP threads that wait spin, and on a machine with more to do than cores that takes the others' turns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, in an empty folder; its database is runs/lineage.db there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return partial(run_here, capsys)
