"""The search loop: ask, build, measure, store, tell. Steady-state, and reproducible.

Proposal n is made when exactly the results of proposals 0 to n - window have been told, whatever finished first:
a seed and the same measurements give the same proposals. Results are stored the moment they are known, told in
order. A search that was cut off is continued by replaying the stored results through a fresh sampler, which
then is in the state it was in.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from threadpoolctl import threadpool_limits

from evo.budget import Budget, StopReason
from evo.errors import StoreError
from evo.evaluation import Build, CandidateRef, Evaluation, Measurement, Status, Timing
from evo.executors import BuildRequest, Executor, Incumbent, MeasureRequest
from evo.lineage import Recorder, StoredEvaluation, StoredRun
from evo.problem.kernel import Kernel, Launch, Limits, Workload
from evo.progress import Costs, Improvement, Observer, Progress, Waiting
from evo.search.samplers import Exhausted, Result, Sampler, SamplerFactory

__all__ = ["Search", "SearchConfig", "window_for"]

_TICK_S = 0.2

_IN_VAIN = 3
"""After so many candidates in a row that something disturbed twice, none is measured a second time: this machine is
never quiet."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Everything that decides what a search proposes, and for how long."""

    kernel: str
    target: str
    arch: str
    workloads: tuple[Workload, ...]
    sampler: str
    seed: int
    window: int
    budget: Budget
    sampler_options: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Parameters held at one value."""
    starts: Sequence[Mapping[str, Any]] = ()
    """Points to begin with, on every task where they are legal."""
    gate_seed: int = 0
    """Draws the data of the gate and of the timings; not `seed`, which decides what is proposed."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is remembered of a finished candidate."""

    ref: CandidateRef
    status: Status
    ratio: float | None
    median_us: float | None
    code: tuple[str, Launch] | None
    disturbed: bool = False
    """The figures are not to be trusted: they are no claim to anything."""


