"""Random search: legal points, uniform over the conditional tree, none twice. What it is to start from comes first."""

import random
from collections.abc import Mapping

from evo.errors import UnknownNameError
from evo.evaluation import Proposal
from evo.problem.space import Space
from evo.search.samplers import Unseen


class RandomSampler:
    def __init__(self, space: Space, seed: int, options: Mapping[str, object]) -> None:
        for name in options:  # it has none
            raise UnknownNameError("option of sampler random", name, ())
        self._rng = random.Random(seed)
        self._unseen = Unseen(space, default=False)

    def ask(self, order: int) -> Proposal:
        proposal = self._unseen.first() or self._unseen.propose(self._rng)
        self._unseen.remember(proposal.genome)
        return proposal

    def adopt(self, order: int, migrant: Proposal) -> None:
        self._unseen.remember(migrant.genome)

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        """Random search learns nothing."""


SAMPLER = RandomSampler
