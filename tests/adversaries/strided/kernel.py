"""A masked copy by strides: y[b, h, r, c] is x[b, h, r, c] where the mask is not 0, else 0; or wrong as a parameter says."""

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
from evo.problem.space import Categorical, Space, Value
from tests.adversaries.cheats import names_for
from tests.adversaries.strided.cheats import ALL

if TYPE_CHECKING:
    import torch

_SIZES = ("batch", "heads", "rows", "cols")


def _problem(*sizes: int) -> Workload:
    return Workload.of(dict(zip(_SIZES, sizes, strict=True)), "float32")


def _case(*sizes: int) -> Case:
    return Case("x".join(map(str, sizes)), _problem(*sizes), "normal")


def _inputs(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
    import torch

    sizes = [workload.dim(name) for name in _SIZES]
    x = torch.randn(sizes, generator=generator, device=generator.device)
    return {"x": x, "mask": torch.randint(0, 2, sizes, generator=generator, device=generator.device, dtype=torch.uint8)}


def _masked(inputs: Tensors, workload: Workload) -> torch.Tensor:
    x, mask = inputs["x"], inputs["mask"]
    assert x is not None
    assert mask is not None
    return x * (mask != 0)


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    names = tuple(c.name for c in names_for(target, limits.capability, ALL))
    return Space(
        parameters=(Categorical(name="cheat", values=names, structural=True, why="a search finds every loophole"),),
        constraints=(),
        default={"cheat": names[0]},
    )


def _plan(target: str, point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    return LaunchPlan(threads=128, tiles=(("rows", 1), ("heads", 1), ("batch", 1)), axes=True)


def _strides() -> tuple[Argument, ...]:
    axes = [("x", n, axis) for n, axis in enumerate(("batch", "head", "row"))]
    axes += [("mask", n, axis) for n, axis in enumerate(("batch", "head", "row", "col"))]
    axes += [("y", n, axis) for n, axis in enumerate(("batch", "head", "row"))]
    return tuple(
        Argument(name=f"{tensor}_{axis}", kind="scalar", dtype="int64", stride_of=(tensor, n)) for tensor, n, axis in axes
    )


KERNEL = Kernel(
    name="strided",
    title="A masked copy by strides",
    entry="strided",
    dimensions=tuple(Dimension(name=name, low=1, high=1 << 16) for name in _SIZES),
    dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    compile_time_dims={"cpu": (), "cuda": ()},
    arguments=(
        Argument(name="x", kind="input"),
        Argument(name="mask", kind="input", dtype="uint8"),
        Argument(name="y", kind="output", shape=_SIZES),
        *(Argument(name=name, kind="scalar", dtype="int64") for name in _SIZES),
        *_strides(),
    ),
    tolerance={"float32": Tolerance(atol=1e-6, rtol=1e-6)},
    reference=lambda inputs, workload: {"y": _masked(inputs, workload)},
    inputs=_inputs,
    data=("normal",),
    cases=lambda target, workload: [_case(2, 3, 5, 7), _case(3, 3, 3, 33), _case(2, 2, 65, 130), _case(1, 1, 1, 1)],
    neighbours=lambda target, workload: (),
    cost=lambda w: Cost(bytes=9 * w.dim("batch") * w.dim("heads") * w.dim("rows") * w.dim("cols"), flops=0),
    baselines=(Baseline(name="torch", role="reference", call=_masked),),
    workloads={"cpu": (_problem(4, 8, 64, 64),), "cuda": (_problem(8, 16, 256, 128),)},
    space=_space,
    plan=_plan,
)
