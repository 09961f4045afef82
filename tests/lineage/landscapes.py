"""Runs with a cost model that is known, so that what is said of them can be judged."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from evo.evaluation import Candidate, Evaluation, Parent
from evo.lineage import RunStatus, StoredRun
from evo.lineage.models import public_id
from evo.lineage.store import Store
from evo.problem.space import Value
from tests.lineage import samples as s

Point = dict[str, Value]

START: Point = {"path": "reread", "vector": 1, "threads": 128, "hints": "none"}
END: Point = {"path": "shared", "stages": 3, "vector": 4, "threads": 256, "hints": "stream"}
GAINS = {"path": 1.3, "vector": 1.6, "threads": 1.05, "hints": 1.0}
"""What each edit of the way from START to END gains; `stages` comes with `path`."""
SPREAD = 1.002
"""Half of an interval."""


def ratio(point: Point) -> float:
    found = 0.9
    for name, gain in GAINS.items():
        found /= gain if point[name] == END[name] else 1.0
    return found


def timed(order: int, value: float, *, task: int = 0) -> Evaluation:
    """One that passed, with this ratio and a narrow interval."""
    evaluation = s.passed(order, value, task=task)
    own = replace(
        evaluation.timings[0],
        median_us=20.0 * value,
        low_us=20.0 * value / SPREAD,
        high_us=20.0 * value * SPREAD,
        samples_us=(20.0 * value,) * 5,
        ratio_low=value / SPREAD,
        ratio_high=value * SPREAD,
    )
    return replace(evaluation, timings=(own, *evaluation.timings[1:]))


def ref(order: int, point: Point, *parents: int, operator: str = "mutation") -> Candidate:
    return s.ref(order, *parents, operator=operator, point=point)


def small_run(store: Store, name: str = "small") -> StoredRun:
    return store.create_run(replace(s.SPEC, name=name, workloads=(s.SMALL,)), s.ENVIRONMENT)


def kin(store: Store) -> list[str]:
    """A run "kin" whose 0 and 1 are roots, 2 a crossover of both, 3 its child, which is wrong, 4 a bystander from 0, 5 a
    child of 3 and 4, 6 of 5; their public ids."""
    run = small_run(store, "kin")
    tried = [
        (s.ref(0), timed(0, 0.8)),
        (s.ref(1), timed(1, 0.9)),
        (s.ref(2, Parent(1, "mother"), Parent(0, "father"), operator="crossover"), timed(2, 0.6)),
        (s.ref(3, 2), s.refused(3)),
        (s.ref(4, 0), timed(4, 0.7)),
        (s.ref(5, 3, 4), timed(5, 0.3)),
        (s.ref(6, 5), timed(6, 0.3)),
    ]
    for order, (candidate, evaluation) in enumerate(tried):
        store.add(run, candidate, evaluation, elapsed_s=float(order))
    return [public_id(run.uid, order) for order in range(len(tried))]


def walked(store: Store, points: list[Point], name: str = "small") -> list[str]:
    """A run that tried these points, each the child of the one before; their public ids."""
    run = small_run(store, name)
    for order, point in enumerate(points):
        store.add(run, ref(order, point, *([order - 1] if order else [])), timed(order, ratio(point)), elapsed_s=order)
    return [public_id(run.uid, order) for order in range(len(points))]


def searched(store: Store, name: str, number: int, *, seed: int = 0) -> list[str]:
    """A random search of a space in which threads=1024 with path=registers does not compile, and vector decides."""
    rng, run = random.Random(seed), small_run(store, name)
    with store.transaction():
        for order in range(number):
            point: Point = {
                "path": rng.choice(["registers", "shared"]),
                "threads": rng.choice([128, 256, 512, 1024]),
                "vector": rng.choice([1, 2, 4, 8]),
                "hints": rng.choice(["none", "stream"]),
            }
            if point["path"] == "shared":
                point["stages"] = rng.choice([1, 2])
            broken = point["path"] == "registers" and point["threads"] == 1024
            value = 0.9 / math.sqrt(float(point["vector"])) * math.exp(rng.gauss(0, 0.005))
            evaluation = s.not_compiled(order) if broken else timed(order, value)
            operator = "random" if order < number // 2 else "mutation"
            store.add(run, ref(order, point, operator=operator), evaluation, elapsed_s=0.1 * (order + 1))
    store.set_status(run, RunStatus.FINISHED, reason="time is up", elapsed_s=0.1 * number)
    return [public_id(run.uid, order) for order in range(number)]
