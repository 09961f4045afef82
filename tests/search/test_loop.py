"""The loop: what is proposed depends on the seed and the measurements, and on nothing else."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from evo.analysis.finals import read_run_finals
from evo.analysis.runs import find_best, find_run
from evo.errors import StoreError, UsageError
from evo.evaluation import AA_CONTROL, FINALIST, Build, Candidate, Costs, Evaluation, Proposal, Status
from evo.executors import InFlight
from evo.job.job import Job, check_workloads, plan_run
from evo.lineage import Environment, RunSpec, Stage, StoredRun
from evo.lineage.store import Store
from evo.measure import RaceRequest, RaceResult, Request
from evo.measure.clock import OVERTIME
from evo.problem.genome import Genome
from evo.problem.loading import load_kernel
from evo.report.outcome import evaluation_costs
from evo.search.finals import Finals, Step, build_all, end_finals, hold_all_finals, hold_race
from evo.search.loop import Budget, Progress, Search, StopReason
from evo.search.place import Place
from evo.search.samplers import find_sampler
from evo.search.tasks import Patience, TaskExecutor, tasks_of
from evo.targets import find_target
from tests.landscape import Hanging, LandscapeExecutor, code_of, opened, ratio_of, status_of, timing

KERNEL = load_kernel("layernorm")
ENVIRONMENT = Environment(device="a landscape", arch="none")


def configure(
    evaluations: int | None = None,
    *,
    sampler: str = "evolution",
    seed: int = 1,
    tasks: int = 1,
    grid: str = "",
    **more: Any,
) -> RunSpec:
    """grid: searched as `evo search --cover` does, in the place of the first `tasks` workloads."""
    texts = ["rows=512,cols=1024,dtype=float32", "rows=64,cols=4096,dtype=bfloat16"][:tasks]
    job = Job(
        kernel=KERNEL,
        kernel_name="layernorm",
        target="cpu",
        arch="native",
        workloads=check_workloads(KERNEL, "cpu", () if grid else texts, [grid] if grid else ()),
        sampler=sampler,
        seed=seed,
        place=Place(builders=4),
        budget=Budget(evaluations=evaluations, **more),
        cover=bool(grid),
    )
    return plan_run(job)


def search(spec: RunSpec | StoredRun, store: Store, executor: LandscapeExecutor) -> tuple[Search, StopReason, StoredRun]:
    """To its end; of a run that is stored already, what is left of it."""
    run = spec if isinstance(spec, StoredRun) else store.create_run(spec, ENVIRONMENT)
    found = Search(opened(run, store, executor), lambda progress: None)
    try:
        return found, found.run(), run
    finally:
        executor.close()


def longer(run: StoredRun, **budget: Any) -> StoredRun:
    return replace(run, spec=replace(run.spec, budget=budget))


def genomes(store: Store, run: StoredRun) -> list[tuple[int, int, str, tuple[int, ...]]]:
    return [
        (c.order, c.task, c.proposal.genome.to_json(), tuple(p.order for p in c.proposal.parents))
        for c in (e.candidate for e in store.evaluations(run))
    ]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("evo.search.loop._DISTURBED_RETRIES", 3)  # a user's; other tests have that of tests/hurried.py
    with Store.open(tmp_path / "lineage.db", write=True) as found:
        yield found


@pytest.mark.parametrize("sampler", ["evolution", "tpe", "random"])
def test_the_seed_and_the_measurements_decide_the_proposals_and_not_what_finishes_first(
    store: Store, sampler: str
) -> None:
    spec = configure(90, sampler=sampler, tasks=2)
    first, second = (genomes(store, search(spec, store, LandscapeExecutor(delays))[2]) for delays in (1, 2))
    assert len(first) == 90
    assert first == second
    other = genomes(store, search(replace(spec, seed=2), store, LandscapeExecutor(1))[2])
    assert first != other


def test_every_verdict_is_recorded_and_no_machine_code_is_measured_twice(store: Store) -> None:
    executor = LandscapeExecutor(3)
    _, reason, run = search(configure(300), store, executor)
    assert reason is StopReason.EVALUATIONS
    assert len(executor.built) == len(set(executor.built)) == 300
    recorded = store.evaluations(run)
    all_genomes = [e.candidate.proposal.genome for e in recorded]
    codes = [code_of(genome) for genome in all_genomes if genome.digest in executor.measured]
    assert len(codes) == len(set(codes))
    same = [e for e in recorded if e.evaluation.status is Status.SAME_CODE]
    assert same, "the landscape makes some genomes share their code"
    for e in same:
        original = recorded[e.evaluation.same_code_as or 0]
        assert code_of(original.candidate.proposal.genome) == code_of(e.candidate.proposal.genome)
        assert not e.evaluation.timings
    for e in recorded:
        if e.evaluation.same_code_as is None:
            assert e.evaluation.status is status_of(e.candidate.proposal.genome)
        if e.evaluation.status is Status.OK:
            assert e.evaluation.score == pytest.approx(ratio_of(e.candidate.proposal.genome))
    operators = [e.candidate.proposal.operator for e in recorded]
    assert operators[0] == "default"
    assert operators.index("random") < operators.index("mutation")


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(store: Store) -> None:
    spec = configure(120, tasks=2)
    whole = search(spec, store, LandscapeExecutor(5))[2]
    run = store.create_run(spec, ENVIRONMENT)
    rng, after, parts = random.Random(0), 0, list[Search]()

    def interrupt(progress: Progress) -> None:
        if progress.finished >= after:
            parts[-1].interrupt()

    reason = StopReason.INTERRUPTED
    while reason is StopReason.INTERRUPTED:
        executor, after = LandscapeExecutor(len(parts) + 10), len(store.evaluations(run)) + rng.randint(1, 25)
        parts.append(Search(opened(run, store, executor), interrupt))
        reason = parts[-1].run()
        executor.close()
    assert reason is StopReason.EVALUATIONS
    assert len(parts) > 3
    assert genomes(store, run) == genomes(store, whole)


def test_a_run_whose_proposals_no_longer_agree_is_not_continued(store: Store) -> None:
    run = search(configure(30), store, LandscapeExecutor(1))[2]
    with pytest.raises(StoreError, match="start a new run"):
        search(replace(run, spec=configure(60, seed=2)), store, LandscapeExecutor(1))


def test_a_small_space_is_searched_to_its_end(store: Store) -> None:
    spec = configure(10_000)
    space = KERNEL.space("cpu", spec.workloads[0], find_target("cpu").limits("native"))
    fixed = {k: v for k, v in space.complete(space.default).items() if k not in ("simd_bits", "unroll")}
    spec = replace(spec, options={**spec.options, "fixed": fixed})
    _, reason, run = search(spec, store, LandscapeExecutor(1))
    assert reason is StopReason.EXHAUSTED
    assert len(store.evaluations(run)) == len(list(space.restricted(fixed).points()))


def test_patience_ends_a_search_that_finds_nothing_better(store: Store) -> None:
    assert search(configure(patience=40), store, LandscapeExecutor(1))[1] is StopReason.PATIENCE


def test_a_run_whose_time_is_up_is_taken_up_whole_before_its_finals(store: Store) -> None:
    """Interrupted in the finals, it has used all of its time already: nothing recorded may be lost for that."""
    run = search(configure(120), store, LandscapeExecutor(8))[2]
    executor = LandscapeExecutor(1)
    resumed, reason, _ = search(replace(longer(run, seconds=0.5), elapsed_s=10.0), store, executor)
    assert reason is StopReason.TIME
    assert resumed.progress.finished == 120
    assert not executor.built
    assert resumed.elites(0)
    assert all(found.replayed for found in resumed.progress.improvements)
    assert resumed.progress.improvements


def test_what_a_replay_takes_comes_before_the_search(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is found afterwards is told with it, from the start of the command."""
    run = search(configure(12), store, LandscapeExecutor(8))[2]
    sampler: Any = find_sampler("evolution")
    ask = sampler.ask

    def slow(self: Any, order: int) -> Proposal:
        time.sleep(0.5 if order == 0 else 0.0)
        return ask(self, order)

    monkeypatch.setattr(sampler, "ask", slow)
    before = time.time()
    resumed, reason, _ = search(replace(longer(run, evaluations=20), elapsed_s=10.0), store, LandscapeExecutor(1))
    assert reason is StopReason.EVALUATIONS
    assert resumed.started_unix - before >= 0.5
    assert time.time() - resumed.started_unix == pytest.approx(resumed.elapsed_s - 10.0, abs=0.25)


