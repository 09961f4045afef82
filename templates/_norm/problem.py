"""The problem of the forward kernels of the norms, of which LayerNorm's is `centred` and RMSNorm's is not.

Per row, y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(mean of (x - mean)^2 + eps). RMSNorm: mean = 0, no bias.

Layout: x, residual, y and sum are rows x cols, contiguous, of one dtype with weight and bias (cols each, both optional),
which with weight_dtype=float32 are float32 beside 16 bits; statistics are float64 for that dtype, else float32. Options, off
at first: residual, a tensor that is added to x, whose sum, rounded to the dtype, takes the place of x; sum, that sum as a
second output; mean and rstd [rows], for a backward. Kernels that are `added` always have both of the former, which are no
options of theirs.
The CUDA template is specialised for the number of columns and these options, the CPU template for the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evo.problem.kernel import (
    DATA,
    Argument,
    Baseline,
    Case,
    Dimension,
    Kernel,
    LaunchPlan,
    Limits,
    Tensors,
    Tolerance,
    Workload,
)
from evo.problem.space import Space, Value

from . import cpu_space, cuda_shape, cuda_space
from .weights import CHOICES, fault, is_mixed, just_below_half_a_step

if TYPE_CHECKING:
    import torch


def norm(name: str, title: str, *, centred: bool, added: bool = False) -> Kernel:
    function = "layer_norm" if centred else "rms_norm"
    saved = ("mean", "rstd") if centred else ("rstd",)
    vectors = ("weight", "bias") if centred else ("weight",)
    extras = saved if added else ("residual", "sum", *saved)

    def torchs(inputs: Tensors, workload: Workload) -> torch.Tensor:
        import torch

        given = [inputs[n] for n in vectors]
        eps, x = float(workload.option("eps")), _normalised(inputs, workload)
        if is_mixed(workload):  # PyTorch refuses some of these; then a copy in float32 is what there is
            x = x.float()
        y = getattr(torch.nn.functional, function)(x, (workload.dim("cols"),), *given, eps)
        return y.to(getattr(torch, workload.dtype))

    derived = Kernel(
        name=name,
        title=title,
        dimensions=(Dimension(name="rows", low=0, high=2**31 - 1, batch=True), Dimension(name="cols", low=1, high=65_536)),
        dtypes={"cuda": ("float16", "bfloat16", "float32"), "cpu": ("float32", "bfloat16", "float64")},
        options={
            **dict.fromkeys(vectors, True),
            **dict.fromkeys(extras, False),
            "eps": 1e-5 if centred else 1e-6,
            "weight_dtype": "same",
        },
        choices=CHOICES,
        option_min={"eps": 0.0},
        compile_time_dims={"cuda": ("cols", *extras, *CHOICES), "cpu": (*extras, *CHOICES)},
        arguments=(
            Argument(name="x", kind="input", shape=("rows", "cols")),
            Argument(name="residual", kind="input", shape=("rows", "cols"), optional=not added),
            *(Argument(name=n, kind="input", dtype="weight_dtype", shape=("cols",), optional=True) for n in vectors),
            Argument(name="y", kind="output", shape=("rows", "cols")),
            Argument(name="sum", kind="output", shape=("rows", "cols"), optional=not added),
            *(Argument(name=n, kind="output", dtype="opmath", shape=("rows",), optional=True) for n in saved),
        ),
        reference=lambda inputs, workload: _reference(inputs, workload, centred),
        same_dtype=lambda inputs, workload: {"y": torchs(inputs, workload), "mean": _mean_of_sums(inputs, workload)},
        own_tolerance=_tolerance,
        data=(*DATA, "tight", "denormal", "needle", "permuted"),
        baselines=(Baseline(name="torch", role="reference", call=torchs),),
        workloads={
            "cuda": ("rows=4096,cols=4096,dtype=float16",),
            "cpu": ("rows=4096,cols=1024,dtype=float32", "rows=4096,cols=1024,dtype=bfloat16"),
        },
        space=_space,
        plan=_plan,
        inactive={"cuda": cuda_shape.INACTIVE, "cpu": cpu_space.INACTIVE},
        compile_flags=_compile_flags,
        validate=lambda w: fault(w) or ("" if added or not w.option("sum") or w.option("residual") else _NO_RESIDUAL),
        replaces="" if added else f"torch.nn.functional.{function}",
    )

    def inputs(workload: Workload, data: str, generator: torch.Generator) -> Tensors:
        made = derived.inputs(workload, data, generator)
        return {**made, **{n: just_below_half_a_step(made[n], workload) for n in vectors}}

    def cases(target: str, workload: Workload) -> list[Case]:
        return [*derived.cases(target, workload), *_cases(target, workload, vectors)]

    return replace(derived, inputs=inputs, cases=cases)


def _normalised(inputs: Tensors, workload: Workload) -> torch.Tensor:
    """What the statistics are of."""
    import torch

    x, residual = inputs["x"], inputs["residual"]
    assert x is not None
    return x if residual is None else (x + residual).to(getattr(torch, workload.dtype))


def _reference(inputs: Tensors, workload: Workload, centred: bool) -> dict[str, torch.Tensor]:
    """The mean of a row with Inf is NaN, as PyTorch's."""
    x, weight, bias = _normalised(inputs, workload).double(), inputs["weight"], inputs.get("bias")
    mean = x.mean(dim=1, keepdim=True) if centred else x.new_zeros((len(x), 1))
    rstd = ((x - mean).square().mean(dim=1, keepdim=True) + float(workload.option("eps"))).rsqrt()
    y = (x - mean) * rstd * (1 if weight is None else weight)
    y = y if bias is None else y + bias
    return {"y": y, "sum": x, "rstd": rstd[:, 0], "mean": mean.where(~rstd.isnan(), rstd)[:, 0]}


