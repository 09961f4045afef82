"""A fresh database for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evo.store.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "lineage.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path, write=True) as opened:
        yield opened