def _costly(request: Request, found: Any) -> Any:
    """A build costs 2 s, and a measurement 3 s on the device; or so it says."""
    if isinstance(found, Build):
        return replace(found, seconds=2.0)
    return replace(found, seconds=3.0, gate_seconds=1.0, timing_seconds=1.5)


def test_costs_of_a_resumed_run_are_told_over_the_candidates_since_then(store: Store) -> None:
    run = search(configure(40), store, LandscapeExecutor(8))[2]
    executor = LandscapeExecutor(1, change=_costly)
    resumed, _, _ = search(longer(run, evaluations=60), store, executor)
    told = evaluation_costs(resumed.progress)
    measured = len(executor.measured) / 20
    assert told["evaluation_ms"] == pytest.approx(
        {"building": 2000, "loading": 0, "gating": 1e3 * measured, "timing": 1.5e3 * measured, "other": 0.5e3 * measured}
    )
    assert not any(told["unfinished_ms"].values())


def test_without_a_finished_candidate_costs_are_no_average(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built and not measured when a search ended is in no finished candidate's costs."""
    executor = LandscapeExecutor(1, change=_costly)
    stuck: Future[Evaluation] = Future()
    asked: list[Request] = []
    executor.measure = lambda request: (asked.append(request), stuck)[1]  # type: ignore[method-assign,func-returns-value]
    executor.in_flight = lambda: tuple(  # type: ignore[method-assign]
        InFlight(genome=r.genome, workload=r.workload, stage="timing", seconds=1.0, left_s=None) for r in asked[:1]
    )
    monkeypatch.setattr("evo.search.loop._FIRST_S", 0.0)
    part, reason, _ = search(configure(40, seconds=1.0), store, executor)
    assert reason is StopReason.TIME
    failed, begun = part.progress.finished, len(executor.built)
    told = evaluation_costs(part.progress)
    assert told["evaluation_ms"] is None if not failed else told["evaluation_ms"]["building"] == 2000
    assert told["unfinished_ms"]["building"] == 2000 * (begun - failed)
    assert evaluation_costs(Progress(spent=Costs(build_seconds=1.0)))["evaluation_ms"] is None


class _Slow(LandscapeExecutor):
    """Its device takes a while to be ready; the first measurement takes a while, too."""

    def __init__(self, ready_s: float, first_s: float) -> None:
        super().__init__(1)
        self._ready_s, self._first_s, self._opened = ready_s, first_s, time.monotonic()
        self._first: Request | None = None

    def measure(self, request: Request) -> Future[Evaluation]:
        measured = super().measure(request)
        if self._first is not None:
            return measured
        self._first = request
        return self._pool.submit(lambda: (time.sleep(self._ready_s + self._first_s), measured.result())[1])

    def in_flight(self) -> tuple[InFlight, ...]:
        first, seconds = self._first, time.monotonic() - self._opened
        if first is None or seconds > self._ready_s + self._first_s:
            return ()
        stage = "ready" if seconds < self._ready_s else "timing"
        return (InFlight(genome=first.genome, workload=first.workload, stage=stage, seconds=seconds, left_s=None),)


def test_the_time_of_a_budget_begins_when_the_device_is_ready_and_a_first_candidate_is_waited_for(store: Store) -> None:
    run = store.create_run(configure(seconds=0.3), ENVIRONMENT)
    seen: list[tuple[bool, float]] = []
    executor = _Slow(ready_s=1.0, first_s=0.6)
    part = Search(opened(run, store, executor), lambda progress: seen.append((progress.begun, progress.elapsed_s)))
    reason = part.run()
    executor.close()
    assert reason is StopReason.TIME
    assert part.progress.finished > 0
    assert (False, 0.0) in seen
    assert part.elapsed_s < 1.5, "what the device takes to be ready is not searching"


def test_an_interrupt_drops_what_has_not_begun_and_a_second_one_waits_for_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evo.search.loop._LAST_S", 2.0)
    for interrupts in (1, 2):
        run = store.create_run(configure(500), ENVIRONMENT)
        hanging = Hanging()
        parts: list[Search] = []
        began = time.monotonic()

        def interrupt(progress: Progress) -> None:
            if progress.waiting is not None and progress.finished and not progress.interrupted:
                for _ in range(interrupts):  # noqa: B023
                    parts[-1].interrupt()  # noqa: B023

        parts.append(Search(opened(run, store, hanging), interrupt))
        assert parts[-1].run() is StopReason.INTERRUPTED
        waited_s = time.monotonic() - began
        assert waited_s > 2.0 if interrupts == 1 else waited_s < 2.0
        hanging.seen.set()
        hanging.close()
        again, reason, _ = search(longer(run, evaluations=40), store, LandscapeExecutor(2))
        assert reason is StopReason.EVALUATIONS
        assert [e.candidate.order for e in store.evaluations(run)] == list(range(again.progress.finished))


@pytest.mark.parametrize("budget", [{"seconds": 0.0}, {"evaluations": 0}, {"patience": -1}, {}])
def test_a_budget_that_allows_nothing_is_refused(budget: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="budget"):
        Budget(**budget)


def untrusted(fate: Callable[[RaceRequest, RaceResult, int], RaceResult]) -> LandscapeExecutor:
    """A winner of the finals' race fails when it runs once more: `fate` of the n-th such race, from 0."""
    confirmations = count()

    def change(request: Request | RaceRequest, found: Any) -> Any:
        if isinstance(request, RaceRequest) and AA_CONTROL in {name for name, _, _ in request.contenders}:
            return fate(request, found, next(confirmations))
        return found

    return LandscapeExecutor(3, change=change)


def _refused(request: RaceRequest, found: RaceResult) -> RaceResult:
    names = [name for name, _, _ in request.contenders]
    others = tuple(t for t in found.timings if t.contender not in names)
    return RaceResult(timings=others, refused=tuple((n, "y: 3 of 4096 elements are outside the tolerance") for n in names))


def _finals_of(executor: LandscapeExecutor, store: Store) -> tuple[Finals, list[Candidate]]:
    found, _, run = search(configure(60), store, LandscapeExecutor(6))
    elites = found.elites(0)[:4]
    task = TaskExecutor(
        problem=KERNEL,
        executor=executor,
        kernel="layernorm",
        target="cpu",
        arch="native",
        workload=run.spec.workloads[0],
        seed=5,
    )
    finals = end_finals(task, *hold_race(task, build_all(task, elites)))
    executor.close()
    return finals, elites


def test_finals_name_the_fastest_finalist_and_race_it_with_the_baselines(store: Store) -> None:
    finals, elites = _finals_of(LandscapeExecutor(3), store)
    assert [ratio_of(e.proposal.genome) for e in elites] == sorted(ratio_of(e.proposal.genome) for e in elites)
    assert finals.winner.candidate == elites[0]
    assert {t.contender for t in finals.baselines} == {"torch", "copy", "twin"}


def test_the_winner_keeps_its_time_in_the_race_that_it_won_beside_that_of_the_race_that_confirmed_it(store: Store) -> None:
    """The machine is twice as slow when the winner runs once more: it is not compared with the others by that."""

    def slower(request: RaceRequest, found: RaceResult, n: int) -> RaceResult:
        return replace(
            found,
            timings=tuple(replace(t, median_us=2 * t.median_us, ratio=t.ratio and 2 * t.ratio) for t in found.timings),
        )

    finals, elites = _finals_of(untrusted(slower), store)
    winner = finals.winner
    assert winner.candidate == elites[0]
    assert winner.timing.ratio == pytest.approx(2 * ratio_of(elites[0].proposal.genome), rel=0.05)
    assert winner.raced.ratio == pytest.approx(ratio_of(elites[0].proposal.genome), rel=0.05)
    assert [t.contender for t in winner.measurement.timings if t.protocol != "hot"] == ["candidate", FINALIST]
    assert all(other.timing is not None and other.raced is other.timing for other in finals.finalists[1:])


def test_a_winner_that_is_refused_when_it_runs_once_more_has_not_won_and_the_next_one_runs(store: Store) -> None:
    executor = untrusted(lambda request, found, n: _refused(request, found) if n < 2 else found)
    finals, elites = _finals_of(executor, store)
    assert finals.winner.candidate == elites[2]
    refused = {f.candidate.order: f for f in finals.finalists if f.measurement.status is Status.WRONG}
    assert set(refused) == {elites[0].order, elites[1].order}
    assert all("to be confirmed" in f.measurement.log and f.timing is None for f in refused.values())


def test_who_won_finals_that_are_held_anew_and_confirm_nobody_has_not_won(store: Store) -> None:
    found, _, run = search(configure(60), store, LandscapeExecutor(6))
    for fate, wins in (
        (lambda request, found, n: found, True),
        (lambda request, found, n: _refused(request, found), False),
    ):
        executor = untrusted(fate)
        held = hold_all_finals(found, opened(run, store, executor), 4)
        executor.close()
        assert [f.winner is not None for f in held] == [wins]
        assert [task.winner is not None for task in find_run(store, run.name).tasks] == [wins]
    assert {f.measurement.status for f in held[0].finalists} == {Status.WRONG}


@pytest.mark.parametrize("dies", [1, 2])
def test_a_last_race_that_dies_is_held_again_once(store: Store, dies: int) -> None:
    held = []

    def fate(request: RaceRequest, found: RaceResult, n: int) -> RaceResult:
        held.append(n)
        return found if n >= dies else RaceResult(log="it died", device_lost=True)

    finals, elites = _finals_of(untrusted(fate), store)
    assert held == [0, 1]
    if dies == 1:
        assert finals.winner.candidate == elites[0]
    else:
        assert finals.winner is None
        (unconfirmed,) = (f for f in finals.finalists if f.candidate == elites[0])
        assert "could not be confirmed: it died" in unconfirmed.measurement.log


def busy_for(races: int) -> LandscapeExecutor:
    """A machine that is busy for so many races: one of the last finalists seems to be a hundred times as fast."""
    held = count()

    def change(request: Request | RaceRequest, found: Any) -> Any:
        if not isinstance(request, RaceRequest) or next(held) >= races:
            return found
        last = request.contenders[-1][0]
        return replace(
            found,
            timings=tuple(
                replace(t, clocks={"disturbed": 16.0}, ratio=t.ratio and (0.01 if t.contender == last else t.ratio))
                for t in found.timings
            ),
        )

    return LandscapeExecutor(3, change=change)


@pytest.mark.parametrize(("races", "confirmed"), [(2, True), (1_000_000, False)])
def test_finals_wait_for_a_quiet_machine_for_a_while_and_then_confirm_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, races: int, confirmed: bool
) -> None:
    monkeypatch.setattr("evo.search.finals._MOST_PATIENCE_S", 120.0)
    monkeypatch.setattr("evo.search.finals._LEAST_PATIENCE_S", 1.0)
    monkeypatch.setattr("evo.search.tasks._PAUSE_S", 0.05)
    found, _, run = search(configure(60), store, LandscapeExecutor(6))
    executor, steps = busy_for(races), list[Step]()
    began = time.monotonic()
    (held,) = hold_all_finals(found, opened(run, store, executor), 4, steps.append)
    executor.close()
    assert time.monotonic() - began < 30
    told, waits = [s.text for s in steps if not s.waits_s], [s.waits_s for s in steps if s.waits_s]
    assert told[:5] == [*(f"gate, finalist {n} of 4" for n in (1, 2, 3, 4)), "race of 4 finalists"]
    fastest = f"candidate {held.winner.candidate.order}"
    assert told[5:] == [f"gate of the fastest, {fastest}, with more cases", f"race that confirms {fastest}"]
    assert [s.spent_s for s in steps] == sorted(s.spent_s for s in steps)
    assert all(s.left_s > 0 for s in steps)
    assert len(waits) == 2 if confirmed else len(waits) > 2
    assert all(0 < s <= 1.0 for s in waits)
    assert waits == sorted(waits, reverse=True)
    assert held.winner.candidate == found.elites(0)[0], "whom the race chose is chance"
    assert held.winner.timing.disturbed is not confirmed
    (best,) = find_best(store, run=run.name)
    assert (best.winner, best.finals) == (True, "confirmed" if confirmed else "too busy to measure")
    assert (best.speedup is None) is not confirmed
    (finals,) = read_run_finals(store, run.name).finals
    assert (finals.winner is not None, finals.confirmed is not None, finals.disturbed) == (True, confirmed, not confirmed)


