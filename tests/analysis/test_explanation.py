"""What made a candidate fast, told from what was measured and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from evo.analysis.descent import read_family
from evo.analysis.explanation import explain
from evo.analysis.operators import read_operators
from evo.errors import StoreError
from evo.lineage.store import Store
from tests.lineage import landscapes as land
from tests.lineage import samples as s


def between(*edits: str) -> land.Point:
    """The start with some edits made; `path` brings `stages` along."""
    point = {**land.START, **{name: land.END[name] for name in edits}}
    return {**point, "stages": land.END["stages"]} if "path" in edits else point


def test_with_everything_measured_each_edit_has_its_own_gain(store: Store) -> None:
    names = sorted(land.GAINS)
    points = [between(*some) for n in range(5) for some in combinations(names, n)]
    ids = land.walked(store, points)
    found = explain(store, ids[-1])
    assert {next(iter(e.change)): pytest.approx(e.gain) for e in found.edits} == land.GAINS
    assert [next(iter(e.change)) for e in found.edits] == ["vector", "path", "threads", "hints"]
    assert {e.pairs for e in found.edits} == {8}
    assert found.base == land.START
    assert found.base_id == ids[0]
    assert found.gain == pytest.approx(1.3 * 1.6 * 1.05)
    assert found.rest == pytest.approx(1.0)
    assert [e.tie for e in found.edits] == [False, False, False, True]
    for edit in found.edits:
        assert edit.low < land.GAINS[next(iter(edit.change))] < edit.high


def test_a_conditional_parameter_is_part_of_the_edit_it_comes_with(store: Store) -> None:
    ids = land.walked(store, [between(), between("path"), between("path", "vector")])
    found = explain(store, ids[-1])
    assert sorted(map(sorted, (e.change for e in found.edits))) == [["path", "stages"], ["vector"]]
    path = next(e for e in found.edits if "path" in e.change)
    assert path.change == {"path": ("reread", "shared"), "stages": (None, 3)}
    assert (path.alone, path.last) == (pytest.approx(1.3), None)


def test_what_was_not_measured_is_not_made_up(store: Store) -> None:
    ids = land.walked(store, [between(), between("path", "vector", "hints"), between("path", "vector", "hints", "threads")])
    found = explain(store, ids[-1])
    by_name = {next(iter(e.change)): e for e in found.edits}
    assert by_name["threads"].gain == pytest.approx(1.05)
    assert by_name["threads"].last == pytest.approx(1.05)
    for name in ("path", "vector", "hints"):
        edit = by_name[name]
        assert edit.gain is edit.low is edit.high is edit.tie is edit.alone is edit.last is None
        assert edit.pairs == 0
    assert found.edits[0].change == by_name["threads"].change, "what is known comes first"
    assert found.rest == pytest.approx(1.3 * 1.6)
    assert by_name["threads"].since == ids[2]
    assert by_name["path"].since_order == 1


def test_the_range_tells_that_an_edit_depends_on_another(store: Store) -> None:
    run = land.small_run(store)
    values = {(): 0.9, ("vector",): 0.8, ("threads",): 0.88, ("threads", "vector"): 0.4}
    for order, (edits, value) in enumerate(values.items()):
        store.add(run, land.ref(order, between(*edits)), land.timed(order, value), elapsed_s=0.0)
    found = explain(store, store.evaluations(run)[-1].public_id)
    vector = next(e for e in found.edits if "vector" in e.change)
    assert vector.low == pytest.approx(0.9 / 0.8, rel=0.01)
    assert vector.high == pytest.approx(0.88 / 0.4, rel=0.01)
    assert vector.alone == pytest.approx(0.9 / 0.8)
    assert vector.last == pytest.approx(0.88 / 0.4)
    assert vector.gain == pytest.approx((0.9 / 0.8 * 0.88 / 0.4) ** 0.5)


def test_it_begins_where_it_is_told_to(store: Store) -> None:
    ids = land.walked(store, [between(), between("vector"), between("vector", "threads")])
    found = explain(store, ids[2], ids[1][:12])
    assert [e.change for e in found.edits] == [{"threads": (128, 256)}]
    assert found.base_id == ids[1]
    given = explain(store, ids[2], {**land.START, "vector": 2})
    assert given.base_id is given.gain is given.rest is None
    assert {name for e in given.edits for name in e.change} == {"vector", "threads"}
    assert explain(store, ids[2], ids[2]).edits == ()


def test_what_has_no_time_or_is_another_problem_is_refused(store: Store) -> None:
    ids = land.walked(store, [between()])
    run = store.run("small")
    store.add(run, land.ref(1, between("path"), 0), s.refused(1), elapsed_s=0.0)
    with pytest.raises(StoreError, match="has no time, so there is no gain to explain"):
        explain(store, store.evaluations(run)[1].public_id)
    other = store.create_run(replace(s.SPEC, name="other", kernel="softmax"), s.ENVIRONMENT)
    store.add(other, s.ref(0), s.passed(0), elapsed_s=0.0)
    with pytest.raises(StoreError, match="there is no way from one to the other"):
        explain(store, ids[0], store.evaluations(other)[0].public_id)


def test_an_edit_that_leaves_the_machine_code_as_it_is_gains_nothing_for_certain(store: Store) -> None:
    """Such candidates are not timed: the time of the one whose code they are is theirs."""
    run = land.small_run(store)
    store.add(run, land.ref(0, between()), land.timed(0, 0.9), elapsed_s=0.0)
    store.add(run, land.ref(1, between("hints"), 0), replace(s.same_code(1, 0), timings=()), elapsed_s=0.0)
    store.add(run, land.ref(2, between("hints", "vector"), 1), land.timed(2, 0.6), elapsed_s=0.0)
    ids = [result.public_id for result in store.evaluations(run)]
    found = {next(iter(e.change)): e for e in explain(store, ids[2]).edits}
    hints = found["hints"]
    assert (hints.gain, hints.low, hints.high, hints.tie, hints.same_code, hints.pairs) == (1, 1, 1, True, True, 1)
    vector = found["vector"]
    assert (vector.gain, vector.same_code) == (pytest.approx(1.5), False)
    steps = {k.order: k for k in read_family(store, ids[2]).members}
    assert (steps[1].gain, steps[1].tie, steps[1].median_us) == (1.0, True, pytest.approx(18.0))
    assert steps[2].gain == pytest.approx(1.5), "over a parent that was not timed itself"
    explained = explain(store, ids[1])
    assert (explained.gain, explained.low, explained.ratio) == (1.0, 1.0, 0.9)
    mutation = read_operators(store, "small")[0]
    assert (mutation.compared, mutation.better, mutation.new_code) == (2, 1, 2)
