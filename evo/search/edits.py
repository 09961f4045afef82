"""The way from one genome to another as separate edits, and which genomes lie between the two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evo.problem.genome import Genome
from evo.problem.space import Value

__all__ = ["Change", "Edit", "Lattice", "edits_between"]

Change = dict[str, tuple[Value | None, Value | None]]
"""What differs, as {name: (parent's value, own value)}; None where absent."""


@dataclass(frozen=True)
class Edit:
    """Parameters that can only change together: one, and the conditional ones that come and go with it.

    change: {name: (value at the start, value at the end)}, None where absent.
    """

    change: Change

    def made_in(self, genome: Genome) -> bool:
        """Whether the genome has the end's values."""
        return _has(genome, {name: after for name, (_, after) in self.change.items()})

    def unmade_in(self, genome: Genome) -> bool:
        """Whether it has the start's."""
        return _has(genome, {name: before for name, (before, _) in self.change.items()})


def _has(genome: Genome, values: Mapping[str, Value | None]) -> bool:
    found = genome.parameters
    return all(_equal(found.get(name), value) for name, value in values.items())


def _equal(one: Value | None, other: Value | None) -> bool:
    return type(one) is type(other) and one == other  # 1 == True in Python


def edits_between(
    start: Genome,
    end: Genome,
    seen: Collection[Genome] = (),
    carriers: Mapping[str, Collection[str]] | None = None,
) -> tuple[Edit, ...]:
    """What has to be done to the one to have the other, by name.

    carriers: for each conditional parameter those that decide whether it is there. Without them a parameter that only one
    of the two genomes has is taken to come with the changed one whose values told, in every genome `seen`, whether it
    was there.
    """
    a, b = start.parameters, end.parameters
    change: Change = {
        name: (a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if not _equal(a.get(name), b.get(name))
    }
    leader: dict[str, str] = {}
    for name, (before, after) in change.items():
        if before is None or after is None:
            others = [other for other in change if other != name and None not in change[other]]
            if carriers is not None:
                others = [other for other in _reachable(name, carriers) if other in change]
            else:
                others = [other for other in others if _tells(other, name, seen)]
            if others:
                leader[name] = others[0]
    groups: dict[str, Change] = defaultdict(dict)
    for name in change:
        groups[_root(name, leader)][name] = change[name]
    # The parameter that leads a group is named first.
    return tuple(
        Edit({name: groups[lead][name] for name in (lead, *(n for n in groups[lead] if n != lead))})
        for lead in groups
    )


def _reachable(name: str, carriers: Mapping[str, Collection[str]]) -> list[str]:
    """What decides whether a parameter is there, directly and through others, the nearest first."""
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


def _tells(other: str, name: str, seen: Iterable[Genome]) -> bool:
    """Whether the value of `other` has decided, in all that was seen, whether `name` is there."""
    present: dict[str, bool] = {}
    for genome in seen:
        values = genome.parameters
        told = repr(values.get(other))
        if present.setdefault(told, name in values) != (name in values):
            return False
    return len(set(present.values())) == 2


class Lattice:
    """The genomes that have some of the edits and nothing else; each stands for the set of edits that it has."""

    def __init__(self, start: Genome, end: Genome, edits: Sequence[Edit]) -> None:
        self._edits = edits
        changed = {name for edit in edits for name in edit.change}
        self._changed = changed
        self._common = {n: v for n, v in start.parameters.items() if n not in changed}

    def place(self, genome: Genome) -> frozenset[int] | None:
        """Numbers of the edits that a genome has; None for one that does not lie between the two ends."""
        values = genome.parameters
        rest = {n: v for n, v in values.items() if n not in self._changed}
        if rest.keys() != self._common.keys() or not all(_equal(rest[n], self._common[n]) for n in rest):
            return None
        made = set()
        for number, edit in enumerate(self._edits):
            if edit.made_in(genome):
                made.add(number)
            elif not edit.unmade_in(genome):
                return None
        return frozenset(made)
