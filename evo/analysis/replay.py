"""Replay of samplers on recorded search spaces, without a device or compiler: every evaluation is looked up.

A record has all configurations of a kernel, each with its time or failure and what it cost: a cache file of Kernel Tuner,
or T4 results, as published at https://github.com/AutoTuningAssociation/benchmark_hub. The record of a larger space is a
random sample; a point outside it is replaced by a recorded one near it.

The score is the performance over time of Willemsen et al. (2024, "A methodology for comparing optimization algorithms for
auto-tuning", doi 10.1016/j.future.2024.05.021): 0 is random search, 1 the optimum at once, averaged over a budget within
which random search comes 95% of the way from the median to the optimum. Failures cost like everything else. Every repeat
starts from another default, drawn from the legal configurations.
"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from evo.errors import UsageError
from evo.problem.genome import Genome
from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Point, Space, Value
from evo.search.samplers import Exhausted, find_sampler

_START, _CUTOFF, _GRID_POINTS = 0.01, 0.95, 1000
_LATE = 1.1
"""Length of a replay in budgets; the end of the budget is so covered."""
_INACTIVE = "inactive"
"""Value of a parameter that a configuration does not have."""
_GZIP = b"\x1f\x8b"
"""First bytes of a compressed file."""
_LOOKED_AT = 64
"""Number of points by which a record of all configurations is told from a sample."""
_NEAREST = 8
"""Number of near points of which one is drawn; the nearest is mostly the point that a sampler came from."""
_NO_TIME = 1e19
"""Bound of times: Kernel Tuner writes a huge number for a configuration that failed."""
_LEAST_LEFT, _LEAST_OF_BEST = 0.01, 0.001
"""Least that random search must leave of the way from the median to the best, and of the best's time, which a score divides
by."""
_LEAST_TRIES = 30
"""Least number of evaluations of a budget; in fewer, the best that random search finds is mostly luck."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One replay. improvements: pairs of the recorded seconds spent and the best time so far. sampler_s: seconds that the
    sampler itself took in sum."""

    seed: int
    improvements: Sequence[tuple[float, float]]
    evaluations: int
    sampler_s: float


class RecordedSpace:
    """A record as a `Space` whose only constraint is that the configuration was recorded."""

    def __init__(self, records: Iterable[tuple[Mapping[str, Any], float | None, float]]) -> None:
        """records: triples of a configuration, its time or None, and its cost in seconds."""
        found = list(records)
        self.names = list(dict.fromkeys(name for point, _, _ in found for name in point))
        points: list[Point] = [{name: point.get(name, _INACTIVE) for name in self.names} for point, _, _ in found]
        self.parameters = tuple(_parameter(name, [point[name] for point in points]) for name in self.names)
        self._records = {self._key(p): (p, time, cost_s) for p, (_, time, cost_s) in zip(points, found, strict=True)}
        self._sorted_keys = sorted(self._records)
        times = [time for _, time, _ in self._records.values()]
        costs = np.array([cost_s for _, _, cost_s in self._records.values()])
        passed = np.array([time is not None for time in times])
        self._best_first = np.array(sorted(time for time in times if time is not None))
        begin_s, self.budget_s = (self._evaluations(share) * float(np.median(costs)) for share in (_START, _CUTOFF))
        failing_s = 0.0 if passed.all() else float(costs[~passed].mean() * (~passed).mean())
        self._grid = np.linspace(begin_s, self.budget_s, _GRID_POINTS)
        self._tries = tries = np.maximum(np.round(self._grid / (float(costs[passed].mean()) + failing_s)), 1)
        n = len(self._best_first)
        # The expected rank of the best of m draws without replacement.
        ranks = np.minimum(np.round(tries * (n + 1) / (tries + 1)).astype(int), n - 1)
        self._random: NDArray[np.float64] = self._best_first[::-1][ranks]

    @property
    def facts(self) -> dict[str, float]:
        """What is recorded, and the budget: also in evaluations of random search."""
        counts = {"configurations": len(self._records), "passed": len(self._best_first)}
        return counts | {"budget_s": self.budget_s, "budget_evaluations": float(self._tries[-1])}

    @property
    def is_large(self) -> bool:
        """Whether random search is not expected to find the best within the budget."""
        return bool(self._random[-1] > self._best_first[0])

    @property
    def unscored(self) -> str:
        """Why a score would mean nothing: random search comes so near the best that the rest of the way is noise, or has too
        few evaluations. Empty if a score means something."""
        best, median, last = (float(t) for t in (self._best_first[0], np.median(self._best_first), self._random[-1]))
        if last - best >= max(_LEAST_LEFT * (median - best), _LEAST_OF_BEST * best):
            few = f"the budget is {self._tries[-1]:.0f} evaluations of random search, too few to tell skill from luck"
            return few if self._tries[-1] < _LEAST_TRIES else ""
        return (
            f"random search comes within {(last - best) / best:.2%} of the best in its {self._tries[-1]:.0f} evaluations,"
            " and a score would divide by that"
        )

    def space(self, rng: random.Random) -> Space:
        make = partial(_Sample, record=self) if self._is_sample else Space
        recorded = Constraint(name="recorded", holds=self._is_recorded, reason="there is a record of it")
        return make(parameters=self.parameters, constraints=(recorded,), default=self.sample(rng))

    def sample(self, rng: random.Random) -> Point:
        """A recorded point, each with the same probability."""
        return self._records[rng.choice(self._sorted_keys)][0]

    def nearest(self, rng: random.Random, point: Mapping[str, Value]) -> Point:
        """One of the recorded points nearest to `point`."""
        away = self._squares - 2.0 * (self._at @ self._position(point))  # squared, up to a constant
        nearest = np.argpartition(away, min(_NEAREST, len(away) - 1))[:_NEAREST]
        return self._records[self._sorted_keys[rng.choice(sorted(nearest))]][0]

    def evaluate(self, genome: Genome) -> tuple[float | None, float]:
        """The recorded time of a genome, or None, and its cost in seconds."""
        return self._records[self._key(genome.parameters)][1:]

    def ranks(self, replays: Sequence[Replay]) -> NDArray[np.int64]:
        """The rank of the best time so far of each replay, over the budget: (len(replays), points)."""
        ranks = []
        for replay in replays:
            found = replay.improvements or [(0.0, self._best_first[-1])]  # nothing passed: as the slowest that did
            seconds, best = (np.array(column) for column in zip(*found, strict=True))
            reached = best[np.maximum(np.searchsorted(seconds, self._grid, side="right") - 1, 0)]
            ranks.append(np.searchsorted(self._best_first, reached, side="left"))
        return np.array(ranks)

    def shares(self, ranks: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """The share of the way from random search to the optimum at each of these mean ranks: (..., points)."""
        reached = np.clip(np.round(ranks).astype(int), 0, len(self._best_first) - 1)
        share: NDArray[np.float64] = (self._best_first[reached] - self._random) / (self._best_first[0] - self._random)
        return share

    @cached_property
    def _is_sample(self) -> bool:
        """Whether points have fewer recorded neighbours than half their parameters. In a full record they have most."""
        rng, whole = random.Random(0), Space(parameters=self.parameters)
        points = [self.sample(rng) for _ in range(_LOOKED_AT)]
        found = sum(self._is_recorded(near) for point in points for near in whole.neighbours(point))
        return found < _LOOKED_AT / 2 * sum(len(p.values) > 1 for p in self.parameters)

    @cached_property
    def _at(self) -> NDArray[np.float64]:
        """The position of each point, by sorted key. The values of a parameter are at most 1 apart, categories exactly 1."""
        return np.stack([self._position(self._records[key][0]) for key in self._sorted_keys])

    @cached_property
    def _squares(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (self._at**2).sum(axis=1)
        return found

    def _position(self, point: Mapping[str, Value]) -> NDArray[np.float64]:
        found: list[float] = []
        for p in self.parameters:
            i, n = p.values.index(point[p.name]), len(p.values)
            found += [i / (n - 1)] if isinstance(p, Ordinal) else [math.sqrt(0.5) * (i == j) for j in range(n)]
        return np.array(found)

    def _evaluations(self, share: float) -> int:
        """The number of random draws that are expected to come this share of the way from the median to the optimum."""
        best, median = float(self._best_first[0]), float(np.median(self._best_first))
        worse = int(np.argmax(self._best_first[::-1] <= best + (median - best) * (1 - share)))
        return math.ceil(worse / (len(self._best_first) + 1 - worse))

    def _is_recorded(self, point: Mapping[str, object]) -> bool:
        return self._key(point) in self._records

    def _key(self, point: Mapping[str, object]) -> tuple[str, ...]:
        return tuple([str(point[n]) for n in self.names])


@dataclass(frozen=True, kw_only=True)
class _Sample(Space):
    """A space of recorded points that mostly have no recorded neighbour."""

    record: RecordedSpace

    def sample(self, rng: random.Random) -> Point:
        return self.record.sample(rng)

    def repaired(self, rng: random.Random, point: Mapping[str, Value]) -> Point:
        return self.record.nearest(rng, point)


@cache
def read_space(path: Path) -> RecordedSpace:
    """The recorded space in a file. Raises UsageError for a file that is missing, or is no such record."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    try:
        try:
            record = json.loads(text)
        except json.JSONDecodeError:  # Kernel Tuner appends to its cache, and closes it only at the end
            record = json.loads(text.rstrip().rstrip(",") + "}\n}")
        found = list(_cached(record) if "cache" in record else _results(record))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is neither a cache file of Kernel Tuner nor T4 results; a run of evo becomes the latter by:"
            " evo export RUN --format t4"
        ) from error
    if len({time for _, time, _ in found if time is not None}) > 1:
        recorded = RecordedSpace(found)
        if recorded.is_large:
            return recorded
    raise UsageError(f"{path}: {len(found)} configurations cannot tell samplers apart: random search finds the best")


