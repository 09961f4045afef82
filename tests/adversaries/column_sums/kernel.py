"""Column sums in two launches over workspace, y[c] = sum of x[r, c]: right, or wrong in the way that a parameter says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from evo.problem.kernel import (
    Argument,
    Baseline,
    Case,
    Cost,
    Dimension,
    Kernel,
    LaunchPlan,
    Limits,
    Tensors,
    Tolerance,
    Workload,
)
from evo.problem.space import Categorical, Ordinal, Space, Value
from tests.adversaries.cheats import names_for
from tests.adversaries.column_sums.cheats import ALL

if TYPE_CHECKING:
    import torch

Point = Mapping[str, Value]

_EARLY = ("honest_and_early", "honest_and_all_early", "reads_early", "writes_output_early")


def _problem(rows: int, cols: int) -> Workload:
    return Workload.of({"rows": rows, "cols": cols}, "float32")


def _case(rows: int, cols: int, offset: int = 0) -> Case:
    return Case(f"{rows}x{cols} offset={offset}", _problem(rows, cols), "normal", offset)


def _inputs(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    import torch

    sizes = workload.dim("rows"), workload.dim("cols")
    return {"x": torch.randn(sizes, generator=generator, device=generator.device)}


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in names_for(target, limits.capability, ALL))
    return Space(
        parameters=(
            Ordinal(name="blocks", values=(2, 4, 8), why="blocks that share a column"),
            Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole"),
        ),
        constraints=(),
        default={"blocks": 4, "cheat": names[0]},
    )


def _plan(target: str, point: Point, workload: Workload) -> tuple[LaunchPlan, ...]:
    blocks, cheat, tiles = int(point.get("blocks", 4)), str(point["cheat"]), (("cols", 256),)
    first = "missing" if cheat == "names_no_entry_point" else "partial_sums"
    early = target == "cuda" and cheat in _EARLY
    all_early = target == "cuda" and cheat in ("honest_and_all_early", "writes_workspace_early")
    sums = LaunchPlan(threads=256, tiles=tiles, blocks_per_tile=blocks, entry=first, programmatic=all_early)
    return (sums,) if "finish" in cheat else (sums, LaunchPlan(threads=256, tiles=tiles, programmatic=early))


def _partial_size(target: str, point: Point, workload: Workload) -> tuple[int | str, ...]:
    wrong = {"asks_for_too_much": 1 << 50, "asks_for_less_than_nothing": -1}
    return (wrong[cheat],) if (cheat := str(point["cheat"])) in wrong else (int(point.get("blocks", 4)), "cols")


def _total_size(target: str, point: Point, workload: Workload) -> tuple[int | str, ...]:
    return (int(point.get("blocks", 4)) if point["cheat"] in ("honest_in_zeros", "sums_by_atomics") else 0, "cols")


def _arrivals(target: str, point: Point, workload: Workload) -> tuple[int | str, ...]:
    return (int("finish" in str(point["cheat"])),)


KERNEL = Kernel(
    name="column-sums",
    title="Column sums in two launches",
    entry="column_sums",
    dimensions=(Dimension(name="rows", low=1, high=1 << 20), Dimension(name="cols", low=1, high=1 << 20)),
    dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    options={},
    compile_time_dims={"cpu": (), "cuda": ()},
    arguments=(
        Argument(name="x", kind="input"),
        Argument(name="partial", kind="workspace", dtype="float32", size=_partial_size),
        Argument(name="total", kind="workspace", dtype="float32", size=_total_size, zeroed=True),
        Argument(name="arrivals", kind="workspace", dtype="int32", size=_arrivals, zeroed=True),
        Argument(name="y", kind="output", shape=("cols",)),
        Argument(name="rows", kind="scalar", dtype="int64"),
        Argument(name="cols", kind="scalar", dtype="int64"),
    ),
    tolerance={"float32": Tolerance(atol=1e-3, rtol=1e-4, torch_factor=100.0)},
    reference=lambda inputs, workload: {"y": inputs["x"].sum(0)},  # type: ignore[union-attr]
    inputs=_inputs,
    data=("normal",),
    cases=lambda target, workload: [_case(67, 100), _case(1, 33), _case(300, 1000), _case(50, 65, offset=1)],
    neighbours=lambda target, workload: (),
    cost=lambda w: Cost(bytes=4 * (w.dim("rows") + 1) * w.dim("cols"), flops=w.dim("rows") * w.dim("cols")),
    baselines=(Baseline(name="torch", role="reference", call=lambda inputs, workload: inputs["x"].sum(0)),),  # type: ignore[union-attr]
    workloads={"cpu": (_problem(512, 512),), "cuda": (_problem(512, 8192),)},
    space=_space,
    plan=_plan,
    inactive={"cpu": {"blocks": 4}, "cuda": {"blocks": 4}},
)
