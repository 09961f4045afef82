"""The problem of the backward kernels of the norms, of which LayerNorm's is `centred` and RMSNorm's is not.

With xhat = (x - mean) * rstd and g = dy * weight, per row (RMSNorm: mean = 0, and no mean of g):
dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); over the rows, dweight = sum of dy * xhat, dbias = sum of dy.

Layout: dy, x, dx and dresidual are rows x cols, contiguous, of one dtype with weight, dweight and dbias (cols each), which
with weight_dtype=float32 are float32 beside 16 bits; mean and rstd, one a row, are float64 for that dtype, else float32.
dresidual is the gradient that x got elsewhere (a
residual sum); it is added to dx. Kernels that are `added` have it at first.
The CUDA template is specialised for the number of columns and the options, the CPU template is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from evo.problem.kernel import (
    DATA,
    DTYPE_BYTES,
    Argument,
    Baseline,
    Case,
    Dimension,
    Kernel,
    LaunchPlan,
    Limits,
    Tensors,
    Workload,
    draw,
)
from evo.problem.space import Space, Value

from .._norm.weights import CHOICES, fault, is_mixed, just_below_half_a_step
from . import cpu_space, cuda_space

if TYPE_CHECKING:
    import torch

_EPS = 1e-5
_NO_WEIGHT = "dweight=true needs weight=true"
_MAX_COLS = 16_384
"""A block of 1024 threads holds the sums of so many columns in registers."""


def norm_backward(name: str, title: str, *, centred: bool, added: bool = False) -> Kernel:
    options: dict[str, Value] = {"weight": True, "dweight": True, "dresidual": added}
    if centred:
        options["dbias"] = True
    options["weight_dtype"] = "same"
    rows, row = ("rows", "cols"), ("cols",)
    saved = ("mean", "rstd") if centred else ("rstd",)
    sums = ("dweight", "dbias") if centred else ("dweight",)

    def plan(target: str, point: Mapping[str, Value], workload: Workload) -> tuple[LaunchPlan, ...]:
        finish = f"{name}_finish"
        return cuda_space.plan(point, workload, finish) if target == "cuda" else cpu_space.plan(finish)

    def space(target: str, workload: Workload, limits: Limits) -> Space:
        return (cuda_space if target == "cuda" else cpu_space).space(workload, limits)

    def partial(target: str, point: Mapping[str, Value], workload: Workload) -> tuple[int | str, ...]:
        if target == "cuda":  # one slice a block
            return int(point["blocks"]), cuda_space.sums(workload), "cols"
        words = 2 if workload.dtype == "float64" else 1
        return int(point["chunks"]) * words, len(sums), "cols"

    def arrivals(target: str, point: Mapping[str, Value], workload: Workload) -> tuple[int, ...]:
        return (int(point.get("finish") == "last_block"),)

    return Kernel(
        name=name,
        title=title,
        dimensions=(Dimension(name="rows", low=1, high=2**31 - 1), Dimension(name="cols", low=1, high=_MAX_COLS)),
        dtypes={"cuda": ("float16", "bfloat16", "float32"), "cpu": ("float32", "bfloat16", "float64")},
        options=options,
        choices=CHOICES,
        compile_time_dims={"cuda": ("cols", *options), "cpu": (*CHOICES,)},
        arguments=(
            Argument(name="dy", kind="input", shape=rows),
            Argument(name="x", kind="input", shape=rows),
            Argument(name="weight", kind="input", dtype="weight_dtype", shape=row, optional=True),
            *(Argument(name=n, kind="input", dtype="opmath", shape=("rows",)) for n in saved),
            Argument(name="dresidual", kind="input", shape=rows, optional=True),
            Argument(name="dx", kind="output", shape=rows),
            *(Argument(name=n, kind="output", dtype="weight_dtype", shape=row, optional=True) for n in sums),
            Argument(name="partial", kind="workspace", dtype="float32", size=partial),
            Argument(name="arrivals", kind="workspace", dtype="int32", size=arrivals, zeroed=True),
        ),
        reference=_reference,
        same_dtype=_as_far_off_as_sums(_layer_norm if centred else _rms_norm),
        inputs=_inputs(centred),
        cases=_cases(options),
        baselines=(Baseline(name="torch", role="reference", call=_layer_norm if centred else _rms_norm),),
        workloads={"cuda": ("rows=4096,cols=8192,dtype=float16",), "cpu": ("rows=2048,cols=1024,dtype=float32",)},
        space=space,
        plan=plan,
        inactive={"cuda": cuda_space.INACTIVE, "cpu": cpu_space.INACTIVE},
        replaces="" if added else f"torch.ops.aten.{'native_layer_norm' if centred else '_fused_rms_norm'}_backward",
        backward_of=name.removesuffix("_backward"),
        validate=lambda w: fault(w) or ("" if w.option("weight") or not w.option("dweight") else _NO_WEIGHT),
    )


def _reference(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    return _gradients(inputs, -1.0)


def _gradients(inputs: Tensors, sign: float) -> dict[str, torch.Tensor]:
    """sign: of the means. -1: the gradients; 1, and every term by its size: what their errors are relative to."""
    dy, x, weight, mean, rstd = (inputs.get(n) for n in ("dy", "x", "weight", "mean", "rstd"))
    assert dy is not None
    assert x is not None
    assert rstd is not None
    xhat = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    if sign > 0:
        dy, xhat, weight = dy.abs(), xhat.abs(), None if weight is None else weight.abs()
    g = dy if weight is None else dy * weight
    dx = g + sign * xhat * (g * xhat).mean(1, keepdim=True)
    if mean is not None:
        dx = dx + sign * g.mean(1, keepdim=True)
    return _found(dx * rstd[:, None], (dy * xhat).sum(0), dy.sum(0), inputs)


def _as_far_off_as_sums(
    call: Callable[[Tensors, Workload], dict[str, torch.Tensor]],
) -> Callable[[Tensors, Workload], dict[str, torch.Tensor]]:
    """PyTorch's gradients, and an error that differences and sums of such terms may have where they are computed in float32,
    or float64. PyTorch's own is no measure: one order of summation is lucky where another of equal merit is not, and columns
    may be few."""

    def outputs(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
        import torch

        opmath = torch.promote_types(getattr(torch, workload.dtype), torch.float32)
        sizes = _gradients({n: None if t is None else t.to(opmath) for n, t in inputs.items()}, 1.0)
        found = call(inputs, workload)
        return {n: t + torch.finfo(opmath).eps * sizes[n] for n, t in found.items() if t is not None}

    return outputs


def _found(dx: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor, inputs: Tensors) -> dict[str, torch.Tensor]:
    residual = inputs["dresidual"]
    return {"dx": dx if residual is None else dx + residual, "dweight": dweight, "dbias": dbias}


def _layer_norm(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    """What PyTorch's autograd calls."""
    import torch

    dy, x = inputs["dy"], inputs["x"]
    assert dy is not None
    assert x is not None
    # On a CPU it wants the statistics in the dtype of x, on a GPU the weight.
    if is_mixed(workload) or (not x.is_cuda and DTYPE_BYTES[workload.dtype] < 4):
        return _from_opmath(inputs, workload)
    bias = dy[0]  # PyTorch asks whether there is one, and does not read it
    asked = [True, bool(workload.option("dweight")), bool(workload.option("dbias"))]
    statistics = inputs["mean"], inputs["rstd"]
    call = torch.ops.aten.native_layer_norm_backward
    return _found(*call(dy, x, [workload.dim("cols")], *statistics, inputs["weight"], bias, asked), inputs)