def replay(path: Path, sampler: str, options: Mapping[str, object], in_flight: int, seed: int) -> Replay:
    """Replays one sampler over the budget of one space. in_flight: number of unanswered proposals. Raises as `read_space`
    does, and UsageError for options that the sampler does not have."""
    recorded = read_space(path)
    made = find_sampler(sampler)(recorded.space(random.Random(f"{path.name} {seed}")), seed, options)
    improvements: list[tuple[float, float]] = []
    pending: list[Genome] = []
    spent_s, asked, told, sampler_s, exhausted = 0.0, 0, 0, 0.0, False
    while spent_s < _LATE * recorded.budget_s:
        began = time.perf_counter()
        while len(pending) < in_flight and not exhausted:
            try:
                pending.append(made.ask(asked).genome)
                asked += 1
            except Exhausted:
                exhausted = True
        sampler_s += time.perf_counter() - began
        if not pending:
            break
        found, cost_s = recorded.evaluate(pending.pop(0))
        spent_s += cost_s
        if found is not None and (not improvements or found < improvements[-1][1]):
            improvements.append((spent_s, found))
        began = time.perf_counter()
        made.tell(told, found)
        sampler_s += time.perf_counter() - began
        told += 1
    return Replay(seed=seed, improvements=improvements, evaluations=told, sampler_s=sampler_s)


