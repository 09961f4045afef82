"""Softmax forward over the last axis: y = exp(x - max(x)) / sum(exp(x - max(x))) per row, as PyTorch computes it: a row
that holds NaN or +Inf, or nothing but -Inf, becomes NaN."""

from evo.problem.kernel import DATA, Argument, Baseline, Dimension, Kernel, LaunchPlan, Tolerance, draw

from . import cpu_space, cuda_space


def reference(inputs, workload):
    weights = (inputs["x"] - inputs["x"].amax(dim=1, keepdim=True)).exp()
    return weights / weights.sum(dim=1, keepdim=True)


def call_torch(inputs, workload):
    return inputs["x"].softmax(dim=-1)


def inputs(workload, data, generator):
    import torch

    dtype, rows, cols = getattr(torch, workload.dtype), workload.dim("rows"), workload.dim("cols")
    x = draw("normal" if data in ("masked", "extreme") else data, rows, cols, dtype, generator)
    if data == "masked":  # no element, all of them, or any share of a row is -Inf
        share = torch.linspace(0, 1.25, rows, device=x.device)[:, None]
        x[torch.rand(x.shape, generator=generator, device=x.device) < share] = float("-inf")
    elif data == "extreme":  # of the dtype: products and differences overflow; any, all equal, two equal signs, one above 0
        x = x / x.abs().amax(dim=1, keepdim=True)
        x[1::4] = x[1::4, :1].sign()
        x[2::4] = x[2::4].sign()
        x[3::4, 1:] = 0
        power = 1 - torch.arange(rows, device=x.device) // 4 % 4 / 4
        x = x * torch.finfo(dtype).max ** power[:, None]
    return {"x": x.to(dtype)}


_KEEPS = ("componentwise", "overflow", "zero_sign")

KERNEL = Kernel(
    name="softmax",
    title="Softmax forward",
    dtypes={"cuda": ("float16", "bfloat16", "float32"), "cpu": ("float32", "bfloat16")},
    dimensions=(Dimension(name="rows", low=0, high=2**31 - 1, batch=True), Dimension(name="cols", low=1, high=65_536)),
    compile_time_dims={"cuda": ("cols",)},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="y", kind="output", shape=("rows", "cols")),
    ),
    reference=reference,
    inputs=inputs,
    data=(*(name for name in DATA if name != "tiny"), "masked", "extreme"),  # tiny: all results are 1 / cols
    # Relative, as results are about 1 / cols. For 16 bits, atol is the distance of float16's smallest numbers. Exponentials
    # of hardware are 0 where they would be denormal in float32.
    tolerance={
        "float16": Tolerance(atol=6e-8, rtol=1e-3, keeps=("denormals", "rounding", *_KEEPS)),
        "bfloat16": Tolerance(atol=6e-8, rtol=6e-3, keeps=("rounding", *_KEEPS)),
        "float32": Tolerance(atol=1e-10, rtol=2e-5, keeps=_KEEPS),
    },
    baselines=(Baseline(name="torch", role="reference", call=call_torch),),
    workloads={
        "cuda": ("rows=4096,cols=4096,dtype=float16",),
        "cpu": ("rows=4096,cols=1024,dtype=float32", "rows=4096,cols=1024,dtype=bfloat16"),
    },
    space=lambda target, workload, limits: (cuda_space if target == "cuda" else cpu_space).space(workload, limits),
    plan=lambda target, point, w: cuda_space.plan(point, w) if target == "cuda" else LaunchPlan(threads=1),
    inactive={"cuda": cuda_space.INACTIVE, "cpu": cpu_space.INACTIVE},
    replaces="torch.nn.functional.softmax",
)