def _rms_norm(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    """What PyTorch's autograd calls, where it has one operator for it."""
    import torch

    dy, x, rstd = inputs["dy"], inputs["x"], inputs["rstd"]
    assert x is not None
    assert rstd is not None
    if not x.is_cuda or is_mixed(workload) or not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        return _from_opmath(inputs, workload)
    asked = [True, bool(workload.option("dweight"))]
    call = torch.ops.aten._fused_rms_norm_backward
    dx, dweight = call(dy, x, [workload.dim("cols")], rstd[:, None], inputs["weight"], asked)
    return _found(dx, dweight, dweight, inputs)


def _from_opmath(inputs: Tensors, workload: Workload) -> dict[str, torch.Tensor]:
    import torch

    dtype = getattr(torch, workload.dtype)
    wide = {n: None if t is None else t.to(torch.promote_types(dtype, torch.float32)) for n, t in inputs.items()}
    of_weight = torch.float32 if is_mixed(workload) else dtype
    return {n: t.to(dtype if n == "dx" else of_weight) for n, t in _reference(wide, workload).items()}


def _inputs(centred: bool) -> Callable[[Workload, str, torch.Generator], Tensors]:
    def inputs(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
        import torch

        rows, cols, dtype = workload.dim("rows"), workload.dim("cols"), getattr(torch, workload.dtype)

        def normal() -> torch.Tensor:
            return draw("normal", rows, cols, dtype, generator).to(dtype)

        opmath = torch.promote_types(dtype, torch.float32)
        x = draw(data, rows, cols, dtype, generator).to(dtype)
        wide = x.double()
        mean = wide.mean(1) if centred else wide.new_zeros(rows)
        rstd = ((wide - mean[:, None]).square().mean(1) + _EPS).rsqrt()
        weight = 1 + 0.5 * torch.randn(cols, dtype=opmath, generator=generator, device=generator.device)
        return {
            "dy": normal(),
            "x": x.contiguous(),
            "weight": _of_its_dtype(weight, workload) if workload.option("weight") else None,
            **({"mean": mean.to(opmath)} if centred else {}),
            "rstd": rstd.to(opmath),
            "dresidual": normal() if workload.option("dresidual") else None,
        }

    return inputs


def _of_its_dtype(weight: torch.Tensor, workload: Workload) -> torch.Tensor | None:
    import torch

    return just_below_half_a_step(weight, workload) if is_mixed(workload) else weight.to(getattr(torch, workload.dtype))


def _cases(options: Mapping[str, Value]) -> Callable[[str, Workload], list[Case]]:
    def cases(target: str, workload: Workload) -> list[Case]:
        """Few rows each, so that all of them together take a few milliseconds."""
        own = dict(workload.options)

        def case(data: str, rows: int, cols: int = workload.dim("cols"), offset: int = 0, **changed: Value) -> Case:
            problem = Workload.of({"rows": rows, "cols": cols}, workload.dtype, {**own, **changed})
            extras = [f"{k}={v}" for k, v in changed.items()] + ([f"offset={offset}"] if offset else [])
            return Case(" ".join([data, f"{rows}x{cols}", *extras]), problem, data, offset)

        found = [case(data, 67) for data in DATA] + [case("normal", rows) for rows in (1, 2, 33)]
        found.append(case("normal", 6, offset=1))
        if target == "cuda":  # more rows than a persistent grid takes at once, and no whole number of its steps
            found.append(case("normal", min(65_539, max(523, (9 << 20) // workload.dim("cols") | 1))))
        else:  # one library serves all columns and options
            found += [case("normal", 5, cols) for cols in (1, 3, 17, 64, 127, 769, 1023, 1025)]
            found += [case("large_mean", 33, 769), case("normal", 3, 1023, offset=3), case("normal", 1027, 96)]
            turned = {n: v for n, v in options.items() if isinstance(v, bool)}
            found += [case("normal", 19, 65, **{**turned, n: not v}) for n, v in turned.items() if n != "weight"]
            found.append(case("normal", 7, 129, weight=False, dweight=False))
            found.append(case("normal", 7, 129, **{n: n == "weight" for n in turned}))
        return found

    return cases
