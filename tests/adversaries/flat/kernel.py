"""Differences to the first element of each row, y[r, c] = x[r, c] - x[r, 0], of rows that lie one behind the other in one
dimension, which has to be a multiple of the columns: right, or wrong in the way that a parameter says."""

from __future__ import annotations

from collections.abc import Mapping

from evo.problem.kernel import Argument, Dimension, Kernel, LaunchPlan, Limits, Tensors, Workload
from evo.problem.space import Categorical, Space, Value
from tests.adversaries.cheats import names_for
from tests.adversaries.flat.cheats import ALL


def _reference(inputs: Tensors, workload: Workload) -> dict[str, object]:
    rows = inputs["x"].reshape(-1, workload.dim("cols"))  # type: ignore[union-attr]
    return {"y": (rows - rows[:, :1]).flatten()}


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in names_for(target, limits.capability, ALL))
    parameter = Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole")
    return Space(parameters=(parameter,), default={"cheat": names[0]})


def _plan(target: str, point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    return LaunchPlan(threads=256, tiles=(("n", 256),)) if target == "cuda" else LaunchPlan(threads=1)


KERNEL = Kernel(
    name="flat",
    dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    dimensions=(Dimension(name="n", low=0, high=2**31 - 1), Dimension(name="cols", low=1, high=2**31 - 1)),
    arguments=(
        Argument(name="x", kind="input", shape=("n",)),
        Argument(name="y", kind="output", shape=("n",)),
    ),
    reference=_reference,  # type: ignore[arg-type]
    validate=lambda w: "cols must divide n" if w.dim("n") % w.dim("cols") else "",
    workloads={"cpu": ("n=65536,cols=512,dtype=float32",), "cuda": ("n=4194304,cols=1024,dtype=float32",)},
    space=_space,
    plan=_plan,
)
