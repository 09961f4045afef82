"""y = 2 x, with candidates that break in every way a candidate can: parameter `fault`.

`number` changes nothing but the source, so that there are as many different candidates as one likes.
"""

from evo.problem.kernel import Argument, Case, Dimension, Kernel, LaunchPlan, Tolerance, Workload
from evo.problem.space import Categorical, Ordinal, Space

BUILD_FAULTS = ("compile_error", "compile_bomb", "compile_memory")

CPU_FAULTS = (
    "wrong",
    "no_entry",
    "illegal_address",
    "abort",
    "assertion",
    "trap",
    "divide_by_zero",
    "stack_overflow",
    "exit",
    "kill",
    "stop",
    "spin",
    "sleep",
    "leak",
    "allocate",
    "change_folder",
    "close_descriptors",
    "scribble_on_descriptors",
    "fork",
    "fork_and_return",
    "daemon",
)

CUDA_FAULTS = (
    "wrong",
    "illegal_address",
    "misaligned_address",
    "assertion",
    "trap",
    "stack_overflow",
    "spin",
    "deadlock",
    "grid_too_large",
    "grid_endless",
    "too_many_threads",
)

HARMLESS = ("none", "print")
"""The output is right and nothing is harmed."""

_THREADS = 256


def faults(target: str) -> tuple[str, ...]:
    own = CPU_FAULTS if target == "cpu" else CUDA_FAULTS
    return (*HARMLESS, *(f for f in BUILD_FAULTS if target == "cpu" or f != "compile_memory"), *own)


def plan(target, point, workload):
    if target == "cpu":
        return LaunchPlan(threads=1)
    threads = 2048 if point["fault"] == "too_many_threads" else _THREADS
    blocks = {"grid_too_large": 1 << 31, "grid_endless": (1 << 31) - 1}.get(point["fault"], 1)
    return LaunchPlan(threads=threads, tiles=(("n", _THREADS),), blocks_per_tile=blocks)


def workload(n):
    return Workload.of({"n": n}, "float32")


KERNEL = Kernel(
    name="chaos",
    title="Twice, or a disaster",
    entry="twice",
    dimensions=(Dimension(name="n", low=0, high=1 << 24),),
    dtypes={"cpu": ("float32",), "cuda": ("float32",)},
    arguments=(Argument(name="x", kind="input", shape=("n",)), Argument(name="y", kind="output", shape=("n",))),
    tolerance={"float32": Tolerance(atol=1e-6, rtol=1e-6)},
    reference=lambda inputs, workload: {"y": 2 * inputs["x"]},
    data=("normal",),
    cases=lambda target, w: [Case(f"normal {n}", workload(n), "normal") for n in (5, 64, 1001)],
    workloads={"cpu": (workload(1 << 16),), "cuda": (workload(1 << 20),)},
    space=lambda target, workload, limits: Space(
        parameters=(
            Categorical(name="fault", values=faults(target), why="what goes wrong", structural=True),
            Ordinal(name="number", values=tuple(range(1 << 14)), why="another candidate"),
        ),
        constraints=(),
        default={"fault": "none", "number": 0},
    ),
    plan=plan,
)