def test_finalists_whose_gates_take_too_long_are_left_out_once_one_has_passed(store: Store) -> None:
    met = list[Genome]()

    def change(request: Request | RaceRequest, found: Any) -> Any:
        if isinstance(request, RaceRequest) or isinstance(found, Build):
            return found
        met.append(request.genome)
        return replace(found, status=Status.WRONG) if request.genome == met[0] else found

    found, _, run = search(configure(60), store, LandscapeExecutor(6))
    executor = LandscapeExecutor(1, change=change)
    (task,) = tasks_of(run.spec, KERNEL, executor, Stage.FINAL)
    finalists, timings = hold_race(replace(task, gates_s=0.0), build_all(task, found.elites(0)[:4]))
    executor.close()
    assert [f.passed for f in finalists] == [False, True]
    assert {t.contender for t in timings} >= {finalists[1].name}


def test_races_that_wait_for_a_quiet_machine_take_no_longer_than_was_told() -> None:
    limits, told = list[float](), list[float]()

    def change(request: Any, found: Any) -> Any:
        limits.append(request.limit_s)
        if len(limits) > 1:
            time.sleep(OVERTIME * request.limit_s)  # what a disturbed race takes
        return replace(found, timings=tuple(replace(t, clocks={"disturbed": 16.0}) for t in found.timings))

    executor = LandscapeExecutor(1, change=change)
    patience = Patience(left_s=4.0, tell=lambda workload, left_s: told.append(left_s))
    (task,) = tasks_of(configure(1), KERNEL, executor, Stage.FINAL)
    began = time.monotonic()
    result = replace(task, race_s=20.0, patience=patience).race([])
    assert time.monotonic() - began < 4.0 + OVERTIME + 2.0, "a race of the least limit may come last"
    assert result.timings[0].disturbed
    assert told[0] == 4.0
    assert limits[0] == 20.0
    assert all(OVERTIME * limit_s <= max(OVERTIME, left_s) for limit_s, left_s in zip(limits[1:], told, strict=True))


