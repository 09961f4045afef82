"""Tree-structured Parzen estimator (Optuna), made legal, and never the same point twice."""

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState, create_trial

from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Ordinal, Point, Space
from evo.search.operators import find_operator, repair
from evo.search.samplers import Unseen, at_least, read_options

optuna.logging.set_verbosity(optuna.logging.WARNING)  # no notes on new studies

_NEIGHBOUR_ATTEMPTS = 32
_REPAIR_STEPS = 100
"""Number of steps of a repair: a suggestion costs as much time as hundreds of them."""


@dataclass(frozen=True, kw_only=True)
class TpeConfig:
    """Options of the sampler.

    startup: number of results before the estimator is asked; until then the default and random points are proposed.
    suggestions: largest number of suggestions asked for one proposal, because the estimator repeats itself.
    history: number of results, the latest and the best, that the estimator is given.
    """

    startup: int = 10
    suggestions: int = 4
    history: int = 256

    def __post_init__(self) -> None:
        at_least(self, 1, "startup", "suggestions")
        at_least(self, 16, "history")


class TpeSampler:
    """The space's default and given initial points, then random points, then suggestions of the estimator.

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
        self._given: set[int] = set()
        """Orders of the initial points, which do not count as results."""
        self._told = 0

    def ask(self, order: int) -> Proposal:
        proposal = self._propose()
        self.adopt(order, proposal)
        if proposal.operator == "start":
            self._given.add(order)
        return proposal

    def adopt(self, order: int, migrant: Proposal) -> None:
        self._unseen.remember(migrant.genome)
        self._model.mark_pending(order, migrant.genome.parameters)

    def tell(self, order: int, score: float | None, duplicate_of: int | None = None) -> None:
        self._told += order not in self._given
        self._model.learn(order, score)

    def _propose(self) -> Proposal:
        if first := self._unseen.first():
            return first
        if self._told < self._config.startup:
            return self._unseen.propose(self._rng)
        genome = None
        for _ in range(self._config.suggestions):
            point = repair(self._rng, self._space, self._model.suggest(), steps=_REPAIR_STEPS)
            if point is not None:
                genome = Genome.of(point)
                if genome in self._unseen:
                    return Proposal(genome=genome, operator="tpe")
        if genome is None:
            return self._unseen.propose(self._rng)
        for _ in range(_NEIGHBOUR_ATTEMPTS):
            near = self._mutation(self._rng, self._space, [genome])
            if near is not None and near in self._unseen:
                return Proposal(genome=near, operator="tpe")
        return self._unseen.propose(self._rng)


class ParzenModel:
    """Suggests points like the good ones and unlike the rest (Bergstra et al. 2011; Watanabe 2023).

    The cost of a suggestion grows with the history, so the study is begun anew, from the best and the latest
    points, whenever it has outgrown `history` by half. Deterministic in `seed` and the sequence of calls.
    """

    def __init__(self, space: Space, seed: int, history: int) -> None:
        self._space, self._seed, self._history = space, seed, history
        self._numbers: dict[int, int] = {}
        """Number of each trial in the present study, by order."""
        # Positions, not values: an estimator tells 1 and True apart no better than Python does.
        self._positions = {p.name: {(type(v), v): i for i, v in enumerate(p.values)} for p in space.parameters}
        self._distributions: dict[str, BaseDistribution] = {
            p.name: IntDistribution(0, len(p.values) - 1)
            if isinstance(p, Ordinal)
            else CategoricalDistribution(range(len(p.values)))
            for p in space.parameters
        }
        self._generation = 0
        self._begin([])

    def suggest(self) -> Point:
        """A point that respects conditions, not necessarily constraints, and may have been suggested before."""
        trial = self._study.ask()
        point: Point = {}
        for p in self._space.parameters:
            if self._space.is_active(p, point):
                last = len(p.values) - 1
                ordinal = isinstance(p, Ordinal)
                i = trial.suggest_int(p.name, 0, last) if ordinal else trial.suggest_categorical(p.name, range(last + 1))
                point[p.name] = p.values[i]
        # The evaluated point may be another one, so trials are added by `mark_pending`, not kept from here.
        self._study.tell(trial, state=TrialState.FAIL)
        return point

    def mark_pending(self, order: int, point: Point) -> None:
        """Notes that `point` is being evaluated. Points nearby are avoided."""
        params = {name: self._positions[name][type(value), value] for name, value in point.items()}
        distributions = {name: self._distributions[name] for name in params}
        attributes = {"order": order}
        self._add(
            create_trial(state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs=attributes)
        )

    def learn(self, order: int, score: float | None) -> None:
        """The result of a pending point; None if it failed, which ranks below every score."""
        state = TrialState.PRUNED if score is None else TrialState.COMPLETE
        self._study.tell(self._numbers[order], score, state=state)
        if len(self._added()) > self._history + self._history // 2:
            self._begin(self._worth_keeping())

    def _added(self) -> list[FrozenTrial]:
        """The trials of the present study, without those of suggestions."""
        return [t for t in self._study.get_trials(deepcopy=False) if t.state is not TrialState.FAIL]

    def _worth_keeping(self) -> list[FrozenTrial]:
        """The running trials, the best quarter of the history and the latest three quarters, in their order."""
        known = sorted(self._added(), key=lambda trial: int(trial.user_attrs["order"]))
        done = [t for t in known if t.state is not TrialState.RUNNING]
        ranked = sorted((t.value, i) for i, t in enumerate(done) if t.value is not None)
        quarter = self._history // 4
        kept = {i for _, i in ranked[:quarter]} | set(range(max(0, len(done) - 3 * quarter), len(done)))
        return [done[i] for i in sorted(kept)] + [t for t in known if t.state is TrialState.RUNNING]

    def _begin(self, trials: list[FrozenTrial]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                multivariate=True,
                group=True,
                constant_liar=True,
                n_startup_trials=0,
                seed=(self._seed + self._generation) % 2**32,
            )
        self._study = optuna.create_study(sampler=sampler)
        self._generation += 1
        for trial in trials:
            self._add(trial)

    def _add(self, trial: FrozenTrial) -> None:
        self._numbers[trial.user_attrs["order"]] = len(self._study.get_trials(deepcopy=False))
        self._study.add_trial(trial)


SAMPLER = TpeSampler
