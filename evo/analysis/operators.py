"""The worth of each operator in a run, over time."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from evo.analysis.failures import read_tried
from evo.analysis.times import RaceTime, search_times
from evo.errors import UsageError
from evo.evaluation import PASSED, Status
from evo.lineage import LATEST
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.read import resolve_run
from evo.lineage.store import Store

_p = m.Parentage


@dataclass(frozen=True, kw_only=True)
class OperatorCredit:
    """An operator in one window of a run's search time, or in all of it (window None).

    trials: candidates that it made; passed: those that passed; new_code: those among them whose machine code was new.
    compared: trials with a timed parent; better: those faster than the fastest of their parents; success: their share.
    improvements: trials faster than all before on their task, in undisturbed times. gain: the factor by which these together
    lowered the best time (1.0: not at all). seconds: time of building and measuring all trials. gain_rate: 100 times the
    logarithm of the gain, per second: about per cent a second; rates can be added and averaged.
    """

    operator: str
    window: int | None
    from_s: float
    to_s: float
    trials: int
    passed: int
    new_code: int
    compared: int
    better: int
    success: float | None
    improvements: int
    gain: float
    seconds: float
    gain_rate: float | None


def read_operators(store: Store, run: str = LATEST, *, windows: int = 5, task: int | None = None) -> list[OperatorCredit]:
    """The credit of each operator: for the whole run first, then window by window of equal search time. task: the only task
    to count."""
    if not 1 <= windows <= 1000:
        raise UsageError(f"{windows} windows cannot be shown; choose 1 to 1000")
    with store.reading() as connection:
        compared = compare_with_parents(connection, resolve_run(connection, run), task)
    length = max((one.row.elapsed_s for one in compared), default=0.0)
    groups: dict[tuple[str, int | None], list[ComparedCandidate]] = defaultdict(list)
    for one in compared:
        groups[one.row.operator, None].append(one)
        window = min(windows - 1, int(one.row.elapsed_s / length * windows)) if length else 0
        groups[one.row.operator, window].append(one)
    found = [_credit(name, number, group, length, windows) for (name, number), group in groups.items()]
    worth = {c.operator: (-(c.gain_rate or 0.0), -c.trials) for c in found if c.window is None}
    return sorted(found, key=lambda c: (worth[c.operator], c.operator, -1 if c.window is None else c.window))


@dataclass(frozen=True)
class ComparedCandidate:
    """A candidate compared with its parents and with all candidates before it."""

    row: Any
    better: bool | None
    """Whether it is faster than the fastest of its parents; None where no parent has a time. Compared with a slower parent,
    an operator that combines two would get the credit for what it took from the faster one."""
    best: bool
    """Whether it is the first of its task with a time, or faster than all before."""
    time: RaceTime | None
    """Its time in the search; None without one."""
    improvement: float
    """Logarithm of the task's best time before over its own; 0 for the first one, and for one that is not better."""


def compare_with_parents(connection: Connection, run_id: int, task: int | None = None) -> list[ComparedCandidate]:
    """The candidates of a run, or of one of its tasks, compared with their parents, in the order of proposal.

    A candidate of known machine code has the known time as a parent; as a child it repeats, and is not better. A disturbed
    time is a best time only where its task has no other, as in the search, and gains nothing.
    """
    rows, parents = read_tried(connection, run_id, task), parents_by_child(connection, run_id)
    times = search_times(connection, run_id, [row.id for row in rows])
    own = {key: time for key, time in times.items() if time.timed == key}
    clean = {row.task for row in rows if row.id in own and not own[row.id].disturbed}
    best: dict[int, float] = {}
    home = {row.id: row.task for row in rows}
    found = []
    for row in rows:
        time, before, improvement, is_best = own.get(row.id), best.get(row.task), 0.0, False
        if time is not None and not (time.disturbed and row.task in clean) and (before is None or time.ratio < before):
            is_best = True
            improvement = math.log(before / time.ratio) if before is not None and not time.disturbed else 0.0
            best[row.task] = time.ratio
        known = [times[parent].ratio for parent in parents.get(row.id, ()) if parent in times and home[parent] == row.task]
        better = time is not None and time.ratio < min(known) if known else None
        found.append(ComparedCandidate(row, better, is_best, times.get(row.id), improvement))
    return found


def parents_by_child(connection: Connection, run_id: int) -> dict[int, list[int]]:
    """Keys of the parents of each candidate of a run that has any, by its key; the main line first."""
    found: dict[int, list[int]] = defaultdict(list)
    query = select(_p.child_id, _p.parent_id).where(_p.child_id.between(*key_range(run_id)))
    for child, parent in connection.execute(query.order_by(_p.child_id, _p.position)):
        found[child].append(parent)
    return found


def _credit(
    operator: str, window: int | None, made: list[ComparedCandidate], length: float, windows: int
) -> OperatorCredit:
    compared = [t.better for t in made if t.better is not None]
    better = sum(compared)
    gain, seconds = sum(t.improvement for t in made), sum(t.row.spent_s for t in made)
    return OperatorCredit(
        operator=operator,
        window=window,
        from_s=0.0 if window is None else length * window / windows,
        to_s=length if window is None else length * (window + 1) / windows,
        trials=len(made),
        passed=sum(t.row.status in PASSED for t in made),
        new_code=sum(t.row.status == Status.OK.value for t in made),
        compared=len(compared),
        better=better,
        success=better / len(compared) if compared else None,
        improvements=sum(t.improvement > 0 for t in made),
        gain=math.exp(gain),
        seconds=seconds,
        gain_rate=100 * gain / seconds if seconds else None,
    )
