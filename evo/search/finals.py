"""The finals: the best candidates of a search, gated anew and timed against each other in a fresh process.

A search picks its best by many noisy timings, so the best of them is partly lucky (the winner's curse). The finals use
new data in a process that has seen none of the finalists. Each is also compiled and gated for neighbouring sizes; those
that pass run interleaved with PyTorch and with a copy of the same size. The fastest runs once more, in another fresh
process and on other data, beside these baselines and a second copy of itself: what one copy seems to gain over the other
is the noise floor (A/A control). Only this confirming figure is reported, and a candidate that fails there has not won.
Finalists are compared with each other by the race that all of them ran in; the winner keeps its time in that race, too.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import dataclass

from evo.errors import EvoError
from evo.evaluation import AA_CONTROL, FINALIST, Build, Candidate, Check, Measurement, Status, Timing
from evo.executors import BuildRequest, Executor, MeasureRequest, RaceRequest
from evo.measure.clock import noise_floor
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Limits, Workload

__all__ = ["Finalist", "Finals", "FinalsConfig", "hold_finals"]

_CONFIRMATIONS = 2
"""How often a race is held that died without naming a contender, before its contender counts as refused."""


@dataclass(frozen=True, kw_only=True)
class FinalsConfig:
    """What stays the same over all finals of a run. seed: draws the data."""

    kernel: Kernel
    kernel_name: str
    target: str
    arch: str
    limits: Limits
    seed: int


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A finalist with what the finals found out about it."""

    candidate: Candidate
    measurement: Measurement

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

    @property
    def hot(self) -> Timing | None:
        """With all data in the cache; only of a winner whose data fit there."""
        return next((t for t in self.measurement.timings if t.protocol == "hot"), None)


@dataclass(frozen=True, kw_only=True)
class Finals:
    """Finalists, fastest first (the refused ones last), and the baselines' timings."""

    finalists: tuple[Finalist, ...]
    baselines: tuple[Timing, ...]
    ceiling: str = ""
    """The fastest baseline of role ceiling."""
    confirmed: bool = True
    """Whether a race of its own has confirmed the first of the finalists; if not, there is no winner."""

    @property
    def winner(self) -> Finalist | None:
        first = self.finalists[0] if self.finalists else None
        return first if self.confirmed and first is not None and first.timing is not None else None


def hold_finals(executor: Executor, config: FinalsConfig, elites: list[Candidate]) -> Finals:
    """Gates and races the elites of one task. The device process must be fresh (`Executor.renew_device`).

    Raises EvoError if the race itself cannot be held.
    """
    if not elites:
        return Finals(finalists=(), baselines=())
    race = _Race(executor, config, elites[0].workload)
    builds = [race.build(c.proposal.genome) for c in elites]
    verdicts = [race.gate(c.proposal.genome, built) for c, built in zip(elites, builds, strict=True)]
    for candidate, verdict, built in zip(elites, verdicts, builds, strict=True):
        if verdict.status is Status.OK:
            race.contenders[str(candidate.order)] = (candidate.proposal.genome, built[0][1].result())
    timings = race.hold() if race.contenders else ()
    winner, timings = race.confirm(timings)
    finalists = [_finalist(c, v, timings, race.refused, winner) for c, v in zip(elites, verdicts, strict=True)]
    finalists.sort(key=lambda f: (str(f.candidate.order) != winner, _ratio(f)))
    best = finalists[0] if winner else None
    orders = {str(c.order) for c in elites}
    baselines = tuple(t for t in timings if t.contender not in orders and t.contender != FINALIST)
    bounds = [t for t in baselines if t.contender in race.bounds and t.protocol != "hot"]
    noise = _noise(best, baselines)
    return Finals(
        finalists=tuple(finalists),
        baselines=tuple(_with_noise(t, noise) for t in baselines),
        ceiling=min(bounds, key=lambda t: t.median_us).contender if bounds else "",
        confirmed=best is not None,
    )


