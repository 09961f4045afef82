"""Few variants for many points: those that are kept, and runs whose tasks exchange what they find."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.finals import read_run_finals
from evo.errors import UsageError
from evo.job.job import check_workloads
from evo.lineage import RunSpec
from evo.lineage.store import Store
from evo.search.cover import choose
from evo.search.finals import hold_all_finals
from tests.landscape import LandscapeExecutor, code_of, opened, timing
from tests.search.test_loop import KERNEL, configure, genomes, longer, search

GRID = "rows=64/512/4096,cols=1024,dtype=float32"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Store.open(tmp_path / "lineage.db", write=True) as found:
        yield found


def covering(evaluations: int) -> RunSpec:
    return configure(evaluations, seed=3, grid=GRID)


def test_every_point_is_served_almost_as_fast_as_it_can_be_by_as_few_as_are_allowed() -> None:
    draw = random.Random(0)
    for _ in range(200):
        points, variants, most = draw.randrange(1, 12), draw.randrange(1, 10), draw.randrange(1, 8)
        times = (0.0, 0.02, 0.05, 0.5)
        known = [{v: 1 + draw.choice(times) for v in range(variants) if draw.random() < 0.7} for _ in range(points)]
        chosen = choose(known, within=0.03, most=most)
        assert len(chosen) == len(set(chosen)) <= most
        served = [any(point.get(v, 9.0) <= 1.03 * min(point.values()) for v in chosen) for point in known if point]
        assert all(served) or len(choose(known, within=0.03, most=99)) > most
        assert len(chosen) <= len(served)


def test_one_that_serves_all_is_kept_alone_and_of_equal_ones_the_faster() -> None:
    assert choose([{"a": 1.0, "all": 1.02}, {"b": 2.0, "all": 2.05}, {"all": 3.0}, {}]) == ["all"]
    assert choose([{"one": 1.0, "two": 1.01}, {"one": 1.02, "two": 1.0}]) == ["two"]
    assert choose([{"near": 1.04, "own": 1.0}, {"near": 1.0}]) == ["own", "near"]
    assert choose([{"near": 1.04, "own": 1.0}, {"near": 1.0}], most=1) == ["near"]
    assert choose([{"one": 1.0, "two": 1.01}], preferred=["two"]) == ["two"]
    assert choose([{"near": 1.04, "own": 1.0}, {"near": 1.0}], within=0, most=1) == ["near"]


def test_a_grid_is_the_product_of_its_values() -> None:
    found = check_workloads(KERNEL, "cpu", ["rows=5,cols=3,dtype=float32"], ["rows=1/2, cols=3,dtype=bfloat16/float32"])
    assert [(w.dim("rows"), w.dtype) for w in found] == [
        (5, "float32"), (1, "bfloat16"), (1, "float32"), (2, "bfloat16"), (2, "float32")
    ]  # fmt: skip
    with pytest.raises(UsageError, match="named twice"):
        check_workloads(KERNEL, "cpu", (), ["rows=8/8,cols=64,dtype=float32"])
    with pytest.raises(UsageError, match="'rows=' is not name=value"):
        check_workloads(KERNEL, "cpu", (), ["rows=8/,cols=64,dtype=float32"])


def test_what_one_task_finds_is_tried_on_the_others_and_a_resumed_run_proposes_the_same(store: Store) -> None:
    run = search(covering(60), store, LandscapeExecutor(1))[2]
    resumed = search(longer(run, evaluations=150), store, LandscapeExecutor(2))[2]
    whole = search(replace(covering(150), options=run.spec.options), store, LandscapeExecutor(3))[2]
    assert genomes(store, resumed) == genomes(store, whole)
    found = {e.candidate.order: e.candidate for e in store.evaluations(whole)}
    assert len({(c.task, c.proposal.genome) for c in found.values()}) == len(found), "none is proposed twice"
    migrants = [c for c in found.values() if c.proposal.operator == "migration"]
    assert {c.task for c in migrants} == {0, 1, 2}
    for c in migrants:
        origin = found[c.proposal.parents[0].order]
        assert origin.task != c.task
        assert origin.proposal.genome == c.proposal.genome


def test_few_variants_win_all_tasks_and_the_table_says_which(store: Store) -> None:
    """On this landscape a genome is as fast on one workload as on the other."""
    executor = LandscapeExecutor(1)
    executor.close = lambda: None  # type: ignore[method-assign]
    found, _, run = search(covering(400), store, executor)
    held = hold_all_finals(found, opened(run, store, executor), count=4)
    winners = [finals.winner.candidate.proposal.genome for finals in held if finals.winner]
    assert len(winners) == 3
    cover = read_run_finals(store, run.name).cover
    assert cover.variants == len({code_of(w) for w in winners}) == 1
    assert [p.variant for p in cover.points] == [1, 1, 1]
    assert {p.workload for p in cover.points} == {w.key for w in run.spec.workloads}
    assert 0.0 <= cover.median <= cover.worst <= 0.03


def test_a_workload_whose_reference_is_faster_needs_no_variant(store: Store) -> None:
    def slower_at_64(request: Any, found: Any) -> Any:
        if request.workload.dim("rows") != 64 or not getattr(found, "timings", ()):
            return found
        slowed = [
            t if t.contender in ("torch", "copy") else timing(t.workload, 3 * t.ratio, t.contender, t.protocol)
            for t in found.timings
        ]
        return replace(found, timings=tuple(slowed))

    executor = LandscapeExecutor(1, change=slower_at_64)
    executor.close = lambda: None  # type: ignore[method-assign]
    found, _, run = search(covering(150), store, executor)
    hold_all_finals(found, opened(run, store, executor), count=4)
    cover = read_run_finals(store, run.name).cover
    assert cover.variants == 1
    assert {p.workload.split(",")[0]: p.variant for p in cover.points} == {"rows=64": None, "rows=512": 1, "rows=4096": 1}
    (lost,) = (p for p in cover.points if p.variant is None)
    assert lost.speedup < 1
    assert lost.distance == 0
