"""Failures of a run by kind, by reason and by parameter value, and which rule would have avoided them at what cost."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sqlalchemy import BigInteger, Connection, case, cast, func, select

from evo.analysis.times import RelativeTime, search_times
from evo.errors import EvoError, error_line
from evo.evaluation import PASSED
from evo.lineage import LATEST
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import read_details
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.kernel import Kernel, Workload
from evo.problem.loading import recorded_kernel
from evo.problem.space import Space, Value
from evo.targets import find_target

_c, _d, _b, _r = m.Candidate, m.Detail, m.Build, m.Run
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?)\b(?! (?:or|of)\b)", re.IGNORECASE)
_GOOD_SHARE = 0.25
"""Share of a task's timed candidates that count as good, the fastest ones."""
_NOT_CHANCE = 2.0
"""Standard errors by which a value must be refused more often than the others to be remarked on."""
_LEAST_AVOIDED, _KEPT_RULES = 2, 50
"""Least number of failures that a rule must avoid, and number of rules that are kept."""


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """A status, with the number of candidates that ended so, their share of all, what they cost, and the first of them."""

    status: str
    candidates: int
    share: float
    seconds: float
    first: str


@dataclass(frozen=True, kw_only=True)
class FailureReason(FailureKind):
    """A reason of refusals, with every number in it as #. example: the first candidate's reason, word for word."""

    reason: str
    example: str


@dataclass(frozen=True, kw_only=True)
class TriedValue:
    """A parameter's value, and how candidates with it fared.

    candidates: their number, of whom `passed` passed the search and `refused` did not; share: refused over candidates. of:
    the number of all candidates that have the parameter. elsewhere, elsewhere_refused, elsewhere_share: the same figures for
    those with another value. z: the difference of the two shares in standard errors; None where there is nothing to compare.
    best: the best ratio, None where none was timed. structural: whether the parameter chooses another algorithm; None where
    the space is not known.
    """

    parameter: str
    value: Value
    candidates: int
    of: int
    passed: int
    refused: int
    share: float
    elsewhere: int
    elsewhere_refused: int
    elsewhere_share: float | None
    z: float | None
    best: float | None
    structural: bool | None

    @property
    def frequent(self) -> bool:
        """Whether it was refused more often than chance would have it."""
        return self.z is not None and self.z >= _NOT_CHANCE


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The effect that a constraint which forbids `rule` would have had in this run.

    kind: "new", or "existing" for a constraint of the present space that this run did not have. avoided: failures that it
    forbids; more: those among them that no better rule avoids. passed_lost: passing candidates that it forbids; good_lost:
    those among the fastest quarter of their workload; best_lost: whether the fastest of a workload is one. seconds: cost of
    building and measuring the avoided ones.
    """

    kind: str
    rule: str
    avoided: int
    avoided_share: float
    more: int
    passed_lost: int
    good_lost: int
    best_lost: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The failures of a run, the worst first in each list. candidates: all of the run; refused: those that did not pass."""

    run: str
    candidates: int
    refused: int
    kinds: tuple[FailureKind, ...]
    reasons: tuple[FailureReason, ...]
    values: tuple[TriedValue, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True)
class FailureTotal:
    """The candidates of all runs of a kernel, target and device that ended with a status."""

    kernel: str
    target: str
    device: str
    status: str
    runs: int
    candidates: int
    share: float


def failure_totals(store: Store, kernel: str | None = None) -> list[FailureTotal]:
    """The candidates of all runs, also those that passed, by kernel, target, device and status."""
    of_runs = select(_c.run_id, _c.status, func.count().label("number")).group_by(_c.run_id, _c.status).subquery()
    group = (_r.kernel, _r.target, m.Environment.device)
    number = cast(func.sum(of_runs.c.number), BigInteger).label("candidates")
    query = (
        select(*group, of_runs.c.status, func.count().label("runs"), number)
        .join_from(of_runs, _r, _r.id == of_runs.c.run_id)
        .join(m.Environment)
        .group_by(*group, of_runs.c.status)
        .order_by(*group, number.desc(), of_runs.c.status)
    )
    with store.reading() as connection:
        rows = connection.execute(query if kernel is None else query.where(_r.kernel == kernel)).all()
    totals = Counter[Any]()
    for row in rows:
        totals[row[:3]] += row.candidates
    return [FailureTotal(**row._mapping, share=row.candidates / totals[row[:3]]) for row in rows]


