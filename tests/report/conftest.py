"""Recorded runs of every kind, and a browser: once for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, open_browser
from recorded import PLANS, record_run

from evo.analysis.outcome import RunOutcome, read_outcome
from evo.lineage.store import Store
from evo.report.page import render_page


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a run of each of PLANS."""
    path = tmp_path_factory.mktemp("report") / "lineage.db"
    with Store.open(path, write=True) as store:
        for plan in PLANS:
            record_run(store, plan)
    return path


@pytest.fixture(scope="session")
def known(database: Path) -> dict[str, RunOutcome]:
    """What is read of each of them."""
    with Store.open(database, write=False) as store:
        return {plan.name: read_outcome(store, plan.name) for plan in PLANS}


@pytest.fixture(scope="session")
def rendered(known: dict[str, RunOutcome]) -> dict[str, str]:
    """The page of each of them."""
    return {name: render_page(data) for name, data in known.items()}


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running
