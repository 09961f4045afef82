"""The search space of cpu.cpp.j2."""

from __future__ import annotations

from evo.problem.kernel import Limits, Workload
from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Space, Value, When

__all__ = ["INACTIVE", "space"]

INACTIVE: dict[str, Value] = {"rows_per_task": 16, "exponentials": "again"}


def space(workload: Workload, limits: Limits) -> Space:
    cores, half = limits.multiprocessors, workload.dtype == "bfloat16"
    parallel = (When(parameter="threads", values=(cores,)),) if cores > 1 else ()
    parameters: list[Parameter] = [
        Ordinal(
            name="threads",
            values=(1, cores) if cores > 1 else (1,),
            why="waking a second core costs more than a small problem",
        ),
        Categorical(
            name="algorithm",
            values=("two_pass", "online"),
            structural=True,
            why="one pass for maximum and sum instead of two, at the price of more exponentials",
        ),
        Categorical(
            name="exponentials",
            values=("again", "kept"),
            structural=True,
            when=(When(parameter="algorithm", values=("two_pass",)),),
            why="compute them a second time, or write them and read them back",
        ),
        Ordinal(name="simd_bits", values=(128, 256, 512), why="wide registers, where they do not lower the clock"),
        Ordinal(name="unroll", values=(1, 2, 4, 8), why="independent sums and maxima against registers and the tail"),
        Categorical(
            name="exponential",
            values=("native", "integer"),
            structural=True,
            why="AVX-512 reduces and scales in one instruction each; bits of integers do it anywhere",
        ),
        # Errors of 3e-6, 9e-8 and 2e-9: the first shows in float32.
        Ordinal(name="degree", values=(4, 5, 6) if half else (5, 6), why="of the polynomial for 2^x"),
    ]
    if parallel:
        parameters[1:1] = [
            Ordinal(
                name="rows_per_task",
                values=(0, 1, 4, 16, 64),
                structural=True,
                when=parallel,
                why="equal shares (0) stream best; small tasks on demand level out a busy core",
            )
        ]
    default = {
        "threads": cores,
        "algorithm": "two_pass",
        "exponentials": "again" if half else "kept",
        "simd_bits": 256,
        "unroll": 4,
        "exponential": "native",
        "degree": 4 if half else 5,
    }
    exact = Constraint(
        name="online_is_exact",
        holds=lambda p: half or p["algorithm"] == "two_pass" or p["degree"] == 6,
        reason="a running sum is multiplied by many exponentials, whose errors add up: float32 results show them",
    )
    default |= {"rows_per_task": 0} if parallel else {}
    return Space(parameters=tuple(parameters), constraints=(exact,), default=default)
