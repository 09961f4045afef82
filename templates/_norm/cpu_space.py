"""The search space of forward.cpp.j2: parameters, constraints and default."""

from __future__ import annotations

from evo.problem.kernel import Limits, Workload
from evo.problem.space import Categorical, Constraint, Ordinal, Parameter, Point, Space, Value, When

__all__ = ["INACTIVE", "space"]

INACTIVE: dict[str, Value] = {
    "schedule": "blocks",
    "rows_per_task": 16,
    "block": 1024,
    "unpack": "widen",
    "rounding": "integer",
}


def _parameters(dtype: str, cores: int, statistics: tuple[Value, ...]) -> tuple[Parameter, ...]:
    parallel = When(parameter="threads", values=tuple(t for t in (1, cores) if t > 1))
    found: list[Parameter] = [
        # One thread or all: libgomp ends and restarts its workers when the size of a team changes between calls.
        Ordinal(
            name="threads",
            values=(1, cores) if cores > 1 else (1,),
            why="waking a second core costs more than a small problem",
        ),
    ]
    if cores > 1:
        found += [
            Categorical(
                name="schedule",
                values=("blocks", "interleaved", "dynamic"),
                structural=True,
                when=(parallel,),
                why="contiguous blocks stream best, dynamic tasks level out a busy core",
            ),
            Ordinal(
                name="rows_per_task",
                values=(1, 4, 16, 64),
                when=(parallel, When(parameter="schedule", values=("interleaved", "dynamic"))),
                why="small tasks balance, large ones cost less to hand out",
            ),
        ]
    found += [
        Ordinal(name="simd_bits", values=(128, 256, 512), why="wide registers, where they do not lower the clock"),
        Ordinal(name="rows_in_flight", values=(1, 2, 4), why="independent rows hide the latency of additions"),
        Ordinal(name="unroll", values=(1, 2, 4, 8), why="independent accumulators within a row"),
        Categorical(
            name="statistics",
            values=statistics,
            structural=True,
            why="one pass over the row instead of two, at the price of more arithmetic",
        ),
        Ordinal(
            name="block",
            values=(1024, 4096),
            when=(When(parameter="statistics", values=("chan",)),),
            why="elements whose moments are merged at once: must stay in the first-level cache",
        ),
        Categorical(
            name="row",
            values=("reread", "buffer"),
            structural=True,
            why="convert once into a buffer, or read the cached row again",
        ),
        Categorical(
            name="stores",
            values=("normal", "non_temporal"),
            structural=True,
            why="writing past the cache saves reading the output first",
        ),
        Ordinal(name="prefetch_bytes", values=(0, 512, 1024, 2048), why="ahead of the hardware's own prefetcher"),
        Categorical(name="prefetch_next", values=(False, True), why="the next row arrives in time"),
    ]
    if dtype == "bfloat16":
        found += [
            Categorical(
                name="unpack",
                values=("widen", "even_odd"),
                structural=True,
                why="even_odd splits a vector by shift and mask, without moving across lanes",
            ),
            Categorical(
                name="rounding",
                values=("integer", "native"),
                when=(
                    When(parameter="unpack", values=("widen",)),
                    When(parameter="simd_bits", values=(256, 512)),
                ),
                why="AVX-512 BF16 rounds in one instruction",
            ),
        ]
    return tuple(found)


def _constraints(dtype: str) -> tuple[Constraint, ...]:
    return (
        Constraint(
            name="streamed_pack_is_a_vector",
            holds=lambda p: not (
                p["stores"] == "non_temporal"
                and dtype == "bfloat16"
                and p.get("unpack", "widen") == "widen"
                and p["simd_bits"] == 128
            ),
            reason="a non-temporal store moves at least 16 bytes",
        ),
        Constraint(
            name="rows_in_flight_divide_a_task",
            holds=lambda p: "rows_per_task" not in p or int(p["rows_per_task"]) >= int(p["rows_in_flight"]),
            reason="a task of fewer rows than are in flight never runs the interleaved code",
        ),
        Constraint(
            name="accumulators_fit_the_registers",
            holds=lambda p: int(p["rows_in_flight"]) * int(p["unroll"]) * 2 <= 32,
            reason="more than 32 vectors of running sums spill",
        ),
        Constraint(
            name="shifted_keeps_small_squares",
            holds=lambda p: p["statistics"] != "shifted" or int(p["simd_bits"]) * int(p["unroll"]) >= 512,
            reason="a few running sums would lose the small squares beside an outlier's",
        ),
    )


def space(workload: Workload, limits: Limits) -> Space:
    statistics: tuple[Value, ...] = ("two_pass", "shifted", "chan") if "bias" in dict(workload.options) else ("squares",)
    default: Point = {
        "threads": limits.multiprocessors,
        "simd_bits": 256,
        "rows_in_flight": 1,
        "unroll": 4,
        "statistics": statistics[0],
        "row": "reread",
        "stores": "normal",
        "prefetch_bytes": 0,
        "prefetch_next": False,
    }
    if limits.multiprocessors > 1:
        default["schedule"] = "blocks"
    if workload.dtype == "bfloat16":
        default |= {"unpack": "widen", "rounding": "integer"}
    return Space(
        parameters=_parameters(workload.dtype, limits.multiprocessors, statistics),
        constraints=_constraints(workload.dtype),
        default=default,
    )
