"""Whom a command waits for, and for how long, is known while it waits."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from evo.budget import Budget, StopReason
from evo.evaluation import Measurement
from evo.executors import MeasureRequest
from evo.kernel import load_kernel
from evo.progress import Progress, UnderWay, Waiting
from evo.run import plan_run
from evo.samplers import find_sampler
from evo.search import Search, SearchConfig
from evo.store import Environment
from evo.store.store import Store
from evo.targets import find_target
from tests.landscape import LandscapeExecutor


class Hanging(LandscapeExecutor):
    """The first candidate has no result before somebody has seen that it is waited for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen = threading.Event()
        self._first: MeasureRequest | None = None

    def measure(self, request: MeasureRequest) -> Future[Measurement]:
        if self._first is not None:
            return super().measure(request)
        self._first = request
        measured = super().measure(request)
        return self._pool.submit(lambda: (self.seen.wait(60), measured.result())[1])

    def under_way(self) -> tuple[UnderWay, ...]:
        if self._first is None or self.seen.is_set():
            return ()
        first = self._first
        return (UnderWay(genome=first.genome, workload=first.workload, stage="gate", seconds=7.0, left_s=23.0),)


class Looking:
    def __init__(self, executor: Hanging) -> None:
        self._executor, self.waited_for = executor, list[Waiting]()

    def update(self, progress: Progress) -> None:
        if progress.waiting is not None:
            self.waited_for.append(progress.waiting)
            self._executor.seen.set()


def test_a_search_knows_which_candidate_it_waits_for(tmp_path: Path) -> None:
    kernel = load_kernel("layernorm")
    config = SearchConfig(
        kernel="layernorm",
        target="cpu",
        arch="native",
        workloads=kernel.workloads["cpu"][:1],
        sampler="random",
        seed=5,
        window=8,
        budget=Budget(evaluations=20),
    )
    executor = Hanging()
    onlooker = Looking(executor)
    with Store.open(tmp_path / "lineage.db", write=True) as store:
        run = store.create_run(plan_run(config, kernel, None), Environment(device="a landscape", arch="none"))
        try:
            limits = find_target("cpu").limits("native")
            loop = Search(config, kernel, limits, find_sampler("random"), executor, store, run, onlooker)
            assert loop.run() is StopReason.EVALUATIONS
        finally:
            executor.close()
        stored = store.evaluations(run)
    (waiting,) = {(w.order, w.work.stage, w.work.left_s): w for w in onlooker.waited_for}.values()
    assert executor.measured[0] == stored[waiting.order].ref.proposal.genome.digest
    assert loop.progress.waiting is None
