"""Tree-structured Parzen estimator (Optuna), made legal, and never the same point twice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from evo.errors import EngineError
from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Space
from evo.search.operators import find_operator
from evo.search.operators._repair import repair
from evo.search.samplers import Result
from evo.search.samplers._first import first_proposals
from evo.search.samplers._options import at_least, read_options
from evo.search.samplers._parzen import ParzenModel
from evo.search.samplers._unseen import Unseen

__all__ = ["SAMPLER", "TpeConfig", "TpeSampler"]

_NEIGHBOUR_ATTEMPTS = 32
_REPAIR_STEPS = 100
"""A suggestion costs as much time as hundreds of them."""


@dataclass(frozen=True, kw_only=True)
class TpeConfig:
    """Options of the sampler.

    startup: results awaited before the estimator is asked; the default, then random points until then.
    suggestions: asked of the estimator at most for one proposal, because it repeats itself.
    history: results it is given: all of the latest and the best that make up so many.
    """

    startup: int = 10
    suggestions: int = 4
    history: int = 256

    def __post_init__(self) -> None:
        at_least(self, 1, "startup", "suggestions")
        at_least(self, 16, "history")


class TpeSampler:
    """The space's default and what it is to start from, random points, then suggestions of the estimator.

    An illegal suggestion is repaired. One that was proposed before is replaced: by another suggestion, else by
    a mutation of it, else by a random point.
    """

    def __init__(self, space: Space, seed: int, options: Mapping[str, object]) -> None:
        self._config = read_options("tpe", TpeConfig, options)
        self._space = space
        self._rng = random.Random(seed)
        self._unseen = Unseen(space)
        self._model = ParzenModel(space, seed, self._config.history)
        self._mutation = find_operator("mutation")
        self._tickets: dict[int, int] = {}
        self._told = 0
        self._given: set[int] = set()
        self._first = deque(first_proposals(space))

    @property
    def begins(self) -> bool:
        """Whether there are given points left to be proposed."""
        return bool(self._first)

    def ask(self, order: int) -> Proposal:
        proposal = self._propose()
        self._unseen.remember(proposal.genome)
        self._tickets[order] = self._model.expect(proposal.genome.parameters)
        if proposal.operator == "start":
            self._given.add(order)
        return proposal

    def tell(self, result: Result) -> None:
        if result.order not in self._tickets:
            raise EngineError(f"sampler tpe was told of candidate {result.order}, which it did not propose")
        self._told += result.order not in self._given
        self._model.learn(self._tickets.pop(result.order), result.score)

    def _propose(self) -> Proposal:
        if self._first:
            return self._first.popleft()
        if self._told < self._config.startup:
            return self._random()
        genome = None
        for _ in range(self._config.suggestions):
            point = repair(self._rng, self._space, self._model.suggest(), steps=_REPAIR_STEPS)
            if point is not None:
                genome = Genome.of(point)
                if genome in self._unseen:
                    return Proposal(genome=genome, operator="tpe")
        for _ in range(_NEIGHBOUR_ATTEMPTS if genome is not None else 0):
            near = self._mutation(self._rng, self._space, [genome]) if genome is not None else None
            if near is not None and near in self._unseen:
                return Proposal(genome=near, operator="tpe")
        return self._random()

    def _random(self) -> Proposal:
        return Proposal(genome=self._unseen.draw(self._rng), operator="random")


SAMPLER = TpeSampler
