"""The explanation of a candidate's speed: the gain of each of its differences from a base, as far as that was measured.

An edit is a change of parameters that can only change together: one parameter, and the conditional ones that come and go
with it. Measured genomes that have some of the edits and no other difference lie between the base and the candidate. Two of
them that differ in one edit measure the gain of that edit.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from evo.analysis.candidates import Subject, read_candidate
from evo.analysis.descent import Kin, read_family
from evo.analysis.failures import read_tried
from evo.analysis.times import RaceTime, gain_between, search_times
from evo.errors import StoreError
from evo.evaluation import PASSED, Gain
from evo.lineage.models import candidate_key
from evo.lineage.store import Store
from evo.problem.genome import Change, Genome
from evo.problem.space import Value


@dataclass(frozen=True, kw_only=True)
class Marginal(Gain):
    """The gain of an edit with everything else equal, from two measured genomes. without, with_: the candidates without it
    and with it. edits: number of the other edits that both have."""

    without: str
    with_: str
    edits: int


@dataclass(frozen=True, kw_only=True)
class EditCredit:
    """One edit, and what it is worth.

    gain: the mean of its marginal gains, first over those with equally many other edits, then over these numbers; with all
    subsets measured it would be Shapley's value. None where no pair was measured. low, high: the least and the greatest
    gain within the intervals of any pair, which so tell both noise and how the gain depends on other edits.
    same_code: whether the machine code is the same in every pair, so that the edit certainly gains nothing.
    disturbed: whether something slowed the device down while one of a pair was timed.
    alone: the gain when it is added to the base alone; last: when it is added as the last of all edits.
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
class Explanation(Subject):
    """The edits between a base and the candidate, the most worth first and the unmeasured ones last.

    base: the genome that it is compared with; base_id: its candidate, None where it was not measured. gain: the candidate's
    over the base, None where the base has no time. disturbed: whether something slowed the device down while one of the two
    was timed. product: that of the measured edits' gains; rest: the part of the gain that is left for the unmeasured edits
    and for what edits do only together.
    """

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
    candidate: str,
    base: Genome | Mapping[str, Value] | str | None = None,
    *,
    base_from: str = "",
) -> Explanation:
    """The explanation of a candidate by what its run measured. Raises StoreError for a candidate without a time.

    base: parameters, or the name of a candidate for the same kernel and target; if left out, the first candidate of the
    same run and workload, which is the space's default. base_from: words for a given base.
    """
    record = read_candidate(store, candidate)
    run_id = store.run(record.run).id
    with store.reading() as connection:
        tried = read_tried(connection, run_id, record.task)
        passed = [row for row in tried if row.status in PASSED]
        times = search_times(connection, run_id, [row.id for row in passed])
    own = times.get(candidate_key(run_id, record.order))
    if own is None:
        raise StoreError(
            f"candidate {record.id} has no time, so there is no gain to explain; see: {store.command('show', record.id)}"
        )
    if base is None:
        start, base_from = Genome.from_json(tried[0].genome), base_from or "its run's first candidate"
    elif isinstance(base, str):
        named = read_candidate(store, base)
        if (named.kernel, named.target) != (record.kernel, record.target):
            raise StoreError(
                f"{named.id} is a candidate for {named.kernel} on {named.target}, and {record.id} for {record.kernel} on"
                f" {record.target}: there is no way from one to the other"
            )
        start, base_from = Genome.of(named.parameters), "the candidate named"
    else:
        start = base if isinstance(base, Genome) else Genome.of(base)
        base_from = base_from or "the given values"
    measured: dict[Genome, _Found] = {}
    for row in passed:
        if row.id in times:
            measured.setdefault(Genome.from_json(row.genome), (row.public_id, times[row.id]))
    edits = edits_between(start, Genome.of(record.parameters), [Genome.from_json(row.genome) for row in tried])
    between = {
        made: found for genome, found in measured.items() if (made := _edits_made(genome, start, edits)) is not None
    }
    everything = frozenset(range(len(edits)))
    between[everything] = (record.id, own)  # another candidate may have an equal genome
    base_id, base_time = between.get(frozenset(), (None, None))
    total = gain_between(base_time, own)
    line = [kin for kin in read_family(store, record.id, descendants=0).members if kin.main_line]
    credits = [_credit(i, edits, between, line) for i in everything]
    credits.sort(key=lambda c: (c.gain is None, -(c.gain or 0.0), sorted(c.change)))
    known = [c.gain for c in credits if c.gain is not None]
    product = math.prod(known) if known else None
    return Explanation(
        **{name: getattr(record, name) for name in Subject.__dataclass_fields__},
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
"""The public id and the time of a measured genome."""


def edits_between(start: Genome, end: Genome, seen: Collection[Genome] = ()) -> tuple[Change, ...]:
    """The edits that lead from one genome to the other; the parameter that leads an edit is the first in it.

    A parameter that only one of the two genomes has is taken to depend on the changed parameter whose value told, in every
    genome `seen`, whether it was there.
    """
    change = start.difference(end)
    in_both = [name for name in change if None not in change[name]]
    groups: dict[str, Change] = defaultdict(dict)
    for name in change:
        others = () if name in in_both else (other for other in in_both if _tells(other, name, seen))
        lead = next(iter(others), name)
        groups[lead][name] = change[name]
    return tuple({lead: change[lead], **group} for lead, group in groups.items())


def _tells(other: str, name: str, seen: Collection[Genome]) -> bool:
    """Whether the value of parameter `other` decided, in all genomes seen, whether parameter `name` was there."""
    present: dict[str, bool] = {}
    for genome in seen:
        values = genome.parameters
        told = repr(values.get(other))
        if present.setdefault(told, name in values) != (name in values):
            return False
    return len(set(present.values())) == 2


def _edits_made(genome: Genome, start: Genome, edits: Sequence[Change]) -> frozenset[int] | None:
    """The numbers of the edits that a genome has; None for a genome that does not lie between the two ends."""
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
    index: int, edits: Sequence[Change], between: Mapping[frozenset[int], _Found], line: Sequence[Kin]
) -> EditCredit:
    """The credit of an edit. between: the measured genomes by their edits. line: the main line from its root."""
    edit, marginals, disturbed = edits[index], [], False
    for subset, (name, before) in between.items():
        if index in subset or subset | {index} not in between:
            continue
        with_, after = between[subset | {index}]
        if gain := gain_between(before, after):
            marginals.append(Marginal(**vars(gain), without=name, with_=with_, edits=len(subset)))
            disturbed = disturbed or before.disturbed or after.disturbed
    marginals.sort(key=lambda k: k.edits)
    by_size: dict[int, list[float]] = defaultdict(list)
    for k in marginals:
        by_size[k.edits].append(math.log(k.gain))
    means = [sum(logs) / len(logs) for logs in by_size.values()]
    bounds = [k.gain if limit is None else limit for k in marginals for limit in (k.low, k.high)]
    low, high = (min(bounds), max(bounds)) if bounds else (None, None)
    since = next((k for k in line if all(k.parameters.get(n) == after for n, (_, after) in edit.items())), None)
    return EditCredit(
        change=edit,
        gain=math.exp(sum(means) / len(means)) if means else None,
        low=low,
        high=high,
        tie=None if low is None or high is None else low <= 1.0 <= high,
        disturbed=disturbed,
        same_code=bool(marginals) and all(k.same_code for k in marginals),
        alone=next((k.gain for k in marginals if k.edits == 0), None),
        last=next((k.gain for k in marginals if k.edits == len(edits) - 1), None),
        pairs=len(marginals),
        marginals=tuple(marginals),
        since=since.id if since else None,
        since_order=since.order if since else None,
    )
