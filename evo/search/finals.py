"""The finals: the best candidates of a search, gated anew and timed against each other in a fresh process.

A search picks its best by many noisy timings, so the best of them is partly lucky (the winner's curse). Here the
finalists meet new data and a new seed in a process that has seen none of them, are also compiled and gated for
neighbouring sizes, and then run interleaved with PyTorch and with a copy of the same size. The fastest of them
runs once more in another fresh process beside those alone, on other data again: only that figure is reported, and who
fails there has not won. It has
company of its own: a second copy of it, its twin, runs in the same race, and what one seems to gain over the other
is the noise floor (A/A). Finalists are compared with each other by the race that all of them ran in, of which the winner
keeps its time, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from evo.errors import EvoError
from evo.evaluation import AA_CONTROL, FINALIST, Build, Candidate, Check, Measurement, Status, Timing
from evo.executors import BuildRequest, Executor, MeasureRequest, RaceRequest
from evo.measure.clock import noise_floor
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Limits, Workload

__all__ = ["Finalist", "Finals", "Setting", "hold_finals"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same over all finals of a run."""

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
    noise: float | None = None
    """What the winner seems to gain over itself, as a fraction: see `evo.measure.clock.noise_floor`."""
    claimed: float | None = None
    """The winner's time over the reference's as the search had it."""
    confirmed: bool = True
    """Whether a race of its own has confirmed the first of the finalists; if not, there is no winner."""

    @property
    def regret(self) -> float | None:
        """By how much the search overstated the winner: its speed-up there over that of the finals, minus 1."""
        timing = self.winner.timing if self.winner else None
        if timing is None or timing.ratio is None or self.claimed is None:
            return None
        return timing.ratio / self.claimed - 1.0

    @property
    def winner(self) -> Finalist | None:
        first = self.finalists[0] if self.finalists else None
        return first if self.confirmed and first is not None and first.timing is not None else None

    def baseline(self, name: str) -> Timing | None:
        return next((t for t in self.baselines if t.contender == name and t.protocol != "hot"), None)


def hold_finals(
    executor: Executor, setting: Setting, elites: list[Candidate], claims: Mapping[int, float] | None = None
) -> Finals:
    """Gates and races the elites of one task. The device process must be fresh (`Executor.renew_device`).

    `claims`: by order, the ratios that the search measured. Raises EvoError if the race itself cannot be held.
    """
    if not elites:
        return Finals(finalists=(), baselines=())
    workload = elites[0].workload
    genomes = {c.order: c.proposal.genome for c in elites}
    builds = {n: _build(executor, setting, genome, workload) for n, genome in genomes.items()}
    near = {n: _build_neighbours(executor, setting, genome, workload) for n, genome in genomes.items()}
    verdicts = {n: _gate(executor, setting, genomes[n], workload, builds[n], near[n]) for n in genomes}
    passed = [candidate for candidate in elites if verdicts[candidate.order].status is Status.OK]
    ceilings = tuple(b.name for b in setting.kernel.baselines if b.role == "ceiling")
    contenders = {str(c.order): (c.proposal.genome, builds[c.order].result()) for c in passed}
    refused: dict[str, str] = {}
    timings = _race(executor, setting, workload, contenders, ceilings, refused) if passed else ()
    winner, timings = _crown(executor, setting, workload, contenders, ceilings, timings, refused)
    finalists = [_finalist(candidate, verdicts[candidate.order], timings, refused, winner) for candidate in elites]
    finalists.sort(key=lambda f: (str(f.candidate.order) != winner, _ratio(f)))
    orders = {str(candidate.order) for candidate in elites}
    baselines = tuple(t for t in timings if t.contender not in orders and t.contender != FINALIST)
    champion = finalists[0] if finalists and winner == str(finalists[0].candidate.order) else None
    bounds = [t for t in baselines if t.contender in ceilings and t.protocol != "hot"]
    noise = _noise(champion, baselines)
    return Finals(
        finalists=tuple(finalists),
        baselines=tuple(_with_noise(t, noise) for t in baselines),
        ceiling=min(bounds, key=lambda t: t.median_us).contender if bounds else "",
        noise=noise,
        claimed=(claims or {}).get(champion.candidate.order) if champion else None,
        confirmed=champion is not None,
    )


def _with_noise(timing: Timing, noise: float | None) -> Timing:
    """The twin's time carries the noise floor into the record."""
    if timing.contender != AA_CONTROL or timing.protocol == "hot" or noise is None:
        return timing
    return dataclasses.replace(timing, clocks={**timing.clocks, "noise_floor": noise})


def _noise(champion: Finalist | None, baselines: tuple[Timing, ...]) -> float | None:
    own = champion.timing if champion else None
    twin = next((t for t in baselines if t.contender == AA_CONTROL and t.protocol != "hot"), None)
    if own is None or twin is None or len(own.samples_us) != len(twin.samples_us):
        return None
    return noise_floor(own.samples_us, twin.samples_us)


def _ratio(finalist: Finalist) -> float:
    timing = finalist.timing
    return timing.ratio if timing and timing.ratio is not None else float("inf")


_Contenders = dict[str, tuple[Genome, Build]]

_CONFIRMATIONS = 2
"""How often a race that died without saying at whom is held before its contender counts as refused."""


