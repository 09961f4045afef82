"""Rows of x in the order of an index, times a weight of any dtype, with their signs: arguments of three dtypes and a
structure of 128 bytes, which has addresses and sizes."""

import torch

from evo.problem.kernel import Argument, Kernel, LaunchPlan, draw
from evo.problem.space import Ordinal, Space


def inputs(workload, data, generator):
    rows, cols, device = workload.dim("rows"), workload.dim("cols"), generator.device
    weight = 1 + torch.rand(cols, generator=generator, device=device)
    return {
        "x": draw(data, rows, cols, getattr(torch, workload.dtype), generator).to(getattr(torch, workload.dtype)),
        "index": torch.randint(0, max(rows, 1), (rows,), generator=generator, device=device),
        "weight": weight.to(getattr(torch, workload.option("weight_dtype"))),
    }


def reference(inputs, workload):
    y = inputs["x"][inputs["index"]] * inputs["weight"] * workload.option("factor")
    return {"y": y, "sign": (y > 0).to(torch.int8) - (y < 0).to(torch.int8)}


KERNEL = Kernel(
    name="picked",
    dtypes={"cpu": ("float32", "float64"), "cuda": ("float32", "float64")},
    options={"weight_dtype": "float32", "factor": 1.5},
    choices={"weight_dtype": ("float32", "float64", "int8")},
    compile_time_dims={"cpu": ("weight_dtype",), "cuda": ("weight_dtype",)},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="index", kind="input", dtype="int64", shape=("rows",)),
        Argument(name="weight", kind="input", dtype="weight_dtype", shape=("cols",)),
        Argument(name="y", kind="output", shape=("rows", "cols")),
        Argument(name="sign", kind="output", dtype="int8", shape=("rows", "cols")),
        Argument(
            name="place", kind="structure", layout="PPqqd88x", fields=("x", "weight", "rows", "cols", "factor"), alignment=64
        ),
        Argument(name="rows", kind="scalar", dtype="int64"),
        Argument(name="cols", kind="scalar", dtype="int32"),
    ),
    inputs=inputs,
    reference=reference,
    workloads=dict.fromkeys(("cpu", "cuda"), ("rows=64,cols=96,dtype=float32,weight_dtype=float64",)),
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2, 4)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=64, tiles=(("rows", 1),)),
)
