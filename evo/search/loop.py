"""The search loop: ask, build, measure, store, tell. Steady-state, and reproducible.

Proposal n is made when exactly the results of proposals 0 to n - max_in_flight have been told, whatever finished
first: a seed and the same measurements give the same proposals. Results are stored the moment they are known, and
told in order. A search that was interrupted is continued by replaying the stored results through a fresh sampler,
which then is in the state it was in.
"""

import hashlib
import queue
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from statistics import median
from typing import Any

from threadpoolctl import threadpool_limits

from evo.discovery import check_files
from evo.errors import StoreError, UsageError
from evo.evaluation import Binary, Build, Candidate, Costs, Evaluation, Parent, Proposal, Status, Timing
from evo.executors import InFlight
from evo.lineage import Stage
from evo.measure import Incumbent
from evo.measure.clock import usual_us
from evo.problem.genome import Genome
from evo.problem.space import Space
from evo.search.cover import WITHIN
from evo.search.samplers import Exhausted, Sampler, find_sampler
from evo.search.tasks import OpenRun, TaskExecutor

_TICK_S = 0.2

_FIRST_S = 60.0
"""A first candidate may take so much longer than the budget."""

_LAST_S = 10.0
"""Longest wait for the present timing when a search is interrupted."""

_MOST = 1e12
"""A budget has at most so many seconds, and so many evaluations."""

_FINALS_RESERVE = 0.15
_FINALS_RESERVE_MAX_S = 20.0
"""Finals have this share of a budget's time, and at most so many seconds for each task."""

_ELITES = 1000
"""Candidates that are kept for the finals of a task, the best."""

_DISTURBED_RETRIES = 3
"""Number of disturbed timings in a row that would be the best after which none is measured a second time, until a timing is
not disturbed."""


# -- how far a search is, and when it stops ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When to stop; the first limit reached counts. None: no such limit."""

    seconds: float | None = None
    evaluations: int | None = None
    patience: int | None = None
    """Evaluations in a row without a better candidate."""

    def __post_init__(self) -> None:
        for name, value, unit in (
            ("seconds", self.seconds, "10m"),
            ("evaluations", self.evaluations, "500"),
            ("patience", self.patience, "200"),
        ):
            if value is not None and value <= 0:
                raise UsageError(f"a budget of {value:g} {name} leaves nothing to do; give more, e.g. {unit}")
            if value is not None and value > _MOST:
                raise UsageError(f"a budget of more than {_MOST:g} {name} has no end; give less, e.g. {unit}")
        if self.seconds is None and self.evaluations is None and self.patience is None:
            raise UsageError("a search needs a budget: time, evaluations or patience")


class StopReason(StrEnum):
    TIME = "time is up"
    EVALUATIONS = "evaluations done"
    PATIENCE = "no improvement"
    EXHAUSTED = "every point of the space was tried"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A candidate that was better than all before it on its task. `ratio` is `timing`'s: its time over the
    reference's; `elapsed_s` when it was known, in seconds of searching. `replayed`: that was before the run was resumed."""

    elapsed_s: float
    task: int
    order: int
    ratio: float
    timing: Timing
    replayed: bool = False


@dataclass(kw_only=True)
class Progress:
    """The state of a running search, for observers. The search owns it; read it, do not keep it.

    Candidates and seconds of a resumed run are those of the run as a whole; costs are those since then.
    """

    finished: int = 0
    replayed: int = 0
    """Number of candidates that had finished before the run was resumed; `finished` counts them, too."""
    building: int = 0
    measuring: int = 0
    on_device: int = 0
    """The part of `measuring` that a device works on; the rest waits."""
    by_status: dict[Status, int] = field(default_factory=dict)
    best: dict[int, Improvement] = field(default_factory=dict)
    """The last improvement of each task, by its number."""
    unsure: dict[int, Improvement] = field(default_factory=dict)
    """The fastest disturbed one of each task that has passed."""
    improvements: list[Improvement] = field(default_factory=list)
    waiting: tuple[int, InFlight] | None = None
    """The work that has been in flight the longest, with its candidate's order."""
    spent: Costs = field(default_factory=Costs)
    spent_on_finished: Costs = field(default_factory=Costs)
    """The part of it that went into candidates which have a result."""
    first_measured_s: float | None = None
    elapsed_s: float = 0.0
    devices: int = 1
    """The number of devices that measure."""
    begun: bool = True
    """The time of the budget runs: the device and its data are ready."""
    interrupted: bool = False
    """A signal ends the search when what is being timed is done."""
    incidents: dict[str, int] = field(default_factory=dict)
    """Number of each incident that the search has survived since it began or was resumed, by its name."""


