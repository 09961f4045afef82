"""The finals: the best candidates of a search, gated anew and timed against each other in a fresh process.

A search picks its best by many noisy timings, so the best of them is partly lucky (the winner's curse). The finals use
new data in a process that has seen none of the finalists. Each is also compiled and gated for neighbouring sizes; those
that pass run interleaved with PyTorch and with a copy of the same size. The fastest runs once more, in another fresh
process and on other data, beside these baselines and a second copy of itself: what one copy seems to gain over the other
is the noise floor (A/A control). Only this confirming figure is reported, and a candidate that fails there has not won.
Finalists are compared with each other by the race that all of them ran in; the winner keeps its time in that race, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from evo.errors import EvoError
from evo.evaluation import AA_CONTROL, FINALIST, Build, Candidate, Check, Evaluation, Status, Timing
from evo.executors import RaceResult
from evo.measure.clock import noise_floor
from evo.problem.genome import Genome
from evo.search.tasks import TaskExecutor

__all__ = ["Finalist", "Finals", "hold_finals"]

_CONFIRMATIONS = 2
"""How often a race is held that died without naming a contender, before its contender counts as refused."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A finalist with what the finals found out about it."""

    candidate: Candidate
    measurement: Evaluation

    @property
    def timing(self) -> Timing | None:
        """The winner's is that of the race that confirmed it."""
        return self._cold("candidate")

    @property
    def raced(self) -> Timing | None:
        """In the race of all finalists."""
        return self._cold(FINALIST) or self.timing

    def _cold(self, contender: str) -> Timing | None:
        return next((t for t in self.measurement.timings if t.contender == contender and t.protocol != "hot"), None)


@dataclass(frozen=True, kw_only=True)
class Finals:
    """Finalists, fastest first (the refused ones last), and the baselines' timings."""

    finalists: tuple[Finalist, ...] = ()
    baselines: tuple[Timing, ...] = ()
    winner: Finalist | None = None
    """The first of the finalists, if a race of its own has confirmed it."""


def hold_finals(task: TaskExecutor, elites: list[Candidate]) -> Finals:
    """Gates and races the elites of one task. The device process must be fresh (`Executor.renew_device`).

    Raises EvoError if the race itself cannot be held.
    """
    if not elites:
        return Finals()
    race = _Race(task, elites)
    winner, timings = race.confirm(race.hold() if race.contenders else ())
    timings = _with_noise_floor(timings, winner)
    finalists = [race.finalist(c, timings, winner) for c in elites]
    finalists.sort(key=lambda f: (str(f.candidate.order) != winner, _ratio(f.timing)))
    orders = {str(c.order) for c in elites}
    return Finals(
        finalists=tuple(finalists),
        baselines=tuple(t for t in timings if t.contender not in orders and t.contender != FINALIST),
        winner=finalists[0] if winner else None,
    )


