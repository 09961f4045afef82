"""The finals of one task: which of the candidates that a search found fastest has won.

A search picks its best by many noisy timings, so the best of them is partly lucky (the winner's curse). The finals use
new data in a process that has seen none of the finalists. Each is also compiled and gated for neighbouring sizes; those
that pass run interleaved with PyTorch and with a copy of the same size. The fastest runs once more, in another fresh
process and on other data, beside these baselines and a second copy of itself: what one copy seems to gain over the other
is the noise floor (A/A control). Only this confirming figure is reported, and a candidate that fails there has not won.
Finalists are compared with each other by the race that all of them ran in; the winner keeps its time in that race, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import fmean
from time import monotonic

from evo.errors import EvoError
from evo.evaluation import AA_CONTROL, FINALIST, UNCHECKED, Build, Candidate, Check, Evaluation, Status, Timing
from evo.lineage import Stage
from evo.measure import NO_MEMORY, NO_TIME
from evo.measure.clock import noise_floor
from evo.problem.genome import Genome
from evo.problem.kernel import Workload
from evo.sanitize import Sanitized
from evo.search.cover import choose_by_dtype
from evo.search.loop import Search
from evo.search.tasks import OpenRun, Patience, TaskExecutor

FINALISTS = 8
"""Finalists of a task, unless a search is told another number."""
_BATCHES = 3
"""So many batches of finalists are tried at most, where none of a batch passes."""
_RACES = 3
"""So many races are the finals of a workload, as a rule: all of them together may take as long as the search did."""
_PATIENCE, _LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.5, 10.0, 120.0
"""How long finals wait for a quiet machine, all together: as a share of the search's time, and its limits."""
_SHORT_PATIENCE = 2.0
"""So many times the search's time is waited at most where that is less than the least."""
_LEAST_GATES_S = 30.0
"""Once one has passed, no further finalist of a workload is gated after the time that its search had, but at least this."""
_USUAL_S = {"gate": 1.0, "last gate": 3.0, "race": 10.0}
"""Seconds of a step by its kind, as long as none of its kind has ended; a race has a limit, too."""
Building = list[tuple[Candidate, list[tuple[TaskExecutor, Future[Build]]]]]
_WINNERS_MULTIPLE = 3
"""The winner meets so many times the random cases of a finalist, on top."""
_CONFIRMATIONS = 2
"""Number of races that may die without naming a contender before their contender counts as refused."""


