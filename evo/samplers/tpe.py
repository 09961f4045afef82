"""Tree-structured Parzen estimator (Optuna), made legal, and never the same point twice."""

from __future__ import annotations

import random
from collections.abc import Mapping

from evo.evaluation import Proposal
from evo.genome import Genome
from evo.operators._repair import repair
from evo.operators.mutation import Mutation
from evo.samplers import Result
from evo.samplers._parzen import ParzenModel
from evo.samplers._unseen import Unseen
from evo.space import Space

__all__ = ["SAMPLER", "TpeSampler"]

class TpeSampler:
    """The space's default, random points, then suggestions of the estimator."""

    def __init__(self, space: Space, seed: int, options: Mapping[str, object]) -> None:
        self._space = space
        self._rng = random.Random(seed)
        self._unseen = Unseen(space)
        self._model = ParzenModel(space, seed, options.get('history',256))
        self._startup = options.get('startup',10)
        self._reask = options.get('reask',4)
        self._illegal = options.get('illegal','repair')
        self._tickets: dict[int, int] = {}
        self._told = 0
        self._mutation = Mutation()

    def ask(self, order: int) -> Proposal:
        genome, operator = self._propose()
        self._unseen.remember(genome)
        self._tickets[order] = self._model.pending(genome.parameters)
        return Proposal(genome=genome, operator=operator)

    def tell(self, result: Result) -> None:
        self._told += 1
        self._model.learn(self._tickets.pop(result.order), result.score)

    def _propose(self) -> tuple[Genome, str]:
        if not self._unseen._proposed:
            default = self._space.complete(self._space.default)
            if self._space.is_legal(default):
                return Genome.of(default), "default"
        if self._told < self._startup:
            return self._unseen.draw(self._rng), "random"
        genome = None
        for _ in range(1 + self._reask):
            point = self._model.suggest()
            if self._illegal=='tell' and not self._space.is_legal(point):
                self._model.learn(self._model.pending(point),None)
                continue
            legal = repair(self._rng, self._space, point)
            if legal is not None:
                genome = Genome.of(legal)
                if genome in self._unseen:
                    return genome, "tpe"
        for _ in range(32 if genome is not None else 0):
            near = self._mutation(self._rng, self._space, [genome])
            if near is not None and near in self._unseen:
                return near, "tpe"
        return self._unseen.draw(self._rng), "random"


SAMPLER = TpeSampler
