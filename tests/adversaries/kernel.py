"""LayerNorm's problem, and a template that is wrong in the way that its parameter says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evo.problem.kernel import LaunchPlan, Limits, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Categorical, Space, Value

from .cheats import names_for

_PROGRAMMATIC = (
    "reads_early",
    "reads_early_when_timed",
    "writes_output_early",
    "overlaps_itself",
    "honest_and_patient",
)


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in names_for(target, limits.capability))
    return Space(
        parameters=(Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole"),),
        constraints=(),
        default={"cheat": names[0]},
    )


def _plan(target: str, point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    if target != "cuda":
        return LaunchPlan(threads=1)
    smem = {"uninitialised_shared": 128, "too_much_shared_memory": 1 << 20}
    return LaunchPlan(
        threads=256,
        tiles=(("rows", 1),),
        smem_bytes=smem.get(str(point["cheat"]), 0),
        programmatic=point["cheat"] in _PROGRAMMATIC,
    )


def _neighbours(target: str, workload: Workload) -> list[Workload]:
    """Not those with options that the template has no code for."""
    found = _LAYERNORM.neighbours(target, workload)
    return [w for w in found if not any(w.option(n) for n in ("residual", "mean", "rstd"))]


_LAYERNORM = load_kernel("layernorm")
KERNEL = replace(
    _LAYERNORM,
    name="adversaries",
    title="LayerNorm forward, by cheats",
    neighbours=_neighbours,
    space=_space,
    plan=_plan,
    inactive={},
    compile_flags=lambda target, point: ("-O1",) if target == "cpu" else (),
)
