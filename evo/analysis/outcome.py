"""What a run found: the record behind a report, workload by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evo.analysis.candidates import CandidateRecord, FinalRace, TimingRecord, read_candidate
from evo.analysis.descent import Kin, read_family
from evo.analysis.failures import Failure, list_failures, refused_finalists
from evo.analysis.finals import Confirmation, Finalist, read_finals
from evo.analysis.importance import Importance, most_important, read_importance
from evo.analysis.population import Milestone, Population, TriedParameter, read_milestones, read_population
from evo.analysis.runs import RunSummary, TaskSummary, find_run
from evo.analysis.times import noise_floors
from evo.errors import EvoError, SpaceError
from evo.evaluation import AA_CONTROL, within_noise
from evo.lineage.store import Store
from evo.problem.kernel import find_kernel, kernel_digest, load_kernel, template_root
from evo.problem.space import Space, Value
from evo.targets import find_target

__all__ = ["Problem", "RunOutcome", "WorkloadOutcome", "read_outcome", "read_problem"]

_REASONS = 5_000
"""Failures whose reasons are read."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is still known of the problem that a run was about: the database has values, not spaces.

    spaces: by number of the task. roles: of baselines. changed: why what the kernel says now may not be what it said
    to the run; empty if it says the same.
    """

    spaces: Mapping[int, Space]
    roles: Mapping[str, str]
    changed: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkloadOutcome:
    """One workload of a run.

    parameters: those that were tried. milestones: the new bests. leader: the winner, or else the best of the search, which
    no final has confirmed. race: what the leader's last final timed beside it. finalists: all candidates that this final
    timed, by the race that all of them ran in; confirmation: the winner in the race that confirmed it; regret, remarks: see
    `evo.analysis.finals.WorkloadFinals`. steps: the leader's ancestors and itself; disturbed: those of them whose search
    timing was. failures: of the search, as far as their reasons were read; refused: by the finals. noise: the noise floor.
    importance: of every parameter, the most important first; untried: legal values of the most important ones that no
    candidate had, as far as the space is known.
    """

    task: TaskSummary
    candidates: Population | None
    parameters: tuple[TriedParameter, ...]
    milestones: tuple[Milestone, ...]
    leader: CandidateRecord | None
    race: FinalRace | None
    finalists: tuple[Finalist, ...]
    confirmation: Confirmation | None
    regret: float | None
    remarks: tuple[str, ...]
    steps: tuple[Kin, ...]
    disturbed: frozenset[str]
    failures: tuple[Failure, ...]
    refused: tuple[Failure, ...]
    noise: float | None
    importance: tuple[Importance, ...]
    untried: tuple[tuple[str, Value], ...]
    roles: Mapping[str, str]

    @property
    def number(self) -> int:
        return 0 if self.candidates is None else len(self.candidates)

    @property
    def important(self) -> list[str]:
        """Names of the parameters whose importance is known, the most important first."""
        return [i.parameter for i in self.importance if i.importance is not None]

    @property
    def confirmed(self) -> bool:
        """Whether finals have named the leader winner."""
        return self.leader is not None and self.task.winner == self.leader.id

    @property
    def timing(self) -> TimingRecord | None:
        """The leader's, of its last race: with cold caches."""
        return next((t for t in self._last_timings if t.protocol != "hot"), None)

    @property
    def hot(self) -> TimingRecord | None:
        return next((t for t in self._last_timings if t.protocol == "hot"), None)

    @property
    def _last_timings(self) -> list[TimingRecord]:
        timings = self.leader.timings if self.leader else ()
        latest = max((t.round for t in timings), default=0)
        return [t for t in timings if t.round == latest and t.contender == "candidate"]

    @property
    def baselines(self) -> tuple[TimingRecord, ...]:
        """Of the leader's race, cold, without its twin."""
        timings = self.race.timings if self.race else ()
        return tuple(t for t in timings if t.protocol != "hot" and t.contender != AA_CONTROL)

    @property
    def reference(self) -> TimingRecord | None:
        """The baseline that speed-ups are over, if a final timed it."""
        named = [t for t in self.baselines if self.roles.get(t.contender) == "reference"]
        return next(iter(named or [t for t in self.baselines if t.ratio is None]), None)

    @property
    def ceiling(self) -> TimingRecord | None:
        """The fastest of the baselines that only move the bytes."""
        bounds = [t for t in self.baselines if self.roles.get(t.contender, t.contender) in ("ceiling", "copy")]
        return min(bounds, key=lambda t: t.median_us, default=None)

    @property
    def tie(self) -> bool:
        """Whether the speed-up is within the noise floor."""
        return self.timing is not None and within_noise(self.timing.ratio, self.noise)


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """db: the database as commands have to name it; None for the one that they take by themselves."""

    run: RunSummary
    db: str | None
    problem: Problem
    workloads: tuple[WorkloadOutcome, ...]


