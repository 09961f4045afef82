"""A candidate's edits timed again: each taken out alone, and all of them made one after the other, in one race."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from evo.errors import EvoError, UsageError
from evo.evaluation import Build, Gain, Status, Timing
from evo.measure.clock import paired_gain
from evo.problem.genome import Change, Genome
from evo.problem.space import Value
from evo.search.tasks import TaskExecutor

__all__ = ["Ablation", "Step", "Without", "measure_ablation"]


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
    order, seconds = tuple(numbers), 0.0
    if len(timed) > 1:
        pilot = variants.race([end, *(without[i] for i in timed)])
        seconds = pilot.seconds
        costs = {i: pilot.gain(without[i], end).gain for i in timed}
        order = tuple(sorted(numbers, key=lambda i: (-costs.get(i, 0.0), i)))
    prefixes = [_between(task, start, end, edits, order[: n + 1]) for n in numbers]
    variants.add(prefixes)
    raced = [start, end, *(without[i] for i in timed), *(p for p in prefixes if not variants.reasons[p])]
    races = [variants.race(raced)]
    if races[0].disturbed:
        races.append(variants.race(raced))
    race = min(races, key=lambda race: race.disturbed)
    path, before, pending = [], start, tuple[Change, ...]()
    for edit, genome in zip(order, prefixes, strict=True):
        pending += (edits[edit],)  # where the edit does not work yet, it is made together with the next one
        if not (variants.reasons[genome] or race.refused.get(genome.digest)):
            path.append(Step(changes=pending, gain=race.gain(before, genome), timing=race.timing(genome)))
            before, pending = genome, ()
    missing = [variants.reasons[genome] or race.refused.get(genome.digest, "") for genome in without]
    return Ablation(
        start=race.timing(start),
        end=race.timing(end),
        gain=race.gain(start, end),
        without=tuple(
            Without(change=edits[i], gain=None, timing=None, reason=missing[i])
            if missing[i]
            else Without(change=edits[i], gain=race.gain(without[i], end), timing=race.timing(without[i]), reason="")
            for i in numbers
        ),
        path=tuple(path),
        reference=race.reference,
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

    def race(self, genomes: Sequence[Genome]) -> _Race:
        """A genome's name in it is its digest."""
        result = self._task.race([(g.digest, g, self._builds[g]) for g in dict.fromkeys(genomes)])
        if not result.timings:
            raise EvoError(f"the race for {self._task.workload} could not be held: {result.log}")
        timings = {t.contender: t for t in result.timings if t.protocol != "hot"}
        return _Race(timings=timings, refused=dict(result.refused), seconds=result.seconds)


@dataclass(frozen=True, kw_only=True)
class _Race:
    """timings, refused (the reason): by contender."""

    timings: dict[str, Timing]
    refused: dict[str, str]
    seconds: float

    @property
    def disturbed(self) -> float:
        """The share of the rounds that something disturbed; 0 where there were enough others."""
        return max(t.clocks.get("disturbed", 0.0) / max(len(t.samples_us), 1) for t in self.timings.values())

    @property
    def reference(self) -> Timing:
        return next(t for t in self.timings.values() if t.ratio is None)

    def timing(self, genome: Genome) -> Timing:
        found = self.timings.get(genome.digest)
        if found is None:
            reason = self.refused.get(genome.digest, "one was let go")
            raise EvoError(f"the race could not time every variant: {reason}")
        return found

    def gain(self, before: Genome, after: Genome) -> Gain:
        return paired_gain(self.timing(before).samples_us, self.timing(after).samples_us)
