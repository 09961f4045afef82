"""Evolution: points far apart at first; then the most promising of a pool of children, ranked by a surrogate.

Proposal 0 is the space's default; given initial points, and points far from each other, follow. From then on operators make
children of the best candidates found so far, a random point joins them, and a best one that stands for long is surrounded by
all points that differ from it in one parameter. Children that are not proposed stay in the pool. The sampler proposes the
child with the largest expected improvement (preselection: Jin 2011), so nothing waits for a generation.
"""

import math
import random
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evo.discovery import plugin_names
from evo.evaluation import Parent, Proposal
from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Parameter, Space, Value
from evo.search.operators import ALL, repair, weigh_operators
from evo.search.samplers import Unseen, at_least, read_options

Array = npt.NDArray[np.float64]

_Offers = dict[Genome, tuple[Proposal, Array]]
"""Proposals that may be made, with their features."""

_WEIGHTS = "weights."
_ROLES = {1: ("parent",), 2: ("first", "second")}
_SPREAD = 256
"""Number of random points, before evolution begins, of which the one farthest from all others is proposed (a maximin design,
Johnson et al. 1990). With 16 the score on a budget of 55 evaluations was 0.1 lower."""
_STANDING = 25
"""Number of results after which the best is surrounded: before that, the operators find better ones sooner."""


@dataclass(frozen=True, kw_only=True)
class EvolutionConfig:
    """Options of the sampler.

    seeding: number of results known before evolution begins; until then points are proposed that lie far apart. Proposals
        made before anything is known come on top.
    population: number of candidates, with distinct machine code, that may become parents.
    tournament: size of a tournament for a parent.
    children: number of children made for each proposal, beside one random point.
    pool: largest number of children that are kept for later proposals, the most promising.
    operators: names, or files of one's own, separated by commas. `weights.NAME`: another weight of one of these; 0 is off.
    """

    seeding: int = 6
    population: int = 20
    tournament: int = 3
    children: int = 8
    pool: int = 100
    operators: str = ALL

    def __post_init__(self) -> None:
        at_least(self, 1, "seeding", "tournament", "children", "pool")
        at_least(self, 2, "population")


class EvolutionSampler:
    def __init__(self, space: Space, seed: int, options: Mapping[str, object]) -> None:
        weights = {key: value for key, value in options.items() if key.startswith(_WEIGHTS)}
        own = {key: value for key, value in options.items() if key not in weights}
        self._config = read_options("evolution", EvolutionConfig, own, [f"{_WEIGHTS}{n}" for n in plugin_names("operator")])
        named = {key.removeprefix(_WEIGHTS): value for key, value in weights.items()}
        self._operators = weigh_operators(self._config.operators, named)
        self._space = space
        self._rng = random.Random(seed)
        self._unseen = Unseen(space)
        self._surrogate = Surrogate(space, seed)
        self._population: list[tuple[float, int, Genome]] = []
        """(score, order, genome), best first; among equal scores the older one."""
        self._pool: _Offers = {}
        """Proposals that were made and not proposed yet."""
        self._pending: dict[int, tuple[Proposal, int]] = {}
        """Proposals by order, each with its row of the surrogate."""
        self._told = 0
        self._drawn: _Offers = {}
        """Random points to begin with."""
        self._since_better = 0

    def ask(self, order: int) -> Proposal:
        if first := self._unseen.first():
            proposal = first
        elif self._told < self._config.seeding:
            proposal = self._spread()
        else:
            proposal = self._evolve()
        self.adopt(order, proposal)
        return proposal

    def adopt(self, order: int, migrant: Proposal) -> None:
        self._unseen.remember(migrant.genome)
        for offered in (self._drawn, self._pool):
            offered.pop(migrant.genome, None)
        self._pending[order] = migrant, self._surrogate.mark_pending(migrant.genome)

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        proposal, row = self._pending.pop(order)
        self._told += proposal.operator != "start"
        self._surrogate.learn(row, score)
        self._since_better += 1
        # A duplicate is a neutral mutation, which would crowd out a candidate that differs.
        if score is not None and duplicate_of is None:
            insort(self._population, (score, order, proposal.genome))
            del self._population[self._config.population :]
            if self._population[0][1] == order:
                self._since_better = 0
        if self._since_better == _STANDING and self._population:
            self._surround()

    def _spread(self) -> Proposal:
        """The one of some random points that is farthest from all proposed ones."""
        for _ in range(1 if self._drawn else _SPREAD):
            self._offer(self._draw(), self._drawn)
        if not self._drawn:
            return self._unseen.propose(self._rng)
        drawn = list(self._drawn.values())
        away = self._surrogate.distances(np.stack([features for _, features in drawn]))
        return drawn[int(np.argmax(away))][0]

    def _evolve(self) -> Proposal:
        for _ in range(self._config.children):
            self._offer(self._child(), self._pool)
        self._offer(self._draw(), self._pool)
        if not self._pool:
            return self._unseen.propose(self._rng)
        proposals = [proposal for proposal, _ in self._pool.values()]
        if not self._surrogate.ready:  # too little has passed
            return self._rng.choice(proposals)
        merits = self._surrogate.merits(np.stack([features for _, features in self._pool.values()]))
        ranked: list[Proposal] = [proposals[i] for i in np.argsort(-merits, kind="stable")]  # of equals the oldest first
        for proposal in ranked[self._config.pool :]:
            del self._pool[proposal.genome]
        return ranked[0]

    def _offer(self, proposal: Proposal | None, to: _Offers) -> None:
        """Adds a proposal, unless it is known."""
        if proposal is not None and proposal.genome in self._unseen and proposal.genome not in to:
            to[proposal.genome] = proposal, self._surrogate.features(proposal.genome)

    def _draw(self) -> Proposal | None:
        """A random point, repaired, as most draws from large spaces break a constraint; None if that fails or is known."""
        point = repair(self._rng, self._space, self._space.draw(self._rng))
        if point is None or (genome := Genome.of(point)) not in self._unseen:
            return None
        return Proposal(genome=genome, operator="random")

    def _child(self) -> Proposal | None:
        if not self._population:
            return None
        operator = self._rng.choices([*self._operators], [*self._operators.values()])[0]
        parents = [self._select() for _ in range(operator.arity)]
        if len({order for order, _ in parents}) < operator.arity:
            return None
        genome = operator(self._rng, self._space, [genome for _, genome in parents])
        if genome is None:
            return None
        roles = _ROLES[operator.arity]
        named = tuple(Parent(order=order, role=role) for (order, _), role in zip(parents, roles, strict=True))
        return Proposal(genome=genome, operator=operator.name, parents=named)

    def _select(self) -> tuple[int, Genome]:
        """(order, genome) of the best in a tournament, drawn at random with replacement."""
        drawn = (self._rng.randrange(len(self._population)) for _ in range(self._config.tournament))
        _, order, genome = self._population[min(drawn)]
        return order, genome

    def _surround(self) -> None:
        """Offers all legal points that differ from the best in one parameter, however far: mutations mostly take a small
        step."""
        _, order, genome = self._population[0]
        parents = (Parent(order=order, role="parent"),)
        for near in self._space.neighbours(genome.parameters, far=True):
            self._offer(Proposal(genome=Genome.of(near), operator="surround", parents=parents), self._pool)


