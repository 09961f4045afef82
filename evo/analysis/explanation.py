"""What made a candidate fast: the gain of each of its differences from where it began, as far as that was measured.

An edit is a change of parameters that can only change together: one parameter, and the conditional ones that come and go
with it. The measured genomes that have some of the edits and nothing else are points between the two ends; two of them that
differ in one edit are a measurement of that edit's gain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from evo.analysis.candidates import CandidateRecord, read_candidate, resolve_candidate
from evo.analysis.times import Gain, RaceTime, gain_between, search_times
from evo.errors import StoreError
from evo.evaluation import PASSED, holds_one
from evo.lineage import models as m
from evo.lineage.models import ORDERS_PER_RUN, key_range
from evo.lineage.store import Store
from evo.problem.genome import Change, Genome
from evo.problem.space import Value

__all__ = ["EditCredit", "Explanation", "Marginal", "edits_between", "explain"]

_c, _p = m.Candidate, m.Parentage


@dataclass(frozen=True, kw_only=True)
class Marginal:
    """One edit's gain with everything else equal: the same genome without it and with it, both measured. edits: how many of
    the others were made already."""

    without: str
    with_: str
    edits: int
    gain: float
    low: float | None
    high: float | None
    same_code: bool


@dataclass(frozen=True, kw_only=True)
class EditCredit:
    """One change on the way, and what it is worth.

    gain: the mean of its measured marginal gains, first over those with equally many other edits made, then over these
    numbers, as Shapley's value is; with all subsets measured it would be that. None: not measured. low, high: from the
    least to the greatest that any of these pairs allows, with their intervals: both noise and how it depends on the rest.
    same_code: in every pair the machine code is the same, so that the edit gains nothing for certain.
    disturbed: something slowed the device down while one of a pair was timed.
    alone: added to the start with nothing else; last: taken out of the candidate with nothing else.
    since: the first candidate of the main line that had it.
    """

    change: Change
    gain: float | None
    low: float | None
    high: float | None
    tie: bool | None
    same_code: bool
    disturbed: bool
    alone: float | None
    last: float | None
    pairs: int
    marginals: tuple[Marginal, ...]
    since: str | None
    since_order: int | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Edits by what they are worth, the unmeasured ones last.

    base: what it is compared with, None as `base_id` where that genome was not measured. gain: of the candidate over the
    base. disturbed: something slowed the device down while one of the two was timed. product: of the measured edits' gains;
    rest: what is left of the gain for the unmeasured ones, and for what edits do together and not alone. None where the
    base has no time.
    """

    id: str
    run: str
    kernel: str
    target: str
    arch: str
    device: str
    workload: str
    ratio: float
    median_us: float | None
    disturbed: bool
    base: dict[str, Value]
    base_id: str | None
    base_from: str
    base_us: float | None
    gain: float | None
    low: float | None
    high: float | None
    product: float | None
    rest: float | None
    edits: tuple[EditCredit, ...]
    measured_between: int