@dataclass(kw_only=True)
class Finalist:
    """A finalist with what the finals have found out about it."""

    candidate: Candidate
    build: Build
    measurement: Evaluation
    checked: Future[Sanitized] | None = None
    """Findings of the memory checker, where it was begun while the finalists were gated."""

    @property
    def name(self) -> str:
        """The finalist's name as a contender."""
        return str(self.candidate.order)

    @property
    def passed(self) -> bool:
        return self.measurement.status is Status.OK

    @property
    def timing(self) -> Timing | None:
        """The winner's is that of the race that confirmed it."""
        return self._cold("candidate")

    @property
    def raced(self) -> Timing | None:
        """The finalist's time in the race of all finalists."""
        return self._cold(FINALIST) or self.timing

    def _cold(self, contender: str) -> Timing | None:
        return next((t for t in self.measurement.timings if t.contender == contender and t.protocol != "hot"), None)

    def enter(self, name: str) -> tuple[str, Genome, Build]:
        return name, self.candidate.proposal.genome, self.build

    def refuse(self, reason: str) -> None:
        """Refuses it after it has passed the gate."""
        checks = (*self.measurement.checks, Check(case="timed", passed=False, reason=reason))
        self.measurement = replace(self.measurement, status=Status.WRONG, checks=checks, log=reason)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that finals begin, such as "gate, finalist 3 of 8". spent_s, left_s: seconds of all finals before it, and from
    it on, as far as the steps before tell. waits_s: seconds in which a disturbed race is held again at most; else 0."""

    workload: Workload
    text: str
    spent_s: float
    left_s: float
    waits_s: float = 0.0


Begins = Callable[[Step], None]


class _Course:
    """Tells of each step of finals when it begins. gates: number of finalists of each workload."""

    def __init__(self, begins: Begins, gates: Mapping[Workload | str, int], race_s: float) -> None:
        tasks = sum(number > 0 for number in gates.values())
        self._begins, self._race_s, self._began = begins, race_s, monotonic()
        self._left = {**gates, "last gate": tasks, "race": 2 * tasks}
        """Number of steps by their kind, those of "gate" by their workload."""
        self._took: dict[str, list[float]] = {kind: [] for kind in _USUAL_S}
        self._present: tuple[Workload | str, str, float] | None = None

    def begin(self, workload: Workload, kind: str, text: str) -> None:
        now = monotonic()
        if self._present is not None:
            step, before, since = self._present
            self._took[before].append(now - since)
            self._left[step] = max(0, self._left[step] - 1)
        if kind != "gate":
            self._left[workload] = 0  # further finalists were left out
        step = workload if kind == "gate" else kind
        self._left[step] = max(1, self._left[step])
        self._present = step, kind, now
        self._tell(workload, text, 0.0)

    def wait(self, workload: Workload, waits_s: float) -> None:
        """A race is held again."""
        self._tell(workload, f"other programs disturb the race; it is held again, for {ceil(waits_s)} s at most", waits_s)

    def _tell(self, workload: Workload, text: str, waits_s: float) -> None:
        usual = _USUAL_S | {"race": min(self._race_s, _USUAL_S["race"])}
        usual |= {kind: fmean(took) for kind, took in self._took.items() if took}
        left_s = waits_s + sum(number * usual[s if isinstance(s, str) else "gate"] for s, number in self._left.items())
        spent_s = monotonic() - self._began
        self._begins(Step(workload=workload, text=text, spent_s=spent_s, left_s=left_s, waits_s=waits_s))


@dataclass(frozen=True, kw_only=True)
class Finals:
    """Finalists, fastest first (the refused ones last), and the baselines' timings."""

    finalists: tuple[Finalist, ...] = ()
    baselines: tuple[Timing, ...] = ()
    winner: Finalist | None = None
    """The first of the finalists, if a race of its own has confirmed it."""


def hold_all_finals(
    search: Search, opened: OpenRun, count: int, begins: Begins = lambda step: None
) -> tuple[Finals, ...]:
    """Holds the finals of every task, with `count` finalists; where all are refused, with the next best, but not of a
    covering run. begins: is called with each step. Raises LostFileError while they are held, where the database is lost."""
    opened.executor.renew_device()
    spec = opened.run.spec
    workloads = len(spec.workloads)
    race_s, gates_s = search.elapsed_s / (_RACES * workloads), max(search.elapsed_s / workloads, _LEAST_GATES_S)
    least_s = min(_LEAST_PATIENCE_S, _SHORT_PATIENCE * search.elapsed_s)
    patience_s = min(max(_PATIENCE * search.elapsed_s, least_s), _MOST_PATIENCE_S)
    gates_s = inf if spec.options.get("sanitize_finals") else gates_s  # whoever asks for that waits for it
    gates = dict[Workload | str, int]()
    gates.update((workload, min(count, len(search.elites(n)))) for n, workload in enumerate(spec.workloads))
    course = _Course(begins, gates, race_s)
    tasks = [
        replace(
            task,
            gates_s=gates_s,
            race_s=race_s,
            reference_us=search.reference_us(n),
            patience=Patience(left_s=patience_s / workloads, tell=course.wait),
            begin=course.begin,
            check=opened.store.check,
        )
        for n, task in enumerate(opened.tasks(Stage.FINAL))
    ]
    if spec.options.get("cover"):
        return _hold_covering_finals(search, opened, tasks, count)
    held = []
    first = [build_all(task, search.elites(number)[:count]) for number, task in enumerate(tasks)]
    for number, (task, building) in enumerate(zip(tasks, first, strict=True)):
        met = 0
        for _ in range(_BATCHES):
            if met:
                building = build_all(task, search.elites(number)[met : met + count])
                if not building:
                    break  # no candidate is left
            finals = end_finals(task, *hold_race(task, building))
            _store(opened, number, finals, search.elapsed_s)
            if finals.winner or not finals.finalists:
                break  # else all of these were refused, and the next best have their turn
            met += len(finals.finalists)
        held.append(finals)
    return tuple(held)