def begin_process() -> None:
    """Prepares a process for replays, which imports this module and not the command's: its libraries use one thread, and it
    ends with the command."""
    threadpool_limits(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _cached(record: Mapping[str, Any]) -> Iterable[tuple[Mapping[str, Any], float | None, float]]:
    """The records of a cache file of Kernel Tuner, whose times are in milliseconds."""
    names, objective = record["tune_params_keys"], record.get("objective", "time")
    by_text = [{str(value): value for value in record["tune_params"][name]} for name in names]
    for key, entry in record["cache"].items():
        point = {n: values[text] for n, values, text in zip(names, by_text, key.split(","), strict=True)}
        parts = (entry.get(part) or 0.0 for part in ("compile_time", "verification_time", "benchmark_time"))
        yield point, _time(entry.get(objective)), sum(parts) / 1e3


def _results(record: Mapping[str, Any]) -> Iterable[tuple[Mapping[str, Any], float | None, float]]:
    """The records of T4 results, whose times are in milliseconds."""
    for result in record["results"]:
        (objective,) = result["objectives"]
        measured = {m["name"]: m["value"] for m in result["measurements"]}
        times = result["times"]
        compiled = times.get("compilation", times.get("compilation_time")) or 0.0
        cost_ms = compiled + (times.get("validation") or 0.0) + sum(times.get("runtimes") or ())
        passed = result.get("invalidity", "correct") == "correct"
        yield result["configuration"], _time(measured.get(objective)) if passed else None, cost_ms / 1e3


def _time(value: object) -> float | None:
    """A time; None for an error, which is recorded as a text or a huge number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value < _NO_TIME else None


def _parameter(name: str, column: Sequence[Any]) -> Parameter:
    values = list(dict.fromkeys(column))
    numbers = sorted(v for v in values if type(v) in (int, float))
    others = [v for v in values if type(v) not in (int, float)]
    if len(values) > 2 and others in ([], [_INACTIVE]):  # records know no conditions: inactive is a value below all
        return Ordinal(name=name, values=(*others, *numbers))
    return Categorical(name=name, values=tuple(sorted(values, key=str)))
