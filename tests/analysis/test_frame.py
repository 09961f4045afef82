"""Answers of `evo.Lineage` as pandas DataFrames, where pandas is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import evo
from evo.errors import UsageError
from evo.lineage.store import Store
from tests.lineage import landscapes as land

TABLES: dict[str, Callable[[evo.Lineage], Any]] = {
    "runs": lambda lineage: lineage.runs(),
    "history": lambda lineage: lineage.history("walk"),
    "family": lambda lineage: lineage.lineage(lineage.history("walk")[1].id).members,
    "operators": lambda lineage: lineage.operators("walk"),
    "comparison": lambda lineage: lineage.compare("walk", "walk").rows,
    "query": lambda lineage: lineage.query('SELECT "order", score FROM candidate'),
    "empty": lambda lineage: lineage.failures("walk").reasons,
}


@pytest.fixture
def lineage(tmp_path: Path) -> Iterator[evo.Lineage]:
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        land.walked(store, [land.START, {**land.START, "vector": 4}, land.END], "walk")
    with evo.Lineage(tmp_path / "lineage.db") as opened:
        yield opened


@pytest.mark.parametrize("name", TABLES)
def test_where_pandas_is_missing_df_is_one_sentence(
    lineage: evo.Lineage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = TABLES[name](lineage)
    with pytest.raises(UsageError, match=r"^df\(\) makes a pandas DataFrame, and .*: pip install pandas$"):
        table.df()


def test_answers_and_their_parts_are_data_frames_of_the_same_figures(lineage: evo.Lineage) -> None:
    pytest.importorskip("pandas")
    history = lineage.history("walk")
    assert list(history.df()["id"]) == [point.id for point in history]
    members = TABLES["family"](lineage)
    assert list(members.df()["generation"]) == [member.generation for member in members] == [-1, 0, 1]
    answer = lineage.query('SELECT "order" AS n FROM candidate ORDER BY n')
    assert answer.df().to_dict("list") == {"n": [0, 1, 2]}
    assert len(TABLES["empty"](lineage).df()) == 0
    assert list(lineage.runs().df()["name"]) == ["walk"]
