"""Evolution: seeded by a Parzen estimator, then steady-state, with children screened by a surrogate.

Proposal 0 is the space's default; what it is to start from, some random points and suggestions of the estimator follow.
From then on every proposal is a child of the best candidates found so far. Several children are made, and the one whose
predicted improvement is largest is proposed (preselection: Jin 2011). Nothing waits for a generation.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evo.evaluation import Parent, Proposal
from evo.problem.genome import Genome
from evo.problem.space import Space
from evo.search.operators import Operator, find_operator, operator_names
from evo.search.samplers import at_least, read_options
from evo.search.samplers._points import Unseen
from evo.search.samplers._surrogate import Surrogate
from evo.search.samplers.tpe import TpeSampler

__all__ = ["SAMPLER", "Credit", "EvolutionConfig", "EvolutionSampler"]

_ROLES = {1: ("parent",), 2: ("first", "second")}
_ATTEMPTS_PER_CHILD = 4
_RESTLESS_INJECTION = 0.1
_RESTLESS_UNSCREENED = 0.5
_WORTH_OF_BEST = 1.0
_WORTH_OF_MEMBER = 0.3
_ADAPTATION = 0.05
"""Weight of the newest child against all earlier ones: a memory of about 20 children."""
_LEAST_CREDIT = 0.1
"""Credit that no operator falls below: what does not help now may later."""
_PRIOR = 0.5


@dataclass(frozen=True, kw_only=True)
class EvolutionConfig:
    """Options of the sampler.

    seeding: results known before evolution begins. Until half of them are, proposals are random (the first is the
        default), then the estimator's. Proposals made before anything is known come on top.
    population: candidates, of distinct machine code, that may become parents.
    tournament: size of a tournament for a parent.
    children: made for each proposal, of which the surrogate picks one; 1 switches the surrogate off.
    injection: share of proposals drawn at random from the whole space.
    patience: results without a better candidate after which the search looks further afield.
    """

    seeding: int = 12
    population: int = 20
    tournament: int = 3
    children: int = 8
    injection: float = 0.02
    patience: int = 60

    def __post_init__(self) -> None:
        at_least(self, 1, "seeding", "tournament", "children", "patience")
        at_least(self, 2, "population")
        at_least(self, 0.0, "injection", high=1.0)


class Credit:
    """Probability matching (Thierens 2005): shares proportional to prior weight times quality, with a floor.

    Deterministic: qualities are sums in the order of the rewards.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = list(operators)
        self._quality = {o.name: _PRIOR for o in operators}

    def pick(self, rng: random.Random) -> Operator:
        return rng.choices(self._operators, [o.weight * (_LEAST_CREDIT + self._quality[o.name]) for o in self._operators])[0]

    def reward(self, name: str, worth: float) -> None:
        """What a child of operator `name` was worth, 0 to 1; names of no operator are passed over."""
        if name in self._quality:
            self._quality[name] += _ADAPTATION * (worth - self._quality[name])


class EvolutionSampler:
    def __init__(self, space: Space, seed: int, options: Mapping[str, object]) -> None:
        self._config = config = read_options("evolution", EvolutionConfig, options)
        self._space = space
        self._rng = random.Random(seed)
        self._unseen = Unseen(space)
        self._seeder = TpeSampler(space, seed, {"startup": max(1, config.seeding // 2)})
        self._surrogate = Surrogate(space, seed)
        self._credit = Credit([find_operator(n) for n in operator_names()])
        self._population: list[tuple[float, int, Genome]] = []
        """(score, order, genome), best first; of equal scores the older one."""
        self._pending: dict[int, tuple[Proposal, int, bool]] = {}
        """By order: the proposal, its row of the surrogate, and whether it is the seeder's."""
        self._told = 0
        self._since_better = 0

    def ask(self, order: int) -> Proposal:
        seeding = self._told < self._config.seeding or self._seeder.begins
        proposal = self._seeder.ask(order) if seeding else self._evolve()
        self._unseen.remember(proposal.genome)
        self._pending[order] = proposal, self._surrogate.mark_pending(proposal.genome), seeding
        return proposal

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        proposal, row, seeding = self._pending.pop(order)
        self._told += proposal.operator != "start"
        if seeding:
            self._seeder.tell(order, score, duplicate_of)
        self._surrogate.learn(row, score)
        # A duplicate is a neutral mutation, which would crowd out a candidate that differs.
        worth = self._admit(order, proposal.genome, score if duplicate_of is None else None)
        self._credit.reward(proposal.operator, worth)

    def _admit(self, order: int, genome: Genome, score: float | None) -> float:
        """Takes a result into the population if it is among the best; what that was worth, 0 to 1."""
        config, population = self._config, self._population
        self._since_better += 1
        if self._since_better % config.patience == 0:
            del population[max(2, config.population // 4) :]  # room for newcomers to have children
        if score is None:
            return 0.0
        insort(population, (score, order, genome))
        if len(population) > config.population and population.pop()[1] == order:
            return 0.0
        if population[0][1] == order:
            self._since_better = 0
            return _WORTH_OF_BEST
        return _WORTH_OF_MEMBER

    def _evolve(self) -> Proposal:
        # Where nothing has been found for long, the surrogate is part of the reason: it is asked less.
        restless = self._since_better >= self._config.patience
        injection = max(self._config.injection, _RESTLESS_INJECTION) if restless else self._config.injection
        if not self._population or self._rng.random() < injection:
            return self._unseen.propose(self._rng)
        screened = self._surrogate.ready and not (restless and self._rng.random() < _RESTLESS_UNSCREENED)
        wanted = self._config.children if screened else 1
        children: list[Proposal] = []
        for _ in range(wanted * _ATTEMPTS_PER_CHILD):
            child = self._child()
            if child is not None and all(child.genome != c.genome for c in children):
                children.append(child)
                if len(children) == wanted:
                    break
        if not children:
            return self._unseen.propose(self._rng)
        if len(children) == 1:
            return children[0]  # also where the surrogate is not ready
        merits = self._surrogate.merits([c.genome for c in children])
        return children[max(range(len(children)), key=lambda i: merits[i])]

    def _child(self) -> Proposal | None:
        operator = self._credit.pick(self._rng)
        parents = [self._select() for _ in range(operator.arity)]
        if len({order for order, _ in parents}) < operator.arity:
            return None
        genome = operator(self._rng, self._space, [genome for _, genome in parents])
        if genome is None or genome not in self._unseen:
            return None
        roles = _ROLES[operator.arity]
        named = tuple(Parent(order=order, role=role) for (order, _), role in zip(parents, roles, strict=True))
        return Proposal(genome=genome, operator=operator.name, parents=named)

    def _select(self) -> tuple[int, Genome]:
        """(order, genome) of the best in a tournament, drawn at random with replacement."""
        drawn = (self._rng.randrange(len(self._population)) for _ in range(self._config.tournament))
        _, order, genome = self._population[min(drawn)]
        return order, genome


SAMPLER = EvolutionSampler
