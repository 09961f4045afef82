"""LayerNorm forward: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, per row (Ba et al. 2016,
arXiv:1607.06450), with the population variance, as torch.nn.functional.layer_norm computes it.

Layout: x and y are rows x cols, contiguous, of one dtype with weight and bias (cols each, both optional).
Statistics are float32. The CUDA template is specialised for the number of columns, the CPU template is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evo.problem.kernel import DATA, Argument, Baseline, Case, Dimension, Kernel, Tensors, Workload
from evo.problem.space import Value

from ._norm import INACTIVE, MAX_COLS, compile_flags, plan, required, space

if TYPE_CHECKING:
    import torch

_OPTIONS: dict[str, Value] = {"weight": True, "bias": True, "eps": 1e-5}


def _torch_layer_norm(inputs: Tensors, workload: Workload) -> torch.Tensor:
    import torch.nn.functional as functional

    x = required(inputs, "x")
    return functional.layer_norm(
        x, (workload.dim("cols"),), inputs["weight"], inputs["bias"], float(workload.option("eps"))
    )


def _copy(inputs: Tensors, workload: Workload) -> torch.Tensor:
    return required(inputs, "x").clone()


def _negate(inputs: Tensors, workload: Workload) -> torch.Tensor:
    """As many bytes as a copy through an elementwise kernel: on some GPUs faster than the driver's own copy."""
    return -required(inputs, "x")


def _reference(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    x = required(inputs, "x")
    mean = x.mean(dim=1, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(dim=1, keepdim=True)
    y = centred / (variance + float(workload.option("eps"))).sqrt()
    weight, bias = inputs["weight"], inputs["bias"]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return {"y": y}


def _cases(target: str, workload: Workload) -> list[Case]:
    """Few rows each, so that all of them together take a few milliseconds."""
    cols, dtype = workload.dim("cols"), workload.dtype

    def case(
        data: str, rows: int, columns: int = cols, offset: int = 0, **options: Value
    ) -> Case:
        problem = Workload.of({"rows": rows, "cols": columns}, dtype, {**_OPTIONS, **options})
        extras = [f"{k}={v}" for k, v in options.items()] + ([f"offset={offset}"] if offset else [])
        return Case(" ".join([data, f"{rows}x{columns}", *extras]), problem, data, offset)

    found = [
        case("normal", 67),
        case("large_mean", 67),
        case("normal", 1, weight=False),
        case("normal", 5, bias=False),
        case("normal", 3, weight=False, bias=False),
        case("tiny", 5, eps=0.5),
        case("constant", 5),
        case("outlier", 33),
        case("first_outlier", 31),
        case("huge", 5),
        case("denormal", 3, eps=1e-12),
        case("needle", 17),
        case("permuted", 7, weight=False),
        case("ramp", 9),
        case("non_finite", 7),
        case("normal", 6, offset=1),
    ]
    if dtype == "float32":
        found.append(case("tight", 67))
    if target == "cuda":  # more rows than a persistent grid takes at once, and no whole number of its steps
        found.append(case("normal", min(65_539, max(523, (9 << 20) // cols | 1))))
    if target == "cpu":  # one binary serves every number of columns
        found += [case("normal", 5, columns) for columns in (1, 3, 17, 64, 127, 769, 1023, 1025)]
        found += [case("needle", 3, columns) for columns in (31, 129, 4097)]
        found += [case("large_mean", 33, 769), case("normal", 3, 1023, offset=3)]
    return found


def _neighbours(target: str, workload: Workload) -> Sequence[Workload]:
    """Other columns for the same genome: odd, one less, one more, short, long."""
    if target == "cpu":
        return ()
    cols = workload.dim("cols")
    near = (cols - 1, cols + 1, cols + 8, 2 * cols, 769)
    return [
        Workload.of({"rows": 67, "cols": c}, workload.dtype, _OPTIONS)
        for c in dict.fromkeys(near)
        if 1 <= c <= MAX_COLS and c != cols
    ]


def _workloads(*shapes: tuple[int, int, str]) -> tuple[Workload, ...]:
    return tuple(Workload.of({"rows": r, "cols": c}, dtype, _OPTIONS) for r, c, dtype in shapes)


KERNEL = Kernel(
    name="layernorm",
    title="LayerNorm forward",
    dimensions=(Dimension(name="rows", low=0, high=2**31 - 1), Dimension(name="cols", low=1, high=MAX_COLS)),
    dtypes={"cuda": ("float16", "bfloat16", "float32"), "cpu": ("float32", "bfloat16")},
    options=_OPTIONS,
    option_min={"eps": 0.0},
    compile_time_dims={"cuda": ("cols",), "cpu": ()},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="weight", kind="input", shape=("cols",), optional=True),
        Argument(name="bias", kind="input", shape=("cols",), optional=True),
        Argument(name="y", kind="output", shape=("rows", "cols")),
    ),
    reference=_reference,
    data=(*DATA, "tight", "denormal", "needle", "permuted"),
    cases=_cases,
    neighbours=_neighbours,
    baselines=(
        Baseline(name="torch", role="reference", call=_torch_layer_norm),
        Baseline(name="copy", role="ceiling", call=_copy),
        Baseline(name="negate", role="ceiling", call=_negate),
    ),
    workloads={
        "cuda": _workloads((4096, 4096, "float16")),
        "cpu": _workloads((4096, 1024, "float32"), (4096, 1024, "bfloat16")),
    },
    space=space,
    plan=plan,
    inactive=INACTIVE,
    compile_flags=compile_flags,
    replaces="torch.nn.functional.layer_norm",
)
