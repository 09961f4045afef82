"""Search spaces and costs that tests of samplers and operators share; arithmetic in place of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evo.evaluation import Proposal
from evo.problem.genome import Genome
from evo.problem.space import Categorical, Constraint, Ordinal, Point, Space, Value, When
from evo.search.samplers import Exhausted, Sampler

__all__ = ["Evaluate", "outcome", "play", "tight_space", "tiled_space", "tiny_space"]

Evaluate = Callable[[Genome], float | None]


def tiny_space() -> Space:
    """24 combinations, of which 13 are legal points (conditions merge some, a constraint refuses some)."""
    return Space(
        parameters=(
            Ordinal(name="tile", values=(1, 2, 4)),
            Categorical(name="store", values=("registers", "shared"), structural=True),
            Categorical(name="pad", values=(False, True), when=(When(parameter="store", values=("shared",)),)),
            Ordinal(name="unroll", values=(1, 2)),
        ),
        constraints=(
            Constraint(
                name="fits",
                holds=lambda p: int(p["tile"]) * int(p["unroll"]) * (2 if p.get("pad") else 1) <= 8,
                reason="a tile, unrolled and padded, has at most 8 elements",
            ),
            Constraint(
                name="padded_tiles_are_wide",
                holds=lambda p: not p.get("pad") or int(p["tile"]) >= 2,
                reason="padding a single element is of no use",
            ),
            Constraint(
                name="narrow_tiles_are_unrolled",
                holds=lambda p: int(p["tile"]) > 1 or int(p["unroll"]) == 2,
                reason="a narrow tile alone is too little work",
            ),
        ),
        default={"tile": 2, "store": "shared", "pad": False, "unroll": 1},
    )


def tiled_space() -> Space:
    """Like that of a real kernel: 15 parameters, conditions, constraints, a third of the draws legal."""
    direct, staged = When(parameter="path", values=("direct",)), When(parameter="path", values=("async", "bulk"))
    return Space(
        parameters=(
            Ordinal(name="block", values=(32, 64, 128, 256, 512, 1024)),
            Ordinal(name="rows", values=(1, 2, 4, 8, 16)),
            Ordinal(name="vector", values=(1, 2, 4, 8)),
            Ordinal(name="tile", values=(1, 2, 3, 4, 6, 8, 12, 16)),
            Categorical(name="path", values=("direct", "async", "bulk"), structural=True),
            Ordinal(name="stages", values=(1, 2, 3, 4), when=(staged,)),
            Categorical(name="swizzle", values=(False, True), when=(staged,)),
            Categorical(name="hint", values=("none", "cs", "lu", "na"), when=(direct,)),
            Categorical(name="store", values=("registers", "shared"), structural=True),
            Ordinal(name="pad", values=(0, 1, 2, 4), when=(When(parameter="store", values=("shared",)),)),
            Categorical(name="reduce", values=("warp", "shuffle", "tree", "leader"), structural=True),
            Ordinal(name="accumulators", values=(1, 2, 4)),
            Ordinal(name="unroll", values=(1, 2, 4, 8)),
            Ordinal(name="min_blocks", values=(0, 1, 2, 3, 4, 6, 8)),
            Categorical(name="ignored", values=("a", "b", "c", "d")),
        ),
        constraints=(
            Constraint(
                name="threads",
                holds=lambda p: int(p["block"]) // int(p["rows"]) >= 32,
                reason="a row has at least a warp",
            ),
            Constraint(
                name="registers",
                holds=lambda p: int(p["vector"]) * int(p["tile"]) * int(p["unroll"]) <= 64,
                reason="what is held in registers must fit",
            ),
            Constraint(
                name="warp_reduction",
                holds=lambda p: p["reduce"] != "warp" or int(p["block"]) == 32 * int(p["rows"]),
                reason="one warp reduces one row",
            ),
            Constraint(
                name="resident",
                holds=lambda p: int(p["block"]) * max(1, int(p["min_blocks"])) <= 2048,
                reason="so many threads are not resident",
            ),
        ),
        default={"block": 128, "rows": 1, "vector": 4, "tile": 2, "path": "direct", "reduce": "shuffle"},
    )


def tight_space() -> Space:
    """One draw in 10^7 is legal: five ordinals that must all be equal to the first."""
    names = [f"p{i}" for i in range(5)]
    return Space(
        parameters=tuple(Ordinal(name=n, values=tuple(range(60))) for n in names),
        constraints=tuple(
            Constraint(name=f"{n}_equal", holds=partial(_is_first, n), reason="all are equal")
            for n in names[1:]
        ),
        default=dict.fromkeys(names, 5),
    )


def _is_first(name: str, point: Mapping[str, Value]) -> bool:
    return point[name] == point["p0"]


_BEST: dict[str, Value] = {
    "block": 256,
    "rows": 4,
    "vector": 8,
    "tile": 4,
    "path": "async",
    "stages": 3,
    "swizzle": True,
    "store": "registers",
    "reduce": "tree",
    "unroll": 2,
}
_WEIGHT = {"block": 0.5, "rows": 0.4, "vector": 0.6, "tile": 0.4, "path": 0.2, "stages": 0.3, "reduce": 0.3}


def outcome(genome: Genome) -> float | None:
    """A time ratio for a point of `tiled_space`, 0.5 at the best; None for what does not pass the gate.

    `ignored` changes nothing, `accumulators` next to nothing; a swizzle fails with bulk copies, and 16 vectors
    in flight spill unless they are stored in shared memory: that is for a sampler to find out.
    """
    p: dict[str, Any] = genome.parameters
    if (p["path"] == "bulk" and p.get("swizzle")) or (p["tile"] == 16 and p["store"] == "registers"):
        return None
    cost = 0.002 * p["accumulators"]
    by_name = tiled_space().by_name
    for name, best in _BEST.items():
        weight = _WEIGHT.get(name, 0.1)
        if name not in p:
            cost += 0.5 * weight
        elif isinstance(by_name[name], Ordinal):
            values = by_name[name].values
            cost += weight * abs(values.index(p[name]) - values.index(best)) / (len(values) - 1)
        else:
            cost += weight * (p[name] != best)
    if p["block"] * p["vector"] > 2048:  # good alone, bad together
        cost += 0.2
    return 0.5 * math.exp(cost)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a sampler was told."""

    order: int
    genome: Genome
    score: float | None
    duplicate_of: int | None


def play(
    sampler: Sampler, evaluate: Evaluate, count: int, *, window: int = 1, same_code: Sequence[str] = ()
) -> tuple[list[Proposal], list[Result]]:
    """Asks up to `count` times with up to `window` proposals outstanding; tells in order.

    Genomes that differ only in the parameters of `same_code` share machine code. Ends early when exhausted.
    """
    proposals: list[Proposal] = []
    results: list[Result] = []
    codes: dict[Genome, int] = {}
    done = False
    while len(results) < count:
        while not done and len(proposals) < count and len(proposals) - len(results) < window:
            try:
                proposals.append(sampler.ask(len(proposals)))
            except Exhausted:
                done = True
        if len(results) == len(proposals):
            break
        order = len(results)
        genome = proposals[order].genome
        score = evaluate(genome)
        code = codes.setdefault(Genome.of(_without(genome.parameters, same_code)), order)
        results.append(Result(order=order, genome=genome, score=score, duplicate_of=code if code != order else None))
        sampler.tell(order, score, results[-1].duplicate_of)
    return proposals, results


def _without(point: Mapping[str, Value], names: Sequence[str]) -> Point:
    return {n: v for n, v in point.items() if n not in names}
