"""Anybody's question in SQL is answered, and nothing else is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.runs import read_history
from evo.analysis.sql import select_sql
from evo.errors import UsageError
from evo.lineage.store import Store
from tests.lineage import landscapes as land

_ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def reader(where: str) -> Iterator[Store]:
    with Store.open(where, write=True) as store:
        land.walked(store, [land.START, land.END], "mine")
    with Store.open(where, write=False) as opened:
        yield opened


def untouched(reader: Store) -> bool:
    return [p.score for p in read_history(reader, "mine")] == [land.ratio(land.START), land.ratio(land.END)]


def test_rows_are_cut_at_the_limit_and_that_is_said(reader: Store) -> None:
    sql = 'SELECT "order" FROM candidate ORDER BY 1'
    assert select_sql(reader, sql, limit=1).rows == ((0,),)
    assert select_sql(reader, sql, limit=1).cut
    assert not select_sql(reader, sql, limit=2).cut
    assert select_sql(reader, sql).rows == ((0,), (1,))
    assert select_sql(reader, "SELECT 1 AS a, 2 AS a", limit=5).columns == ("a", "a")
    endless = select_sql(reader, _ENDLESS.replace("count(*)", "x"), limit=3, timeout_s=60.0)
    assert (endless.rows, endless.cut) == (((1,), (2,), (3,)), True)


def test_a_query_that_never_ends_is_stopped(reader: Store) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"the query was not done after 0\.2 s and was stopped"):
        select_sql(reader, _ENDLESS, timeout_s=0.2)
    assert time.monotonic() - started < 60
    assert untouched(reader), "the connection is as it was"


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM candidate",
        "UPDATE candidate SET score = 0",
        "DROP TABLE candidate",
        "WITH x AS (SELECT 1) DELETE FROM candidate",
        "SELECT 1; COMMIT; DELETE FROM candidate",
        "COMMIT",
        "VACUUM",
        "/* a question */ DELETE FROM candidate",
        "-- SELECT\nDELETE FROM candidate",
    ],
)
def test_what_writes_is_refused_in_one_sentence(reader: Store, sql: str) -> None:
    with pytest.raises(UsageError, match=r"^the query cannot be run: ") as refused:
        select_sql(reader, sql, timeout_s=60.0)
    assert "\n" not in str(refused.value)
    assert untouched(reader)


def test_how_a_write_would_be_done_can_be_asked_and_is_not_done(reader: Store) -> None:
    assert select_sql(reader, "EXPLAIN DELETE FROM candidate").rows
    assert untouched(reader)


@pytest.mark.parametrize(
    ("sql", "limits", "sentence"),
    [
        (" \n", {}, "the query is empty"),
        ("SELECT 'a\0b'", {}, "NUL"),
        ("SELECT x FROM y", {}, '(no such table: y|relation "y" does not exist).*; there are the views v_best, v_'),
        ("SELECT 1", {"limit": -1}, "a limit of -1 rows cannot be"),
        ("SELECT 1", {"timeout_s": 0.0}, "a time limit of"),
        ("SELECT 1", {"timeout_s": float("nan")}, "a time limit of"),
    ],
)
def test_what_is_no_query_or_no_limit_is_said(reader: Store, sql: str, limits: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        select_sql(reader, sql, **limits)


class TestOfAFile:
    @pytest.fixture
    def reader(self, path: Path) -> Iterator[Store]:
        with Store.open(path, write=True) as store:
            land.walked(store, [land.START], "mine")
        with Store.open(path, write=False) as opened:
            yield opened

    @pytest.mark.parametrize(
        "sql",
        [
            "ATTACH 'other.db' AS other",
            "PRAGMA query_only = OFF",
            "PRAGMA writable_schema = 1",
        ],
    )
    def test_it_stays_in_this_database_as_it_is(
        self, reader: Store, sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match="is no question"):
            select_sql(reader, sql)
        assert not (tmp_path / "other.db").exists()

    def test_its_tables_can_be_asked_for(self, reader: Store) -> None:
        found = select_sql(reader, "PRAGMA table_info(candidate)")
        assert "genome" in [row[1] for row in found.rows]
        assert select_sql(reader, "EXPLAIN QUERY PLAN SELECT * FROM run").rows

    def test_a_value_that_would_fill_the_memory_is_refused(self, reader: Store) -> None:
        with pytest.raises(UsageError, match="too big"):
            select_sql(reader, "SELECT zeroblob(900000000)")
        assert select_sql(reader, "SELECT length(zeroblob(1000000))").rows == ((1_000_000,),)
