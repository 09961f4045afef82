"""A candidate's edits timed again: each taken out alone, and all of them made one after the other, in one race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evo.errors import EvoError, UsageError
from evo.evaluation import Build, Status, Timing, holds_one
from evo.executors import Executor, RaceRequest, Request
from evo.measure.clock import paired_gain
from evo.problem.genome import Change, Genome
from evo.problem.kernel import Workload
from evo.problem.space import Space, Value

__all__ = ["Ablation", "PairedGain", "Problem", "Step", "Without", "measure_ablation"]

_Subset = frozenset[int]

_RACES = 2
"""How often the race is held at most, while something disturbs more of it than taking rounds again can mend."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is timed, and where. seed: draws the data."""

    kernel: str
    target: str
    arch: str
    workload: Workload
    space: Space
    seed: int


@dataclass(frozen=True, kw_only=True)
class PairedGain:
    """One contender's time over another's, round by round in the same race, with its interval; above 1: the other is faster.
    """

    gain: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        return holds_one(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Without:
    """The candidate with one edit taken back. gain: what having the edit gains it; None where that cannot be timed, and
    `reason` says why."""

    edit: int
    gain: PairedGain | None
    timing: Timing | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the way from the start: edits that were made in it (several, where one alone is not legal or does not
    work), and what it gained over the step before."""

    edits: tuple[int, ...]
    gain: PairedGain
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """All of one race, interleaved. order: the edits by what taking each out cost, as a first race found it. total: of the
    candidate over the start. reference: the baseline that ratios are over."""

    start: Timing
    end: Timing
    total: PairedGain
    order: tuple[int, ...]
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
    def discarded(self) -> int:
        """Rounds that something disturbed, and that were taken again."""
        return int(self.end.clocks.get("discarded", 0.0))


def measure_ablation(
    executor: Executor, problem: Problem, start: Genome, end: Genome, edits: Sequence[Change]
) -> Ablation:
    """Builds, gates and races what lies between the two genomes.

    A first race, of the candidate without each edit, tells in which order they are worth making. Then everything is timed
    in one race, so that no figure depends on what the machine did in another. Its rounds are taken again where something
    disturbed them, as those of finals are; if too few are clean, all of it is held once more.
    Raises UsageError if one of the two ends is not legal here or refused, EvoError if the race cannot be held.
    """
    bench = _Bench(executor, problem, start, end, edits)
    everything: _Subset = frozenset(range(len(edits)))
    bench.add([frozenset(), everything, *(everything - {i} for i in everything)])
    for subset, what in ((frozenset(), "where it begins"), (everything, "the candidate")):
        if reason := bench.reason(subset):
            raise UsageError(f"{what} cannot be timed here: {reason}")
    without = [i for i in sorted(everything) if not bench.reason(everything - {i})]
    order = tuple(sorted(everything))
    seconds = 0.0
    if len(without) > 1:
        pilot = bench.race([everything, *(everything - {i} for i in without)])
        seconds = pilot.seconds
        costs = {i: pilot.gain(everything - {i}, everything).gain for i in without}
        order = tuple(sorted(everything, key=lambda i: (-costs.get(i, 0.0), i)))
    steps = bench.path(order)
    race, races, took = bench.quiet_race(
        [frozenset(), everything, *(everything - {i} for i in without), *(s for s, _ in steps)]
    )
    found, before, pending = [], frozenset[int](), tuple[int, ...]()
    for subset, made in steps:
        pending += made
        if not race.refused(subset):
            found.append(Step(edits=pending, gain=race.gain(before, subset), timing=race.timing(subset)))
            before, pending = subset, ()
    return Ablation(
        start=race.timing(frozenset()),
        end=race.timing(everything),
        total=race.gain(frozenset(), everything),
        order=order,
        without=tuple(_without(bench, race, i, everything) for i in sorted(everything)),
        path=tuple(found),
        reference=race.reference,
        seconds=seconds + took,
        races=races,
    )


def _without(bench: _Bench, race: _Race, edit: int, everything: _Subset) -> Without:
    rest = everything - {edit}
    if reason := bench.reason(rest) or race.refused(rest):
        return Without(edit=edit, gain=None, timing=None, reason=reason)
    return Without(edit=edit, gain=race.gain(rest, everything), timing=race.timing(rest), reason="")


class _Bench:
    """Genomes by the edits they have; each is built and gated once."""

    def __init__(
        self, executor: Executor, problem: Problem, start: Genome, end: Genome, edits: Sequence[Change]
    ) -> None:
        self._executor, self._problem, self._edits = executor, problem, edits
        self._start, self._end = start, end
        self._genomes: dict[_Subset, Genome] = {}
        self._builds: dict[_Subset, Build] = {}
        self._reasons: dict[_Subset, str] = {}

    def add(self, subsets: Sequence[_Subset]) -> None:
        """All builds at once, then the gate."""
        problem = self._problem
        waiting = []
        for subset in dict.fromkeys(subsets):
            if subset in self._reasons:
                continue
            genome = self._genome(subset)
            broken = problem.space.violations(genome.parameters)
            self._reasons[subset] = f"not legal: {'; '.join(broken)}" if broken else ""
            self._genomes[subset] = genome
            if not broken:
                waiting.append((subset, self._executor.build(self._request(genome))))
        for subset, future in waiting:
            self._builds[subset] = future.result()
            self._reasons[subset] = self._verdict(subset)

    def _request(self, genome: Genome) -> Request:
        problem = self._problem
        return Request(
            kernel=problem.kernel,
            target=problem.target,
            arch=problem.arch,
            genome=genome,
            workload=problem.workload,
            seed=problem.seed,
        )

    def _genome(self, subset: _Subset) -> Genome:
        """The start with some edits made; a conditional parameter that neither end has stands at its default."""
        if len(subset) == len(self._edits):
            return self._end
        if not subset:
            return self._start
        values: dict[str, Value] = {**self._end.parameters, **self._start.parameters}
        for number, edit in enumerate(self._edits):
            for name, (_, after) in edit.items():
                if number not in subset:
                    continue
                if after is None:
                    values.pop(name, None)
                else:
                    values[name] = after
        return Genome.of(self._problem.space.complete(values))

    def _verdict(self, subset: _Subset) -> str:
        """Why it cannot be raced; empty if it passed the gate."""
        build = self._builds[subset]
        if build.binary is None:
            return f"does not compile ({build.status})"
        asked = replace(self._request(self._genomes[subset]), build=build, time=False)
        measured = self._executor.measure(asked).result()
        if measured.status is Status.OK:
            return ""
        failed = next((f"{c.case}: {c.reason}" for c in measured.checks if not c.passed), measured.log.strip())
        return f"{measured.status}: {failed.splitlines()[0] if failed else ''}"

    def reason(self, subset: _Subset) -> str:
        return self._reasons[subset]

    def path(self, order: Sequence[int]) -> list[tuple[_Subset, tuple[int, ...]]]:
        """Growing sets of edits, with the edits new in each. One that does not work is left out, and its edit is made
        together with the next."""
        prefixes = [frozenset(order[: n + 1]) for n in range(len(order))]
        self.add(prefixes)
        found, pending = [], list[int]()
        for edit, prefix in zip(order, prefixes, strict=True):
            pending.append(edit)
            if not self._reasons[prefix]:
                found.append((prefix, tuple(pending)))
                pending = []
        return found

    def quiet_race(self, subsets: Sequence[_Subset]) -> tuple[_Race, int, float]:
        """The first race that nothing disturbed, or of those that are held and timed most the least disturbed one; how many
        there were, and their seconds."""
        held = [self.race(subsets)]
        while held[-1].disturbed and len(held) < _RACES:
            try:
                held.append(self.race(subsets))
            except EvoError:
                break  # a disturbed race is better than none
        best = min(held, key=lambda race: (-race.timed, race.disturbed))
        return best, len(held), sum(race.seconds for race in held)

    def race(self, subsets: Sequence[_Subset]) -> _Race:
        """Equal genomes run once."""
        problem = self._problem
        names: dict[Genome, str] = {}
        contenders = []
        for subset in dict.fromkeys(subsets):
            genome = self._genomes[subset]
            if genome not in names:
                names[genome] = f"v{len(names)}"
                contenders.append((names[genome], genome, self._builds[subset]))
        request = RaceRequest(
            kernel=problem.kernel,
            target=problem.target,
            workload=problem.workload,
            contenders=tuple(contenders),
            baselines=(),
            seed=problem.seed,
        )
        result = self._executor.race(request).result()
        if not result.timings:
            raise EvoError(f"the race for {problem.workload} could not be held: {result.log}")
        by_subset = {subset: names[self._genomes[subset]] for subset in subsets}
        return _Race(result.timings, dict(result.refused), by_subset, result.seconds)


class _Race:
    """Timings of one race by sets of edits."""

    def __init__(
        self, timings: Sequence[Timing], refused: Mapping[str, str], names: Mapping[_Subset, str], seconds: float
    ) -> None:
        self._timings = {t.contender: t for t in timings if t.protocol != "hot"}
        self._refused, self._names, self.seconds = refused, names, seconds

    def refused(self, subset: _Subset) -> str:
        return self._refused.get(self._names[subset], "")

    @property
    def timed(self) -> int:
        """Contenders that were not let go."""
        return len(self._timings)

    @property
    def disturbed(self) -> float:
        """The share of the rounds that something disturbed; 0 where there were enough others."""
        return max(t.clocks.get("disturbed", 0.0) / max(len(t.samples_us), 1) for t in self._timings.values())

    @property
    def reference(self) -> Timing:
        own = set(self._names.values())
        return next(t for name, t in self._timings.items() if name not in own and t.ratio is None)

    def timing(self, subset: _Subset) -> Timing:
        found = self._timings.get(self._names[subset])
        if found is None:
            raise EvoError(f"the race could not time every variant: {self.refused(subset) or 'one was let go'}")
        return found

    def gain(self, before: _Subset, after: _Subset) -> PairedGain:
        gain, low, high = paired_gain(self.timing(before).samples_us, self.timing(after).samples_us)
        return PairedGain(gain=gain, low=low, high=high)
