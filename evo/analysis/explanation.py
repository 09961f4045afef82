"""What made a candidate fast: which of its differences from where it began carry the gain, as far as that was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from evo.analysis.figures import search_figures
from evo.analysis.gains import Figure, Gain, gain_between
from evo.analysis.relatives import resolve_candidate
from evo.errors import StoreError
from evo.evaluation import PASSED, holds_one
from evo.lineage import models as m
from evo.lineage.models import key_range
from evo.lineage.store import Store
from evo.problem.genome import Genome
from evo.problem.space import Value
from evo.search.edits import Change, Edit, Lattice, edits_between

__all__ = ["EditCredit", "Explanation", "Marginal", "explain"]

_c, _i, _r, _p = m.Candidate, m.Task, m.Run, m.Parentage


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

    base: a genome, or the name of a candidate for the same kernel and target; if left out the first candidate of the same
    run and workload, which is the space's default.
    carriers: which parameters decide whether a conditional one is there, as its space says; without it that is read from
    the run's candidates.
    Raises UnknownNameError, or StoreError for an ambiguous prefix and for a candidate without a time.
    """
    with store.reading() as connection:
        key = resolve_candidate(connection, prefix)
        about: Any = connection.execute(
            select(
                _c.public_id,
                _c.genome,
                _c.run_id,
                _c.task,
                _r.name,
                _r.kernel,
                _r.target,
                _r.arch,
                _i.workload,
            )
            .add_columns(m.Environment.device)
            .join_from(_c, _r, _r.id == _c.run_id)
            .join(_i, (_i.run_id == _c.run_id) & (_i.number == _c.task))
            .join(m.Environment, m.Environment.id == _r.environment_id)
            .where(_c.id == key)
        ).one()
        line = _main_line(connection, key)
        if base is None:
            start, base_from = _first(connection, about), base_from or "its run's first candidate"
        elif isinstance(base, str):
            start, base_from = _genome_of(connection, base, about), "the candidate named"
        else:
            start, base_from = base, base_from or "the given values"
        measured = _measured(connection, about.run_id, about.task)
        timed = search_figures(connection, about.run_id, [key]).get(key)
    end = Genome.from_json(about.genome)
    if timed is None:
        raise StoreError(
            f"candidate {about.public_id} has no time, so there is no gain to explain; see:"
            f" {store.command('show', about.public_id)}"
        )
    edits = edits_between(start, end, list(measured), carriers)
    lattice = Lattice(start, end, edits)
    figures = {
        subset: found for genome, found in measured.items() if (subset := lattice.place(genome)) is not None
    }
    everything = frozenset(range(len(edits)))
    own = figures[everything] = (about.public_id, timed)  # of equal genomes, the one that was asked for
    before = figures.get(frozenset())
    total = gain_between(before[1] if before else None, own[1])
    credits = [_credit(i, edits[i], figures, everything, line) for i in everything]
    credits.sort(key=lambda c: (c.gain is None, -(c.gain or 0.0), sorted(c.change)))
    known = [c.gain for c in credits if c.gain is not None]
    product = math.prod(known) if known else None
    return Explanation(
        id=about.public_id,
        run=about.name,
        kernel=about.kernel,
        target=about.target,
        arch=about.arch,
        device=about.device,
        workload=about.workload,
        ratio=own[1].ratio,
        median_us=own[1].median_us,
        disturbed=own[1].disturbed or bool(before and before[1].disturbed),
        base=start.parameters,
        base_id=before[0] if before else None,
        base_from=base_from,
        base_us=before[1].median_us if before else None,
        gain=total.gain if total else None,
        low=total.low if total else None,
        high=total.high if total else None,
        product=product,
        rest=total.gain / product if total and product else None,
        edits=tuple(credits),
        measured_between=len(figures),
    )


_Found = tuple[str, Figure]


def _main_line(connection: Connection, key: int) -> list[Any]:
    """The candidate's first parents and itself, from the root on: one recursive query."""
    line = select(_c.id).where(_c.id == key).cte("line", recursive=True)
    line = line.union(
        select(_p.parent_id).join_from(_p, line, _p.child_id == line.c.id).where(_p.position == 0)
    )
    return list(
        connection.execute(
            select(_c.id, _c.public_id, _c.order, _c.genome)
            .where(_c.id.in_(select(line.c.id)))
            .order_by(_c.id)
        )
    )


def _first(connection: Connection, about: Any) -> Genome:
    genome = connection.scalar(
        select(_c.genome)
        .where(_c.id.between(*key_range(about.run_id)), _c.task == about.task)
        .order_by(_c.id)
        .limit(1)
    )
    return Genome.from_json(genome or about.genome)


def _genome_of(connection: Connection, name: str, about: Any) -> Genome:
    row: Any = connection.execute(
        select(_c.public_id, _c.genome, _r.kernel, _r.target)
        .join_from(_c, _r, _r.id == _c.run_id)
        .where(_c.id == resolve_candidate(connection, name))
    ).one()
    if (row.kernel, row.target) != (about.kernel, about.target):
        raise StoreError(
            f"{row.public_id} is a candidate for {row.kernel} on {row.target}, and {about.public_id} for {about.kernel} on"
            f" {about.target}: there is no way from one to the other"
        )
    return Genome.from_json(row.genome)


def _measured(connection: Connection, run_id: int, task: int) -> dict[Genome, _Found]:
    """Public id and time of every genome of a task that has one, the first of equal ones."""
    rows = connection.execute(
        select(_c.id, _c.public_id, _c.genome)
        .where(_c.id.between(*key_range(run_id)), _c.task == task, _c.status.in_(PASSED))
        .order_by(_c.id)
    ).all()
    figures = search_figures(connection, run_id, [row.id for row in rows])
    found: dict[Genome, _Found] = {}
    for key, name, genome in rows:
        if key in figures:
            found.setdefault(Genome.from_json(genome), (name, figures[key]))
    return found


def _credit(
    index: int,
    edit: Edit,
    figures: Mapping[frozenset[int], _Found],
    everything: frozenset[int],
    line: Iterable[Any],
) -> EditCredit:
    marginals, disturbed = [], False
    by_size: dict[int, list[float]] = defaultdict(list)
    bounds: list[float] = []
    ends: dict[int, Gain] = {}
    for subset, (name, figure) in figures.items():
        if index in subset or subset | {index} not in figures:
            continue
        with_, after = figures[subset | {index}]
        gain = gain_between(figure, after)
        if gain is None:
            continue
        by_size[len(subset)].append(math.log(gain.gain))
        disturbed = disturbed or figure.disturbed or after.disturbed
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
    since = next((row for row in line if edit.made_in(Genome.from_json(row.genome))), None)
    means = [sum(logs) / len(logs) for logs in by_size.values()]
    alone, last = ends.get(0), ends.get(len(everything) - 1)
    low, high = (min(bounds), max(bounds)) if bounds else (None, None)
    return EditCredit(
        change=edit.change,
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
        since=since.public_id if since else None,
        since_order=since.order if since else None,
    )