class _Race:
    """The builds, gates and races of one task's finals. A contender's name is the order of the candidate, as text."""

    def __init__(self, task: TaskExecutor, elites: list[Candidate]) -> None:
        self._task = task
        self.contenders: dict[str, tuple[Genome, Build]] = {}
        """Those that passed the gate."""
        self._refused: dict[str, str] = {}
        """Why a race refused it."""
        self._verdicts: dict[str, Evaluation] = {}
        building = [(c, [(t, t.build(c.proposal.genome)) for t in task.with_neighbours(c.proposal.genome)]) for c in elites]
        for candidate, builds in building:
            name, genome = str(candidate.order), candidate.proposal.genome
            verdict = self._gate(genome, [(t, future.result()) for t, future in builds])
            self._verdicts[name] = verdict
            if verdict.status is Status.OK:
                self.contenders[name] = (genome, builds[0][1].result())

    def _gate(self, genome: Genome, builds: list[tuple[TaskExecutor, Build]]) -> Evaluation:
        """One verdict over the workload and its neighbours, up to the first refusal."""
        total = Evaluation(status=Status.OK)
        for task, built in builds:
            if built.binary is None:
                return replace(total, status=built.status, checks=(), log=f"for {task.workload}: {built.log}")
            found = task.measure(genome, built, time=False).result()
            total = replace(
                found,
                checks=total.checks + found.checks,
                seconds=total.seconds + found.seconds,
                gate_seconds=total.gate_seconds + found.gate_seconds,
            )
            if found.status is not Status.OK:
                return replace(total, log=f"for {task.workload}: {found.log}")
        return total

    def hold(self) -> tuple[Timing, ...]:
        """Timings of all that can be timed. A contender that breaks the race is refused, and the others race again.

        Raises EvoError if not even the baselines can be timed.
        """
        for _ in range(len(self.contenders) + 1):
            entered = [name for name in self.contenders if name not in self._refused]
            outcome = self._race(entered, self._task.problem.ceilings)
            self._refused |= {n: reason for n, reason in outcome.refused if n in self.contenders}
            if outcome.timings:
                return outcome.timings
            if not any(n in entered for n, _ in outcome.refused):
                # The process died without naming a contender: each races alone beside the reference.
                for name in entered:
                    alone = self._race([name])
                    if not alone.timings:
                        self._refused[name] = alone.log
        workload = self._task.workload
        raise EvoError(f"the finals of {workload} could not be timed: {outcome.log}; resume the run to try again")

    def _race(self, names: list[str], baselines: tuple[str, ...] = ()) -> RaceResult:
        return self._task.race([(name, *self.contenders[name]) for name in names], baselines)

    def confirm(self, timings: tuple[Timing, ...]) -> tuple[str, tuple[Timing, ...]]:
        """Runs the fastest once more, beside a second copy of itself and the baselines, on other data in a fresh process,
        cold and hot. If it is refused there, the next one runs.

        Returns the winner's name, and all timings with these in place of those of the first race; of that one the winner's
        stays, as `FINALIST`. There is no winner ("") if none passes, or if a race dies twice without naming a contender.
        """
        task = replace(self._task, seed=self._task.seed + 1)
        own = [t for t in timings if t.contender in self.contenders and t.ratio is not None]
        for first in sorted(own, key=_ratio):
            name = first.contender
            if name in self._refused:
                continue
            twice = [(copy, *self.contenders[name]) for copy in (name, AA_CONTROL)]
            for _ in range(_CONFIRMATIONS):
                task.executor.renew_device()
                outcome = task.race(twice, task.problem.ceilings, hot=True)
                reasons = [reason for n, reason in outcome.refused if n in (name, AA_CONTROL)]
                timed = {t.contender for t in outcome.timings}
                if reasons or name in timed:
                    break
            if reasons:
                self._refused[name] = f"{reasons[0]} (when its time was to be confirmed)"
            elif name in timed:
                kept = (t for t in timings if t.contender not in timed)
                return name, (*kept, *outcome.timings, replace(first, contender=FINALIST))
            else:
                self._refused[name] = f"its time could not be confirmed: {outcome.log}"
                break  # the device is not to be trusted either
        return "", timings

    def finalist(self, candidate: Candidate, timings: tuple[Timing, ...], winner: str) -> Finalist:
        name = str(candidate.order)
        verdict = self._verdicts[name]
        if reason := self._refused.get(name):
            checks = (*verdict.checks, Check(case="timed", passed=False, reason=reason))
            verdict = replace(verdict, status=Status.WRONG, checks=checks, log=reason)
        else:
            own = tuple(replace(t, contender="candidate") for t in timings if t.contender == name)
            raced = tuple(t for t in timings if t.contender == FINALIST and name == winner)
            verdict = replace(verdict, timings=own + raced)
        return Finalist(candidate=candidate, measurement=verdict)


def _with_noise_floor(timings: tuple[Timing, ...], winner: str) -> tuple[Timing, ...]:
    """The A/A control's time carries the noise floor of the race that confirmed the winner into the record."""
    cold = {t.contender: t for t in timings if t.protocol != "hot"}
    own, control = cold.get(winner), cold.get(AA_CONTROL)
    if own is None or control is None or len(own.samples_us) != len(control.samples_us):
        return timings
    noise = noise_floor(own.samples_us, control.samples_us)
    return tuple(replace(t, clocks={**t.clocks, "noise_floor": noise}) if t is control else t for t in timings)


def _ratio(timing: Timing | None) -> float:
    return timing.ratio if timing and timing.ratio is not None else float("inf")
