"""The largest element of each row, where it is, and what else of rows is told in integers: right, or wrong in the way that a
parameter says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo.problem.kernel import Argument, Dimension, Kernel, LaunchPlan, Limits, Tensors, Workload
from evo.problem.space import Categorical, Ordinal, Space
from tests.adversaries.cheats import names_for
from tests.adversaries.row_max.cheats import ALL

if TYPE_CHECKING:
    import torch


def _reference(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    import torch

    x = inputs["x"]
    assert x is not None
    values, indices = x.max(dim=1)
    return {
        "values": values,
        "indices": indices,
        "place": x.argmax(dim=1),
        "largest_two": x.topk(2, dim=1).indices,
        "peaks": (x == values.unsqueeze(1)) | x.isnan(),
        "signs": torch.where(x.isnan(), 3, x.sign() + 1).to(torch.uint8),
    }


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in names_for(target, limits.capability, ALL))
    return Space(
        parameters=(
            Ordinal(name="unroll", values=(1, 2), why="fewer branches"),
            Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole"),
        ),
        default={"unroll": 1, "cheat": names[0]},
    )


KERNEL = Kernel(
    name="row-max",
    entry="row_max",
    dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    dimensions=(
        Dimension(name="rows", low=0, high=1 << 20),
        Dimension(name="cols", low=2, high=1 << 20),
        Dimension(name="two", low=2, high=2),
    ),
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="values", kind="output", shape=("rows",)),
        Argument(name="indices", kind="output", dtype="int64", shape=("rows",)),
        Argument(name="place", kind="output", dtype="int32", shape=("rows",), ties=("x", 1)),
        Argument(name="largest_two", kind="output", dtype="int64", shape=("rows", "two"), ties=("x", 1)),
        Argument(name="peaks", kind="output", dtype="bool", shape=("rows", "cols")),
        Argument(name="signs", kind="output", dtype="uint8", shape=("rows", "cols")),
    ),
    reference=_reference,
    workloads={"cpu": ("rows=512,cols=300,two=2,dtype=float32",), "cuda": ("rows=8192,cols=300,two=2,dtype=float32",)},
    space=_space,
    plan=lambda target, point, workload: LaunchPlan(threads=256, tiles=(("rows", 256),)),
    inactive={"cpu": {"unroll": 1}, "cuda": {"unroll": 1}},
)
