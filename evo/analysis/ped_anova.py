"""PED-ANOVA, by Optuna."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

from evo.problem.space import Value

__all__ = ["ped_anova"]


class _Choices(CategoricalDistribution):
    """A parameter's values, which all trials share: equal to itself alone, and never copied. Optuna compares and copies
    the choices of every trial one by one, and spends nearly all of its time on that."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __deepcopy__(self, known: dict[int, Any]) -> _Choices:
        return self


def ped_anova(
    points: Sequence[tuple[Mapping[str, Value], float]], varied: Mapping[str, Sequence[Value]], quantile: float
) -> dict[str, float]:
    """The importance of each parameter in `varied`, as far as this version of Optuna tells. points: (parameters, score);
    varied: the values of a parameter.

    Of an in-memory study with the points as its trials. Every parameter is categorical there: the values of an ordinal one
    are few, and evo's are spaced as factors and not as differences.
    """
    logging = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few trials and rare values, which the notes tell
            study = optuna.create_study()
            space = {name: _Choices(tuple(values)) for name, values in varied.items()}
            study.add_trials(
                [
                    optuna.trial.create_trial(
                        params={n: v for n, v in parameters.items() if n in space},
                        distributions={n: space[n] for n in parameters if n in space},
                        value=score,
                    )
                    for parameters, score in points
                ]
            )
            evaluator = PedAnovaImportanceEvaluator(target_quantile=quantile)
            return dict(get_param_importances(study, evaluator=evaluator, normalize=False))
    finally:
        optuna.logging.set_verbosity(logging)