class Search:
    """One run of the loop. `recorded` are the evaluations of an earlier part of the same run."""

    def __init__(
        self,
        config: SearchConfig,
        kernel: Kernel,
        limits: Limits,
        make_sampler: SamplerFactory,
        executor: Executor,
        recorder: Recorder,
        run: StoredRun,
        observer: Observer,
        *,
        recorded: Sequence[StoredEvaluation] = (),
        elapsed_s: float = 0.0,
    ) -> None:
        self._config, self._kernel, self._limits = config, kernel, limits
        self._executor, self._recorder, self._run, self._observer = executor, recorder, run, observer
        self._recorded = {r.ref.order: r for r in recorded}
        self._samplers: list[Sampler] = []
        for task, workload in enumerate(config.workloads):
            space = kernel.space(config.target, workload, limits)
            if config.fixed:
                space = space.restricted(config.fixed)
            if config.starts:
                space = space.starting(config.starts)
            self._samplers.append(make_sampler(space, config.seed + 1_000_003 * task, config.sampler_options))
        self._open_tasks = list(range(len(config.workloads)))
        self._asked = self._told = 0
        self._known: dict[int, _Known] = {}
        self._refs: dict[int, CandidateRef] = {}
        self._builds: dict[int, Build] = {}
        self._costs: dict[int, Costs] = {}
        """Of candidates that have no result yet."""
        self._by_code: dict[tuple[int, tuple[str, Launch]], int] = {}
        self._told_codes: dict[tuple[int, tuple[str, Launch]], int] = {}
        self._waiting: dict[int, list[int]] = {}
        self._incumbents: dict[int, Incumbent] = {}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._since_better = 0
        self._best_told: dict[int, float] = {}
        self._again: set[int] = set()
        """Who has been measured a second time, because something disturbed the first."""
        self._in_vain = 0
        """How many of them in a row were disturbed again."""
        self._interrupted = False
        self._last_recorded = max(self._recorded, default=-1)
        self._before_s, self._started = elapsed_s, None if self._recorded else time.monotonic()
        self.started_unix = time.time()
        """When this part of the search began; of one that is continued, after the replay."""
        self.progress = Progress()

    def interrupt(self) -> None:
        """Safe in a signal handler: the loop stops at its next step, with everything finished stored."""
        self._interrupted = True

    @property
    def elapsed_s(self) -> float:
        """Seconds spent searching, earlier parts of the run included; the replay of those costs nothing."""
        return self._before_s + (time.monotonic() - self._started if self._started is not None else 0.0)

    def run(self) -> StopReason:
        """Searches until the budget is spent. Raises what the store raises; candidates' faults are data."""
        # A sampler's matrices are small: threads of the linear algebra library would cost it more than they
        # bring, and take cores from the builders.
        with threadpool_limits(limits=1, user_api="blas"):
            config = self._config
            self._executor.expect(config.kernel, config.target, config.workloads[0], config.gate_seed)
            while True:
                reason = self._advance()
                self.progress.elapsed_s = self.elapsed_s
                self.progress.waiting = self._waited_for()
                self._observer.update(self.progress)
                if reason is not None:
                    return reason
                self._wait()

    def elites(self, task: int, first: int, count: int) -> list[CandidateRef]:
        """The best candidates of a task with distinct machine code, best first, those whose times something
        disturbed behind all others: `count` of them from place `first` on."""
        found = [k for k in self._known.values() if k.ref.task == task and k.status is Status.OK]
        found.sort(key=lambda k: (k.disturbed, k.ratio if k.ratio is not None else float("inf"), k.ref.order))
        return [k.ref for k in found[first : first + count]]

    def ratios(self, refs: Sequence[CandidateRef]) -> dict[int, float]:
        """By order, what the search measured of these candidates: their times over the reference's."""
        return {r.order: ratio for r in refs if (ratio := self._known[r.order].ratio) is not None}

    # -- the schedule ---------------------------------------------------------------------------------------

    def _advance(self) -> StopReason | None:
        """Asks and tells as far as results allow; the reason to stop, if there is one."""
        while True:
            if self._interrupted:
                return StopReason.INTERRUPTED
            # What is recorded is taken up again whatever the budget says: the finals are about all of it.
            replaying = self._asked <= self._last_recorded
            if not replaying and self._started is None:
                self._started, self.started_unix = time.monotonic(), time.time()
            if not replaying and (reason := self._limit_reached()):
                return reason
            drained = self._told == self._asked
            limit = self._config.budget.evaluations
            may_ask = self._open_tasks and (replaying or limit is None or self._asked < limit)
            if may_ask and self._asked - self._told < self._config.window:
                self._ask()
            elif self._told in self._known:
                self._tell()
            elif drained and not may_ask:
                return StopReason.EVALUATIONS if self._open_tasks else StopReason.EXHAUSTED
            else:
                return None

    def _limit_reached(self) -> StopReason | None:
        budget = self._config.budget
        if budget.seconds is not None and self.elapsed_s >= budget.seconds:
            return StopReason.TIME
        if budget.patience is not None and self._since_better >= budget.patience:
            return StopReason.PATIENCE
        return None

    def _ask(self) -> None:
        order = self._asked
        task = self._open_tasks[order % len(self._open_tasks)]
        try:
            proposal = self._samplers[task].ask(order)
        except Exhausted:
            self._open_tasks.remove(task)
            return
        ref = CandidateRef(order=order, task=task, workload=self._config.workloads[task], proposal=proposal)
        self._refs[order] = ref
        self._asked += 1
        self.progress.asked = self._asked
        if order in self._recorded:
            self._replay(ref)
            return
        self.progress.building += 1
        future = self._executor.build(
            BuildRequest(
                kernel=self._config.kernel,
                target=self._config.target,
                arch=self._config.arch,
                genome=proposal.genome,
                workload=ref.workload,
            )
        )
        self._when_done(future, lambda done: self._on_build(ref, done.result()))

    def _tell(self) -> None:
        known = self._known[self._told]
        same_as = None
        if known.code is not None:
            same_as = self._told_codes.setdefault((known.ref.task, known.code), known.ref.order)
        self._samplers[known.ref.task].tell(
            Result(
                order=known.ref.order,
                genome=known.ref.proposal.genome,
                status=Status.OK if known.status is Status.SAME_CODE else known.status,
                score=self._score(known),
                same_code_as=same_as if same_as != known.ref.order else None,
            )
        )
        best = self._best_told.get(known.ref.task)
        if known.ratio is not None and not known.disturbed and (best is None or known.ratio < best):
            self._best_told[known.ref.task] = known.ratio
            self._since_better = 0
        else:
            self._since_better += 1
        self._told += 1

    def _score(self, known: _Known) -> float | None:
        """What a sampler is told: of what something disturbed, and would be the best so far, nothing; unless nothing
        has been measured in peace, on a machine that never is."""
        best = self._best_told.get(known.ref.task)
        if known.disturbed and known.ratio is not None and best is not None and known.ratio < best:
            return None
        return known.ratio

    def _wait(self) -> None:
        """Handles what has finished; returns after a tick at the latest, so that the clock is looked at."""
        try:
            self._events.get(timeout=_TICK_S)()
            while True:
                self._events.get_nowait()()
        except queue.Empty:
            return

    def _when_done(self, future: Future[Any], handle: Callable[[Future[Any]], None]) -> None:
        future.add_done_callback(lambda done: None if done.cancelled() else self._events.put(lambda: handle(done)))

    def _waited_for(self) -> Waiting | None:
        """The candidate that has been under way the longest."""
        unfinished = [self._refs[o] for o in range(self._told, self._asked) if o not in self._known]
        for work in self._executor.in_flight() if unfinished else ():
            for ref in unfinished:
                if ref.workload == work.workload and ref.proposal.genome == work.genome:
                    return Waiting(order=ref.order, work=work)
        return None

    # -- results --------------------------------------------------------------------------------------------

    def _on_build(self, ref: CandidateRef, build: Build) -> None:
        self.progress.building -= 1
        self._spend(ref, Costs(build_seconds=0.0 if build.cached else build.seconds))
        if build.binary is None:
            self._finish(ref, Evaluation(status=build.status, build=build, log=build.log), None)
            return
        self._builds[ref.order] = build
        code = self._code(ref, build.binary.code_hash)
        original = self._by_code.setdefault((ref.task, code), ref.order)
        if original != ref.order:
            if original in self._known:
                self._finish_same(ref, original)
            else:
                self._waiting.setdefault(original, []).append(ref.order)
            return
        self.progress.measuring += 1
        if self.progress.first_measured_s is None:
            self.progress.first_measured_s = self.elapsed_s
        self._measure(ref, build, code)

    def _measure(self, ref: CandidateRef, build: Build, code: tuple[str, Launch]) -> None:
        future = self._executor.measure(
            MeasureRequest(
                kernel=self._config.kernel,
                target=self._config.target,
                genome=ref.proposal.genome,
                workload=ref.workload,
                build=build,
                seed=self._config.gate_seed,
                incumbent=self._incumbents.get(ref.task),
            )
        )
        self._when_done(future, lambda done: self._on_measure(ref, code, done.result()))

    def _on_measure(self, ref: CandidateRef, code: tuple[str, Launch], measured: Measurement) -> None:
        costs = Costs(
            device_seconds=measured.seconds,
            load_seconds=measured.load_seconds,
            gate_seconds=measured.gate_seconds,
            timing_seconds=measured.timing_seconds,
        )
        self._spend(ref, costs)
        if self._claims_too_much(ref, measured):
            if ref.order not in self._again and self._in_vain < _IN_VAIN:
                self._again.add(ref.order)
                self._measure(ref, self._builds[ref.order], code)
                return
            self._in_vain += 1
        elif any(t.contender == "candidate" and not t.disturbed for t in measured.timings):
            self._in_vain = 0
        self.progress.measuring -= 1
        evaluation = Evaluation(
            status=measured.status,
            build=self._builds[ref.order],
            checks=measured.checks,
            timings=measured.timings,
            log=measured.log,
            seconds=measured.seconds,
            gate_seconds=measured.gate_seconds,
            timing_seconds=measured.timing_seconds,
        )
        self._finish(ref, evaluation, code)
        for order in self._waiting.pop(ref.order, []):
            self._finish_same(self._refs[order], ref.order)

    def _spend(self, ref: CandidateRef, costs: Costs) -> None:
        self._costs[ref.order] = self._costs.get(ref.order, Costs()) + costs
        self.progress.spent += costs

    def _claims_too_much(self, ref: CandidateRef, measured: Measurement) -> bool:
        """Whether it would be the best so far, and something disturbed its timing."""
        timing = next((t for t in measured.timings if t.contender == "candidate"), None)
        if timing is None or timing.ratio is None or not timing.disturbed:
            return False
        best = self.progress.best.get(ref.task)
        return best is None or timing.ratio < best.ratio

    def _finish_same(self, ref: CandidateRef, original: int) -> None:
        first = self._known[original]
        evaluation = Evaluation(
            status=Status.SAME_CODE if first.status.passed else first.status,
            build=self._builds[ref.order],
            same_code_as=original,
            log=f"machine code and launch equal those of candidate {original}",
        )
        self._finish(ref, evaluation, first.code)

    def _finish(self, ref: CandidateRef, evaluation: Evaluation, code: tuple[str, Launch] | None) -> None:
        self._recorder.add(self._run, ref, evaluation, elapsed_s=self.elapsed_s)
        self._remember(ref, evaluation, code, self.elapsed_s)
        self._builds.pop(ref.order, None)
        self.progress.spent_on_finished += self._costs.pop(ref.order)

    def _remember(
        self, ref: CandidateRef, evaluation: Evaluation, code: tuple[str, Launch] | None, elapsed_s: float
    ) -> None:
        ratio, median_us, disturbed = _figures(evaluation.timing())
        if evaluation.same_code_as is not None:
            ratio, median_us, disturbed = self._figures(evaluation.same_code_as)
        self._known[ref.order] = _Known(
            ref=ref, status=evaluation.status, ratio=ratio, median_us=median_us, code=code, disturbed=disturbed
        )
        progress = self.progress
        progress.finished += 1
        progress.by_status[evaluation.status] = progress.by_status.get(evaluation.status, 0) + 1
        best = progress.best.get(ref.task)
        timing = evaluation.timing()
        better = ratio is not None and (best is None or ratio < best.ratio)
        if evaluation.status is Status.OK and better and not disturbed and _beats_incumbent(evaluation):
            assert timing is not None
            assert ratio is not None
            # Of a resumed run only the figure: the record has the source of a build, not its machine code.
            build = self._builds.get(ref.order)
            self._incumbents[ref.task] = Incumbent(genome=ref.proposal.genome, build=build, ratio=ratio)
            progress.best[ref.task] = Improvement(
                elapsed_s=elapsed_s,
                task=ref.task,
                order=ref.order,
                ratio=ratio,
                timing=timing,
                replayed=ref.order in self._recorded,
            )
            progress.improvements.append(progress.best[ref.task])

    def _figures(self, order: int) -> tuple[float | None, float | None, bool]:
        """(ratio, median_us, disturbed) of a candidate; of a later one, while a run is replayed, from its record."""
        if (known := self._known.get(order)) is not None:
            return known.ratio, known.median_us, known.disturbed
        return _figures(self._recorded[order].evaluation.timing())

    def _replay(self, ref: CandidateRef) -> None:
        record = self._recorded[ref.order]
        evaluation, was = record.evaluation, record.ref
        if was.proposal.genome != ref.proposal.genome or was.task != ref.task:
            raise StoreError(
                f"candidate {ref.order} of this run was proposed as {was.proposal.genome.digest[:12]}, and now"
                f" the sampler proposes {ref.proposal.genome.digest[:12]}: the kernel, its search space or evo has"
                " changed since; start a new run"
            )
        code = None
        if evaluation.build is not None and evaluation.build.binary is not None:
            code = self._code(ref, evaluation.build.binary.code_hash)
            if evaluation.same_code_as is None:
                self._by_code[ref.task, code] = ref.order
        self._remember(ref, evaluation, code, record.elapsed_s)
        self.progress.replayed += 1

    def _code(self, ref: CandidateRef, code_hash: str) -> tuple[str, Launch]:
        """Equal machine code launched differently is not the same thing."""
        launch = self._kernel.launch(
            self._config.target, ref.proposal.genome.parameters, ref.workload, self._limits
        )
        return code_hash, launch


def _figures(timing: Timing | None) -> tuple[float | None, float | None, bool]:
    return (timing.ratio, timing.median_us, timing.disturbed) if timing else (None, None, False)


def _beats_incumbent(evaluation: Evaluation) -> bool:
    """Whether a candidate was faster than its incumbent in the race that both ran in; also if there was none."""
    own = evaluation.timing()
    incumbent = next((t for t in evaluation.timings if t.contender == "incumbent"), None)
    if own is None or incumbent is None or len(own.samples_us) != len(incumbent.samples_us):
        return True
    return median(a / b for a, b in zip(own.samples_us, incumbent.samples_us, strict=True)) < 1.0


def window_for(builders: int) -> int:
    """Candidates in flight: enough to keep the builders and the device busy, few enough to learn from."""
    return max(8, 2 * builders)
