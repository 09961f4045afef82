"""Samplers decide what to try next. One module each, found by its name; it defines `SAMPLER`, a class.

A sampler is deterministic: its seed and the sequence of `ask` and `tell` calls decide every proposal. It reads
no clock and imports no target, gate or timing. The search asks with several proposals outstanding, and tells
results in the order of the proposals. `Unseen` is what all samplers begin with and remember.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from evo.discovery import fault, find_plugin, is_file
from evo.errors import EvoError, UnknownNameError, UsageError
from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Point, Space

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

_RANDOM_ATTEMPTS = 256
"""Random points that must all be known before the rest of the space is walked instead."""
_ENUMERABLE = 1 << 18
"""Upper bound of points up to which walking the whole space takes seconds at worst, all told."""


class Exhausted(Exception):
    """Raised by `ask` when the whole space has been proposed, or nothing new could be found."""


class Sampler(Protocol):
    def ask(self, order: int) -> Proposal:
        """A genome never proposed before, to be known as `order`. Parents are orders told before.

        Raises Exhausted.
        """
        ...

    def adopt(self, order: int, migrant: Proposal) -> None:
        """Takes a legal genome from elsewhere, never proposed before, for a proposal of its own, to be known as `order`."""
        ...

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        """The result of one proposal; called once each, in order.

        score: the minimised figure (time relative to the baseline); None for a candidate that did not pass.
        duplicate_of: order of an earlier candidate with equal machine code; the score is that one's.
        """
        ...


SamplerFactory = Callable[[Space, int, Mapping[str, object]], Sampler]


_CALLS = ("ask", "adopt", "tell")


def find_sampler(name: str) -> SamplerFactory:
    """name: of a plug-in, or the path of a file. Raises UnknownNameError, and UsageError for a file that is wrong."""
    found = find_plugin("sampler", name)
    if not callable(found) or (isinstance(found, type) and not all(hasattr(found, call) for call in _CALLS)):
        raise UsageError(f"{name}: SAMPLER must be a class with the methods {', '.join(_CALLS)}, got {found!r}")
    return cast(SamplerFactory, partial(_Own, name, found) if is_file(name) else found)


class _Own:
    """A sampler of a file of one's own. What goes wrong in it is said with its line."""

    def __init__(self, name: str, make: SamplerFactory, space: Space, seed: int, options: Mapping[str, object]) -> None:
        self._name, self._proposed = name, set[Genome]()
        self._sampler: Any = self._call(make, (space, seed, options))
        if lacking := [call for call in _CALLS if not hasattr(self._sampler, call)]:
            raise UsageError(f"{name}: SAMPLER makes {self._sampler!r}, which has no {lacking[0]}")

    def ask(self, order: int) -> Proposal:
        proposal = self._call(self._sampler.ask, (order,))
        if not isinstance(proposal, Proposal):
            raise UsageError(f"{self._name}: ask must return a Proposal, got {proposal!r}")
        if proposal.genome in self._proposed:
            raise UsageError(f"{self._name}: ask proposed {proposal.genome} again; it must propose a genome once only")
        self._proposed.add(proposal.genome)
        return proposal

    def adopt(self, order: int, migrant: Proposal) -> None:
        self._proposed.add(migrant.genome)
        self._call(self._sampler.adopt, (order, migrant))

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        self._call(self._sampler.tell, (order, score, duplicate_of))

    def _call(self, function: Callable[..., Any], arguments: Sequence[object]) -> Any:
        try:
            return function(*arguments)
        except (EvoError, Exhausted):
            raise
        except Exception as error:
            raise fault(self._name, error) from error


def read_options(
    sampler: str, config: type[Config], options: Mapping[str, object], others: Sequence[str] = ()
) -> Config:
    """`config` with its defaults replaced by `options`, whose values must have the defaults' types. others: further names
    that the sampler knows.

    Raises UnknownNameError or UsageError.
    """
    defaults, read = {f.name: f.default for f in fields(config)}, dict(options)
    for name, value in options.items():
        if name not in defaults:
            raise UnknownNameError(f"option of sampler {sampler}", name, [*defaults, *others])
        wanted = type(defaults[name])
        if wanted is float and type(value) is int:
            read[name] = float(value)
        elif type(value) is not wanted:  # a bool is an int to isinstance
            raise UsageError(
                f"option {name!r} of sampler {sampler} must be of type {wanted.__name__}, such as"
                f" {defaults[name]}; got {value!r}"
            )
    return config(**read)


def at_least(config: DataclassInstance, low: int, *names: str) -> None:
    """Raises UsageError if one of the named fields is less than `low`."""
    for name in names:
        if (value := getattr(config, name)) < low:
            raise UsageError(f"sampler option {name!r} must be at least {low}, got {value}")


class Unseen:
    """The genomes of `space` that have not been proposed, and ways to find one."""

    def __init__(self, space: Space, *, default: bool = True) -> None:
        """default: whether the space's default comes first."""
        self._space = space
        self._first = deque(Proposal(genome=Genome.of(point), operator="start") for point in space.initial_points)
        if default:
            put = self._first.appendleft if space.default_first else self._first.append
            put(Proposal(genome=Genome.of(space.complete(space.default)), operator="default"))
        self._proposed: set[Genome] = set()
        self._sequence: list[Genome] = []
        self._rest: Iterator[Point] | None = None

    def __contains__(self, genome: Genome) -> bool:
        """Whether it is still unseen."""
        return genome not in self._proposed

    def remember(self, genome: Genome) -> None:
        self._proposed.add(genome)
        self._sequence.append(genome)

    def first(self) -> Proposal | None:
        """The default and the given points, one at a time, without those proposed meanwhile; None at their end."""
        while self._first:
            if (proposal := self._first.popleft()).genome in self:
                return proposal
        return None

    def propose(self, rng: random.Random) -> Proposal:
        """A legal genome never proposed, at random as long as random points are mostly new.

        Then the rest of a small space in declaration order, or the neighbours, in a large one, of all proposed points.
        Raises Exhausted when there are none either.
        """
        if self._rest is None:
            for _ in range(_RANDOM_ATTEMPTS):
                genome = Genome.of(self._space.sample(rng))
                if genome in self:
                    return Proposal(genome=genome, operator="random")
            self._rest = self._walk()
        for point in self._rest:
            genome = Genome.of(point)
            if genome in self:
                return Proposal(genome=genome, operator="random")
        raise Exhausted(f"all {len(self._proposed)} legal points that could be found have been proposed")

    def _walk(self) -> Iterator[Point]:
        if self._space.cardinality <= _ENUMERABLE:
            yield from self._space.points()
            return
        yield self._space.complete(self._space.default)
        for genome in self._sequence:  # grows while it is walked
            yield from self._space.neighbours(genome.parameters)
