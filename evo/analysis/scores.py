"""Scores of samplers on recorded spaces, each with its interval, from the replays of `evo.analysis.replay`.

The score of several repeats is that of their mean rank, as Willemsen et al. have it; it is not the mean of the repeats' own
scores. Its interval is the bootstrap's over the repeats, at 95%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evo.analysis.frame import Records
from evo.analysis.replay import Replay, read_space

_PARTS = 100
"""Number of points of a curve."""
_RESAMPLES = 1000
_LIMITS = (0.025, 0.975)

Array = NDArray[np.float64]
Curve = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One replay of a sampler on a space, with its own score and curve: see `Score`. seed: the sampler's, which also draws
    the default that it starts from."""

    space: str
    sampler: str
    seed: int
    score: float | None
    curve: Curve | None = field(repr=False)
    evaluations: int
    sampler_s: float
    """Seconds that the sampler itself took."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a sampler on a space, or the mean over spaces. curve: the share of the way from random search to the
    best, as means over each hundredth of the budget; score: its mean. All figures and their limits are None where the space
    cannot tell, for the `reason`; the limits also where there is a single repeat. left_out: number of such spaces that a
    mean leaves out."""

    space: str
    sampler: str
    score: float | None
    low: float | None = None
    high: float | None = None
    curve: Curve | None = field(repr=False)
    curve_low: Curve | None = field(default=None, repr=False)
    curve_high: Curve | None = field(default=None, repr=False)
    evaluations: float
    """Average number of evaluations in a replay."""
    repeats: int
    """Number of replays; in a mean, that of the space with the fewest."""
    proposal_ms: float
    """Time that the sampler takes for one proposal."""
    reason: str = ""
    left_out: int = 0
    each: Records[Repeat] = field(repr=False)
    """Every repeat; none of a mean."""

    PRINTED: ClassVar = ("first_tenth",)

    @property
    def first_tenth(self) -> float | None:
        """The score of the first tenth of the budget."""
        return float(np.mean(self.curve[: _PARTS // 10])) if self.curve else None


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What `evo replay` and `evo.replay` found. seed: that of the first repeat; the next ones follow."""

    seed: int
    repeats: int
    in_flight: int
    interrupted: bool
    """Not all that was asked for is there."""
    spaces: Mapping[str, Mapping[str, object]]
    """The digest of each file, what it records, and the budget."""
    samplers: Mapping[str, Mapping[str, object]]
    """The options of each sampler, and the digests of files of one's own that it consists of."""
    scores: Records[Score]
    means: Records[Score]
    figures: Sequence[str] = ()

    def df(self) -> Any:
        """A pandas DataFrame with a row for each repeat of each sampler on each space. Raises UsageError where pandas is
        missing."""
        return Records(repeat for score in self.scores for repeat in score.each).df()


def judge(path: Path, sampler: str, replays: Sequence[Replay], seed: int = 0) -> Score:
    """seed: of the bootstrap."""
    replays = sorted(replays, key=lambda replay: replay.seed)
    recorded = read_space(path)
    reason, known = recorded.unscored, dict[str, Any](space=path.name, sampler=sampler)
    figures, own = _NO_FIGURES, [_NO_FIGURES] * len(replays)
    if not reason:
        ranks = recorded.ranks(replays)
        figures, own = _figures(recorded.shares(ranks.mean(axis=0))), [_figures(recorded.shares(one)) for one in ranks]
        if len(replays) > 1:
            n, rng = len(replays), np.random.default_rng(seed)
            drawn = recorded.shares(rng.multinomial(n, [1 / n] * n, _RESAMPLES) / n @ ranks)
            figures["low"], figures["high"] = map(float, np.quantile(drawn.mean(axis=1), _LIMITS))
            figures["curve_low"], figures["curve_high"] = map(_plain, np.quantile(_parts(drawn), _LIMITS, axis=0))
    return Score(
        **known,
        **figures,
        reason=reason,
        evaluations=float(np.mean([r.evaluations for r in replays])),
        repeats=len(replays),
        proposal_ms=1e3 * sum(r.sampler_s for r in replays) / max(1, sum(r.evaluations for r in replays)),
        each=Records(
            Repeat(**known, **one, seed=r.seed, evaluations=r.evaluations, sampler_s=r.sampler_s)
            for r, one in zip(replays, own, strict=True)
        ),
    )


def mean_of(sampler: str, scores: Sequence[Score]) -> Score:
    """The unweighted mean over the sampler's spaces that have a score. Its limits combine theirs with MOVER (Zou and Donner
    2008)."""
    own = [s for s in scores if s.sampler == sampler]
    scored = [s for s in own if s.score is not None]
    figures = dict(_NO_FIGURES)
    if scored:
        figures["score"], figures["curve"] = (_mean([getattr(s, name) for s in scored]) for name in _NO_FIGURES)
    if scored and all(s.low is not None for s in scored):
        figures["low"], figures["high"] = _combined([(s.score, s.low, s.high) for s in scored])
        figures["curve_low"], figures["curve_high"] = _combined([(s.curve, s.curve_low, s.curve_high) for s in scored])
    return Score(
        space="mean",
        sampler=sampler,
        **figures,
        reason="" if scored else "no space has a score",
        left_out=len(own) - len(scored),
        evaluations=float(np.mean([s.evaluations for s in own])),
        repeats=min(s.repeats for s in own),
        proposal_ms=float(np.mean([s.proposal_ms for s in own])),
        each=Records(),
    )


_NO_FIGURES: dict[str, Any] = {"score": None, "curve": None}


def _figures(shares: Array) -> dict[str, Any]:
    """Score and curve of shares over the budget."""
    return {"score": float(shares.mean()), "curve": _plain(_parts(shares))}


def _parts(shares: Array) -> Array:
    """Means over each hundredth of the budget: (..., parts)."""
    means: Array = shares.reshape(*shares.shape[:-1], _PARTS, -1).mean(axis=-1)
    return means


def _plain(values: Array) -> Any:
    """A float, or a tuple of them."""
    return tuple(map(float, values)) if values.ndim else float(values)


def _mean(values: Sequence[Any]) -> Any:
    return _plain(np.mean(values, axis=0))


def _combined(estimates: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, Any]:
    """The limits of a mean of independent estimates, each with its own limits."""
    middle, low, high = (np.array(column) for column in zip(*estimates, strict=True))
    below, above = (np.sqrt(((middle - limit) ** 2).sum(axis=0)) / len(middle) for limit in (low, high))
    return _plain(middle.mean(axis=0) - below), _plain(middle.mean(axis=0) + above)