def explain(
    store: Store,
    prefix: str,
    base: Genome | str | None = None,
    *,
    carriers: Mapping[str, Collection[str]] | None = None,
    base_from: str = "",
) -> Explanation:
    """Edit by edit from `base` to the candidate, by what its run measured.

    base: a genome, or the name of a candidate for the same kernel and target; if left out, the first candidate of the same
    run and workload, which is the space's default.
    carriers: the parameters that decide whether a conditional one is there, as its space says; without it that is inferred
    from the run's candidates.
    Raises UnknownNameError, or StoreError for an ambiguous prefix and for a candidate without a time.
    """
    record = read_candidate(store, prefix)
    if isinstance(base, str):
        start, base_from = _named_base(read_candidate(store, base), record), "the candidate named"
    with store.reading() as connection:
        key = resolve_candidate(connection, record.id)
        run_id = key // ORDERS_PER_RUN
        line = _main_line(connection, key)
        if base is None:
            start, base_from = _first(connection, run_id, record.task), base_from or "its run's first candidate"
        elif isinstance(base, Genome):
            start, base_from = base, base_from or "the given values"
        measured = _measured(connection, run_id, record.task)
        own = search_times(connection, run_id, [key]).get(key)
    if own is None:
        raise StoreError(
            f"candidate {record.id} has no time, so there is no gain to explain; see: {store.command('show', record.id)}"
        )
    edits = edits_between(start, Genome.of(record.parameters), list(measured), carriers)
    between = {
        made: found for genome, found in measured.items() if (made := _edits_made(genome, start, edits)) is not None
    }
    everything = frozenset(range(len(edits)))
    between[everything] = (record.id, own)  # of equal genomes, the one that was asked for
    base_id, base_time = between.get(frozenset(), (None, None))
    total = gain_between(base_time, own)
    credits = [_credit(i, edits[i], between, everything, line) for i in everything]
    credits.sort(key=lambda c: (c.gain is None, -(c.gain or 0.0), sorted(c.change)))
    known = [c.gain for c in credits if c.gain is not None]
    product = math.prod(known) if known else None
    return Explanation(
        id=record.id,
        run=record.run,
        kernel=record.kernel,
        target=record.target,
        arch=record.arch,
        device=record.device,
        workload=record.workload,
        ratio=own.ratio,
        median_us=own.median_us,
        disturbed=own.disturbed or bool(base_time and base_time.disturbed),
        base=start.parameters,
        base_id=base_id,
        base_from=base_from,
        base_us=base_time.median_us if base_time else None,
        gain=total.gain if total else None,
        low=total.low if total else None,
        high=total.high if total else None,
        product=product,
        rest=total.gain / product if total and product else None,
        edits=tuple(credits),
        measured_between=len(between),
    )


_Found = tuple[str, RaceTime]
"""Public id and time of a measured genome."""


def _named_base(base: CandidateRecord, end: CandidateRecord) -> Genome:
    if (base.kernel, base.target) != (end.kernel, end.target):
        raise StoreError(
            f"{base.id} is a candidate for {base.kernel} on {base.target}, and {end.id} for {end.kernel} on {end.target}:"
            " there is no way from one to the other"
        )
    return Genome.of(base.parameters)


def _main_line(connection: Connection, key: int) -> list[tuple[str, int, Genome]]:
    """Public id, order and genome of the candidate's first parents and itself, from the root on: one recursive query."""
    line = select(_c.id).where(_c.id == key).cte("line", recursive=True)
    line = line.union(select(_p.parent_id).join_from(_p, line, _p.child_id == line.c.id).where(_p.position == 0))
    query = select(_c.public_id, _c.order, _c.genome).where(_c.id.in_(select(line.c.id))).order_by(_c.id)
    return [(name, order, Genome.from_json(genome)) for name, order, genome in connection.execute(query)]


def _first(connection: Connection, run_id: int, task: int) -> Genome:
    """The genome that a task's search began with."""
    query = select(_c.genome).where(_c.id.between(*key_range(run_id)), _c.task == task).order_by(_c.id).limit(1)
    return Genome.from_json(connection.execute(query).scalar_one())


def _measured(connection: Connection, run_id: int, task: int) -> dict[Genome, _Found]:
    """Every genome of a task that has a time, the first of equal ones."""
    rows = connection.execute(
        select(_c.id, _c.public_id, _c.genome)
        .where(_c.id.between(*key_range(run_id)), _c.task == task, _c.status.in_(PASSED))
        .order_by(_c.id)
    ).all()
    times = search_times(connection, run_id, [row.id for row in rows])
    found: dict[Genome, _Found] = {}
    for key, name, genome in rows:
        if key in times:
            found.setdefault(Genome.from_json(genome), (name, times[key]))
    return found


