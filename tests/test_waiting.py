"""Whom a command waits for, and for how long, is known while it waits."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from evo.budget import Budget, StopReason
from evo.cli.standing import StandingLines
from evo.evaluation import Measurement
from evo.executors import BuildRequest, MeasureRequest
from evo.lineage import Environment
from evo.lineage.store import Store
from evo.problem.kernel import load_kernel
from evo.progress import InFlight, Progress, Waiting
from evo.search.check import BranchPlan, Standing, branch_genomes, check_branches, check_candidate
from evo.search.loop import Search, SearchConfig
from evo.search.run import plan_run
from evo.search.samplers import find_sampler
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

    def in_flight(self) -> tuple[InFlight, ...]:
        if self._first is None or self.seen.is_set():
            return ()
        first = self._first
        return (InFlight(genome=first.genome, workload=first.workload, stage="gate", seconds=7.0, left_s=23.0),)


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
        max_in_flight=8,
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
    assert executor.measured[0] == stored[waiting.order].candidate.proposal.genome.digest
    assert loop.progress.waiting is None


KERNEL = load_kernel("layernorm")
OWN = KERNEL.example("cpu")


class Told:
    def __init__(self, executor: Hanging) -> None:
        self._executor, self.standings = executor, list[Standing]()

    def __call__(self, standing: Standing) -> None:
        if standing.work is not None:
            self.standings.append(standing)
            self._executor.seen.set()


def test_a_check_of_a_kernel_knows_which_branch_it_waits_for() -> None:
    plan = BranchPlan(
        kernel_name="layernorm",
        kernel=KERNEL,
        target="cpu",
        arch="native",
        workloads=(OWN,),
        timed=frozenset({OWN}),
        gate=True,
        seed=1,
    )
    executor = Hanging()
    tell = Told(executor)
    try:
        branches, _ = check_branches(executor, plan, tell)
    finally:
        executor.close()
    known = branch_genomes(KERNEL, "cpu", "native", OWN)
    (standing,) = tell.standings
    assert standing.work is not None
    assert (standing.work.genome, standing.changes) in known
    assert standing.work.genome.digest == executor.measured[0]
    assert standing.count == len(known) == len(branches)
    assert standing.done < standing.count


def test_a_check_of_a_candidate_knows_what_it_waits_for() -> None:
    genome = branch_genomes(KERNEL, "cpu", "native", OWN)[0][0]
    request = BuildRequest(kernel="layernorm", target="cpu", arch="native", genome=genome, workload=OWN)
    executor = Hanging()
    tell = Told(executor)
    try:
        check_candidate(executor, KERNEL, request, gate=True, seed=1, tell=tell)
    finally:
        executor.close()
    assert [s.work.workload for s in tell.standings if s.work] == [OWN]


def test_what_a_check_waits_for_is_said_on_stderr_once_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    genome, changes = branch_genomes(KERNEL, "cpu", "native", OWN)[1]
    tell = StandingLines("branches")
    for seconds in (0.5, 2.5, 3.5, 4.0):
        work = InFlight(genome=genome, workload=OWN, stage="gate", seconds=seconds, left_s=30 - seconds)
        tell(Standing(done=3, count=18, work=work, changes=changes))
    captured = capsys.readouterr()
    assert captured.out == ""
    branch = " ".join(f"{k}={v}" for k, v in changes.items())
    assert captured.err == (
        f"evo: 3 of 18 branches done; waiting for {OWN} with {branch}: in the gate for 4 s; ended if there is no result"
        " within 26 s more\n"
    )
