"""Pruning drops what no question needs, and never what winners, finalists, leaders and their ancestors have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import samples as s

from evo.analysis.descent import read_family
from evo.errors import StoreError
from evo.evaluation import Parent
from evo.lineage import RunStatus, StoredEvaluation, StoredRun
from evo.lineage.prune import Part, chosen_runs, prune
from evo.lineage.store import Store

ALL = (Part.SOURCES, Part.BINARIES, Part.SAMPLES)
FAMILY = {0, 1, 3, 5}  # 5, the winner, comes from 3, that from 1, that from 0


@pytest.fixture
def run(store: Store) -> str:
    """0 - 1 - 3 - 5 (winner); 2 and 4 beside them, 6 refused, 7 not compiled; 8 the leader of the other task.

    The code of 6, 7 and 9, which were not the fastest when they were recorded, is not stored.
    """
    made = s.new_run(store, "old")
    parents = {1: (0,), 2: (0,), 3: (1,), 4: (Parent(2), Parent(1, "mate")), 5: (3,), 6: (4,), 7: (2,)}
    for order in range(8):
        evaluation = s.refused(order) if order == 6 else s.passed(order, 0.9 - 0.1 * order)
        evaluation = s.not_compiled(order) if order == 7 else evaluation
        store.add(made, s.ref(order, *parents.get(order, ())), evaluation, elapsed_s=float(order))
    store.add(made, s.ref(8, task=1), s.passed(8, 0.6, task=1), elapsed_s=8.0)
    store.add(made, s.ref(9, task=1), s.passed(9, 0.8, task=1), elapsed_s=9.0)
    store.add_final(made, 5, s.final(0.4), elapsed_s=10.0)
    store.set_winner(made, 0, 5)
    store.set_status(made, RunStatus.FINISHED, elapsed_s=11.0)
    return made.name


def holders(store: Store, run: str) -> tuple[set[int], set[int], set[int]]:
    """Orders of the candidates that have a source, code and samples."""
    stored = store.run(run)
    sources, codes, samples = set(), set(), set()
    for evaluation in store.evaluations(stored):
        order = evaluation.candidate.order
        source, code = s.kept(store, evaluation.public_id)
        if source is not None:
            sources.add(order)
        if code is not None:
            codes.add(order)
        if any(t.samples_us for t in evaluation.evaluation.timings):
            samples.add(order)
    return sources, codes, samples


def artefacts(store: Store) -> int:
    return int(s.rows(store, "SELECT count(*) FROM artefact")[0][0])


def whole(store: Store, run: StoredRun) -> list[StoredEvaluation]:
    """All that a search is continued from, which the single samples are no part of."""
    return [
        replace(e, evaluation=replace(e.evaluation, timings=tuple(replace(t, samples_us=()) for t in e.evaluation.timings)))
        for e in store.evaluations(run)
    ]


def test_candidates_stay_and_the_winners_line_and_every_leader_keep_everything(store: Store, run: str) -> None:
    stored = store.run(run)
    before = whole(store, stored)
    ancestors = read_family(store, store.evaluations(stored)[5].public_id, descendants=0).members
    done = prune(store, [run], ALL, dry=False)
    kept = FAMILY | {8}
    assert holders(store, run) == (kept, kept, kept)
    assert (done.kept, artefacts(store)) == (len(kept), 2 * len(kept))
    assert whole(store, stored) == before
    assert read_family(store, ancestors[-1].id, descendants=0).members == ancestors


@pytest.mark.parametrize(
    ("parts", "lost_sources", "lost_codes", "lost_samples"),
    [
        ((Part.FAILED,), {6, 7}, set(), set()),
        ((Part.SOURCES,), {2, 4, 6, 7, 9}, set(), set()),
        ((Part.BINARIES,), set(), {2, 4}, set()),
        ((Part.SAMPLES,), set(), set(), {2, 4, 9}),
        ((Part.FAILED, Part.SAMPLES), {6, 7}, set(), {2, 4, 9}),
    ],
)
def test_each_part_can_go_alone(
    store: Store,
    run: str,
    parts: Collection[Part],
    lost_sources: set[int],
    lost_codes: set[int],
    lost_samples: set[int],
) -> None:
    sources, codes, samples = holders(store, run)
    promised = prune(store, [run], list(parts), dry=True)
    assert holders(store, run) == (sources, codes, samples)
    before = artefacts(store)
    done = prune(store, [run], list(parts), dry=False)
    assert done == promised
    assert holders(store, run) == (sources - lost_sources, codes - lost_codes, samples - lost_samples)
    assert (done.sources, done.binaries) == (len(lost_sources), len(lost_codes))
    assert before - artefacts(store) == done.artefacts == len(lost_sources) + len(lost_codes)
    assert done.bytes > 0
    again = prune(store, [run], list(parts), dry=False)
    assert (again.sources, again.binaries, again.samples, again.bytes) == (0, 0, 0, 0)


def test_a_source_that_another_run_has_too_stays(store: Store, run: str) -> None:
    other = s.new_run(store, "other")
    store.add(other, s.ref(2), s.passed(2), elapsed_s=0.0)
    done = prune(store, [run], ALL, dry=True)
    assert prune(store, [run], ALL, dry=False) == done
    assert done.artefacts == done.sources + done.binaries - 2
    assert holders(store, "other")[0] == {2}


def test_a_source_that_others_are_packed_against_stays_as_long_as_they(store: Store) -> None:
    made = s.new_run(store, "packed")
    for order in range(3):
        store.add(made, s.ref(order), s.passed(order, 0.9 - order * 0.1), elapsed_s=0.0)
    bases = "SELECT count(*), count(base_sha) FROM artefact WHERE kind = 'source'"
    assert s.rows(store, bases) == [(3, 2)]
    store.set_winner(made, 0, 2)
    store.set_status(made, RunStatus.FINISHED, elapsed_s=1.0)
    assert prune(store, ["packed"], [Part.SOURCES], dry=False).artefacts == 1
    assert holders(store, "packed")[0] == {2}
    assert s.rows(store, bases) == [(2, 1)]
    store.set_winner(made, 0, 0)
    promised = prune(store, ["packed"], [Part.SOURCES], dry=True)
    assert prune(store, ["packed"], [Part.SOURCES], dry=False) == promised
    assert (promised.sources, promised.artefacts) == (1, 2)
    assert s.rows(store, bases) == [(0, 0)]
    store.add(made, s.ref(3), s.passed(3, 0.9), elapsed_s=0.0)
    assert holders(store, "packed")[0] == {3}, "it is not packed against what is gone"


def test_the_original_of_a_kept_copy_stays(store: Store) -> None:
    made = s.new_run(store, "copies")
    for order in range(3):
        store.add(made, s.ref(order), s.passed(order, 0.9), elapsed_s=0.0)
    store.add(made, s.ref(3), s.same_code(3, 1, 0.5), elapsed_s=0.0)
    store.set_winner(made, 0, 3)
    store.set_status(made, RunStatus.FINISHED, elapsed_s=1.0)
    prune(store, ["copies"], ALL, dry=False)
    assert holders(store, "copies")[0] == {1, 3}


def test_runs_are_chosen_by_name_or_age(store: Store, run: str) -> None:
    s.new_run(store, "alive")
    later = datetime.now(UTC) + timedelta(days=1)
    assert chosen_runs(store, (), later) == (("old",), ("alive",))
    assert chosen_runs(store, (), later - timedelta(days=2)) == ((), ())
    assert chosen_runs(store, ["ol"], None) == (("old",), ())
    with pytest.raises(StoreError, match="run 'alive' is being searched; prune it when it has ended"):
        chosen_runs(store, ["alive"], None)


def test_a_vacuum_gives_the_room_back(store: Store) -> None:
    made = s.new_run(store, "large")
    with store.transaction():
        for order in range(300):
            store.add(made, s.ref(order), s.passed(order, 1 / (order + 1)), elapsed_s=0.0)
    store.set_status(made, RunStatus.FINISHED, elapsed_s=1.0)
    if store.path is not None:
        store.vacuum()
    before = store.size()
    prune(store, ["large"], ALL, dry=False)
    store.vacuum()
    if store.path is not None:  # a server keeps the room, for what is written next
        assert store.size() < 0.8 * before
    assert len(store.evaluations(made)) == 300
