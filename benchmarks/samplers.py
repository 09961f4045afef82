"""Replays recorded search spaces to compare samplers: no GPU, no compiler, every evaluation looked up.

    python benchmarks/samplers.py --space convolution.json.gz [--space gemm.json.gz] [--samplers evolution,tpe,random]
                                  [--repeats 25] [--window 1] [--jobs 2] [--options evolution.children=4]

A space is a cache file of Kernel Tuner, plain or gzipped: every configuration with its time or its failure, and
what it cost to find out. Such spaces are published at https://github.com/AutoTuningAssociation/benchmark_hub.

The score is the performance over time of Willemsen et al. (2024, "A methodology for comparing optimization
algorithms for auto-tuning", doi 10.1016/j.future.2024.05.021): 0 is random search, 1 the optimum at once, averaged
over a budget within which random search comes 95% of the way from the median to the optimum. Failures are
charged like everything else. Every repeat starts from another default, drawn from the legal configurations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Point, Space
from evo.search.samplers import Exhausted, find_sampler, sampler_names

_START, _CUTOFF, _GRID_POINTS = 0.01, 0.95, 1000
_LATE = 1.1
"""A replay goes on beyond the budget by so much, so that its end is covered."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One replay: (seconds as recorded, best time so far) for each improvement, and what the sampler took."""

    improvements: list[tuple[float, float]]
    evaluations: int
    sampler_s: float


class RecordedSpace:
    """A cache file as a `Space` whose only constraint is that the configuration was recorded."""

    def __init__(self, path: Path) -> None:
        record = _read(path)
        self.names: list[str] = record["tune_params_keys"]
        self.parameters = tuple(_parameter(n, record["tune_params"][n]) for n in self.names)
        objective = record.get("objective", "time")
        self.times = {key: _number(entry.get(objective)) for key, entry in record["cache"].items()}
        self.costs_s = {key: _cost_s(entry) for key, entry in record["cache"].items()}
        self.best_first = np.array(sorted(t for t in self.times.values() if t is not None))
        self._legal = {tuple(key.split(",")) for key in self.times}
        costs = np.array(list(self.costs_s.values()))
        self._begin_s, self.budget_s = (self._evaluations(f) * float(np.median(costs)) for f in (_START, _CUTOFF))
        passed = np.array([t is not None for t in self.times.values()])
        failing_s = 0.0 if passed.all() else float(costs[~passed].mean() * (~passed).mean())
        self._evaluation_s = float(costs[passed].mean()) + failing_s

    def space(self, rng: random.Random) -> Space:
        return Space(
            parameters=self.parameters,
            constraints=(Constraint(name="recorded", holds=self._is_recorded, reason="there is a record of it"),),
            default=self._point(rng.choice(sorted(self._legal))),
        )

    def key(self, point: Mapping[str, object]) -> str:
        return ",".join(str(point[n]) for n in self.names)

    def score(self, replays: list[Replayed]) -> float:
        """Mean over the budget of the share of the way from random search to the optimum."""
        grid = np.linspace(self._begin_s, self.budget_s, _GRID_POINTS)
        n = len(self.best_first)
        tries = np.maximum(np.round(grid / self._evaluation_s), 1)
        # The expected rank of the best of m draws without replacement.
        chance = self.best_first[::-1][np.minimum(np.round(tries * (n + 1) / (tries + 1)).astype(int), n - 1)]
        ranks = []
        for replay in replays:
            seconds, best = (np.array(column) for column in zip(*replay.improvements, strict=True))
            reached = best[np.maximum(np.searchsorted(seconds, grid, side="right") - 1, 0)]
            ranks.append(np.searchsorted(self.best_first, reached, side="left"))
        mean = self.best_first[np.clip(np.round(np.mean(ranks, axis=0)).astype(int), 0, n - 1)]
        return float(np.mean((mean - chance) / (self.best_first[0] - chance)))

    def _evaluations(self, fraction: float) -> int:
        """Random draws that are expected to come `fraction` of the way from the median to the optimum."""
        best, median = float(self.best_first[0]), float(np.median(self.best_first))
        worse = int(np.argmax(self.best_first[::-1] <= best + (median - best) * (1 - fraction)))
        return math.ceil(worse / (len(self.best_first) + 1 - worse))

    def _is_recorded(self, point: Mapping[str, object]) -> bool:
        return tuple([str(point[n]) for n in self.names]) in self._legal

    def _point(self, key: tuple[str, ...]) -> Point:
        by_text = [{str(v): v for v in p.values} for p in self.parameters]
        return {p.name: values[text] for p, values, text in zip(self.parameters, by_text, key, strict=True)}