# -- the surrogate --------------------------------------------------------------------------------------------------

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
_ENOUGH = 4
"""Candidates that must have passed before a prediction means anything."""
_WEIGHT = 0.5
"""Typical weight of a parameter: over its whole range the local part of the correlation falls to exp(-0.5)."""
_WEIGHT_BOUNDS = (0.01, 20.0)
_ADDITIVE = 0.8
"""Share of the covariance that is a sum over parameters: all points, not near ones alone, tell what one parameter does."""
_POOR = 0.9
"""Quantile of the passing scores that stands for failures and for everything worse."""
_DIGITS = 6
"""Merits are rounded, so that the last bits of another machine's linear algebra decide nothing."""


class Surrogate:
    """Kriging and expected improvement. Of d, the sum of weight x distance over all parameters, the covariance is a mean of
    exp(-d) and of 1 - d / sum of weights, which is additive (Duvenaud et al. 2011).

    Every parameter has a distance and a weight. Distance: of ordinals the share of the range between their positions, of
    categories 1 where they differ, and 1 where a parameter is active in one point only. Ordinals of whole numbers have a
    second one, between the powers of two that divide them: alignment, bank conflicts and warps go by those, not by size.
    Distances are squared Euclidean ones of `features`, so that those of many points are one matrix product.

    Points under evaluation count as what was predicted of them (Ginsbourger et al. 2010), so that several outstanding
    proposals do not crowd one place. Deterministic in `seed` and the sequence of calls.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._rng = random.Random(seed)
        self._codes = [(p.name, *code) for p in space.parameters if len(p.values) > 1 for code in _codes(p)]
        """Name, features of each value, and features where the parameter is not active."""
        self._code_of = np.repeat(np.arange(len(self._codes)), [len(absent) for *_, absent in self._codes])
        """Number of the distance that each column of the features belongs to."""
        self._rows = 0
        self._points: dict[int, Array] = {}
        self._scores: dict[int, float | None] = {}
        """Scores by row of the best, the latest, and the pending points. Others are not needed again."""
        self._best: list[tuple[float, int]] = []
        """(score, row) of the best half of the next basis."""
        self._pending: dict[int, float | None] = {}
        """Rows under evaluation, each with its predicted standardised score."""
        self._passed = 0
        self._weights: Array = np.full(len(self._codes), _WEIGHT)
        self._basis: list[int] = []
        self._at: Array = np.empty((0, len(self._code_of)))
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
        """Notes that `genome` is being evaluated; returns its row for `learn`."""
        row, self._rows = self._rows, self._rows + 1
        self._points[row] = self.features(genome)
        self._scores[row] = self._pending[row] = None
        if self.ready and self._basis:
            self._pending[row] = float(self._correlation(self._points[row][None, :])[0] @ self._solve())
            if self._since_refit < _REFIT:  # else the basis is chosen anew before it is used again
                self._append(row)
        return row

    def learn(self, row: int, score: float | None) -> None:
        """The result of a point under evaluation; None if it failed."""
        del self._pending[row]
        self._scores[row] = score
        if score is not None:
            self._passed += 1
            insort(self._best, (score, row))
            del self._best[_ROOM // 2 :]
        self._since_refit += 1
        self._solved = None

    def merits(self, features: Array) -> Array:
        """Logarithm of the expected improvement of each row, up to a constant. Only when `ready`."""
        if self._since_refit >= min(_REFIT, max(2, len(self._points) // 4)):  # the fewer there are, the more one changes
            self._refit()
        k = self._correlation(features)
        mean = k @ self._solve()
        sigma = np.sqrt(np.maximum(1.0 - ((k @ self._whitening.T) ** 2).sum(axis=1), 1e-9))
        found: Array = np.round(np.log(sigma) + _log_improvement((self._incumbent - mean) / sigma), _DIGITS)
        return found

    def distances(self, features: Array) -> Array:
        """Distance of each row from the nearest of all points so far, with equal weights for all parameters."""
        nearest: Array = _distances(features, np.stack(list(self._points.values()))).min(axis=1)
        return nearest

    def features(self, genome: Genome) -> Array:
        """A row for `merits`."""
        point = genome.parameters
        found: list[float] = []
        for name, coded, absent in self._codes:
            found += coded[type(point[name]), point[name]] if name in point else absent
        return np.array(found)

    def _correlation(self, points: Array) -> Array:
        """Covariances of points and basis: (len(points), len(basis))."""
        scale = np.sqrt(self._weights)[self._code_of]
        return _covariance(_distances(points * scale, self._at * scale), self._weights)

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
        known = np.array([r not in self._pending for r in rows])
        scores = np.array([poor if (s := self._scores[r]) is None else s for r in rows])
        logs = np.log1p((np.minimum(scores, poor) - best) / scale)
        mean, spread = logs[known].mean(), logs[known].std() or 1.0
        believed = np.array([self._pending.get(r) or 0.0 for r in rows])
        return np.where(known, (logs - mean) / spread, believed)

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
        parts = [_distances(p, p).ravel() for p in (at[:, self._code_of == j] for j in range(len(self._codes)))]
        distances = np.stack(parts, axis=1)
        bordered = np.empty((n + 1, n + 1))
        targets = self._targets_of(rows)

        def likelihood(weights: Array) -> float:
            bordered[:n, :n] = _covariance(distances @ weights, weights).reshape(n, n)
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


_Code = tuple[Mapping[tuple[type, Value], list[float]], list[float]]


def _codes(parameter: Parameter) -> Iterator[_Code]:
    """Features of each value, and of an inactive parameter, for one distance or two."""
    values = parameter.values
    if not isinstance(parameter, Ordinal):
        side = math.sqrt(0.5)
        coded = {(type(v), v): [side * (i == j) for j in range(len(values))] + [0.0] for i, v in enumerate(values)}
        yield coded, [0.0] * len(values) + [side]
        return
    yield _steps(values, range(len(values)))
    numbers = [v for v in values if type(v) is int and v >= 0]
    if len(numbers) == len(values) and any(v & (v - 1) for v in numbers):  # else position says the same
        powers = [v & -v for v in numbers]
        rungs = sorted(set(powers))
        if len(rungs) > 1:
            yield _steps(values, [rungs.index(p) for p in powers])


def _steps(values: Sequence[Value], positions: Sequence[int]) -> _Code:
    """Features of an ordinal: a column for each step of its range, taken or not. Half of every step is equally far from all
    values; the last column brings that distance to 1."""
    last = max(positions)
    step = math.sqrt(1 / last)
    coded = {(type(v), v): [step * (j < i) for j in range(last)] + [0.0] for v, i in zip(values, positions, strict=True)}
    return coded, [step / 2] * last + [math.sqrt(0.75)]


def _distances(a: Array, b: Array) -> Array:
    """Squared Euclidean distances: (len(a), len(b))."""
    squared: Array = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2.0 * (a @ b.T)
    return np.maximum(squared, 0.0, out=squared)


def _covariance(distances: Array, weights: Array) -> Array:
    """Covariances for weighted distances; 1 at no distance."""
    found: Array = (1.0 - _ADDITIVE) * np.exp(-distances) + _ADDITIVE * (1.0 - distances / weights.sum())
    return found


_erfc = np.frompyfunc(math.erfc, 1, 1)  # numpy has none


def _log_improvement(z: Array) -> Array:
    """log of E[max(0, z + N(0, 1))]; far below zero by its asymptote, where the exact form is 0 - 0."""
    found = np.empty_like(z)
    near = z > -5.0
    x = z[near]
    tail = np.asarray(_erfc(-x / math.sqrt(2.0)), dtype=np.float64)
    found[near] = np.log(np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi) + 0.5 * x * tail)
    x = z[~near]
    found[~near] = -0.5 * x * x - 0.5 * math.log(2.0 * math.pi) - 2.0 * np.log(-x)
    return found


SAMPLER = EvolutionSampler