def _hold_covering_finals(
    search: Search, opened: OpenRun, tasks: Sequence[TaskExecutor], count: int
) -> tuple[Finals, ...]:
    """Holds the finals where few variants are to serve all tasks. A variant is a genome, whatever is compiled in for a task.
    Finalists of a task are its fastest, and its fastest of those that would be kept by the search's own times; all races are
    held before it is decided which are kept, and the fastest of these is confirmed for each task. A task whose reference is
    faster than all of them is served by that."""
    elites = [search.elites(number) for number in range(len(tasks))]
    dtypes = [task.workload.dtype for task in tasks]
    won = [found if found and (found[0].ratio or 1.0) < 1 else [] for found in elites]
    likely = choose_by_dtype(dtypes, [{c.proposal.genome.digest: c.ratio for c in found if c.ratio} for found in won])
    first, started, times = (count + 2) // 3, [], []
    for task, found in zip(tasks, elites, strict=True):
        others = sorted(found[first:], key=lambda c: c.proposal.genome.digest not in likely[task.workload.dtype])
        started.append(build_all(task, [*found[:first], *others][:count]))
    races = [hold_race(task, building) for task, building in zip(tasks, started, strict=True)]
    for finalists, timings in races:
        timed = {t.contender: t for t in timings if t.ratio is not None}
        raced = [(f, timed[f.name]) for f in finalists if f.passed and f.name in timed]
        faster = any(t.disturbed or (t.ratio_low or 0.0) <= 1 for _, t in raced)  # than the reference, as far as is known
        times.append({f.candidate.proposal.genome.digest: t.ratio for f, t in raced if faster and t.ratio})
    few = choose_by_dtype(dtypes, times)
    held = []
    for number, (task, race) in enumerate(zip(tasks, races, strict=True)):
        kept = few[task.workload.dtype]
        finals = end_finals(task, *race, {f.candidate.order for f in race[0] if f.candidate.proposal.genome.digest in kept})
        _store(opened, number, finals, search.elapsed_s)
        held.append(finals)
    return tuple(held)


def _store(opened: OpenRun, task: int, finals: Finals, elapsed_s: float) -> None:
    store, run = opened.store, opened.run
    with store.transaction():
        for finalist in finals.finalists:
            store.add_final(run, finalist.candidate.order, finalist.measurement, elapsed_s=elapsed_s)
        store.add_baselines(run, task, finals.baselines, stage=Stage.FINAL)
        # Also None: the winner of earlier finals has not won these.
        store.set_winner(run, task, finals.winner.candidate.order if finals.winner else None)


def build_all(task: TaskExecutor, elites: Sequence[Candidate]) -> Building:
    """Begins to build each for the workload and its neighbours. Nothing waits: the next task's are built meanwhile."""
    return [(c, [(t, t.build(c.proposal.genome)) for t in task.with_neighbours(c.proposal.genome)]) for c in elites]


def hold_race(task: TaskExecutor, building: Building) -> tuple[list[Finalist], tuple[Timing, ...]]:
    """Gates and races the elites of one task: no timings where none passes. Those whose gates would begin after `gates_s`
    are left out, once one has passed. The device process must be fresh (`Executor.renew_device`).

    Raises EvoError if the race itself cannot be held, and what the task's `check` raises.
    """
    finalists, ends_s = list[Finalist](), monotonic() + task.gates_s
    likely = task.check_memory(building[0][0].proposal.genome) if building and not task.sanitized else None
    for number, (candidate, futures) in enumerate(building, 1):
        if monotonic() > ends_s and any(f.passed for f in finalists):
            break
        task.begin(task.workload, "gate", f"gate, finalist {number} of {len(building)}")
        builds = [(t, task.awaited(future)) for t, future in futures]
        verdict = _gate(candidate.proposal.genome, builds)
        finalists.append(Finalist(candidate=candidate, build=builds[0][1], measurement=verdict))
    if likely is not None:  # nothing runs beside a race
        finalists[0].checked = likely
        wait([likely])
    passed = [f for f in finalists if f.passed]
    return finalists, _race(task, passed) if passed else ()


