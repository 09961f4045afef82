"""Evolution: seeded by a Parzen estimator, then steady-state, with children screened by a surrogate.

Proposal 0 is the space's default; what it is to start from, some random points and suggestions of the estimator follow.
From then on every proposal is a child of the best candidates found so far. Several children are made, and the one whose
predicted improvement is largest is proposed (preselection: Jin 2011). Nothing waits for a generation.
"""

import math
import random
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evo.evaluation import Parent, Proposal
from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Point, Space
from evo.search.operators import Operator, find_operator, operator_names
from evo.search.samplers import Unseen, at_least, read_options
from evo.search.samplers.tpe import TpeSampler

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
        self._expect(order, proposal, seeding=seeding)
        return proposal

    def adopt(self, order: int, migrant: Proposal) -> None:
        if seeding := self._told < self._config.seeding:
            self._seeder.adopt(order, migrant)
        self._expect(order, migrant, seeding=seeding)

    def _expect(self, order: int, proposal: Proposal, *, seeding: bool) -> None:
        self._unseen.remember(proposal.genome)
        self._pending[order] = proposal, self._surrogate.mark_pending(proposal.genome), seeding

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


# -- the surrogate --------------------------------------------------------------------------------------------------

Array = npt.NDArray[np.float64]

_NOISE = 1e-2
"""Variance of a measurement relative to that of the scores."""
_BASIS = 160
"""Points that a prediction rests on: its cost is quadratic in them."""
_REFIT = 12
"""Points after which the basis is chosen anew and the length scales are fitted."""
_ROOM = _BASIS - 2 * _REFIT
"""Points that a new basis begins with."""
_FIT_POINTS = 96
"""Points that length scales are fitted to: the cost of a fit is cubic in them."""
_ENOUGH = 8
"""Candidates that must have passed before a prediction means anything."""
_WEIGHT = 0.5
"""Typical weight of a parameter: exp(-0.5) is the correlation of points that differ in it alone, end to end."""
_WEIGHT_BOUNDS = (0.01, 20.0)
_POOR = 0.9
"""Quantile of the passing scores that stands for failures and for everything worse."""
_DIGITS = 6
"""Merits are rounded, so that the last bits of another machine's linear algebra decide nothing."""