class _Race:
    """The builds, gates and races of one task's finals."""

    def __init__(self, executor: Executor, config: FinalsConfig, workload: Workload) -> None:
        self._executor, self._config, self._workload = executor, config, workload
        self.bounds = tuple(b.name for b in config.kernel.baselines if b.role == "ceiling")
        self.contenders: dict[str, tuple[Genome, Build]] = {}
        """By name, the order as text: those that passed the gate."""
        self.refused: dict[str, str] = {}
        """By name: why a race refused it."""

    def build(self, genome: Genome) -> list[tuple[Workload, Future[Build]]]:
        """For the workload, and for the neighbours that the genome is legal for."""
        config = self._config
        near = config.kernel.legal_neighbours(config.target, genome.parameters, self._workload, config.limits)
        request = BuildRequest(
            kernel=config.kernel_name, target=config.target, arch=config.arch, genome=genome, workload=self._workload
        )
        return [(w, self._executor.build(dataclasses.replace(request, workload=w))) for w in (self._workload, *near)]

    def gate(self, genome: Genome, builds: list[tuple[Workload, Future[Build]]]) -> Measurement:
        """One verdict over the workload and its neighbours, up to the first refusal."""
        total = Measurement(status=Status.OK)
        for workload, future in builds:
            built = future.result()
            if built.binary is None:
                log = f"for {workload}: {built.log}"
                return dataclasses.replace(total, status=built.status, checks=(), log=log)
            found = self._executor.measure(
                MeasureRequest(
                    kernel=self._config.kernel_name,
                    target=self._config.target,
                    genome=genome,
                    workload=workload,
                    build=built,
                    seed=self._config.seed,
                    time=False,
                )
            ).result()
            total = dataclasses.replace(
                found,
                checks=total.checks + found.checks,
                seconds=total.seconds + found.seconds,
                gate_seconds=total.gate_seconds + found.gate_seconds,
            )
            if found.status is not Status.OK:
                return dataclasses.replace(total, log=f"for {workload}: {found.log}")
        return total

    def hold(self) -> tuple[Timing, ...]:
        """Timings of all that can be timed. A contender that breaks the race is refused, and the others race again.

        Raises EvoError if not even the baselines can be timed.
        """
        for _ in range(len(self.contenders) + 1):
            entered = [name for name in self.contenders if name not in self.refused]
            outcome = self._executor.race(self._request(*entered)).result()
            self.refused |= {n: reason for n, reason in outcome.refused if n in self.contenders}
            if outcome.timings:
                return outcome.timings
            if not any(n in entered for n, _ in outcome.refused):
                # The process died without naming a contender: each races alone beside the reference.
                for name in entered:
                    alone = self._executor.race(self._request(name, bounds=False)).result()
                    if not alone.timings:
                        self.refused[name] = alone.log
        raise EvoError(f"the finals of {self._workload} could not be timed: {outcome.log}; resume the run to try again")

    def confirm(self, timings: tuple[Timing, ...]) -> tuple[str, tuple[Timing, ...]]:
        """Runs the fastest once more, beside a second copy of itself and the baselines, on other data in a fresh process,
        cold and hot. If it is refused there, the next one runs.

        Returns the winner's name, and all timings with these in place of those of the first race; of that one the winner's
        stays, as `FINALIST`. There is no winner ("") if none passes, or if a race dies twice without naming a contender.
        """
        own = [t for t in timings if t.contender in self.contenders and t.ratio is not None]
        for first in sorted(own, key=lambda t: t.ratio or 0.0):
            name = first.contender
            if name in self.refused:
                continue
            request = self._request(name, confirming=True)
            for _ in range(_CONFIRMATIONS):
                self._executor.renew_device()
                outcome = self._executor.race(request).result()
                reasons = [reason for n, reason in outcome.refused if n in (name, AA_CONTROL)]
                if outcome.data_changed:  # by one of the two, which are the same
                    reasons.append(outcome.log)
                timed = {t.contender for t in outcome.timings}
                if reasons or name in timed:
                    break
            if reasons:
                self.refused[name] = f"{reasons[0]} (when its time was to be confirmed)"
            elif name in timed:
                kept = (t for t in timings if t.contender not in timed)
                return name, (*kept, *outcome.timings, dataclasses.replace(first, contender=FINALIST))
            else:
                self.refused[name] = f"its time could not be confirmed: {outcome.log}"
                break  # the device is not to be trusted either
        return "", timings

    def _request(self, *names: str, bounds: bool = True, confirming: bool = False) -> RaceRequest:
        contenders = tuple((name, *self.contenders[name]) for name in names)
        if confirming:
            contenders += tuple((AA_CONTROL, *self.contenders[name]) for name in names)
        return RaceRequest(
            kernel=self._config.kernel_name,
            target=self._config.target,
            workload=self._workload,
            contenders=contenders,
            baselines=self.bounds if bounds else (),
            seed=self._config.seed + confirming,
            hot=confirming,
        )


def _with_noise(timing: Timing, noise: float | None) -> Timing:
    """The A/A control's time carries the noise floor into the record."""
    if timing.contender != AA_CONTROL or timing.protocol == "hot" or noise is None:
        return timing
    return dataclasses.replace(timing, clocks={**timing.clocks, "noise_floor": noise})


def _noise(winner: Finalist | None, baselines: tuple[Timing, ...]) -> float | None:
    own = winner.timing if winner else None
    control = next((t for t in baselines if t.contender == AA_CONTROL and t.protocol != "hot"), None)
    if own is None or control is None or len(own.samples_us) != len(control.samples_us):
        return None
    return noise_floor(own.samples_us, control.samples_us)


def _ratio(finalist: Finalist) -> float:
    timing = finalist.timing
    return timing.ratio if timing and timing.ratio is not None else float("inf")


def _finalist(
    candidate: Candidate, verdict: Measurement, timings: tuple[Timing, ...], refused: dict[str, str], winner: str
) -> Finalist:
    name = str(candidate.order)
    own = tuple(dataclasses.replace(t, contender="candidate") for t in timings if t.contender == name)
    own += tuple(t for t in timings if t.contender == FINALIST and name == winner)
    if name in refused:
        wrong = Check(case="timed", passed=False, reason=refused[name])
        verdict = dataclasses.replace(
            verdict, status=Status.WRONG, checks=(*verdict.checks, wrong), log=refused[name]
        )
    elif own:
        verdict = dataclasses.replace(verdict, timings=own)
    return Finalist(candidate=candidate, measurement=verdict)
