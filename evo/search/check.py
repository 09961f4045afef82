"""Code before or after a search: built, gated, and timed as a search times it, without a sampler or finals.

`check_kernel` takes every structural branch of a template, and `check_samples` other points; `check_candidate` takes one
candidate, on its own workload and on the neighbouring sizes that the finals gate it on; `measure_ablation` times a
candidate's edits: each taken out alone, and all of them made one after the other, in one race.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import ClassVar, NamedTuple, TypeVar

from evo.errors import EvoError, KernelError, UsageError, error_line
from evo.evaluation import Build, Check, Evaluation, Gain, Status, Timing
from evo.executors import InFlight
from evo.measure import RaceResult
from evo.measure.cases import draw_inputs, is_case_text, required_cases
from evo.measure.clock import paired_gain
from evo.problem.derived import cost_of
from evo.problem.genome import Change, Genome
from evo.problem.kernel import Case, Kernel, Workload
from evo.problem.space import Point, Value
from evo.search.tasks import TaskExecutor

_OBSERVE_S = 0.5
_CASES_AT_ONCE = 64
"""Random ones."""
_FEW = 1 << 20
"""Size, as the product of all dimensions, up to which a reference is run on the CPU in a moment."""

_T = TypeVar("_T")


Observe = Callable[[int, int, InFlight | None, Point], None]
"""Is called several times a second while something is waited for: how many are done, and of how many; the work that has been
in flight the longest, and what differs from the default there."""


class _Subject(NamedTuple):
    task: TaskExecutor
    genome: Genome
    changes: Point = {}  # noqa: RUF012
    """Parameters that differ from the default of that workload."""
    batches: Sequence[tuple[Case, ...]] = ((),)
    """Cases that it is gated on beyond the kernel's own, one batch after another until one is refused."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One genome at one workload: what became of its build, and the verdicts of gate and timing."""

    workload: Workload
    genome: Genome
    changes: Point
    """Parameters that differ from the default; empty for the default itself."""
    cases: tuple[str, ...]
    """Names of the gate's cases, in order, with those asked for beyond the kernel's, without those that are left out. The
    gate ends at the first refused."""
    left: tuple[str, ...]
    """Names of those that come behind a batch with a refusal."""
    build: Build
    measurement: Evaluation | None = None
    """None if the candidate was not run: it did not compile, or was only to be compiled."""
    timed: bool = False
    """Whether it was to be run at the workload's own size too, as a search times it."""

    @property
    def passed(self) -> bool:
        return self.build.status is Status.OK and (self.measurement is None or self.measurement.status is Status.OK)

    @property
    def gate_checks(self) -> list[Check]:
        """The checks of those `cases` that were run."""
        return [c for c in self.measurement.checks if c.case in self.cases] if self.measurement is not None else []

    @property
    def passed_gate(self) -> bool:
        return self.measurement is not None and (self.passed or sum(c.passed for c in self.gate_checks) == len(self.cases))


def check_workloads_of(kernel: Kernel, target: str) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """The kernel's own first workload in every dtype; and its neighbours in the first dtype, which no search times."""
    example = kernel.example(target)
    own = tuple(Workload.of(dict(example.dims), dtype, dict(example.options)) for dtype in kernel.dtypes[target])
    return own, tuple(kernel.neighbours(target, example))


def check_kernel(
    task: TaskExecutor,
    workloads: Sequence[Workload],
    *,
    timed: frozenset[Workload],
    gate: bool,
    cases: tuple[Case, ...] = (),
    random_cases: int = 0,
    observe: Observe | None = None,
) -> tuple[list[Checked], dict[Workload, str]]:
    """(results, workloads whose timing data do not fit this machine, each with the reason: they are gated only).

    Builds every structural branch that is legal for each workload, then gates those that compiled, each also on those of
    `cases` that are of its code and on random ones, and times those of the workloads in `timed`. Without `gate` nothing is
    run. Failures are data. Raises UsageError for a case of other code.
    """
    subjects: list[_Subject] = []
    tasks = [replace(task, workload=workload) for workload in workloads]
    for own, named in zip(tasks, _of_their_code(tasks, cases), strict=True):
        points, batches = own.space.branches(), _batches(own, named, random_cases)
        for point in points:
            changes = {k: v for k, v in point.items() if points[0].get(k) != v}
            subjects.append(_Subject(own, Genome.of(point), changes, batches))
    return _check(subjects, timed, gate, observe)


def check_samples(
    task: TaskExecutor, number: int, *, gate: bool, observe: Observe | None = None
) -> list[tuple[Checked, list[str]]]:
    """Builds up to so many points of the task's space beside its branches: ends of its parameters, and random ones that its
    seed decides; gates those that change one parameter. With each the reasons for which no search can win with it, or
    hardly: it does not compile or launch here, spills, or is refused."""
    base = task.space.complete(task.space.default)
    points = task.space.ends_and_samples(random.Random(task.seed), number)
    changes = ({k: v for k, v in p.items() if base.get(k) != v} for p in points)
    subjects = [_Subject(task, Genome.of(p), c, ((),) * (len(c) == 1)) for p, c in zip(points, changes, strict=True)]
    return [(checked, _faults(task, checked)) for checked in _check(subjects, frozenset(), gate, observe)[0]]


