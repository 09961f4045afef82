"""What broke: by kind, by reason, by parameter value; and which rule would have avoided it at what cost."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from evo.analysis.rules import Rule, Tried, Violations, find_rules, spent
from evo.evaluation import PASSED
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import resolve_run
from evo.lineage.store import Store
from evo.problem.space import Value

__all__ = [
    "FailureKind",
    "FailureReason",
    "FailureReport",
    "FailureTotal",
    "FailureValue",
    "failure_reason",
    "failure_reasons",
    "failure_report",
    "failure_totals",
]

_c, _i, _k, _b, _r = m.Candidate, m.Task, m.Check, m.Build, m.Run
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class FailureKind:
    """A status: how many candidates ended so, their share of all, what they cost, and the first of them."""

    status: str
    candidates: int
    share: float
    seconds: float
    first: str


@dataclass(frozen=True, kw_only=True)
class FailureReason:
    """What was said, numbers in it left open. example: of the first candidate, as it was said."""

    status: str
    reason: str
    candidates: int
    first: str
    example: str


@dataclass(frozen=True, kw_only=True)
class FailureValue:
    """A parameter's value: how many candidates had it, how many of them were refused, and that of all the others that have
    the parameter. z: the difference of the two shares in standard errors, None where there is nothing to compare.
    structural: the parameter chooses another algorithm; None where the space is not at hand.
    """

    parameter: str
    value: Value
    candidates: int
    refused: int
    share: float
    elsewhere: int
    elsewhere_refused: int
    elsewhere_share: float | None
    z: float | None
    structural: bool | None


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Each list with the worst first. candidates: all of the run; refused: those that did not pass."""

    run: str
    candidates: int
    refused: int
    kinds: tuple[FailureKind, ...]
    reasons: tuple[FailureReason, ...]
    values: tuple[FailureValue, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True)
class FailureTotal:
    """Over all runs."""

    kernel: str
    target: str
    device: str
    status: str
    runs: int
    candidates: int
    share: float


def failure_totals(store: Store, kernel: str | None = None) -> list[FailureTotal]:
    """How the candidates of all runs ended, those that passed too, by kernel, target and device."""
    e = m.Environment
    # By run from an index alone first: joined before, every candidate would be looked up.
    counted = (
        select(_c.run_id, _c.status, func.count().label("n")).group_by(_c.run_id, _c.status).cte("counted")
    )
    query = (
        select(_r.kernel, _r.target, e.device, counted.c.status, func.count(), func.sum(counted.c.n))
        .join_from(counted, _r, _r.id == counted.c.run_id)
        .join(e, e.id == _r.environment_id)
        .group_by(_r.kernel, _r.target, e.device, counted.c.status)
    )
    with store.reading() as connection:
        rows = connection.execute(query if kernel is None else query.where(_r.kernel == kernel)).all()
    totals: Counter[tuple[str, ...]] = Counter()
    for *group, _, _, n in rows:
        totals[tuple(group)] += int(n)
    found = [
        FailureTotal(
            kernel=a,
            target=b,
            device=c,
            status=d,
            runs=e,
            candidates=int(n),
            share=int(n) / totals[(a, b, c)],
        )
        for a, b, c, d, e, n in rows
    ]
    return sorted(found, key=lambda f: (f.kernel, f.target, f.device, -f.candidates, f.status))


def failure_report(
    store: Store,
    run: str,
    *,
    violations: Violations | None = None,
    structural: frozenset[str] | None = None,
    pairs: bool = True,
) -> FailureReport:
    """Raises UnknownNameError, or StoreError for an ambiguous prefix of a name.

    violations, structural: what the kernel's space says now, where it is at hand. pairs: rules of two values, too.
    """
    with store.reading() as connection:
        key = resolve_run(connection, run)
        name = str(connection.scalar(select(_r.name).where(_r.id == key)))
        rows = _candidates(connection, key)
        said = _reasons(connection, key)
    tried = Tried(rows)
    return FailureReport(
        run=name,
        candidates=len(rows),
        refused=tried.refused.bit_count(),
        kinds=tuple(_kinds(rows)),
        reasons=tuple(_reason_groups(rows, said)),
        values=tuple(_values(tried, structural)),
        rules=tuple(find_rules(tried, rows, violations, pairs=pairs)),
    )