_NO_RESIDUAL = "sum needs residual"
_EPS_OF_SUMS = 32
"""Of the sums' dtype, in a mean over the mean size of its terms; twice that is allowed. A thread adds 64 elements of
float32, and more of 16 bits, one after another before it reduces, and roundings beside an outlier are all half of an eps of
its. A term that is left out shows above that."""


def _mean_of_sums(inputs: Tensors, workload: Workload) -> torch.Tensor:
    """As far off as a sum of such terms may be. PyTorch's own is no measure: one order of summation is lucky where another
    of equal merit is not."""
    import torch

    x = _normalised(inputs, workload)
    eps, x = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps, x.double()
    return x.mean(dim=1) + _EPS_OF_SUMS * eps * x.abs().mean(dim=1)


def _tolerance(workload: Workload, output: str) -> Tolerance | None:
    """What rows of 16 bits are multiplied by is as exact as they can show: to half of a rounding."""
    eps = {"float16": 2**-10, "bfloat16": 2**-7}.get(workload.dtype)
    return Tolerance(atol=0.0, rtol=eps / 4) if output == "rstd" and eps else None


def _cases(target: str, workload: Workload, vectors: Sequence[str]) -> list[Case]:
    """Further ones: rows that are lost where denormal numbers are zero; rows of several blocks; of a weight and a bias each
    by itself, where they have digits more than the result, so many that a loss of these shows."""
    cols = workload.dim("cols")
    further: list[tuple[str, int, int, dict[str, Value]]] = [("denormal", 3, cols, {"eps": 1e-12})]
    if target == "cpu":
        further.append(("needle", 3, 4097, {}))
    if is_mixed(workload):
        others = ({v: v == n for v in vectors} for n in vectors)
        further += [("normal", max(67, 8192 // cols), cols, other) for other in others]
    found = []
    for data, rows, cols, changed in further:
        problem = Workload.of({"rows": rows, "cols": cols}, workload.dtype, {**dict(workload.options), **changed})
        told = " ".join(f"{n}={v}" for n, v in ({"eps": workload.option("eps")} | changed).items())
        found.append(Case(f"{data} {rows}x{cols} {told}", problem, data))
    return found


def _space(target: str, workload: Workload, limits: Limits) -> Space:
    return (cuda_space if target == "cuda" else cpu_space).space(workload, limits)


def _plan(target: str, point: Mapping[str, Value], workload: Workload) -> LaunchPlan:
    return cuda_shape.plan(point, workload) if target == "cuda" else LaunchPlan(threads=1)


def _compile_flags(target: str, point: Mapping[str, Value]) -> tuple[str, ...]:
    """The CPU template spells its vectors out: what the compiler adds costs compile time and registers."""
    return ("-fno-tree-vectorize", "-fno-tree-slp-vectorize") if target == "cpu" else ()