Observer = Callable[[Progress], None]
"""Is called whenever something has happened, and several times a second."""


# -- the loop ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Original:
    """The first candidate with some machine code, and the result that its duplicates share."""

    order: int
    status: Status | None = None
    """None while it is in flight."""
    ratio: float | None = None
    disturbed: bool = False
    told: int | None = None
    """The first with this code that was told: this order does not depend on what finished first."""
    duplicates: list[Candidate] | None = None
    """Later candidates of the same code, which wait for its result."""

    def take(self, evaluation: Evaluation) -> None:
        self.status, timing = evaluation.status, evaluation.timing()
        if timing is not None:
            self.ratio, self.disturbed = timing.ratio, timing.disturbed


@dataclass(kw_only=True)
class _Task:
    """One workload of the search, with its own sampler."""

    executor: TaskExecutor
    space: Space
    sampler: Sampler
    by_code: dict[bytes, _Original] = field(default_factory=dict)
    elites: list[Candidate] = field(default_factory=list)
    """The best candidates that passed, with distinct code: best first, disturbed ones behind all others."""
    best_told: float | None = None
    reference_us: list[float] = field(default_factory=list)
    """The reference's time in each race, as the candidate's median and ratio give it."""
    incumbent: Incumbent | None = None
    near: dict[Genome, tuple[float, int]] = field(default_factory=dict)
    """Ratio and order of candidates nearly as fast as this task's best, which is the first; for the exchange between
    tasks."""
    tried: set[Genome] = field(default_factory=set)
    """Genomes that were proposed for this task, or are not legal for it; for the exchange."""
    idle: int = 0
    """Number of proposals since the task last improved, which an improvement halves; for the exchange."""


