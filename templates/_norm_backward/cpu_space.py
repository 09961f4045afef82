"""The search space of cpu.cpp.j2, and its launches."""

from __future__ import annotations

from evo.problem.kernel import LaunchPlan, Limits, Workload
from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Space, Value

__all__ = ["INACTIVE", "plan", "space"]

INACTIVE: dict[str, Value] = {"stores": "normal"}


def plan(finish: str) -> tuple[LaunchPlan, ...]:
    """The same for all options, which are not compiled in: the second launch does nothing where no sum is asked for."""
    return LaunchPlan(threads=1), LaunchPlan(threads=1, entry=finish)


def space(workload: Workload, limits: Limits) -> Space:
    cores = limits.multiprocessors
    stores: tuple[Parameter, ...] = (
        Categorical(
            name="stores",
            values=("normal", "non_temporal"),
            structural=True,
            why="writing dx past the cache saves reading it first",
        ),
    )
    stores = stores if workload.dtype != "bfloat16" else ()  # of which a vector may be shorter than such a store
    return Space(
        parameters=(
            Ordinal(
                name="chunks",
                values=(1, *(cores * n for n in (1, 2, 4, 8) if cores * n > 1)),
                why="one leaves the other cores idle; more than there are level out a busy one",
            ),
            Ordinal(name="simd_bits", values=(128, 256, 512), why="wide registers, where they do not lower the clock"),
            Ordinal(name="rows_in_flight", values=(1, 2, 4), why="rows that share a visit to the sums and weights"),
            Ordinal(name="unroll", values=(1, 2, 4), why="independent sums within a row hide the latency of additions"),
            *stores,
            Categorical(
                name="second_pass",
                values=("recompute", "factored"),
                structural=True,
                why="dx from x and g as its definition, or as a g + b x + c with coefficients of the row",
            ),
        ),
        constraints=(
            Constraint(
                name="sums_fit_the_registers",
                holds=lambda p: int(p["rows_in_flight"]) * int(p["unroll"]) <= 8,
                reason="more running sums spill",
            ),
        ),
        default={
            "chunks": cores,
            "simd_bits": 256,
            "rows_in_flight": 1,
            "unroll": 2,
            **{p.name: "normal" for p in stores},
            "second_pass": "recompute",
        },
    )
