"""Ancestors, descendants and differences of candidates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evo.analysis.descent import read_family
from evo.analysis.diff import diff
from evo.lineage.models import public_id
from evo.lineage.store import Store
from tests.lineage import landscapes as land
from tests.lineage import samples as s


@pytest.fixture
def ids(store: Store) -> list[str]:
    return land.kin(store)


def test_ancestors_and_descendants_are_told_apart(store: Store, ids: list[str]) -> None:
    found = read_family(store, ids[3][:12])
    assert [(k.order, k.relation, k.generation) for k in found.members] == [
        (0, "ancestor", -2), (1, "ancestor", -2), (2, "ancestor", -1), (3, "self", 0), (5, "descendant", 1),
        (6, "descendant", 2),
    ]  # fmt: skip
    assert not found.cut
    assert [k.order for k in found.members if k.main_line] == [1, 2, 3]
    assert [(p.order, p.role) for p in found.members[4].parents] == [(3, "parent"), (4, "parent")]


def test_every_step_has_its_gain_with_an_interval(store: Store, ids: list[str]) -> None:
    steps = {k.order: k for k in read_family(store, ids[2]).members}
    assert steps[2].gain == pytest.approx(0.9 / 0.6)
    assert 1.49 < steps[2].gain_low < 1.5 < steps[2].gain_high < 1.51
    assert steps[2].tie is False
    assert (steps[2].median_us, steps[2].low_us) == (pytest.approx(12.0), pytest.approx(12.0 / land.SPREAD))
    assert steps[0].gain is steps[3].gain is steps[5].gain is None, "no parent, no time, no time of the parent"
    assert steps[6].tie is True
    assert steps[2].change == {"threads": (1, 2)}


def test_the_first_descendants_are_given_and_it_is_said_that_there_are_more(store: Store) -> None:
    run = land.small_run(store)
    with store.transaction():
        for order in range(50):
            store.add(run, s.ref(order, *([0] if order else [])), land.timed(order, 0.5), elapsed_s=0.0)
    found = read_family(store, public_id(run.uid, 0), descendants=3)
    assert [k.order for k in found.members] == [0, 1, 2, 3]
    assert found.cut
    assert [k.order for k in read_family(store, public_id(run.uid, 0), descendants=0).members] == [0]
    whole = read_family(store, public_id(run.uid, 0), descendants=49)
    assert (len(whole.members), whole.cut) == (50, False)


def test_a_long_line_by_many_ways_is_followed_to_its_end_once(store: Store) -> None:
    run = land.small_run(store)
    with store.transaction():
        for order in range(1200):  # 2**600 paths
            parents = range(max(0, order - 2), order)
            store.add(run, s.ref(order, *parents), s.failed(s.Status.TIMEOUT), elapsed_s=0.0)
    members = read_family(store, public_id(run.uid, 1199), descendants=0).members
    assert [step.order for step in members] == list(range(1200))
    assert members[0].generation == -600


def test_a_parameter_that_comes_or_goes_and_flags_are_changes(store: Store) -> None:
    ids = land.walked(store, [{"a": 1, **land.START, "b": 2}, {"a": 1, **land.START, "c": True}])
    assert read_family(store, ids[1]).members[-1].change == {"b": (2, None), "c": (None, True)}


def test_the_source_of_a_step_is_compared_with_the_first_parents(store: Store, ids: list[str]) -> None:
    steps = {k.order: k.diff for k in read_family(store, ids[2], diff=True).members}
    assert steps[0] is None
    assert steps[2].splitlines()[:5] == ["--- #1", "+++ #2", "@@ -1,4 +1,4 @@", "-// candidate 1: μs", "+// candidate 2: μs"]


def test_two_candidates_are_compared_thing_by_thing(store: Store, ids: list[str]) -> None:
    found = diff(store, ids[2], ids[4])
    rows = {(r.section, r.name): r for r in found.rows}
    assert (rows["genome", "threads"].one, rows["genome", "threads"].other) == (2, 4)
    assert rows["genome", "threads"].differs
    assert not rows["genome", "vector"].differs
    assert (rows["build", "registers"].one, rows["build", "occupancy"].other) == (40, 0.75)
    assert rows["candidate", "operator"].one == "crossover"
    assert rows["time", "search median_us"].other == pytest.approx(14.0)
    assert found.gain == pytest.approx(0.6 / 0.7)
    assert (found.tie, found.timed_in, found.same_code) == (False, "search", False)
    assert "-// candidate 2: μs" in found.source


def test_finals_count_more_than_the_search_and_other_problems_are_not_compared(store: Store, ids: list[str]) -> None:
    run = store.run("kin")
    store.add_final(run, 2, s.final(0.5), elapsed_s=9.0)
    store.add_final(run, 4, s.final(0.55), elapsed_s=9.0)
    found = diff(store, ids[2], ids[4])
    assert (found.timed_in, found.gain) == ("final", pytest.approx(0.5 / 0.55))
    assert diff(store, ids[2], ids[0]).timed_in == "search"
    other = store.create_run(replace(s.SPEC, name="large", workloads=(s.LARGE,)), s.ENVIRONMENT)
    store.add(other, s.ref(0), replace(s.passed(0, 0.5, task=0), timings=(s.timing(s.LARGE, 0.5),)), elapsed_s=0.0)
    apart = diff(store, ids[2], public_id(other.uid, 0))
    assert apart.gain is apart.timed_in is None


def test_equal_code_and_missing_parts_are_said(store: Store, ids: list[str]) -> None:
    assert diff(store, ids[2], ids[2]).same_code is True
    assert diff(store, ids[2], ids[2]).source == ""
    run = store.run("kin")
    store.add(run, s.ref(7, 2), s.failed(s.Status.TIMEOUT), elapsed_s=9.0)
    found = diff(store, ids[2], public_id(run.uid, 7))
    assert found.same_code is found.gain is found.source is found.ptx is None


def test_ptx_is_compared_as_text(store: Store) -> None:
    run = land.small_run(store)
    for order in range(2):
        code = b"//\n.version 8.0\n.visible .entry f() {\n add.f32 %%f1, %%f2, %d.0;\n ret;\n}\n" % order
        built = replace(s.build(order, code=code), arch="compute_89")
        store.add(run, s.ref(order), replace(land.timed(order, 0.5), build=built), elapsed_s=0.0)
    found = diff(store, *(public_id(run.uid, order) for order in range(2)))
    assert "+ add.f32 %f1, %f2, 1.0;" in found.ptx.splitlines()