def read_outcome(store: Store, name: str, *, db: str | None = None) -> RunOutcome:
    """db: as commands have to name the database. Raises UnknownNameError, or StoreError for an ambiguous name."""
    stored = store.run(name)
    run = find_run(store, stored.name)
    problem = read_problem(run)
    with store.reading() as connection:
        noise = noise_floors(connection, [run.name])
    weights = read_importance(store, run.name)
    failures = list_failures(store, run.name, limit=_REASONS)
    refused = refused_finalists(store, run.name)
    populations = read_population(store, stored.id)
    ceilings = [name for name, role in problem.roles.items() if role == "ceiling"] or ["copy"]
    held = {f.task: f for f in read_finals(store, run.name, ceilings)}
    workloads = []
    for task in run.tasks:
        some = populations.get(task.number)
        space = problem.spaces.get(task.number)
        leading = task.winner or task.best
        leader = read_candidate(store, leading) if leading else None
        races = leader.final_races if leader else ()
        steps = read_family(store, leader.id, descendants=0).members if leader else ()
        weighed = tuple(w for w in weights if w.workload == task.workload)
        out = {f.order for f in refused}
        workloads.append(
            WorkloadOutcome(
                task=task,
                candidates=some,
                parameters=_tried_parameters(space, some.tried if some else {}),
                milestones=read_milestones(store, stored.id, stored.uid, some, out) if some else (),
                leader=leader,
                race=races[-1] if races else None,
                finalists=held[task.number].finalists,
                confirmation=held[task.number].confirmed,
                regret=held[task.number].selection_regret,
                remarks=held[task.number].remarks,
                steps=steps,
                disturbed=frozenset(s.id for s in steps if s.disturbed),
                failures=tuple(f for f in failures if f.task == task.number),
                refused=tuple(f for f in refused if f.task == task.number),
                noise=noise.get((run.name, task.workload)),
                importance=weighed,
                untried=() if space is None or problem.changed else _untried(weighed, space),
                roles=problem.roles,
            )
        )
    return RunOutcome(run=run, db=db, problem=problem, workloads=tuple(workloads))


def read_problem(run: RunSummary) -> Problem:
    """Of the kernel as it is now, if there is one of that name.

    A kernel.py is a program, and a database may come from anywhere: a kernel outside evo's own templates is run only if it
    is, byte for byte, what the run was about.
    """
    try:
        folder = find_kernel(run.kernel)
        if not folder.is_relative_to(template_root()) and kernel_digest(folder) != run.kernel_digest:
            return Problem(spaces={}, roles={}, changed="the kernel has changed since this run")
        kernel = load_kernel(run.kernel)
        limits = find_target(run.target).limits(run.arch)
        spaces = {
            t.number: kernel.space(run.target, kernel.workload(run.target, t.workload), limits) for t in run.tasks
        }
        roles = {b.name: b.role for b in kernel.baselines}
    except (EvoError, OSError):
        return Problem(spaces={}, roles={}, changed="the kernel cannot be found here any more")
    except Exception as error:  # a kernel.py may raise anything, and the record can still be shown
        return Problem(spaces={}, roles={}, changed=f"the kernel cannot be loaded any more ({type(error).__name__})")
    changed = "" if kernel.digest == run.kernel_digest else "the kernel has changed since this run"
    return Problem(spaces=spaces, roles=roles, changed=changed)


def _tried_parameters(space: Space | None, tried: Mapping[str, Sequence[Value]]) -> tuple[TriedParameter, ...]:
    """In the order in which the kernel declares them, then those that it does not have any more. Where the kernel does not
    tell, a parameter of words alone is taken for structural."""
    declared = space.by_name if space else {}
    found = []
    for name in [n for n in declared if n in tried] + sorted(n for n in tried if n not in declared):
        known = declared.get(name)
        place = {_key(v): i for i, v in enumerate(known.values)} if known else {}
        found.append(
            TriedParameter(
                name=name,
                values=tuple(sorted(tried[name], key=lambda v: (place.get(_key(v), len(place)), _order(v)))),
                structural=known.structural if known else all(isinstance(v, str) for v in tried[name]),
                why=known.why if known else "",
            )
        )
    return tuple(found)


def _key(value: Value) -> tuple[str, Value]:
    """True is not 1 here."""
    return type(value).__name__, value


def _order(value: Value) -> tuple[int, float, str]:
    """Numbers by size before words by letter."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _untried(weighed: Sequence[Importance], space: Space) -> tuple[tuple[str, Value], ...]:
    """Values that some legal point has."""
    found = []
    for record in most_important(weighed):
        parameter = space.by_name.get(record.parameter)
        tried = {repr(t.value) for t in record.tried}
        for value in parameter.values if parameter is not None else ():
            if repr(value) not in tried and _is_possible(space, record.parameter, value):
                found.append((record.parameter, value))
    return tuple(found)


def _is_possible(space: Space, name: str, value: Value) -> bool:
    try:
        return bool(space.restricted({name: value}).default)
    except SpaceError:
        return False