def right_by_default_alone(samples: Sequence[Checked]) -> list[str]:
    """Parameters of which the gate has refused every sample that changes nothing else: they may change the result."""
    passed = dict[str, set[bool]]()
    for checked in samples:
        if checked.measurement is not None:
            passed.setdefault(next(iter(checked.changes)), set()).add(checked.passed)
    return [name for name, found in passed.items() if found == {False}]


def _faults(task: TaskExecutor, checked: Checked) -> list[str]:
    build, limits = checked.build, task.limits
    if build.binary is None:
        return [f"does not compile: {error_line(build.log)}"]
    found = [f"spills {build.binary.spill_bytes:,} bytes of registers"] if build.binary.spill_bytes else []
    point = checked.genome.parameters
    launches = task.problem.sequence(task.target, point, task.workload, limits, build.launch).launches
    smem = (build.binary.smem_static_bytes or 0) + (build.smem_dynamic_bytes or 0)
    threads = max(prod(launch.block) for launch in launches)
    for what, asked, least in (
        ("bytes of shared memory", smem, limits.smem_bytes_per_block),
        ("threads", threads, limits.threads_per_block),
    ):
        if build.occupancy is not None and asked > least:
            found.append(f"asks for {asked:,} {what} a block, and {limits.arch} has {least:,}")
    found += [f"refused by the gate: {_refusal(checked)}"] if not checked.passed else []
    if build.occupancy == 0 and not any("asks" in fault for fault in found):
        found.append(f"no block of it fits a multiprocessor of {limits.arch}: {build.binary.registers} registers a thread")
    return found


def check_candidate(
    task: TaskExecutor,
    genome: Genome,
    *,
    gate: bool,
    cases: tuple[Case, ...] = (),
    random_cases: int = 0,
    observe: Observe | None = None,
) -> list[Checked]:
    """Builds a candidate for its workload and for the neighbours it is legal for, then gates all that compiled, each also on
    those of `cases` that are of its code, and for its own workload on random ones, some at a time behind the kernel's own,
    and then on far ones.

    With the seed that a search drew its data with, this repeats the search's verdict, and the final's with as many random
    cases: as there, the candidate is also timed at its own workload and its timed outputs are verified. A refusal at one
    workload leaves the others to be gated.
    Raises UsageError if the data of its timing do not fit this machine, or for a case of other code.
    """
    tasks = task.with_neighbours(genome)
    (_, named), *of_neighbours = zip(tasks, _of_their_code(tasks, cases), strict=True)
    batches = [*_batches(task, named, random_cases), *([task.far_cases()] if random_cases else [])]
    subjects = [_Subject(task, genome, batches=batches)]
    subjects += [_Subject(near, genome, batches=(of_one,)) for near, of_one in of_neighbours]
    results, too_large = _check(subjects, frozenset({task.workload}), gate, observe)
    for reason in too_large.values():
        raise UsageError(reason)
    return results


def _of_their_code(tasks: Sequence[TaskExecutor], cases: tuple[Case, ...]) -> list[tuple[Case, ...]]:
    """The cases that each task's code takes. Raises UsageError for one that none takes."""
    binding = partial(tasks[0].problem.binding, tasks[0].target)
    found = [tuple(c for c in cases if binding(c.workload) == binding(task.workload)) for task in tasks]
    for case in {*cases}.difference(*found):
        raise UsageError(f"case {case.name!r} is of other code than that for {tasks[0].workload.key}")
    return found


def cost_faults(kernel: Kernel, workloads: Sequence[Workload]) -> list[str]:
    """Faults of the kernel's `cost` at these workloads; rooflines and rates are computed from it."""
    found = []
    for workload in workloads:
        try:
            moved = kernel.cost(workload).bytes
        except KernelError as error:
            return [str(error)]
        inputs = [a for a in kernel.arguments if a.kind == "input" and (not a.optional or workload.option(a.name))]
        least, most = (cost_of(kernel, tensors, workload).bytes for tensors in ((), inputs))
        if moved < least:
            found.append(f"`cost` says that {workload.key} moves {moved:,} bytes, and its outputs alone have {least:,}")
        elif moved > most and all(a.shape for a in inputs):
            found.append(f"`cost` says that {workload.key} moves {moved:,} bytes, and all its tensors have {most:,}")
    return found