def test_what_a_check_raises_ends_the_wait_for_a_result() -> None:
    def check() -> None:
        raise StoreError("the database is lost")

    (task,) = tasks_of(configure(1), KERNEL, LandscapeExecutor(1), Stage.FINAL)
    with pytest.raises(StoreError, match="the database is lost"):
        replace(task, check=check).awaited(Future())


def test_finals_know_what_the_reference_usually_took_in_the_search(store: Store) -> None:
    asked: list[float] = []

    def change(request: Request | RaceRequest, found: Any) -> Any:
        if isinstance(request, RaceRequest):
            asked.append(request.reference_us)
        return found

    found, _, run = search(configure(60), store, LandscapeExecutor(6))
    executor = LandscapeExecutor(3, change=change)
    hold_all_finals(found, opened(run, store, executor), 4)
    executor.close()
    usual = timing("", 1.0).median_us
    assert asked == pytest.approx([usual, usual], rel=0.1)


def disturbed(times: int, *, of: Callable[[str], bool] = lambda digest: True) -> LandscapeExecutor:
    """The first `times` timings of a candidate are disturbed, and flattered a hundredfold: each would be the best."""

    def change(request: Request, found: Any) -> Any:
        digest = request.genome.digest
        if isinstance(found, Build) or not found.timings or not of(digest) or executor.measured.count(digest) > times:
            return found
        flattered = timing(request.workload.key, 0.01 * ratio_of(request.genome))
        return replace(found, timings=(replace(flattered, clocks={"disturbed": 2.0}),))

    executor = LandscapeExecutor(2, change=change)
    return executor