def end_finals(
    task: TaskExecutor, finalists: list[Finalist], timings: tuple[Timing, ...], preferred: Collection[int] = ()
) -> Finals:
    """Has the fastest of a race confirmed; of the `preferred` candidates, by order, where one of them is."""
    winner, passed = None, [f for f in finalists if f.passed]
    if passed:
        winner, timings = _confirm(task, passed, timings, preferred)
    timings = _with_noise_floor(timings, winner)
    for f in passed:
        own = tuple(replace(t, contender="candidate") for t in timings if t.contender == f.name)
        raced = tuple(t for t in timings if t.contender == FINALIST and f is winner)
        f.measurement = replace(f.measurement, timings=own + raced if f.passed else ())
    names = {FINALIST, *(f.name for f in finalists)}
    return Finals(
        finalists=tuple(sorted(finalists, key=lambda f: (f is not winner, _ratio(f.timing)))),
        baselines=tuple(t for t in timings if t.contender not in names),
        winner=winner,
    )


def _gate(genome: Genome, builds: list[tuple[TaskExecutor, Build]]) -> Evaluation:
    """One verdict over the workload and its neighbours, up to the first refusal."""
    total = Evaluation(status=Status.OK)
    for task, built in builds:
        if built.binary is None:
            return replace(total, status=built.status, checks=(), log=f"for {task.workload}: {built.log}")
        cases = task.random_cases(task.finals_cases) if task is builds[0][0] else ()
        found = task.awaited(task.measure(genome, built, time=False, cases=cases))
        total = replace(
            found,
            checks=total.checks + found.checks,
            seconds=total.seconds + found.seconds,
            gate_seconds=total.gate_seconds + found.gate_seconds,
        )
        if found.status is not Status.OK:
            return replace(total, log=f"for {task.workload}: {found.log}")
    task, _ = builds[0]
    return _with_memory(task, task.check_memory(genome), total) if task.sanitized else total


def _with_memory(task: TaskExecutor, checked: Future[Sanitized] | None, passed: Evaluation) -> Evaluation:
    """A measurement that has passed the gate, refused if the device's memory checker finds a fault. A fault of the tool or
    the machine refuses nothing: then the log says that the candidate was not checked."""
    if checked is None:
        return replace(passed, log=f"{UNCHECKED} memory errors: its run has too many workloads")
    try:
        (report,) = task.awaited(checked).reports
        why = " ".join(report.unfinished.split())
    except (EvoError, OSError, RuntimeError) as error:  # PyTorch's are RuntimeErrors
        why = str(error).partition("\n")[0]
    if why:
        return replace(passed, log=f"{UNCHECKED} memory errors: {why}")
    if report.clean:
        return passed
    said = (*report.messages, *report.wrong)[0]
    check = Check(case=report.tool, passed=False, reason=said)
    return replace(passed, status=Status.WRONG, checks=(*passed.checks, check), log=f"under {report.tool}: {said}")


def _race(task: TaskExecutor, finalists: list[Finalist]) -> tuple[Timing, ...]:
    """Timings of all that can be timed. A contender that breaks the race is refused, and the others race again.

    Raises EvoError if not even the baselines can be timed.
    """
    for _ in range(len(finalists) + 1):
        entered = {f.name: f for f in finalists if f.passed}
        task.begin(task.workload, "race", f"race of {len(entered)} finalist{'s' * (len(entered) > 1)}")
        outcome = task.race([f.enter(name) for name, f in entered.items()], task.problem.ceilings)
        refused = {name: reason for name, reason in outcome.refused if name in entered}
        for name, reason in refused.items():
            entered[name].refuse(reason)
        if outcome.timings:
            return outcome.timings
        if not refused:
            # The process died without naming a contender: each races alone beside the reference.
            for name, f in entered.items():
                alone = task.race([f.enter(name)])
                if not alone.timings:
                    f.refuse(alone.log)
    raise EvoError(f"the finals of {task.workload} could not be timed: {outcome.log}; resume the run to try again")


