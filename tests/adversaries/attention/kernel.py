"""Attention's problem, solved by a template that cheats: the parameter says how."""

from __future__ import annotations

from dataclasses import replace

from evo.problem.kernel import LaunchPlan, Limits, Workload
from evo.problem.loading import load_kernel
from evo.problem.space import Categorical, Space
from tests.adversaries.attention.cheats import ALL

_HONEST = load_kernel("attention")


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in ALL)
    return Space(
        parameters=(Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole"),),
        constraints=(),
        default={"cheat": names[0]},
    )


KERNEL = replace(
    _HONEST,
    name="attention-adversaries",
    title="Attention forward, by cheats",
    dtypes={"cpu": _HONEST.dtypes["cpu"]},
    workloads={"cpu": _HONEST.workloads["cpu"]},
    space=_space,
    plan=lambda target, point, workload: LaunchPlan(threads=1),
    inactive={},
    compile_flags=lambda target, point: ("-O2", "-ffp-contract=off"),  # honest ones subtract what is rounded alike
)