def _race(
    executor: Executor,
    setting: Setting,
    workload: Workload,
    contenders: _Contenders,
    ceilings: tuple[str, ...],
    refused: dict[str, str],
) -> tuple[Timing, ...]:
    """Timings of all that can be timed. Who breaks the race is added to `refused`, and the others race again.

    Raises EvoError if not even the baselines can be timed.
    """
    for _ in range(len(contenders) + 1):
        entered = {n: c for n, c in contenders.items() if n not in refused}
        outcome = executor.race(_request(setting, workload, entered, ceilings)).result()
        refused |= {n: reason for n, reason in outcome.refused if n in contenders}
        if outcome.timings:
            return outcome.timings
        if not any(n in entered for n, _ in outcome.refused):  # the process died without saying at whom
            refused |= _failing_alone(executor, setting, workload, entered)
    raise EvoError(f"the finals of {workload} could not be timed: {outcome.log}; resume the run to try again")


def _failing_alone(
    executor: Executor, setting: Setting, workload: Workload, contenders: _Contenders
) -> dict[str, str]:
    """Each contender against the reference only: the reasons of those that fail."""
    found = {}
    for name, contender in contenders.items():
        outcome = executor.race(_request(setting, workload, {name: contender}, ())).result()
        if not outcome.timings:
            found[name] = outcome.log
    return found


def _crown(
    executor: Executor,
    setting: Setting,
    workload: Workload,
    contenders: _Contenders,
    ceilings: tuple[str, ...],
    timings: tuple[Timing, ...],
    refused: dict[str, str],
) -> tuple[str, tuple[Timing, ...]]:
    """The winner of the race, who runs once more, beside its twin and the baselines only and on fresh data in a fresh
    process, cold and hot. Who is refused there is added to `refused`, and the next one runs.

    Its name, and all timings, with these in place of those of the first race; of that one the winner's stays, as
    `FINALIST`. The fastest of several is partly
    lucky again, so the figures of the race it won are not the ones to report. There is no winner if nobody passes, or if
    the race dies twice without saying at whom.
    """
    own = sorted((t for t in timings if t.contender in contenders and t.ratio is not None), key=lambda t: t.ratio or 0.0)
    for name in (t.contender for t in own if t.contender not in refused):
        request = _request(setting, workload, {name: contenders[name], AA_CONTROL: contenders[name]}, ceilings)
        request = dataclasses.replace(request, seed=setting.seed + 1, hot=True)
        for _ in range(_CONFIRMATIONS):
            executor.renew_device()
            outcome = executor.race(request).result()
            reasons = [reason for n, reason in outcome.refused if n in (name, AA_CONTROL)]
            if outcome.data_changed:  # by one of the two, which are the same
                reasons.append(outcome.log)
            if reasons or any(t.contender == name for t in outcome.timings):
                break
        if reasons:
            refused[name] = f"{reasons[0]} (when its time was to be confirmed)"
        elif any(t.contender == name for t in outcome.timings):
            again = {t.contender for t in outcome.timings}
            first = next(t for t in own if t.contender == name)
            kept = (t for t in timings if t.contender not in again)
            return name, (*kept, *outcome.timings, dataclasses.replace(first, contender=FINALIST))
        else:
            refused[name] = f"its time could not be confirmed: {outcome.log}"
            break  # the device is not to be trusted either
    return "", timings


def _request(
    setting: Setting, workload: Workload, contenders: _Contenders, ceilings: tuple[str, ...]
) -> RaceRequest:
    return RaceRequest(
        kernel=setting.kernel_name,
        target=setting.target,
        workload=workload,
        contenders=tuple((name, genome, build) for name, (genome, build) in contenders.items()),
        baselines=ceilings,
        seed=setting.seed,
    )


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


def _build(executor: Executor, setting: Setting, genome: Genome, workload: Workload) -> Future[Build]:
    return executor.build(
        BuildRequest(
            kernel=setting.kernel_name, target=setting.target, arch=setting.arch, genome=genome, workload=workload
        )
    )


def _build_neighbours(
    executor: Executor, setting: Setting, genome: Genome, workload: Workload
) -> list[tuple[Workload, Future[Build]]]:
    legal = setting.kernel.legal_neighbours(setting.target, genome.parameters, workload, setting.limits)
    return [(near, _build(executor, setting, genome, near)) for near in legal]


def _gate(
    executor: Executor,
    setting: Setting,
    genome: Genome,
    workload: Workload,
    build: Future[Build],
    near: list[tuple[Workload, Future[Build]]],
) -> Measurement:
    """One verdict over the workload and its neighbours, up to the first refusal."""
    checks: tuple[Check, ...] = ()
    seconds = gate_seconds = 0.0
    for size, future in [(workload, build), *near]:
        built = future.result()
        if built.binary is None:
            log = f"for {size}: {built.log}"
            return Measurement(status=built.status, checks=(), log=log, seconds=seconds, gate_seconds=gate_seconds)
        measured = executor.measure(
            MeasureRequest(
                kernel=setting.kernel_name,
                target=setting.target,
                genome=genome,
                workload=size,
                build=built,
                seed=setting.seed,
                time=False,
            )
        ).result()
        checks += measured.checks
        seconds += measured.seconds
        gate_seconds += measured.gate_seconds
        if measured.status is not Status.OK:
            return dataclasses.replace(
                measured, checks=checks, log=f"for {size}: {measured.log}", seconds=seconds, gate_seconds=gate_seconds
            )
    return Measurement(status=Status.OK, checks=checks, seconds=seconds, gate_seconds=gate_seconds)