def reference_faults(kernel: Kernel, target: str, workloads: Sequence[Workload]) -> list[str]:
    """The first fault of the kernel's `reference` that its smaller cases show in PyTorch on the CPU: in outputs of another
    shape or dtype, or an error. Where no device runs the gate, nothing else would find it."""
    import torch

    from evo.measure.gate import threads_limited
    from evo.measure.reference import reference_outputs

    cases = [c for w in workloads for c in (*kernel.cases(target, w), *required_cases(kernel, target, w))]
    try:
        with threads_limited(1):
            for case in dict.fromkeys(c for c in cases if prod(size for _, size in c.workload.dims) <= _FEW):
                reference_outputs(kernel, draw_inputs(kernel, case, torch.Generator().manual_seed(0)), case.workload)
    except KernelError as error:
        return [str(error).partition("\n")[0]]
    return []


def _batches(task: TaskExecutor, named: tuple[Case, ...], number: int) -> list[tuple[Case, ...]]:
    """Batches of the named cases and of so many random ones, but at least those that every finalist meets."""
    drawn = task.random_cases(number)
    first, *more = [drawn[i : i + _CASES_AT_ONCE] for i in range(0, len(drawn), _CASES_AT_ONCE)] or [()]
    return [named + first, *more]


def _joined(before: Evaluation, found: Evaluation) -> Evaluation:
    """The evaluation with what a further batch adds: the kernel's own cases are in each."""
    further = tuple(check for check in found.checks if is_case_text(check.case) or not check.passed)
    left_out = {**before.left_out, **found.left_out}
    return replace(before if found.status is Status.OK else found, checks=before.checks + further, left_out=left_out)


def _run_of(cases: Sequence[Case], measurement: Evaluation | None) -> tuple[str, ...]:
    """Names of the cases without those left out; of far ones only those that were made, as the others are spare."""
    found = measurement or Evaluation(status=Status.OK)
    made = {check.case for check in found.checks}
    return tuple(c.name for c in cases if c.name in made or not (c.far or c.name in found.left_out))


def _check(
    subjects: Sequence[_Subject], timed: frozenset[Workload], gate: bool, observe: Observe | None
) -> tuple[list[Checked], dict[Workload, str]]:
    building = [(subject, subject.task.build(subject.genome)) for subject in subjects]
    changes_of = {(s.genome, s.task.workload): s.changes for s in subjects}
    results: list[Checked] = []
    too_large: dict[Workload, str] = {}

    def result_of(future: Future[_T]) -> _T:
        while observe is not None and wait([future], timeout=_OBSERVE_S).not_done:
            work = next(iter(subjects[0].task.executor.in_flight()), None)
            changes = changes_of.get((work.genome, work.workload), {}) if work else {}
            observe(len(results), len(building), work, changes)
        return future.result()

    for (task, genome, changes, batches), future in building:
        workload, build, measurement = task.workload, result_of(future), None
        time = workload in timed and workload not in too_large
        reached = 0
        for batch in batches if gate and build.binary is not None else ():
            reached += 1
            try:
                found = result_of(task.measure(genome, build, time=time and measurement is None, cases=batch))
            except UsageError as error:
                if not time:
                    raise
                time, too_large[workload] = False, str(error)
                found = result_of(task.measure(genome, build, time=False, cases=batch))
            measurement = found if measurement is None else _joined(measurement, found)
            if measurement.status is not Status.OK:
                break
        results.append(
            Checked(
                workload=workload,
                genome=genome,
                changes=changes,
                cases=_run_of((*task.problem.cases(task.target, workload), *chain(*batches[:reached])), measurement),
                left=tuple(case.name for case in chain(*batches[reached:])),
                build=build,
                measurement=measurement,
                timed=time and measurement is not None,
            )
        )
    return results, too_large


# -- the edits of a candidate ------------------------------------------------------------------------------------


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
        new = [genome for genome in dict.fromkeys(genomes) if genome not in self.reasons]
        for genome in new:
            broken = self._task.space.violations(genome.parameters)
            self.reasons[genome] = f"not legal: {'; '.join(broken)}" if broken else ""
        legal = [_Subject(self._task, genome) for genome in new if not self.reasons[genome]]
        for checked in _check(legal, frozenset(), True, None)[0]:
            self._builds[checked.genome] = checked.build
            self.reasons[checked.genome] = _refusal(checked)

    def race(self, genomes: Sequence[Genome]) -> RaceResult:
        """A genome's name in it is its digest."""
        result = self._task.race([(g.digest, g, self._builds[g]) for g in dict.fromkeys(genomes)])
        if not result.timings:
            raise EvoError(f"the race for {self._task.workload} could not be held: {result.log}")
        return result


def _refusal(checked: Checked) -> str:
    measured = checked.measurement
    if measured is None:
        return f"does not compile ({checked.build.status})"
    if checked.passed:
        return ""
    failed = next((f"{c.case}: {c.reason}" for c in measured.checks if not c.passed), measured.log.strip())
    return f"{measured.status}: {failed.splitlines()[0] if failed else ''}"


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
