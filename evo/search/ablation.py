"""A candidate's edits timed again: each taken out alone, and all of them made one after the other, in one race."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from evo.errors import EvoError, UsageError
from evo.evaluation import Build, Gain, Status, Timing
from evo.measure import RaceResult
from evo.measure.clock import paired_gain
from evo.problem.genome import Change, Genome
from evo.problem.space import Value
from evo.search.tasks import TaskExecutor


@dataclass(frozen=True, kw_only=True)
class Without:
    """The candidate with one edit taken back. gain: what having the edit gains it; None where that cannot be timed, and
    `reason` says why."""

    change: Change
    gain: Gain | None
    timing: Timing | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the way from the start: changes that were made in it (several, where one alone is not legal or does not
    work), and what it gained over the step before."""

    changes: tuple[Change, ...]
    gain: Gain
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """All of one race, interleaved. gain: of the candidate over the start. path: the edits in the order of what taking each
    out cost, as a first race found it. reference: the baseline that ratios are over."""

    PRINTED: ClassVar = ("disturbed", "discarded_rounds")
    start: Timing
    end: Timing
    gain: Gain
    without: tuple[Without, ...]
    path: tuple[Step, ...]
    reference: Timing
    seconds: float
    races: int = 1

    @property
    def disturbed(self) -> bool:
        """Whether rounds that something disturbed are among its samples. No figure of it is to be trusted then: rounds are
        those of all contenders."""
        return self.end.disturbed

    @property
    def discarded_rounds(self) -> int:
        """Rounds that something disturbed, and that were taken again."""
        return int(self.end.clocks.get("discarded", 0.0))


def measure_ablation(task: TaskExecutor, start: Genome, end: Genome, edits: Sequence[Change]) -> Ablation:
    """Builds, gates and races what lies between the two genomes.

    A first race, of the candidate without each edit, tells in which order they are worth making. Then everything is timed
    in one race, so that no figure depends on what the machine did in another. Its rounds are taken again where something
    disturbed them, as those of finals are; if too few are clean, all of it is held once more.
    Raises UsageError if one of the two ends is not legal here or refused, EvoError if the race cannot be held.
    """
    variants = _Variants(task)
    numbers = range(len(edits))
    without = [_between(task, start, end, edits, [j for j in numbers if j != i]) for i in numbers]
    variants.add([start, end, *without])
    for genome, what in ((start, "where it begins"), (end, "the candidate")):
        if reason := variants.reasons[genome]:
            raise UsageError(f"{what} cannot be timed here: {reason}")
    timed = [i for i in numbers if not variants.reasons[without[i]]]
    order, seconds = list(numbers), 0.0
    if len(timed) > 1:
        pilot = variants.race([end, *(without[i] for i in timed)])
        seconds = pilot.seconds
        costs = {i: _gain(pilot, without[i], end).gain for i in timed}
        order.sort(key=lambda i: -costs.get(i, 0.0))
    prefixes = [_between(task, start, end, edits, order[: n + 1]) for n in numbers]
    variants.add(prefixes)
    raced = [start, end, *(without[i] for i in timed), *(p for p in prefixes if not variants.reasons[p])]
    races = [variants.race(raced)]
    if _disturbed(races[0]):
        races.append(variants.race(raced))
    race = min(races, key=_disturbed)
    refused = {genome: dict(race.refused).get(genome.digest, reason) for genome, reason in variants.reasons.items()}
    path, before, pending = [], start, tuple[Change, ...]()
    for edit, genome in zip(order, prefixes, strict=True):
        pending += (edits[edit],)  # where the edit does not work yet, it is made together with the next one
        if not refused[genome]:
            path.append(Step(changes=pending, gain=_gain(race, before, genome), timing=_timing(race, genome)))
            before, pending = genome, ()
    return Ablation(
        start=_timing(race, start),
        end=_timing(race, end),
        gain=_gain(race, start, end),
        without=tuple(
            Without(change=change, gain=None, timing=None, reason=refused[genome])
            if refused[genome]
            else Without(change=change, gain=_gain(race, genome, end), timing=_timing(race, genome), reason="")
            for change, genome in zip(edits, without, strict=True)
        ),
        path=tuple(path),
        reference=next(t for t in race.timings if t.ratio is None),
        seconds=seconds + sum(race.seconds for race in races),
        races=len(races),
    )


def _between(task: TaskExecutor, start: Genome, end: Genome, edits: Sequence[Change], made: Sequence[int]) -> Genome:
    """The start with some edits made; a conditional parameter that neither end has stands at its default."""
    if not made or len(made) == len(edits):
        return end if made else start
    values: dict[str, Value] = {**end.parameters, **start.parameters}
    for number in made:
        for name, (_, after) in edits[number].items():
            if after is None:
                values.pop(name, None)
            else:
                values[name] = after
    return Genome.of(task.space.complete(values))


class _Variants:
    """Genomes that are raced; each is built and gated once."""

    def __init__(self, task: TaskExecutor) -> None:
        self._task = task
        self._builds: dict[Genome, Build] = {}
        self.reasons: dict[Genome, str] = {}
        """Why it cannot be raced; empty if it passed the gate."""

    def add(self, genomes: Sequence[Genome]) -> None:
        """All builds at once, then the gate."""
        building = []
        for genome in dict.fromkeys(genomes):
            if genome in self.reasons:
                continue
            broken = self._task.space.violations(genome.parameters)
            self.reasons[genome] = f"not legal: {'; '.join(broken)}" if broken else ""
            if not broken:
                building.append((genome, self._task.build(genome)))
        for genome, future in building:
            self._builds[genome] = future.result()
            self.reasons[genome] = self._verdict(genome)

    def _verdict(self, genome: Genome) -> str:
        build = self._builds[genome]
        if build.binary is None:
            return f"does not compile ({build.status})"
        measured = self._task.measure(genome, build, time=False).result()
        if measured.status is Status.OK:
            return ""
        failed = next((f"{c.case}: {c.reason}" for c in measured.checks if not c.passed), measured.log.strip())
        return f"{measured.status}: {failed.splitlines()[0] if failed else ''}"

    def race(self, genomes: Sequence[Genome]) -> RaceResult:
        """A genome's name in it is its digest."""
        result = self._task.race([(g.digest, g, self._builds[g]) for g in dict.fromkeys(genomes)])
        if not result.timings:
            raise EvoError(f"the race for {self._task.workload} could not be held: {result.log}")
        return result


def _disturbed(race: RaceResult) -> float:
    """The share of the rounds that something disturbed; 0 where there were enough others."""
    return max(t.clocks.get("disturbed", 0.0) / max(len(t.samples_us), 1) for t in race.timings)


def _timing(race: RaceResult, genome: Genome) -> Timing:
    for timing in race.timings:
        if timing.contender == genome.digest:
            return timing
    reason = dict(race.refused).get(genome.digest, "one was let go")
    raise EvoError(f"the race could not time every variant: {reason}")


def _gain(race: RaceResult, before: Genome, after: Genome) -> Gain:
    return paired_gain(_timing(race, before).samples_us, _timing(race, after).samples_us)