class Search:
    """One run of the loop, or what is left of it: what the database has of the run is replayed first. Of a budget of time a
    part is left to the finals."""

    def __init__(self, opened: OpenRun, observer: Observer) -> None:
        self._run, self._store, self._executor, self._observer = opened.run, opened.store, opened.executor, observer
        spec = opened.run.spec
        self._max_in_flight = spec.max_in_flight
        options = spec.options
        self._budget = Budget(**spec.budget)
        self._recorded = {r.candidate.order: r for r in self._store.evaluations(self._run)}
        self._last_recorded = max(self._recorded, default=-1)
        check_files(options.get("files", {}))
        self._tasks: list[_Task] = []
        for number, task in enumerate(opened.tasks(Stage.SEARCH)):
            space = task.space
            if fixed := options.get("fixed"):
                space = space.restricted(fixed)
            if starts := options.get("starts"):
                space = space.with_initial_points(starts, default_first=not options.get("given"))
            sampler = find_sampler(spec.sampler)(space, spec.seed + 1_000_003 * number, options.get("sampler", {}))
            self._tasks.append(_Task(executor=task, space=space, sampler=sampler))
        self._exchanging = bool(options.get("cover"))
        self._open_tasks = list(range(len(self._tasks)))
        """Numbers of the tasks whose sampler has more to propose."""
        self._asked = 0
        self._untold: dict[int, Candidate] = {}
        """Candidates that were proposed and not yet told to their sampler, by order."""
        self._told = 0
        self._told_since_better = 0
        self._disturbed = self._disturbed_in_a_row = 0
        self._measured = False
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._interrupts, self.over = 0, False
        self._last: list[Candidate] | None = None
        """The candidates that an interrupted search waits for; None while it is not interrupted."""
        self._last_until_s = inf
        self._before_s = opened.run.elapsed_s
        self._started: float | None = None
        self.started_unix = time.time()
        """When the time of this part of the search began to count: after the replay, with the first timing."""
        self.progress = Progress(devices=self._executor.devices, begun=False)

    def interrupt(self) -> None:
        """Safe in a signal handler: the loop begins nothing more, drops what is being built, and stops when what is being
        timed is stored, or after ten seconds; the second time, at once. `resume` proposes again what was dropped."""
        self._interrupts += 1
        self._events.put(lambda: None)

    @property
    def elapsed_s(self) -> float:
        """Seconds spent searching, earlier parts of the run included; the replay of those costs nothing, and nor does making
        the device and its data ready."""
        return self._before_s + (time.monotonic() - self._started if self._started is not None else 0.0)

    def run(self) -> StopReason:
        """Searches until the budget is spent. Raises what the database raises; candidates' faults are data."""
        # A sampler's matrices are small: threads of the linear algebra library would cost it more than they
        # bring, and take cores from the builders.
        with threadpool_limits(limits=1, user_api="blas"):
            while True:
                self._store.check()
                reason = self._wind_up() if self._interrupts else self._advance()
                if reason is not None:
                    self._keep_first_measurements()
                self.progress.elapsed_s, self.progress.interrupted = self.elapsed_s, self._interrupts > 0
                self.progress.incidents = self._incidents()
                self._look_at_work()
                self._begin_when_ready()
                self._observer(self.progress)
                if reason is not None:
                    self.over = True
                    self._before_s, self._started = self.elapsed_s, None  # finals are not searching
                    return reason
                self._wait()

    def elites(self, task: int) -> list[Candidate]:
        """The best candidates of a task that passed, with distinct machine code: best first, disturbed ones behind all
        others."""
        return list(self._tasks[task].elites)

    def reference_us(self, task: int) -> float:
        """Time of a task's undisturbed reference; infinite where it is not known."""
        return usual_us(self._tasks[task].reference_us)

    # -- the schedule ---------------------------------------------------------------------------------------

    def _advance(self) -> StopReason | None:
        """Asks and tells as far as results allow; the reason to stop, if there is one."""
        while True:
            asked = self._asked
            # What is recorded is replayed whatever the budget says: the finals are about all of it.
            replaying = asked <= self._last_recorded
            budget = self._budget
            if not replaying and self._time_is_up():
                return StopReason.TIME
            if not replaying and budget.patience is not None and self._told_since_better >= budget.patience:
                return StopReason.PATIENCE
            limit = budget.evaluations
            may_ask = self._open_tasks and (replaying or limit is None or asked < limit)
            if may_ask and asked - self._told < self._max_in_flight:
                self._ask()
            elif self._told < asked and self._untold[self._told].status is not None:
                self._tell(self._untold.pop(self._told))
            elif self._told == asked and not may_ask:
                return StopReason.EVALUATIONS if self._open_tasks else StopReason.EXHAUSTED
            else:
                return None

    def _wind_up(self) -> StopReason | None:
        """The reason to stop an interrupted search, when the present timing is done."""
        if self._last is None:
            on_devices = [w for w in self._executor.in_flight() if w.stage in ("gate", "timing", "asked")]
            found = (self._candidate_of(work) for work in on_devices)
            self._last = [candidate for candidate in found if candidate is not None and candidate.code is not None]
            self._last_until_s = time.monotonic() + _LAST_S
            self._executor.wind_down()
            self._handle_events()
        done = all(c.status is not None or c.first_measurement is not None for c in self._last)
        return StopReason.INTERRUPTED if done or self._interrupts > 1 or time.monotonic() > self._last_until_s else None

    def _begin_when_ready(self) -> None:
        """Has the time of the budget begin: with the first timing, or where nothing can be timed, with the first result."""
        progress = self.progress
        if self._started is not None or self._asked <= self._last_recorded:
            return
        nothing_left = progress.finished > progress.replayed and not progress.measuring
        if self._measured or nothing_left or any(w.stage == "timing" for w in self._executor.in_flight()):
            self._started, self.started_unix, progress.begun = time.monotonic(), time.time(), True

    def _time_is_up(self) -> bool:
        """Finals are part of the time that a user grants, as far as can be foreseen and as there is somebody for them. A
        first candidate that is being measured is waited for, for a while."""
        seconds, finalists = self._budget.seconds, any(task.elites for task in self._tasks)
        progress = self.progress
        if seconds is None:
            return False
        if progress.measuring and not progress.finished and not self._disturbed:
            return self.elapsed_s >= seconds + _FIRST_S
        reserve = min(_FINALS_RESERVE * seconds, _FINALS_RESERVE_MAX_S * len(self._tasks)) if finalists else 0.0
        return self.elapsed_s >= seconds - reserve

    def _ask(self) -> None:
        order = self._asked
        number = self._open_tasks[order % len(self._open_tasks)]
        if self._exchanging:  # where something was found last
            number = min(self._open_tasks, key=lambda n: (self._tasks[n].idle, n))
        task = self._tasks[number]
        try:
            proposal = (self._adopted(number, order) if self._exchanging else None) or task.sampler.ask(order)
        except Exhausted:
            self._open_tasks.remove(number)
            return
        task.idle += 1
        if self._exchanging:
            task.tried.add(proposal.genome)
        candidate = Candidate(order=order, task=number, proposal=proposal)
        self._untold[order] = candidate
        self._asked += 1
        if order in self._recorded:
            self._replay(candidate)
            return
        self.progress.building += 1
        future = task.executor.build(proposal.genome)
        self._when_done(future, lambda done: self._on_build(candidate, done.result()))

    def _adopted(self, number: int, order: int) -> Proposal | None:
        """The candidate of other tasks, not tried for this one, that serves most of them, the nearest first; at most every
        second proposal. A candidate that serves one task alone is offered if it is the best there."""
        task, serves, origins = self._tasks[number], Counter[Genome](), dict[Genome, int]()
        for other in sorted(range(len(self._tasks)), key=lambda n: abs(n - number)) if task.idle % 2 else ():
            for place, (genome, (_, origin)) in enumerate(self._tasks[other].near.items()):
                if genome not in task.tried:
                    serves[genome] += 1 if place else 2
                    origins.setdefault(genome, origin)
        for genome, count in serves.most_common():
            if count < 2:
                break
            task.tried.add(genome)
            if task.space.is_legal(genome.parameters):
                migrant = Proposal(genome=genome, operator="migration", parents=(Parent(order=origins[genome]),))
                task.sampler.adopt(order, migrant)
                return migrant
        return None

    def _tell(self, candidate: Candidate) -> None:
        """Tells the sampler of a finished candidate. A disturbed one that would be the best so far has no score there,
        unless there is no best yet: some machines are never quiet."""
        task, ratio, first = self._tasks[candidate.task], candidate.ratio, candidate.order
        if candidate.code is not None:
            original = task.by_code[candidate.code]
            first = original.told = candidate.order if original.told is None else original.told
        better = ratio is not None and (task.best_told is None or ratio < task.best_told)
        score = None if candidate.disturbed and better and task.best_told is not None else ratio
        task.sampler.tell(candidate.order, score, first if first != candidate.order else None)
        if better and not candidate.disturbed:
            task.best_told = ratio
            self._told_since_better = 0
            task.idle //= 2
        else:
            self._told_since_better += 1
        if self._exchanging and ratio is not None and not candidate.disturbed:
            own = (candidate.proposal.genome, (ratio, candidate.order))
            found = [own, *task.near.items()] if better else [*task.near.items(), own]
            task.near = {g: (r, o) for g, (r, o) in found if r <= (1 + WITHIN) * found[0][1][0]}
        self._told += 1

    def _wait(self) -> None:
        """Handles what has finished; returns after a tick at the latest, so that the clock is looked at."""
        with suppress(queue.Empty):
            self._events.get(timeout=_TICK_S)()
            self._handle_events()

    def _handle_events(self) -> None:
        with suppress(queue.Empty):
            while self._interrupts < 2:
                self._events.get_nowait()()

    def _when_done(self, future: Future[Any], handle: Callable[[Future[Any]], None]) -> None:
        future.add_done_callback(lambda done: None if done.cancelled() else self._events.put(lambda: handle(done)))

    def _look_at_work(self) -> None:
        """Notes what devices work on, and the candidate that has been in flight the longest."""
        progress, flying = self.progress, self._executor.in_flight()
        of_cluster = progress.devices if any(work.stage == "asked" for work in flying) else 0
        timed = sum(work.stage in ("gate", "timing") for work in flying)
        progress.on_device = min(progress.measuring, timed + of_cluster)
        found = ((self._candidate_of(work), work) for work in flying)
        progress.waiting = next(((candidate.order, work) for candidate, work in found if candidate is not None), None)

    def _candidate_of(self, work: InFlight) -> Candidate | None:
        """The one whose result that will be."""
        for candidate in self._untold.values():
            workload = self._tasks[candidate.task].executor.workload
            if candidate.status is None and (candidate.proposal.genome, workload) == (work.genome, work.workload):
                return candidate
        return None

    # -- results --------------------------------------------------------------------------------------------

    def _on_build(self, candidate: Candidate, build: Build) -> None:
        self.progress.building -= 1
        self._spend(candidate, Costs(build_seconds=0.0 if build.cached else build.seconds))
        candidate.build = build
        if build.binary is None:
            self._finish(candidate, Evaluation(status=build.status, build=build, log=build.log))
            return
        candidate.code = self._code(candidate, build.binary)
        original = self._tasks[candidate.task].by_code.setdefault(candidate.code, _Original(order=candidate.order))
        if original.order != candidate.order:
            if original.status is not None:
                self._finish_duplicate(candidate, original)
            else:
                original.duplicates = [*(original.duplicates or ()), candidate]
            return
        if self._interrupts:
            return
        self.progress.measuring += 1
        if self.progress.first_measured_s is None:
            self.progress.first_measured_s = self.elapsed_s
        self._measure(candidate)

    def _measure(self, candidate: Candidate) -> None:
        assert candidate.build is not None
        task = self._tasks[candidate.task]
        future = task.executor.measure(
            candidate.proposal.genome, candidate.build, time=True, incumbent=task.incumbent
        )
        self._when_done(future, lambda done: self._on_measure(candidate, done.result()))

    def _on_measure(self, candidate: Candidate, measured: Evaluation) -> None:
        costs = Costs(
            device_seconds=measured.seconds,
            load_seconds=measured.load_seconds,
            gate_seconds=measured.gate_seconds,
            timing_seconds=measured.timing_seconds,
        )
        self._spend(candidate, costs)
        self._measured = True
        timing = measured.timing()
        if timing is not None and not timing.disturbed:
            self._disturbed_in_a_row = 0
        elif timing is not None:
            self._disturbed += 1
            if candidate.first_measurement is None and self._is_best(candidate.task, timing):
                self._disturbed_in_a_row += 1
                if self._disturbed_in_a_row <= _DISTURBED_RETRIES:
                    candidate.first_measurement = measured
                    if not self._interrupts:
                        self._measure(candidate)
                    return
        self._take(candidate, measured)

    def _take(self, candidate: Candidate, measured: Evaluation) -> None:
        self.progress.measuring -= 1
        self._finish(candidate, replace(measured, build=candidate.build))
        assert candidate.code is not None
        original = self._tasks[candidate.task].by_code[candidate.code]
        for duplicate in original.duplicates or ():
            self._finish_duplicate(duplicate, original)
        original.duplicates = None

    def _keep_first_measurements(self) -> None:
        """Keeps disturbed first measurements where nothing else has passed; otherwise `evo resume` measures again."""
        without = [number for number, task in enumerate(self._tasks) if not task.elites]
        for candidate in self._untold.values():
            if candidate.first_measurement is not None and candidate.task in without:
                self._take(candidate, candidate.first_measurement)

    def _incidents(self) -> dict[str, int]:
        counts = {
            "timings disturbed": self._disturbed,
            "processes lost": self._executor.losses,
            "devices lost": self.progress.devices - self._executor.devices,
            "connections lost": self._store.connections_lost,
        }
        return {name: count for name, count in counts.items() if count}

    def _spend(self, candidate: Candidate, costs: Costs) -> None:
        candidate.costs += costs
        self.progress.spent += costs

    def _is_best(self, task: int, timing: Timing) -> bool:
        """Whether a timing is a task's best so far, by its ratio."""
        best = self.progress.best.get(task)
        return timing.ratio is not None and (best is None or timing.ratio < best.ratio)

    def _finish_duplicate(self, candidate: Candidate, original: _Original) -> None:
        assert original.status is not None
        evaluation = Evaluation(
            status=Status.SAME_CODE if original.status.passed else original.status,
            build=candidate.build,
            same_code_as=original.order,
            log=f"machine code and launches equal those of candidate {original.order}",
        )
        self._finish(candidate, evaluation)

    def _finish(self, candidate: Candidate, evaluation: Evaluation) -> None:
        elapsed_s = self.elapsed_s
        self._store.add(self._run, candidate, evaluation, elapsed_s=elapsed_s)
        self._remember(candidate, evaluation, elapsed_s)
        candidate.build = candidate.first_measurement = None
        self.progress.spent_on_finished += candidate.costs

    def _remember(self, candidate: Candidate, evaluation: Evaluation, elapsed_s: float, *, replayed: bool = False) -> None:
        task, progress = self._tasks[candidate.task], self.progress
        original = task.by_code[candidate.code] if candidate.code else None
        candidate.status, timing = evaluation.status, evaluation.timing()
        if original is not None:
            if original.order == candidate.order:
                original.take(evaluation)
            candidate.ratio, candidate.disturbed = original.ratio, original.disturbed
        if candidate.status is Status.OK:
            insort(task.elites, candidate, key=lambda c: (c.disturbed, inf if c.ratio is None else c.ratio, c.order))
            del task.elites[_ELITES:]
        progress.finished += 1
        progress.by_status[evaluation.status] = progress.by_status.get(evaluation.status, 0) + 1
        if evaluation.status is not Status.OK or timing is None or timing.ratio is None:
            return
        task.reference_us.append(timing.median_us / timing.ratio)
        number, order, ratio = candidate.task, candidate.order, timing.ratio
        found = Improvement(elapsed_s=elapsed_s, task=number, order=order, ratio=ratio, timing=timing, replayed=replayed)
        if timing.disturbed:
            known = progress.unsure.get(number)
            progress.unsure[number] = found if known is None or ratio < known.ratio else known
        elif self._is_best(number, timing) and _beats_incumbent(timing, evaluation.timings):
            # A replayed candidate is an incumbent by its figure alone: the record has no machine code.
            task.incumbent = Incumbent(genome=candidate.proposal.genome, build=candidate.build, ratio=ratio)
            progress.best[number] = found
            progress.improvements.append(found)

    def _replay(self, candidate: Candidate) -> None:
        record = self._recorded.pop(candidate.order)
        evaluation, was = record.evaluation, record.candidate
        if was.proposal.genome != candidate.proposal.genome or was.task != candidate.task:
            raise StoreError(
                f"candidate {candidate.order} of this run was proposed as {was.proposal.genome.digest[:12]}, and now"
                f" the sampler proposes {candidate.proposal.genome.digest[:12]}: the kernel, its search space or evo has"
                " changed since; start a new run"
            )
        if evaluation.build is not None and evaluation.build.binary is not None:
            candidate.code = self._code(candidate, evaluation.build.binary)
            order = candidate.order if evaluation.same_code_as is None else evaluation.same_code_as
            original = self._tasks[candidate.task].by_code.setdefault(candidate.code, _Original(order=order))
            if order in self._recorded:  # one that was in flight when its original was stored is asked for before it
                original.take(self._recorded[order].evaluation)
        self._remember(candidate, evaluation, record.elapsed_s, replayed=True)
        self.progress.replayed += 1

    def _code(self, candidate: Candidate, binary: Binary) -> bytes:
        task, point = self._tasks[candidate.task].executor, candidate.proposal.genome.parameters
        sequence = task.problem.sequence(task.target, point, task.workload, task.limits, binary.launch)
        return hashlib.sha256(f"{binary.code_hash} {sequence}".encode()).digest()


def _beats_incumbent(own: Timing, timings: Sequence[Timing]) -> bool:
    """Whether a candidate was faster than its incumbent in the race that both ran in; also if there was none."""
    incumbent = next((t for t in timings if t.contender == "incumbent"), None)
    if incumbent is None or len(own.samples_us) != len(incumbent.samples_us):
        return True
    return median(a / b for a, b in zip(own.samples_us, incumbent.samples_us, strict=True)) < 1.0


def default_max_in_flight(builders: int, devices: int = 1) -> int:
    """Enough to keep the builders and the devices busy, few enough to learn from."""
    return max(8, 2 * builders, builders + 2 * devices)