class Surrogate:
    """Kriging with the kernel exp(-sum of weight x distance), one weight a parameter, and expected improvement.

    Distance: of ordinals the share of the range between their positions, of categories 1 where they differ, and
    1 where a parameter is active in one point only. Points under evaluation count as what was predicted of them
    (Ginsbourger et al. 2010), so that several outstanding proposals do not crowd one place.
    Deterministic in `seed` and the sequence of calls.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._rng = random.Random(seed)
        self._codes: list[tuple[str, dict[tuple[type, object], float]]] = []
        for p in space.parameters:
            last = len(p.values) - 1
            if last > 0:
                scale = last if isinstance(p, Ordinal) else 1
                self._codes.append((p.name, {(type(v), v): i / scale for i, v in enumerate(p.values)}))
        self._rows = 0
        self._points: dict[int, Array] = {}
        self._scores: dict[int, float | None] = {}
        """By row: the best, the latest, and those under evaluation. Others are not needed again."""
        self._best: list[tuple[float, int]] = []
        """(score, row) of the best half of the next basis."""
        self._pending: dict[int, float | None] = {}
        """Rows under evaluation, with the standardised score that is believed of them."""
        self._passed = 0
        self._weights: Array = np.full(len(self._codes), _WEIGHT)
        self._basis: list[int] = []
        self._at: Array = np.empty((0, len(self._codes)))
        self._whitening: Array = np.empty((0, 0))
        """Inverse of the Cholesky factor of the basis' covariances."""
        self._since_refit = _REFIT
        self._solved: Array | None = None
        """The solution for the scores of the basis, while it holds."""
        self._incumbent = 0.0

    @property
    def ready(self) -> bool:
        return self._passed >= _ENOUGH and bool(self._codes)

    def mark_pending(self, genome: Genome) -> int:
        """Says that `genome` is being evaluated; returns its row for `learn`."""
        row, self._rows = self._rows, self._rows + 1
        self._points[row] = self._encode(genome.parameters)
        self._scores[row] = self._pending[row] = None
        if self.ready and self._basis:
            self._pending[row] = float(self._correlation(self._points[row][None, :])[0] @ self._solve())
            if self._since_refit < _REFIT:  # else the basis is chosen anew before it is used again
                self._append(row)
        return row

    def learn(self, row: int, score: float | None) -> None:
        """The result of an expected genome; None if it failed."""
        del self._pending[row]
        self._scores[row] = score
        if score is not None:
            self._passed += 1
            insort(self._best, (score, row))
            del self._best[_ROOM // 2 :]
        self._since_refit += 1
        self._solved = None

    def merits(self, genomes: Sequence[Genome]) -> list[float]:
        """Logarithm of the expected improvement of each, up to a constant. Only when `ready`."""
        if self._since_refit >= _REFIT:
            self._refit()
        k = self._correlation(np.stack([self._encode(g.parameters) for g in genomes]))
        mean = k @ self._solve()
        variance = 1.0 - ((k @ self._whitening.T) ** 2).sum(axis=1)
        found = []
        for m, v in zip(mean.tolist(), variance.tolist(), strict=True):
            sigma = math.sqrt(max(v, 1e-9))
            found.append(round(math.log(sigma) + _log_improvement((self._incumbent - m) / sigma), _DIGITS))
        return found

    def _encode(self, point: Point) -> Array:
        return np.array(
            [codes[type(point[name]), point[name]] if name in point else -1.0 for name, codes in self._codes]
        )

    def _correlation(self, points: Array) -> Array:
        """(len(points), len(basis))"""
        return np.asarray(np.exp(-(_distances(points, self._at) @ self._weights)))

    def _append(self, row: int) -> None:
        """Extends the basis by one point, and the inverse factor by one row.

        The factor, not the inverse of the whole matrix, because that loses half the digits a few rows on.
        """
        w = self._whitening @ self._correlation(self._points[row][None, :])[0]
        diagonal = math.sqrt(max(1.0 + _NOISE - float(w @ w), _NOISE))
        n = len(w)
        grown = np.zeros((n + 1, n + 1))
        grown[:n, :n] = self._whitening
        grown[n, :n] = (w @ self._whitening) / -diagonal
        grown[n, n] = 1.0 / diagonal
        self._whitening, self._at = grown, np.vstack([self._at, self._points[row]])
        self._basis.append(row)
        self._solved = None

    def _solve(self) -> Array:
        if self._solved is None:
            targets = self._targets_of(self._basis)
            self._solved = np.asarray((self._whitening @ targets) @ self._whitening)
            # The posterior mean, not the luckiest measurement, is what has to be improved on.
            smooth = targets - _NOISE * self._solved
            passed = [i for i, row in enumerate(self._basis) if self._scores[row] is not None]
            self._incumbent = min(float(smooth[i]) for i in passed)
        return self._solved

    def _targets_of(self, rows: Sequence[int]) -> Array:
        """Scores made comparable: log of the distance from the best in units of the median's, standardised."""
        passed = sorted(s for r in rows if (s := self._scores[r]) is not None)
        best = passed[0]
        scale = (passed[len(passed) // 2] - best) / 4.0 or 1.0
        poor = passed[int(_POOR * (len(passed) - 1))]
        done = [r for r in rows if r not in self._pending]
        logs = {}
        for r in done:
            score = self._scores[r]
            logs[r] = math.log1p((min(poor if score is None else score, poor) - best) / scale)
        mean = math.fsum(logs.values()) / len(logs)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in logs.values()) / len(logs)) or 1.0
        believed = self._pending
        return np.array([(logs[r] - mean) / spread if r in logs else (believed[r] or 0.0) for r in rows])

    def _refit(self) -> None:
        """Chooses the basis: everything, or the best half and the latest half; fits the weights to it."""
        if self._rows > _ROOM:
            keep = {row for _, row in self._best} | self._pending.keys()
            latest = self._rows - _ROOM // 2
            self._points = {r: at for r, at in self._points.items() if r in keep or r >= latest}
            self._scores = {r: self._scores[r] for r in self._points}
        self._basis = list(self._points)
        self._at = np.stack([self._points[r] for r in self._basis])
        self._fit()
        matrix = self._correlation(self._at) + _NOISE * np.eye(len(self._basis))
        self._whitening = np.asarray(np.linalg.inv(np.linalg.cholesky(matrix)), dtype=np.float64)
        self._since_refit = 0
        self._solved = None

    def _fit(self) -> None:
        """One round of coordinate ascent on the marginal likelihood: each weight is doubled, halved or left."""
        rows = [r for r in self._basis if r not in self._pending]
        if len(rows) > _FIT_POINTS:
            rows = sorted(self._rng.sample(rows, _FIT_POINTS))
        if not any(self._scores[r] is not None for r in rows):
            return
        at, n = np.stack([self._points[r] for r in rows]), len(rows)
        distances = _distances(at, at).reshape(n * n, -1)
        bordered = np.empty((n + 1, n + 1))
        targets = self._targets_of(rows)

        def likelihood(weights: Array) -> float:
            bordered[:n, :n] = np.exp(-(distances @ weights)).reshape(n, n)
            bordered[np.arange(n), np.arange(n)] += _NOISE
            bordered[n, :n] = bordered[:n, n] = targets
            bordered[n, n] = 1e6 * n
            # The last row of the factor of the bordered matrix is the solution for the targets.
            factor = np.linalg.cholesky(bordered)
            z, diagonal = factor[n, :n], np.diag(factor)[:n]
            prior = 0.05 * float(np.sum(np.log(weights / _WEIGHT) ** 2))
            return -0.5 * n * math.log(float(z @ z) / n + 1e-12) - float(np.log(diagonal).sum()) - prior

        weights = self._weights
        highest = likelihood(weights)
        for j in self._rng.sample(range(len(weights)), len(weights)):
            for factor in (2.0, 0.5) if self._rng.random() < 0.5 else (0.5, 2.0):
                tried = weights.copy()
                tried[j] = min(max(tried[j] * factor, _WEIGHT_BOUNDS[0]), _WEIGHT_BOUNDS[1])
                value = likelihood(tried)
                if value > highest + 1e-6:
                    weights, highest = tried, value
                    break
        self._weights = weights


def _distances(a: Array, b: Array) -> Array:
    """(len(a), len(b), parameters); codes of categories, and of inactive parameters (-1), are at least 1 apart."""
    return np.minimum(np.abs(a[:, None, :] - b[None, :, :]), 1.0)


def _log_improvement(z: float) -> float:
    """log of E[max(0, z + N(0, 1))]; far below zero by its asymptote, where the exact form is 0 - 0."""
    if z > -5.0:
        density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return math.log(density + 0.5 * z * math.erfc(-z / math.sqrt(2.0)))
    return -0.5 * z * z - 0.5 * math.log(2.0 * math.pi) - 2.0 * math.log(-z)


SAMPLER = EvolutionSampler