def _one_in_four(digest: str) -> bool:
    return int(digest[:2], 16) % 4 == 0


def test_what_was_disturbed_and_would_be_the_best_is_measured_once_more(store: Store) -> None:
    executor = disturbed(1, of=_one_in_four)
    found, _, run = search(configure(60), store, executor)
    passed = {e.candidate.proposal.genome.digest for e in store.evaluations(run) if e.evaluation.status is Status.OK}
    measured = Counter(executor.measured)
    assert {measured[d] for d in measured if _one_in_four(d) and d in passed} == {2}
    assert {measured[d] for d in measured if not _one_in_four(d) or d not in passed} == {1}
    assert all(t.ratio > 0.4 for e in store.evaluations(run) for t in e.evaluation.timings if t.ratio)
    assert found.progress.finished == 60


def test_what_is_always_disturbed_is_neither_best_nor_first_in_the_finals(store: Store) -> None:
    found, _, _ = search(configure(60), store, disturbed(9, of=_one_in_four))
    best = found.progress.best[0]
    assert best.ratio > 0.4
    first = found.elites(0)[0]
    assert first.order == best.order
    assert not _one_in_four(first.proposal.genome.digest)


def test_a_machine_that_is_never_quiet_is_searched_all_the_same(store: Store) -> None:
    executor = disturbed(9)
    found, _, _ = search(configure(60), store, executor)
    assert not found.progress.best
    elites = found.elites(0)[:5]
    assert [ratio_of(e.proposal.genome) for e in elites] == sorted(ratio_of(e.proposal.genome) for e in elites)
    assert len(executor.measured) - len(set(executor.measured)) == 3  # it soon stops to measure twice