def read_failures(store: Store, run: str = LATEST, *, template: bool = False, task: int | None = None) -> FailureReport:
    """The failures of a run. template: whether to load the kernel, mark its structural parameters, and judge the
    constraints that its space has now. task: the only task to look at."""
    stored = store.run(run)
    spec = stored.spec
    with store.reading() as connection:
        rows = read_tried(connection, stored.id, task)
        times = search_times(connection, stored.id, [row.id for row in rows])
        said = _reasons(connection, stored.id)
    problem = recorded_kernel(spec.kernel, spec.kernel_digest) if template else None
    spaces = [present_space(problem, spec.target, spec.arch, w) for w in spec.workloads] if problem else []
    structural = {p.name for space in spaces for p in space.parameters if p.structural} if template else None
    refused = [row for row in rows if row.status not in PASSED]
    by_kind = _grouped(refused, lambda row: (row.status,))
    by_reason = _grouped(refused, lambda row: (row.status, _NUMBERS.sub("#", said[row.id])))
    return FailureReport(
        run=stored.name,
        candidates=len(rows),
        refused=len(refused),
        kinds=tuple(FailureKind(**_costs(group, len(rows))) for _, group in by_kind),
        reasons=tuple(
            FailureReason(**_costs(group, len(rows)), reason=reason, example=said[group[0].id])
            for (_, reason), group in by_reason
        ),
        values=tuple(tried_values(rows, times, structural)),
        rules=tuple(_find_rules(_Tried(rows), spaces)),
    )


def present_space(kernel: Kernel, target: str, arch: str, workload: Workload) -> Space:
    """The search space of a recorded workload as the kernel states it now. Raises UnknownNameError for a target that the
    kernel does not have."""
    kernel.check_target(target)
    return kernel.space(target, workload, find_target(target).limits(arch))


def read_tried(connection: Connection, run_id: int, task: int | None = None) -> list[Any]:
    """The candidates of a run, or of one of its tasks, by order; `spent_s`: the cost of each, without a cached build."""
    build_s = case((_b.cached.is_(True), 0.0), else_=func.coalesce(_b.seconds, 0.0))
    query = (
        select(_c.id, _c.public_id, _c.order, _c.task, _c.operator, _c.genome, _c.status, _c.score)
        .add_columns(_c.elapsed_s, (_c.seconds + build_s).label("spent_s"))
        .join_from(_c, _b, _b.candidate_id == _c.id, isouter=True)
        .where(_c.id.between(*key_range(run_id)))
        .order_by(_c.id)
    )
    return list(connection.execute(query if task is None else query.where(_c.task == task)))


def _reasons(connection: Connection, run_id: int) -> dict[int, str]:
    """The reasons of a run's refused candidates by key: what the gate said of the first failed case, or a line of the log.
    Candidates of equal machine code have the reason of the first of them."""
    refused = select(_c.id, _c.log, _c.same_code_as_id).where(_c.id.between(*key_range(run_id)), _c.status.not_in(PASSED))
    rows = connection.execute(refused).all()
    found = {key: error_line(log) for key, log, _ in rows}
    within = (_d.candidate_id.between(*key_range(run_id)), _d.candidate_id.in_(refused.with_only_columns(_c.id)))
    for told in read_details(connection, *within, _d.round == 0):
        failed = next((f"{check.case}: {check.reason}" for check in told.checks if not check.passed), None)
        found[told.candidate_id] = failed or found[told.candidate_id] or error_line(told.log)
    return found | {key: found[first] for key, _, first in rows if first in found}


def _grouped(rows: Sequence[Any], key: Callable[[Any], tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[Any]]]:
    """The rows by their key, the most frequent key first."""
    groups: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def _costs(group: Sequence[Any], of: int) -> dict[str, Any]:
    """The fields of `FailureKind` for candidates that ended alike. of: number of all candidates."""
    return {
        "status": group[0].status,
        "candidates": len(group),
        "share": len(group) / of,
        "seconds": sum(row.spent_s for row in group),
        "first": group[0].public_id,
    }


def tried_values(
    rows: Sequence[Any], times: Mapping[int, RelativeTime], structural: Collection[str] | None = None
) -> list[TriedValue]:
    """Every value that any candidate had, the worst first. rows: result of `read_tried`. times: the search's times by key.
    structural: names of the structural parameters, if they are known."""
    having = _having(rows)
    of, refused_of = Counter[str](), Counter[str]()
    for (name, _), numbers in having.items():
        of[name] += len(numbers)
        refused_of[name] += sum(rows[number].status not in PASSED for number in numbers)
    found = []
    for (name, value), numbers in having.items():
        some = [rows[number] for number in numbers]
        n, bad = len(some), sum(row.status not in PASSED for row in some)
        others, bad_elsewhere = of[name] - n, refused_of[name] - bad
        z = None
        if others:  # the two shares differ by so many standard errors, with their common variance
            common = refused_of[name] / of[name]
            spread = math.sqrt(common * (1 - common) * (1 / n + 1 / others))
            z = (bad / n - bad_elsewhere / others) / spread if spread else 0.0
        found.append(
            TriedValue(
                parameter=name,
                value=value,
                candidates=n,
                of=of[name],
                passed=n - bad,
                refused=bad,
                share=bad / n,
                elsewhere=others,
                elsewhere_refused=bad_elsewhere,
                elsewhere_share=bad_elsewhere / others if others else None,
                z=z,
                best=min((times[row.id].ratio for row in some if row.id in times), default=None),
                structural=None if structural is None else name in structural,
            )
        )
    return sorted(found, key=lambda v: (-(v.z or 0.0), v.parameter, str(v.value)))


