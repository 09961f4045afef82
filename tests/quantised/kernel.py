"""Rows scaled to what 8 bits hold, y = x * gain / scale of the row: 8-bit outputs beside float32 scales."""

from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Ordinal, Space

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def reference(inputs, workload):
    x = inputs["x"] * inputs["gain"].to(inputs["x"].dtype)
    scale = x.abs().amax(1).nan_to_num(1.0).clamp(1e-20, 1e20)
    return {"y": x / scale[:, None] * LARGEST[workload.option("y_dtype")], "scale": scale}


KERNEL = Kernel(
    name="quantised",
    dtypes={"cuda": ("float16", "bfloat16"), "cpu": ("float32",)},
    options={"y_dtype": "float8_e4m3fn"},
    choices={"y_dtype": tuple(LARGEST)},
    compile_time_dims=dict.fromkeys(("cuda", "cpu"), ("y_dtype",)),
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="gain", kind="input", dtype="float8_e4m3fn", shape=("cols",)),
        Argument(name="y", kind="output", dtype="y_dtype", shape=("rows", "cols")),
        Argument(name="scale", kind="output", dtype="float32", shape=("rows",)),
    ),
    reference=reference,
    workloads={
        "cuda": tuple(f"rows=512,cols=1024,dtype=bfloat16,y_dtype={dtype}" for dtype in LARGEST),
        "cpu": tuple(f"rows=64,cols=40,dtype=float32,y_dtype={dtype}" for dtype in LARGEST),
    },
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2, 4)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=128, tiles=(("rows", 1),)),
)