def _confirm(
    task: TaskExecutor, finalists: list[Finalist], timings: tuple[Timing, ...], preferred: Collection[int]
) -> tuple[Finalist | None, tuple[Timing, ...]]:
    """Gates the fastest, of the preferred if there are any, on more random cases and on far ones, and runs it once more,
    beside a second copy of itself and the baselines, on other data in a fresh process, cold and hot. If it is refused, the
    next one runs.

    Where the machine stays too busy, the winner's time is disturbed: it is right, and how fast it is, nobody knows.
    Returns the winner, and all timings with these in place of those of the first race; of that one the winner's stays, as
    `FINALIST`. There is no winner if none passes, or if a race dies twice without naming a contender.
    """
    gate, task = task, replace(task, seed=task.seed + 1)
    met = len(gate.random_cases(gate.finals_cases))
    more_cases = gate.random_cases(met + _WINNERS_MULTIPLE * gate.finals_cases)[met:]
    more_cases += gate.far_cases()
    by_name = {f.name: f for f in finalists if f.passed}
    own = [t for t in timings if t.contender in by_name and t.ratio is not None]
    # Where the race was disturbed, the search knows better; its best come first in `finalists`.
    place = {name: n for n, name in enumerate(by_name)}
    rank = {t.contender: place[t.contender] if t.disturbed else _ratio(t) for t in own}
    for first in sorted(own, key=lambda t: (by_name[t.contender].candidate.order not in preferred, rank[t.contender])):
        name, finalist = first.contender, by_name[first.contender]
        genome = finalist.candidate.proposal.genome
        task.begin(task.workload, "last gate", f"gate of the fastest, candidate {name}, with more cases")
        # The checker runs beside the gate: nothing is timed now.
        checked = None if task.sanitized else finalist.checked or task.check_memory(genome)
        gated = gate.awaited(gate.measure(genome, finalist.build, time=False, cases=more_cases))
        if not task.sanitized:
            finalist.measurement = _with_memory(task, checked, finalist.measurement)
        if gated.status is not Status.OK:
            checks = finalist.measurement.checks + tuple(c for c in gated.checks if not c.passed)
            finalist.measurement = replace(finalist.measurement, status=gated.status, checks=checks, log=gated.log)
            continue
        if not finalist.passed:
            continue
        if far := [c.far for c in more_cases if c.far and gated.left_out.get(c.name) in (NO_MEMORY, NO_TIME)]:
            said = f"{UNCHECKED} offsets beyond 32 bits along {', '.join(dict.fromkeys(far))}: no memory, or no time, for it"
            log = f"{finalist.measurement.log}\n{said}".strip()
            finalist.measurement = replace(finalist.measurement, log=log)
        for _ in range(_CONFIRMATIONS):
            task.executor.renew_device()
            task.begin(task.workload, "race", f"race that confirms candidate {name}")
            outcome = task.race([finalist.enter(name), finalist.enter(AA_CONTROL)], task.problem.ceilings, hot=True)
            reasons = [reason for n, reason in outcome.refused if n in (name, AA_CONTROL)]
            timed = {t.contender for t in outcome.timings}
            if reasons or name in timed:
                break
        if reasons:
            finalist.refuse(f"{reasons[0]} (when its time was to be confirmed)")
        elif name in timed:
            kept = (t for t in timings if t.contender not in timed)
            return finalist, (*kept, *outcome.timings, replace(first, contender=FINALIST))
        else:
            finalist.refuse(f"its time could not be confirmed: {outcome.log}")
            break  # the device is not to be trusted either
    return None, timings


def _with_noise_floor(timings: tuple[Timing, ...], winner: Finalist | None) -> tuple[Timing, ...]:
    """The A/A control's time carries the noise floor of the race that confirmed the winner into the record."""
    cold = {t.contender: t for t in timings if t.protocol != "hot"}
    own, control = cold.get(winner.name) if winner else None, cold.get(AA_CONTROL)
    if own is None or control is None or len(own.samples_us) != len(control.samples_us):
        return timings
    noise = noise_floor(own.samples_us, control.samples_us)
    return tuple(replace(t, clocks={**t.clocks, "noise_floor": noise}) if t is control else t for t in timings)


def _ratio(timing: Timing | None) -> float:
    return timing.ratio if timing and timing.ratio is not None else float("inf")