def _read(path: Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    try:
        record: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:  # the cache is appended to, and closed only at the end
        record = json.loads(text.rstrip().rstrip(",") + "}\n}")
    return record


def _parameter(name: str, values: list[Any]) -> Parameter:
    ordered = len(values) > 2 and all(isinstance(v, int | float) for v in values)
    return (Ordinal if ordered else Categorical)(name=name, values=tuple(values))


def _number(value: object) -> float | None:
    """Errors stand in place of the time, as text or as a huge number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value < 1e19 else None


def _cost_s(entry: Mapping[str, Any]) -> float:
    return sum(entry.get(part) or 0.0 for part in ("compile_time", "verification_time", "benchmark_time")) / 1e3


_load = cache(RecordedSpace)


def replay(path: Path, sampler: str, options: Mapping[str, object], window: int, seed: int) -> Replayed:
    """Runs one sampler over the budget of one space, with `window` proposals outstanding."""
    recorded = _load(path)
    made = find_sampler(sampler)(recorded.space(random.Random(f"{path.name} {seed}")), seed, options)
    improvements: list[tuple[float, float]] = []
    pending: list[Any] = []
    spent_s, asked, told, sampler_s, exhausted = 0.0, 0, 0, 0.0, False
    while spent_s < _LATE * recorded.budget_s:
        began = time.perf_counter()
        while len(pending) < window and not exhausted:
            try:
                pending.append(made.ask(asked).genome)
                asked += 1
            except Exhausted:
                exhausted = True
        sampler_s += time.perf_counter() - began
        if not pending:
            break
        genome = pending.pop(0)
        key = recorded.key(genome.parameters)
        spent_s += recorded.costs_s[key]
        found = recorded.times[key]
        if found is not None and (not improvements or found < improvements[-1][1]):
            improvements.append((spent_s, found))
        began = time.perf_counter()
        made.tell(told, found)
        sampler_s += time.perf_counter() - began
        told += 1
    return Replayed(improvements=improvements, evaluations=told, sampler_s=sampler_s)


def _options(texts: list[str]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {name: {} for name in sampler_names()}
    for text in texts:
        name, _, value = text.partition("=")
        sampler, _, option = name.partition(".")
        found.setdefault(sampler, {})[option] = json.loads(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", type=Path, action="append", required=True, help="may be given more than once")
    parser.add_argument("--samplers", default=",".join(sampler_names()))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--options", action="append", default=[], metavar="SAMPLER.NAME=VALUE")
    arguments = parser.parse_args()
    options = _options(arguments.options)
    print(f"{'space':36} {'sampler':10} {'score':>6} {'evaluations':>11} {'ms each':>8}")
    for path in arguments.space:
        for sampler in arguments.samplers.split(","):
            run = partial(replay, path, sampler, options[sampler], arguments.window)
            if arguments.jobs > 1:
                with ProcessPoolExecutor(arguments.jobs) as pool:
                    replays = list(pool.map(run, range(arguments.repeats)))
            else:
                replays = [run(seed) for seed in range(arguments.repeats)]
            score = _load(path).score(replays)
            evaluations = statistics.mean(r.evaluations for r in replays)
            each_ms = 1e3 * sum(r.sampler_s for r in replays) / sum(r.evaluations for r in replays)
            print(f"{path.name:36} {sampler:10} {score:6.3f} {evaluations:11.0f} {each_ms:8.2f}", flush=True)


if __name__ == "__main__":
    main()