def test_what_a_disturbed_timing_found_is_kept_if_there_is_no_time_for_a_second(store: Store) -> None:
    executor, stuck, begun = disturbed(9), Future[Evaluation](), list[Genome]()
    first = executor.measure

    def measure(request: Request) -> Future[Evaluation]:
        begun.append(request.genome)
        return first(request) if len(begun) <= 3 and begun.count(request.genome) == 1 else stuck

    executor.measure = measure  # type: ignore[method-assign]
    found, reason, _ = search(configure(seconds=1.0), store, executor)
    assert reason is StopReason.TIME
    right = {genome for genome in begun[:3] if status_of(genome) is Status.OK}
    assert {e.proposal.genome for e in found.elites(0)} == right != set()
    assert all(e.disturbed for e in found.elites(0))


def test_a_machine_that_has_become_quiet_is_trusted_again(store: Store) -> None:
    first_seen: dict[str, int] = {}

    def early_or_every_fourth(digest: str) -> bool:  # by digest, several in a row may be: then trust is lost again
        number = first_seen.setdefault(digest, len(first_seen))
        return number < 12 or number % 4 == 0

    executor = disturbed(9, of=early_or_every_fourth)
    search(configure(60), store, executor)
    later = {d for d, n in first_seen.items() if n > 20 and n % 4 == 0}
    assert {executor.measured.count(d) for d in later} == {2}


def _loses_to_the_incumbent(request: Request, found: Any) -> Any:
    """In the race of both, whatever its own ratio says."""
    if isinstance(found, Build) or not found.timings or request.incumbent is None:
        return found
    own = found.timings[0]
    faster = tuple(0.9 * us for us in own.samples_us)
    return replace(found, timings=(own, replace(own, contender="incumbent", samples_us=faster)))


def test_who_loses_against_the_best_in_the_race_of_both_is_not_the_new_best(store: Store) -> None:
    found, _, run = search(configure(60), store, LandscapeExecutor(4, change=_loses_to_the_incumbent))
    orders = {i.order for i in found.progress.improvements}
    assert orders
    assert max(orders) < run.spec.max_in_flight + 2  # those whose measurement was asked for before there was a best
