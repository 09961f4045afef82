"""RMSNorm forward: y = x / sqrt(mean(x * x) + eps) * weight, per row (Zhang & Sennrich 2019, arXiv:1910.07467).

Layout: as LayerNorm's, without a bias. Options, off at first: residual, a tensor that is added to x, whose sum, rounded to
the dtype, takes the place of x; sum, that sum as a second output; rstd, float32 [rows], what rows are multiplied by.
"""

from __future__ import annotations

from evo.problem.kernel import DATA, Argument, Baseline, Dimension, Kernel, Tensors, Workload

from ._norm import INACTIVE, MAX_COLS, compile_flags, plan, required, space


def _normalised(inputs: Tensors, workload: Workload):
    """What the rows' squares are of."""
    import torch

    if (residual := inputs["residual"]) is None:
        return required(inputs, "x")
    return (required(inputs, "x") + residual).to(getattr(torch, workload.dtype))


def _torch_rms_norm(inputs: Tensors, workload: Workload):
    from torch.nn.functional import rms_norm

    return rms_norm(_normalised(inputs, workload), (workload.dim("cols"),), inputs["weight"], float(workload.option("eps")))


def _reference(inputs: Tensors, workload: Workload):
    x, weight = _normalised(inputs, workload).double(), inputs["weight"]
    rstd = (x.square().mean(dim=1, keepdim=True) + float(workload.option("eps"))).rsqrt()
    return {"y": x * rstd * (1 if weight is None else weight), "sum": x, "rstd": rstd[:, 0]}


KERNEL = Kernel(
    name="rmsnorm",
    title="RMSNorm forward",
    dimensions=(Dimension(name="rows", low=0, high=2**31 - 1), Dimension(name="cols", low=1, high=MAX_COLS)),
    dtypes={"cuda": ("float16", "bfloat16", "float32"), "cpu": ("float32", "bfloat16")},
    options={"weight": True, "residual": False, "sum": False, "rstd": False, "eps": 1e-6},
    option_min={"eps": 0.0},
    compile_time_dims={"cuda": ("cols", "residual", "sum", "rstd"), "cpu": ("residual", "sum", "rstd")},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="residual", kind="input", shape=("rows", "cols"), optional=True),
        Argument(name="weight", kind="input", shape=("cols",), optional=True),
        Argument(name="y", kind="output", shape=("rows", "cols")),
        Argument(name="sum", kind="output", shape=("rows", "cols"), optional=True),
        Argument(name="rstd", kind="output", dtype="float32", shape=("rows",), optional=True),
    ),
    reference=_reference,
    data=(*DATA, "needle", "permuted"),
    baselines=(Baseline(name="torch", role="reference", call=_torch_rms_norm),),
    workloads={
        "cuda": ("rows=4096,cols=4096,dtype=float16",),
        "cpu": ("rows=4096,cols=1024,dtype=float32", "rows=4096,cols=1024,dtype=bfloat16"),
    },
    space=space,
    plan=plan,
    inactive=INACTIVE,
    compile_flags=compile_flags,
    validate=lambda workload: "sum needs residual" if workload.option("sum") and not workload.option("residual") else "",
    replaces="torch.nn.functional.rms_norm",
)