def _having(rows: Sequence[Any]) -> dict[tuple[str, Value], set[int]]:
    """The numbers of the rows whose genome has a parameter's value, by parameter and value."""
    found: dict[tuple[str, Value], set[int]] = defaultdict(set)
    for number, row in enumerate(rows):
        for pair in Genome.from_json(row.genome).items:
            found[pair].add(number)
    return found


class _Tried:
    """A run's candidates as sets of their numbers: those with a value, those refused, those that passed, the fastest quarter
    of each task, and the fastest of each task."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows
        self.having = _having(rows)
        self.refused = {number for number, row in enumerate(rows) if row.status not in PASSED}
        self.passed = set(range(len(rows))) - self.refused
        ranked: dict[int, list[int]] = defaultdict(list)
        timed = [number for number, row in enumerate(rows) if row.score is not None]
        for number in sorted(timed, key=lambda number: rows[number].score):
            ranked[rows[number].task].append(number)
        self.good = {n for some in ranked.values() for n in some[: max(1, round(_GOOD_SHARE * len(some)))]}
        self.best = {some[0] for some in ranked.values()}

    def worth(self, numbers: set[int]) -> float:
        """The share of all failures among these, less the shares of what passed and of what was good."""
        kinds = (self.refused, self.passed, self.good)
        refused, passed, good = (len(numbers & kind) / max(1, len(kind)) for kind in kinds)
        return refused - (passed + good)

    def spares(self, both: set[int], one: set[int]) -> bool:
        """Whether more candidates of one set passed than were refused, without those in both."""
        left_out = one - both
        return len(left_out) > 2 * len(left_out & self.refused)


def _find_rules(tried: _Tried, spaces: Sequence[Space]) -> list[Rule]:
    """The rules, the most worth first and those that add nothing last. spaces: the kernel's present spaces by task, if they
    are to be judged."""
    # Only values that break something can break something together.
    suspects = {
        pair: having for pair, having in tried.having.items() if len(having & tried.refused) >= _LEAST_AVOIDED
    }
    useful = [("new", f"{name}={value}", having) for (name, value), having in suspects.items()]
    for ((name, value), a), ((other, its), b) in combinations(suspects.items(), 2):
        both = a & b if name != other else set()
        # A pair has to spare more candidates that passed than it lets through failures.
        if len(both & tried.refused) >= _LEAST_AVOIDED and tried.spares(both, a) and tried.spares(both, b):
            useful.append(("new", f"{name}={value} and {other}={its}", both))
    broken: dict[str, set[int]] = defaultdict(set)
    for number, row in enumerate(tried.rows) if spaces else ():
        for name in _violations(spaces[row.task], Genome.from_json(row.genome).parameters):
            broken[name].add(number)
    useful += [("existing", name, numbers) for name, numbers in broken.items() if numbers & tried.refused]
    useful.sort(key=lambda one: (-tried.worth(one[2]), one[0], len(one[1]), one[1]))
    found, before = [], set[int]()
    for kind, rule, numbers in useful[:_KEPT_RULES]:
        avoided = numbers & tried.refused
        found.append(
            Rule(
                kind=kind,
                rule=rule,
                avoided=len(avoided),
                avoided_share=len(avoided) / len(tried.refused),
                more=len(avoided - before),
                passed_lost=len(numbers & tried.passed),
                good_lost=len(numbers & tried.good),
                best_lost=bool(numbers & tried.best),
                seconds=sum(tried.rows[number].spent_s for number in avoided),
            )
        )
        before |= numbers if tried.worth(numbers) > 0 else set()
    return sorted(found, key=lambda rule: not rule.more)


def _violations(space: Space, point: Mapping[str, Value]) -> list[str]:
    """The names of the constraints that a point breaks. A point of another space breaks none, and a constraint that cannot
    be asked because the space has changed counts as holding."""
    broken = []
    for constraint in space.constraints if space.by_name.keys() >= point.keys() else ():
        with suppress(EvoError, LookupError, TypeError, ValueError, ArithmeticError):
            if not constraint.holds(point):
                broken.append(constraint.name)
    return broken