def failure_reasons(store: Store, run: str, task: int) -> tuple[FailureReason, ...]:
    """Of one workload of a run, the most frequent first. Raises as `failure_report` does."""
    with store.reading() as connection:
        key = resolve_run(connection, run)
        rows = [row for row in _candidates(connection, key) if row.task == task]
        return tuple(_reason_groups(rows, _reasons(connection, key)))


def failure_reason(log: str) -> str:
    """The first line that speaks of an error, or else the first."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def _candidates(connection: Connection, run_id: int) -> list[Any]:
    return list(
        connection.execute(
            select(
                _c.id, _c.public_id, _c.task, _i.workload, _c.status, _c.score, _c.genome, _c.seconds, _b.cached,
                _b.seconds.label("build_seconds"),
            )
            .join_from(_c, _i, (_i.run_id == _c.run_id) & (_i.number == _c.task))
            .join(_b, _b.candidate_id == _c.id, isouter=True)
            .where(_c.id.between(*key_range(run_id)))
            .order_by(_c.id)
        )
    )  # fmt: skip


def _reasons(connection: Connection, run_id: int) -> dict[int, str]:
    """By key, for the candidates that were refused."""
    keys = key_range(run_id)
    found: dict[int, str] = {}
    for key, log, build_log in connection.execute(
        select(_c.id, _c.log, _b.log)
        .join_from(_c, _b, _b.candidate_id == _c.id, isouter=True)
        .where(_c.id.between(*keys), _c.status.not_in(PASSED))
    ):
        found[key] = failure_reason(log) or failure_reason(build_log or "")
    for key, case, reason in connection.execute(
        select(_k.candidate_id, _k.case, _k.reason)
        .where(_k.candidate_id.between(*keys), _k.round == 0, _k.passed.is_(False))
        .order_by(_k.candidate_id, _k.position.desc())
    ):
        found[key] = f"{case}: {reason}"
    return found


def _kinds(rows: Sequence[Any]) -> list[FailureKind]:
    groups: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        if row.status not in PASSED:
            groups[row.status].append(row)
    found = [
        FailureKind(
            status=status,
            candidates=len(group),
            share=len(group) / len(rows),
            seconds=sum(map(spent, group)),
            first=group[0].public_id,
        )
        for status, group in groups.items()
    ]
    return sorted(found, key=lambda k: (-k.candidates, k.status))


def _reason_groups(rows: Sequence[Any], said: Mapping[int, str]) -> list[FailureReason]:
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        if row.status not in PASSED:
            groups[row.status, _NUMBERS.sub("#", said.get(row.id, ""))].append(row)
    found = [
        FailureReason(
            status=status,
            reason=reason,
            candidates=len(group),
            first=group[0].public_id,
            example=said.get(group[0].id, ""),
        )
        for (status, reason), group in groups.items()
    ]
    return sorted(found, key=lambda r: (-r.candidates, r.status, r.reason))


def _values(tried: Tried, structural: frozenset[str] | None) -> list[FailureValue]:
    found = []
    for pair, having in tried.having.items():
        name = pair[0]
        others = tried.present[name] & ~having
        n, bad = having.bit_count(), (having & tried.refused).bit_count()
        others_n, bad_elsewhere = others.bit_count(), (others & tried.refused).bit_count()
        found.append(
            FailureValue(
                parameter=name,
                value=tried.values[pair],
                candidates=n,
                refused=bad,
                share=bad / n,
                elsewhere=others_n,
                elsewhere_refused=bad_elsewhere,
                elsewhere_share=bad_elsewhere / others_n if others_n else None,
                z=_z(n, bad, others_n, bad_elsewhere),
                structural=None if structural is None else name in structural,
            )
        )
    return sorted(found, key=lambda v: (-_surplus(v), v.parameter, str(v.value)))


def _z(n: int, bad: int, others: int, bad_elsewhere: int) -> float | None:
    """Of two shares, with their common variance."""
    if not n or not others:
        return None
    common = (bad + bad_elsewhere) / (n + others)
    spread = math.sqrt(common * (1 - common) * (1 / n + 1 / others))
    return (bad / n - bad_elsewhere / others) / spread if spread else 0.0


def _surplus(value: FailureValue) -> float:
    """Refused beyond what the parameter's other values would lead to expect."""
    return (
        value.refused - value.candidates * value.elsewhere_share if value.elsewhere_share is not None else 0.0
    )
