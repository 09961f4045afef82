"""The views say what evo itself says, under names that others may rely on, whoever opens the database."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import samples as s
from sqlalchemy import inspect, text

from evo.analysis.descent import read_family
from evo.analysis.runs import find_best
from evo.evaluation import Parent
from evo.lineage.store import Store

# The promise of docs/database.md: more may follow at the end, none of these may go or change its place.
COLUMNS = {
    "v_best": [
        "kernel", "target", "device", "arch", "workload", "dtype", "run", "candidate", "order", "operator",
        "is_winner", "stage", "protocol", "median_us", "low_us", "high_us", "speedup", "speedup_low",
        "speedup_high", "score", "genome", "created", "disturbed",
    ],
    "v_lineage": [
        "run", "kernel", "workload", "child", "child_order", "operator", "position", "role", "parent",
        "parent_order", "child_status", "child_score", "parent_score", "gain", "child_genome", "parent_genome",
    ],
    "v_timings": [
        "run", "kernel", "target", "arch", "device", "workload", "candidate", "order", "contender", "stage", "round",
        "protocol", "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high", "calls_per_sample", "sets",
        "samples_us", "clocks",
    ],
}  # fmt: skip


def fill(store: Store) -> None:
    """Three runs, one with a winner, one refused by its final, on two tasks and two devices."""
    first, second = s.new_run(store, "first"), s.new_run(store, "second")
    other = store.create_run(replace(s.SPEC, name="other"), replace(s.ENVIRONMENT, device="NVIDIA H200"))
    store.add_baselines(first, 0, [s.timing(contender="torch", ratio=1.0)])
    for run, scores in ((first, (0.9, 0.5, 0.4)), (second, (0.8, 0.45)), (other, (0.7, 0.3))):
        for order, score in enumerate(scores):
            parents = () if order == 0 else (0, Parent(1, "mate")) if order == 2 else (0,)
            store.add(run, s.ref(order, *parents), s.passed(order, score), elapsed_s=float(order))
    store.add(first, s.ref(3, 0), s.refused(3), elapsed_s=3.0)
    store.add(first, s.ref(4, task=1), s.passed(4, 0.6, task=1), elapsed_s=4.0)
    for ratio in (0.43, 0.42):
        store.add_final(first, 2, s.final(ratio), elapsed_s=5.0)
    store.set_winner(first, 0, 2)
    store.add_final(second, 1, s.refused_final(), elapsed_s=5.0)


def test_their_columns_are_as_promised(store: Store) -> None:
    with store.reading() as connection:
        inspector = inspect(connection)
        assert set(inspector.get_view_names()) == set(COLUMNS)
        for name, columns in COLUMNS.items():
            assert [c["name"] for c in inspector.get_columns(name)][: len(columns)] == columns


def test_v_best_is_what_evo_best_says(store: Store) -> None:
    fill(store)
    assert find_best(store, run="second")[0].order == 0, "its final has refused the other, as another's has not"
    expected = find_best(store)
    with store.reading() as connection:
        rows = connection.execute(text("SELECT * FROM v_best ORDER BY kernel, target, device, workload")).all()
    assert len(rows) == len(expected) == 3
    for row, best in zip(rows, expected, strict=True):
        mine = (row.kernel, row.target, row.device, row.workload, row.run, row.candidate, row.order, row.stage)
        assert mine == (
            best.kernel, best.target, best.device, best.workload, best.run, best.id, best.order, best.stage
        )  # fmt: skip
        assert (row.median_us, row.low_us, row.high_us) == (best.median_us, best.low_us, best.high_us)
        assert row.speedup == pytest.approx(1 / best.ratio)
        assert row.speedup_low <= row.speedup <= row.speedup_high
        assert bool(row.is_winner) is best.winner


def test_v_lineage_has_a_row_for_each_parent_and_one_for_each_root(store: Store) -> None:
    fill(store)
    query = text("SELECT * FROM v_lineage WHERE run = 'first' ORDER BY child_order, \"position\"")
    with store.reading() as connection:
        rows = connection.execute(query).all()
    assert [(row.child_order, row.parent_order, row.role) for row in rows] == [
        (0, None, None), (1, 0, "parent"), (2, 0, "parent"), (2, 1, "mate"), (3, 0, "parent"), (4, None, None)
    ]  # fmt: skip
    assert rows[1].gain == pytest.approx(0.9 / 0.5)
    assert rows[4].gain is None  # it was refused
    assert [step.id for step in read_family(store, rows[2].child, descendants=0).members][-1] == rows[2].child


def test_v_best_tells_disturbed_figures_and_puts_them_behind_all_others(store: Store) -> None:
    for device, rounds_of in (("a", {"loud": 12.0, "quiet": 0.0}), ("b", {"alone": 3.0})):
        for name, rounds in rounds_of.items():
            run = store.create_run(replace(s.SPEC, name=name), replace(s.ENVIRONMENT, device=device))
            found = s.passed(0, 0.05 if rounds else 0.5)
            timings = tuple(replace(t, clocks={**t.clocks, "disturbed": rounds}) for t in found.timings)
            store.add(run, s.ref(0), replace(found, timings=timings), elapsed_s=1.0)
            store.set_winner(run, 0, 0)
    wanted = "SELECT device, run, disturbed FROM v_best ORDER BY device"
    assert s.rows(store, wanted) == [("a", "quiet", 0), ("b", "alone", 1)]


def test_v_lineage_can_be_followed_to_the_roots(store: Store) -> None:
    """The example of docs/database.md."""
    fill(store)
    (name,) = s.rows(store, "SELECT candidate FROM v_best WHERE device = 'NVIDIA L4' ORDER BY speedup DESC LIMIT 1")[0]
    sql = (
        f"WITH RECURSIVE line(candidate) AS (SELECT CAST('{name}' AS VARCHAR(16)) UNION SELECT v.parent FROM v_lineage v"
        " JOIN line ON v.child = line.candidate WHERE v.parent IS NOT NULL)"
        " SELECT DISTINCT v.child_order FROM v_lineage v JOIN line ON v.child = line.candidate ORDER BY 1"
    )
    ancestors = read_family(store, name, descendants=0).members
    assert s.rows(store, sql) == [(step.order,) for step in ancestors] == [(0,), (1,), (2,)]


def test_v_timings_has_every_timing_with_its_names(store: Store) -> None:
    fill(store)
    every = s.rows(store, "SELECT count(*), count(candidate) FROM v_timings")
    assert every == s.rows(store, "SELECT count(*), count(candidate_id) FROM timing")
    final = s.rows(store, "SELECT run, \"order\", protocol, round FROM v_timings WHERE stage = 'final'")
    assert final == [("first", 2, "final", 1), ("first", 2, "final", 2)]


def test_duckdb_reads_them(path: Path) -> None:
    """DuckDB's sqlite extension comes as a package where its own site cannot be reached."""
    duckdb = pytest.importorskip("duckdb", reason="the package duckdb is not installed")
    with Store.open(path, write=True) as store:
        fill(store)
    package = find_spec("duckdb_extension_sqlite_scanner")
    places = package.submodule_search_locations if package else None
    files = [file for place in places or () for file in Path(place).rglob("*.duckdb_extension")]
    with duckdb.connect() as connection:
        try:
            connection.execute(f"LOAD '{files[0]}'" if files else "INSTALL sqlite; LOAD sqlite")
        except duckdb.Error as error:
            pytest.skip(f"DuckDB cannot load its sqlite extension here: {str(error).splitlines()[0]}")
        connection.execute(f"ATTACH '{path}' AS lineage (TYPE sqlite, READ_ONLY)")
        for name in COLUMNS:
            (n,) = connection.execute(f"SELECT count(*) FROM lineage.{name}").fetchone()
            assert n > 0
