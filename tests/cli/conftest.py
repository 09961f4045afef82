"""Commands run in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ended import run_here


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, in an empty folder; its database is runs/lineage.db there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return partial(run_here, capsys)