def edits_between(
    start: Genome,
    end: Genome,
    seen: Collection[Genome] = (),
    carriers: Mapping[str, Collection[str]] | None = None,
) -> tuple[Change, ...]:
    """The edits that lead from one genome to the other, by name; the parameter that leads an edit is named first in it.

    carriers: for each conditional parameter, those that decide whether it is there. Without them, a parameter that only one
    of the two genomes has is taken to come with the changed one whose value told, in every genome `seen`, whether it was
    there.
    """
    change = start.difference(end)
    leader: dict[str, str] = {}
    for name in change:
        if None not in change[name]:
            continue
        if carriers is None:
            others = [o for o in change if o != name and None not in change[o] and _tells(o, name, seen)]
        else:
            others = [other for other in _reachable(name, carriers) if other in change]
        if others:
            leader[name] = others[0]
    groups: dict[str, Change] = defaultdict(dict)
    for name in change:
        groups[_root(name, leader)][name] = change[name]
    return tuple({lead: change[lead], **group} for lead, group in groups.items())


def _reachable(name: str, carriers: Mapping[str, Collection[str]]) -> list[str]:
    """The parameters that decide whether one is there, directly and through others, the nearest first."""
    found: list[str] = []
    waiting = list(carriers.get(name, ()))
    while waiting:
        one = waiting.pop(0)
        if one not in found:
            found.append(one)
            waiting += carriers.get(one, ())
    return found


def _root(name: str, leader: Mapping[str, str]) -> str:
    passed = {name}
    while name in leader and leader[name] not in passed:
        name = leader[name]
        passed.add(name)
    return name


def _tells(other: str, name: str, seen: Collection[Genome]) -> bool:
    """Whether the value of `other` decided, in all genomes seen, whether `name` was there."""
    present: dict[str, bool] = {}
    for genome in seen:
        values = genome.parameters
        told = repr(values.get(other))
        if present.setdefault(told, name in values) != (name in values):
            return False
    return len(set(present.values())) == 2


def _edits_made(genome: Genome, start: Genome, edits: Sequence[Change]) -> frozenset[int] | None:
    """Numbers of the edits that a genome has; None for a genome that does not lie between the two ends."""
    change = start.difference(genome)
    made = set()
    for number, edit in enumerate(edits):
        own = {name: change.pop(name) for name in edit if name in change}
        if own and own != edit:
            return None
        if own:
            made.add(number)
    return None if change else frozenset(made)


def _credit(
    index: int,
    edit: Change,
    between: Mapping[frozenset[int], _Found],
    everything: frozenset[int],
    line: Sequence[tuple[str, int, Genome]],
) -> EditCredit:
    """between: the measured genomes, by the edits made in them."""
    marginals, disturbed = [], False
    by_size: dict[int, list[float]] = defaultdict(list)
    bounds: list[float] = []
    ends: dict[int, Gain] = {}
    for subset, (name, before) in between.items():
        if index in subset or subset | {index} not in between:
            continue
        with_, after = between[subset | {index}]
        gain = gain_between(before, after)
        if gain is None:
            continue
        by_size[len(subset)].append(math.log(gain.gain))
        disturbed = disturbed or before.disturbed or after.disturbed
        bounds += [gain.gain if limit is None else limit for limit in (gain.low, gain.high)]
        if len(subset) in (0, len(everything) - 1):
            ends[len(subset)] = gain
        marginals.append(
            Marginal(
                without=name,
                with_=with_,
                edits=len(subset),
                gain=gain.gain,
                low=gain.low,
                high=gain.high,
                same_code=gain.same_code,
            )
        )
    since, since_order = next(((name, order) for name, order, genome in line if _has(genome, edit)), (None, None))
    means = [sum(logs) / len(logs) for logs in by_size.values()]
    alone, last = ends.get(0), ends.get(len(everything) - 1)
    low, high = (min(bounds), max(bounds)) if bounds else (None, None)
    return EditCredit(
        change=edit,
        gain=math.exp(sum(means) / len(means)) if means else None,
        low=low,
        high=high,
        tie=None if low is None or high is None else holds_one(low, high),
        disturbed=disturbed,
        same_code=bool(marginals) and all(k.same_code for k in marginals),
        alone=alone.gain if alone else None,
        last=last.gain if last else None,
        pairs=len(marginals),
        marginals=tuple(sorted(marginals, key=lambda k: k.edits)),
        since=since,
        since_order=since_order,
    )


def _has(genome: Genome, edit: Change) -> bool:
    values = genome.parameters
    return all(values.get(name) == after for name, (_, after) in edit.items())
